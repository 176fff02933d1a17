//! Fields of a configuration, with errors that name the field and its value.

use std::fmt::Display;

use device::{Activation, RopeStyle};
use serde_json::{Map, Value};

use super::{
    config::{DecoderConfig, LayerConfig, MAX_LAYERS, MAX_SIZE, NormConfig},
    rope::{RopeConfig, RopeScaling},
};
use crate::{
    EngineError,
    weights::{Metadata, MetadataValue, Role, WeightId, WeightSource},
};

const ROPE_TYPES: &str = "default, linear, llama3, longrope";

/// An object of config.json. Absent and null are the same.
#[derive(Clone, Copy)]
pub struct HfFields<'a> {
    /// The file, for errors.
    pub what: &'a str,
    /// The object.
    pub object: &'a Map<String, Value>,
}

impl<'a> HfFields<'a> {
    /// An error about a field.
    pub fn error(&self, key: &str, why: impl Display) -> EngineError {
        EngineError::Load(format!("{}: `{key}` {why}", self.what))
    }

    fn get(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|v| !v.is_null())
    }

    fn typed<T>(&self, key: &str, wanted: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>, EngineError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| {
            let shown: String = value.to_string().chars().take(80).collect();
            self.error(key, format!("is {shown}; it must be {wanted}"))
        })
    }

    /// A size.
    pub fn size(&self, key: &str) -> Result<Option<usize>, EngineError> {
        self.typed(key, &format!("an integer from 0 to {MAX_SIZE}"), |v| {
            v.as_u64().filter(|n| *n <= MAX_SIZE as u64).map(|n| n as usize)
        })
    }

    /// A size that must be there.
    pub fn required_size(&self, key: &str) -> Result<usize, EngineError> {
        self.size(key)?.ok_or_else(|| self.error(key, "is missing"))
    }

    /// A finite number.
    pub fn number(&self, key: &str) -> Result<Option<f64>, EngineError> {
        self.typed(key, "a finite number", |v| v.as_f64().filter(|n| n.is_finite()))
    }

    /// A positive number that f32 holds, as a limit for tanh.
    pub fn softcap(&self, key: &str) -> Result<Option<f32>, EngineError> {
        self.typed(key, "a positive number", |v| v.as_f64().map(|n| n as f32).filter(|n| n.is_finite() && *n > 0.0))
    }

    /// A boolean.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, EngineError> {
        self.typed(key, "true or false", Value::as_bool)
    }

    /// Text.
    pub fn text(&self, key: &str) -> Result<Option<&'a str>, EngineError> {
        self.typed(key, "a string", Value::as_str)
    }

    /// A list of texts.
    pub fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>, EngineError> {
        self.typed(key, "a list of strings", |v| v.as_array()?.iter().map(Value::as_str).collect())
    }

    /// A list of zeros and ones, one a layer.
    pub fn flags(&self, key: &str, num_layers: usize) -> Result<Option<Vec<bool>>, EngineError> {
        let flag = |value: &Value| value.as_u64().filter(|n| *n < 2).map(|n| n == 1);
        self.typed(key, &format!("a list of {num_layers} zeros and ones"), |v| {
            v.as_array().filter(|list| list.len() == num_layers)?.iter().map(flag).collect()
        })
    }

    fn numbers(&self, key: &str) -> Result<Option<Vec<f32>>, EngineError> {
        self.typed(key, "a list of numbers", |v| v.as_array()?.iter().map(|n| n.as_f64().map(|n| n as f32)).collect())
    }

    fn child(&self, key: &str) -> Result<Option<Self>, EngineError> {
        Ok(self.typed(key, "an object", Value::as_object)?.map(|object| Self { what: self.what, object }))
    }

    fn token_ids(&self, key: &str) -> Result<Vec<u32>, EngineError> {
        let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
        let ids = self.typed(key, "a token id or a list of them", |v| match v {
            Value::Array(list) => list.iter().map(id).collect(),
            one => id(one).map(|id| vec![id]),
        })?;
        Ok(ids.unwrap_or_default())
    }

    /// The rotation of a layer type. `rope_parameters` holds everything in newer files, by layer type where there are several;
    /// older ones have `rope_scaling` and `rope_theta`.
    pub fn rope(&self, layer_type: &str, head_dim: usize) -> Result<RopeConfig, EngineError> {
        self.partial_rope(layer_type, head_dim, 1.0)
    }

    fn partial_rope(&self, layer_type: &str, head_dim: usize, usual_part: f64) -> Result<RopeConfig, EngineError> {
        let mut fields = match self.child("rope_parameters")? {
            Some(fields) => Some(fields),
            None => self.child("rope_scaling")?,
        };
        if let Some(nested) = fields.map(|f| f.child(layer_type)).transpose()?.flatten() {
            fields = Some(nested);
        }
        let number = |key: &str| match fields.map(|f| f.number(key)).transpose()?.flatten() {
            Some(value) => Ok(Some(value)),
            None => self.number(key),
        };
        let theta = number("rope_theta")?.unwrap_or(10_000.0);
        let rotary_dim = (number("partial_rotary_factor")?.unwrap_or(usual_part) * head_dim as f64) as usize;
        let scaling = match fields {
            Some(fields) => self.rope_scaling(&fields)?,
            None => RopeScaling::None,
        };
        Ok(RopeConfig { style: RopeStyle::Neox, theta, rotary_dim, scaling })
    }

    fn rope_scaling(&self, fields: &Self) -> Result<RopeScaling, EngineError> {
        let kind = match fields.text("rope_type")? {
            Some(kind) => kind,
            None => fields.text("type")?.unwrap_or("default"),
        };
        let needed = |key: &str| fields.number(key)?.ok_or_else(|| fields.error(key, format!("is missing for {kind} rope")));
        let list = |key: &str| fields.numbers(key)?.ok_or_else(|| fields.error(key, format!("is missing for {kind} rope")));
        let max_positions = self.required_size("max_position_embeddings")?;
        let original = match fields.size("original_max_position_embeddings")? {
            Some(n) => n,
            None => self.size("original_max_position_embeddings")?.unwrap_or(max_positions),
        };
        Ok(match kind {
            "default" => RopeScaling::None,
            "linear" => RopeScaling::Linear(needed("factor")?),
            "llama3" => RopeScaling::Llama3 {
                factor: needed("factor")?,
                low_freq_factor: needed("low_freq_factor")?,
                high_freq_factor: needed("high_freq_factor")?,
                original_max_positions: original,
            },
            "longrope" | "su" => {
                let stretch = max_positions as f64 / original as f64;
                let attention_factor = match fields.number("attention_factor")? {
                    Some(factor) => factor,
                    None if stretch <= 1.0 => 1.0,
                    None => (1.0 + stretch.ln() / (original as f64).ln()).sqrt(),
                };
                RopeScaling::LongRope {
                    short: list("short_factor")?,
                    long: list("long_factor")?,
                    original_max_positions: original,
                    attention_factor: attention_factor as f32,
                }
            }
            other => return Err(fields.error("rope_type", format!("is `{other}`; implemented: {ROPE_TYPES}"))),
        })
    }

    /// What all architectures name alike; every layer sees everything and rotates alike.
    pub fn decoder(&self, architecture: &'static str) -> Result<DecoderConfig, EngineError> {
        self.partly_rotated(architecture, 1.0)
    }

    /// The same, where that part of each head rotates unless the file has another.
    pub fn partly_rotated(&self, architecture: &'static str, usual_part: f64) -> Result<DecoderConfig, EngineError> {
        let hidden_size = self.required_size("hidden_size")?;
        let num_heads = self.required_size("num_attention_heads")?;
        let head_dim = match self.size("head_dim")? {
            Some(n) => n,
            None if num_heads > 0 && hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
            None => return Err(self.error("hidden_size", format!("is {hidden_size}, not a multiple of {num_heads} heads"))),
        };
        let num_layers = self.required_size("num_hidden_layers")?;
        if num_layers > MAX_LAYERS {
            return Err(self.error("num_hidden_layers", format!("is {num_layers}; at most {MAX_LAYERS} are supported")));
        }
        let heads = [num_heads, self.size("num_key_value_heads")?.unwrap_or(num_heads), head_dim];
        let layer = LayerConfig::new(heads, self.required_size("intermediate_size")?, self.activation()?);
        Ok(DecoderConfig {
            architecture,
            vocab_size: self.required_size("vocab_size")?,
            hidden_size,
            max_position_embeddings: self.required_size("max_position_embeddings")?,
            norm: NormConfig { eps: self.number("rms_norm_eps")?.unwrap_or(1e-6) as f32, ..NormConfig::default() },
            ropes: vec![self.partial_rope("full_attention", head_dim, usual_part)?],
            layers: vec![layer; num_layers],
            tie_word_embeddings: self.flag("tie_word_embeddings")?.unwrap_or(false),
            eos_token_ids: self.token_ids("eos_token_id")?,
            ..DecoderConfig::default()
        })
    }

    fn activation(&self) -> Result<Activation, EngineError> {
        let name = match self.text("hidden_activation")? {
            Some(name) => Some(name),
            None => self.text("hidden_act")?,
        };
        match name.unwrap_or("silu") {
            "silu" | "swish" => Ok(Activation::Silu),
            "gelu_pytorch_tanh" | "gelu_new" | "gelu_fast" => Ok(Activation::GeluTanh),
            "gelu" => Ok(Activation::Gelu),
            other => Err(self.error("hidden_act", format!("is `{other}`; implemented: silu, gelu, gelu_pytorch_tanh"))),
        }
    }

    /// Which layers have the window, as `layer_types` says; `None` when it is absent.
    pub fn sliding_layers(&self, num_layers: usize) -> Result<Option<Vec<bool>>, EngineError> {
        let Some(types) = self.texts("layer_types")? else { return Ok(None) };
        if types.len() != num_layers {
            return Err(self.error("layer_types", format!("has {} entries for {num_layers} layers", types.len())));
        }
        let sliding = |name: &&str| match *name {
            "sliding_attention" => Ok(true),
            "full_attention" => Ok(false),
            other => Err(self.error("layer_types", format!("has `{other}`; implemented: full_attention, sliding_attention"))),
        };
        types.iter().map(sliding).collect::<Result<_, _>>().map(Some)
    }
}

/// Metadata of a GGUF file, keys under the architecture's prefix.
#[derive(Clone, Copy)]
pub struct GgufFields<'a> {
    /// The file, for errors.
    pub what: &'a str,
    /// `general.architecture`.
    pub prefix: &'a str,
    /// The metadata.
    pub metadata: &'a Metadata,
    /// The tensors; some of them are configuration.
    pub weights: &'a WeightSource,
}

impl GgufFields<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    /// An error about a key under the prefix.
    pub fn error(&self, name: &str, why: impl Display) -> EngineError {
        EngineError::Load(format!("{}: `{}` {why}", self.what, self.key(name)))
    }

    /// A size. A list with one value for every layer counts as that value.
    pub fn size(&self, name: &str) -> Result<Option<usize>, EngineError> {
        let value = match self.metadata.get(&self.key(name)) {
            None => return Ok(None),
            Some(MetadataValue::Int(n)) => *n,
            Some(MetadataValue::Ints(list)) if list.windows(2).all(|w| w[0] == w[1]) && !list.is_empty() => i128::from(list[0]),
            Some(MetadataValue::Ints(_)) => return Err(self.error(name, "differs from layer to layer, which is not supported")),
            Some(_) => return Err(self.error(name, "is not an integer")),
        };
        match usize::try_from(value) {
            Ok(n) if n <= MAX_SIZE => Ok(Some(n)),
            _ => Err(self.error(name, format!("is {value}; it must be from 0 to {MAX_SIZE}"))),
        }
    }

    fn required_size(&self, name: &str) -> Result<usize, EngineError> {
        self.size(name)?.ok_or_else(|| self.error(name, "is missing"))
    }

    /// A finite number.
    pub fn number(&self, name: &str) -> Result<Option<f64>, EngineError> {
        let key = self.key(name);
        if self.metadata.get(&key).is_none() {
            return Ok(None);
        }
        match self.metadata.f64(&key) {
            Some(n) if n.is_finite() => Ok(Some(n)),
            Some(n) => Err(self.error(name, format!("is {n}; it must be finite"))),
            None => Err(self.error(name, "is not a number")),
        }
    }

    fn rope(&self, style: RopeStyle, head_dim: usize) -> Result<RopeConfig, EngineError> {
        let rotary_dim = self.size("rope.dimension_count")?.unwrap_or(head_dim);
        let vector = |part| self.weights.optional_vector(WeightId::global(part), rotary_dim / 2);
        let kind = self.metadata.str(&self.key("rope.scaling.type")).unwrap_or("none");
        let scaling = match (vector(Role::RopeFactorsShort)?, vector(Role::RopeFactorsLong)?, vector(Role::RopeFreqs)?) {
            (Some(short), Some(long), _) => RopeScaling::LongRope {
                short,
                long,
                original_max_positions: self.required_size("rope.scaling.original_context_length")?,
                attention_factor: self.number("rope.scaling.attn_factor")?.unwrap_or(1.0) as f32,
            },
            (_, _, Some(factors)) => RopeScaling::Factors(factors),
            _ => match kind {
                "none" => RopeScaling::None,
                "linear" => RopeScaling::Linear(self.number("rope.scaling.factor")?.unwrap_or(1.0)),
                other => {
                    return Err(self.error("rope.scaling.type", format!("is `{other}`; implemented: none, linear, longrope")));
                }
            },
        };
        Ok(RopeConfig { style, theta: self.number("rope.freq_base")?.unwrap_or(10_000.0), rotary_dim, scaling })
    }

    /// The key of the epsilon says which norm it is.
    fn norm(&self) -> Result<NormConfig, EngineError> {
        if let Some(eps) = self.number("attention.layer_norm_epsilon")? {
            return Ok(NormConfig::layer(Some(eps)));
        }
        Ok(NormConfig { eps: self.number("attention.layer_norm_rms_epsilon")?.unwrap_or(1e-6) as f32, ..NormConfig::default() })
    }

    /// What all architectures name alike; every layer rotates alike, and has the window if there is one.
    pub fn decoder(&self, architecture: &'static str, style: RopeStyle) -> Result<DecoderConfig, EngineError> {
        let hidden_size = self.required_size("embedding_length")?;
        let num_heads = self.required_size("attention.head_count")?;
        let head_dim = match self.size("attention.key_length")? {
            Some(n) => n,
            None if num_heads > 0 && hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
            None => {
                return Err(self.error("embedding_length", format!("is {hidden_size}, not a multiple of {num_heads} heads")));
            }
        };
        if let Some(n) = self.size("attention.value_length")?
            && n != head_dim
        {
            return Err(self.error("attention.value_length", format!("is {n}; it must equal the key length {head_dim}")));
        }
        let vocab_size = self.weights.vocab_size()?;
        if let Some(n) = self.size("vocab_size")?
            && n != vocab_size
        {
            return Err(self.error("vocab_size", format!("is {n}, but the token embedding has {vocab_size} rows")));
        }
        let num_layers = self.required_size("block_count")?;
        if num_layers > MAX_LAYERS {
            return Err(self.error("block_count", format!("is {num_layers}; at most {MAX_LAYERS} are supported")));
        }
        let token = |key: &str| self.metadata.usize(key).and_then(|id| u32::try_from(id).ok());
        let eos = ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"].into_iter().filter_map(token).collect();
        let heads = [num_heads, self.size("attention.head_count_kv")?.unwrap_or(num_heads), head_dim];
        let layer = LayerConfig::new(heads, self.required_size("feed_forward_length")?, Activation::Silu);
        let mut config = DecoderConfig {
            architecture,
            vocab_size,
            hidden_size,
            max_position_embeddings: self.required_size("context_length")?,
            norm: self.norm()?,
            ropes: vec![self.rope(style, head_dim)?],
            layers: vec![layer; num_layers],
            tie_word_embeddings: !self.weights.contains(WeightId::global(Role::Output)),
            eos_token_ids: eos,
            ..DecoderConfig::default()
        };
        if let Some(scale) = self.number("attention.scale")? {
            config = config.with_attention(|attention| attention.scale = scale as f32);
        }
        let window = self.size("attention.sliding_window")?.filter(|w| *w > 0);
        Ok(config.with_windows(|_| window))
    }
}

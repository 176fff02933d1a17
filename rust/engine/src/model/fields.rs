//! Fields of a configuration, with errors that name the field and its value.

use std::{cell::RefCell, collections::BTreeSet, fmt::Display, rc::Rc};

use device::{Activation, ExpertGroups, RopeStyle, RouterScore};
use serde_json::{Map, Value, json};

use super::{
    config::{DecoderConfig, ExpertsConfig, LayerConfig, MAX_LAYERS, MAX_SIZE, NormConfig, SharedConfig},
    rope::{RopeConfig, RopeScaling},
};
use crate::{
    EngineError,
    json::PYTHON_FLOAT,
    keys,
    weights::{Metadata, MetadataValue, Role, WeightId, WeightSource, hub::HubFormat},
};

mod bare;
mod rope;
pub use rope::yarn_mscale;

/// Fields of any file. What is read of them may be absent.
pub trait Fields {
    /// A field; `None` when it is absent.
    fn value(&self, key: &str) -> Option<Value>;

    /// An error about a field.
    fn error(&self, key: &str, why: impl Display) -> EngineError;

    /// A field that `read` makes something of; an error says that it must be what is wanted.
    fn typed<T>(&self, key: &str, wanted: &str, read: impl Fn(&Value) -> Option<T>) -> Result<Option<T>, EngineError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        read(&value).map(Some).ok_or_else(|| {
            let shown: String = value.to_string().chars().take(80).collect();
            self.error(key, format!("is {shown}; it must be {wanted}"))
        })
    }

    /// A size.
    fn size(&self, key: &str) -> Result<Option<usize>, EngineError> {
        self.typed(key, &format!("an integer from 0 to {MAX_SIZE}"), |v| {
            v.as_u64().filter(|n| *n <= MAX_SIZE as u64).map(|n| n as usize)
        })
    }

    /// A size that must be there.
    fn required_size(&self, key: &str) -> Result<usize, EngineError> {
        self.size(key)?.ok_or_else(|| self.error(key, "is missing"))
    }

    /// A finite number.
    fn number(&self, key: &str) -> Result<Option<f64>, EngineError> {
        self.typed(key, "a finite number", |v| v.as_f64().filter(|n| n.is_finite()))
    }

    /// A positive number that f32 holds, as a limit for tanh.
    fn softcap(&self, key: &str) -> Result<Option<f32>, EngineError> {
        self.typed(key, "a positive number", |v| v.as_f64().map(|n| n as f32).filter(|n| n.is_finite() && *n > 0.0))
    }

    /// A boolean.
    fn flag(&self, key: &str) -> Result<Option<bool>, EngineError> {
        self.typed(key, "true or false", Value::as_bool)
    }

    /// Checks that a text, if it is there, is the one that is implemented.
    fn only_text(&self, key: &str, implemented: &str) -> Result<(), EngineError> {
        match self.text(key)? {
            Some(other) if other != implemented => Err(self.error(key, format!("is `{other}`; implemented: {implemented}"))),
            _ => Ok(()),
        }
    }

    /// Text.
    fn text(&self, key: &str) -> Result<Option<String>, EngineError> {
        self.typed(key, "a string", |v| v.as_str().map(str::to_owned))
    }

    /// A llama of the sizes that these fields say: width, query heads, key and value heads, elements of a head, width of the
    /// feed-forward network, layers, context. It has no rotation and no vocabulary yet.
    fn sizes(
        &self,
        [hidden, heads, kv_heads, head, ffn, layers, context]: [&str; 7],
        activation: Activation,
    ) -> Result<DecoderConfig, EngineError> {
        let hidden_size = self.required_size(hidden)?;
        let num_heads = self.required_size(heads)?;
        let head_dim = match self.size(head)? {
            Some(n) => n,
            None if num_heads > 0 && hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
            None => return Err(self.error(hidden, format!("is {hidden_size}, not a multiple of {num_heads} heads"))),
        };
        let num_layers = self.required_size(layers)?;
        if num_layers > MAX_LAYERS {
            return Err(self.error(layers, format!("is {num_layers}; at most {MAX_LAYERS} are supported")));
        }
        let heads = [num_heads, self.size(kv_heads)?.unwrap_or(num_heads), head_dim];
        Ok(DecoderConfig {
            hidden_size,
            max_position_embeddings: self.required_size(context)?,
            layers: vec![LayerConfig::new(heads, self.required_size(ffn)?, activation); num_layers],
            ..DecoderConfig::default()
        })
    }
}

/// An object of config.json. Absent and null are the same.
#[derive(Clone)]
pub struct HfFields<'a> {
    /// The file, for errors.
    pub what: &'a str,
    /// The object.
    pub object: Map<String, Value>,
    /// Where in the file it is: empty, or the keys to it with a point behind each.
    prefix: String,
    /// The keys that were asked for, with their prefix.
    read: Rc<RefCell<BTreeSet<String>>>,
}

impl Fields for HfFields<'_> {
    fn value(&self, key: &str) -> Option<Value> {
        self.read.borrow_mut().insert(format!("{}{key}", self.prefix));
        self.object.get(key).filter(|v| !v.is_null()).cloned()
    }

    fn error(&self, key: &str, why: impl Display) -> EngineError {
        EngineError::Load(format!("{}: `{}{key}` {why}", self.what, self.prefix))
    }
}

impl<'a> HfFields<'a> {
    /// All of a file.
    pub fn new(what: &'a str, object: Map<String, Value>) -> Self {
        Self { what, object, prefix: String::new(), read: Rc::default() }
    }
}

impl HfFields<'_> {
    /// With what keys of the file mean where they are absent: an object. A key that is null stays so, but that of an object.
    #[must_use]
    pub fn with_defaults(&self, defaults: &Value) -> Self {
        let mut fields = self.clone();
        for (key, value) in defaults.as_object().into_iter().flatten() {
            let entry = fields.object.entry(key).or_insert_with(|| value.clone());
            if entry.is_null() && value.is_object() {
                *entry = value.clone();
            }
        }
        fields
    }

    /// With this base, and Llama 3.1's scaling by such a factor where the file says nothing of rotation.
    #[must_use]
    pub fn with_llama3_rope(&self, theta: f64, factor: f64) -> Self {
        let mut usual = json!({"rope_theta": theta});
        if ["rope_parameters", "rope_scaling"].iter().all(|key| self.value(key).is_none()) {
            usual["rope_scaling"] = json!({
                "rope_type": "llama3", "rope_theta": theta, "factor": factor, "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            });
        }
        self.with_defaults(&usual)
    }

    /// With the values of keys under the names that other families have for them.
    #[must_use]
    pub fn renamed(&self, names: &[(&str, &str)]) -> Self {
        let mut fields = self.clone();
        for (own, usual) in names {
            fields.object.insert((*usual).to_owned(), self.value(own).unwrap_or_default());
        }
        fields
    }

    /// Networks are four times as wide as the residual stream where no key says it.
    pub fn set_usual_width(&mut self) -> Result<(), EngineError> {
        if self.size("intermediate_size")?.is_none() {
            let width = self.required_size("hidden_size")?.saturating_mul(4);
            self.object.insert("intermediate_size".into(), width.into());
        }
        Ok(())
    }

    /// With the values of keys also under the names that other families have for them, where these are absent.
    #[must_use]
    pub fn also_called(&self, names: &[(&str, &str)]) -> Self {
        let mut fields = self.clone();
        for (own, usual) in names {
            if let (Some(value), None) = (self.value(own), self.value(usual)) {
                fields.object.insert((*usual).to_owned(), value);
            }
        }
        fields
    }

    /// The keys that nobody knows, once an architecture has read its own. An [`EngineError::Load`] for one that asks for what is
    /// not computed.
    pub fn unknown_keys(&self) -> Result<Vec<String>, EngineError> {
        let read = self.read.borrow();
        let check = |fields: &Self, table| {
            keys::check(table, &fields.object, &read, &fields.prefix).map_err(|(key, why)| fields.error(&key, why))
        };
        let mut unknown = check(self, keys::CONFIG)?;
        for key in ["rope_parameters", "rope_scaling"] {
            let Some(rope) = read.contains(key).then(|| self.object_under(key)).flatten() else { continue };
            unknown.extend(check(&rope, keys::ROPE)?);
            for layer_type in ["full_attention", "sliding_attention"] {
                if let Some(rope) = rope.object_under(layer_type) {
                    unknown.extend(check(&rope, keys::ROPE)?);
                }
            }
        }
        Ok(unknown)
    }

    fn object_under(&self, key: &str) -> Option<Self> {
        let object = self.object.get(key)?.as_object()?.clone();
        Some(Self { object, prefix: format!("{}{key}.", self.prefix), read: Rc::clone(&self.read), ..*self })
    }

    /// A list of texts.
    pub fn texts(&self, key: &str) -> Result<Option<Vec<String>>, EngineError> {
        self.typed(key, "a list of strings", |v| v.as_array()?.iter().map(|v| v.as_str().map(str::to_owned)).collect())
    }

    /// A list of zeros and ones, one a layer. An empty one is absent, as in the files of Llama 4.
    pub fn flags(&self, key: &str, num_layers: usize) -> Result<Option<Vec<bool>>, EngineError> {
        let flag = |value: &Value| value.as_u64().filter(|n| *n < 2).map(|n| n == 1);
        let flags = self.typed(key, &format!("a list of {num_layers} zeros and ones"), |v| {
            let list = v.as_array().filter(|list| list.is_empty() || list.len() == num_layers)?;
            list.iter().map(flag).collect::<Option<Vec<_>>>()
        })?;
        Ok(flags.filter(|flags| !flags.is_empty()))
    }

    /// So many numbers.
    pub fn some_numbers<const N: usize>(&self, key: &str) -> Result<Option<[f32; N]>, EngineError> {
        self.typed(key, &format!("a list of {N} finite numbers"), |v| {
            let list = v.as_array()?.iter().map(|n| n.as_f64().map(|n| n as f32).filter(|n| n.is_finite()));
            list.collect::<Option<Vec<_>>>()?.try_into().ok()
        })
    }

    /// A least and a largest number, which may be infinite.
    pub fn range(&self, key: &str) -> Result<Option<[f32; 2]>, EngineError> {
        let number = |v: &Value| match v.get(PYTHON_FLOAT).unwrap_or(v) {
            Value::String(text) if text == "Infinity" => Some(f32::INFINITY),
            number => number.as_f64().map(|n| n as f32),
        };
        self.typed(key, "a list of two numbers, the least first", |v| {
            v.as_array()?.iter().map(number).collect::<Option<Vec<_>>>()?.try_into().ok()
        })
    }

    fn numbers(&self, key: &str) -> Result<Option<Vec<f32>>, EngineError> {
        self.typed(key, "a list of numbers", |v| v.as_array()?.iter().map(|n| n.as_f64().map(|n| n as f32)).collect())
    }

    /// An object under a key.
    pub fn child(&self, key: &str) -> Result<Option<Self>, EngineError> {
        self.typed(key, "an object", |v| v.is_object().then_some(()))?;
        Ok(self.object_under(key))
    }

    /// How the weights are quantized. MLX says it under two names.
    pub fn quantization(&self) -> Result<Option<HubFormat>, EngineError> {
        let mut format = None;
        for key in ["quantization_config", "quantization", "compression_config"] {
            let Some(fields) = self.child(key)?.filter(|fields| !fields.object.is_empty()) else { continue };
            let read = HubFormat::read(&fields.object);
            format = format.or(read.map_err(|why| self.error(key, format!("is not supported: {why}")))?);
        }
        Ok(format)
    }

    fn token_ids(&self, key: &str) -> Result<Vec<u32>, EngineError> {
        let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
        let ids = self.typed(key, "a token id or a list of them", |v| match v {
            Value::Array(list) => list.iter().map(id).collect(),
            one => id(one).map(|id| vec![id]),
        })?;
        Ok(ids.unwrap_or_default())
    }

    /// What all architectures name alike; every layer sees everything and rotates alike.
    pub fn decoder(&self, architecture: &'static str) -> Result<DecoderConfig, EngineError> {
        let (attention, ffn) = (self.flag("attention_bias")?.unwrap_or(false), self.flag("mlp_bias")?.unwrap_or(false));
        Ok(self.partly_rotated(architecture, 1.0)?.with_layers(|layer| {
            (layer.attention.qkv_bias, layer.attention.output_bias) = (attention, attention);
            layer.ffn.set_dense(|dense| dense.bias = ffn);
        }))
    }

    /// The same, where that part of each head rotates unless the file has another.
    pub fn partly_rotated(&self, architecture: &'static str, usual_part: f64) -> Result<DecoderConfig, EngineError> {
        self.with_head("head_dim", architecture, usual_part)
    }

    /// The same, where that key has the size of a head.
    pub fn with_head(&self, head: &str, architecture: &'static str, usual_part: f64) -> Result<DecoderConfig, EngineError> {
        let keys = [
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            head,
            "intermediate_size",
            "num_hidden_layers",
            "max_position_embeddings",
        ];
        let sizes = self.sizes(keys, self.activation(Activation::Silu)?)?;
        let head_dim = sizes.largest(|layer| layer.attention.head_dim);
        Ok(DecoderConfig {
            architecture,
            vocab_size: self.required_size("vocab_size")?,
            norm: NormConfig::rms(self.number("rms_norm_eps")?),
            ropes: vec![self.rope("full_attention", head_dim, usual_part)?],
            tie_word_embeddings: self.flag("tie_word_embeddings")?.unwrap_or(false),
            eos_token_ids: self.token_ids("eos_token_id")?,
            num_mtp_layers: self.size("num_nextn_predict_layers")?.unwrap_or(0),
            ..sizes
        })
    }

    /// Which layers are mixtures of experts: each `decoder_sparse_step`th, without those that `mlp_only_layers` names (Qwen).
    pub fn sparse_layers(&self) -> Result<impl Fn(usize) -> bool + use<>, EngineError> {
        let dense = self.layers("mlp_only_layers")?.unwrap_or_default();
        let step = self.size("decoder_sparse_step")?.unwrap_or(1).max(1);
        Ok(move |layer: usize| !dense.contains(&layer) && (layer + 1).is_multiple_of(step))
    }

    /// The window, where `use_sliding_window` asks for it.
    pub fn used_window(&self) -> Result<Option<usize>, EngineError> {
        let (window, is_used) = (self.size("sliding_window")?, self.flag("use_sliding_window")?.unwrap_or(false));
        Ok(window.filter(|_| is_used))
    }

    /// What all architectures name alike, and a window over all layers.
    pub fn windowed(&self, architecture: &'static str) -> Result<DecoderConfig, EngineError> {
        let window = self.size("sliding_window")?;
        Ok(self.decoder(architecture)?.with_windows(|_| window))
    }

    /// What is between the matrices of a feed-forward network, unless the file has it.
    pub fn activation(&self, usual: Activation) -> Result<Activation, EngineError> {
        let key = if self.value("hidden_activation").is_some() { "hidden_activation" } else { "hidden_act" };
        match self.text(key)?.as_deref() {
            None => Ok(usual),
            Some("silu" | "swish") => Ok(Activation::Silu),
            Some("gelu_pytorch_tanh" | "gelu_new" | "gelu_fast") => Ok(Activation::GeluTanh),
            Some("gelu") => Ok(Activation::Gelu),
            Some("relu") => Ok(Activation::Relu),
            Some("relu2") => Ok(Activation::Relu2),
            Some(other) => Err(self.error(key, format!("is `{other}`; implemented: silu, gelu, gelu_pytorch_tanh, relu, relu2"))),
        }
    }

    /// A list of layers.
    pub fn layers(&self, key: &str) -> Result<Option<Vec<usize>>, EngineError> {
        self.typed(key, "a list of layers", |v| v.as_array()?.iter().map(|v| v.as_u64().map(|n| n as usize)).collect())
    }

    /// Which layers are recurrent: those that `layer_types` calls so, or these.
    pub fn recurrent_layers(
        &self,
        num_layers: usize,
        names: &[&str],
        usual: impl Fn(usize) -> bool,
    ) -> Result<Vec<bool>, EngineError> {
        self.layers_called("layer_types", num_layers, [&["full_attention", "attention"], names], usual)
    }

    /// Which layers have the window: as `layer_types` says, or these.
    pub fn sliding_layers(&self, num_layers: usize, usual: impl Fn(usize) -> bool) -> Result<Vec<bool>, EngineError> {
        self.layers_called("layer_types", num_layers, [&["full_attention"], &["sliding_attention"]], usual)
    }

    /// Checks keys, where they are there, for the value that is implemented: those of the code beside the hub's weights that
    /// Transformers does not look at.
    pub fn only(&self, implemented: &[(&str, Value)]) -> Result<(), EngineError> {
        for (key, known) in implemented {
            if let Some(other) = self.value(key).filter(|value| value != known) {
                return Err(self.error(key, format!("is {other}; implemented: {known}")));
            }
        }
        Ok(())
    }

    /// Which layers have experts: as `mlp_layer_types` says, or these.
    pub fn sparse_layer_types(&self, num_layers: usize, usual: impl Fn(usize) -> bool) -> Result<Vec<bool>, EngineError> {
        self.layers_called("mlp_layer_types", num_layers, [&["dense"], &["sparse"]], usual)
    }

    /// Which layers a list, with a word for each layer, calls by the second of two kinds of names; without the list, these.
    pub fn layers_called(
        &self,
        key: &str,
        num_layers: usize,
        [no, yes]: [&[&str]; 2],
        usual: impl Fn(usize) -> bool,
    ) -> Result<Vec<bool>, EngineError> {
        let Some(kinds) = self.texts(key)? else { return Ok((0..num_layers).map(usual).collect()) };
        if kinds.len() != num_layers {
            return Err(self.error(key, format!("has {} entries for {num_layers} layers", kinds.len())));
        }
        let is_called = |kind: &String| match &kind[..] {
            kind if yes.contains(&kind) => Ok(true),
            kind if no.contains(&kind) => Ok(false),
            other => Err(self.error(key, format!("has `{other}`; implemented here: {}", [no, yes].concat().join(", ")))),
        };
        kinds.iter().map(is_called).collect()
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
    /// Keys that the architecture reads by layer ([`Self::sizes_by_layer`]): elsewhere the largest of a list stands for it.
    pub by_layer: &'static [&'static str],
}

impl Fields for GgufFields<'_> {
    /// A list with the same integer for every layer counts as that integer, zeros apart.
    fn value(&self, key: &str) -> Option<Value> {
        Some(match self.metadata.get(&self.key(key))? {
            MetadataValue::Ints(list)
                if self.by_layer.contains(&key) || list.iter().filter(|n| **n != 0).collect::<BTreeSet<_>>().len() <= 1 =>
            {
                list.iter().copied().max().into()
            }
            value => value.json(),
        })
    }

    fn error(&self, key: &str, why: impl Display) -> EngineError {
        EngineError::Load(format!("{}: `{}` {why}", self.what, self.key(key)))
    }
}

impl GgufFields<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    /// A size of each layer: those of a list, or one for all.
    pub fn sizes_by_layer(&self, key: &str, num_layers: usize) -> Result<Vec<usize>, EngineError> {
        let MetadataValue::Ints(list) = self.metadata.get(&self.key(key)).unwrap_or(&MetadataValue::Bool(false)) else {
            return Ok(vec![self.required_size(key)?; num_layers]);
        };
        let sizes = list.iter().map(|n| usize::try_from(*n).ok().filter(|n| *n <= MAX_SIZE)).collect::<Option<Vec<_>>>();
        let sizes = sizes.filter(|sizes| sizes.len() >= num_layers);
        sizes.ok_or_else(|| self.error(key, format!("must be sizes from 0 to {MAX_SIZE} of {num_layers} layers")))
    }

    /// A flag of each layer, which must be there.
    pub fn flags_by_layer(&self, key: &str, num_layers: usize) -> Result<Vec<bool>, EngineError> {
        let flags = match self.metadata.get(&self.key(key)) {
            Some(MetadataValue::Bools(list)) => list.clone(),
            Some(MetadataValue::Ints(list)) => list.iter().map(|n| *n != 0).collect(),
            _ => Vec::new(),
        };
        if flags.len() < num_layers {
            return Err(self.error(key, format!("must be a list of {num_layers} flags")));
        }
        Ok(flags)
    }

    /// Which layers have a zero in a list.
    pub fn layers_without(&self, key: &str, num_layers: usize) -> Result<Vec<bool>, EngineError> {
        match self.metadata.get(&self.key(key)) {
            Some(MetadataValue::Ints(list)) if list.len() >= num_layers => Ok(list.iter().map(|n| *n == 0).collect()),
            Some(MetadataValue::Ints(list)) => {
                Err(self.error(key, format!("has {} entries for {num_layers} layers", list.len())))
            }
            _ => Ok(vec![false; num_layers]),
        }
    }

    /// Which layers have the window: as a list says, or these.
    pub fn sliding_layers(&self, num_layers: usize, usual: impl Fn(usize) -> bool) -> Result<Vec<bool>, EngineError> {
        let key = "attention.sliding_window_pattern";
        match self.metadata.get(&self.key(key)) {
            None => Ok((0..num_layers).map(usual).collect()),
            Some(MetadataValue::Bools(list)) if list.len() == num_layers => Ok(list.clone()),
            Some(_) => Err(self.error(key, format!("must be a list of {num_layers} booleans"))),
        }
    }

    fn rope(&self, style: RopeStyle, head_dim: usize) -> Result<RopeConfig, EngineError> {
        let rotary_dim = self.size("rope.dimension_count")?.unwrap_or(head_dim);
        let vector = |part| self.weights.optional_vector(WeightId::global(part), rotary_dim / 2);
        let kind = self.text("rope.scaling.type")?;
        let scaling = match (vector(Role::RopeFactorsShort)?, vector(Role::RopeFactorsLong)?, vector(Role::RopeFreqs)?) {
            (Some(short), Some(long), _) => RopeScaling::LongRope {
                short,
                long,
                original_max_positions: self.required_size("rope.scaling.original_context_length")?,
                attention_factor: self.number("rope.scaling.attn_factor")?.unwrap_or(1.0) as f32,
            },
            (_, _, Some(factors)) => RopeScaling::Factors(factors),
            _ => match kind.as_deref().unwrap_or("none") {
                "none" => RopeScaling::None,
                "linear" => RopeScaling::Linear(self.number("rope.scaling.factor")?.unwrap_or(1.0)),
                "yarn" => self.yarn()?,
                other => {
                    let why = format!("is `{other}`; implemented: none, linear, longrope, yarn");
                    return Err(self.error("rope.scaling.type", why));
                }
            },
        };
        Ok(RopeConfig { style, theta: self.number("rope.freq_base")?.unwrap_or(10_000.0), rotary_dim, scaling, axes: None })
    }

    fn yarn(&self) -> Result<RopeScaling, EngineError> {
        let factor = self.number("rope.scaling.factor")?.unwrap_or(1.0);
        // Where scores have a factor of their own, it makes up for that of the rotation.
        let is_plain = self.number("rope.scaling.yarn_log_multiplier")?.is_some_and(|multiplier| multiplier != 0.0);
        let usual = if is_plain { 1.0 } else { yarn_mscale(factor, 1.0) };
        let number =
            |key: &str, usual: f64| Ok::<f64, EngineError>(self.number(&format!("rope.scaling.{key}"))?.unwrap_or(usual));
        Ok(RopeScaling::Yarn {
            factor,
            beta_fast: number("yarn_beta_fast", 32.0)?,
            beta_slow: number("yarn_beta_slow", 1.0)?,
            original_max_positions: self.required_size("rope.scaling.original_context_length")?,
            truncate: true,
            attention_factor: (number("attn_factor", 1.0)? * usual) as f32,
        })
    }

    /// The key of the epsilon says which norm it is.
    fn norm(&self) -> Result<NormConfig, EngineError> {
        Ok(match self.number("attention.layer_norm_epsilon")? {
            Some(eps) => NormConfig::layer(Some(eps)),
            None => NormConfig::rms(self.number("attention.layer_norm_rms_epsilon")?),
        })
    }

    /// What all architectures name alike; every layer rotates alike, and has the window if there is one.
    pub fn decoder(&self, architecture: &'static str, style: RopeStyle) -> Result<DecoderConfig, EngineError> {
        if let Some(n) = self.size("expert_count")?.filter(|n| *n > 0) {
            return Err(EngineError::Architecture(format!(
                "{}: the model is a mixture of {n} experts (`{}`), and {architecture} is implemented without",
                self.what,
                self.key("expert_count")
            )));
        }
        self.decoder_of_any_kind(architecture, style)
    }

    /// The same of a mixture of experts, whose layers are dense yet.
    pub fn mixture(&self, architecture: &'static str, style: RopeStyle) -> Result<(DecoderConfig, ExpertsConfig), EngineError> {
        let config = self.decoder_of_any_kind(architecture, style)?;
        let usual = config.layers.first().map_or(0, |layer| layer.ffn.intermediate_size());
        let width = self.size("expert_feed_forward_length")?.unwrap_or(usual);
        let score = match self.size("expert_gating_func")? {
            None | Some(0 | 1) => RouterScore::Softmax,
            Some(2) => RouterScore::Sigmoid,
            Some(3) => RouterScore::SoftmaxOfChosen,
            Some(other) => return Err(self.error("expert_gating_func", format!("is {other}; implemented: 1, 2, 3"))),
        };
        let sizes = [self.required_size("expert_count")?, self.required_size("expert_used_count")?, width];
        let mut experts = ExpertsConfig::new(sizes, score).normalized(self.flag("expert_weights_norm")?.unwrap_or(false));
        experts.rule.scale = self.number("expert_weights_scale")?.filter(|scale| *scale != 0.0).unwrap_or(1.0) as f32;
        if let Some(num_groups) = self.size("expert_group_count")?.filter(|n| *n > 1) {
            let num_chosen = self.required_size("expert_group_used_count")?;
            experts.rule.groups = Some(ExpertGroups { num_groups, num_chosen, by_two_best: score == RouterScore::Sigmoid });
        }
        let shared = match self.size("expert_shared_feed_forward_length")? {
            Some(width) => Some(width),
            None => self.size("expert_shared_count")?.map(|n| n * width),
        };
        experts.shared =
            shared.filter(|n| *n > 0).map(|intermediate_size| SharedConfig { intermediate_size, is_weighted: false });
        Ok((config, experts))
    }

    fn eos_token_ids(&self) -> Vec<u32> {
        let token = |key: &str| self.metadata.usize(key).and_then(|id| u32::try_from(id).ok());
        ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"].into_iter().filter_map(token).collect()
    }

    fn decoder_of_any_kind(&self, architecture: &'static str, style: RopeStyle) -> Result<DecoderConfig, EngineError> {
        let keys = [
            "embedding_length",
            "attention.head_count",
            "attention.head_count_kv",
            "attention.key_length",
            "feed_forward_length",
            "block_count",
            "context_length",
        ];
        let sizes = self.sizes(keys, Activation::Silu)?;
        let head_dim = sizes.largest(|layer| layer.attention.head_dim);
        let vocab_size = self.weights.vocab_size()?;
        // Latent attention has values of another length.
        let is_latent = self.size("attention.kv_lora_rank")?.is_some();
        for (key, value, of) in [
            ("attention.value_length", head_dim, "the elements of a key"),
            ("vocab_size", vocab_size, "the rows of the token embedding"),
        ] {
            if is_latent && key == "attention.value_length" {
                continue;
            }
            if let Some(n) = self.size(key)?.filter(|n| *n != value) {
                return Err(self.error(key, format!("is {n}; it must be {value}, {of}")));
            }
        }
        let mut config = DecoderConfig {
            architecture,
            vocab_size,
            norm: self.norm()?,
            ropes: vec![self.rope(style, head_dim)?],
            tie_word_embeddings: !self.weights.contains(WeightId::global(Role::Output)),
            eos_token_ids: self.eos_token_ids(),
            num_mtp_layers: self.size("nextn_predict_layers")?.unwrap_or(0),
            ..sizes
        };
        // They are counted among the blocks.
        let num_layers = config.layers.len().saturating_sub(config.num_mtp_layers);
        if num_layers == 0 {
            return Err(self.error("nextn_predict_layers", format!("is {}; there are no other layers", config.num_mtp_layers)));
        }
        config.layers.truncate(num_layers);
        if let Some(scale) = self.number("attention.scale")? {
            config = config.with_layers(|layer| layer.attention.scale = scale as f32);
        }
        let window = self.size("attention.sliding_window")?.filter(|w| *w > 0);
        Ok(config.with_windows(|_| window))
    }
}

//! Llama as Meta publishes it: `params.json`, `consolidated.00.pth` and `tokenizer.model` (the format: the `llama` repository's
//! `model.py`). Read as a GGUF file would be, whose converter leaves names and the order of rows as they are here.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use device::{DType, mmap::Bytes};
use serde_json::Value;

use super::{
    gguf::{GgufFiles, Tensor},
    metadata::{Metadata, MetadataValue},
    pytorch,
    safetensors::float_dtype,
};
use crate::{EngineError, json::required_json, tokenizer::model_file};

const PARAMS: &str = "params.json";
const WEIGHTS: &str = "consolidated.00.pth";
/// Where a model of the hub has Meta's files.
const INSIDE: &str = "original";

/// How Llama 3.1 and later stretch their rope, and what they were trained with (the constants of `apply_scaling` there).
const SCALE: f64 = 8.0;
/// The same of Llama 3.2, whose text models have these widths.
const SMALL_SCALE: f64 = 32.0;
const SMALL_WIDTHS: [usize; 2] = [2048, 3072];
const LOW: f64 = 1.0;
const HIGH: f64 = 4.0;
const TRAINED: f64 = 8192.0;

/// Sizes that are believed.
const MAX_SIZE: usize = 1 << 20;

/// The folder with Meta's files: this one, or the one inside it, unless the files of the hub lie beside that.
pub(crate) fn folder_of(dir: &Path) -> Option<PathBuf> {
    let has = |dir: &Path| dir.join(PARAMS).is_file();
    if has(dir) {
        return (!dir.join("config.json").is_file()).then(|| dir.to_owned());
    }
    let inside = dir.join(INSIDE);
    (has(&inside) && !dir.join("config.json").is_file()).then_some(inside)
}

/// Opens such a folder.
///
/// # Errors
/// [`EngineError::Load`] for a missing or malformed file; [`EngineError::Tokenizer`] for its tokenizer.
pub(crate) fn open(dir: &Path) -> Result<GgufFiles, EngineError> {
    let path = dir.join(WEIGHTS);
    if !path.is_file() {
        return Err(load(
            dir,
            format!("there is a {PARAMS} and no {WEIGHTS}: of other models the folder in the hub's form is read"),
        ));
    }
    if dir.join("consolidated.01.pth").is_file() {
        let why = "the weights are in several parts, one for each of several GPUs, which are not put together here: load the model's safetensors";
        return Err(load(dir, why));
    }
    let bytes = Bytes::map_file(&path)?;
    let mut tensors = HashMap::new();
    for tensor in pytorch::read(&path, &bytes).map_err(|why| load(&path, why))? {
        let name = match gguf_name(&tensor.name) {
            Some(Known::Named(name)) => name,
            Some(Known::Unused) => continue,
            None => return Err(load(&path, format!("tensor `{}` is no part of a Llama model", tensor.name))),
        };
        let Some(dtype) = float_dtype(tensor.dtype) else {
            return Err(load(&path, format!("tensor `{}` has type {:?}; F32, F16 and BF16 are read", tensor.name, tensor.dtype)));
        };
        let dims = tensor.shape.iter().rev().copied().collect();
        if tensors.insert(name, Tensor::new(dims, dtype, tensor.bytes)).is_some() {
            return Err(load(&path, format!("tensor `{}` is there twice", tensor.name)));
        }
    }
    let params = Params { path: dir.join(PARAMS), values: required_json(&dir.join(PARAMS))? };
    let (mut metadata, factors) = params.metadata(&tensors)?;
    if let Some(factors) = factors {
        let bytes = factors.iter().flat_map(|factor: &f32| factor.to_le_bytes()).collect();
        tensors.insert("rope_freqs.weight".to_owned(), Tensor::new(vec![factors.len()], DType::F32, Bytes::from_vec(bytes)));
    }
    let tokenizer = dir.join("tokenizer.model");
    if tokenizer.is_file() {
        metadata.extend(model_file::read(&tokenizer, params.is_scaled()?)?);
    }
    Ok(GgufFiles::of_tensors(&path, Metadata::new(metadata), tensors, bytes.watch()))
}

/// What becomes of a tensor by Meta's name.
pub(super) enum Known {
    Named(String),
    /// It follows from the configuration.
    Unused,
}

/// GGUF's name of a tensor; `None` for one that Llama does not have.
pub(super) fn gguf_name(name: &str) -> Option<Known> {
    if name == "rope.freqs" {
        return Some(Known::Unused);
    }
    let global = [("tok_embeddings.weight", "token_embd"), ("norm.weight", "output_norm"), ("output.weight", "output")];
    if let Some((_, gguf)) = global.into_iter().find(|(meta, _)| *meta == name) {
        return Some(Known::Named(format!("{gguf}.weight")));
    }
    let (layer, role) = name.strip_prefix("layers.")?.split_once('.')?;
    let layer: u32 = layer.parse().ok()?;
    let roles = [
        ("attention.wq.weight", "attn_q"),
        ("attention.wk.weight", "attn_k"),
        ("attention.wv.weight", "attn_v"),
        ("attention.wo.weight", "attn_output"),
        ("attention_norm.weight", "attn_norm"),
        ("feed_forward.w1.weight", "ffn_gate"),
        ("feed_forward.w2.weight", "ffn_down"),
        ("feed_forward.w3.weight", "ffn_up"),
        ("ffn_norm.weight", "ffn_norm"),
    ];
    if role == "attention.inner_attention.rope.freqs" {
        return Some(Known::Unused);
    }
    let (_, gguf) = roles.into_iter().find(|(meta, _)| *meta == role)?;
    Some(Known::Named(format!("blk.{layer}.{gguf}.weight")))
}

/// params.json.
struct Params {
    path: PathBuf,
    values: Value,
}

impl Params {
    fn size(&self, key: &str) -> Result<Option<usize>, EngineError> {
        match &self.values[key] {
            Value::Null => Ok(None),
            value => match value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| (1..=MAX_SIZE).contains(n)) {
                Some(size) => Ok(Some(size)),
                None => Err(load(&self.path, format!("`{key}` is {value}; it must be a whole number from 1 to {MAX_SIZE}"))),
            },
        }
    }

    fn needed(&self, key: &str) -> Result<usize, EngineError> {
        self.size(key)?.ok_or_else(|| load(&self.path, format!("`{key}` is missing")))
    }

    fn real(&self, key: &str, default: f64) -> Result<f64, EngineError> {
        match &self.values[key] {
            Value::Null => Ok(default),
            value => value.as_f64().ok_or_else(|| load(&self.path, format!("`{key}` is {value}; it must be a number"))),
        }
    }

    /// Whether the rope is that of Llama 3.1 and later.
    fn is_scaled(&self) -> Result<bool, EngineError> {
        match &self.values["use_scaled_rope"] {
            Value::Null => Ok(false),
            Value::Bool(is_scaled) => Ok(*is_scaled),
            value => Err(load(&self.path, format!("`use_scaled_rope` is {value}; it must be true or false"))),
        }
    }

    /// What a GGUF file would say, and the factors of a rope that is stretched.
    #[allow(clippy::type_complexity, reason = "two things that are made of one another")]
    fn metadata(
        &self,
        tensors: &HashMap<String, Tensor>,
    ) -> Result<(HashMap<String, MetadataValue>, Option<Vec<f32>>), EngineError> {
        // Those that are known change nothing, or follow from the tensors.
        const KNOWN: [&str; 12] = [
            "dim",
            "n_layers",
            "n_heads",
            "n_kv_heads",
            "vocab_size",
            "multiple_of",
            "ffn_dim_multiplier",
            "norm_eps",
            "rope_theta",
            "use_scaled_rope",
            "max_batch_size",
            "max_seq_len",
        ];
        let object = self.values.as_object().ok_or_else(|| load(&self.path, "not a JSON object"))?;
        if let Some(key) = object.keys().find(|key| !KNOWN.contains(&key.as_str())) {
            return Err(load(&self.path, format!("`{key}` is not known: only Llama's text models are read in this form")));
        }
        let (dim, num_heads) = (self.needed("dim")?, self.needed("n_heads")?);
        let rows_of = |name: &str| tensors.get(name).and_then(|tensor| tensor.dims().get(1).copied());
        let inner = rows_of("blk.0.ffn_gate.weight");
        let inner = inner.ok_or_else(|| load(&self.path, "the weights have no `layers.0.feed_forward.w1.weight`"))?;
        let is_scaled = self.is_scaled()?;
        let theta = self.real("rope_theta", 10_000.0)?;
        let epsilon = self.real("norm_eps", 1e-5)?;
        // Llama 3.1, Code Llama, Llama 3, Llama 1, Llama 2.
        let trained = match () {
            () if is_scaled => 131_072,
            () if theta >= 1e6 => 16_384,
            () if theta >= 5e5 => 8192,
            () if epsilon < 1e-5 => 2048,
            () => 4096,
        };
        let int = |value: usize| MetadataValue::Int(value as i128);
        let mut metadata: HashMap<String, MetadataValue> = [
            ("general.architecture", MetadataValue::String("llama".into())),
            ("llama.block_count", int(self.needed("n_layers")?)),
            ("llama.context_length", int(self.size("max_seq_len")?.unwrap_or(trained))),
            ("llama.embedding_length", int(dim)),
            ("llama.feed_forward_length", int(inner)),
            ("llama.attention.head_count", int(num_heads)),
            ("llama.attention.head_count_kv", int(self.size("n_kv_heads")?.unwrap_or(num_heads))),
            ("llama.attention.layer_norm_rms_epsilon", MetadataValue::Float(epsilon)),
            ("llama.rope.freq_base", MetadataValue::Float(theta)),
        ]
        .map(|(key, value)| (key.to_owned(), value))
        .into();
        // Llama 2 says -1: as many as the embedding has.
        if let Some(rows) = rows_of("token_embd.weight") {
            metadata.insert("llama.vocab_size".into(), int(rows));
        }
        let factors = is_scaled
            .then(|| rope_factors(dim / num_heads, theta, if SMALL_WIDTHS.contains(&dim) { SMALL_SCALE } else { SCALE }));
        Ok((metadata, factors))
    }
}

/// What the frequencies of a rope of Llama 3.1 are divided by.
fn rope_factors(head_dim: usize, theta: f64, scale: f64) -> Vec<f32> {
    let factor = |index: usize| {
        let wavelength = 2.0 * std::f64::consts::PI * theta.powf(2.0 * index as f64 / head_dim as f64);
        let (short, long) = (TRAINED / HIGH, TRAINED / LOW);
        let between = (TRAINED / wavelength - LOW) / (HIGH - LOW);
        if wavelength < short {
            1.0
        } else if wavelength > long {
            scale
        } else {
            1.0 / ((1.0 - between) / scale + between)
        }
    };
    (0..head_dim / 2).map(|index| factor(index) as f32).collect()
}

fn load(path: &Path, why: impl std::fmt::Display) -> EngineError {
    EngineError::Load(format!("{}: {why}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_waves_are_stretched_and_short_ones_are_not() {
        let factors = rope_factors(128, 500_000.0, 8.0);
        assert_eq!((factors.len(), factors[0], factors[63]), (64, 1.0, 8.0));
        // Wave 32 has 2 pi sqrt(500,000) = 4442.9 tokens, of 8192 that there were: 0.2813 of the way between.
        assert!((factors[32] - 2.6939).abs() < 1e-3, "{}", factors[32]);
        assert!(rope_factors(64, 500_000.0, 32.0).ends_with(&[32.0]));
    }
}

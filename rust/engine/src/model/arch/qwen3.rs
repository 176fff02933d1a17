//! Qwen 3: each query and key head is normalised.

use device::RopeStyle;

use super::{Architecture, qwen2::with_windows};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, QkNorm},
        fields::{GgufFields, HfFields},
    },
};

pub(super) const ARCHITECTURE: Architecture =
    Architecture { model_types: &["qwen3"], class: "Qwen3ForCausalLM", gguf: "qwen3", names: &[], from_hf, from_gguf };

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    with_windows(with_norms(fields.decoder("qwen3")?), fields)
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    Ok(with_norms(fields.decoder("qwen3", RopeStyle::Neox)?))
}

fn with_norms(config: DecoderConfig) -> DecoderConfig {
    config.with_attention(|attention| attention.qk_norm = Some(QkNorm::Heads))
}

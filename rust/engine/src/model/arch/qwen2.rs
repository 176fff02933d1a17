//! Qwen 2 and 2.5: biases on q, k and v; a window over the upper layers where asked for.

use device::RopeStyle;

use super::Architecture;
use crate::{
    EngineError,
    model::{
        config::DecoderConfig,
        fields::{GgufFields, HfFields},
    },
};

pub(super) const ARCHITECTURE: Architecture =
    Architecture { model_types: &["qwen2"], class: "Qwen2ForCausalLM", gguf: "qwen2", names: &[], from_hf, from_gguf };

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    with_windows(with_bias(fields.decoder("qwen2")?), fields)
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    Ok(with_bias(fields.decoder("qwen2", RopeStyle::Neox)?))
}

fn with_bias(config: DecoderConfig) -> DecoderConfig {
    config.with_attention(|attention| attention.qkv_bias = true)
}

/// Qwen's rule: no window unless `use_sliding_window`; then the layers that `layer_types` names, else those from `max_window_layers` on.
pub(super) fn with_windows(config: DecoderConfig, fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let sliding = fields.sliding_layers(config.layers.len())?;
    let first = fields.size("max_window_layers")?.unwrap_or(28);
    let used = fields.flag("use_sliding_window")?.unwrap_or(false);
    let window = if used { fields.size("sliding_window")? } else { None };
    Ok(config.with_windows(|i| window.filter(|_| sliding.as_ref().map_or(i >= first, |s| s[i]))))
}

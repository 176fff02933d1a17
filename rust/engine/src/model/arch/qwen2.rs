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
    Architecture { model_types: &["qwen2"], class: "Qwen2ForCausalLM", gguf: "qwen2", from_hf, from_gguf };

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let mut config = fields.decoder("qwen2")?;
    config.qkv_bias = true;
    set_windows(&mut config, fields)?;
    Ok(config)
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    Ok(DecoderConfig { qkv_bias: true, ..fields.decoder("qwen2", RopeStyle::Neox)? })
}

/// Qwen's rule: no window unless `use_sliding_window`; then the layers that `layer_types` names, else those from `max_window_layers` on.
pub(super) fn set_windows(config: &mut DecoderConfig, fields: &HfFields<'_>) -> Result<(), EngineError> {
    let sliding = fields.sliding_layers(config.layers.len())?;
    let first = fields.size("max_window_layers")?.unwrap_or(28);
    if fields.flag("use_sliding_window")?.unwrap_or(false) {
        let window = fields.size("sliding_window")?;
        config.set_windows(|i| window.filter(|_| sliding.as_ref().map_or(i >= first, |s| s[i])));
    }
    Ok(())
}

//! Command R7B and Command A: as Command R, but most layers have a window, and the others do not rotate.

use super::{Architecture, cohere};
use crate::{
    EngineError,
    model::{
        config::DecoderConfig,
        fields::{Fields, GgufFields, HfFields},
    },
};

/// Every fourth layer sees everything.
const INTERVAL: usize = 4;
const WINDOW: usize = 4096;

pub(super) const ARCHITECTURE: Architecture =
    Architecture { model_types: &["cohere2"], class: "Cohere2ForCausalLM", gguf: "cohere2", names: &[], from_hf, from_gguf };

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let config = cohere::read_hf("cohere2", fields)?;
    let interval = fields.size("sliding_window_pattern")?.unwrap_or(INTERVAL).max(1);
    let sliding = fields.sliding_layers(config.layers.len(), |layer| !(layer + 1).is_multiple_of(interval))?;
    let window = fields.size("sliding_window")?.unwrap_or(WINDOW);
    Ok(with_windows(config, window, |layer| sliding[layer]))
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let config = cohere::read_gguf("cohere2", fields)?;
    let window = fields.size("attention.sliding_window")?.unwrap_or(WINDOW);
    Ok(with_windows(config, window, |layer| !(layer + 1).is_multiple_of(INTERVAL)))
}

fn with_windows(mut config: DecoderConfig, window: usize, slides: impl Fn(usize) -> bool) -> DecoderConfig {
    for (index, layer) in config.layers.iter_mut().enumerate() {
        layer.attention.rope = slides(index).then_some(0);
    }
    config.with_windows(|layer| slides(layer).then_some(window))
}

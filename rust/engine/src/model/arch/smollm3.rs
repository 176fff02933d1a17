//! SmolLM 3: llama where some layers do not rotate.

use device::RopeStyle;

use super::Architecture;
use crate::{
    EngineError,
    model::{
        config::DecoderConfig,
        fields::{Fields, GgufFields, HfFields},
    },
};

/// Every fourth layer does not rotate.
const INTERVAL: usize = 4;

pub(super) const ARCHITECTURE: Architecture =
    Architecture { model_types: &["smollm3"], class: "SmolLM3ForCausalLM", gguf: "smollm3", names: &[], from_hf, from_gguf };

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let config =
        DecoderConfig { tie_word_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(true), ..fields.decoder("smollm3")? };
    let num_layers = config.layers.len();
    let interval = fields.size("no_rope_layer_interval")?.unwrap_or(INTERVAL);
    let rotates = match fields.flags("no_rope_layers", num_layers)? {
        Some(list) => list,
        None => (0..num_layers).map(|i| rotates(i, interval)).collect(),
    };
    let sliding = fields.sliding_layers(num_layers, |i| !rotates[i])?;
    let window = fields.used_window()?;
    let config = config.with_windows(|i| window.filter(|_| sliding[i]));
    Ok(with_rotation(config, |i| rotates[i]))
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    // The converter permutes the rows of q and k in all layers. The interval has no key.
    Ok(with_rotation(fields.decoder("smollm3", RopeStyle::Interleaved)?, |i| rotates(i, INTERVAL)))
}

fn rotates(layer: usize, interval: usize) -> bool {
    interval == 0 || !(layer + 1).is_multiple_of(interval)
}

fn with_rotation(mut config: DecoderConfig, rotates: impl Fn(usize) -> bool) -> DecoderConfig {
    for (i, layer) in config.layers.iter_mut().enumerate() {
        layer.attention.rope = rotates(i).then_some(0);
    }
    config
}

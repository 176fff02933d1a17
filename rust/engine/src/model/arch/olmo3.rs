//! OLMo 3: OLMo 2 with three windowed layers for each full one; only the full ones are stretched.

use serde_json::{Value, json};

use super::{Architecture, olmo2};
use crate::{
    EngineError,
    model::{
        config::DecoderConfig,
        fields::{Fields, GgufFields, HfFields},
        rope::{RopeConfig, RopeScaling},
    },
};

/// Every fourth layer sees everything.
const INTERVAL: usize = 4;
const THETA: f64 = 500_000.0;

pub(super) const ARCHITECTURE: Architecture =
    Architecture { model_types: &["olmo3"], class: "Olmo3ForCausalLM", from_hf, ..olmo2::ARCHITECTURE };

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let fields = fields.with_defaults(&json!({"rms_norm_eps": 1e-5, "rope_theta": THETA, "sliding_window": 4096}));
    let config = olmo2::with_norms(fields.decoder("olmo3")?);
    let sliding = fields.sliding_layers(config.layers.len(), is_sliding)?;
    let local = match fields.child("rope_parameters")? {
        Some(rope) if rope.object.values().all(Value::is_object) => {
            fields.rope("sliding_attention", config.largest(|layer| layer.attention.head_dim), 1.0)?
        }
        Some(_) => return Err(fields.error("rope_parameters", "must say the rotation of each of the two kinds of layers")),
        // Transformers gives the file's base to the full layers only.
        None => RopeConfig { theta: THETA, scaling: RopeScaling::None, ..config.ropes[0].clone() },
    };
    let window = fields.required_size("sliding_window")?;
    Ok(with_kinds(config, local, window, |layer| sliding[layer]))
}

/// What its GGUF files say beside those of OLMo 2.
pub(super) fn with_gguf_windows(config: DecoderConfig, fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let Some(window) = fields.size("attention.sliding_window")?.filter(|window| *window > 0) else { return Ok(config) };
    let local = RopeConfig { scaling: RopeScaling::None, ..config.ropes[0].clone() };
    let sliding = fields.sliding_layers(config.layers.len(), is_sliding)?;
    Ok(with_kinds(config, local, window, |layer| sliding[layer]))
}

fn is_sliding(layer: usize) -> bool {
    !(layer + 1).is_multiple_of(INTERVAL)
}

/// Windowed layers rotate in a way of their own.
fn with_kinds(mut config: DecoderConfig, local: RopeConfig, window: usize, sliding: impl Fn(usize) -> bool) -> DecoderConfig {
    config.ropes.push(local);
    for (i, layer) in config.layers.iter_mut().enumerate() {
        layer.attention.rope = Some(usize::from(sliding(i)));
    }
    config.with_windows(|i| sliding(i).then_some(window))
}

//! Helium: llama that rotates neighbouring pairs.

use device::RopeStyle;
use serde_json::json;

use super::{Architecture, no_gguf};
use crate::{
    EngineError,
    model::{config::DecoderConfig, fields::HfFields},
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["helium"],
    class: "HeliumForCausalLM",
    gguf: "helium",
    names: &[],
    from_hf,
    from_gguf: no_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let usual = json!({"head_dim": 128, "num_key_value_heads": 20, "rms_norm_eps": 1e-8, "rope_theta": 100_000.0});
    let mut config = fields.with_defaults(&usual).decoder("helium")?;
    config.ropes[0].style = RopeStyle::Interleaved;
    Ok(config.with_layers(|layer| layer.attention.output_bias = false))
}

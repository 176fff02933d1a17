//! Seed-OSS: llama with biases on q, k and v, and heads of a width of their own.

use device::RopeStyle;
use serde_json::json;

use super::Architecture;
use crate::{
    EngineError,
    model::{
        config::DecoderConfig,
        fields::{Fields, HfFields},
    },
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["seed_oss"],
    class: "SeedOssForCausalLM",
    gguf: "seed_oss",
    names: &[],
    from_hf,
    from_gguf: |fields| fields.decoder("seed_oss", RopeStyle::Neox),
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let fields = fields.with_defaults(&json!({"attention_bias": true, "head_dim": 128, "num_key_value_heads": 8}));
    let output_bias = fields.flag("attention_out_bias")?.unwrap_or(false);
    Ok(fields.decoder("seed_oss")?.with_layers(|layer| layer.attention.output_bias = output_bias))
}

//! Qwen 3 MoE: qwen3 with experts.

use device::RopeStyle;

use super::{Architecture, qwen2, qwen2_moe, qwen3};
use crate::{
    EngineError,
    model::{
        config::DecoderConfig,
        fields::{Fields, GgufFields, HfFields},
    },
};

pub(super) const ARCHITECTURE: Architecture =
    Architecture { model_types: &["qwen3_moe"], class: "Qwen3MoeForCausalLM", gguf: "qwen3moe", names: &[], from_hf, from_gguf };

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let config = qwen3::with_norms(qwen2::read_hf("qwen3_moe", fields)?);
    Ok(config.with_experts(qwen2_moe::read_experts(fields)?, fields.sparse_layers()?))
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let (config, experts) = fields.mixture("qwen3_moe", RopeStyle::Neox)?;
    // Files do not say whether weights are normalised; those of all published models are.
    let is_normalized = fields.flag("expert_weights_norm")?.unwrap_or(true);
    Ok(qwen3::with_norms(config).with_experts(experts.normalized(is_normalized), |_| true))
}

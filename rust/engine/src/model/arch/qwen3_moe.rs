//! Qwen 3 MoE: qwen3 with experts.

use device::RopeStyle;

use super::{Architecture, qwen2, qwen2_moe, qwen3};
use crate::{
    EngineError,
    model::{
        config::DecoderConfig,
        fields::{Fields, GgufFields, HfFields},
    },
    weights::Role,
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["qwen3_moe"],
    class: "Qwen3MoeForCausalLM",
    gguf: "qwen3moe",
    names: &[],
    from_hf,
    from_gguf: |fields| read_gguf("qwen3_moe", fields),
};

/// The language model of Qwen3-VL with experts; of text alone it is a Qwen 3 MoE.
pub(super) const VL: Architecture = Architecture {
    model_types: &["qwen3_vl_moe", "qwen3_vl_moe_text"],
    class: "Qwen3VLMoeForConditionalGeneration",
    gguf: "qwen3vlmoe",
    names: &[(Role::ExpertGateUp, "mlp.experts.gate_up_proj$.T?"), (Role::ExpertDown, "mlp.experts.down_proj$.T?")],
    from_hf: |fields| {
        if fields.flag("norm_topk_prob")? == Some(false) {
            return Err(fields.error("norm_topk_prob", "is false; implemented here: true"));
        }
        let config = qwen3::read_vl("qwen3_vl_moe", fields)?;
        Ok(config.with_experts(qwen2_moe::read_experts(fields)?.normalized(true), fields.sparse_layers()?))
    },
    from_gguf: |fields| {
        let mut config = read_gguf("qwen3_vl_moe", fields)?;
        config.ropes[0].axes = qwen2::gguf_axes(fields, true)?;
        Ok(config)
    },
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let config = qwen3::with_norms(qwen2::read_hf("qwen3_moe", fields)?);
    Ok(config.with_experts(qwen2_moe::read_experts(fields)?, fields.sparse_layers()?))
}

fn read_gguf(architecture: &'static str, fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let (config, experts) = fields.mixture(architecture, RopeStyle::Neox)?;
    // Files do not say whether weights are normalised; those of all published models are.
    let is_normalized = fields.flag("expert_weights_norm")?.unwrap_or(true);
    Ok(qwen3::with_norms(config).with_experts(experts.normalized(is_normalized), |_| true))
}

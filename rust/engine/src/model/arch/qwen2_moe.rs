//! Qwen 2 MoE: small experts beside a shared one that has a weight for each token.

use device::{RopeStyle, RouterScore};

use super::{Architecture, qwen2};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, ExpertsConfig, SharedConfig},
        fields::{Fields, GgufFields, HfFields},
    },
    weights::Role,
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["qwen2_moe"],
    class: "Qwen2MoeForCausalLM",
    gguf: "qwen2moe",
    names: &[
        (Role::SharedGate, "mlp.shared_expert.gate_proj"),
        (Role::SharedUp, "mlp.shared_expert.up_proj"),
        (Role::SharedDown, "mlp.shared_expert.down_proj"),
    ],
    from_hf,
    from_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let bias = fields.flag("qkv_bias")?.unwrap_or(true);
    let config = qwen2::read_hf("qwen2_moe", fields)?.with_layers(|layer| layer.attention.qkv_bias = bias);
    let intermediate_size = fields.required_size("shared_expert_intermediate_size")?;
    let shared = Some(SharedConfig { intermediate_size, is_weighted: true });
    Ok(config.with_experts(ExpertsConfig { shared, ..read_experts(fields)? }, fields.sparse_layers()?))
}

/// Experts as Qwen's files describe them.
pub(super) fn read_experts(fields: &HfFields<'_>) -> Result<ExpertsConfig, EngineError> {
    // The newer key is that of other families.
    let num_experts = match fields.size("num_experts")? {
        Some(n) => n,
        None => fields.required_size("num_local_experts")?,
    };
    let sizes = [num_experts, fields.required_size("num_experts_per_tok")?, fields.required_size("moe_intermediate_size")?];
    let is_normalized = fields.flag("norm_topk_prob")?.unwrap_or(false);
    Ok(ExpertsConfig::new(sizes, RouterScore::Softmax).normalized(is_normalized))
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let (config, mut experts) = fields.mixture("qwen2_moe", RopeStyle::Neox)?;
    experts.shared = experts.shared.map(|shared| SharedConfig { is_weighted: true, ..shared });
    Ok(config.with_layers(|layer| layer.attention.qkv_bias = true).with_experts(experts, |_| true))
}

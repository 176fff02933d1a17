//! GLM 4.5 to 4.7, and GGUF files of Solar Open: experts chosen as in DeepSeek-V3 (arXiv:2412.19437), behind some dense layers.

use device::{RopeStyle, RouterScore};
use serde_json::json;

use super::{Architecture, deepseek, glm4};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, QkNorm},
        fields::{Fields, GgufFields, HfFields},
    },
    weights::{Role, WeightId},
};

pub(super) const ARCHITECTURE: Architecture =
    Architecture { model_types: &["glm4_moe"], class: "Glm4MoeForCausalLM", gguf: "glm4moe", names: &[], from_hf, from_gguf };

/// The language model of GLM-4.5V and GLM-4.6V.
pub(super) const VL: Architecture = Architecture {
    model_types: &["glm4v_moe", "glm4v_moe_text"],
    class: "Glm4vMoeForConditionalGeneration",
    // As the language model of a `glm46v`, Transformers saves the experts of a layer as one tensor.
    names: &[
        (Role::ExpertGateUp, "mlp.experts.gate_up_proj$"),
        (Role::ExpertDown, "mlp.experts.*.down_proj"),
        (Role::ExpertDown, "mlp.experts.down_proj$"),
    ],
    from_hf: |fields| {
        let usual = json!({"attention_bias": true, "first_k_dense_replace": 1, "n_shared_experts": 1});
        let mut config = read_hf("glm4v_moe", &fields.with_defaults(&usual))?;
        config.ropes[0].axes = Some(glm4::read_axes(fields)?);
        Ok(config)
    },
    ..ARCHITECTURE
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let qk_norm = fields.flag("use_qk_norm")?.unwrap_or(false).then_some(QkNorm::Heads);
    Ok(read_hf("glm4_moe", fields)?.with_layers(|layer| layer.attention.qk_norm = qk_norm))
}

fn read_hf(architecture: &'static str, fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let bias = fields.flag("attention_bias")?.unwrap_or(false);
    let config = fields.partly_rotated(architecture, 0.5)?.with_layers(|layer| layer.attention.qkv_bias = bias);
    let num_dense = fields.size("first_k_dense_replace")?.unwrap_or(0);
    Ok(config.with_experts(deepseek::read_experts(fields)?, |layer| layer >= num_dense))
}

pub(super) fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let (config, mut experts) = fields.mixture("glm4_moe", RopeStyle::Neox)?;
    experts.has_correction = true;
    experts.rule.score = RouterScore::Sigmoid;
    experts.rule.normalize = fields.flag("expert_weights_norm")?.unwrap_or(true).then_some(deepseek::EPS);
    deepseek::set_by_two_best(&mut experts);
    let num_dense = fields.size("leading_dense_block_count")?.unwrap_or(0);
    let is_normed = fields.weights.contains(WeightId::layer(0, Role::AttnQNorm));
    let config = config.with_layers(|layer| layer.attention.qk_norm = is_normed.then_some(QkNorm::Heads));
    Ok(config.with_experts(experts, |layer| layer >= num_dense))
}

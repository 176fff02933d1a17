//! GLM 4.5 to 4.7: experts chosen as in DeepSeek-V3 (arXiv:2412.19437), behind some dense layers.

use device::{ExpertGroups, RopeStyle, RouterScore};

use super::Architecture;
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, ExpertsConfig, QkNorm, SharedConfig},
        fields::{Fields, GgufFields, HfFields},
    },
    weights::{Role, WeightId},
};

/// Added to the sum that weights are divided by.
const EPS: f32 = 1e-20;

pub(super) const ARCHITECTURE: Architecture =
    Architecture { model_types: &["glm4_moe"], class: "Glm4MoeForCausalLM", gguf: "glm4moe", names: &[], from_hf, from_gguf };

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let bias = fields.flag("attention_bias")?.unwrap_or(false);
    let qk_norm = fields.flag("use_qk_norm")?.unwrap_or(false).then_some(QkNorm::Heads);
    let config = fields.partly_rotated("glm4_moe", 0.5)?;
    let config = config.with_layers(|layer| (layer.attention.qkv_bias, layer.attention.qk_norm) = (bias, qk_norm));
    let num_dense = fields.size("first_k_dense_replace")?.unwrap_or(0);
    Ok(config.with_experts(read_experts(fields)?, |layer| layer >= num_dense))
}

/// Experts as DeepSeek-V3's files describe them.
fn read_experts(fields: &HfFields<'_>) -> Result<ExpertsConfig, EngineError> {
    let keys = ["n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"];
    let [num_experts, num_chosen, width] = keys.map(|key| fields.required_size(key));
    let (num_experts, width) = (num_experts?, width?);
    for (key, implemented) in [("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")] {
        if let Some(other) = fields.text(key)?.filter(|value| value != implemented) {
            return Err(fields.error(key, format!("is `{other}`; implemented: {implemented}")));
        }
    }
    let mut experts = ExpertsConfig::new([num_experts, num_chosen?, width], RouterScore::Sigmoid);
    experts.has_correction = true;
    experts.rule.normalize = fields.flag("norm_topk_prob")?.unwrap_or(true).then_some(EPS);
    experts.rule.scale = fields.number("routed_scaling_factor")?.unwrap_or(1.0) as f32;
    let num_groups = fields.size("n_group")?.unwrap_or(1);
    let num_chosen = fields.size("topk_group")?.unwrap_or(1);
    experts.rule.groups = (num_groups > 1).then_some(ExpertGroups { num_groups, num_chosen, by_two_best: true });
    let num_shared = fields.size("n_shared_experts")?.filter(|n| *n > 0);
    experts.shared = num_shared.map(|n| SharedConfig { intermediate_size: n.saturating_mul(width), is_weighted: false });
    Ok(experts)
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let (mut config, mut experts) = fields.mixture("glm4_moe", RopeStyle::Neox)?;
    // The last layers predict further tokens, and are not a part of the decoder.
    let num_extra = fields.size("nextn_predict_layers")?.unwrap_or(0);
    config.layers.truncate(config.layers.len().saturating_sub(num_extra).max(1));
    experts.has_correction = true;
    experts.rule.score = RouterScore::Sigmoid;
    experts.rule.normalize = fields.flag("expert_weights_norm")?.unwrap_or(true).then_some(EPS);
    experts.rule.groups = experts.rule.groups.map(|groups| ExpertGroups { by_two_best: true, ..groups });
    let num_dense = fields.size("leading_dense_block_count")?.unwrap_or(0);
    let is_normed = fields.weights.contains(WeightId::layer(0, Role::AttnQNorm));
    let config = config.with_layers(|layer| {
        (layer.attention.qkv_bias, layer.attention.qk_norm) = (true, is_normed.then_some(QkNorm::Heads));
    });
    Ok(config.with_experts(experts, |layer| layer >= num_dense))
}

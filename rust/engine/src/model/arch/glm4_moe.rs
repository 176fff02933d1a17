//! GLM 4.5 to 4.7, and GGUF files of Solar Open: experts chosen as in DeepSeek-V3 (arXiv:2412.19437), behind some dense layers.

use device::{RopeStyle, RouterScore};

use super::{Architecture, deepseek};
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

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let bias = fields.flag("attention_bias")?.unwrap_or(false);
    let qk_norm = fields.flag("use_qk_norm")?.unwrap_or(false).then_some(QkNorm::Heads);
    let config = fields.partly_rotated("glm4_moe", 0.5)?;
    let config = config.with_layers(|layer| (layer.attention.qkv_bias, layer.attention.qk_norm) = (bias, qk_norm));
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

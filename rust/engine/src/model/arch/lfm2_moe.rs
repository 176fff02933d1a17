//! LFM2 with a mixture of experts behind some dense layers.

use device::{RopeStyle, RouterScore};

use super::{Architecture, lfm2};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, ExpertsConfig},
        fields::{Fields, GgufFields, HfFields},
    },
};

/// Added to the sum that weights are divided by.
const EPS: f32 = 1e-6;

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["lfm2_moe"],
    class: "Lfm2MoeForCausalLM",
    gguf: "lfm2moe",
    names: lfm2::NAMES,
    from_hf,
    from_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let keys = ["num_experts", "num_experts_per_tok", "moe_intermediate_size"];
    let [num_experts, num_chosen, width] = keys.map(|key| fields.required_size(key));
    let mut experts = ExpertsConfig::new([num_experts?, num_chosen?, width?], RouterScore::Sigmoid);
    experts.has_correction = fields.flag("use_expert_bias")?.unwrap_or(true);
    experts.rule.normalize = fields.flag("norm_topk_prob")?.unwrap_or(true).then_some(EPS);
    experts.rule.scale = fields.number("routed_scaling_factor")?.unwrap_or(1.0) as f32;
    let num_dense = fields.size("num_dense_layers")?.unwrap_or(0);
    Ok(lfm2::read_hf("lfm2_moe", fields)?.with_experts(experts, |layer| layer >= num_dense))
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let (config, mut experts) = fields.mixture("lfm2_moe", RopeStyle::Neox)?;
    experts.rule.score = RouterScore::Sigmoid;
    experts.rule.normalize = Some(EPS);
    experts.has_correction = true;
    let num_dense = fields.size("leading_dense_block_count")?.unwrap_or(0);
    Ok(lfm2::with_layers(config, fields)?.with_experts(experts, |layer| layer >= num_dense))
}

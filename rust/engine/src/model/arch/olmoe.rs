//! `OLMoE` and `FlexOlmo`: experts in each layer, norms over all of q and of k. Norms of the latter come after attention and
//! experts.

use device::{RopeStyle, RouterScore};
use serde_json::json;

use super::{Architecture, no_gguf, olmo2};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, ExpertsConfig, QkNorm},
        fields::{Fields, HfFields},
    },
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["olmoe"],
    class: "OlmoeForCausalLM",
    gguf: "olmoe",
    names: &[],
    from_hf: |fields| {
        let usual = json!({"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8});
        Ok(with_norms(read_hf("olmoe", &fields.with_defaults(&usual))?))
    },
    from_gguf: |fields| {
        let (config, experts) = fields.mixture("olmoe", RopeStyle::Neox)?;
        Ok(with_norms(config.with_experts(experts, |_| true)))
    },
};

pub(super) const FLEX_OLMO: Architecture = Architecture {
    model_types: &["flex_olmo"],
    class: "FlexOlmoForCausalLM",
    gguf: "flex_olmo",
    names: &[],
    from_hf: |fields| {
        let usual = json!({"rope_theta": 500_000.0, "num_experts": 7, "num_experts_per_tok": 5});
        Ok(olmo2::with_norms(read_hf("flex_olmo", &fields.with_defaults(&usual))?))
    },
    from_gguf: no_gguf,
};

fn read_hf(architecture: &'static str, fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let keys = ["num_experts", "num_experts_per_tok", "intermediate_size"];
    let [num_experts, num_chosen, width] = keys.map(|key| fields.required_size(key));
    let experts = ExpertsConfig::new([num_experts?, num_chosen?, width?], RouterScore::Softmax);
    let is_normalized = fields.flag("norm_topk_prob")?.unwrap_or(false);
    Ok(fields.decoder(architecture)?.with_experts(experts.normalized(is_normalized), |_| true))
}

fn with_norms(config: DecoderConfig) -> DecoderConfig {
    config.with_layers(|layer| layer.attention.qk_norm = Some(QkNorm::Row))
}

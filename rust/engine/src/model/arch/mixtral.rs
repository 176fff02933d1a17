//! Mixtral (arXiv:2401.04088): mistral with a mixture of experts in each layer.

use device::{RopeStyle, RouterScore};

use super::Architecture;
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, ExpertsConfig},
        fields::{Fields, GgufFields, HfFields},
    },
    weights::{Names, Role},
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["mixtral"],
    class: "MixtralForCausalLM",
    gguf: "llama",
    names: NAMES,
    from_hf: |fields| {
        let config = fields.windowed("mixtral")?;
        Ok(config.with_experts(read_hf(fields, RouterScore::Softmax)?.normalized(true), |_| true))
    },
    from_gguf,
};

pub(super) const NAMES: Names = &[
    (Role::Router, "block_sparse_moe.gate"),
    (Role::ExpertGate, "block_sparse_moe.experts.*.w1"),
    (Role::ExpertUp, "block_sparse_moe.experts.*.w3"),
    (Role::ExpertDown, "block_sparse_moe.experts.*.w2"),
];

/// Experts of the width that others call that of the feed-forward network.
pub(super) fn read_hf(fields: &HfFields<'_>, score: RouterScore) -> Result<ExpertsConfig, EngineError> {
    let keys = ["num_local_experts", "num_experts_per_tok", "intermediate_size"];
    let [num_experts, num_chosen, width] = keys.map(|key| fields.required_size(key));
    Ok(ExpertsConfig::new([num_experts?, num_chosen?, width?], score))
}

pub(super) fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    // The converter to GGUF permutes the rows of q and k.
    let (config, experts) = fields.mixture("mixtral", RopeStyle::Interleaved)?;
    Ok(config.with_experts(experts.normalized(true), |_| true))
}

//! Granite 3 MoE: granite with experts.

use device::{RopeStyle, RouterScore};

use super::{Architecture, granite, mixtral};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, ExpertsConfig, SharedConfig},
        fields::{Fields, GgufFields, HfFields},
    },
    weights::{Names, Role},
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["granitemoe", "granitemoeshared"],
    class: "GraniteMoeForCausalLM",
    gguf: "granitemoe",
    names: NAMES,
    from_hf,
    from_gguf,
};

/// Without a mixture, the shared expert is the whole network.
pub(super) const NAMES: Names = &[
    (Role::Router, "block_sparse_moe.router.layer"),
    (Role::ExpertGateUp, "block_sparse_moe.input_linear"),
    (Role::ExpertDown, "block_sparse_moe.output_linear"),
    (Role::SharedGateUp, "shared_mlp.input_linear"),
    (Role::SharedDown, "shared_mlp.output_linear"),
    (Role::FfnGateUp, "shared_mlp.input_linear"),
    (Role::FfnDown, "shared_mlp.output_linear"),
];

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let experts = read_experts(fields, fields.size("shared_intermediate_size")?.unwrap_or(0))?;
    Ok(granite::read_hf("granitemoe", fields)?.with_experts(experts, |_| true))
}

/// Experts, and a shared one of that width.
pub(super) fn read_experts(fields: &HfFields<'_>, shared: usize) -> Result<ExpertsConfig, EngineError> {
    let shared = (shared > 0).then_some(SharedConfig { intermediate_size: shared, is_weighted: false });
    Ok(ExpertsConfig { shared, ..mixtral::read_hf(fields, RouterScore::SoftmaxOfChosen)? })
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let (config, experts) = fields.mixture("granitemoe", RopeStyle::Interleaved)?;
    let experts = experts.scored(RouterScore::SoftmaxOfChosen);
    Ok(granite::with_gguf_multipliers(config, fields)?.with_experts(experts, |_| true))
}

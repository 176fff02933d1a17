//! Granite 3 MoE: granite with experts.

use device::{RopeStyle, RouterScore};

use super::{Architecture, granite, mixtral};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, SharedConfig},
        fields::{Fields, GgufFields, HfFields},
    },
    weights::Role,
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["granitemoe", "granitemoeshared"],
    class: "GraniteMoeForCausalLM",
    gguf: "granitemoe",
    names: &[
        (Role::Router, "block_sparse_moe.router.layer"),
        (Role::ExpertGateUp, "block_sparse_moe.input_linear"),
        (Role::ExpertDown, "block_sparse_moe.output_linear"),
        (Role::SharedGateUp, "shared_mlp.input_linear"),
        (Role::SharedDown, "shared_mlp.output_linear"),
    ],
    from_hf,
    from_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let mut experts = mixtral::read_hf(fields, RouterScore::SoftmaxOfChosen)?;
    let shared = fields.size("shared_intermediate_size")?.filter(|n| *n > 0);
    experts.shared = shared.map(|intermediate_size| SharedConfig { intermediate_size, is_weighted: false });
    Ok(granite::read_hf("granitemoe", fields)?.with_experts(experts, |_| true))
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let (config, mut experts) = fields.mixture("granitemoe", RopeStyle::Interleaved)?;
    experts.rule.score = RouterScore::SoftmaxOfChosen;
    Ok(granite::with_gguf_multipliers(config, fields)?.with_experts(experts, |_| true))
}

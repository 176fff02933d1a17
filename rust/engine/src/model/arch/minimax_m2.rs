//! `MiniMax` M2: small experts in each layer, chosen by sigmoids and a correction; norms over all of q and of k.

use device::{RopeStyle, RouterScore};
use serde_json::json;

use super::{Architecture, mixtral};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, ExpertsConfig, QkNorm},
        fields::{Fields, GgufFields, HfFields},
    },
    weights::Role,
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["minimax_m2"],
    class: "MiniMaxM2ForCausalLM",
    gguf: "minimax-m2",
    names: &[
        (Role::Router, "block_sparse_moe.gate"),
        (Role::RouterCorrection, "block_sparse_moe.e_score_correction_bias$"),
        (Role::ExpertGate, "block_sparse_moe.experts.*.w1"),
        (Role::ExpertUp, "block_sparse_moe.experts.*.w3"),
        (Role::ExpertDown, "block_sparse_moe.experts.*.w2"),
    ],
    from_hf,
    from_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let mut fields = fields.with_defaults(&json!({
        "head_dim": 128, "num_key_value_heads": 8, "rope_theta": 5_000_000.0, "num_local_experts": 256, "num_experts_per_tok": 8,
    }));
    fields.only(&[
        ("use_qk_norm", json!(true)),
        ("qk_norm_type", json!("per_layer")),
        ("scoring_func", json!("sigmoid")),
        ("use_routing_bias", json!(true)),
        ("shared_intermediate_size", json!(0)),
    ])?;
    let linear = fields.typed("attn_type_list", "a list of numbers", |v| {
        v.as_array().map(|list| list.iter().any(|kind| kind.as_u64() != Some(1)))
    })?;
    if linear == Some(true) {
        return Err(fields.error("attn_type_list", "has layers other than 1, softmax attention, which is what is implemented"));
    }
    if let Some(rotary_dim) = fields.size("rotary_dim")? {
        let head_dim = fields.required_size("head_dim")?;
        fields = fields.with_defaults(&json!({"partial_rotary_factor": rotary_dim as f64 / head_dim as f64}));
    }
    let experts = mixtral::read_hf(&fields, RouterScore::Sigmoid)?;
    Ok(with_experts(fields.partly_rotated("minimax_m2", 1.0)?, experts))
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let (config, experts) = fields.mixture("minimax_m2", RopeStyle::Neox)?;
    Ok(with_experts(config, experts.scored(RouterScore::Sigmoid)))
}

fn with_experts(config: DecoderConfig, experts: ExpertsConfig) -> DecoderConfig {
    let experts = ExpertsConfig { has_correction: true, ..experts.normalized(true) };
    config.with_layers(|layer| layer.attention.qk_norm = Some(QkNorm::Row)).with_experts(experts, |_| true)
}

//! Poolside's Laguna: attention with a gate, in most layers with a window, a rotation for each of the two kinds, a number of
//! heads for each layer, and experts chosen by sigmoids.

use device::{GateActivation, RouterScore};
use serde_json::json;

use super::{Architecture, no_gguf};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, ExpertsConfig, OutputGate, QkNorm, SharedConfig},
        fields::{Fields, HfFields},
    },
    weights::Role,
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["laguna"],
    class: "LagunaForCausalLM",
    gguf: "laguna",
    names: &[
        (Role::AttnOwnQ, "self_attn.q_proj"),
        (Role::AttnGate, "self_attn.g_proj"),
        (Role::AttnQAndGate, "self_attn.q_and_gate_proj"),
        (Role::RouterCorrection, "mlp.experts.e_score_correction_bias$"),
        (Role::RouterCorrection, "mlp.gate.e_score_correction_bias$"),
        (Role::SharedGate, "mlp.shared_expert.gate_proj"),
        (Role::SharedGate, "mlp.shared_experts.gate_proj"),
        (Role::SharedUp, "mlp.shared_expert.up_proj"),
        (Role::SharedUp, "mlp.shared_experts.up_proj"),
        (Role::SharedDown, "mlp.shared_expert.down_proj"),
        (Role::SharedDown, "mlp.shared_experts.down_proj"),
    ],
    from_hf,
    from_gguf: no_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let mut fields = fields.with_defaults(&json!({
        "head_dim": 128, "num_key_value_heads": 8, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "sliding_window": 512,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    }));
    // Of rotations only what is said by kind counts.
    for key in ["partial_rotary_factor", "rope_theta"] {
        fields.value(key);
        fields.object.remove(key);
    }
    fields.only(&[("moe_apply_router_weight_on_input", json!(false))])?;
    if let Some(cap) = fields.number("moe_router_logit_softcapping")?.filter(|cap| *cap != 0.0) {
        return Err(fields.error("moe_router_logit_softcapping", format!("is {cap}; implemented: 0")));
    }
    let mut config = fields.decoder("laguna")?;
    let num_layers = config.layers.len();
    config.ropes.push(fields.rope("sliding_attention", config.largest(|layer| layer.attention.head_dim), 1.0)?);
    let sliding = fields.sliding_layers(num_layers, |_| false)?;
    let heads = fields.layers("num_attention_heads_per_layer")?;
    if let Some(heads) = heads.as_ref().filter(|heads| heads.len() != num_layers) {
        let why = format!("has {} entries for {num_layers} layers", heads.len());
        return Err(fields.error("num_attention_heads_per_layer", why));
    }
    let gate = OutputGate { is_per_head: gates_heads(&fields)?, activation: GateActivation::Softplus };
    for (index, layer) in config.layers.iter_mut().enumerate() {
        let attention = &mut layer.attention;
        (attention.qk_norm, attention.output_gate) = (Some(QkNorm::Heads), Some(gate));
        attention.rope = Some(usize::from(sliding[index]));
        if let Some(heads) = &heads {
            attention.num_heads = heads[index];
        }
    }
    let window = fields.size("sliding_window")?.filter(|window| *window > 0);
    if let (None, Some(layer)) = (window, sliding.iter().position(|slides| *slides)) {
        return Err(fields.error("sliding_window", format!("is missing or 0, and layer {layer} has a window")));
    }
    let is_sparse = fields.sparse_layer_types(num_layers, |layer| layer > 0)?;
    let config = config.with_windows(|layer| window.filter(|_| sliding[layer]));
    Ok(config.with_experts(read_experts(&fields)?, |layer| is_sparse[layer]))
}

/// Whether a gate is of a head; else of an element.
fn gates_heads(fields: &HfFields<'_>) -> Result<bool, EngineError> {
    if let Some(kinds) = fields.value("gating_types") {
        return Err(fields.error("gating_types", format!("is {kinds}; implemented: one kind for all layers, in `gating`")));
    }
    match fields.value("gating") {
        None => Ok(true),
        Some(gating) if gating == json!(true) || gating == json!("per-head") => Ok(true),
        Some(gating) if gating == json!("per-element") => Ok(false),
        Some(other) => Err(fields.error("gating", format!("is {other}; implemented: true, per-head, per-element"))),
    }
}

fn read_experts(fields: &HfFields<'_>) -> Result<ExpertsConfig, EngineError> {
    let keys = ["num_experts", "num_experts_per_tok", "moe_intermediate_size"].map(|key| fields.required_size(key));
    let [num_experts, num_chosen, width] = keys;
    let mut experts = ExpertsConfig::new([num_experts?, num_chosen?, width?], RouterScore::Sigmoid).normalized(true);
    experts.has_correction = true;
    experts.rule.scale = fields.number("moe_routed_scaling_factor")?.unwrap_or(1.0) as f32;
    let intermediate_size = fields.required_size("shared_expert_intermediate_size")?;
    experts.shared = Some(SharedConfig { intermediate_size, is_weighted: false });
    Ok(experts)
}

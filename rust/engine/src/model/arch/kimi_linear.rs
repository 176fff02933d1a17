//! Kimi Linear (arXiv:2510.26692): three layers of Kimi Delta Attention for each one of latent attention, in which nothing
//! rotates, and experts as in DeepSeek-V3.

use serde_json::json;

use super::{Architecture, deepseek, no_gguf};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, DeltaLayout, RecurrentConfig},
        fields::{Fields, HfFields},
    },
    weights::Role,
};

/// Every fourth layer has attention, where a file does not say it.
const INTERVAL: usize = 4;

/// What files say of layers with states.
const STATES: [&str; 7] = [
    "num_heads",
    "head_dim",
    "short_conv_kernel_size",
    "kda_layers",
    "full_attn_layers",
    "use_full_rank_gate",
    "gate_lower_bound",
];

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["kimi_linear"],
    class: "KimiLinearForCausalLM",
    gguf: "kimi-linear",
    names: &[
        (Role::DeltaQ, "self_attn.q_proj"),
        (Role::DeltaK, "self_attn.k_proj"),
        (Role::DeltaV, "self_attn.v_proj"),
        (Role::DeltaQConv, "self_attn.q_conv1d"),
        (Role::DeltaKConv, "self_attn.k_conv1d"),
        (Role::DeltaVConv, "self_attn.v_conv1d"),
        (Role::DeltaB, "self_attn.b_proj"),
        (Role::DeltaZDown, "self_attn.g_a_proj"),
        (Role::DeltaZ, "self_attn.g_b_proj"),
        (Role::DeltaADown, "self_attn.f_a_proj"),
        (Role::DeltaADown, "self_attn.forget_gate.f_a_proj"),
        (Role::DeltaA, "self_attn.f_b_proj"),
        (Role::DeltaA, "self_attn.forget_gate.f_b_proj"),
        (Role::MixDtBias, "self_attn.dt_bias$"),
        (Role::MixDecay, "self_attn.A_log$"),
        (Role::MixNorm, "self_attn.o_norm"),
        (Role::MixOutput, "self_attn.o_proj"),
        (Role::FfnGate, "mlp.gate_proj"),
        (Role::FfnGate, "block_sparse_moe.gate_proj"),
        (Role::FfnUp, "mlp.up_proj"),
        (Role::FfnUp, "block_sparse_moe.up_proj"),
        (Role::FfnDown, "mlp.down_proj"),
        (Role::FfnDown, "block_sparse_moe.down_proj"),
        (Role::Router, "block_sparse_moe.gate"),
        (Role::RouterCorrection, "block_sparse_moe.gate.e_score_correction_bias$"),
        (Role::ExpertGate, "block_sparse_moe.experts.*.w1"),
        (Role::ExpertUp, "block_sparse_moe.experts.*.w3"),
        (Role::ExpertDown, "block_sparse_moe.experts.*.w2"),
        (Role::SharedGate, "block_sparse_moe.shared_experts.gate_proj"),
        (Role::SharedUp, "block_sparse_moe.shared_experts.up_proj"),
        (Role::SharedDown, "block_sparse_moe.shared_experts.down_proj"),
    ],
    from_hf,
    from_gguf: no_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let fields = fields.also_called(&[
        ("model_max_length", "max_position_embeddings"),
        ("moe_renormalize", "norm_topk_prob"),
        ("num_expert_group", "n_group"),
        ("num_experts", "n_routed_experts"),
        ("num_local_experts", "n_routed_experts"),
        ("num_experts_per_token", "num_experts_per_tok"),
        ("num_shared_experts", "n_shared_experts"),
        ("moe_router_activation_func", "scoring_func"),
    ]);
    fields.only(&[
        ("moe_layer_freq", json!(1)),
        ("mla_use_nope", json!(true)),
        ("use_grouped_topk", json!(true)),
        // Of Kimi K3, whose parts these are.
        ("mla_use_output_gate", json!(false)),
        ("attn_res_block_size", json!(0)),
        ("routed_expert_hidden_size", json!(0)),
        ("linear_lower_bound", json!(0)),
        // Nothing rotates, so nothing is stretched.
        ("rope_scaling", json!({})),
        ("rope_parameters", json!({})),
    ])?;
    let fields = fields.with_defaults(&json!({
        "rms_norm_eps": 1e-5, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1024, "n_group": 1,
        "topk_group": 1, "routed_scaling_factor": 2.446, "first_k_dense_replace": 1, "max_position_embeddings": 1_048_576,
        "linear_attn_config": {},
    }));
    let config = deepseek::read_latent("kimi_linear", &fields)?;
    let config = config.with_layers(|layer| layer.attention.rope = None);
    let (delta, is_recurrent) = read_delta(&fields, &config)?;
    let num_dense = fields.required_size("first_k_dense_replace")?;
    let is_sparse = fields.sparse_layer_types(config.layers.len(), |layer| layer >= num_dense)?;
    let experts = deepseek::read_experts(&fields)?;
    Ok(config.with_experts(experts, |layer| is_sparse[layer]).with_recurrent(delta, |layer| is_recurrent[layer]))
}

/// The layers with states, and which they are. Older files have an object of them, with lists of layers that count from 1.
fn read_delta(fields: &HfFields<'_>, config: &DecoderConfig) -> Result<(RecurrentConfig, Vec<bool>), EngineError> {
    let older = fields.child("linear_attn_config")?;
    if let Some(older) = &older {
        older.only(&[("use_full_rank_gate", json!(false)), ("gate_lower_bound", json!(0))])?;
        if let Some((key, value)) = older.object.iter().find(|(key, value)| !STATES.contains(&key.as_str()) && !value.is_null()) {
            return Err(older.error(key, format!("is {value}, which is not supported; known: {}", STATES.join(", "))));
        }
    }
    let size = |old: &str, key: &str, usual: usize| match older.as_ref().map(|older| older.size(old)).transpose()?.flatten() {
        Some(size) => Ok(size),
        None => Ok::<_, EngineError>(fields.size(key)?.unwrap_or(usual)),
    };
    let (num_heads, dim) = (size("num_heads", "linear_num_heads", 32)?, size("head_dim", "linear_head_dim", 128)?);
    let delta = RecurrentConfig::GatedDelta {
        num_key_heads: num_heads,
        num_value_heads: num_heads,
        key_dim: dim,
        value_dim: dim,
        kernel: size("short_conv_kernel_size", "linear_conv_kernel_dim", 4)?,
        layout: DeltaLayout::ConvsApart,
        eps: config.norm.eps,
        has_negative: false,
        rank: Some(dim),
    };
    let num_layers = config.layers.len();
    let lists = match &older {
        Some(older) => match (older.layers("kda_layers")?, older.layers("full_attn_layers")?) {
            (Some(recurrent), Some(full)) => Some((recurrent, full)),
            (None, None) => None,
            (recurrent, _) => {
                let [there, missing] = match recurrent {
                    Some(_) => ["kda_layers", "full_attn_layers"],
                    None => ["full_attn_layers", "kda_layers"],
                };
                return Err(older.error(missing, format!("is missing beside `{there}`")));
            }
        },
        None => None,
    };
    // Newer files have both.
    let is_recurrent = match lists.filter(|_| fields.value("layer_types").is_none()) {
        Some((recurrent, full)) => {
            let is_one = |layer: usize| recurrent.contains(&(layer + 1));
            if let Some(layer) = (0..num_layers).find(|layer| is_one(*layer) == full.contains(&(layer + 1))) {
                let why = format!("and `kda_layers`, which count from 1, have layer {} in both or in neither", layer + 1);
                return Err(fields.error("linear_attn_config.full_attn_layers", why));
            }
            (0..num_layers).map(is_one).collect()
        }
        None => {
            fields.recurrent_layers(num_layers, &["linear_attention"], |layer| layer == 0 || !layer.is_multiple_of(INTERVAL))?
        }
    };
    Ok((delta, is_recurrent))
}

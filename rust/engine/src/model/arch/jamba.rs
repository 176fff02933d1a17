//! Jamba: layers of Mamba, with norms within, but for a few with attention without rotation; some have experts.

use device::{RopeStyle, RouterScore};
use serde_json::{Value, json};

use super::{
    Architecture,
    mamba1::{self, Keys},
};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, ExpertsConfig, MambaNorms, RecurrentConfig},
        fields::{Fields, GgufFields, HfFields},
    },
    weights::{Role, WeightId},
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["jamba"],
    class: "JambaForCausalLM",
    gguf: "jamba",
    names: &[
        (Role::OutputNorm, "model.final_layernorm"),
        (Role::FfnNorm, "pre_ff_layernorm"),
        (Role::FfnGate, "feed_forward.gate_proj"),
        (Role::FfnUp, "feed_forward.up_proj"),
        (Role::FfnDown, "feed_forward.down_proj"),
        (Role::Router, "feed_forward.router"),
        (Role::ExpertGate, "feed_forward.experts.*.gate_proj"),
        (Role::ExpertUp, "feed_forward.experts.*.up_proj"),
        (Role::ExpertDown, "feed_forward.experts.*.down_proj"),
    ],
    from_hf,
    from_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let fields = &fields.also_called(&[("num_local_experts", "num_experts")]).with_defaults(&json!({
        "num_key_value_heads": 8, "max_position_embeddings": 262_144, "num_experts": 16, "num_experts_per_tok": 2,
    }));
    let config = fields.decoder("jamba")?;
    fields.only(&[("mamba_inner_layernorms", Value::Bool(true))])?;
    fields.only_text("hidden_act", "silu")?;
    let attends = every(fields, ["attn_layer_period", "attn_layer_offset"], [8, 4])?;
    let is_mixture = every(fields, ["expert_layer_period", "expert_layer_offset"], [2, 1])?;
    let sizes = ["num_experts", "num_experts_per_tok", "intermediate_size"].map(|key| fields.required_size(key));
    let [num_experts, num_chosen, width] = sizes;
    let sizes = [num_experts?, num_chosen?, width?];
    let keys = Keys {
        state_dim: "mamba_d_state",
        kernel: "mamba_d_conv",
        factor: "mamba_expand",
        rank: "mamba_dt_rank",
        conv_bias: "mamba_conv_bias",
        proj_bias: "mamba_proj_bias",
    };
    let mamba = mamba1::read_hf(fields, &keys, config.hidden_size, None, MambaNorms::Weighted(config.norm.eps))?;
    let config = with_layers(config, mamba, attends);
    if sizes[0] <= 1 {
        return Ok(config);
    }
    Ok(config.with_experts(ExpertsConfig::new(sizes, RouterScore::Softmax), is_mixture))
}

/// Which layers are those of a period, from an offset on.
fn every(
    fields: &HfFields<'_>,
    [period, offset]: [&str; 2],
    usual: [usize; 2],
) -> Result<impl Fn(usize) -> bool + use<>, EngineError> {
    let of_period = fields.size(period)?.unwrap_or(usual[0]);
    let first = fields.size(offset)?.unwrap_or(usual[1]);
    if first >= of_period {
        return Err(fields.error(offset, format!("is {first}; it must be less than `{period}`, which is {of_period}")));
    }
    Ok(move |layer: usize| layer % of_period == first)
}

/// Layers with a router have experts, and those without keys and values are Mamba.
fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let (config, experts) = fields.mixture("jamba", RopeStyle::Neox)?;
    let lacks_attention = fields.layers_without("attention.head_count_kv", config.layers.len())?;
    let mamba = mamba1::read_gguf(fields, &config, MambaNorms::Weighted(config.norm.eps))?;
    let is_mixture = |layer| fields.weights.contains(WeightId::layer(layer, Role::Router));
    Ok(with_layers(config, mamba, |layer| !lacks_attention[layer]).with_experts(experts, is_mixture))
}

fn with_layers(config: DecoderConfig, mamba: RecurrentConfig, attends: impl Fn(usize) -> bool) -> DecoderConfig {
    config.with_layers(|layer| layer.attention.rope = None).with_recurrent(mamba, |layer| !attends(layer))
}

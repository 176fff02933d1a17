//! Qwen 3 MoE: qwen3 with experts.

use device::RopeStyle;
use serde_json::json;

use super::{Architecture, qwen2, qwen2_moe, qwen3};
use crate::{
    EngineError,
    model::{
        config::DecoderConfig,
        fields::{Fields, GgufFields, HfFields},
        rope::{RopeConfig, RopeScaling},
    },
    weights::Role,
};

/// Of a Mellum whose GGUF file does not say which layers have a window: every fourth sees everything.
const GGUF_PATTERN: usize = 4;

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["qwen3_moe"],
    class: "Qwen3MoeForCausalLM",
    gguf: "qwen3moe",
    names: &[],
    from_hf,
    from_gguf: |fields| read_gguf("qwen3_moe", fields),
};

/// The language model of Qwen3-VL with experts; of text alone it is a Qwen 3 MoE.
pub(super) const VL: Architecture = Architecture {
    model_types: &["qwen3_vl_moe", "qwen3_vl_moe_text"],
    class: "Qwen3VLMoeForConditionalGeneration",
    gguf: "qwen3vlmoe",
    names: &[(Role::ExpertGateUp, "mlp.experts.gate_up_proj$.T?"), (Role::ExpertDown, "mlp.experts.down_proj$.T?")],
    from_hf: |fields| {
        if fields.flag("norm_topk_prob")? == Some(false) {
            return Err(fields.error("norm_topk_prob", "is false; implemented here: true"));
        }
        let config = qwen3::read_vl("qwen3_vl_moe", fields)?;
        Ok(config.with_experts(qwen2_moe::read_experts(fields)?.normalized(true), fields.sparse_layers()?))
    },
    from_gguf: |fields| {
        let mut config = read_gguf("qwen3_vl_moe", fields)?;
        config.ropes[0].axes = qwen2::gguf_axes(fields, true)?;
        Ok(config)
    },
};

/// Mellum: some layers have a window, and a rotation of their own.
pub(super) const MELLUM: Architecture = Architecture {
    model_types: &["mellum"],
    class: "MellumForCausalLM",
    gguf: "mellum",
    names: &[],
    from_hf: read_mellum,
    from_gguf: read_gguf_mellum,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let config = qwen3::with_norms(qwen2::read_hf("qwen3_moe", fields)?);
    Ok(config.with_experts(qwen2_moe::read_experts(fields)?, fields.sparse_layers()?))
}

fn read_gguf(architecture: &'static str, fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let (config, experts) = fields.mixture(architecture, RopeStyle::Neox)?;
    // Files do not say whether weights are normalised; those of all published models are.
    let is_normalized = fields.flag("expert_weights_norm")?.unwrap_or(true);
    Ok(qwen3::with_norms(config).with_experts(experts.normalized(is_normalized), |_| true))
}

fn read_mellum(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    // Transformers writes the number of experts under another name.
    let num_experts = fields.value("num_local_experts").unwrap_or(json!(64));
    let fields = fields.with_defaults(&json!({
        "head_dim": 128, "num_key_value_heads": 4, "sliding_window": 1024, "moe_intermediate_size": 896,
        "num_experts": num_experts, "num_experts_per_tok": 8, "norm_topk_prob": true,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    }));
    let mut config = qwen3::with_norms(fields.decoder("mellum")?);
    // A layer that predicts further tokens is not read.
    config.num_mtp_layers = 0;
    let (num_layers, head_dim) = (config.layers.len(), config.largest(|layer| layer.attention.head_dim));
    config.ropes.push(fields.rope("sliding_attention", head_dim, 1.0)?);
    let sliding = fields.sliding_layers(num_layers, |_| false)?;
    for (layer, slides) in config.layers.iter_mut().zip(&sliding) {
        layer.attention.rope = Some(usize::from(*slides));
    }
    let window = fields.size("sliding_window")?;
    let is_sparse = fields.sparse_layer_types(num_layers, |_| true)?;
    let config = config.with_experts(qwen2_moe::read_experts(&fields)?, |layer| is_sparse[layer]);
    Ok(config.with_windows(|layer| window.filter(|_| sliding[layer])))
}

fn read_gguf_mellum(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let (config, experts) = fields.mixture("mellum", RopeStyle::Neox)?;
    let mut config = qwen3::with_norms(config).with_experts(experts.normalized(true), |_| true);
    let Some(window) = fields.size("attention.sliding_window")?.filter(|window| *window > 0) else { return Ok(config) };
    let sliding = fields.sliding_layers(config.layers.len(), |layer| !(layer + 1).is_multiple_of(GGUF_PATTERN))?;
    let theta = fields.number("rope.freq_base_swa")?.unwrap_or(config.ropes[0].theta);
    config.ropes.push(RopeConfig { theta, scaling: RopeScaling::None, ..config.ropes[0].clone() });
    for (layer, slides) in config.layers.iter_mut().zip(&sliding) {
        layer.attention.rope = Some(usize::from(*slides));
    }
    Ok(config.with_windows(|layer| sliding[layer].then_some(window)))
}

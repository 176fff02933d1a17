//! Qwen3-Next and Qwen 3.5: three layers of the gated delta rule for each one with attention, whose outputs have gates.

use device::{RopeStyle, RouterScore};
use serde_json::json;

use super::{Architecture, qwen2, qwen2_moe};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, DeltaLayout, ExpertsConfig, OutputGate, QkNorm, RecurrentConfig, SharedConfig},
        fields::{Fields, GgufFields, HfFields},
    },
    weights::{Names, Role},
};

/// Every fourth layer has attention.
const INTERVAL: usize = 4;

/// Pairs that rotate by time, row and column, where a file does not say.
const SECTIONS: [usize; 3] = [11, 11, 10];

const NAMES: Names = &[
    (Role::Conv, "linear_attn.conv1d"),
    (Role::MixDtBias, "linear_attn.dt_bias$"),
    (Role::MixDecay, "linear_attn.A_log$"),
    (Role::MixNorm, "linear_attn.norm"),
    (Role::MixOutput, "linear_attn.out_proj"),
    (Role::SharedGate, "mlp.shared_expert.gate_proj"),
    (Role::SharedUp, "mlp.shared_expert.up_proj"),
    (Role::SharedDown, "mlp.shared_expert.down_proj"),
];

pub(super) const NEXT: Architecture = Architecture {
    model_types: &["qwen3_next"],
    class: "Qwen3NextForCausalLM",
    gguf: "qwen3next",
    names: NAMES,
    from_hf: |fields| {
        // Its files have a head for further tokens and no key that says so.
        let fields = fields.with_defaults(&json!({"num_nextn_predict_layers": 1}));
        with_experts(from_hf("qwen3_next", &fields, DeltaLayout::ByKeyHead)?, &fields)
    },
    from_gguf: |fields| gguf_mixture("qwen3_next", fields, DeltaLayout::RatesByKeyHead),
};

pub(super) const QWEN3_5: Architecture = Architecture {
    model_types: &["qwen3_5_text", "qwen3_5"],
    class: "Qwen3_5ForCausalLM",
    gguf: "qwen35",
    names: NAMES,
    from_hf: |fields| with_axes(from_hf("qwen3_5_text", fields, DeltaLayout::Apart)?, fields),
    from_gguf: |fields| {
        let config = with_gguf_layers(fields.decoder("qwen3_5_text", RopeStyle::Neox)?, fields, DeltaLayout::Tiled)?;
        with_gguf_axes(config, fields)
    },
};

pub(super) const QWEN3_5_MOE: Architecture = Architecture {
    model_types: &["qwen3_5_moe_text", "qwen3_5_moe"],
    class: "Qwen3_5MoeForCausalLM",
    gguf: "qwen35moe",
    names: NAMES,
    from_hf: |fields| {
        // No layer is without experts, so the published files have no width of one.
        let mut fields = fields.clone();
        if let (None, Some(width)) = (fields.value("intermediate_size"), fields.value("moe_intermediate_size")) {
            fields.object.insert("intermediate_size".into(), width);
        }
        let config = from_hf("qwen3_5_moe_text", &fields, DeltaLayout::Apart)?;
        with_experts(with_axes(config, &fields)?, &fields)
    },
    from_gguf: |fields| with_gguf_axes(gguf_mixture("qwen3_5_moe_text", fields, DeltaLayout::Tiled)?, fields),
};

fn from_hf(architecture: &'static str, fields: &HfFields<'_>, layout: DeltaLayout) -> Result<DecoderConfig, EngineError> {
    let fields = &fields.also_called(&[("mtp_num_hidden_layers", "num_nextn_predict_layers")]);
    let bias = fields.flag("attention_bias")?.unwrap_or(false);
    let mut config = fields.partly_rotated(architecture, 0.25)?;
    config.norm.offset = 1.0;
    let interval = fields.size("full_attention_interval")?.unwrap_or(INTERVAL).max(1);
    let usual = |layer: usize| !(layer + 1).is_multiple_of(interval);
    let is_recurrent = fields.recurrent_layers(config.layers.len(), &["linear_attention"], usual)?;
    let keys = [
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    ];
    let [num_key_heads, num_value_heads, key_dim, value_dim, kernel] = keys.map(|key| fields.required_size(key));
    let delta = RecurrentConfig::GatedDelta {
        num_key_heads: num_key_heads?,
        num_value_heads: num_value_heads?,
        key_dim: key_dim?,
        value_dim: value_dim?,
        kernel: kernel?,
        layout,
        eps: config.norm.eps,
        has_negative: false,
        rank: None,
    };
    let config = config.with_layers(|layer| (layer.attention.qkv_bias, layer.attention.output_bias) = (bias, bias));
    Ok(with_layers(config, delta, |layer| is_recurrent[layer]))
}

/// With rotation by time, row and column, which take turns.
fn with_axes(mut config: DecoderConfig, fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    config.ropes[0].axes = fields.axes_in_turns(config.ropes[0].rotary_dim / 2, SECTIONS)?;
    Ok(config)
}

/// The same of a GGUF file.
fn with_gguf_axes(mut config: DecoderConfig, fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    config.ropes[0].axes = qwen2::gguf_axes(fields, true)?;
    Ok(config)
}

fn with_experts(config: DecoderConfig, fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let intermediate_size = fields.required_size("shared_expert_intermediate_size")?;
    let shared = Some(SharedConfig { intermediate_size, is_weighted: true });
    let is_normalized = fields.flag("norm_topk_prob")?.unwrap_or(true);
    let experts = ExpertsConfig { shared, ..qwen2_moe::read_experts(fields)? }.normalized(is_normalized);
    Ok(config.with_experts(experts, fields.sparse_layers()?))
}

fn gguf_mixture(architecture: &'static str, fields: &GgufFields<'_>, layout: DeltaLayout) -> Result<DecoderConfig, EngineError> {
    let (config, experts) = fields.mixture(architecture, RopeStyle::Neox)?;
    let shared = experts.shared.map(|shared| SharedConfig { is_weighted: true, ..shared });
    let experts = ExpertsConfig { shared, ..experts.scored(RouterScore::Softmax).normalized(true) };
    Ok(with_gguf_layers(config, fields, layout)?.with_experts(experts, |_| true))
}

fn with_gguf_layers(config: DecoderConfig, fields: &GgufFields<'_>, layout: DeltaLayout) -> Result<DecoderConfig, EngineError> {
    let (num_value_heads, width) = (fields.required_size("ssm.time_step_rank")?, fields.required_size("ssm.inner_size")?);
    let interval = fields.size("full_attention_interval")?.unwrap_or(INTERVAL).max(1);
    let delta = RecurrentConfig::GatedDelta {
        num_key_heads: fields.required_size("ssm.group_count")?,
        num_value_heads,
        key_dim: fields.required_size("ssm.state_size")?,
        value_dim: width / num_value_heads.max(1),
        kernel: fields.required_size("ssm.conv_kernel")?,
        layout,
        eps: config.norm.eps,
        has_negative: false,
        rank: None,
    };
    Ok(with_layers(config, delta, |layer| !(layer + 1).is_multiple_of(interval)))
}

fn with_layers(config: DecoderConfig, delta: RecurrentConfig, is_recurrent: impl Fn(usize) -> bool) -> DecoderConfig {
    let config = config.with_layers(|layer| {
        (layer.attention.qk_norm, layer.attention.output_gate) = (Some(QkNorm::Heads), Some(OutputGate::SIGMOID));
    });
    config.with_recurrent(delta, is_recurrent)
}

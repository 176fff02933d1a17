//! Arcee's Trinity (AFMoE): gated attention that only windowed layers rotate, norms around both halves of a layer, experts chosen
//! by sigmoids behind some dense layers.

use device::{RopeStyle, RouterScore};
use serde_json::json;

use super::{Architecture, deepseek};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, ExpertsConfig, Norms, OutputGate, QkNorm, SharedConfig},
        fields::{Fields, GgufFields, HfFields},
    },
    weights::Role,
};

/// Of layers without a window, where a file does not say it.
const INTERVAL: usize = 4;

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["afmoe"],
    class: "AfmoeForCausalLM",
    gguf: "afmoe",
    names: &[
        (Role::AttnOwnQ, "self_attn.q_proj"),
        (Role::AttnGate, "self_attn.gate_proj"),
        (Role::AttnQAndGate, "self_attn.q_and_gate_proj"),
        (Role::FfnNorm, "pre_mlp_layernorm"),
        (Role::PostFfnNorm, "post_mlp_layernorm"),
        (Role::Router, "mlp.router.gate"),
        (Role::RouterCorrection, "mlp.expert_bias$"),
    ],
    from_hf,
    from_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let fields = fields.with_defaults(&json!({
        "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": 1024, "moe_intermediate_size": 1408, "num_experts": 64,
        "num_experts_per_tok": 6, "num_shared_experts": 2, "num_dense_layers": 1, "global_attn_every_n_layers": 4,
    }));
    fields.only(&[
        ("score_func", json!("sigmoid")),
        ("route_norm", json!(true)),
        ("n_group", json!(1)),
        ("topk_group", json!(1)),
    ])?;
    let mut config = fields.partly_rotated("afmoe", 1.0)?;
    if fields.flag("mup_enabled")?.unwrap_or(false) {
        config.embedding_scale = (config.hidden_size as f32).sqrt();
    }
    let num_layers = config.layers.len();
    let interval = fields.required_size("global_attn_every_n_layers")?.max(1);
    let sliding = fields.sliding_layers(num_layers, |layer| !(layer + 1).is_multiple_of(interval))?;
    let config = with_kinds(config, fields.required_size("sliding_window")?, &sliding);
    let num_dense = fields.required_size("num_dense_layers")?;
    Ok(config.with_experts(read_experts(&fields)?, |layer| layer >= num_dense))
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let (mut config, experts) = fields.mixture("afmoe", RopeStyle::Neox)?;
    // No key has the scale; models without it are converted alike.
    config.embedding_scale = (config.hidden_size as f32).sqrt();
    let sliding = fields.sliding_layers(config.layers.len(), |layer| !(layer + 1).is_multiple_of(INTERVAL))?;
    let config = with_kinds(config, fields.required_size("attention.sliding_window")?, &sliding);
    deepseek::with_sigmoid_experts(config, experts, fields)
}

/// Layers with a window rotate; the others do not.
fn with_kinds(config: DecoderConfig, window: usize, sliding: &[bool]) -> DecoderConfig {
    let mut config = config.with_windows(|layer| sliding[layer].then_some(window));
    for (layer, slides) in config.layers.iter_mut().zip(sliding) {
        layer.norms = Norms::Around;
        let attention = &mut layer.attention;
        (attention.output_gate, attention.qk_norm) = (Some(OutputGate::SIGMOID), Some(QkNorm::Heads));
        attention.rope = slides.then_some(0);
    }
    config
}

fn read_experts(fields: &HfFields<'_>) -> Result<ExpertsConfig, EngineError> {
    let keys = ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_shared_experts"];
    let [num_experts, num_chosen, width, num_shared] = keys.map(|key| fields.required_size(key));
    let (width, num_shared) = (width?, num_shared?);
    let mut experts = ExpertsConfig::new([num_experts?, num_chosen?, width], RouterScore::Sigmoid);
    experts.has_correction = true;
    experts.rule.normalize = Some(deepseek::EPS);
    experts.rule.scale = fields.number("route_scale")?.unwrap_or(1.0) as f32;
    let shared = SharedConfig { intermediate_size: num_shared.saturating_mul(width), is_weighted: false };
    experts.shared = (num_shared > 0).then_some(shared);
    Ok(experts)
}

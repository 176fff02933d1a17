//! gpt-oss: sinks in attention, every other layer windowed, a mixture of experts with biases and clamped activations.

use device::{ExpertActivation, RopeStyle, RouterScore};

use super::Architecture;
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, ExpertsConfig},
        fields::{Fields, GgufFields, HfFields},
        rope::RopeScaling,
    },
    weights::Role,
};

const WINDOW: usize = 128;
const ALPHA: f64 = 1.702;
const LIMIT: f64 = 7.0;

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["gpt_oss"],
    class: "GptOssForCausalLM",
    gguf: "gpt-oss",
    names: &[
        (Role::Router, "mlp.router"),
        (Role::ExpertGate, "mlp.experts.gate_up_proj$.T[0::2]"),
        (Role::ExpertUp, "mlp.experts.gate_up_proj$.T[1::2]"),
        (Role::ExpertDown, "mlp.experts.down_proj$.T"),
    ],
    from_hf,
    from_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    if let Some(quantization) = fields.child("quantization_config")?
        && let Some(other) = quantization.text("quant_method")?.filter(|method| method != "mxfp4")
    {
        return Err(quantization.error("quant_method", format!("is `{other}`; implemented: mxfp4")));
    }
    let config = fields.decoder("gpt_oss")?;
    let keys = ["num_local_experts", "num_experts_per_tok", "intermediate_size"];
    let [num_experts, num_chosen, width] = keys.map(|key| fields.required_size(key));
    let number = |key: &str, usual: f64| Ok::<_, EngineError>(fields.number(key)?.unwrap_or(usual) as f32);
    let activation = ExpertActivation::Clamped { alpha: number("swiglu_alpha", ALPHA)?, limit: number("swiglu_limit", LIMIT)? };
    let sliding = fields.sliding_layers(config.layers.len(), |layer| layer.is_multiple_of(2))?;
    let window = fields.size("sliding_window")?.unwrap_or(WINDOW);
    let bias = fields.flag("attention_bias")?.unwrap_or(true);
    let experts = ExpertsConfig::new([num_experts?, num_chosen?, width?], RouterScore::SoftmaxOfChosen);
    Ok(with_layers(config, experts, activation, bias).with_windows(|i| sliding[i].then_some(window)))
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let (mut config, experts) = fields.mixture("gpt_oss", RopeStyle::Neox)?;
    // It has no key.
    for rope in &mut config.ropes {
        if let RopeScaling::Yarn { truncate, .. } = &mut rope.scaling {
            *truncate = false;
        }
    }
    let window = fields.size("attention.sliding_window")?.unwrap_or(WINDOW);
    let experts = experts.scored(RouterScore::SoftmaxOfChosen);
    let activation = ExpertActivation::Clamped { alpha: ALPHA as f32, limit: LIMIT as f32 };
    Ok(with_layers(config, experts, activation, true).with_windows(|layer| layer.is_multiple_of(2).then_some(window)))
}

fn with_layers(config: DecoderConfig, experts: ExpertsConfig, activation: ExpertActivation, bias: bool) -> DecoderConfig {
    let experts = ExpertsConfig { activation, router_bias: true, bias: true, ..experts };
    let config = config.with_layers(|layer| {
        layer.set_biases(bias);
        layer.attention.has_sinks = true;
    });
    config.with_experts(experts, |_| true)
}

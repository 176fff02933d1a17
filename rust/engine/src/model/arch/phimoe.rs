//! Phi 3.5 MoE: layer norms, biases in attention, and a router that weighs each expert among those near it.

use device::{RopeStyle, RouterScore};

use super::{Architecture, mixtral};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, NormConfig},
        fields::{Fields, GgufFields, HfFields},
    },
};

const JITTER: f64 = 0.01;

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["phimoe"],
    class: "PhimoeForCausalLM",
    gguf: "phimoe",
    names: mixtral::NAMES,
    from_hf,
    from_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let norm = NormConfig::layer(fields.number("rms_norm_eps")?);
    let jitter = fields.number("router_jitter_noise")?.unwrap_or(JITTER) as f32;
    // The bias of the logits is read where it is.
    fields.flag("lm_head_bias")?;
    let bias = fields.flag("attention_bias")?.unwrap_or(false);
    let config = DecoderConfig { norm, ..fields.windowed("phimoe")? };
    let experts = mixtral::read_hf(fields, RouterScore::Sparsemixer { jitter })?;
    Ok(with_biases(config, bias).with_experts(experts, |_| true))
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let (config, mut experts) = fields.mixture("phimoe", RopeStyle::Neox)?;
    experts.rule.score = RouterScore::Sparsemixer { jitter: JITTER as f32 };
    // The key of the epsilon is that of another norm.
    let norm = NormConfig::layer(fields.number("attention.layer_norm_rms_epsilon")?);
    Ok(with_biases(DecoderConfig { norm, ..config }, true).with_experts(experts, |_| true))
}

fn with_biases(config: DecoderConfig, bias: bool) -> DecoderConfig {
    config.with_layers(|layer| (layer.attention.qkv_bias, layer.attention.output_bias) = (bias, bias))
}

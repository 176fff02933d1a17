//! Phi 1, 1.5 and 2: one layer norm for attention and the feed-forward network, which run side by side; biases everywhere.

use device::{Activation, RopeStyle};

use super::Architecture;
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, NormConfig, QkNorm},
        fields::{Fields, GgufFields, HfFields},
    },
    weights::Role,
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["phi"],
    class: "PhiForCausalLM",
    gguf: "phi2",
    names: &[
        (Role::OutputNorm, "model.final_layernorm"),
        (Role::AttnQNorm, "self_attn.q_layernorm"),
        (Role::AttnKNorm, "self_attn.k_layernorm"),
        (Role::AttnOutput, "self_attn.dense"),
        (Role::FfnUp, "mlp.fc1"),
        (Role::FfnDown, "mlp.fc2"),
    ],
    from_hf,
    from_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let norm = NormConfig::layer(fields.number("layer_norm_eps")?);
    let qk_norm = fields.flag("qk_layernorm")?.unwrap_or(false).then_some(QkNorm::Heads);
    let config = DecoderConfig { norm, ..fields.partly_rotated("phi", 0.5)? };
    let activation = fields.activation(Activation::GeluTanh)?;
    Ok(with_layers(config, activation).with_layers(|layer| layer.attention.qk_norm = qk_norm))
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    Ok(with_layers(fields.decoder("phi", RopeStyle::Neox)?, Activation::GeluTanh))
}

fn with_layers(config: DecoderConfig, activation: Activation) -> DecoderConfig {
    config.with_layers(|layer| {
        layer.is_parallel = true;
        layer.set_biases(true);
        layer.ffn.set_dense(|dense| (dense.is_gated, dense.activation) = (false, activation));
    })
}

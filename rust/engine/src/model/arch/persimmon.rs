//! Persimmon: layer norms, of each head of queries and keys too, and the square of `ReLU` without a gate.

use device::Activation;

use super::{Architecture, no_gguf};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, NormConfig, QkNorm},
        fields::{Fields, HfFields},
    },
    weights::Role,
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["persimmon"],
    class: "PersimmonForCausalLM",
    gguf: "persimmon",
    names: &[
        (Role::OutputNorm, "model.final_layernorm"),
        (Role::AttnQkv, "self_attn.query_key_value"),
        (Role::AttnQNorm, "self_attn.q_layernorm"),
        (Role::AttnKNorm, "self_attn.k_layernorm"),
        (Role::AttnOutput, "self_attn.dense"),
        (Role::FfnUp, "mlp.dense_h_to_4h"),
        (Role::FfnDown, "mlp.dense_4h_to_h"),
    ],
    from_hf,
    from_gguf: no_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let norm = NormConfig::layer(fields.number("layer_norm_eps")?);
    let config = DecoderConfig { norm, ..fields.partly_rotated("persimmon", 0.5)? };
    let activation = fields.activation(Activation::Relu2)?;
    let qk_norm = fields.flag("qk_layernorm")?.unwrap_or(true).then_some(QkNorm::Heads);
    Ok(config.with_layers(|layer| {
        layer.set_biases(true);
        (layer.attention.qk_norm, layer.attention.qkv_groups) = (qk_norm, layer.attention.num_heads);
        layer.ffn.set_dense(|dense| (dense.is_gated, dense.activation) = (false, activation));
    }))
}

//! StarCoder 2: layer norms, biases, a feed-forward network without a gate.

use device::{Activation, RopeStyle};

use super::Architecture;
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, LayerConfig, NormConfig},
        fields::{Fields, GgufFields, HfFields},
    },
    weights::Role,
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["starcoder2"],
    class: "Starcoder2ForCausalLM",
    gguf: "starcoder2",
    names: &[(Role::FfnUp, "mlp.c_fc"), (Role::FfnDown, "mlp.c_proj")],
    from_hf,
    from_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let bias = fields.flag("use_bias")?.unwrap_or(true);
    let config = DecoderConfig {
        norm: NormConfig::layer(fields.number("norm_epsilon")?),
        tie_word_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(true),
        ..fields.windowed("starcoder2")?
    };
    let activation = fields.activation(Activation::GeluTanh)?;
    Ok(config.with_layers(|layer| set_layer(layer, bias, activation)))
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    Ok(fields.decoder("starcoder2", RopeStyle::Neox)?.with_layers(|layer| set_layer(layer, true, Activation::GeluTanh)))
}

fn set_layer(layer: &mut LayerConfig, bias: bool, activation: Activation) {
    layer.set_biases(bias);
    layer.ffn.set_dense(|dense| (dense.is_gated, dense.activation) = (false, activation));
}

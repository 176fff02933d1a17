//! StarCoder 2: layer norms, biases, a feed-forward network without a gate.

use device::{Activation, RopeStyle};

use super::Architecture;
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, LayerConfig, NormConfig},
        fields::{GgufFields, HfFields},
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
    let window = fields.size("sliding_window")?;
    let config = DecoderConfig {
        norm: NormConfig::layer(fields.number("norm_epsilon")?),
        tie_word_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(true),
        ..fields.decoder("starcoder2")?
    };
    Ok(config.with_layers(|layer| set_layer(layer, bias)).with_windows(|_| window))
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    Ok(fields.decoder("starcoder2", RopeStyle::Neox)?.with_layers(|layer| set_layer(layer, true)))
}

fn set_layer(layer: &mut LayerConfig, bias: bool) {
    layer.set_biases(bias);
    let ffn = layer.dense_mut();
    ffn.is_gated = false;
    ffn.activation = Activation::GeluTanh;
}

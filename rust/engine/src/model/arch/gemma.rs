//! Gemma, and what later generations share with it: norms that store `w` for `1 + w`, scaled and tied embeddings, tanh GELU.

use device::{Activation, RopeStyle};

use super::Architecture;
use crate::{
    EngineError,
    model::{
        config::{AttentionConfig, DecoderConfig, Norms},
        fields::{Fields, GgufFields, HfFields},
    },
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["gemma"],
    class: "GemmaForCausalLM",
    gguf: "gemma",
    names: &[],
    from_hf: |fields| read_hf("gemma", fields),
    from_gguf: |fields| read_gguf("gemma", fields),
};

/// What the config.json of every generation says.
pub(super) fn read_hf(architecture: &'static str, fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let mut config = with_embedding_scale(fields.decoder(architecture)?);
    config.norm.offset = 1.0;
    config.tie_word_embeddings = fields.flag("tie_word_embeddings")?.unwrap_or(true);
    // Early files say `"hidden_act": "gelu"` and mean the approximation.
    Ok(if fields.text("hidden_activation")?.is_none() { with_gelu(config) } else { config })
}

/// What the GGUF files of every generation say.
pub(super) fn read_gguf(architecture: &'static str, fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let config = with_embedding_scale(fields.decoder(architecture, RopeStyle::Neox)?);
    Ok(with_gelu(config))
}

fn with_gelu(config: DecoderConfig) -> DecoderConfig {
    config.with_layers(|layer| layer.ffn.set_dense(|dense| dense.activation = Activation::GeluTanh))
}

fn with_embedding_scale(config: DecoderConfig) -> DecoderConfig {
    DecoderConfig { embedding_scale: (config.hidden_size as f32).sqrt(), ..config }
}

/// What the second and third have too: norms around both halves of a layer, scores scaled by a number of the model's own and
/// capped.
pub(super) fn with_layers(config: DecoderConfig, scale: f32, softcap: Option<f32>) -> DecoderConfig {
    config.with_layers(|layer| {
        layer.norms = Norms::Around;
        (layer.attention.scale, layer.attention.softcap) = (scale, softcap);
    })
}

/// The scale of a GGUF file's scores: the 27B model, which has so many layers, scales by its width a head; files do not say so.
pub(super) fn gguf_scale(config: &DecoderConfig, layers_of_27b: usize) -> f32 {
    let is_27b = config.layers.len() == layers_of_27b;
    let scalar = |a: &AttentionConfig| if is_27b { config.hidden_size / a.num_heads.max(1) } else { a.head_dim };
    let scalar = config.layers.first().map_or(1, |layer| scalar(&layer.attention));
    (scalar as f32).sqrt().recip()
}

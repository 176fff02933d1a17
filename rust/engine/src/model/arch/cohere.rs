//! Command R: a layer norm for attention and the feed-forward network, which run side by side; neighbouring elements rotate.

use device::RopeStyle;

use super::Architecture;
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, NormConfig, QkNorm},
        fields::{Fields, GgufFields, HfFields},
    },
    weights::{Role, WeightId},
};

pub(super) const ARCHITECTURE: Architecture =
    Architecture { model_types: &["cohere"], class: "CohereForCausalLM", gguf: "command-r", names: &[], from_hf, from_gguf };

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let qk_norm = fields.flag("use_qk_norm")?.unwrap_or(false).then_some(QkNorm::OwnHeads);
    Ok(read_hf("cohere", fields)?.with_layers(|layer| layer.attention.qk_norm = qk_norm))
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let has_norms = fields.weights.contains(WeightId::layer(0, Role::AttnQNorm));
    let config = read_gguf("cohere", fields)?;
    Ok(config.with_layers(|layer| layer.attention.qk_norm = has_norms.then_some(QkNorm::OwnHeads)))
}

/// What both generations have in common.
pub(super) fn read_hf(architecture: &'static str, fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let mut config = DecoderConfig {
        norm: NormConfig::layer(fields.number("layer_norm_eps")?),
        logit_scale: fields.number("logit_scale")?.unwrap_or(0.0625) as f32,
        tie_word_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(true),
        ..fields.decoder(architecture)?
    };
    config.ropes[0].style = RopeStyle::Interleaved;
    fields.only_text("position_embedding_type", "rope_gptj")?;
    Ok(config.with_layers(|layer| layer.is_parallel = true))
}

/// The same of a GGUF file.
pub(super) fn read_gguf(architecture: &'static str, fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let logit_scale = fields.number("logit_scale")?.unwrap_or(0.0625) as f32;
    let config = DecoderConfig { logit_scale, ..fields.decoder(architecture, RopeStyle::Interleaved)? };
    Ok(config.with_layers(|layer| layer.is_parallel = true))
}

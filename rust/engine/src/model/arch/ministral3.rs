//! Ministral 3 and Mistral Small 3.1 on: mistral whose queries grow with their position.

use device::{QueryScale, RopeStyle};

use super::Architecture;
use crate::{
    EngineError,
    model::{
        config::DecoderConfig,
        fields::{Fields, GgufFields, HfFields},
    },
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["ministral3", "mistral3"],
    class: "Ministral3ForCausalLM",
    gguf: "mistral3",
    names: &[],
    from_hf,
    from_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let config = fields.windowed("ministral3")?;
    let Some(rope) = fields.child("rope_parameters")? else { return Ok(config) };
    with_scale(config, rope.number("llama_4_scaling_beta")?, rope.size("original_max_position_embeddings")?)
        .map_err(|why| rope.error("llama_4_scaling_beta", why))
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    // The converter permutes the rows of q and k.
    with_gguf_scale(fields.decoder("ministral3", RopeStyle::Interleaved)?, fields)
}

/// With the scale of queries that a file has, if it has one.
pub(super) fn with_gguf_scale(config: DecoderConfig, fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let key = "attention.temperature_scale";
    let length = match fields.size("attention.temperature_length")? {
        None => fields.size("rope.scaling.original_context_length")?,
        length => length,
    };
    with_scale(config, fields.number(key)?, length).map_err(|why| fields.error(key, why))
}

/// With a scale of queries that grows by that, if there is one.
pub(super) fn with_scale(config: DecoderConfig, beta: Option<f64>, length: Option<usize>) -> Result<DecoderConfig, &'static str> {
    let Some(beta) = beta.filter(|beta| *beta != 0.0) else { return Ok(config) };
    let length = length.ok_or("is there without the original context length")?;
    let scale = QueryScale { beta: beta as f32, length: length as u32, offset: 0 };
    Ok(config.with_layers(|layer| layer.attention.q_scale = Some(scale)))
}

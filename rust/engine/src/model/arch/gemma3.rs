//! Gemma 3 (text): Gemma 2 with normalized heads, five windowed layers for each full one, each kind with its own rotation.

use device::Mask;

use super::{Architecture, gemma};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, QkNorm},
        fields::{Fields, GgufFields, HfFields},
        rope::{RopeConfig, RopeScaling},
    },
    weights::Role,
};

/// Every sixth layer sees everything.
const PATTERN: usize = 6;
const LOCAL_THETA: f64 = 10_000.0;

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["gemma3", "gemma3_text"],
    class: "Gemma3ForCausalLM",
    gguf: "gemma3",
    names: &[(Role::FfnNorm, "pre_feedforward_layernorm")],
    from_hf,
    from_gguf,
};

/// `EmbeddingGemma` as llama.cpp's converter names it; a Hugging Face folder of it says that it is `gemma3_text`.
pub(super) const EMBEDDING: Architecture = Architecture {
    model_types: &["gemma-embedding"],
    class: "Gemma3TextModel",
    gguf: "gemma-embedding",
    names: ARCHITECTURE.names,
    from_hf,
    from_gguf: |fields| Ok(with_both_sides(read_gguf("gemma-embedding", fields, one_sided)?)),
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    if fields.object.contains_key("text_config") {
        return Err(EngineError::NotSupported(format!(
            "{}: gemma3 with images is not implemented; text-only gemma3 is",
            fields.what
        )));
    }
    let mut config = gemma::read_hf("gemma3", fields)?;
    let local = if fields.object.contains_key("rope_parameters") {
        fields.rope("sliding_attention", config.largest(|layer| layer.attention.head_dim), 1.0)?
    } else {
        local_rope(&config, fields.number("rope_local_base_freq")?.unwrap_or(LOCAL_THETA))
    };
    let pattern = fields.size("sliding_window_pattern")?.unwrap_or(PATTERN);
    let sliding = fields.sliding_layers(config.layers.len(), is_sliding(pattern))?;
    let window = fields.size("sliding_window")?;
    let scale = fields.number("query_pre_attn_scalar")?.unwrap_or(256.0).sqrt().recip() as f32;
    config.final_softcap = fields.softcap("final_logit_softcapping")?;
    let config = gemma::with_layers(config, scale, fields.softcap("attn_logit_softcapping")?);
    if fields.flag("use_bidirectional_attention")?.unwrap_or(false) {
        return Ok(with_both_sides(with_kinds(config, local, window.map(one_sided), |i| sliding[i])));
    }
    Ok(with_kinds(config, local, window, |i| sliding[i]))
}

/// Of a window around a query, in the terms of [`Mask::Full`].
fn one_sided(window: usize) -> usize {
    window / 2 + 1
}

fn with_both_sides(config: DecoderConfig) -> DecoderConfig {
    config.with_layers(|layer| layer.attention.mask = Mask::Full)
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    read_gguf("gemma3", fields, |window| window)
}

fn read_gguf(
    architecture: &'static str,
    fields: &GgufFields<'_>,
    window_of: fn(usize) -> usize,
) -> Result<DecoderConfig, EngineError> {
    let mut config = gemma::read_gguf(architecture, fields)?;
    let local = local_rope(&config, fields.number("rope.freq_base_swa")?.unwrap_or(LOCAL_THETA));
    let window = fields.size("attention.sliding_window")?;
    let pattern = fields.size("attention.sliding_window_pattern")?.unwrap_or(PATTERN);
    config.final_softcap = fields.softcap("final_logit_softcapping")?;
    let scale = gemma::gguf_scale(&config, 62);
    Ok(with_kinds(gemma::with_layers(config, scale, None), local, window.map(window_of), is_sliding(pattern)))
}

fn is_sliding(pattern: usize) -> impl Fn(usize) -> bool {
    move |layer| pattern == 0 || !(layer + 1).is_multiple_of(pattern)
}

/// Windowed layers rotate with another base and are not stretched.
fn local_rope(config: &DecoderConfig, theta: f64) -> RopeConfig {
    RopeConfig { theta, scaling: RopeScaling::None, ..config.ropes[0].clone() }
}

fn with_kinds(
    mut config: DecoderConfig,
    local: RopeConfig,
    window: Option<usize>,
    sliding: impl Fn(usize) -> bool,
) -> DecoderConfig {
    config.ropes.push(local);
    for (i, layer) in config.layers.iter_mut().enumerate() {
        layer.attention.qk_norm = Some(QkNorm::Heads);
        layer.attention.rope = Some(usize::from(sliding(i)));
    }
    config.with_windows(|i| window.filter(|_| sliding(i)))
}

//! Gemma 3 (text): norms around both halves of a layer, five windowed layers for each full one, each kind with its own rotation.

use device::{Activation, RopeStyle};

use super::Architecture;
use crate::{
    EngineError,
    model::{
        config::DecoderConfig,
        fields::{GgufFields, HfFields},
        rope::{RopeConfig, RopeScaling},
    },
};

/// Every sixth layer sees everything.
const PATTERN: usize = 6;
const LOCAL_THETA: f64 = 10_000.0;

pub(super) const ARCHITECTURE: Architecture =
    Architecture { model_types: &["gemma3", "gemma3_text"], class: "Gemma3ForCausalLM", gguf: "gemma3", from_hf, from_gguf };

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    if fields.object.contains_key("text_config") {
        return Err(EngineError::NotSupported(format!(
            "{}: gemma3 with images is not implemented; text-only gemma3 is",
            fields.what
        )));
    }
    if fields.flag("use_bidirectional_attention")? == Some(true) {
        return Err(fields.error("use_bidirectional_attention", "is true; only causal attention is implemented"));
    }
    let base = fields.decoder("gemma3")?;
    let local = if fields.object.contains_key("rope_parameters") {
        fields.rope("sliding_attention", base.head_dim)?
    } else {
        local_rope(&base, fields.number("rope_local_base_freq")?.unwrap_or(LOCAL_THETA))
    };
    let pattern = fields.size("sliding_window_pattern")?.unwrap_or(PATTERN);
    let sliding = fields.sliding_layers(base.layers.len())?;
    let window = fields.size("sliding_window")?;
    let scalar = fields.number("query_pre_attn_scalar")?.unwrap_or(256.0);
    let config = DecoderConfig {
        norm_offset: 1.0,
        activation: if fields.text("hidden_activation")?.is_some() { base.activation } else { Activation::GeluTanh },
        tie_word_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(true),
        attention_scale: scalar.sqrt().recip() as f32,
        attention_softcap: fields.softcap("attn_logit_softcapping")?,
        final_softcap: fields.softcap("final_logit_softcapping")?,
        ..base
    };
    Ok(with_layers(config, local, window, |i| sliding.as_ref().map_or_else(|| is_sliding(i, pattern), |s| s[i])))
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let base = fields.decoder("gemma3", RopeStyle::Neox)?;
    let local = local_rope(&base, fields.number("rope.freq_base_swa")?.unwrap_or(LOCAL_THETA));
    let window = fields.size("attention.sliding_window")?;
    let pattern = fields.size("attention.sliding_window_pattern")?.unwrap_or(PATTERN);
    // The 27B model alone scales by its width a head; files do not say so.
    let scalar = if base.layers.len() == 62 { base.hidden_size / base.num_heads.max(1) } else { base.head_dim };
    let config = DecoderConfig {
        activation: Activation::GeluTanh,
        attention_scale: (scalar as f32).sqrt().recip(),
        final_softcap: fields.number("final_logit_softcapping")?.map(|cap| cap as f32),
        ..base
    };
    Ok(with_layers(config, local, window, |i| is_sliding(i, pattern)))
}

fn is_sliding(layer: usize, pattern: usize) -> bool {
    pattern == 0 || !(layer + 1).is_multiple_of(pattern)
}

/// Windowed layers rotate with another base and are not stretched.
fn local_rope(config: &DecoderConfig, theta: f64) -> RopeConfig {
    RopeConfig { theta, scaling: RopeScaling::None, ..config.ropes[0].clone() }
}

fn with_layers(
    mut config: DecoderConfig,
    local: RopeConfig,
    window: Option<usize>,
    sliding: impl Fn(usize) -> bool,
) -> DecoderConfig {
    config.qk_norm = true;
    config.sandwich_norms = true;
    config.embedding_scale = (config.hidden_size as f32).sqrt();
    config.ropes.push(local);
    for (i, layer) in config.layers.iter_mut().enumerate() {
        layer.rope = usize::from(sliding(i));
    }
    config.set_windows(|i| window.filter(|_| sliding(i)));
    config
}

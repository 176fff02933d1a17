//! LFM2: gated short convolutions, and attention in some layers.

use device::RopeStyle;

use super::Architecture;
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, NormConfig, QkNorm, RecurrentConfig},
        fields::{Fields, GgufFields, HfFields},
    },
    weights::{Names, Role},
};

const KERNEL: usize = 3;

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["lfm2"],
    class: "Lfm2ForCausalLM",
    gguf: "lfm2",
    names: NAMES,
    from_hf: |fields| {
        let config = read_hf("lfm2", fields)?;
        let width = dense_width(fields, config.layers.first().map_or(0, |layer| layer.ffn.intermediate_size()))?;
        Ok(config.with_layers(|layer| layer.ffn.set_dense(|dense| dense.intermediate_size = width)))
    },
    from_gguf: |fields| with_layers(fields.decoder("lfm2", RopeStyle::Neox)?, fields),
};

pub(super) const NAMES: Names = &[
    (Role::OutputNorm, "model.embedding_norm"),
    (Role::AttnNorm, "operator_norm"),
    (Role::FfnNorm, "ffn_norm"),
    (Role::AttnQNorm, "self_attn.q_layernorm"),
    (Role::AttnKNorm, "self_attn.k_layernorm"),
    (Role::AttnOutput, "self_attn.out_proj"),
    (Role::MixInput, "conv.in_proj"),
    (Role::Conv, "conv.conv"),
    (Role::MixOutput, "conv.out_proj"),
    (Role::FfnGate, "feed_forward.w1"),
    (Role::FfnUp, "feed_forward.w3"),
    (Role::FfnDown, "feed_forward.w2"),
    (Role::Router, "feed_forward.gate"),
    (Role::RouterCorrection, "feed_forward.expert_bias$"),
    (Role::ExpertGate, "feed_forward.experts.*.w1"),
    (Role::ExpertUp, "feed_forward.experts.*.w3"),
    (Role::ExpertDown, "feed_forward.experts.*.w2"),
];

/// What both kinds have in common.
pub(super) fn read_hf(architecture: &'static str, fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    if fields.flag("conv_bias")? == Some(true) {
        return Err(fields.error("conv_bias", "is true; convolutions with biases are not implemented"));
    }
    // Older files have other names, which go first.
    let mut fields = fields.clone();
    for (older, key) in [("block_ff_dim", "intermediate_size"), ("tie_embedding", "tie_word_embeddings")] {
        if let Some(value) = fields.value(older) {
            fields.object.insert(key.into(), value);
        }
    }
    let config = DecoderConfig {
        norm: NormConfig::rms(fields.number("norm_eps")?.or(Some(1e-5))),
        tie_word_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(true),
        ..fields.decoder(architecture)?
    };
    let full = fields.layers("full_attn_idxs")?;
    let is_full = |layer: usize| full.as_ref().is_none_or(|full| full.contains(&layer));
    let is_recurrent = fields.recurrent_layers(config.layers.len(), &["conv"], |layer| !is_full(layer))?;
    let kernel = fields.size("conv_L_cache")?.unwrap_or(KERNEL);
    Ok(with_norms(config).with_recurrent(RecurrentConfig::ShortConv { kernel }, |layer| is_recurrent[layer]))
}

/// The same of a GGUF file, whose layers without key and value heads are convolutions.
pub(super) fn with_layers(config: DecoderConfig, fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let kernel = fields.size("shortconv.l_cache")?.unwrap_or(KERNEL);
    let is_recurrent = fields.layers_without("attention.head_count_kv", config.layers.len())?;
    Ok(with_norms(config).with_recurrent(RecurrentConfig::ShortConv { kernel }, |layer| is_recurrent[layer]))
}

fn with_norms(config: DecoderConfig) -> DecoderConfig {
    config.with_layers(|layer| layer.attention.qk_norm = Some(QkNorm::Heads))
}

/// The width of the networks, which the key may only be the beginning of.
fn dense_width(fields: &HfFields<'_>, width: usize) -> Result<usize, EngineError> {
    if !fields.flag("block_auto_adjust_ff_dim")?.unwrap_or(true) {
        return Ok(width);
    }
    let multiplier = fields.number("block_ffn_dim_multiplier")?.unwrap_or(1.0);
    let multiple = fields.size("block_multiple_of")?.unwrap_or(256).max(1);
    let width = (multiplier * (2 * width / 3) as f64) as usize;
    // One that is too large is refused as such.
    Ok(width.checked_next_multiple_of(multiple).unwrap_or(usize::MAX))
}

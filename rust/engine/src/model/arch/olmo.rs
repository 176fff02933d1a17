//! OLMo (arXiv:2402.00838): llama with layer norms that have no weights, some with bounds for queries, keys and values.

use device::RopeStyle;

use super::Architecture;
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, NormConfig},
        fields::{Fields, GgufFields, HfFields},
    },
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["olmo"],
    class: "OlmoForCausalLM",
    gguf: "olmo",
    names: &[],
    from_hf: |fields: &HfFields<'_>| with_norms(fields.decoder("olmo")?, fields, "clip_qkv"),
    // The converter permutes the rows of q and k.
    from_gguf: |fields: &GgufFields<'_>| {
        with_norms(fields.decoder("olmo", RopeStyle::Interleaved)?, fields, "attention.clamp_kqv")
    },
};

fn with_norms(config: DecoderConfig, fields: &impl Fields, clip: &str) -> Result<DecoderConfig, EngineError> {
    let clip = fields.softcap(clip)?;
    let norm = NormConfig { has_weights: false, ..NormConfig::layer(None) };
    Ok(DecoderConfig { norm, ..config }.with_layers(|layer| layer.attention.clip = clip))
}

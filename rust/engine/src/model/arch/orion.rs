//! Orion: llama with layer norms.

use device::RopeStyle;

use super::Architecture;
use crate::model::{
    config::{DecoderConfig, NormConfig},
    fields::{Fields, HfFields},
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["orion"],
    class: "OrionForCausalLM",
    gguf: "orion",
    names: &[],
    from_hf: |fields: &HfFields<'_>| {
        let norm = NormConfig::layer(fields.number("rms_norm_eps")?);
        Ok(DecoderConfig { norm, ..fields.decoder("orion")? })
    },
    from_gguf: |fields| fields.decoder("orion", RopeStyle::Neox),
};

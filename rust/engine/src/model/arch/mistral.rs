//! Mistral: llama with a window over all layers.

use device::RopeStyle;

use super::Architecture;
use crate::{
    EngineError,
    model::{config::DecoderConfig, fields::HfFields},
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["mistral"],
    class: "MistralForCausalLM",
    gguf: "llama",
    names: &[],
    from_hf,
    from_gguf: |fields| fields.decoder("mistral", RopeStyle::Interleaved),
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let window = fields.size("sliding_window")?;
    Ok(fields.decoder("mistral")?.with_windows(|_| window))
}

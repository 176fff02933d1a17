//! Qwen 3: each query and key head is normalised.

use device::RopeStyle;

use super::{Architecture, qwen2::set_windows};
use crate::{
    EngineError,
    model::{
        config::DecoderConfig,
        fields::{GgufFields, HfFields},
    },
};

pub(super) const ARCHITECTURE: Architecture =
    Architecture { model_types: &["qwen3"], class: "Qwen3ForCausalLM", gguf: "qwen3", from_hf, from_gguf };

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let mut config = fields.decoder("qwen3")?;
    config.qk_norm = true;
    set_windows(&mut config, fields)?;
    Ok(config)
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    Ok(DecoderConfig { qk_norm: true, ..fields.decoder("qwen3", RopeStyle::Neox)? })
}

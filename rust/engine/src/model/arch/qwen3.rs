//! Qwen 3: each query and key head is normalized.

use device::RopeStyle;

use super::{
    Architecture,
    qwen2::{read_hf, read_vl_gguf},
};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, QkNorm},
        fields::HfFields,
    },
};

/// Pairs that rotate by time, row and column, where a file does not say.
const SECTIONS: [usize; 3] = [24, 20, 20];

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["qwen3"],
    class: "Qwen3ForCausalLM",
    gguf: "qwen3",
    names: &[],
    from_hf: |fields| Ok(with_norms(read_hf("qwen3", fields)?)),
    from_gguf: |fields| Ok(with_norms(fields.decoder("qwen3", RopeStyle::Neox)?)),
};

/// The language model of Qwen3-VL; of text alone it is a Qwen 3.
pub(super) const VL: Architecture = Architecture {
    model_types: &["qwen3_vl", "qwen3_vl_text"],
    class: "Qwen3VLForConditionalGeneration",
    gguf: "qwen3vl",
    from_hf: |fields| read_vl("qwen3_vl", fields),
    from_gguf: |fields| Ok(with_norms(read_vl_gguf("qwen3_vl", fields, true)?)),
    ..ARCHITECTURE
};

/// As [`read_hf`], with rotation by time, row and column, which take turns.
pub(super) fn read_vl(architecture: &'static str, fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let mut config = with_norms(read_hf(architecture, fields)?);
    config.ropes[0].axes = fields.axes_in_turns(config.ropes[0].rotary_dim / 2, SECTIONS)?;
    Ok(config)
}

pub(super) fn with_norms(config: DecoderConfig) -> DecoderConfig {
    config.with_layers(|layer| layer.attention.qk_norm = Some(QkNorm::Heads))
}

//! Qwen 3: each query and key head is normalized.

use device::RopeStyle;

use super::{
    Architecture,
    qwen2::{read_hf, read_vl, read_vl_gguf},
};
use crate::model::config::{DecoderConfig, QkNorm};

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
    from_hf: |fields| Ok(with_norms(read_vl("qwen3_vl", fields)?)),
    from_gguf: |fields| Ok(with_norms(read_vl_gguf("qwen3_vl", fields, true)?)),
    ..ARCHITECTURE
};

pub(super) fn with_norms(config: DecoderConfig) -> DecoderConfig {
    config.with_layers(|layer| layer.attention.qk_norm = Some(QkNorm::Heads))
}

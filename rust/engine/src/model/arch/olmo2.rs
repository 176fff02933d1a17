//! OLMo 2: norms after attention and feed-forward network only, and over all of q and of k.

use device::RopeStyle;

use super::{Architecture, olmo3};
use crate::model::config::{DecoderConfig, Norms, QkNorm};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["olmo2"],
    class: "Olmo2ForCausalLM",
    gguf: "olmo2",
    names: &[],
    from_hf: |fields| Ok(with_norms(fields.decoder("olmo2")?)),
    // OLMo 3 calls itself so as well.
    from_gguf: |fields| olmo3::with_gguf_windows(with_norms(fields.decoder("olmo2", RopeStyle::Neox)?), fields),
};

pub(super) fn with_norms(config: DecoderConfig) -> DecoderConfig {
    config.with_layers(|layer| (layer.norms, layer.attention.qk_norm) = (Norms::After, Some(QkNorm::Row)))
}

//! Mistral: llama with a window over all layers.

use device::RopeStyle;

use super::Architecture;

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["mistral"],
    class: "MistralForCausalLM",
    gguf: "llama",
    names: &[],
    from_hf: |fields| fields.windowed("mistral"),
    from_gguf: |fields| fields.decoder("mistral", RopeStyle::Interleaved),
};

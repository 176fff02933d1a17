//! Llama 2 and 3, `SmolLM2`, and whatever else calls itself llama.

use device::RopeStyle;

use super::{Architecture, mixtral};
use crate::model::fields::Fields;

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["llama"],
    class: "LlamaForCausalLM",
    gguf: "llama",
    names: &[],
    from_hf: |fields| fields.decoder("llama"),
    // The converter to GGUF permutes the rows of q and k.
    from_gguf: |fields| match fields.size("expert_count")? {
        // It calls itself so as well.
        Some(1..) => mixtral::from_gguf(fields),
        _ => fields.decoder("llama", RopeStyle::Interleaved),
    },
};

//! Llama 2 and 3, `SmolLM2`, and whatever else calls itself llama.

use device::RopeStyle;
use serde_json::json;

use super::{Architecture, mixtral, no_gguf};
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

/// XVERSE: a llama by another name.
pub(super) const XVERSE: Architecture = Architecture {
    model_types: &["xverse"],
    class: "XverseForCausalLM",
    gguf: "xverse",
    names: &[],
    from_hf: |fields| fields.decoder("xverse"),
    // The converter permutes the rows of q and k.
    from_gguf: |fields| fields.decoder("xverse", RopeStyle::Interleaved),
};

/// A llama by another name, with heads of a width of its own.
pub(super) const IQUEST_CODER: Architecture = Architecture {
    model_types: &["iquestcoder"],
    class: "IQuestCoderForCausalLM",
    gguf: "iquestcoder",
    names: &[],
    from_hf: |fields| {
        let usual = json!({"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5});
        fields.with_defaults(&usual).decoder("iquestcoder")
    },
    from_gguf: no_gguf,
};

//! Mistral: llama with a window over all layers; the first Ministral and CWM, over some.

use device::RopeStyle;
use serde_json::json;

use super::{Architecture, no_gguf};
use crate::model::fields::Fields;

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["mistral"],
    class: "MistralForCausalLM",
    gguf: "llama",
    names: &[],
    from_hf: |fields| fields.windowed("mistral"),
    from_gguf: |fields| fields.decoder("mistral", RopeStyle::Interleaved),
};

pub(super) const MINISTRAL: Architecture = Architecture {
    model_types: &["ministral"],
    class: "MinistralForCausalLM",
    gguf: "llama",
    names: &[],
    from_hf: |fields| {
        let fields = fields.with_defaults(&json!({"num_key_value_heads": 8, "sliding_window": 4096}));
        let config = fields.decoder("ministral")?;
        let window = fields.size("sliding_window")?;
        let sliding = fields.sliding_layers(config.layers.len(), |_| window.is_some())?;
        Ok(config.with_windows(|layer| window.filter(|_| sliding[layer])))
    },
    // Which layers have the window has no key.
    from_gguf: no_gguf,
};

/// Of four layers one sees everything, from the first one on.
pub(super) const CWM: Architecture = Architecture {
    model_types: &["cwm"],
    class: "CwmForCausalLM",
    gguf: "llama",
    names: &[],
    from_hf: |fields| {
        let fields = fields.with_llama3_rope(1_000_000.0, 16.0).with_defaults(&json!({
            "head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "sliding_window": 8192,
            "eos_token_id": [128_001, 128_008, 128_009],
        }));
        let config = fields.decoder("cwm")?;
        let window = fields.size("sliding_window")?.filter(|window| *window > 0);
        let sliding = fields.sliding_layers(config.layers.len(), |layer| !layer.is_multiple_of(4))?;
        Ok(config.with_windows(|layer| window.filter(|_| sliding[layer])))
    },
    from_gguf: no_gguf,
};

//! Phi 3 and 3.5, Phi 4 mini: fused projections, longrope. Phi-3-vision and Phi-4-multimodal of text alone are such.

use device::RopeStyle;
use serde_json::json;

use super::Architecture;
use crate::{
    EngineError,
    model::{
        config::DecoderConfig,
        fields::{Fields, HfFields},
    },
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["phi3", "phi3_v", "phi4mm", "phi4_multimodal"],
    class: "Phi3ForCausalLM",
    gguf: "phi3",
    names: &[],
    from_hf,
    from_gguf: |fields| fields.decoder("phi3", RopeStyle::Neox),
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    if fields.text("model_type")?.as_deref() != Some("phi4_multimodal") {
        return fields.windowed("phi3");
    }
    let usual = json!({
        "vocab_size": 200_064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 131_072, "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "eos_token_id": [199_999, 200_020],
    });
    fields.with_defaults(&usual).windowed("phi3")
}

//! Bamba: a llama whose layers are Mamba-2, but for a few with attention, half of whose heads rotates.

use serde_json::json;

use super::{Architecture, falcon_h1, mamba, no_gguf};
use crate::{
    EngineError,
    model::{
        config::DecoderConfig,
        fields::{Fields, HfFields},
    },
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["bamba"],
    class: "BambaForCausalLM",
    gguf: "bamba",
    names: falcon_h1::NAMES,
    from_hf,
    // Its converter calls it granitehybrid, whose heads rotate whole.
    from_gguf: no_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let config = fields.with_defaults(&json!({"partial_rotary_factor": 0.5})).decoder("bamba")?;
    let head_dim = config.largest(|layer| layer.attention.head_dim);
    if let Some(rotary) = fields.size("attn_rotary_emb")?.filter(|n| 2 * n != head_dim) {
        return Err(fields.error("attn_rotary_emb", format!("is {rotary}; implemented: {}, half a head", head_dim / 2)));
    }
    let attends = fields.layers("attn_layer_indices")?.unwrap_or_default();
    if let Some(layer) = attends.iter().find(|layer| **layer >= config.layers.len()) {
        return Err(fields.error("attn_layer_indices", format!("has {layer}; there are {} layers", config.layers.len())));
    }
    let mamba = mamba::read_hf(fields, &config)?;
    Ok(config.with_recurrent(mamba, |layer| !attends.contains(&layer)))
}

//! Llama 3.2 Vision: a llama, some of whose layers look at the vectors of images in place of tokens.

use super::{Architecture, no_gguf};
use crate::{
    EngineError,
    model::{
        config::DecoderConfig,
        fields::{Fields, HfFields},
    },
};

/// Rows of the token embedding behind those of the vocabulary, of which the first is the token of images.
const NUM_FURTHER_ROWS: usize = 8;
/// The layers that look at images, unless the file says which.
const CROSS_LAYERS: [usize; 8] = [3, 8, 13, 18, 23, 28, 33, 38];

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["mllama_text_model", "mllama"],
    class: "MllamaForConditionalGeneration",
    gguf: "mllama",
    names: &[],
    from_hf,
    from_gguf: no_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let mut config = fields.decoder("mllama_text_model")?;
    let num_heads = config.largest(|layer| layer.attention.num_heads);
    if let Some(head_dim) = fields.size("head_dim")?.filter(|head_dim| head_dim * num_heads != config.hidden_size) {
        let why = format!("is {head_dim}; it must be the width of {} divided by {num_heads} heads", config.hidden_size);
        return Err(fields.error("head_dim", why));
    }
    for key in ["attention_bias", "mlp_bias"] {
        if fields.flag(key)? == Some(true) {
            return Err(fields.error(key, "is true; implemented: false"));
        }
    }
    config.num_further_rows = NUM_FURTHER_ROWS;
    let crossed = fields.layers("cross_attention_layers")?.unwrap_or_else(|| CROSS_LAYERS.into());
    if crossed.is_empty() || crossed.iter().any(|index| *index >= config.layers.len()) {
        let why = format!("is {crossed:?}; it must name some of the {} layers, counted from 0", config.layers.len());
        return Err(fields.error("cross_attention_layers", why));
    }
    for (index, layer) in config.layers.iter_mut().enumerate() {
        layer.is_cross = crossed.contains(&index);
    }
    Ok(config)
}

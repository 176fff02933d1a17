//! Models none of whose layers has attention or a feed-forward network.

use device::Activation;

use super::{Fields, GgufFields, HfFields};
use crate::{
    EngineError,
    model::config::{DecoderConfig, FfnConfig, LayerConfig, MAX_LAYERS, NormConfig},
    weights::{Role, WeightId},
};

/// Tokens of a request where no key says it, since a state has room for any number: what llama.cpp's converter writes.
const CONTEXT: usize = 1 << 20;

/// So many layers with a norm and nothing behind it yet.
fn bare_layers(fields: &impl Fields, key: &str) -> Result<Vec<LayerConfig>, EngineError> {
    let num_layers = fields.required_size(key)?;
    if num_layers > MAX_LAYERS {
        return Err(fields.error(key, format!("is {num_layers}; at most {MAX_LAYERS} are supported")));
    }
    let mut layer = LayerConfig::new([1; 3], 1, Activation::Silu);
    (layer.has_attention, layer.attention.rope, layer.ffn) = (false, None, FfnConfig::Nothing);
    Ok(vec![layer; num_layers])
}

impl HfFields<'_> {
    /// What such families name alike.
    pub fn bare(&self, architecture: &'static str) -> Result<DecoderConfig, EngineError> {
        self.only_text("hidden_act", "silu")?;
        Ok(DecoderConfig {
            architecture,
            vocab_size: self.required_size("vocab_size")?,
            hidden_size: self.required_size("hidden_size")?,
            max_position_embeddings: self.size("max_position_embeddings")?.unwrap_or(CONTEXT),
            norm: NormConfig::rms(self.number("layer_norm_epsilon")?.or(Some(1e-5))),
            layers: bare_layers(self, "num_hidden_layers")?,
            tie_word_embeddings: self.flag("tie_word_embeddings")?.unwrap_or(false),
            eos_token_ids: self.token_ids("eos_token_id")?,
            ..DecoderConfig::default()
        })
    }
}

impl GgufFields<'_> {
    /// The same of a file, whose keys about attention and networks are zeros.
    pub fn bare(&self, architecture: &'static str) -> Result<DecoderConfig, EngineError> {
        Ok(DecoderConfig {
            architecture,
            vocab_size: self.weights.vocab_size()?,
            hidden_size: self.required_size("embedding_length")?,
            max_position_embeddings: self.required_size("context_length")?,
            norm: self.norm()?,
            layers: bare_layers(self, "block_count")?,
            tie_word_embeddings: !self.weights.contains(WeightId::global(Role::Output)),
            eos_token_ids: self.eos_token_ids(),
            ..DecoderConfig::default()
        })
    }
}

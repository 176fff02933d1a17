//! `ModernBERT` (arXiv:2412.13663) and `EuroBERT` (arXiv:2503.05500): encoders whose tokens all see each other, with rotations
//! and gates. The former has windows in two of three layers, and its first layer no norm before attention.

use device::{Activation, Mask};
use serde_json::json;

use super::{Architecture, no_gguf};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, NormConfig, Norms},
        fields::{Fields, HfFields},
        rope::RopeConfig,
    },
    weights::Role,
};

/// Every so many layers one sees everything, the first among them.
const PATTERN: usize = 3;

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["modernbert"],
    class: "ModernBertModel",
    gguf: "modern-bert",
    names: &[
        (Role::ClassifierDense, "head.dense"),
        (Role::Classifier, "classifier"),
        (Role::Embedding, "model.embeddings.tok_embeddings"),
        (Role::EmbeddingNorm, "model.embeddings.norm"),
        (Role::OutputNorm, "model.final_norm"),
        (Role::AttnNorm, "attn_norm"),
        (Role::AttnQkv, "attn.Wqkv"),
        (Role::AttnOutput, "attn.Wo"),
        (Role::FfnNorm, "mlp_norm"),
        (Role::FfnGateUp, "mlp.Wi"),
        (Role::FfnDown, "mlp.Wo"),
    ],
    from_hf,
    from_gguf: no_gguf,
};

pub(super) const EUROBERT: Architecture = Architecture {
    model_types: &["eurobert"],
    class: "EuroBertModel",
    gguf: "eurobert",
    names: &[],
    from_hf: |fields| {
        let fields = fields.with_defaults(&json!({"rms_norm_eps": 1e-5}));
        fields.text("position_embedding_type")?;
        Ok(fields.decoder("eurobert")?.with_layers(|layer| layer.attention.mask = Mask::Full))
    },
    from_gguf: no_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let usual = json!({
        "global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0, "local_attention": 128, "norm_eps": 1e-5,
        "hidden_activation": "gelu",
    });
    let fields = fields.with_defaults(&usual);
    // It rotates whatever this says.
    fields.text("position_embedding_type")?;
    let config = DecoderConfig {
        norm: NormConfig::layer(fields.number("norm_eps")?),
        embedding_norm: true,
        tie_word_embeddings: true,
        ..fields.decoder("modernbert")?
    };
    let pattern = fields.size("global_attn_every_n_layers")?.unwrap_or(PATTERN);
    let sliding = fields.sliding_layers(config.layers.len(), |layer| pattern == 0 || !layer.is_multiple_of(pattern))?;
    // So many tokens around one, half of them on each side, and itself.
    let window = fields.required_size("local_attention")? / 2 + 1;
    let ropes = if fields.object.contains_key("rope_parameters") {
        let head_dim = config.largest(|layer| layer.attention.head_dim);
        vec![fields.rope("full_attention", head_dim, 1.0)?, fields.rope("sliding_attention", head_dim, 1.0)?]
    } else {
        let of = |key| {
            let theta = fields.number(key)?.unwrap_or_default();
            Ok::<_, EngineError>(RopeConfig { theta, ..config.ropes[0].clone() })
        };
        vec![of("global_rope_theta")?, of("local_rope_theta")?]
    };
    let activation = fields.activation(Activation::Gelu)?;
    let mut index = 0;
    let config = DecoderConfig { ropes, ..config }.with_layers(|layer| {
        layer.norms = if index == 0 { Norms::BeforeFfn } else { Norms::Before };
        (layer.attention.mask, layer.attention.rope) = (Mask::Full, Some(usize::from(sliding[index])));
        layer.ffn.set_dense(|dense| dense.activation = activation);
        index += 1;
    });
    Ok(config.with_windows(|layer| sliding[layer].then_some(window)))
}

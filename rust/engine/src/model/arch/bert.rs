//! BERT (arXiv:1810.04805) and its kin, encoders whose tokens all see each other: a learned vector of each position and kind
//! of token, norms of the sums, no gates. `RoBERTa` and XLM-`RoBERTa` have one kind, `DistilBERT` none and other names, and
//! Nomic's has rotations and gates.

use device::{Activation, Mask, RopeStyle};
use serde_json::json;

use super::{Architecture, no_gguf};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, NormConfig, Norms, PositionsConfig},
        fields::{Fields, GgufFields, HfFields},
    },
    weights::{Names, Role, WeightId},
};

/// What the norms of all of them add.
const EPS: f64 = 1e-12;

/// `RoBERTa`'s classifier has a layer of its own in the place of BERT's pooler.
const NAMES: Names = &[
    (Role::ClassifierDense, "classifier.dense"),
    (Role::ClassifierDense, "model.pooler.dense"),
    (Role::Classifier, "classifier.out_proj"),
    (Role::Classifier, "classifier"),
    (Role::Embedding, "model.embeddings.word_embeddings"),
    (Role::Positions, "model.embeddings.position_embeddings"),
    (Role::TokenTypes, "model.embeddings.token_type_embeddings"),
    (Role::EmbeddingNorm, "model.embeddings.LayerNorm"),
    (Role::AttnQ, "attention.self.query"),
    (Role::AttnK, "attention.self.key"),
    (Role::AttnV, "attention.self.value"),
    (Role::AttnOutput, "attention.output.dense"),
    (Role::PostAttnNorm, "attention.output.LayerNorm"),
    (Role::FfnUp, "intermediate.dense"),
    (Role::FfnDown, "output.dense"),
    (Role::PostFfnNorm, "output.LayerNorm"),
];

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["bert"],
    class: "BertModel",
    gguf: "bert",
    names: NAMES,
    from_hf: |fields| from_hf("bert", fields, 0),
    from_gguf: |fields| {
        let config = encoder(fields.decoder("bert", RopeStyle::Neox)?);
        let num_token_types = token_types(fields)?;
        Ok(with_positions(config, PositionsConfig { num_token_types, ..PositionsConfig::default() }))
    },
};

pub(super) const ROBERTA: Architecture = Architecture {
    model_types: &["roberta", "camembert"],
    class: "RobertaModel",
    gguf: "roberta",
    names: NAMES,
    from_hf: |fields| from_hf("roberta", fields, padding(fields)?),
    from_gguf: no_gguf,
};

pub(super) const XLM_ROBERTA: Architecture = Architecture {
    model_types: &["xlm-roberta"],
    class: "XLMRobertaModel",
    gguf: "xlm-roberta",
    names: NAMES,
    from_hf: |fields| from_hf("xlm-roberta", fields, padding(fields)?),
    from_gguf: no_gguf,
};

pub(super) const DISTILBERT: Architecture = Architecture {
    model_types: &["distilbert"],
    class: "DistilBertModel",
    gguf: "distilbert",
    names: &[
        (Role::ClassifierDense, "pre_classifier"),
        (Role::Classifier, "classifier"),
        (Role::Embedding, "model.embeddings.word_embeddings"),
        (Role::Positions, "model.embeddings.position_embeddings"),
        (Role::EmbeddingNorm, "model.embeddings.LayerNorm"),
        (Role::AttnQ, "attention.q_lin"),
        (Role::AttnK, "attention.k_lin"),
        (Role::AttnV, "attention.v_lin"),
        (Role::AttnOutput, "attention.out_lin"),
        (Role::PostAttnNorm, "sa_layer_norm"),
        (Role::FfnUp, "ffn.lin1"),
        (Role::FfnDown, "ffn.lin2"),
        (Role::PostFfnNorm, "output_layer_norm"),
    ],
    from_hf: |fields| {
        let own = [
            ("dim", "hidden_size"),
            ("n_heads", "num_attention_heads"),
            ("n_layers", "num_hidden_layers"),
            ("hidden_dim", "intermediate_size"),
            ("activation", "hidden_act"),
        ];
        // Its table is in the file whichever way it was made.
        fields.flag("sinusoidal_pos_embds")?;
        from_hf("distilbert", &fields.renamed(&own).with_defaults(&json!({"type_vocab_size": 0})), 0)
    },
    from_gguf: no_gguf,
};

/// Nomic Embed (arXiv:2402.01613). The hub's configuration has the keys of GPT-2.
pub(super) const NOMIC: Architecture = Architecture {
    model_types: &["nomic_bert"],
    class: "NomicBertModel",
    gguf: "nomic-bert",
    names: &[
        (Role::Embedding, "model.embeddings.word_embeddings"),
        (Role::TokenTypes, "model.embeddings.token_type_embeddings"),
        (Role::EmbeddingNorm, "model.emb_ln"),
        (Role::AttnQkv, "attn.Wqkv"),
        (Role::AttnOutput, "attn.out_proj"),
        (Role::PostAttnNorm, "norm1"),
        (Role::FfnUp, "mlp.fc11"),
        (Role::FfnGate, "mlp.fc12"),
        (Role::FfnDown, "mlp.fc2"),
        (Role::PostFfnNorm, "norm2"),
    ],
    from_hf: nomic,
    from_gguf: |fields| {
        let config = encoder(fields.decoder("nomic_bert", RopeStyle::Neox)?);
        let positions = PositionsConfig { are_there: false, num_token_types: token_types(fields)?, padding: 0 };
        Ok(DecoderConfig { positions: (positions.num_token_types > 0).then_some(positions), ..config })
    },
};

fn from_hf(architecture: &'static str, fields: &HfFields<'_>, padding: usize) -> Result<DecoderConfig, EngineError> {
    fields.only(&[("position_embedding_type", json!("absolute")), ("is_decoder", json!(false))])?;
    let eps = fields.number("layer_norm_eps")?.unwrap_or(EPS);
    let mut config = DecoderConfig { norm: NormConfig::layer(Some(eps)), ..fields.decoder(architecture)? };
    // Their table has rows that no position has.
    let rows = config.max_position_embeddings;
    config.max_position_embeddings = rows.checked_sub(padding).filter(|rows| *rows > 0).ok_or_else(|| {
        fields.error("max_position_embeddings", format!("is {rows}, and {padding} rows of the table are no positions"))
    })?;
    let num_token_types = fields.size("type_vocab_size")?.unwrap_or(2);
    let activation = fields.activation(Activation::Gelu)?;
    let config = with_positions(encoder(config), PositionsConfig { padding, num_token_types, ..PositionsConfig::default() });
    Ok(config.with_layers(|layer| layer.ffn.set_dense(|dense| dense.activation = activation)))
}

/// Positions are counted from behind the number of the token that fills batches up.
fn padding(fields: &HfFields<'_>) -> Result<usize, EngineError> {
    Ok(fields.size("pad_token_id")?.unwrap_or(1) + 1)
}

fn nomic(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    fields.only(&[
        ("qkv_proj_bias", json!(false)),
        ("mlp_fc1_bias", json!(false)),
        ("mlp_fc2_bias", json!(false)),
        ("prenorm", json!(false)),
        ("parallel_block", json!(false)),
        ("use_rms_norm", json!(false)),
        ("causal", json!(false)),
        ("rotary_emb_interleaved", json!(false)),
        ("rotary_emb_fraction", json!(1.0)),
        ("activation_function", json!("swiglu")),
    ])?;
    for key in ["rotary_emb_scale_base", "rotary_scaling_factor"] {
        if let Some(value) = fields.value(key) {
            return Err(fields.error(key, format!("is {value}; implemented: null")));
        }
    }
    let fields = fields.also_called(&[
        ("n_embd", "hidden_size"),
        ("n_head", "num_attention_heads"),
        ("n_layer", "num_hidden_layers"),
        ("n_inner", "intermediate_size"),
        ("n_positions", "max_position_embeddings"),
        ("layer_norm_epsilon", "layer_norm_eps"),
        ("rotary_emb_base", "rope_theta"),
    ]);
    let fields = fields.with_defaults(&json!({"rope_theta": 1000.0}));
    let eps = fields.number("layer_norm_eps")?.unwrap_or(EPS);
    let config = encoder(DecoderConfig { norm: NormConfig::layer(Some(eps)), ..fields.decoder("nomic_bert")? });
    let num_token_types = fields.size("type_vocab_size")?.unwrap_or(2);
    let positions = PositionsConfig { are_there: false, num_token_types, padding: 0 };
    let activation = fields.activation(Activation::Silu)?;
    let config = DecoderConfig { positions: (num_token_types > 0).then_some(positions), ..config };
    Ok(config.with_layers(|layer| layer.ffn.set_dense(|dense| dense.activation = activation)))
}

/// Rows of the table of kinds of tokens.
fn token_types(fields: &GgufFields<'_>) -> Result<usize, EngineError> {
    let id = WeightId::global(Role::TokenTypes);
    if fields.weights.contains(id) { Ok(fields.weights.matrix_shape(id)?[0]) } else { Ok(0) }
}

/// What all of them have.
fn encoder(config: DecoderConfig) -> DecoderConfig {
    let config = DecoderConfig { embedding_norm: true, output_norm: false, tie_word_embeddings: true, ..config };
    config.with_layers(|layer| (layer.norms, layer.attention.mask) = (Norms::OfSums, Mask::Full))
}

/// And those whose positions are learned.
fn with_positions(config: DecoderConfig, positions: PositionsConfig) -> DecoderConfig {
    config.with_positions(positions).with_layers(|layer| {
        layer.set_biases(true);
        layer.ffn.set_dense(|dense| (dense.is_gated, dense.activation) = (false, Activation::Gelu));
    })
}

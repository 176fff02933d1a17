//! GTE (arXiv:2407.19669) and Jina Embeddings 3 (arXiv:2409.10173): encoders whose tokens all see each other, with rotations and
//! norms of the sums; the former has gates. The hub's files of it have a configuration of their own, whose `model_type` is `new`.

use device::{Activation, Mask};
use serde_json::{Value, json};

use super::{Architecture, no_gguf};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, NormConfig, Norms, PositionsConfig},
        fields::{Fields, HfFields},
        rope::RopeScaling,
    },
    weights::Role,
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["gte", "new"],
    class: "GteModel",
    gguf: "gte",
    names: &[
        (Role::ClassifierDense, "model.pooler.dense"),
        (Role::Classifier, "classifier"),
        (Role::Embedding, "model.embeddings.word_embeddings"),
        (Role::TokenTypes, "model.embeddings.token_type_embeddings"),
        (Role::EmbeddingNorm, "model.embeddings.LayerNorm"),
        (Role::AttnQkv, "attention.qkv_proj"),
        (Role::AttnQ, "self_attn.q_proj"),
        (Role::AttnQ, "attention.q_proj"),
        (Role::AttnK, "self_attn.k_proj"),
        (Role::AttnK, "attention.k_proj"),
        (Role::AttnV, "self_attn.v_proj"),
        (Role::AttnV, "attention.v_proj"),
        (Role::AttnOutput, "self_attn.o_proj"),
        (Role::AttnOutput, "attention.o_proj"),
        (Role::PostAttnNorm, "post_attention_layernorm"),
        (Role::PostAttnNorm, "attn_ln"),
        (Role::FfnGateUp, "mlp.up_gate_proj"),
        (Role::PostFfnNorm, "post_mlp_layernorm"),
        (Role::PostFfnNorm, "mlp_ln"),
    ],
    from_hf: gte,
    from_gguf: no_gguf,
};

/// Jina Embeddings 3 as Transformers has it, without the adapters by task that its folder has beside it.
pub(super) const JINA: Architecture = Architecture {
    model_types: &["jina_embeddings_v3"],
    class: "JinaEmbeddingsV3Model",
    gguf: "jina-bert-v3",
    names: &[
        (Role::ClassifierDense, "classifier.dense"),
        (Role::Classifier, "classifier.out_proj"),
        (Role::Embedding, "model.embeddings.word_embeddings"),
        (Role::TokenTypes, "model.embeddings.token_type_embeddings"),
        (Role::EmbeddingNorm, "model.embeddings.LayerNorm"),
        (Role::EmbeddingNorm, "model.emb_ln"),
        (Role::AttnQkv, "mixer.Wqkv"),
        (Role::AttnOutput, "self_attn.o_proj"),
        (Role::AttnOutput, "mixer.out_proj"),
        (Role::PostAttnNorm, "post_attention_layernorm"),
        (Role::PostAttnNorm, "norm1"),
        (Role::FfnUp, "mlp.fc1"),
        (Role::FfnDown, "mlp.fc2"),
        (Role::PostFfnNorm, "post_mlp_layernorm"),
        (Role::PostFfnNorm, "norm2"),
    ],
    from_hf: jina,
    from_gguf: no_gguf,
};

fn jina(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    fields.only(&[("is_decoder", json!(false))])?;
    let fields = fields.with_defaults(&json!({"rope_theta": 20_000.0, "layer_norm_eps": 1e-5}));
    Ok(encoder("jina_embeddings_v3", &fields)?.with_layers(|layer| {
        layer.set_biases(true);
        layer.ffn.set_dense(|dense| dense.is_gated = false);
    }))
}

fn gte(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    fields.only(&[
        ("layer_norm_type", json!("layer_norm")),
        ("position_embedding_type", json!("rope")),
        ("logn_attention_scale", json!(false)),
        ("is_decoder", json!(false)),
    ])?;
    // What is left of these changes how it is computed, and no value. The third is of the scale that is refused above.
    for key in ["unpad_inputs", "use_memory_efficient_attention", "logn_attention_clip1", "pack_qkv"] {
        fields.value(key);
    }
    let usual_theta = if fields.text("model_type")?.as_deref() == Some("new") { 10_000.0 } else { 160_000.0 };
    let (fields, factor) = without_ntk(fields)?;
    let fields = fields.with_defaults(&json!({"rope_theta": usual_theta}));
    let mut config = encoder("gte", &fields)?;
    if let Some(factor) = factor {
        for rope in &mut config.ropes {
            rope.theta *= factor;
            rope.scaling = RopeScaling::Linear(factor.powf(2.0 / rope.rotary_dim as f64));
        }
    }
    Ok(config.with_layers(|layer| {
        (layer.attention.qkv_bias, layer.attention.output_bias) = (true, true);
        layer.ffn.set_dense(|dense| dense.is_up_first = true);
    }))
}

/// What both have.
fn encoder(architecture: &'static str, fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let eps = fields.number("layer_norm_eps")?.unwrap_or(1e-12);
    let num_token_types = fields.size("type_vocab_size")?.unwrap_or(1);
    let positions = PositionsConfig { are_there: false, num_token_types, padding: 0 };
    let config = DecoderConfig {
        norm: NormConfig::layer(Some(eps)),
        embedding_norm: true,
        output_norm: false,
        tie_word_embeddings: true,
        positions: (num_token_types > 0).then_some(positions),
        ..fields.decoder(architecture)?
    };
    let activation = fields.activation(Activation::Gelu)?;
    Ok(config.with_layers(|layer| {
        (layer.norms, layer.attention.mask) = (Norms::OfSums, Mask::Full);
        layer.ffn.set_dense(|dense| dense.activation = activation);
    }))
}

/// The configuration without a stretch of rotations that the hub's files call `ntk`, and by how much it stretches: the base is
/// multiplied by that, and the frequencies are divided so that the lowest is as if positions were.
fn without_ntk<'a>(fields: &HfFields<'a>) -> Result<(HfFields<'a>, Option<f64>), EngineError> {
    let scaling = fields.child("rope_scaling")?;
    let Some(scaling) = scaling.filter(|scaling| scaling.object.get("type").is_some_and(|kind| kind == "ntk")) else {
        return Ok((fields.clone(), None));
    };
    if let Some(value) = scaling.value("mixed_b") {
        return Err(scaling.error("mixed_b", format!("is {value}; implemented: null")));
    }
    let factor = scaling.number("factor")?.ok_or_else(|| scaling.error("factor", "is missing for ntk rope"))?;
    if !(1.0..=1e6).contains(&factor) {
        return Err(scaling.error("factor", format!("is {factor}; it must be from 1 to 1000000")));
    }
    let mut plain = fields.clone();
    plain.object.insert("rope_scaling".into(), Value::Null);
    Ok((plain, Some(factor)))
}

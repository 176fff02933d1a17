//! Falcon: attention and feed-forward network side by side, one head of keys and values or a few (arXiv:2311.16867).

use device::{Activation, RopeStyle};
use serde_json::json;

use super::Architecture;
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, LayerConfig, NormConfig},
        fields::{Fields, GgufFields, HfFields},
    },
    weights::Role,
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["falcon", "RefinedWebModel", "RefinedWeb"],
    class: "FalconForCausalLM",
    gguf: "falcon",
    names: &[
        (Role::Embedding, "model.word_embeddings"),
        (Role::OutputNorm, "model.ln_f"),
        (Role::AttnNorm, "input_layernorm"),
        (Role::AttnNorm, "ln_attn"),
        (Role::AttnQkv, "self_attention.query_key_value"),
        (Role::AttnOutput, "self_attention.dense"),
        (Role::FfnNorm, "post_attention_layernorm"),
        (Role::FfnNorm, "ln_mlp"),
        (Role::FfnUp, "mlp.dense_h_to_4h"),
        (Role::FfnDown, "mlp.dense_4h_to_h"),
    ],
    from_hf,
    from_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let own = [
        ("n_layer", "num_hidden_layers"),
        ("n_head", "num_attention_heads"),
        ("n_head_kv", "num_kv_heads"),
        ("n_embed", "hidden_size"),
        ("activation", "hidden_act"),
        ("ffn_hidden_size", "intermediate_size"),
    ];
    let mut fields = fields.also_called(&own).with_defaults(&json!({"max_position_embeddings": 2048}));
    fields.only(&[("alibi", json!(false)), ("apply_residual_connection_post_layernorm", json!(false))])?;
    let flag = |key, usual| Ok::<_, EngineError>(fields.flag(key)?.unwrap_or(usual));
    let (is_new, bias) = (flag("new_decoder_architecture", false)?, flag("bias", false)?);
    let is_parallel = is_new || flag("parallel_attn", true)?;
    let has_two_norms = is_new && fields.size("num_ln_in_parallel_attn")?.unwrap_or(2) == 2;
    // Of the first models the key says nothing.
    let num_kv_heads = match fields.size("num_kv_heads")? {
        _ if !is_new && flag("multi_query", true)? => 1,
        Some(count) => count,
        None => fields.required_size("num_attention_heads")?,
    };
    fields.object.insert("num_key_value_heads".into(), json!(num_kv_heads));
    fields.set_usual_width()?;
    let config = DecoderConfig {
        norm: NormConfig::layer(fields.number("layer_norm_epsilon")?),
        tie_word_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(true),
        ..fields.partly_rotated("falcon", 1.0)?
    };
    let activation = fields.activation(Activation::Gelu)?;
    Ok(config.with_layers(|layer| {
        set_layer(layer, activation, is_parallel);
        (layer.has_own_ffn_norm, layer.attention.qkv_groups) = (has_two_norms, num_kv_heads);
        layer.set_biases(bias);
    }))
}

/// The converter puts the rows of q, k and v one after the other.
fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    if fields.weights.tensor("blk.0.attn_norm_2.weight").is_ok() {
        return Err(EngineError::Architecture(format!(
            "{}: GGUF files of falcon with two norms a layer (40B) are not implemented; Hugging Face folders of it are",
            fields.what
        )));
    }
    Ok(fields.decoder("falcon", RopeStyle::Neox)?.with_layers(|layer| set_layer(layer, Activation::Gelu, true)))
}

fn set_layer(layer: &mut LayerConfig, activation: Activation, is_parallel: bool) {
    layer.is_parallel = is_parallel;
    layer.ffn.set_dense(|dense| (dense.is_gated, dense.activation) = (false, activation));
}

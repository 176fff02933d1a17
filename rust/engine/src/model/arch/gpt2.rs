//! GPT-2, GPT-Neo and GPTBigCode (StarCoder 1): a learned vector of each position, layer norms, no gates.

use device::{Activation, RopeStyle};
use serde_json::{Value, json};

use super::{Architecture, no_gguf};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, NormConfig, PositionsConfig},
        fields::{Fields, GgufFields, HfFields},
    },
    weights::{Names, Role},
};

/// Its matrices lie as their transposes.
pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["gpt2"],
    class: "GPT2LMHeadModel",
    gguf: "gpt2",
    names: &[
        (Role::Embedding, "model.wte"),
        (Role::Positions, "model.wpe"),
        (Role::OutputNorm, "model.ln_f"),
        (Role::AttnNorm, "ln_1"),
        (Role::AttnQkv, "attn.c_attn.T"),
        (Role::AttnOutput, "attn.c_proj.T"),
        (Role::FfnNorm, "ln_2"),
        (Role::FfnUp, "mlp.c_fc.T"),
        (Role::FfnDown, "mlp.c_proj.T"),
    ],
    from_hf: |fields| {
        fields.only(&[("attention_head_type", json!("multihead"))])?;
        let config = from_hf("gpt2", fields, &json!({}))?;
        if !fields.flag("scale_attn_by_inverse_layer_idx")?.unwrap_or(false) {
            return Ok(config);
        }
        let mut number = 0.0;
        Ok(config.with_layers(|layer| {
            number += 1.0;
            layer.attention.scale /= number;
        }))
    },
    from_gguf: |fields| from_gguf("gpt2", fields),
};

/// Layers that see everything take turns with layers that have a window.
pub(super) const NEO: Architecture = Architecture {
    model_types: &["gpt_neo"],
    class: "GPTNeoForCausalLM",
    gguf: "gptneo",
    names: &[
        (Role::Embedding, "model.wte"),
        (Role::Positions, "model.wpe"),
        (Role::OutputNorm, "model.ln_f"),
        (Role::AttnNorm, "ln_1"),
        (Role::AttnQ, "attn.attention.q_proj"),
        (Role::AttnK, "attn.attention.k_proj"),
        (Role::AttnV, "attn.attention.v_proj"),
        (Role::AttnOutput, "attn.attention.out_proj"),
        (Role::FfnNorm, "ln_2"),
        (Role::FfnUp, "mlp.c_fc"),
        (Role::FfnDown, "mlp.c_proj"),
    ],
    from_hf: |fields| {
        let own = [("num_layers", "num_hidden_layers"), ("num_heads", "num_attention_heads")];
        let config = from_hf("gpt_neo", &fields.also_called(&own), &json!({}))?;
        let has_window = local_layers(fields, config.layers.len())?;
        let window = fields.size("window_size")?.unwrap_or(256);
        let config = config.with_windows(|layer| has_window[layer].then_some(window));
        Ok(config.with_layers(|layer| (layer.attention.scale, layer.attention.qkv_bias) = (1.0, false)))
    },
    from_gguf: no_gguf,
};

const BIG_CODE_NAMES: Names = &[
    (Role::Embedding, "model.wte"),
    (Role::Positions, "model.wpe"),
    (Role::OutputNorm, "model.ln_f"),
    (Role::AttnNorm, "ln_1"),
    (Role::AttnQkv, "attn.c_attn"),
    (Role::AttnOutput, "attn.c_proj"),
    (Role::FfnNorm, "ln_2"),
    (Role::FfnUp, "mlp.c_fc"),
    (Role::FfnDown, "mlp.c_proj"),
];

/// One head of keys and values, or of each head its rows of q, k and v one after the other.
pub(super) const BIG_CODE: Architecture = Architecture {
    model_types: &["gpt_bigcode"],
    class: "GPTBigCodeForCausalLM",
    gguf: "starcoder",
    names: BIG_CODE_NAMES,
    from_hf: |fields| {
        let is_multi_query = fields.flag("multi_query")?.unwrap_or(true);
        let num_kv_heads = if is_multi_query { json!(1) } else { Value::Null };
        let config = from_hf("gpt_bigcode", fields, &json!({"num_key_value_heads": num_kv_heads}))?;
        Ok(config.with_layers(|layer| layer.attention.qkv_groups = layer.attention.num_kv_heads))
    },
    from_gguf: |fields| from_gguf("gpt_bigcode", fields),
};

fn from_hf(architecture: &'static str, fields: &HfFields<'_>, heads: &Value) -> Result<DecoderConfig, EngineError> {
    let mut fields = fields.with_defaults(heads).also_called(&[
        ("n_embd", "hidden_size"),
        ("n_head", "num_attention_heads"),
        ("n_layer", "num_hidden_layers"),
        ("n_positions", "max_position_embeddings"),
        ("n_inner", "intermediate_size"),
        ("activation_function", "hidden_act"),
    ]);
    fields.only(&[("scale_attn_weights", json!(true))])?;
    fields.set_usual_width()?;
    let config = DecoderConfig {
        norm: NormConfig::layer(fields.number("layer_norm_epsilon")?),
        tie_word_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(true),
        ..fields.decoder(architecture)?
    };
    Ok(with_layers(config, fields.activation(Activation::GeluTanh)?))
}

fn from_gguf(architecture: &'static str, fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    Ok(with_layers(fields.decoder(architecture, RopeStyle::Neox)?, Activation::GeluTanh))
}

fn with_layers(config: DecoderConfig, activation: Activation) -> DecoderConfig {
    config.with_positions(PositionsConfig::default()).with_layers(|layer| {
        layer.set_biases(true);
        layer.ffn.set_dense(|dense| (dense.is_gated, dense.activation) = (false, activation));
    })
}

/// Which layers have a window: a list of patterns, each with how often it comes.
fn local_layers(fields: &HfFields<'_>, num_layers: usize) -> Result<Vec<bool>, EngineError> {
    let is_local = |name: &Value| match name.as_str() {
        Some("local") => Some(true),
        Some("global") => Some(false),
        _ => None,
    };
    let layers =
        fields.typed("attention_types", &format!("patterns of \"global\" and \"local\", {num_layers} layers"), |value| {
            let mut layers = Vec::new();
            for pattern in value.as_array()? {
                let [names, count] = &pattern.as_array()?[..] else { return None };
                let names = names.as_array()?.iter().map(is_local).collect::<Option<Vec<_>>>()?;
                for _ in 0..count.as_u64().filter(|count| *count <= num_layers as u64)? {
                    layers.extend(&names);
                }
            }
            (layers.len() == num_layers).then_some(layers)
        })?;
    Ok(layers.unwrap_or_else(|| (0..num_layers).map(|layer| layer % 2 == 1).collect()))
}

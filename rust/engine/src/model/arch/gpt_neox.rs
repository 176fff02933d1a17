//! GPT-NeoX (arXiv:2204.06745) and Pythia: attention and feed-forward network side by side, each behind a layer norm of its own.

use device::{Activation, RopeStyle};
use serde_json::json;

use super::Architecture;
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, NormConfig},
        fields::{Fields, GgufFields, HfFields},
    },
    weights::Role,
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["gpt_neox"],
    class: "GPTNeoXForCausalLM",
    gguf: "gptneox",
    names: &[
        (Role::Embedding, "model.embed_in"),
        (Role::OutputNorm, "model.final_layer_norm"),
        (Role::Output, "embed_out"),
        (Role::AttnQkv, "attention.query_key_value"),
        (Role::AttnOutput, "attention.dense"),
        (Role::FfnUp, "mlp.dense_h_to_4h"),
        (Role::FfnDown, "mlp.dense_4h_to_h"),
    ],
    from_hf,
    from_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let fields = fields
        .also_called(&[("rotary_emb_base", "rope_theta"), ("rotary_pct", "partial_rotary_factor")])
        .with_defaults(&json!({"use_parallel_residual": true, "attention_bias": true}));
    let config =
        DecoderConfig { norm: NormConfig::layer(fields.number("layer_norm_eps")?), ..fields.partly_rotated("gpt_neox", 0.25)? };
    let activation = fields.activation(Activation::Gelu)?;
    let bias = fields.flag("attention_bias")?.unwrap_or(true);
    let is_parallel = fields.flag("use_parallel_residual")?.unwrap_or(true);
    Ok(with_layers(config, activation, is_parallel).with_layers(|layer| {
        let attention = &mut layer.attention;
        (attention.qkv_bias, attention.output_bias, attention.qkv_groups) = (bias, bias, attention.num_heads);
    }))
}

/// The converter puts the rows of q, k and v one after the other.
fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let is_parallel = fields.flag("use_parallel_residual")?.unwrap_or(true);
    Ok(with_layers(fields.decoder("gpt_neox", RopeStyle::Neox)?, Activation::Gelu, is_parallel))
}

fn with_layers(config: DecoderConfig, activation: Activation, is_parallel: bool) -> DecoderConfig {
    config.with_layers(|layer| {
        (layer.is_parallel, layer.has_own_ffn_norm) = (is_parallel, is_parallel);
        layer.set_biases(true);
        layer.ffn.set_dense(|dense| (dense.is_gated, dense.activation) = (false, activation));
    })
}

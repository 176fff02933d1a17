//! InternLM 2 (arXiv:2403.17297) and 3: llamas, of which the first keeps queries, keys and values in one matrix, by key head.

use device::RopeStyle;
use serde_json::json;

use super::Architecture;
use crate::{
    EngineError,
    model::{
        config::DecoderConfig,
        fields::{Fields, HfFields},
    },
    weights::Role,
};

pub(super) const SECOND: Architecture = Architecture {
    model_types: &["internlm2"],
    class: "InternLM2ForCausalLM",
    gguf: "internlm2",
    names: &[
        (Role::Embedding, "model.tok_embeddings"),
        (Role::Output, "output"),
        (Role::AttnNorm, "attention_norm"),
        (Role::AttnQkv, "attention.wqkv"),
        (Role::AttnOutput, "attention.wo"),
        (Role::FfnNorm, "ffn_norm"),
        (Role::FfnGate, "feed_forward.w1"),
        (Role::FfnUp, "feed_forward.w3"),
        (Role::FfnDown, "feed_forward.w2"),
    ],
    from_hf: read_second,
    // The converter permutes the rows of q and k, as that of the third does.
    from_gguf: |fields| fields.decoder("internlm2", RopeStyle::Interleaved),
};

pub(super) const THIRD: Architecture = Architecture {
    model_types: &["internlm3"],
    class: "InternLM3ForCausalLM",
    // What its converter writes is a llama.
    gguf: "llama",
    names: &[],
    from_hf: read_third,
    from_gguf: |fields| fields.decoder("internlm3", RopeStyle::Interleaved),
};

fn read_second(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let bias = fields.flag("bias")?.unwrap_or(true);
    let config = fields.partly_rotated("internlm2", 1.0)?;
    Ok(config.with_layers(|layer| {
        let attention = &mut layer.attention;
        (attention.qkv_bias, attention.output_bias, attention.qkv_groups) = (bias, bias, attention.num_kv_heads);
    }))
}

fn read_third(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let fields = fields.also_called(&[("qkv_bias", "attention_bias"), ("bias", "mlp_bias")]);
    let usual = json!({"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1e-5});
    let config = fields.with_defaults(&usual).decoder("internlm3")?;
    // The bias of the output is that of the feed-forward network.
    let bias = fields.flag("mlp_bias")?.unwrap_or(false);
    Ok(config.with_layers(|layer| layer.attention.output_bias = bias))
}

//! GPT-J and `CodeGen`: one layer norm for attention and the feed-forward network, which run side by side; neighbouring elements
//! rotate.

use device::{Activation, RopeStyle};
use serde_json::json;

use super::{Architecture, no_gguf};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, NormConfig},
        fields::{Fields, HfFields},
    },
    weights::Role,
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["gptj"],
    class: "GPTJForCausalLM",
    gguf: "gptj",
    names: &[
        (Role::Embedding, "model.wte"),
        (Role::OutputNorm, "model.ln_f"),
        (Role::AttnNorm, "ln_1"),
        (Role::AttnQ, "attn.q_proj"),
        (Role::AttnK, "attn.k_proj"),
        (Role::AttnV, "attn.v_proj"),
        (Role::AttnOutput, "attn.out_proj"),
        (Role::FfnUp, "mlp.fc_in"),
        (Role::FfnDown, "mlp.fc_out"),
    ],
    from_hf,
    from_gguf: no_gguf,
};

/// `CodeGen` (arXiv:2203.13474): the same, whose matrix of q, v and k lies in four parts.
pub(super) const CODEGEN: Architecture = Architecture {
    model_types: &["codegen"],
    class: "CodeGenForCausalLM",
    gguf: "codegen",
    names: &[
        (Role::Embedding, "model.wte"),
        (Role::OutputNorm, "model.ln_f"),
        (Role::AttnNorm, "ln_1"),
        (Role::AttnQkv, "attn.qkv_proj"),
        (Role::AttnOutput, "attn.out_proj"),
        (Role::FfnUp, "mlp.fc_in"),
        (Role::FfnDown, "mlp.fc_out"),
    ],
    from_hf: |fields| {
        let config = DecoderConfig { architecture: "codegen", ..from_hf(fields)? };
        Ok(config.with_layers(|layer| (layer.attention.qkv_groups, layer.attention.values_first) = (4, true)))
    },
    from_gguf: no_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let mut fields = fields.also_called(&[
        ("n_embd", "hidden_size"),
        ("n_head", "num_attention_heads"),
        ("n_layer", "num_hidden_layers"),
        ("n_positions", "max_position_embeddings"),
        ("n_inner", "intermediate_size"),
        ("activation_function", "hidden_act"),
    ]);
    fields.only(&[("rotary", json!(true)), ("scale_attn_weights", json!(true))])?;
    fields.set_usual_width()?;
    let mut config = fields.partly_rotated("gptj", 1.0)?;
    config.norm = NormConfig::layer(fields.number("layer_norm_epsilon")?);
    config.ropes[0].rotary_dim = fields.size("rotary_dim")?.unwrap_or(64);
    config.ropes[0].style = RopeStyle::Interleaved;
    let activation = fields.activation(Activation::GeluTanh)?;
    Ok(config.with_layers(|layer| {
        layer.is_parallel = true;
        layer.ffn.set_dense(|dense| (dense.is_gated, dense.bias, dense.activation) = (false, true, activation));
    }))
}

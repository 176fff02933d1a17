//! GLM 4: norms around both halves of a layer, half of a head rotates, in neighbouring pairs. The first of them has norms before
//! the halves only.

use device::RopeStyle;
use serde_json::json;

use super::{Architecture, no_gguf};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, Norms},
        fields::{Fields, GgufFields, HfFields},
    },
    weights::Role,
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["glm4"],
    class: "Glm4ForCausalLM",
    gguf: "glm4",
    names: &[(Role::PostAttnNorm, "post_self_attn_layernorm"), (Role::PostFfnNorm, "post_mlp_layernorm")],
    from_hf: |fields| Ok(with_norms(read_hf("glm4", fields)?)),
    from_gguf,
};

pub(super) const FIRST: Architecture = Architecture {
    model_types: &["glm"],
    class: "GlmForCausalLM",
    gguf: "chatglm",
    names: &[],
    from_hf: |fields| {
        let usual = json!({"attention_bias": true, "head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7});
        read_hf("glm", &fields.with_defaults(&usual))
    },
    from_gguf: no_gguf,
};

fn read_hf(architecture: &'static str, fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let mut config = fields.partly_rotated(architecture, 0.5)?;
    config.ropes[0].style = RopeStyle::Interleaved;
    let bias = fields.flag("attention_bias")?.unwrap_or(false);
    Ok(config.with_layers(|layer| layer.attention.qkv_bias = bias))
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    Ok(with_norms(fields.decoder("glm4", RopeStyle::Interleaved)?))
}

fn with_norms(config: DecoderConfig) -> DecoderConfig {
    config.with_layers(|layer| layer.norms = Norms::Around)
}

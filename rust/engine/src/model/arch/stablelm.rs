//! StableLM 2: layer norms; in the 12B model one for attention and the feed-forward network, side by side, and one for each head.

use device::RopeStyle;

use super::Architecture;
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, NormConfig, QkNorm},
        fields::{Fields, GgufFields, HfFields},
    },
    weights::{Role, WeightId},
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["stablelm"],
    class: "StableLmForCausalLM",
    gguf: "stablelm",
    names: &[(Role::AttnQNorm, "self_attn.q_layernorm.norms.*"), (Role::AttnKNorm, "self_attn.k_layernorm.norms.*")],
    from_hf,
    from_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let flag = |key| Ok::<_, EngineError>(fields.flag(key)?.unwrap_or(false));
    let norm = NormConfig::layer(fields.number("layer_norm_eps")?);
    let config = DecoderConfig { norm, ..fields.partly_rotated("stablelm", 0.25)? };
    let qkv_bias = flag("use_qkv_bias")?;
    let config = config.with_layers(|layer| layer.attention.qkv_bias = qkv_bias);
    Ok(with_layers(config, flag("use_parallel_residual")?, flag("qk_layernorm")?))
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let config = fields.decoder("stablelm", RopeStyle::Neox)?;
    // There is a key, which older files lack.
    let has = |role| fields.weights.contains(WeightId::layer(0, role));
    Ok(with_layers(config, !has(Role::FfnNorm), has(Role::AttnQNorm)))
}

fn with_layers(config: DecoderConfig, is_parallel: bool, has_qk_norm: bool) -> DecoderConfig {
    let qk_norm = has_qk_norm.then_some(QkNorm::OwnHeads);
    config.with_layers(|layer| (layer.is_parallel, layer.attention.qk_norm) = (is_parallel, qk_norm))
}

//! Hunyuan: queries and keys are normalized after they rotate.

use device::RopeStyle;

use super::Architecture;
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, QkNorm},
        fields::{Fields, HfFields},
    },
    weights::{Names, Role},
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["hunyuan_v1_dense"],
    class: "HunYuanDenseV1ForCausalLM",
    gguf: "hunyuan-dense",
    names: NAMES,
    from_hf: |fields| read_hf("hunyuan_v1_dense", fields),
    from_gguf: |fields| Ok(with_norms(fields.decoder("hunyuan_v1_dense", RopeStyle::Neox)?, true)),
};

const NAMES: Names = &[(Role::AttnQNorm, "self_attn.query_layernorm"), (Role::AttnKNorm, "self_attn.key_layernorm")];

/// What both sizes have in common.
pub(super) fn read_hf(architecture: &'static str, fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let is_normed = fields.flag("use_qk_norm")?.unwrap_or(true);
    Ok(with_norms(fields.decoder(architecture)?, is_normed))
}

/// The same of a GGUF file, which has the base of the rotation as it is used.
pub(super) fn with_norms(config: DecoderConfig, is_normed: bool) -> DecoderConfig {
    config.with_layers(|layer| {
        layer.attention.qk_norm = is_normed.then_some(QkNorm::Heads);
        layer.attention.norms_last = true;
    })
}

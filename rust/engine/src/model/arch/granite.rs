//! Granite 3, and HyperCLOVA X: llama with four multipliers.

use device::RopeStyle;

use super::{Architecture, no_gguf};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, Norms, ResidualScales},
        fields::{Fields, GgufFields, HfFields},
    },
    weights::Role,
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["granite"],
    class: "GraniteForCausalLM",
    gguf: "granite",
    names: &[],
    from_hf: |fields| read_hf("granite", fields),
    from_gguf,
};

/// HyperCLOVA X: a granite with further norms after attention and feed-forward network.
pub(super) const HYPERCLOVAX: Architecture = Architecture {
    model_types: &["hyperclovax"],
    class: "HyperCLOVAXForCausalLM",
    gguf: "hyperclovax",
    names: &[(Role::PostAttnNorm, "post_norm1"), (Role::PostFfnNorm, "post_norm2")],
    from_hf: |fields| {
        let has_scale = fields.number("attention_multiplier")?.is_some();
        let has_norms = fields.flag("use_post_norm")?.unwrap_or(true);
        // Its logits are multiplied.
        let logit_scale = fields.number("logits_scaling")?.unwrap_or(1.0) as f32;
        let config = DecoderConfig { logit_scale, ..read_hf("hyperclovax", fields)? };
        Ok(config.with_layers(|layer| {
            if has_norms {
                layer.norms = Norms::Around;
            }
            if !has_scale {
                layer.attention.scale = (layer.attention.head_dim as f32).sqrt().recip();
            }
        }))
    },
    from_gguf: no_gguf,
};

/// A granite whose layers are dense.
pub(super) fn read_hf(architecture: &'static str, fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let number = |key| Ok::<_, EngineError>(fields.number(key)?.unwrap_or(1.0) as f32);
    let scale = number("attention_multiplier")?;
    let config = fields.decoder(architecture)?.with_layers(|layer| layer.attention.scale = scale);
    Ok(with_multipliers(config, [number("embedding_multiplier")?, number("residual_multiplier")?, number("logits_scaling")?]))
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    // The converter permutes the rows of q and k.
    with_gguf_multipliers(fields.decoder("granite", RopeStyle::Interleaved)?, fields)
}

pub(super) fn with_gguf_multipliers(config: DecoderConfig, fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let number = |key| Ok::<_, EngineError>(fields.number(key)?.unwrap_or(1.0) as f32);
    Ok(with_multipliers(config, [number("embedding_scale")?, number("residual_scale")?, number("logit_scale")?]))
}

/// Logits are divided.
fn with_multipliers(config: DecoderConfig, [embedding, residual, logits]: [f32; 3]) -> DecoderConfig {
    let config = DecoderConfig { embedding_scale: embedding, logit_scale: logits.recip(), ..config };
    config.with_layers(|layer| layer.residual_scales = ResidualScales::all(residual))
}

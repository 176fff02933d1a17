//! GLM 4: norms around both halves of a layer, half of a head rotates, in neighbouring pairs. The first of them has norms before
//! the halves only.

use device::RopeStyle;
use serde_json::json;

use super::{Architecture, no_gguf, qwen2};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, Norms},
        fields::{Fields, GgufFields, HfFields},
        rope::RopeAxes,
    },
    weights::Role,
};

/// Pairs that rotate by time, row and column, where a file does not say.
const SECTIONS: [usize; 3] = [8, 12, 12];

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
    from_gguf: |fields| fields.decoder("glm", RopeStyle::Interleaved),
};

/// The language model of GLM-4.1V and GLM-4.6V-Flash; of text alone it is a GLM 4.
pub(super) const VL: Architecture = Architecture {
    model_types: &["glm4v", "glm4v_text"],
    class: "Glm4vForConditionalGeneration",
    from_hf: |fields| {
        // It has biases whatever the file says; a file may say so.
        fields.only(&[("attention_bias", json!(true))])?;
        Ok(read_vl("glm4v", fields)?.with_layers(|layer| layer.attention.qkv_bias = true))
    },
    ..ARCHITECTURE
};

/// The language model of GLM-OCR: the same without biases.
pub(super) const OCR: Architecture = Architecture {
    model_types: &["glm_ocr", "glm_ocr_text"],
    class: "GlmOcrForConditionalGeneration",
    // Files have one head that predicts further tokens, and need not say so.
    from_hf: |fields| read_vl("glm_ocr", &fields.with_defaults(&json!({"num_nextn_predict_layers": 1}))),
    from_gguf: no_gguf,
    ..ARCHITECTURE
};

fn read_vl(architecture: &'static str, fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let mut config = with_norms(fields.partly_rotated(architecture, 1.0)?);
    config.ropes[0].axes = Some(read_axes(fields)?);
    config.ropes[0].style = RopeStyle::Interleaved;
    Ok(config)
}

/// By which coordinates the language models of GLM that see rotate: sections follow each other.
pub(super) fn read_axes(fields: &HfFields<'_>) -> Result<RopeAxes, EngineError> {
    let usual = RopeAxes { sections: SECTIONS, takes_turns: false };
    Ok(RopeAxes { takes_turns: false, ..fields.rope_axes()?.unwrap_or(usual) })
}

fn read_hf(architecture: &'static str, fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let mut config = fields.partly_rotated(architecture, 0.5)?;
    config.ropes[0].style = RopeStyle::Interleaved;
    let bias = fields.flag("attention_bias")?.unwrap_or(false);
    Ok(config.with_layers(|layer| layer.attention.qkv_bias = bias))
}

/// The converter puts rows that rotate together half a head apart where images have rows and columns.
fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let axes = qwen2::gguf_axes(fields, false)?;
    let style = if axes.is_some() { RopeStyle::Neox } else { RopeStyle::Interleaved };
    let mut config = with_norms(fields.decoder("glm4", style)?);
    config.ropes[0].axes = axes;
    Ok(config)
}

fn with_norms(config: DecoderConfig) -> DecoderConfig {
    config.with_layers(|layer| layer.norms = Norms::Around)
}

//! Nemotron, Arcee's AFM and Jais 2: feed-forward networks without a gate, by the square of `ReLU`.

use device::{Activation, RopeStyle};
use serde_json::json;

use super::Architecture;
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, NormConfig},
        fields::{Fields, GgufFields, HfFields},
    },
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["nemotron"],
    class: "NemotronForCausalLM",
    gguf: "nemotron",
    names: &[],
    from_hf: read_nemotron,
    // The converter adds 1 to the weights of norms.
    from_gguf: |fields| read_gguf("nemotron", fields, RopeStyle::Neox),
};

pub(super) const ARCEE: Architecture = Architecture {
    model_types: &["arcee"],
    class: "ArceeForCausalLM",
    gguf: "arcee",
    names: &[],
    from_hf: |fields| read_hf("arcee", &fields.with_defaults(&json!({"rms_norm_eps": 1e-5}))),
    // The converter permutes the rows of q and k.
    from_gguf: |fields| read_gguf("arcee", fields, RopeStyle::Interleaved),
};

pub(super) const JAIS2: Architecture = Architecture {
    model_types: &["jais2"],
    class: "Jais2ForCausalLM",
    gguf: "jais2",
    names: &[],
    from_hf: |fields| {
        let fields = fields.with_defaults(&json!({"attention_bias": true, "mlp_bias": true}));
        let norm = NormConfig::layer(fields.number("layer_norm_eps")?);
        Ok(DecoderConfig { norm, ..read_hf("jais2", &fields)? })
    },
    from_gguf: |fields| {
        let config = read_gguf("jais2", fields, RopeStyle::Neox)?;
        Ok(config.with_layers(|layer| {
            (layer.attention.qkv_bias, layer.attention.output_bias) = (true, true);
        }))
    },
};

/// Layer norms that store `w` for `1 + w`; half of a head rotates.
fn read_nemotron(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let fields = fields.with_defaults(&json!({"partial_rotary_factor": 0.5}));
    let norm = NormConfig { offset: 1.0, ..NormConfig::layer(fields.number("norm_eps")?) };
    Ok(DecoderConfig { norm, ..read_hf("nemotron", &fields)? })
}

fn read_hf(architecture: &'static str, fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let config = fields.with_defaults(&json!({"hidden_act": "relu2"})).decoder(architecture)?;
    Ok(config.with_layers(|layer| layer.ffn.set_dense(|dense| dense.is_gated = false)))
}

fn read_gguf(architecture: &'static str, fields: &GgufFields<'_>, style: RopeStyle) -> Result<DecoderConfig, EngineError> {
    Ok(fields.decoder(architecture, style)?.with_layers(|layer| {
        layer.ffn.set_dense(|dense| (dense.is_gated, dense.activation) = (false, Activation::Relu2));
    }))
}

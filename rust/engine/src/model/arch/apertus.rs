//! Apertus: normalized heads, and feed-forward networks without a gate, by an activation whose numbers are weights of the layer.

use device::{Activation, RopeStyle, Xielu};
use serde_json::json;

use super::Architecture;
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, QkNorm},
        dense::xielu_of,
        fields::{Fields, GgufFields, HfFields},
    },
    weights::{MetadataValue, Role},
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["apertus"],
    class: "ApertusForCausalLM",
    gguf: "apertus",
    names: &[(Role::AttnNorm, "attention_layernorm"), (Role::FfnNorm, "feedforward_layernorm")],
    from_hf,
    from_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let is_xielu = fields.text("hidden_act")?.is_none_or(|name| name == "xielu");
    let mut fields = fields.with_llama3_rope(12_000_000.0, 8.0).with_defaults(&json!({"rms_norm_eps": 1e-5}));
    if is_xielu {
        fields.object.remove("hidden_act");
    }
    let bias = fields.flag("attention_bias")?.unwrap_or(false);
    let config = fields.partly_rotated("apertus", 1.0)?.with_layers(|layer| {
        (layer.attention.qkv_bias, layer.attention.output_bias) = (bias, bias);
        if is_xielu {
            layer.ffn.set_dense(|dense| dense.activation = Activation::Xielu(Xielu::default()));
        }
    });
    Ok(without_gates(config))
}

/// The numbers of all layers' activations are lists of the metadata, without the architecture's prefix.
fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let mut config = without_gates(fields.decoder("apertus", RopeStyle::Neox)?);
    let num_layers = config.layers.len();
    let list = |key: &str| match fields.metadata.get(key) {
        Some(MetadataValue::Floats(list)) if list.len() == num_layers => Ok(list),
        _ => Err(EngineError::Load(format!("{}: `{key}` must be a list of {num_layers} numbers", fields.what))),
    };
    let lists = ["xielu.alpha_p", "xielu.alpha_n", "xielu.beta", "xielu.eps"].map(list);
    let [positive, negative, linear, eps] = lists;
    let (positive, negative, linear, eps) = (positive?, negative?, linear?, eps?);
    for (i, layer) in config.layers.iter_mut().enumerate() {
        let xielu = xielu_of([positive[i], negative[i], linear[i], eps[i]]);
        layer.ffn.set_dense(|dense| dense.activation = Activation::Xielu(xielu));
    }
    Ok(config)
}

fn without_gates(config: DecoderConfig) -> DecoderConfig {
    config.with_layers(|layer| {
        layer.attention.qk_norm = Some(QkNorm::Heads);
        layer.ffn.set_dense(|dense| dense.is_gated = false);
    })
}

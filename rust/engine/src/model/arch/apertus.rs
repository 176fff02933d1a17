//! Apertus: normalized heads, and feed-forward networks without a gate, by an activation whose numbers are weights of the layer.

use device::{Activation, Xielu};
use serde_json::json;

use super::{Architecture, no_gguf};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, QkNorm},
        fields::{Fields, HfFields},
    },
    weights::Role,
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["apertus"],
    class: "ApertusForCausalLM",
    gguf: "apertus",
    names: &[(Role::AttnNorm, "attention_layernorm"), (Role::FfnNorm, "feedforward_layernorm")],
    from_hf,
    from_gguf: no_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let mut usual = json!({"rms_norm_eps": 1e-5, "rope_theta": 12_000_000.0});
    if ["rope_parameters", "rope_scaling"].iter().all(|key| fields.value(key).is_none()) {
        usual["rope_scaling"] = json!({
            "rope_type": "llama3", "rope_theta": 12_000_000.0, "factor": 8.0, "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        });
    }
    let is_xielu = fields.text("hidden_act")?.is_none_or(|name| name == "xielu");
    let mut fields = fields.with_defaults(&usual);
    if is_xielu {
        fields.object.remove("hidden_act");
    }
    let bias = fields.flag("attention_bias")?.unwrap_or(false);
    Ok(fields.partly_rotated("apertus", 1.0)?.with_layers(|layer| {
        (layer.attention.qkv_bias, layer.attention.output_bias) = (bias, bias);
        layer.attention.qk_norm = Some(QkNorm::Heads);
        layer.ffn.set_dense(|dense| {
            dense.is_gated = false;
            if is_xielu {
                dense.activation = Activation::Xielu(Xielu::default());
            }
        });
    }))
}

//! Falcon-H1: attention and Mamba-2 beside each other in every layer, with a multiplier of each product.

use device::{Activation, RopeStyle};
use serde_json::json;

use super::{Architecture, mamba};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, MambaScales, RecurrentConfig, ResidualScales},
        fields::{Fields, GgufFields, HfFields},
    },
    weights::{Names, Role, WeightId},
};

/// What is between attention and the network, and behind the last layer, has the names that Bamba has for it.
pub(super) const NAMES: Names = &[
    (Role::OutputNorm, "model.final_layernorm"),
    (Role::FfnNorm, "pre_ff_layernorm"),
    (Role::FfnGate, "feed_forward.gate_proj"),
    (Role::FfnUp, "feed_forward.up_proj"),
    (Role::FfnDown, "feed_forward.down_proj"),
];

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["falcon_h1"],
    class: "FalconH1ForCausalLM",
    gguf: "falcon-h1",
    names: NAMES,
    from_hf,
    from_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let config = fields.decoder("falcon_h1")?;
    for key in ["mamba_proj_bias", "projectors_bias"] {
        if fields.flag(key)? == Some(true) {
            return Err(fields.error(key, "is true; projections with biases are not implemented for this family"));
        }
    }
    let one = |key: &str| Ok::<_, EngineError>(fields.number(key)?.unwrap_or(1.0) as f32);
    let mut mamba = mamba::read_hf(&fields.with_defaults(&json!({"mamba_d_ssm": 1024})), &config)?;
    let has_norm = fields.flag("mamba_rms_norm")?.unwrap_or(false);
    let norm_comes_first = fields.flag("mamba_norm_before_gate")?.unwrap_or(true);
    let (input, of_state) = (one("ssm_in_multiplier")?, fields.some_numbers::<5>("ssm_multipliers")?.unwrap_or([1.0; 5]));
    if let RecurrentConfig::Mamba2 { eps, gates_first, scales, .. } = &mut mamba {
        *eps = eps.filter(|_| has_norm);
        *gates_first = !norm_comes_first;
        let [z, x, b, c, dt] = of_state.map(|scale| scale * input);
        *scales = MambaScales { z, x, b, c, dt };
    }
    let (of_input, of_keys) = (one("attention_in_multiplier")?, one("key_multiplier")?);
    let [of_gate, of_down] = fields.some_numbers::<2>("mlp_multipliers")?.unwrap_or([1.0; 2]);
    for (bias, multiplier, value) in
        [("attention_bias", "attention_in_multiplier", of_input), ("mlp_bias", "mlp_multipliers", of_gate)]
    {
        if fields.flag(bias)? == Some(true) && value != 1.0 {
            return Err(fields.error(bias, format!("is true beside `{multiplier}`, which is not implemented")));
        }
    }
    let activation = fields.activation(Activation::Silu)?;
    if activation != Activation::Silu {
        return Err(fields.error("hidden_act", "is not silu; implemented for this family: silu"));
    }
    let residual_scales = ResidualScales {
        attention: one("attention_out_multiplier")? * of_input,
        recurrent: one("ssm_out_multiplier")?,
        // SiLU of a multiple is that multiple of what the network computes.
        ffn: of_gate * of_down,
    };
    let config =
        DecoderConfig { embedding_scale: one("embedding_multiplier")?, logit_scale: one("lm_head_multiplier")?, ..config };
    Ok(config.with_layers(|layer| {
        // Queries and keys are products with it.
        layer.attention.scale *= of_input * of_input * of_keys;
        layer.recurrent = Some(mamba);
        layer.residual_scales = residual_scales;
        if of_gate != 1.0 {
            layer.ffn.set_dense(|dense| dense.activation = Activation::Swish(of_gate));
        }
    }))
}

/// The converter multiplies the weights.
fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let config = fields.decoder("falcon_h1", RopeStyle::Neox)?;
    let mut mamba = mamba::read_gguf(fields, &config)?;
    let has_norm = |layer| fields.weights.contains(WeightId::layer(layer, Role::MixNorm));
    if let RecurrentConfig::Mamba2 { eps, .. } = &mut mamba {
        *eps = eps.filter(|_| (0..config.layers.len()).any(has_norm));
    }
    Ok(config.with_layers(|layer| layer.recurrent = Some(mamba)))
}

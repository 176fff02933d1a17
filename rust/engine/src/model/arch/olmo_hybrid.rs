//! OLMo Hybrid: three layers of the gated delta rule for each one with attention, which is an OLMo 3's. States may change their
//! sign.

use super::{Architecture, no_gguf};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, DeltaLayout, Norms, QkNorm, RecurrentConfig},
        fields::{Fields, HfFields},
    },
    weights::Role,
};

/// Every fourth layer has attention.
const INTERVAL: usize = 4;
/// Of the norm within a layer with a state, whatever the model's is.
const NORM_EPS: f32 = 1e-5;

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["olmo_hybrid"],
    class: "OlmoHybridForCausalLM",
    gguf: "olmo_hybrid",
    names: &[
        // Of layers with a state, which have norms before their halves; the others have them behind.
        (Role::AttnNorm, "attention_layer_norm"),
        (Role::AttnNorm, "input_layernorm"),
        (Role::FfnNorm, "feedforward_layer_norm"),
        (Role::FfnNorm, "post_attention_layernorm"),
        // Transformers saves the norm behind attention under the other's name.
        (Role::PostAttnNorm, "post_attention_layernorm"),
        (Role::PostAttnNorm, "feedforward_layer_norm"),
        (Role::DeltaQ, "linear_attn.q_proj"),
        (Role::DeltaK, "linear_attn.k_proj"),
        (Role::DeltaV, "linear_attn.v_proj"),
        (Role::DeltaZ, "linear_attn.g_proj"),
        (Role::DeltaB, "linear_attn.b_proj"),
        (Role::DeltaA, "linear_attn.a_proj"),
        (Role::MixDtBias, "linear_attn.dt_bias$"),
        (Role::MixDecay, "linear_attn.A_log$"),
        (Role::MixNorm, "linear_attn.o_norm"),
        (Role::MixOutput, "linear_attn.o_proj"),
    ],
    from_hf,
    from_gguf: no_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let heads = fields.required_size("num_attention_heads")?;
    let count = |key| Ok::<_, EngineError>(fields.size(key)?.unwrap_or(heads));
    let (num_key_heads, num_value_heads) = (count("linear_num_key_heads")?, count("linear_num_value_heads")?);
    let usual = || Ok::<_, EngineError>(3 * fields.required_size("hidden_size")? / (4 * num_key_heads.max(1)));
    let key_dim = fields.size("linear_key_head_dim")?.map_or_else(usual, Ok)?;
    // A base that is null says that nothing rotates; without one it is the usual one.
    let rope = fields.child("rope_parameters")?;
    let theta = rope.as_ref().and_then(|rope| rope.object.get("rope_theta")).or_else(|| fields.object.get("rope_theta"));
    let has_rope = theta.is_none_or(|theta| !theta.is_null());
    let config = fields.decoder("olmo_hybrid")?;
    let num_layers = config.layers.len();
    let has_attention = |layer: usize| (layer + 1).is_multiple_of(INTERVAL) || num_layers < INTERVAL && layer + 1 == num_layers;
    let is_recurrent = fields.recurrent_layers(num_layers, &["linear_attention"], |layer| !has_attention(layer))?;
    let delta = RecurrentConfig::GatedDelta {
        num_key_heads,
        num_value_heads,
        key_dim,
        value_dim: fields.size("linear_value_head_dim")?.unwrap_or(2 * key_dim),
        kernel: fields.size("linear_conv_kernel_dim")?.unwrap_or(4),
        layout: DeltaLayout::ConvsApart,
        eps: NORM_EPS,
        has_negative: fields.flag("linear_allow_neg_eigval")?.unwrap_or(true),
        rank: None,
    };
    // They say how weights begin, before training.
    for key in ["linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"] {
        fields.number(key)?;
    }
    let mut config = config.with_recurrent(delta, |layer| is_recurrent[layer]);
    for (layer, is_recurrent) in config.layers.iter_mut().zip(&is_recurrent) {
        layer.norms = if *is_recurrent { Norms::Before } else { Norms::After };
        layer.attention.qk_norm = Some(QkNorm::Row);
        layer.attention.rope = has_rope.then_some(0);
    }
    Ok(config)
}

//! LFM3: as LFM2, with a window in some layers, norms around both halves of a layer, and a gate for each head.

use device::GateActivation;
use serde_json::json;

use super::{Architecture, no_gguf};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, NormConfig, Norms, OutputGate, QkNorm, RecurrentConfig},
        fields::{Fields, HfFields},
    },
    weights::Role,
};

const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";
const CONV: &str = "conv";

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["lfm3"],
    class: "Lfm3ForCausalLM",
    gguf: "lfm3",
    names: &[
        (Role::OutputNorm, "model.embedding_norm"),
        (Role::AttnNorm, "operator_norm"),
        (Role::PostAttnNorm, "post_operator_norm"),
        (Role::FfnNorm, "ffn_norm"),
        (Role::PostFfnNorm, "post_ffn_norm"),
        (Role::AttnGate, "self_attn.gate_proj"),
        (Role::AttnGate, "self_attn.g_proj"),
        (Role::MixInput, "conv.in_proj"),
        (Role::Conv, "conv.conv"),
        (Role::MixOutput, "conv.out_proj"),
        (Role::FfnGate, "feed_forward.w1"),
        (Role::FfnUp, "feed_forward.w3"),
        (Role::FfnDown, "feed_forward.w2"),
    ],
    from_hf,
    from_gguf: no_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    if fields.flag("conv_bias")? == Some(true) {
        return Err(fields.error("conv_bias", "is true; convolutions with biases are not implemented"));
    }
    let fields = fields.with_defaults(&json!({
        "head_dim": 128, "tie_word_embeddings": true, "norm_eps": 1e-5, "sliding_window": 256, "conv_L_cache": 7,
        "use_sandwich_norm": true, "use_attention_gate": true,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
            FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
        },
    }));
    let mut config = DecoderConfig { norm: NormConfig::rms(fields.number("norm_eps")?), ..fields.decoder("lfm3")? };
    let head_dim = config.largest(|layer| layer.attention.head_dim);
    config.ropes.push(fields.rope(SLIDING, head_dim, 1.0)?);
    let num_layers = config.layers.len();
    let is_full = |layer: usize| layer % 4 == 2;
    let slides = |layer: usize| layer > 0 && layer.is_multiple_of(4);
    let sliding = fields.layers_called("layer_types", num_layers, [&[FULL, CONV], &[SLIDING]], slides)?;
    let is_conv = fields
        .layers_called("layer_types", num_layers, [&[FULL, SLIDING], &[CONV]], |layer| !is_full(layer) && !slides(layer))?;
    let gate = OutputGate { is_per_head: true, activation: GateActivation::Sigmoid };
    let gate = fields.flag("use_attention_gate")?.unwrap_or(true).then_some(gate);
    let norms = if fields.flag("use_sandwich_norm")?.unwrap_or(true) { Norms::Around } else { Norms::Before };
    for (layer, slides) in config.layers.iter_mut().zip(&sliding) {
        layer.norms = norms;
        let attention = &mut layer.attention;
        (attention.qk_norm, attention.output_gate, attention.rope) = (Some(QkNorm::Heads), gate, Some(usize::from(*slides)));
    }
    let window = fields.size("sliding_window")?;
    let conv = RecurrentConfig::ShortConv { kernel: fields.required_size("conv_L_cache")? };
    Ok(config.with_windows(|layer| window.filter(|_| sliding[layer])).with_recurrent(conv, |layer| is_conv[layer]))
}

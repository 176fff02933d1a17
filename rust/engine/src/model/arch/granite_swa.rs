//! Granite with windows, dense and with experts: attention has sinks, and each layer a base of its rotation, or none.

use device::{RopeStyle, RouterScore};
use serde_json::json;

use super::{Architecture, granite, granite_moe};
use crate::{
    EngineError,
    model::{
        config::DecoderConfig,
        fields::{Fields, GgufFields, HfFields},
        rope::RopeConfig,
    },
    weights::Role,
};

/// Every fourth layer sees everything, from the first one on.
const INTERVAL: usize = 4;

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["granite_swa"],
    class: "GraniteSWAForCausalLM",
    gguf: "granite_swa",
    names: &[],
    from_hf: |fields| {
        let usual = json!({"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "tie_word_embeddings": true, "sliding_window": 128});
        let fields = fields.with_defaults(&usual);
        with_kinds(granite::read_hf("granite_swa", &fields)?, &fields)
    },
    from_gguf,
};

/// Their GGUF files have the same name.
pub(super) const MOE: Architecture = Architecture {
    model_types: &["granitemoe_swa"],
    class: "GraniteMoeSWAForCausalLM",
    gguf: "granite_swa",
    names: &[
        (Role::Router, "block_sparse_moe.router"),
        (Role::ExpertGateUp, "block_sparse_moe.experts.gate_up_proj$"),
        (Role::ExpertDown, "block_sparse_moe.experts.down_proj$"),
        (Role::SharedGateUp, "shared_mlp.input_linear"),
        (Role::SharedDown, "shared_mlp.output_linear"),
    ],
    from_hf: |fields| {
        let fields = fields.with_defaults(&json!({"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128}));
        let config = with_kinds(granite::read_hf("granitemoe_swa", &fields)?, &fields)?;
        let shared = fields.size("shared_intermediate_size")?.unwrap_or(0);
        Ok(config.with_experts(granite_moe::read_experts(&fields, shared)?, |_| true))
    },
    from_gguf,
};

fn with_kinds(mut config: DecoderConfig, fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let num_layers = config.layers.len();
    let sliding = fields.sliding_layers(num_layers, |layer| !layer.is_multiple_of(INTERVAL))?;
    let window = fields.required_size("sliding_window")?;
    let bases = fields.typed("layer_rope_theta", &format!("a list of {num_layers} bases, 0 for none"), |value| {
        let list = value.as_array().filter(|list| list.len() == num_layers)?;
        list.iter().map(|theta| theta.as_f64().filter(|theta| *theta >= 0.0)).collect::<Option<Vec<_>>>()
    })?;
    if let Some(bases) = &bases {
        let usual = config.ropes.remove(0);
        for (layer, &theta) in config.layers.iter_mut().zip(bases) {
            let known = config.ropes.iter().position(|rope| rope.theta.total_cmp(&theta).is_eq());
            layer.attention.rope = (theta > 0.0).then(|| known.unwrap_or(config.ropes.len()));
            if theta > 0.0 && known.is_none() {
                config.ropes.push(RopeConfig { theta, ..usual.clone() });
            }
        }
    }
    let config = config.with_layers(|layer| layer.attention.has_sinks = true);
    Ok(config.with_windows(|layer| sliding[layer].then_some(window)))
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    // The converter permutes the rows of q and k.
    let style = RopeStyle::Interleaved;
    let config = if fields.size("expert_count")?.is_some_and(|n| n > 0) {
        let (config, experts) = fields.mixture("granitemoe_swa", style)?;
        config.with_experts(experts.scored(RouterScore::SoftmaxOfChosen), |_| true)
    } else {
        fields.decoder("granite_swa", style)?
    };
    let mut config = granite::with_gguf_multipliers(config, fields)?;
    let num_layers = config.layers.len();
    let sliding = fields.flags_by_layer("attention.sliding_window_pattern", num_layers)?;
    let window = fields.required_size("attention.sliding_window")?;
    let key = "attention.rope_pattern";
    let has_pattern = fields.metadata.get(&format!("{}.{key}", fields.prefix)).is_some();
    let rotates = if has_pattern { fields.flags_by_layer(key, num_layers)? } else { vec![true; num_layers] };
    for (layer, rotates) in config.layers.iter_mut().zip(rotates) {
        (layer.attention.has_sinks, layer.attention.rope) = (true, rotates.then_some(0));
    }
    Ok(config.with_windows(|layer| sliding[layer].then_some(window)))
}

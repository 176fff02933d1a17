//! Command R7B and Command A: as Command R, but most layers have a window, and the others do not rotate. Command A+ has experts.

use device::RouterScore;
use serde_json::json;

use super::{Architecture, cohere, no_gguf};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, ExpertsConfig, NormConfig, ResidualScales, SharedConfig},
        fields::{Fields, GgufFields, HfFields},
    },
};

/// Every fourth layer sees everything.
const INTERVAL: usize = 4;
const WINDOW: usize = 4096;

pub(super) const ARCHITECTURE: Architecture =
    Architecture { model_types: &["cohere2"], class: "Cohere2ForCausalLM", gguf: "cohere2", names: &[], from_hf, from_gguf };

pub(super) const MOE: Architecture = Architecture {
    model_types: &["cohere2_moe"],
    class: "Cohere2MoeForCausalLM",
    gguf: "cohere2moe",
    names: &[],
    from_hf: read_moe,
    from_gguf: no_gguf,
};

/// Dense layers before the others have a pattern of windows of their own, and may all rotate.
fn read_moe(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let names = [("moe_gate_act", "expert_selection_fn"), ("moe_num_shared_experts", "num_shared_experts")];
    let fields = fields.also_called(&names).with_defaults(&json!({"head_dim": 128}));
    let mut config = cohere::read_hf("cohere2_moe", &fields)?;
    if let Some(eps) = fields.number("rms_norm_eps")? {
        config.norm = NormConfig::rms(Some(eps));
    }
    let num_layers = config.layers.len();
    let num_dense = fields.size("first_k_dense_replace")?.unwrap_or(0);
    let is_sparse = fields.sparse_layer_types(num_layers, |layer| layer >= num_dense)?;
    let interval = |key: &str, usual| match fields.size(key)? {
        Some(0) => Err(fields.error(key, "is 0; it must be at least 1")),
        given => Ok(given.unwrap_or(usual)),
    };
    let dense_interval = interval("prefix_dense_sliding_window_pattern", 1)?;
    let interval = interval("sliding_window_pattern", INTERVAL)?;
    let sliding = fields.sliding_layers(num_layers, |layer| match layer.checked_sub(num_dense) {
        None => !(layer + 1).is_multiple_of(dense_interval),
        Some(behind) => !(behind + 1).is_multiple_of(interval),
    })?;
    let window = fields.size("sliding_window")?;
    let slides = |layer: usize| sliding[layer] && window.is_some();
    for (index, layer) in config.layers.iter_mut().enumerate() {
        let rotates = slides(index) || !is_sparse[index] && dense_interval == 1;
        layer.attention.rope = rotates.then_some(0);
    }
    let mut config = config.with_windows(|layer| window.filter(|_| slides(layer)));
    if let Some(width) = fields.size("prefix_dense_intermediate_size")? {
        config = config.with_layers(|layer| layer.ffn.set_dense(|dense| dense.intermediate_size = width));
    }
    let (experts, scale) = read_experts(&fields)?;
    let mut config = config.with_experts(experts, |layer| is_sparse[layer]);
    for (layer, is_sparse) in config.layers.iter_mut().zip(&is_sparse) {
        if *is_sparse {
            layer.residual_scales = ResidualScales { ffn: scale, ..layer.residual_scales };
        }
    }
    Ok(config)
}

/// The experts, and what they are multiplied by together.
fn read_experts(fields: &HfFields<'_>) -> Result<(ExpertsConfig, f32), EngineError> {
    let width = fields.required_size("intermediate_size")?;
    let sizes = [fields.size("num_experts")?.unwrap_or(8), fields.size("num_experts_per_tok")?.unwrap_or(2), width];
    let mut experts = match fields.text("expert_selection_fn")?.as_deref() {
        None | Some("softmax") => ExpertsConfig::new(sizes, RouterScore::SoftmaxOfChosen),
        Some("sigmoid") => {
            let is_normalized = fields.flag("norm_topk_prob")?.unwrap_or(true);
            ExpertsConfig::new(sizes, RouterScore::Sigmoid).normalized(is_normalized)
        }
        Some(other) => {
            return Err(fields.error("expert_selection_fn", format!("is `{other}`; implemented: softmax, sigmoid")));
        }
    };
    let num_shared = fields.size("num_shared_experts")?.unwrap_or(0);
    let shared = SharedConfig { intermediate_size: num_shared.saturating_mul(width), is_weighted: false };
    experts.shared = (num_shared > 0).then_some(shared);
    match fields.text("shared_expert_combination_strategy")?.as_deref() {
        None | Some("average") => Ok((experts, if num_shared > 0 { 0.5 } else { 1.0 })),
        Some("sum") => Ok((experts, 1.0)),
        Some(other) => {
            Err(fields.error("shared_expert_combination_strategy", format!("is `{other}`; implemented: average, sum")))
        }
    }
}

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let config = cohere::read_hf("cohere2", fields)?;
    let interval = fields.size("sliding_window_pattern")?.unwrap_or(INTERVAL).max(1);
    let sliding = fields.sliding_layers(config.layers.len(), |layer| !(layer + 1).is_multiple_of(interval))?;
    let window = fields.size("sliding_window")?.unwrap_or(WINDOW);
    Ok(with_windows(config, window, |layer| sliding[layer]))
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let config = cohere::read_gguf("cohere2", fields)?;
    let window = fields.size("attention.sliding_window")?.unwrap_or(WINDOW);
    Ok(with_windows(config, window, |layer| !(layer + 1).is_multiple_of(INTERVAL)))
}

fn with_windows(mut config: DecoderConfig, window: usize, slides: impl Fn(usize) -> bool) -> DecoderConfig {
    for (index, layer) in config.layers.iter_mut().enumerate() {
        layer.attention.rope = slides(index).then_some(0);
    }
    config.with_windows(|layer| slides(layer).then_some(window))
}

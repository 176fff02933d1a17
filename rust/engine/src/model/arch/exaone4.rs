//! EXAONE 4 and its mixtures: normalized heads, three windowed layers for each full one, which does not rotate. The dense ones
//! have norms after attention and feed-forward network only.

use device::RopeStyle;
use serde_json::json;

use super::{Architecture, deepseek};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, Norms, QkNorm},
        fields::{Fields, GgufFields, HfFields},
    },
    weights::Role,
};

/// Every fourth layer sees everything.
const INTERVAL: usize = 4;

pub(super) const ARCHITECTURE: Architecture = Architecture {
    // The first files of EXAONE 4.5 call its language model otherwise.
    model_types: &["exaone4", "exaone4_5_text"],
    class: "Exaone4ForCausalLM",
    gguf: "exaone4",
    names: &[],
    from_hf: |fields| Ok(with_norms_after(read_hf("exaone4", fields)?)),
    from_gguf,
};

pub(super) const MOE: Architecture = Architecture {
    model_types: &["exaone_moe"],
    class: "ExaoneMoeForCausalLM",
    gguf: "exaone-moe",
    names: &[(Role::RouterCorrection, "mlp.e_score_correction_bias$")],
    from_hf: read_moe,
    from_gguf: read_moe_gguf,
};

fn read_hf(architecture: &'static str, fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let fields = fields.with_defaults(&json!({"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096}));
    let config = fields.partly_rotated(architecture, 1.0)?;
    // The list, where there is one, is what counts.
    let pattern = match fields.value("layer_types") {
        Some(_) => fields.value("sliding_window_pattern").and(None),
        None => fields.size("sliding_window_pattern")?,
    };
    let window = fields.size("sliding_window")?;
    let interval = pattern.unwrap_or(INTERVAL).max(1);
    let sliding =
        fields.sliding_layers(config.layers.len(), |layer| window.is_some() && !(layer + 1).is_multiple_of(interval))?;
    Ok(with_kinds(config, window, |layer| sliding[layer]))
}

fn read_moe(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let fields = fields.with_defaults(&json!({
        "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 1024, "num_shared_experts": 1,
        "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
    }));
    let config = read_hf("exaone_moe", &fields)?;
    let num_dense = fields.required_size("first_k_dense_replace")?;
    let is_sparse = fields.sparse_layer_types(config.layers.len(), |layer| layer >= num_dense)?;
    let fields = fields.renamed(&[("num_experts", "n_routed_experts"), ("num_shared_experts", "n_shared_experts")]);
    Ok(config.with_experts(deepseek::read_experts(&fields)?, |layer| is_sparse[layer]))
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let config = fields.decoder("exaone4", RopeStyle::Neox)?;
    Ok(with_norms_after(with_gguf_kinds(config, fields)?))
}

fn read_moe_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let (config, experts) = fields.mixture("exaone_moe", RopeStyle::Neox)?;
    deepseek::with_sigmoid_experts(with_gguf_kinds(config, fields)?, experts, fields)
}

fn with_gguf_kinds(config: DecoderConfig, fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let window = fields.size("attention.sliding_window")?.filter(|window| *window > 0);
    let usual = |layer: usize| window.is_some() && !(layer + 1).is_multiple_of(INTERVAL);
    let sliding = fields.sliding_layers(config.layers.len(), usual)?;
    Ok(with_kinds(config, window, |layer| sliding[layer]))
}

fn with_norms_after(config: DecoderConfig) -> DecoderConfig {
    config.with_layers(|layer| layer.norms = Norms::After)
}

/// Without a window all layers rotate.
fn with_kinds(mut config: DecoderConfig, window: Option<usize>, sliding: impl Fn(usize) -> bool) -> DecoderConfig {
    for (i, layer) in config.layers.iter_mut().enumerate() {
        layer.attention.qk_norm = Some(QkNorm::Heads);
        layer.attention.rope = (window.is_none() || sliding(i)).then_some(0);
    }
    config.with_windows(|i| window.filter(|_| sliding(i)))
}

//! ERNIE 4.5: llama that rotates neighbouring pairs, and the same with experts beside a shared one, behind some dense layers.

use device::{RopeStyle, RouterScore};
use serde_json::json;

use super::Architecture;
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, ExpertsConfig, SharedConfig},
        fields::{Fields, GgufFields, HfFields},
    },
    weights::{Role, WeightId},
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["ernie4_5"],
    class: "Ernie4_5ForCausalLM",
    gguf: "ernie4_5",
    names: &[],
    from_hf: |fields| {
        let fields = fields.with_defaults(&json!({"head_dim": 128, "num_key_value_heads": 2}));
        let bias = fields.flag("use_bias")?.unwrap_or(false);
        Ok(read_hf("ernie4_5", &fields)?.with_layers(|layer| layer.set_biases(bias)))
    },
    from_gguf: |fields| fields.decoder("ernie4_5", RopeStyle::Interleaved),
};

pub(super) const MOE: Architecture = Architecture {
    model_types: &["ernie4_5_moe"],
    class: "Ernie4_5_MoeForCausalLM",
    gguf: "ernie4_5-moe",
    names: &[(Role::RouterCorrection, "mlp.moe_statics.e_score_correction_bias$")],
    from_hf: read_moe,
    from_gguf: read_moe_gguf,
};

fn read_hf(architecture: &'static str, fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let fields = fields.with_defaults(&json!({"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": true}));
    let mut config = fields.partly_rotated(architecture, 1.0)?;
    config.ropes[0].style = RopeStyle::Interleaved;
    Ok(config)
}

fn read_moe(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let fields = fields.with_defaults(&json!({
        "num_key_value_heads": 4, "moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2,
    }));
    if fields.flag("use_bias")?.unwrap_or(false) {
        return Err(fields.error("use_bias", "is true; a bias of the logits is not implemented"));
    }
    let config = read_hf("ernie4_5_moe", &fields)?;
    let sizes = ["moe_num_experts", "moe_k", "moe_intermediate_size"].map(|key| fields.required_size(key));
    let [num_experts, num_chosen, width] = sizes;
    let width = width?;
    // Weights are divided by their sum, or by this where that is less, which it never is.
    if fields.number("moe_norm_min")?.is_some_and(|least| least > 1e-9) {
        return Err(fields.error("moe_norm_min", "is over 1e-9; weights always add up to one here"));
    }
    let experts = ExpertsConfig::new([num_experts?, num_chosen?, width], RouterScore::Softmax).normalized(true);
    let num_shared = fields.size("moe_num_shared_experts")?.filter(|n| *n > 0);
    let shared = num_shared.map(|n| SharedConfig { intermediate_size: n.saturating_mul(width), is_weighted: false });
    let interval = fields.size("moe_layer_interval")?.unwrap_or(1).max(1);
    let first = fields.size("moe_layer_start_index")?.unwrap_or(1);
    // -1 is the last.
    let last = fields.typed("moe_layer_end_index", "a layer, or -1", |v| v.as_i64().filter(|n| *n >= -1))?.unwrap_or(-1);
    let is_mixture =
        |layer: usize| layer >= first && (last == -1 || layer as i64 <= last) && (layer + 1).is_multiple_of(interval);
    Ok(config.with_experts(ExpertsConfig { has_correction: true, shared, ..experts }, is_mixture))
}

fn read_moe_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let (config, experts) = fields.mixture("ernie4_5_moe", RopeStyle::Interleaved)?;
    let first = fields.size("leading_dense_block_count")?.unwrap_or(0);
    let interval = fields.size("interleave_moe_layer_step")?.unwrap_or(1).max(1);
    let is_mixture = |layer: usize| layer >= first && (layer + 1).is_multiple_of(interval);
    let has_correction = (0..config.layers.len())
        .find(|layer| is_mixture(*layer))
        .is_some_and(|layer| fields.weights.contains(WeightId::layer(layer, Role::RouterCorrection)));
    Ok(config.with_experts(ExpertsConfig { has_correction, ..experts.normalized(true) }, is_mixture))
}

//! Hunyuan-A13B: hunyuan with a mixture of experts in each layer, one of which every token passes.

use device::{RopeStyle, RouterScore};
use serde_json::Value;

use super::{Architecture, hunyuan};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, ExpertsConfig, FfnConfig, SharedConfig},
        fields::{Fields, GgufFields, HfFields},
    },
    weights::Role,
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["hunyuan_v1_moe"],
    class: "HunYuanMoEV1ForCausalLM",
    gguf: "hunyuan-moe",
    names: &[
        (Role::AttnQNorm, "self_attn.query_layernorm"),
        (Role::AttnKNorm, "self_attn.key_layernorm"),
        (Role::Router, "mlp.gate.wg"),
        (Role::SharedGate, "mlp.shared_mlp.gate_proj"),
        (Role::SharedUp, "mlp.shared_mlp.up_proj"),
        (Role::SharedGateUp, "mlp.shared_mlp.gate_and_up_proj"),
        (Role::SharedDown, "mlp.shared_mlp.down_proj"),
    ],
    from_hf,
    from_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let mut config = hunyuan::read_hf("hunyuan_v1_moe", fields)?;
    let num_layers = config.layers.len();
    let width = config.layers.first().map_or(0, |layer| layer.ffn.intermediate_size());
    // Each is a number, or a list with one for each layer.
    let sizes = |key: &str, usual: usize| -> Result<Vec<usize>, EngineError> {
        let size = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok());
        let list = fields.typed(key, &format!("a number, or a list of {num_layers}"), |value| match value {
            Value::Array(list) if list.len() == num_layers => list.iter().map(size).collect(),
            one => size(one).map(|size| vec![size; num_layers]),
        })?;
        Ok(list.unwrap_or_else(|| vec![usual; num_layers]))
    };
    let (num_experts, chosen) = (sizes("num_experts", 1)?, sizes("moe_topk", 1)?);
    let (widths, shared) = (sizes("moe_intermediate_size", width)?, sizes("num_shared_expert", 1)?);
    let has_shared = fields.flag("use_mixed_mlp_moe")?.unwrap_or(false);
    for (i, layer) in config.layers.iter_mut().enumerate() {
        if num_experts[i] > 1 {
            let mut experts = ExpertsConfig::new([num_experts[i], chosen[i], widths[i]], RouterScore::Softmax).normalized(true);
            let intermediate_size = width.saturating_mul(shared[i]);
            experts.shared = has_shared.then_some(SharedConfig { intermediate_size, is_weighted: false });
            layer.ffn = FfnConfig::Experts(experts);
        }
    }
    Ok(config)
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let (config, experts) = fields.mixture("hunyuan_v1_moe", RopeStyle::Neox)?;
    Ok(hunyuan::with_norms(config, true).with_experts(experts.normalized(true), |_| true))
}

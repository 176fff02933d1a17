//! Flint: qwen3-moe with sinks and a shared expert, experts chosen by sigmoids; windowed layers rotate, the others do not.

use device::RouterScore;
use serde_json::json;

use super::{Architecture, no_gguf, qwen2_moe, qwen3};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, ExpertsConfig, SharedConfig},
        fields::{Fields, HfFields},
    },
    weights::Role,
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["flint"],
    class: "FlintForCausalLM",
    gguf: "flint",
    names: &[
        (Role::AttnSinks, "self_attn.softmax_offset$"),
        (Role::SharedGate, "mlp.shared_expert.gate_proj"),
        (Role::SharedUp, "mlp.shared_expert.up_proj"),
        (Role::SharedDown, "mlp.shared_expert.down_proj"),
    ],
    from_hf,
    from_gguf: no_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let fields = fields.with_defaults(&json!({
        "head_dim": 128, "num_key_value_heads": 4, "sliding_window": 513, "moe_intermediate_size": 512, "num_experts": 256,
        "num_experts_per_tok": 6, "norm_topk_prob": true, "shared_expert_intermediate_size": 1024, "mlp_only_layers": [0, 1],
    }));
    let mut config = qwen3::with_norms(fields.decoder("flint")?);
    let num_layers = config.layers.len();
    let sees_everything = |layer: usize| layer < 2 || layer % 4 == 1 || layer + 1 == num_layers;
    let sliding = fields.sliding_layers(num_layers, |layer| !sees_everything(layer))?;
    for (layer, slides) in config.layers.iter_mut().zip(&sliding) {
        layer.attention.has_sinks = true;
        layer.attention.rope = slides.then_some(0);
    }
    let intermediate_size = fields.required_size("shared_expert_intermediate_size")?;
    let shared = Some(SharedConfig { intermediate_size, is_weighted: false });
    let experts = qwen2_moe::read_experts(&fields)?.scored(RouterScore::Sigmoid);
    let window = fields.required_size("sliding_window")?;
    let config = config.with_experts(ExpertsConfig { shared, ..experts }, fields.sparse_layers()?);
    Ok(config.with_windows(|layer| sliding[layer].then_some(window)))
}

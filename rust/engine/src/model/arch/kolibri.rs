//! Aleph Alpha's Kolibri: norms around both halves of a layer, a window in four of five layers, the fifth of which does not
//! rotate, and experts that are chosen by logits and weighed by their sigmoids.

use device::RouterScore;
use serde_json::json;

use super::{Architecture, no_gguf};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, ExpertsConfig, Norms, QkNorm, SharedConfig},
        fields::{Fields, HfFields},
    },
    weights::Role,
};

/// Every fifth layer sees everything.
const INTERVAL: usize = 5;

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["kolibri1"],
    class: "Kolibri1ForCausalLM",
    gguf: "kolibri1",
    names: &[
        (Role::PostAttnNorm, "post_attn_norm"),
        (Role::PostAttnNorm, "post_self_attn_layernorm"),
        (Role::PostFfnNorm, "post_ffn_norm"),
        (Role::PostFfnNorm, "post_mlp_layernorm"),
        (Role::RouterCorrection, "moe.router.expert_bias$"),
        (Role::RouterCorrection, "mlp.gate.e_score_correction_bias$"),
    ],
    from_hf,
    from_gguf: no_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let fields = fields.also_called(&[("num_local_experts", "num_experts")]).with_defaults(&json!({
        "num_key_value_heads": 4, "head_dim": 128, "sliding_window": 513, "num_experts": 384, "num_experts_per_tok": 6,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        // Every layer has experts; the other width means nothing.
        "intermediate_size": 1,
    }));
    let mut config = fields.partly_rotated("kolibri1", 1.0)?;
    let sliding = fields.sliding_layers(config.layers.len(), |layer| !(layer + 1).is_multiple_of(INTERVAL))?;
    let window = fields.size("sliding_window")?;
    for (layer, slides) in config.layers.iter_mut().zip(&sliding) {
        layer.norms = Norms::Around;
        layer.attention.qk_norm = Some(QkNorm::Heads);
        layer.attention.rope = (window.is_none() || *slides).then_some(0);
    }
    let keys = ["num_experts", "num_experts_per_tok", "moe_intermediate_size"].map(|key| fields.required_size(key));
    let [num_experts, num_chosen, width] = keys;
    let is_normalized = fields.flag("norm_topk_prob")?.unwrap_or(false);
    let mut experts = ExpertsConfig::new([num_experts?, num_chosen?, width?], RouterScore::SigmoidOfChosen);
    experts.has_correction = true;
    let intermediate_size = fields.required_size("shared_expert_intermediate_size")?;
    experts.shared = Some(SharedConfig { intermediate_size, is_weighted: false });
    let config = config.with_windows(|layer| window.filter(|_| sliding[layer]));
    Ok(config.with_experts(experts.normalized(is_normalized), |_| true))
}

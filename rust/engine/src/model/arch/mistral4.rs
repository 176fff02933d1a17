//! Mistral 4: latent attention whose queries grow with their position, and experts beside a shared one.

use serde_json::json;

use super::{Architecture, deepseek, ministral3};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, FfnConfig},
        fields::{Fields, GgufFields, HfFields},
    },
    weights::Role,
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["mistral4"],
    class: "Mistral4ForCausalLM",
    gguf: "mistral4",
    names: &[(Role::ExpertGateUp, "mlp.experts.gate_up_proj$"), (Role::ExpertDown, "mlp.experts.down_proj$")],
    from_hf,
    from_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let mut fields = fields.with_defaults(&json!({
        "n_shared_experts": 1, "n_routed_experts": 128, "num_experts_per_tok": 4, "moe_intermediate_size": 2048,
        "norm_topk_prob": true, "kv_lora_rank": 256, "q_lora_rank": 1024, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "qk_nope_head_dim": 64,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 128.0, "original_max_position_embeddings": 8192,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        },
    }));
    // Scores are those of softmax, without a correction.
    fields.object.insert("topk_method".to_owned(), json!("group_limited_greedy"));
    let mut config = deepseek::read_latent("mistral4", &fields)?;
    let [rope_dim, nope_dim] = ["qk_rope_head_dim", "qk_nope_head_dim"].map(|key| fields.required_size(key));
    let (rope_dim, nope_dim) = (rope_dim?, nope_dim?);
    // The part of a whole head.
    let part = fields.rope_number("partial_rotary_factor")?;
    config.ropes[0].rotary_dim = part.map_or(rope_dim, |part| (part * (rope_dim + nope_dim) as f64) as usize);
    let mut experts = deepseek::read_experts(&fields)?;
    // Though softmax scores them.
    deepseek::set_by_two_best(&mut experts);
    let num_dense = fields.size("first_k_dense_replace")?.unwrap_or(0);
    let config = config.with_experts(experts, |layer| layer >= num_dense);
    let rope = fields.child("rope_parameters")?.unwrap_or(fields);
    ministral3::with_scale(config, rope.number("llama_4_scaling_beta")?, rope.size("original_max_position_embeddings")?)
        .map_err(|why| rope.error("llama_4_scaling_beta", why))
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let config = deepseek::from_gguf("mistral4", fields)?.with_layers(|layer| {
        if let FfnConfig::Experts(experts) = &mut layer.ffn {
            deepseek::set_by_two_best(experts);
        }
    });
    ministral3::with_gguf_scale(config, fields)
}

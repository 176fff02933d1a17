//! DBRX: layer norms without biases, bounded queries, keys and values, and fine-grained experts.

use device::RouterScore;
use serde_json::json;

use super::{Architecture, no_gguf};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, ExpertsConfig, FfnConfig, NormConfig},
        fields::{Fields, HfFields},
    },
    weights::Role,
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["dbrx"],
    class: "DbrxForCausalLM",
    gguf: "dbrx",
    names: &[
        (Role::Embedding, "model.wte"),
        (Role::OutputNorm, "model.norm_f"),
        (Role::AttnNorm, "norm_attn_norm.norm_1"),
        (Role::AttnQkv, "norm_attn_norm.attn.Wqkv"),
        (Role::AttnOutput, "norm_attn_norm.attn.out_proj"),
        (Role::FfnNorm, "norm_attn_norm.norm_2"),
        (Role::Router, "ffn.router.layer"),
        (Role::ExpertGate, "ffn.experts.mlp.w1$"),
        (Role::ExpertUp, "ffn.experts.mlp.v1$"),
        (Role::ExpertDown, "ffn.experts.mlp.w2$.T"),
    ],
    from_hf,
    from_gguf: no_gguf,
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let mut fields = fields.also_called(&[
        ("d_model", "hidden_size"),
        ("n_heads", "num_attention_heads"),
        ("n_layers", "num_hidden_layers"),
        ("max_seq_len", "max_position_embeddings"),
    ]);
    let missing = |key: &str| fields.error(key, "is missing");
    let attention = fields.child("attn_config")?.ok_or_else(|| missing("attn_config"))?;
    let network = fields.child("ffn_config")?.ok_or_else(|| missing("ffn_config"))?;
    network.only(&[("ffn_act_fn", json!({"name": "silu"}))])?;
    let num_kv_heads = attention.size("kv_n_heads")?.unwrap_or(1);
    let width = network.size("ffn_hidden_size")?.unwrap_or(3584);
    let sizes = [network.size("moe_num_experts")?.unwrap_or(4), network.size("moe_top_k")?.unwrap_or(1), width];
    let normalized = match network.number("moe_normalize_expert_weights")? {
        None => !network.object.contains_key("moe_normalize_expert_weights"),
        Some(1.0) => true,
        Some(other) => {
            return Err(network.error("moe_normalize_expert_weights", format!("is {other:?}; implemented: 1.0 and null")));
        }
    };
    let clip = attention.softcap("clip_qkv")?;
    // Of the hub's own; Transformers 5.24 leaves it unread.
    if let (Some(theta), None) = (attention.number("rope_theta")?, fields.value("rope_theta")) {
        fields.object.insert("rope_theta".into(), json!(theta));
    }
    for (key, size) in [("num_key_value_heads", num_kv_heads), ("intermediate_size", width)] {
        fields.object.insert(key.into(), json!(size));
    }
    let experts = ExpertsConfig::new(sizes, RouterScore::Softmax).normalized(normalized);
    let config = DecoderConfig { norm: NormConfig::layer(None), ..fields.decoder("dbrx")? };
    Ok(config.with_layers(|layer| (layer.attention.clip, layer.ffn) = (clip, FfnConfig::Experts(experts))))
}

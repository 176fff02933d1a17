//! DeepSeek V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437), A.X K1 and GLM 4.7 Flash: latent attention, and experts behind some
//! dense layers.

use device::{ExpertGroups, RopeStyle, RouterScore};
use serde_json::{Value, json};

use super::{Architecture, no_gguf};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, ExpertsConfig, LatentConfig, Norms, SharedConfig},
        fields::{Fields, GgufFields, HfFields, yarn_mscale},
    },
    weights::{Role, WeightId},
};

/// Added to the sum that weights are divided by.
pub(super) const EPS: f32 = 1e-20;
/// Of the norms of latent vectors, whatever the model's is.
const NORM_EPS: f32 = 1e-6;

pub(super) const V2: Architecture = Architecture {
    model_types: &["deepseek_v2"],
    class: "DeepseekV2ForCausalLM",
    gguf: "deepseek2",
    names: &[],
    from_hf: |fields| from_hf("deepseek_v2", fields),
    from_gguf: |fields| from_gguf("deepseek_v2", fields),
};

pub(super) const V3: Architecture = Architecture {
    // Kimi K2 is one by another name.
    model_types: &["deepseek_v3", "kimi_k2"],
    class: "DeepseekV3ForCausalLM",
    from_hf: |fields| from_hf("deepseek_v3", fields),
    from_gguf: |fields| from_gguf("deepseek_v3", fields),
    ..V2
};

pub(super) const GLM4_MOE_LITE: Architecture = Architecture {
    model_types: &["glm4_moe_lite"],
    class: "Glm4MoeLiteForCausalLM",
    from_hf: |fields| from_hf("glm4_moe_lite", fields),
    from_gguf: |fields| from_gguf("glm4_moe_lite", fields),
    ..V2
};

/// Youtu-LLM: latent attention in dense layers.
pub(super) const YOUTU: Architecture = Architecture {
    model_types: &["youtu"],
    class: "YoutuForCausalLM",
    gguf: "youtu",
    from_hf: |fields| {
        let usual = json!({
            "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
            "tie_word_embeddings": true,
        });
        read_latent("youtu", &fields.with_defaults(&usual))
    },
    from_gguf: no_gguf,
    ..V2
};

/// Sarvam's larger model, which calls yarn after `DeepSeek`.
pub(super) const SARVAM_MLA: Architecture = Architecture {
    model_types: &["sarvam_mla"],
    class: "SarvamMLAForCausalLM",
    gguf: "sarvam_mla",
    from_hf: |fields| {
        let mut fields = fields.with_defaults(&json!({
            "n_shared_experts": 1, "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
            "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "qk_nope_head_dim": 128, "first_k_dense_replace": 1,
        }));
        if let Some(Value::Object(rope)) = fields.object.get_mut("rope_scaling") {
            for key in ["type", "rope_type"] {
                if rope.get(key).is_some_and(|kind| kind == "deepseek_yarn") {
                    rope.insert(key.to_owned(), json!("yarn"));
                }
            }
        }
        from_hf("sarvam_mla", &fields)
    },
    from_gguf: no_gguf,
    ..V2
};

/// A.X K1: V3 with a norm behind its experts.
pub(super) const AXK1: Architecture = Architecture {
    model_types: &["axk1"],
    class: "AXK1ForCausalLM",
    gguf: "axk1",
    names: &[(Role::PostFfnNorm, "post_mlp_layernorm")],
    from_hf: |fields| {
        let mut fields = fields.with_defaults(&json!({
            "n_shared_experts": 1, "n_routed_experts": 192, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_group": 8,
            "topk_group": 4, "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
            "v_head_dim": 128, "qk_nope_head_dim": 128, "first_k_dense_replace": 1,
        }));
        // Whatever its files say, they route as V3.
        fields.object.insert("topk_method".into(), json!("noaux_tc"));
        fields.object.remove("scoring_func");
        Ok(from_hf("axk1", &fields)?.with_layers(|layer| {
            if layer.ffn.num_experts() > 0 {
                layer.norms = Norms::BeforeAndLast;
            }
        }))
    },
    from_gguf: no_gguf,
};

fn from_hf(architecture: &'static str, fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let config = read_latent(architecture, fields)?;
    let num_dense = fields.size("first_k_dense_replace")?.unwrap_or(0);
    let is_sparse = fields.sparse_layer_types(config.layers.len(), |layer| layer >= num_dense)?;
    Ok(config.with_experts(read_experts(fields)?, |layer| is_sparse[layer]))
}

/// Latent attention in layers that are dense yet.
pub(super) fn read_latent(architecture: &'static str, fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let bias = fields.flag("attention_bias")?.unwrap_or(false);
    let keys = ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"];
    let [kv_rank, nope_dim, rope_dim, v_dim] = keys.map(|key| fields.required_size(key));
    let q_rank = fields.size("q_lora_rank")?;
    let latent =
        LatentConfig { q_rank, kv_rank: kv_rank?, nope_dim: nope_dim?, rope_dim: rope_dim?, v_dim: v_dim?, eps: NORM_EPS };
    // A head has several sizes; any of them stands in until `with_latent`.
    let mut config = fields.with_head("qk_rope_head_dim", architecture, 1.0)?;
    config.ropes = vec![fields.rope("full_attention", latent.rope_dim, 1.0)?];
    config.ropes[0].style = RopeStyle::Interleaved;
    if fields.flag("rope_interleave")? == Some(false) {
        return Err(fields.error("rope_interleave", "is false; only neighbouring elements rotate together here"));
    }
    let mscale = fields.rope_number("mscale_all_dim")?.filter(|mscale| *mscale != 0.0);
    let factor = fields.rope_number("factor")?.unwrap_or(1.0);
    let config = with_latent(config, latent, mscale.map_or(1.0, |mscale| yarn_mscale(factor, mscale)));
    Ok(config.with_layers(|layer| (layer.attention.qkv_bias, layer.attention.output_bias) = (bias, bias)))
}

/// Experts as the files of DeepSeek, and of GLM 4.5 on, describe them.
pub(super) fn read_experts(fields: &HfFields<'_>) -> Result<ExpertsConfig, EngineError> {
    let keys = ["n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"];
    let [num_experts, num_chosen, width] = keys.map(|key| fields.required_size(key));
    let (num_experts, width) = (num_experts?, width?);
    let method = fields.text("topk_method")?;
    let (score, by_two_best) = match method.as_deref().unwrap_or("noaux_tc") {
        "noaux_tc" => (RouterScore::Sigmoid, true),
        "greedy" | "group_limited_greedy" => (RouterScore::Softmax, false),
        other => {
            let why = format!("is `{other}`; implemented: greedy, group_limited_greedy, noaux_tc");
            return Err(fields.error("topk_method", why));
        }
    };
    let implemented = if score == RouterScore::Sigmoid { "sigmoid" } else { "softmax" };
    if let Some(other) = fields.text("scoring_func")?.filter(|value| value != implemented) {
        return Err(fields.error("scoring_func", format!("is `{other}`; implemented with such a `topk_method`: {implemented}")));
    }
    let mut experts = ExpertsConfig::new([num_experts, num_chosen?, width], score);
    experts.has_correction = score == RouterScore::Sigmoid;
    let is_normalized = fields.flag("norm_topk_prob")?.unwrap_or(score == RouterScore::Sigmoid);
    experts.rule.normalize = is_normalized.then_some(EPS);
    experts.rule.scale = fields.number("routed_scaling_factor")?.unwrap_or(1.0) as f32;
    let num_groups = fields.size("n_group")?.unwrap_or(1);
    let num_chosen = fields.size("topk_group")?.unwrap_or(1);
    let is_grouped = num_groups > 1 && method.as_deref() != Some("greedy");
    experts.rule.groups = is_grouped.then_some(ExpertGroups { num_groups, num_chosen, by_two_best });
    let num_shared = fields.size("n_shared_experts")?.filter(|n| *n > 0);
    experts.shared = num_shared.map(|n| SharedConfig { intermediate_size: n.saturating_mul(width), is_weighted: false });
    Ok(experts)
}

pub(super) fn from_gguf(architecture: &'static str, fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let (config, mut experts) = fields.mixture(architecture, RopeStyle::Interleaved)?;
    let kv_rank = fields.required_size("attention.kv_lora_rank")?;
    let rope_dim = config.ropes.first().map_or(0, |rope| rope.rotary_dim);
    // Files of old have the lengths of the expanded form under the plain names.
    let length = |mla: &str, plain: &str| match fields.size(mla)? {
        Some(length) => Ok(length),
        None => fields.required_size(plain),
    };
    let key = length("attention.key_length_mla", "attention.key_length")?;
    let latent = LatentConfig {
        // Some files name a rank and have whole queries all the same.
        q_rank: fields.size("attention.q_lora_rank")?.filter(|_| fields.weights.contains(WeightId::layer(0, Role::AttnQDown))),
        kv_rank,
        nope_dim: key.saturating_sub(rope_dim),
        rope_dim,
        v_dim: length("attention.value_length_mla", "attention.value_length")?,
        eps: NORM_EPS,
    };
    let multiplier = fields.number("rope.scaling.yarn_log_multiplier")?.unwrap_or(0.0);
    let factor = fields.number("rope.scaling.factor")?.unwrap_or(1.0);
    let config = with_latent(config, latent, if factor > 1.0 { multiplier * factor.ln() + 1.0 } else { 1.0 });
    let num_dense = fields.size("leading_dense_block_count")?.unwrap_or(0);
    experts.has_correction = fields.weights.contains(WeightId::layer(num_dense, Role::RouterCorrection));
    experts.rule.normalize = experts.rule.normalize.map(|_| EPS);
    Ok(config.with_experts(experts, |layer| layer >= num_dense))
}

/// Files of architectures that always score with sigmoids need not say it.
pub(super) fn with_sigmoid_experts(
    config: DecoderConfig,
    mut experts: ExpertsConfig,
    fields: &GgufFields<'_>,
) -> Result<DecoderConfig, EngineError> {
    let has_router = |layer: &usize| fields.weights.contains(WeightId::layer(*layer, Role::Router));
    let num_dense = match fields.size("leading_dense_block_count")? {
        Some(count) => count,
        None => (0..config.layers.len()).find(has_router).unwrap_or(0),
    };
    experts.has_correction = fields.weights.contains(WeightId::layer(num_dense, Role::RouterCorrection));
    experts.rule.score = RouterScore::Sigmoid;
    experts.rule.normalize = experts.rule.normalize.map(|_| EPS);
    set_by_two_best(&mut experts);
    Ok(config.with_experts(experts, |layer| layer >= num_dense))
}

/// Groups of experts, if there are any, are those with the largest sums of two.
pub(super) fn set_by_two_best(experts: &mut ExpertsConfig) {
    experts.rule.groups = experts.rule.groups.map(|groups| ExpertGroups { by_two_best: true, ..groups });
}

/// `mscale` is squared into the scale of scores.
fn with_latent(config: DecoderConfig, latent: LatentConfig, mscale: f64) -> DecoderConfig {
    let scale = ((latent.nope_dim + latent.rope_dim) as f64).sqrt().recip() * mscale * mscale;
    config.with_layers(|layer| {
        let attention = &mut layer.attention;
        (attention.num_kv_heads, attention.head_dim) = (1, latent.rope_dim + latent.kv_rank);
        (attention.scale, attention.latent) = (scale as f32, Some(latent));
    })
}

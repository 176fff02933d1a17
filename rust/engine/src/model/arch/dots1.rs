//! dots.llm1, Hunyuan 3, Solar Open, Sarvam and Ling: experts chosen as in DeepSeek-V3 (arXiv:2412.19437), and plain attention.

use device::RopeStyle;
use serde_json::{Value, json};

use super::{Architecture, deepseek, glm4_moe};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, QkNorm, SharedConfig},
        fields::{Fields, GgufFields, HfFields},
    },
    weights::{Role, WeightId},
};

pub(super) const ARCHITECTURE: Architecture =
    Architecture { model_types: &["dots1"], class: "Dots1ForCausalLM", gguf: "dots1", names: &[], from_hf: read_dots, from_gguf };

pub(super) const SOLAR_OPEN: Architecture = Architecture {
    model_types: &["solar_open"],
    class: "SolarOpenForCausalLM",
    // The converter calls it a GLM 4.5.
    gguf: "glm4moe",
    names: &[],
    from_hf: read_solar,
    from_gguf: glm4_moe::from_gguf,
};

pub(super) const HY_V3: Architecture = Architecture {
    model_types: &["hy_v3"],
    class: "HYV3ForCausalLM",
    gguf: "hy_v3",
    names: &[
        (Role::Router, "mlp.router.gate"),
        (Role::RouterCorrection, "mlp.expert_bias$"),
        (Role::SharedGate, "mlp.shared_mlp.gate_proj"),
        (Role::SharedUp, "mlp.shared_mlp.up_proj"),
        (Role::SharedDown, "mlp.shared_mlp.down_proj"),
    ],
    from_hf: read_hy,
    from_gguf: |fields| {
        let (config, mut experts) = fields.mixture("hy_v3", RopeStyle::Neox)?;
        let has_shared = |layer| fields.weights.contains(WeightId::layer(layer, Role::SharedGate));
        if experts.shared.is_none() && config.layers.len().checked_sub(1).is_some_and(has_shared) {
            experts.shared = Some(SharedConfig { intermediate_size: experts.intermediate_size, is_weighted: false });
        }
        deepseek::with_sigmoid_experts(with_norms(config), experts, fields)
    },
};

pub(super) const SARVAM: Architecture = Architecture {
    model_types: &["sarvam_moe"],
    class: "SarvamMoEForCausalLM",
    // What the converter of Ling 2 writes, which is the same.
    gguf: "bailingmoe2",
    names: &[
        (Role::Embedding, "model.word_embeddings"),
        (Role::AttnQkv, "attention.query_key_value"),
        (Role::AttnOutput, "attention.dense"),
        (Role::AttnQNorm, "attention.query_layernorm"),
        (Role::AttnKNorm, "attention.key_layernorm"),
        (Role::RouterCorrection, "mlp.gate.expert_bias$"),
    ],
    from_hf: read_sarvam,
    from_gguf: |fields| {
        let (config, mut experts) = fields.mixture("sarvam_moe", RopeStyle::Neox)?;
        let count = fields.size("expert_shared_count")?.unwrap_or(1);
        if let (Some(shared), Some(width)) = (&mut experts.shared, fields.size("expert_shared_feed_forward_length")?) {
            shared.intermediate_size = width * count;
        }
        deepseek::with_sigmoid_experts(with_norms(config), experts, fields)
    },
};

/// Ling and Ring 2, and the first generation of them, whose scores are a softmax's.
pub(super) const BAILING_V2: Architecture =
    Architecture { model_types: &["bailing_moe_v2"], class: "BailingMoeV2ForCausalLM", from_hf: read_second_bailing, ..SARVAM };

pub(super) const BAILING: Architecture = Architecture {
    model_types: &["bailing_moe"],
    class: "BailingMoeForCausalLM",
    gguf: "bailingmoe",
    from_hf: |fields| {
        // Files of the second generation have that name too.
        let classes = fields.texts("architectures")?.unwrap_or_default();
        if classes.iter().any(|class| class == BAILING_V2.class) {
            return read_second_bailing(fields);
        }
        let usual = json!({
            "topk_method": "greedy", "use_qk_norm": false, "routed_scaling_factor": 1.0, "first_k_dense_replace": 0,
            "norm_topk_prob": true,
        });
        read_bailing("bailing_moe", &fields.with_defaults(&usual))
    },
    // The converter permutes the rows of q and k.
    from_gguf: |fields| {
        let (config, experts) = fields.mixture("bailing_moe", RopeStyle::Interleaved)?;
        let num_dense = fields.size("leading_dense_block_count")?.unwrap_or(0);
        Ok(config.with_experts(experts, |layer| layer >= num_dense))
    },
    ..SARVAM
};

fn read_second_bailing(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    fields.only(&[("score_function", json!("sigmoid"))])?;
    read_bailing("bailing_moe_v2", &fields.with_defaults(&json!({"partial_rotary_factor": 0.5, "n_group": 8, "topk_group": 4})))
}

fn read_bailing(architecture: &'static str, fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    fields.only(&[
        ("norm_head", json!(false)),
        ("norm_softmax", json!(false)),
        ("use_bias", json!(false)),
        ("multi_gate", json!(false)),
    ])?;
    let (width, heads) = (fields.required_size("hidden_size")?, fields.required_size("num_attention_heads")?);
    let kv_heads = fields.size("num_key_value_heads")?.unwrap_or(heads);
    let usual = json!({"head_dim": width / heads.max(1), "num_key_value_heads": kv_heads, "rope_theta": 10_000.0});
    let mut fields = fields.with_defaults(&usual);
    if fields.value("head_dim").is_none() {
        fields.object.insert("head_dim".into(), usual["head_dim"].clone());
    }
    let shared = fields.size("moe_shared_expert_intermediate_size")?;
    let usual = fields.required_size("moe_intermediate_size")? * fields.size("num_shared_experts")?.unwrap_or(1);
    if let Some(other) = shared.filter(|width| *width != usual) {
        let why = format!("is {other}; implemented: {usual}, that of the shared experts");
        return Err(fields.error("moe_shared_expert_intermediate_size", why));
    }
    Ok(DecoderConfig { architecture, ..read_sarvam(&fields)? })
}

fn read_sarvam(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let or = |key, usual: Value| fields.value(key).unwrap_or(usual);
    let fields = fields.with_defaults(&json!({
        "head_dim": 64, "num_key_value_heads": 4, "rope_theta": 8_000_000.0, "moe_intermediate_size": 1024,
        "num_experts_per_tok": 6, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
        // Its files have the names of others.
        "n_routed_experts": or("num_experts", json!(128)), "n_shared_experts": or("num_shared_experts", json!(1)),
        "attention_bias": or("use_qkv_bias", json!(false)),
    }));
    let bias = fields.flag("attention_bias")?.unwrap_or(false);
    let qk_norm = fields.flag("use_qk_norm")?.unwrap_or(true).then_some(QkNorm::Heads);
    let config = fields.partly_rotated("sarvam_moe", 1.0)?;
    let config = config.with_layers(|layer| (layer.attention.qkv_bias, layer.attention.qk_norm) = (bias, qk_norm));
    let num_dense = fields.required_size("first_k_dense_replace")?;
    Ok(config.with_experts(deepseek::read_experts(&fields)?, |layer| layer >= num_dense))
}

fn read_dots(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let usual = json!({"num_key_value_heads": 32, "norm_topk_prob": false, "sliding_window": 4096, "max_window_layers": 62});
    let mut fields = fields.with_defaults(&usual);
    // Its files call the scores by the method that chooses by them.
    if fields.text("scoring_func")?.as_deref() == Some("noaux_tc") {
        fields.object.remove("scoring_func");
    }
    let config = with_norms(fields.decoder("dots1")?);
    let (window, first) = (fields.size("sliding_window")?, fields.required_size("max_window_layers")?);
    let sliding = fields.sliding_layers(config.layers.len(), |layer| layer >= first)?;
    let num_dense = fields.size("first_k_dense_replace")?.unwrap_or(0);
    let config = config.with_experts(deepseek::read_experts(&fields)?, |layer| layer >= num_dense);
    Ok(config.with_windows(|layer| window.filter(|_| sliding[layer])))
}

fn read_solar(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let fields = fields.with_defaults(&json!({
        "head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "moe_intermediate_size": 1280,
        "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1,
        // Every layer has experts; the other width means nothing.
        "intermediate_size": 1,
    }));
    let bias = fields.flag("attention_bias")?.unwrap_or(false);
    let config = fields.partly_rotated("solar_open", 1.0)?.with_layers(|layer| layer.attention.qkv_bias = bias);
    Ok(config.with_experts(deepseek::read_experts(&fields)?, |_| true))
}

fn read_hy(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let fields = fields.with_defaults(&json!({
        "head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 11_158_840.0, "num_experts": 192,
        "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 1536, "router_scaling_factor": 2.826,
    }));
    let config = with_norms(fields.decoder("hy_v3")?);
    let is_sparse = fields.sparse_layer_types(config.layers.len(), |layer| layer > 0)?;
    let fields = fields.renamed(&[
        ("num_experts", "n_routed_experts"),
        ("num_shared_experts", "n_shared_experts"),
        ("router_scaling_factor", "routed_scaling_factor"),
    ]);
    // It sums in f32 in either case.
    fields.flag("enable_moe_fp32_combine")?;
    Ok(config.with_experts(deepseek::read_experts(&fields)?, |layer| is_sparse[layer]))
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let (config, experts) = fields.mixture("dots1", RopeStyle::Neox)?;
    deepseek::with_sigmoid_experts(with_norms(config), experts, fields)
}

fn with_norms(config: DecoderConfig) -> DecoderConfig {
    config.with_layers(|layer| layer.attention.qk_norm = Some(QkNorm::Heads))
}

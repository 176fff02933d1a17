//! MiniCPM (arXiv:2404.06395): llama with scales of embeddings, residual additions and logits; the third has latent attention.

use device::RopeStyle;
use serde_json::json;

use super::{Architecture, deepseek, no_gguf};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, ResidualScales},
        fields::{Fields, GgufFields, HfFields},
    },
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["minicpm"],
    class: "MiniCPMForCausalLM",
    gguf: "minicpm",
    names: &[],
    from_hf: |fields: &HfFields<'_>| {
        fields.only(&[("num_experts", json!(0)), ("sparse_config", json!({}))])?;
        let usual = json!({"scale_emb": 1, "scale_depth": 1, "dim_model_base": 1, "tie_word_embeddings": true});
        let fields = fields.with_defaults(&usual);
        with_scales(fields.decoder("minicpm")?, &fields)
    },
    from_gguf,
};

pub(super) const THIRD: Architecture = Architecture {
    model_types: &["minicpm3"],
    class: "MiniCPM3ForCausalLM",
    gguf: "minicpm3",
    names: &[],
    from_hf: read_third,
    from_gguf: no_gguf,
};

/// Logits are made of the hidden state divided by how many times it is as wide as a base.
fn with_scales(config: DecoderConfig, fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let number = |key| fields.number(key)?.ok_or_else(|| fields.error(key, "is missing"));
    let depth = number("scale_depth")? / (config.layers.len() as f64).sqrt();
    let scales = [number("scale_emb")?, depth, number("dim_model_base")? / config.hidden_size as f64];
    Ok(scaled(config, scales.map(|scale| scale as f32)))
}

fn scaled(config: DecoderConfig, [embedding_scale, residual, logit_scale]: [f32; 3]) -> DecoderConfig {
    DecoderConfig { embedding_scale, logit_scale, ..config }
        .with_layers(|layer| layer.residual_scales = ResidualScales::all(residual))
}

/// Older files lack the scales, which are those of the first model. The converter permutes the rows of q and k.
fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let config = fields.decoder("minicpm", RopeStyle::Interleaved)?;
    let number = |key, usual: f64| Ok::<_, EngineError>(fields.number(key)?.unwrap_or(usual));
    let residual = number("residual_scale", 1.4 / (config.layers.len() as f64).sqrt())?;
    let logits = number("logit_scale", config.hidden_size as f64 / 256.0)?.recip();
    let scales = [number("embedding_scale", 12.0)?, residual, logits];
    Ok(scaled(config, scales.map(|scale| scale as f32)))
}

fn read_third(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let mut fields = fields.with_defaults(&json!({
        "kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "rms_norm_eps": 1e-5,
        "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256, "tie_word_embeddings": true,
    }));
    let (width, heads) = (fields.required_size("hidden_size")?, fields.required_size("num_attention_heads")?);
    if fields.size("v_head_dim")?.is_none() {
        fields.object.insert("v_head_dim".into(), json!(width / heads.max(1)));
    }
    let depth = json!((fields.required_size("num_hidden_layers")? as f64).sqrt());
    for (key, usual) in [("scale_depth", depth), ("dim_model_base", json!(width))] {
        if fields.value(key).is_none() {
            fields.object.insert(key.into(), usual);
        }
    }
    let mut config = deepseek::read_latent("minicpm3", &fields)?;
    config.ropes[0].style = RopeStyle::Neox;
    with_scales(config, &fields)
}

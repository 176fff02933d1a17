//! Gemma 2: norms around both halves of a layer, every other layer windowed, softcaps. `VaultGemma`: the same with norms before
//! them only.

use serde_json::json;

use super::{Architecture, gemma, no_gguf};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, Norms},
        fields::{Fields, GgufFields, HfFields},
    },
    weights::Role,
};

const ATTENTION_CAP: f32 = 50.0;
const FINAL_CAP: f32 = 30.0;
const WINDOW: usize = 4096;

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["gemma2"],
    class: "Gemma2ForCausalLM",
    gguf: "gemma2",
    names: &[(Role::FfnNorm, "pre_feedforward_layernorm")],
    from_hf: |fields| read_hf("gemma2", fields),
    from_gguf,
};

pub(super) const VAULT: Architecture = Architecture {
    model_types: &["vaultgemma"],
    class: "VaultGemmaForCausalLM",
    gguf: "vaultgemma",
    from_hf: |fields| {
        let fields = fields.with_defaults(&json!({"head_dim": 256, "num_key_value_heads": 4}));
        Ok(read_hf("vaultgemma", &fields)?.with_layers(|layer| layer.norms = Norms::Before))
    },
    from_gguf: no_gguf,
    ..ARCHITECTURE
};

fn read_hf(architecture: &'static str, fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let mut config = gemma::read_hf(architecture, fields)?;
    let cap = |key, usual| if fields.object.contains_key(key) { fields.softcap(key) } else { Ok(Some(usual)) };
    config.final_softcap = cap("final_logit_softcapping", FINAL_CAP)?;
    let sliding = fields.sliding_layers(config.layers.len(), |i| i % 2 == 0)?;
    let window = if fields.object.contains_key("sliding_window") { fields.size("sliding_window")? } else { Some(WINDOW) };
    let scale = fields.number("query_pre_attn_scalar")?.unwrap_or(256.0).sqrt().recip() as f32;
    let config = gemma::with_layers(config, scale, cap("attn_logit_softcapping", ATTENTION_CAP)?);
    Ok(config.with_windows(|i| window.filter(|_| sliding[i])))
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let mut config = gemma::read_gguf("gemma2", fields)?;
    config.final_softcap = fields.softcap("final_logit_softcapping")?.or(Some(FINAL_CAP));
    let window = fields.size("attention.sliding_window")?.unwrap_or(WINDOW);
    let softcap = fields.softcap("attn_logit_softcapping")?.or(Some(ATTENTION_CAP));
    let scale = gemma::gguf_scale(&config, 46);
    Ok(gemma::with_layers(config, scale, softcap).with_windows(|i| Some(window).filter(|_| i % 2 == 0)))
}

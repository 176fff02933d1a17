//! Mamba 2: layers of Mamba-2 alone, as Codestral Mamba has them.

use serde_json::{Value, json};

use super::{Architecture, mamba};
use crate::{
    EngineError,
    model::{
        config::DecoderConfig,
        fields::{Fields, HfFields},
    },
    weights::Role,
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["mamba2"],
    class: "Mamba2ForCausalLM",
    gguf: "mamba2",
    names: &[
        (Role::Embedding, "model.embeddings"),
        (Role::OutputNorm, "model.norm_f"),
        (Role::AttnNorm, "norm"),
        (Role::MixInput, "mixer.in_proj"),
        (Role::Conv, "mixer.conv1d"),
        (Role::MixDtBias, "mixer.dt_bias$"),
        (Role::MixDecay, "mixer.A_log$"),
        (Role::MambaD, "mixer.D$"),
        (Role::MixNorm, "mixer.norm"),
        (Role::MixOutput, "mixer.out_proj"),
    ],
    from_hf,
    from_gguf: |fields| {
        let config = fields.bare("mamba2")?;
        let mamba = mamba::read_gguf(fields, &config)?;
        Ok(config.with_recurrent(mamba, |_| true))
    },
};

fn from_hf(fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let config = fields.bare("mamba2")?;
    fields.only(&[("rms_norm", Value::Bool(true))])?;
    let size = |key: &str, usual: usize| Ok::<_, EngineError>(fields.size(key)?.unwrap_or(usual));
    let (num_heads, head_dim) = (size("num_heads", 128)?, size("head_dim", 64)?);
    let width = num_heads.saturating_mul(head_dim);
    fields.only(&[("intermediate_size", json!(width))])?;
    let by_factor = size("expand", 2)?.saturating_mul(config.hidden_size);
    if by_factor != width {
        return Err(fields.error("expand", format!("makes {by_factor} columns of the hidden size, and all heads have {width}")));
    }
    let mamba = mamba::read_plain(fields, &config, [num_heads, head_dim, size("state_size", 128)?])?;
    Ok(config.with_recurrent(mamba, |_| true))
}

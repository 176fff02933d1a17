//! Mamba and Falcon Mamba: layers of Mamba alone.

use serde_json::{Value, json};

use super::{Architecture, mamba};
use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, MambaNorms, RecurrentConfig},
        fields::{Fields, GgufFields, HfFields},
    },
    weights::{MambaRole, Names, Role},
};

const NAMES: Names = &[
    (Role::Embedding, "model.embeddings"),
    (Role::OutputNorm, "model.norm_f"),
    (Role::AttnNorm, "norm"),
    (Role::MixInput, "mixer.in_proj"),
    (Role::Conv, "mixer.conv1d"),
    (Role::Mamba(MambaRole::Parameters), "mixer.x_proj"),
    (Role::Mamba(MambaRole::Steps), "mixer.dt_proj"),
    (Role::MixDecay, "mixer.A_log$"),
    (Role::MambaD, "mixer.D$"),
    (Role::MixOutput, "mixer.out_proj"),
];

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["mamba"],
    class: "MambaForCausalLM",
    gguf: "mamba",
    names: NAMES,
    from_hf: |fields| pure(fields, "mamba", MambaNorms::Nothing),
    from_gguf,
};

/// Norms without weights within its layers.
pub(super) const FALCON: Architecture = Architecture {
    model_types: &["falcon_mamba"],
    class: "FalconMambaForCausalLM",
    gguf: "mamba",
    names: NAMES,
    from_hf: |fields| {
        let eps = fields.number("mixer_rms_eps")?.unwrap_or(1e-6) as f32;
        pure(fields, "falcon_mamba", MambaNorms::Unweighted(eps))
    },
    from_gguf,
};

fn pure(fields: &HfFields<'_>, architecture: &'static str, norms: MambaNorms) -> Result<DecoderConfig, EngineError> {
    let config = fields.with_defaults(&json!({"tie_word_embeddings": true})).bare(architecture)?;
    let keys = Keys {
        state_dim: "state_size",
        kernel: "conv_kernel",
        factor: "expand",
        rank: "time_step_rank",
        conv_bias: "use_conv_bias",
        proj_bias: "use_bias",
    };
    // It goes before the factor, with which that of Falcon-Mamba-7B disagrees.
    let mamba = read_hf(fields, &keys, config.hidden_size, fields.size("intermediate_size")?, norms)?;
    Ok(config.with_recurrent(mamba, |_| true))
}

/// What config.json calls the parts of a layer.
pub(super) struct Keys {
    pub state_dim: &'static str,
    pub kernel: &'static str,
    /// By which there are more channels than columns of the residual stream.
    pub factor: &'static str,
    pub rank: &'static str,
    pub conv_bias: &'static str,
    pub proj_bias: &'static str,
}

/// Of config.json; so many channels, unless the factor says it.
pub(super) fn read_hf(
    fields: &HfFields<'_>,
    keys: &Keys,
    hidden: usize,
    num_channels: Option<usize>,
    norms: MambaNorms,
) -> Result<RecurrentConfig, EngineError> {
    let size = |key: &str, usual: usize| Ok::<_, EngineError>(fields.size(key)?.unwrap_or(usual));
    let by_factor = size(keys.factor, 2)?.saturating_mul(hidden);
    Ok(RecurrentConfig::Mamba {
        num_channels: num_channels.unwrap_or(by_factor),
        state_dim: size(keys.state_dim, 16)?,
        rank: match fields.value(keys.rank) {
            Some(Value::String(text)) if text == "auto" => hidden.div_ceil(16),
            _ => size(keys.rank, hidden.div_ceil(16))?,
        },
        kernel: size(keys.kernel, 4)?,
        conv_bias: fields.flag(keys.conv_bias)?.unwrap_or(true),
        proj_bias: fields.flag(keys.proj_bias)?.unwrap_or(false),
        norms,
    })
}

fn from_gguf(fields: &GgufFields<'_>) -> Result<DecoderConfig, EngineError> {
    let has_norms = fields.flag("ssm.dt_b_c_rms")?.unwrap_or(false);
    let config = fields.bare(if has_norms { "falcon_mamba" } else { "mamba" })?;
    // The file has no other epsilon.
    let norms = if has_norms { MambaNorms::Unweighted(config.norm.eps) } else { MambaNorms::Nothing };
    let mamba = read_gguf(fields, &config, norms)?;
    Ok(config.with_recurrent(mamba, |_| true))
}

/// Of a GGUF file.
pub(super) fn read_gguf(
    fields: &GgufFields<'_>,
    config: &DecoderConfig,
    norms: MambaNorms,
) -> Result<RecurrentConfig, EngineError> {
    Ok(RecurrentConfig::Mamba {
        num_channels: fields.required_size("ssm.inner_size")?,
        state_dim: fields.required_size("ssm.state_size")?,
        rank: fields.required_size("ssm.time_step_rank")?,
        kernel: fields.required_size("ssm.conv_kernel")?,
        conv_bias: mamba::has_conv_bias(fields, config),
        proj_bias: false,
        norms,
    })
}

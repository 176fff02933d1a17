//! What families with layers of Mamba-2 say alike.

use crate::{
    EngineError,
    model::{
        config::{DecoderConfig, MambaScales, RecurrentConfig},
        fields::{Fields, GgufFields, HfFields},
    },
    weights::{Role, WeightId},
};

/// Steps of any length.
const UNLIMITED: [f32; 2] = [0.0, f32::INFINITY];

/// Of config.json, where keys begin with `mamba_`. Groups of columns are normed behind the gate.
pub(super) fn read_hf(fields: &HfFields<'_>, config: &DecoderConfig) -> Result<RecurrentConfig, EngineError> {
    let size = |key: &str, usual: usize| Ok::<_, EngineError>(fields.size(key)?.unwrap_or(usual));
    let num_heads = size("mamba_n_heads", 128)?;
    let width = match fields.size("mamba_d_ssm")? {
        Some(width) => width,
        None => size("mamba_expand", 2)?.saturating_mul(config.hidden_size),
    };
    Ok(RecurrentConfig::Mamba2 {
        num_heads,
        head_dim: match fields.value("mamba_d_head") {
            None => width / num_heads.max(1),
            Some(value) if value == "auto" => width / num_heads.max(1),
            Some(_) => fields.required_size("mamba_d_head")?,
        },
        num_groups: size("mamba_n_groups", 1)?,
        state_dim: size("mamba_d_state", 256)?,
        kernel: size("mamba_d_conv", 4)?,
        conv_bias: fields.flag("mamba_conv_bias")?.unwrap_or(true),
        proj_bias: fields.flag("mamba_proj_bias")?.unwrap_or(false),
        eps: Some(config.norm.eps),
        gates_first: true,
        limits: limits(fields)?,
        scales: MambaScales::ONE,
    })
}

/// The same where keys have no such beginning, of so many heads, elements of a head, and elements of its states.
pub(super) fn read_plain(
    fields: &HfFields<'_>,
    config: &DecoderConfig,
    [num_heads, head_dim, state_dim]: [usize; 3],
) -> Result<RecurrentConfig, EngineError> {
    Ok(RecurrentConfig::Mamba2 {
        num_heads,
        head_dim,
        num_groups: fields.size("n_groups")?.unwrap_or(8),
        state_dim,
        kernel: fields.size("conv_kernel")?.unwrap_or(4),
        conv_bias: fields.flag("use_conv_bias")?.unwrap_or(true),
        proj_bias: fields.flag("use_bias")?.unwrap_or(false),
        eps: Some(config.norm.eps),
        gates_first: true,
        limits: limits(fields)?,
        scales: MambaScales::ONE,
    })
}

/// How long a step may be.
pub(super) fn limits(fields: &HfFields<'_>) -> Result<[f32; 2], EngineError> {
    Ok(fields.range("time_step_limit")?.unwrap_or(UNLIMITED))
}

/// Of a GGUF file. Its converters write no bounds of steps.
pub(super) fn read_gguf(fields: &GgufFields<'_>, config: &DecoderConfig) -> Result<RecurrentConfig, EngineError> {
    let (num_heads, width) = (fields.required_size("ssm.time_step_rank")?, fields.required_size("ssm.inner_size")?);
    Ok(RecurrentConfig::Mamba2 {
        num_heads,
        head_dim: width / num_heads.max(1),
        num_groups: fields.required_size("ssm.group_count")?,
        state_dim: fields.required_size("ssm.state_size")?,
        kernel: fields.required_size("ssm.conv_kernel")?,
        conv_bias: has_conv_bias(fields, config),
        proj_bias: false,
        eps: Some(config.norm.eps),
        gates_first: true,
        limits: UNLIMITED,
        scales: MambaScales::ONE,
    })
}

/// Whether convolutions have biases in a GGUF file.
pub(super) fn has_conv_bias(fields: &GgufFields<'_>, config: &DecoderConfig) -> bool {
    let has_bias = |layer| fields.weights.contains(WeightId::layer(layer, Role::Conv).bias());
    (0..config.layers.len()).any(has_bias)
}

//! Qwen 2 and 2.5: biases on q, k and v; a window over the upper layers where asked for.

use device::RopeStyle;

use super::Architecture;
use crate::{
    EngineError,
    model::{
        config::DecoderConfig,
        fields::{Fields, GgufFields, HfFields},
        rope::RopeAxes,
    },
    weights::MetadataValue,
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_types: &["qwen2"],
    class: "Qwen2ForCausalLM",
    gguf: "qwen2",
    names: &[],
    from_hf: |fields| Ok(with_bias(read_hf("qwen2", fields)?)),
    from_gguf: |fields| Ok(with_bias(fields.decoder("qwen2", RopeStyle::Neox)?)),
};

/// The language model of Qwen2-VL; of text alone it is a Qwen 2.
pub(super) const VL: Architecture = Architecture {
    model_types: &["qwen2_vl", "qwen2_vl_text"],
    class: "Qwen2VLForConditionalGeneration",
    gguf: "qwen2vl",
    names: &[],
    from_hf: |fields| Ok(with_bias(read_vl("qwen2_vl", fields)?)),
    from_gguf: |fields| Ok(with_bias(read_vl_gguf("qwen2_vl", fields, false)?)),
};

/// The same of Qwen2.5-VL.
pub(super) const VL_2_5: Architecture = Architecture {
    model_types: &["qwen2_5_vl", "qwen2_5_vl_text"],
    class: "Qwen2_5_VLForConditionalGeneration",
    from_hf: |fields| Ok(with_bias(read_vl("qwen2_5_vl", fields)?)),
    ..VL
};

fn with_bias(config: DecoderConfig) -> DecoderConfig {
    config.with_layers(|layer| layer.attention.qkv_bias = true)
}

/// As [`read_hf`], with rotation by time, row and column.
pub(super) fn read_vl(architecture: &'static str, fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let mut config = read_hf(architecture, fields)?;
    config.ropes[0].axes = fields.rope_axes()?;
    Ok(config)
}

/// The same of GGUF files. Some have a fourth section, of which nothing rotates.
pub(super) fn read_vl_gguf(
    architecture: &'static str,
    fields: &GgufFields<'_>,
    takes_turns: bool,
) -> Result<DecoderConfig, EngineError> {
    let mut config = fields.decoder(architecture, RopeStyle::Neox)?;
    config.ropes[0].axes = gguf_axes(fields, takes_turns)?;
    Ok(config)
}

/// By which coordinates the language model of a GGUF file rotates.
pub(super) fn gguf_axes(fields: &GgufFields<'_>, takes_turns: bool) -> Result<Option<RopeAxes>, EngineError> {
    let key = "rope.dimension_sections";
    let Some(value) = fields.metadata.get(&format!("{}.{key}", fields.prefix)) else { return Ok(None) };
    let sizes = match value {
        MetadataValue::Ints(list) if list.len() == 3 || list.len() == 4 && list[3] == 0 => &list[..3],
        _ => &[],
    };
    let sizes = sizes.iter().filter_map(|size| usize::try_from(*size).ok()).collect::<Vec<_>>();
    let sections = <[usize; 3]>::try_from(sizes).map_err(|_| fields.error(key, "must be three sizes"))?;
    Ok(Some(RopeAxes { sections, takes_turns }))
}

/// Qwen's rule: no window unless `use_sliding_window`; then the layers that `layer_types` names, else those from
/// `max_window_layers` on.
pub(super) fn read_hf(architecture: &'static str, fields: &HfFields<'_>) -> Result<DecoderConfig, EngineError> {
    let config = fields.decoder(architecture)?;
    let first = fields.size("max_window_layers")?.unwrap_or(28);
    let sliding = fields.sliding_layers(config.layers.len(), |i| i >= first)?;
    let window = fields.used_window()?;
    Ok(config.with_windows(|i| window.filter(|_| sliding[i])))
}

//! Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen 3.5.

use serde_json::json;

use super::{Files, Reader, set};
use crate::{EngineError, model::fields::Fields, weights::MetadataValue};

/// Qwen's, whose images have so many pixels at least and at most where the file does not say.
pub(super) fn qwen(
    reader: &Reader<'_>,
    files: &mut Files,
    model_type: &str,
    [least, most]: [usize; 2],
) -> Result<(), EngineError> {
    reader.check_axes()?;
    let size = |key: &str, usual: usize| Ok::<_, EngineError>(reader.vision.size(key)?.unwrap_or(usual));
    let merge = size("spatial_merge_size", 2)?;
    set(&mut files.whole, json!({ "model_type": model_type }));
    set(&mut files.vision, json!({ "spatial_merge_size": merge, "temporal_patch_size": 2 }));
    set(
        &mut files.processor,
        json!({
            "image_processor_type": "Qwen2VLImageProcessor", "patch_size": reader.required("patch_size")?, "merge_size": merge,
            "temporal_patch_size": 2,
            "size": { "shortest_edge": size("image_min_pixels", least)?, "longest_edge": size("image_max_pixels", most)? },
        }),
    );
    Ok(())
}

pub(super) fn qwen2_5_vl(reader: &Reader<'_>, files: &mut Files) -> Result<(), EngineError> {
    qwen(reader, files, "qwen2_5_vl", [56 * 56, 28 * 28 * 16_384])?;
    let pattern = reader.required("n_wa_pattern")?;
    let full: Vec<_> = (0..reader.required("block_count")?).filter(|layer| (layer + 1).is_multiple_of(pattern)).collect();
    let window = reader.vision.size("window_size")?.unwrap_or(112);
    set(&mut files.vision, json!({ "window_size": window, "fullatt_block_indexes": full }));
    Ok(())
}

pub(super) fn qwen3_vl(reader: &Reader<'_>, files: &mut Files) -> Result<(), EngineError> {
    qwen(reader, files, "qwen3_vl", [1 << 16, 1 << 24])?;
    let side = reader.required("image_size")? / reader.required("patch_size")?;
    let deep = match reader.metadata.get("clip.vision.is_deepstack_layers") {
        None => Vec::new(),
        Some(MetadataValue::Bools(layers)) => (0..layers.len()).filter(|layer| layers[*layer]).collect(),
        Some(_) => return Err(reader.vision.error("is_deepstack_layers", "must be a list of booleans")),
    };
    set(&mut files.vision, json!({ "num_position_embeddings": side.saturating_mul(side), "deepstack_visual_indexes": deep }));
    Ok(())
}

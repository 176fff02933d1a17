//! GLM-4.1V.

use serde_json::json;

use super::{Files, Kind, Reader, set};
use crate::{EngineError, model::fields::Fields};

pub(super) const IMAGES: Kind = Kind {
    name: "glm4v",
    gelu: "gelu",
    image_tokens: &["<|image|>"],
    names: &[
        ("downsample", "mm.patch_merger"),
        ("merger.proj", "mm.model.fc"),
        ("merger.post_projection_norm", "mm.post_norm"),
        ("merger.gate_proj", "mm.gate"),
        ("merger.up_proj", "mm.up"),
        ("merger.down_proj", "mm.down"),
    ],
    own_keys: &["spatial_merge_size", "image_min_pixels", "image_max_pixels"],
    fill: images,
};

fn images(reader: &Reader<'_>, files: &mut Files) -> Result<(), EngineError> {
    reader.check_axes()?;
    let size = |key: &str, usual: usize| Ok::<_, EngineError>(reader.vision.size(key)?.unwrap_or(usual));
    let merge = size("spatial_merge_size", 2)?;
    let [inner, _] = reader.shape("mm.gate.weight")?;
    set(&mut files.whole, json!({ "model_type": "glm4v" }));
    set(
        &mut files.vision,
        json!({
            "spatial_merge_size": merge, "temporal_patch_size": 2, "intermediate_size": inner, "rms_norm_eps": reader.eps()?,
            "out_hidden_size": reader.decoder.hidden_size,
        }),
    );
    // As in the hub's folder.
    let (least, most) = (size("image_min_pixels", 112 * 112)?, size("image_max_pixels", 28 * 28 * 15_000)?);
    set(
        &mut files.processor,
        json!({
            "image_processor_type": "Glm4vImageProcessor", "patch_size": reader.required("patch_size")?, "merge_size": merge,
            "temporal_patch_size": 2, "size": { "shortest_edge": least, "longest_edge": most },
        }),
    );
    Ok(())
}

//! Encoders of images that are cut into tiles: `InternVL`, LFM2-VL, Llama 4.

use serde_json::json;

use super::{Files, Kind, Reader, set};
use crate::{EngineError, model::fields::Fields};

pub(super) const INTERNVL: Kind = Kind {
    name: "internvl",
    gelu: "gelu",
    image_tokens: &["<IMG_CONTEXT>"],
    names: &[("layer_norm", "mm.model.mlp.0"), ("linear_1", "mm.model.mlp.1"), ("linear_2", "mm.model.mlp.3")],
    own_keys: &["projector.scale_factor", "preproc_min_tiles", "preproc_max_tiles"],
    fill: internvl,
};

pub(super) const LFM2: Kind = Kind {
    name: "lfm2",
    gelu: "gelu_pytorch_tanh",
    image_tokens: &["<image>"],
    names: &[("layer_norm", "mm.input_norm"), ("linear_1", "mm.1"), ("linear_2", "mm.2")],
    own_keys: &["projector.scale_factor"],
    fill: lfm2,
};

pub(super) const LLAMA4: Kind = Kind {
    name: "llama4",
    gelu: "gelu",
    image_tokens: &["<|patch|>"],
    names: &[
        ("vision_model.vision_adapter.mlp.fc1", "mm.model.mlp.1"),
        ("vision_model.vision_adapter.mlp.fc2", "mm.model.mlp.2"),
        ("multi_modal_projector.linear_1", "mm.model.fc"),
    ],
    own_keys: &["projector.scale_factor"],
    fill: llama4,
};

/// The edge of a square of patches that becomes one vector.
fn square(reader: &Reader<'_>, usual: usize) -> Result<usize, EngineError> {
    match reader.vision.size("projector.scale_factor")?.unwrap_or(usual) {
        0 => Err(reader.vision.error("projector.scale_factor", "is 0")),
        square => Ok(square),
    }
}

fn internvl(reader: &Reader<'_>, files: &mut Files) -> Result<(), EngineError> {
    let image = reader.required("image_size")?;
    // Of the towers that there are the smaller has layer norms and the larger, which also has norms of heads, others.
    let norm = if reader.has("v.blk.0.ln1.bias") { "layer_norm" } else { "rms_norm" };
    let tiles = |key: &str, usual: usize| Ok::<_, EngineError>(reader.vision.size(key)?.unwrap_or(usual));
    let (least, most) = (tiles("preproc_min_tiles", 1)?, tiles("preproc_max_tiles", 12)?);
    if least > most {
        return Err(reader.vision.error("preproc_min_tiles", format!("is {least}, more than `preproc_max_tiles`, {most}")));
    }
    set(&mut files.whole, json!({ "model_type": "internvl", "downsample_ratio": 1.0 / square(reader, 2)? as f64 }));
    set(&mut files.vision, json!({ "norm_type": norm, "use_mean_pooling": true }));
    set(
        &mut files.processor,
        json!({
            "image_processor_type": "GotOcr2ImageProcessor", "size": { "height": image, "width": image }, "min_patches": least,
            "max_patches": most,
        }),
    );
    Ok(())
}

/// Tiles and tokens of an image are those of the hub's folders, of which the file says nothing.
fn lfm2(reader: &Reader<'_>, files: &mut Files) -> Result<(), EngineError> {
    let merge = square(reader, 2)?;
    let [num_patches, _] = reader.shape("v.position_embd.weight")?;
    let [inner, _] = reader.shape("mm.1.weight")?;
    set(
        &mut files.whole,
        json!({
            "model_type": "lfm2_vl", "downsample_factor": merge, "projector_hidden_size": inner,
            "projector_use_layernorm": reader.has("mm.input_norm.weight"),
        }),
    );
    set(&mut files.vision, json!({ "model_type": "siglip2_vision_model", "num_patches": num_patches }));
    set(
        &mut files.processor,
        json!({
            "image_processor_type": "Lfm2VlImageProcessor", "downsample_factor": merge,
            "encoder_patch_size": reader.required("patch_size")?,
        }),
    );
    Ok(())
}

/// The same: the canvas has sixteen tiles at most.
fn llama4(reader: &Reader<'_>, files: &mut Files) -> Result<(), EngineError> {
    let image = reader.required("image_size")?;
    let ([inner, _], [outer, _]) = (reader.shape("mm.model.mlp.1.weight")?, reader.shape("mm.model.mlp.2.weight")?);
    if files.vision["hidden_act"] != LLAMA4.gelu {
        return Err(reader.error("`clip.use_gelu` is not true; implemented for Llama 4: true"));
    }
    set(&mut files.whole, json!({ "model_type": "llama4" }));
    set(
        &mut files.vision,
        json!({
            "pixel_shuffle_ratio": 1.0 / square(reader, 2)? as f64, "projector_input_dim": inner, "projector_output_dim": outer,
        }),
    );
    set(
        &mut files.processor,
        json!({ "image_processor_type": "Llama4ImageProcessor", "size": { "height": image, "width": image } }),
    );
    Ok(())
}

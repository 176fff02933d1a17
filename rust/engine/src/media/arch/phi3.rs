//! Phi-3-vision and Phi-3.5-vision (arXiv:2404.14219).

use device::Activation;

use super::Reader;
use crate::{
    EngineError,
    media::config::{Arrangement, MediaConfig, Places, ProjectorConfig, ProjectorLayer, Regroup, TowerConfig},
    model::fields::{Fields, HfFields},
};

const PLACES: Places = Places {
    tower: &["model.vision_embed_tokens.img_processor.vision_model."],
    projector: &["model.vision_embed_tokens."],
    newline: &["model.vision_embed_tokens."],
};

/// As the code beside their weights computes it.
pub(super) fn phi3_v(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    /// `<|image|>`, which the configuration does not name.
    const IMAGE_TOKEN: usize = 32_044;
    let part = |key: &str| reader.whole.child(key)?.ok_or_else(|| reader.whole.error(key, "is missing"));
    let (encoder, embedding) = (part("img_processor")?, part("embd_layer")?);
    let only = |fields: &HfFields<'_>, key: &str, usual: &str| match fields.value(key) {
        Some(value) if value != usual => Err(fields.error(key, format!("is {value}; implemented: {usual}"))),
        _ => Ok(()),
    };
    only(&encoder, "name", "clip_vision_model")?;
    only(&encoder, "type_feature", "patch")?;
    only(&embedding, "projection_cls", "mlp")?;
    for key in ["use_hd_transform", "with_learnable_separator"] {
        if !embedding.flag(key)?.unwrap_or(false) {
            return Err(embedding.error(key, "is not true; implemented: true"));
        }
    }
    let whole_last = match embedding.text("hd_transform_order")?.as_deref().unwrap_or("glb_sub") {
        "glb_sub" => false,
        "sub_glb" => true,
        other => return Err(embedding.error("hd_transform_order", format!("is `{other}`; implemented: glb_sub, sub_glb"))),
    };
    let tower = reader.clip([1024, 4096, 24, 16, 336, 14], "quick_gelu", 1e-5)?;
    let num_layers = Reader::layers_up_to(&encoder, "layer_idx", tower.num_layers, -2)?;
    let tower = TowerConfig { num_layers, has_class: true, has_pre_norm: true, has_post_norm: false, ..tower };
    let first = ProjectorLayer { activation: Some(Activation::Gelu), ..reader.last("img_projection.0") };
    let layers = vec![first, reader.last("img_projection.2")];
    let token = reader.whole.size("image_token_id")?.unwrap_or(IMAGE_TOKEN);
    if token >= reader.decoder.vocab_size {
        return Err(reader.whole.error("vocab_size", format!("is not over {token}, the id of the image token")));
    }
    let projector = ProjectorConfig { norm: None, regroup: Regroup::Squares(2), late_norm: None, layers };
    let config = reader.config_of_token("phi3_v", tower, projector, token as u32);
    Ok(MediaConfig { arrangement: Arrangement::Separated { whole_last }, places: PLACES, ..config })
}

//! LFM2-VL (arXiv:2511.23404): a SigLIP 2 for tiles of any size, whose patches are put together by squares.

use device::NormKind;

use super::{PLACES, Reader};
use crate::{
    EngineError,
    media::config::{
        MediaConfig, PatchLayout, Placeholder, Positions, ProjectorConfig, ProjectorLayer, ProjectorNorm, Regroup, TowerConfig,
    },
    model::fields::Fields,
};

pub(super) fn lfm2_vl(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    reader.encoder.only_text("model_type", "siglip2_vision_model")?;
    let num_patches = reader.size("num_patches", 256)?;
    let side = num_patches.isqrt();
    if side * side != num_patches {
        return Err(reader.encoder.error("num_patches", format!("is {num_patches}, which is no square")));
    }
    let tower = reader.clip([768, 3072, 12, 12, 224, 16], "gelu_pytorch_tanh", 1e-6)?;
    let num_layers = Reader::layers_up_to(reader.whole, "vision_feature_layer", tower.num_layers, -1)?;
    if num_layers != tower.num_layers {
        return Err(reader.whole.error("vision_feature_layer", "is not the last one; implemented: -1"));
    }
    let tower = TowerConfig { positions: Positions::Resized { side }, patch_layout: PatchLayout::Pixels, ..tower };
    let factor = reader.whole.size("downsample_factor")?.unwrap_or(2);
    reader.check_processor(&tower, factor).map_err(|why| reader.whole.error("downsample_factor", why))?;
    if !reader.whole.flag("use_image_special_tokens")?.unwrap_or(true) {
        return Err(reader.whole.error("use_image_special_tokens", "is false; implemented: true"));
    }
    let activation = Reader::activation(reader.whole, "projector_hidden_act", "gelu")?;
    let inner = reader.whole.size("projector_hidden_size")?.unwrap_or(2560);
    let has_norm = reader.whole.flag("projector_use_layernorm")?.unwrap_or(true);
    let norm = ProjectorNorm { name: "layer_norm", kind: NormKind::Layer, eps: 1e-5, offset: 0.0 };
    let first = ProjectorLayer { out_features: inner, activation: Some(activation), ..reader.last("linear_1") };
    let projector = ProjectorConfig {
        norm: None,
        regroup: Regroup::Squares(factor),
        late_norm: has_norm.then_some(norm),
        layers: vec![first, reader.last("linear_2")],
    };
    Ok(MediaConfig { placeholder: Placeholder::Cells, places: PLACES, ..reader.config("lfm2_vl", tower, projector)? })
}

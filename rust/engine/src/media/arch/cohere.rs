//! Aya Vision (arXiv:2505.08751) and Command A Vision: a SigLIP whose patches are put together by squares, and a gated projector.

use device::{Activation, NormKind};

use super::Reader;
use crate::{
    EngineError,
    media::config::{
        MediaConfig, Placeholder, Positions, ProjectorConfig, ProjectorGate, ProjectorLayer, ProjectorNorm, Regroup, TowerConfig,
    },
    model::fields::Fields,
};

/// What both have in common, with the usual sizes of the tower.
fn siglip(reader: &Reader<'_, '_>, usual: [usize; 6], inner_size: usize) -> Result<(TowerConfig, ProjectorConfig), EngineError> {
    reader.encoder.only_text("model_type", "siglip_vision_model")?;
    let tower = reader.clip(usual, "gelu_pytorch_tanh", 1e-6)?;
    let Positions::Learned { side } = tower.positions else { unreachable!("the tower is a SigLIP") };
    let factor = reader.whole.size("downsample_factor")?.unwrap_or(2);
    if factor == 0 || !side.is_multiple_of(factor) {
        let why = format!("is {factor}; it must divide the {side} patches of an edge");
        return Err(reader.whole.error("downsample_factor", why));
    }
    let first = ProjectorLayer {
        out_features: inner_size / 2,
        gate: ProjectorGate::SecondHalf,
        activation: Some(Activation::Silu),
        ..reader.last("linear_1")
    };
    let layers = vec![first, reader.last("linear_2")];
    Ok((tower, ProjectorConfig { norm: None, regroup: Regroup::Squares(factor), late_norm: None, layers }))
}

/// Aya Vision.
pub(super) fn aya_vision(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    let inner_size = reader.whole.size("alignment_intermediate_size")?.unwrap_or(reader.decoder.hidden_size);
    let (tower, mut projector) = siglip(reader, [1152, 4304, 26, 14, 384, 14], inner_size)?;
    reader.whole.only_text("vision_feature_select_strategy", "full")?;
    let num_layers = Reader::layers_up_to(reader.whole, "vision_feature_layer", tower.num_layers, -1)?;
    let eps = reader.whole.number("adapter_layer_norm_eps")?.unwrap_or(1e-6) as f32;
    projector.late_norm = Some(ProjectorNorm { name: "layernorm", kind: NormKind::Layer, eps, offset: 0.0 });
    let tower = TowerConfig { num_layers, has_post_norm: false, ..tower };
    let mut config = reader.config("aya_vision", tower, projector)?;
    if let Some(processor) = config.images_mut() {
        processor.split = true;
    }
    Ok(MediaConfig { placeholder: Placeholder::Numbered, ..config })
}

/// Command A Vision.
pub(super) fn cohere2_vision(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    let inner_size = reader.whole.size("alignment_intermediate_size")?.unwrap_or(36_864);
    let (tower, projector) = siglip(reader, [1152, 3072, 27, 12, 512, 16], inner_size)?;
    let placeholder =
        Placeholder::Wrapped { before: "<|START_OF_IMG|>", behind_tile: "<|IMG_LINE_BREAK|>", after: "<|END_OF_IMG|>" };
    Ok(MediaConfig { placeholder, ..reader.config("cohere2_vision", tower, projector)? })
}

//! Phi-4-multimodal (arXiv:2503.01743), as Transformers saves it (`phi4_multimodal`) and as its first files are (`phi4mm`), whose
//! encoder of images no key describes.

use device::Activation;
use images::ProcessorKind;
use serde_json::Value;

use super::Reader;
use crate::{
    EngineError,
    media::config::{
        Arrangement, MediaConfig, MediaProcessor, Places, Positions, ProjectorConfig, ProjectorLayer, Regroup, TowerConfig,
    },
    model::fields::{Fields, HfFields},
};

/// HF `model_type`.
pub(in crate::media) const PHI4: &str = "phi4_multimodal";
/// The same of the first files.
pub(super) const PHI4_REMOTE: &str = "phi4mm";

const PLACES: Places = Places {
    tower: &["model.embed_tokens_extend.image_embed.img_processor."],
    projector: &["model.embed_tokens_extend.image_embed."],
    newline: &["model.embed_tokens_extend.image_embed."],
};

/// The token of images, where no file says another.
const IMAGE_TOKEN: usize = 200_010;

/// That keys which the first files have, if they are there, say what is implemented.
fn only(fields: &HfFields<'_>, implemented: &[(&str, Value)]) -> Result<(), EngineError> {
    let wrong = implemented.iter().find_map(|(key, usual)| Some((key, fields.value(key).filter(|value| value != usual)?, usual)));
    wrong.map_or(Ok(()), |(key, value, usual)| Err(fields.error(key, format!("is {value}; implemented: {usual}"))))
}

/// The token that stands for images or for sounds: as the encoder's part of the file says, or the whole, or `usual`.
fn token(reader: &Reader<'_, '_>, key: &str, usual: usize) -> Result<u32, EngineError> {
    let token = match reader.encoder.size(key)? {
        Some(token) => token,
        None => reader.whole.size(key)?.unwrap_or(usual),
    };
    if token >= reader.decoder.vocab_size {
        let why = format!("is {token}, and the vocabulary has {} tokens", reader.decoder.vocab_size);
        return Err(reader.encoder.error(key, why));
    }
    Ok(token as u32)
}

pub(super) fn images(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    let MediaProcessor::Images(own) = &reader.processor else {
        return Err(reader.encoder.error("model_type", "is of images, and the processor is of sounds"));
    };
    let tower = reader.clip([1152, 4304, 27, 16, 448, 14], "gelu_pytorch_tanh", 1e-6)?;
    let Positions::Learned { side } = tower.positions else { unreachable!("the tower is a SigLIP") };
    let image_size = side * tower.patch_size;
    let parts = match reader.whole.child("embd_layer")? {
        None => None,
        Some(parts) => {
            only(&parts, &[("embedding_cls", "image_audio".into())])?;
            parts.child("image_embd_layer")?
        }
    };
    if let Some(part) = &parts {
        let names = [("embedding_cls", "tune_image"), ("hd_transform_order", "sub_glb"), ("projection_cls", "mlp")];
        only(part, &names.map(|(key, name)| (key, name.into())))?;
        only(part, &[("image_token_compression_cls", "avg_pool_2d".into()), ("crop_size", image_size.into())])?;
        only(part, &[("use_hd_transform", true.into()), ("with_learnable_separator", true.into())])?;
    }
    only(reader.whole, &[("img_processor", Value::Null)])?;
    only(&reader.encoder, &[("crop_size", image_size.into()), ("num_channels", 3.into())])?;
    if own.kind != ProcessorKind::Phi4Multimodal || [own.tile_size, own.patch_size] != [image_size, tower.patch_size] {
        let why = format!(
            "goes with crops of {image_size} pixels and patches of {}; the image processor is {:?} and has {} and {}",
            tower.patch_size, own.kind, own.tile_size, own.patch_size
        );
        return Err(reader.encoder.error("image_size", why));
    }
    let num_layers = Reader::layers_up_to(&reader.encoder, "feature_layer", tower.num_layers, -2)?;
    let tower = TowerConfig { num_layers, positions: Positions::Fractions { side }, has_post_norm: false, ..tower };
    let first = ProjectorLayer { activation: Some(Activation::Gelu), ..reader.last("img_projection_up") };
    let layers = vec![first, reader.last("img_projection_down")];
    let projector = ProjectorConfig { norm: None, regroup: Regroup::MeansOf(2), late_norm: None, layers };
    let token = token(reader, "image_token_id", IMAGE_TOKEN)?;
    let config = reader.config_of_token(PHI4, tower, projector, token);
    Ok(MediaConfig { arrangement: Arrangement::Separated { whole_last: true }, places: PLACES, ..config })
}

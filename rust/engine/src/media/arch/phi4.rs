//! Phi-4-multimodal (arXiv:2503.01743), as Transformers saves it (`phi4_multimodal`) and as its first files are (`phi4mm`), whose
//! encoder of images no key describes.

use device::Activation;
use images::ProcessorKind;
use serde_json::Value;

use super::Reader;
use crate::{
    EngineError,
    media::{
        config::{
            Arrangement, MediaConfig, MediaProcessor, Places, Positions, ProjectorConfig, ProjectorLayer, Regroup, Silence,
            TowerConfig,
        },
        speech::SpeechConfig,
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

const PLACES_OF_SOUNDS: Places = Places {
    tower: &["model.embed_tokens_extend.audio_embed.encoder."],
    projector: &["model.embed_tokens_extend.audio_embed."],
    newline: &[],
};

/// The token of sounds, where no file says another.
const AUDIO_TOKEN: usize = 200_011;

/// What the first files say of the encoder of sounds, under the names that Transformers has for it.
fn of_first_files<'a>(whole: &HfFields<'a>) -> Result<HfFields<'a>, EngineError> {
    /// Keys that say what is implemented, or what only training does.
    const KNOWN: [&str; 25] = [
        "activation",
        "activation_checkpointing",
        "attention_dim",
        "attention_heads",
        "batch_norm",
        "bias_in_glu",
        "causal",
        "chunk_size",
        "cnn_layer_norm",
        "conv_activation",
        "conv_glu_type",
        "depthwise_multiplier",
        "depthwise_seperable_out_channel",
        "dropout_rate",
        "encoder_embedding_config",
        "ext_pw_kernel_size",
        "ext_pw_out_channel",
        "input_layer",
        "input_size",
        "kernel_size",
        "left_chunk",
        "linear_units",
        "nemo_conv_settings",
        "num_blocks",
        "relative_attention_bias_args",
    ];
    let part = |fields: &HfFields<'a>, key: &str| fields.child(key)?.ok_or_else(|| fields.error(key, "is missing"));
    let processor = part(whole, "audio_processor")?;
    only(&processor, &[("name", "cascades".into())])?;
    let fields = part(&processor, "config")?;
    if let Some(other) = fields.object.keys().find(|key| !KNOWN.contains(&&key[..]) && *key != "time_reduction") {
        return Err(fields.error(other, "is not known"));
    }
    let inputs = fields.object.get("input_size").cloned().unwrap_or_else(|| 80.into());
    only(&fields, &[("batch_norm", false.into()), ("bias_in_glu", true.into()), ("causal", true.into())])?;
    only(&fields, &[("ext_pw_kernel_size", 1.into()), ("input_layer", "nemo_conv".into())])?;
    if let Some(embedding) = fields.child("encoder_embedding_config")? {
        only(&embedding, &[("input_size", inputs)])?;
    }
    let (bias, stem) = (part(&fields, "relative_attention_bias_args")?, part(&fields, "nemo_conv_settings")?);
    only(&bias, &[("type", "t5".into()), ("t5_bias_symmetric", false.into())])?;
    if let Some(other) = stem.object.keys().find(|key| *key != "conv_channels") {
        return Err(stem.error(other, "is not implemented; implemented: conv_channels"));
    }
    if let Some(embedding) = whole.child("embd_layer")?.map(|parts| parts.child("audio_embd_layer")).transpose()?.flatten() {
        let reduction = fields.object.get("time_reduction").cloned().unwrap_or_else(|| 4.into());
        only(
            &embedding,
            &[("embedding_cls", "audio".into()), ("projection_cls", "mlp".into()), ("compression_rate", reduction)],
        )?;
        only(&embedding, &[("use_conv_downsample", false.into()), ("use_qformer", false.into()), ("downsample_rate", 1.into())])?;
    }
    let renamed = [
        ("attention_dim", "hidden_size"),
        ("attention_heads", "num_attention_heads"),
        ("linear_units", "intermediate_size"),
        ("depthwise_seperable_out_channel", "depthwise_separable_out_channel"),
    ];
    let mut fields = fields.renamed(&renamed);
    for (key, value) in
        [("nemo_conv_channels", stem.value("conv_channels")), ("bias_max_distance", bias.value("t5_bias_max_distance"))]
    {
        fields.object.insert(key.into(), value.unwrap_or_default());
    }
    Ok(fields)
}

fn activation(fields: &HfFields<'_>, key: &str, usual: &str) -> Result<Activation, EngineError> {
    if fields.text(key)?.as_deref().unwrap_or(usual) == "relu" {
        return Ok(Activation::Relu);
    }
    Reader::activation(fields, key, usual)
}

pub(super) fn sounds(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    let is_first = reader.whole.text("model_type")?.as_deref() == Some(PHI4_REMOTE);
    let fields = if is_first { of_first_files(reader.whole)? } else { reader.encoder.clone() };
    let size = |key: &str, usual: usize| Ok::<_, EngineError>(fields.size(key)?.unwrap_or(usual));
    let MediaProcessor::Sounds(audio::Processor { num_mel_bins, kind: audio::Kind::Phi4(own), .. }) = &reader.processor else {
        return Err(fields.error("model_type", "goes with features of Phi4MultimodalFeatureExtractor"));
    };
    let speech = SpeechConfig {
        num_mel_bins: size("input_size", 80)?,
        reduction: size("time_reduction", 8)?,
        channels: size("nemo_conv_channels", 1024)?,
        stem_activation: activation(&fields, "nemo_activation", "relu")?,
        hidden_size: size("hidden_size", 1024)?,
        intermediate_size: size("intermediate_size", 1536)?,
        num_heads: size("num_attention_heads", 16)?,
        num_layers: size("num_blocks", 24)?,
        kernel_size: size("kernel_size", 3)?,
        max_distance: size("bias_max_distance", 1000)?,
        activation: activation(&fields, "activation", "swish")?,
        gate_activation: activation(&fields, "conv_glu_type", "swish")?,
        conv_activation: activation(&fields, "conv_activation", "swish")?,
    };
    let hidden = speech.hidden_size;
    only(&fields, &[("chunk_size", (-1).into()), ("bias_symmetric", false.into()), ("downsample_rate", 1.into())])?;
    only(&fields, &[("depthwise_multiplier", 1.into())])?;
    only(&fields, &[("ext_pw_out_channel", hidden.into()), ("depthwise_separable_out_channel", hidden.into())])?;
    if [*num_mel_bins, own.compression] != [speech.num_mel_bins, speech.reduction] {
        let why = format!(
            "is {} and `time_reduction` {}; the feature extractor has feature_size {num_mel_bins} and audio_compression_rate {}",
            speech.num_mel_bins, speech.reduction, own.compression
        );
        return Err(fields.error("input_size", why));
    }
    let projector = |up: &'static str, down: &'static str| {
        let first = ProjectorLayer { activation: Some(Activation::Gelu), ..reader.last(up) };
        ProjectorConfig { norm: None, regroup: Regroup::Each, late_norm: None, layers: vec![first, reader.last(down)] }
    };
    let beside_images = Some(projector("up_proj_for_vision_speech", "down_proj_for_vision_speech"));
    let projector = projector("up_proj_for_speech", "down_proj_for_speech");
    let token = token(reader, "audio_token_id", AUDIO_TOKEN)?;
    let config = reader.config_of_token(PHI4, speech, projector, token);
    // A chunk has frames before its own.
    Ok(MediaConfig { beside_images, silence: Silence::Unseen, places: PLACES_OF_SOUNDS, ..config })
}

//! Gemma 3n: a convolutional encoder of images, whose norms and matrix its tokens of images have as well.

use device::NormKind;
use serde_json::{Map, Value, json};

use super::Reader;
use crate::{
    EngineError,
    media::{
        config::{Body, HardTokens, MediaConfig, MediaProcessor, Placeholder, Places, ProjectorConfig, ProjectorNorm, Regroup},
        mobile::config::{BlockConfig, BlockKind, FUSED, MobileConfig},
    },
    model::fields::{Fields, HfFields},
};

const PLACES: Places = Places {
    tower: &["model.vision_tower.timm_model.", "vision_tower.timm_model."],
    projector: &["model.embed_vision.", "embed_vision."],
    newline: &[],
};
/// The only encoder of its kind.
const ENCODER: &str = "mobilenetv5_300m_enc";
/// Columns of what it gives, whatever a file says.
const OUT_FEATURES: usize = 2048;
/// Pixels from one place behind all stages to the next, at most.
const MAX_STRIDE: usize = 32;
/// Pixels along a side of an image at most.
const MAX_EDGE: usize = 4096;
/// Places along a side of a square at most.
const MAX_SIDE: usize = 15;

/// The first token of sounds, where a file says nothing.
pub(super) const FIRST_OF_SOUNDS: usize = 262_272;

pub(super) fn gemma3n(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    let fields = &reader.encoder;
    let encoder = fields.text("architecture")?.unwrap_or_else(|| ENCODER.into());
    if encoder != ENCODER {
        return Err(fields.error("architecture", format!("is `{encoder}`; implemented: {ENCODER}")));
    }
    let width = reader.size("hidden_size", OUT_FEATURES)?;
    if width != OUT_FEATURES {
        return Err(fields.error("hidden_size", format!("is {width}; {ENCODER} gives {OUT_FEATURES}")));
    }
    let size = image_size(reader)?;
    let mobile = read_encoder(fields, size)?;
    let num_rows = reader.whole.size("vision_soft_tokens_per_image")?.unwrap_or(256);
    if num_rows != mobile.side * mobile.side {
        let why = format!("is {num_rows}; the encoder gives {0} times {0}", mobile.side);
        return Err(reader.whole.error("vision_soft_tokens_per_image", why));
    }
    let behind = mobile.sizes();
    let largest = behind[behind.len() - FUSED];
    if largest.iter().any(|len| !len.is_multiple_of(mobile.side)) {
        let why = format!(
            "goes with images whose {} times {} places behind the stage before the last are whole parts of {1} times {1}",
            largest[0], mobile.side
        );
        return Err(fields.error("architecture", why));
    }
    let end = match reader.whole.child("audio_config")? {
        Some(sounds) => Some(sounds.size("vocab_offset")?.unwrap_or(FIRST_OF_SOUNDS)),
        None => None,
    };
    let (projector, hard) = projector(reader, 262_144, end)?;
    let placeholder = Placeholder::Apart {
        before: reader.token(["boi_token_id", "boi_token_index"])?,
        after: reader.token(["eoi_token_id", "eoi_token_index"])?,
    };
    let config = reader.config("gemma3n", Body::Mobile(Box::new(mobile)), projector)?;
    check_token(reader, "image_token_id", config.token_id)?;
    Ok(MediaConfig { placeholder, places: PLACES, hard: Some(hard), ..config })
}

/// That a token that stands for images or sounds has no row among the inputs of layers, where the first row stands for it.
pub(super) fn check_token(reader: &Reader<'_, '_>, key: &str, token_id: u32) -> Result<(), EngineError> {
    let rows = reader.decoder.layer_inputs.map_or(0, |inputs| inputs.vocab_size);
    if (token_id as usize) < rows {
        let why = format!("is {token_id}; implemented: tokens from `vocab_size_per_layer_input` on, which is {rows}");
        return Err(reader.whole.error(key, why));
    }
    Ok(())
}

/// From states to vectors, and the tokens that have such vectors: from `vocab_offset` on, which is `first` unless the file says
/// another, up to `end` where others begin.
pub(super) fn projector(
    reader: &Reader<'_, '_>,
    first: usize,
    end: Option<usize>,
) -> Result<(ProjectorConfig, HardTokens), EngineError> {
    let (fields, eps) = (&reader.encoder, reader.number("rms_norm_eps", 1e-6)?);
    if !eps.is_finite() || eps <= 0.0 {
        return Err(fields.error("rms_norm_eps", format!("is {eps}; it must be positive")));
    }
    let (first, count) = (reader.size("vocab_offset", first)?, reader.size("vocab_size", 128)?);
    let all = reader.decoder.vocab_size;
    let end = end.unwrap_or(all).min(all);
    if count == 0 || first > end || end - first > count {
        let why = format!("is {first}: the tokens from there up to {end} need vectors, and `vocab_size` is {count}");
        return Err(fields.error("vocab_offset", why));
    }
    let norm = |name: &'static str| ProjectorNorm { name, kind: NormKind::Rms, eps, offset: 0.0 };
    let mut last = reader.last("embedding_projection");
    last.norm = Some(norm(""));
    let projector =
        ProjectorConfig { norm: None, regroup: Regroup::Each, late_norm: Some(norm("soft_embedding_norm")), layers: vec![last] };
    // Both are below a vocabulary's size.
    let tokens = first as u32..end as u32;
    Ok((projector, HardTokens { tokens, count, norm: norm("hard_embedding_norm"), filled: None }))
}

/// Rows and columns of pixels of what the processor makes of every image.
fn image_size(reader: &Reader<'_, '_>) -> Result<[usize; 2], EngineError> {
    let error = |why: String| Err(reader.encoder.error("model_type", format!("goes with an image processor that {why}")));
    let MediaProcessor::Images(own) = &reader.processor else { return error("makes tiles of images".into()) };
    if own.kind != images::ProcessorKind::Siglip {
        return error(format!("is SiglipImageProcessor, and there is one for {:?}", own.kind));
    }
    let (images::Size::Exact { height, width }, true) = (own.size, own.resize) else {
        return error("makes all images one size: `do_resize`, and `size` with height and width".into());
    };
    if own.crop.is_some() {
        return error("crops nothing: `do_center_crop`".into());
    }
    if ![height, width].iter().all(|edge| (1..=MAX_EDGE).contains(edge)) {
        return error(format!("makes at most {MAX_EDGE} pixels a side, and not {width} times {height}"));
    }
    Ok([height, width])
}

/// The stages of `mobilenetv5_300m_enc`, or those that `model_args` has in their place: what it has is handed to timm.
fn read_encoder(fields: &HfFields<'_>, size: [usize; 2]) -> Result<MobileConfig, EngineError> {
    let args = fields.child("model_args")?;
    let args = args.as_ref();
    if let Some(args) = args {
        only(args, &["block_args", "stem_size", "msfa_output_resolution"])?;
    }
    let whole = |key: &str, usual: usize, most: usize| {
        let Some(args) = args else { return Ok(usual) };
        let given = args.size(key)?.unwrap_or(usual);
        if (1..=most).contains(&given) {
            Ok(given)
        } else {
            Err(args.error(key, format!("is {given}; it must be from 1 to {most}")))
        }
    };
    let stem = divisible(whole("stem_size", 64, MAX_CHANNELS)? as f64);
    let side = whole("msfa_output_resolution", 16, 256)?;
    let given = match args {
        Some(args) => args.typed("block_args", "a list of stages, which are lists of blocks", stages_of)?,
        None => None,
    };
    let mut reader = Stages { fields: args.unwrap_or(fields), channels: stem };
    let stages = given.unwrap_or_else(usual).into_iter().enumerate().map(|(stage, blocks)| reader.stage(stage, &blocks));
    let stages = stages.collect::<Result<Vec<_>, _>>()?;
    if !(FUSED..=MAX_STRIDE.ilog2() as usize - 1).contains(&stages.len()) {
        let why = format!("has {} stages; implemented: {FUSED} to {}", stages.len(), MAX_STRIDE.ilog2() - 1);
        return Err(reader.fields.error("block_args", why));
    }
    Ok(MobileConfig { size, stem, stages, side, out_features: OUT_FEATURES })
}

type Blocks = Vec<Map<String, Value>>;

fn stages_of(value: &Value) -> Option<Vec<Blocks>> {
    let blocks = |stage: &Value| stage.as_array()?.iter().map(|block| block.as_object().cloned()).collect::<Option<Blocks>>();
    let stages: Vec<_> = value.as_array()?.iter().map(blocks).collect::<Option<_>>()?;
    (stages.iter().map(Vec::len).sum::<usize>() <= MAX_BLOCKS).then_some(stages)
}

/// Blocks of all stages at most.
const MAX_BLOCKS: usize = 1024;
/// Channels of a map at most.
const MAX_CHANNELS: usize = 1 << 15;

/// That an object has none but these keys, unless they say nothing.
fn only(fields: &HfFields<'_>, read: &[&str]) -> Result<(), EngineError> {
    let is_off = |value: &Value| value.is_null() || value == &Value::Bool(false) || value.as_f64() == Some(0.0);
    match fields.object.iter().find(|(key, value)| !read.contains(&&key[..]) && !is_off(value)) {
        Some((key, value)) => {
            let shown: String = value.to_string().chars().take(80).collect();
            Err(fields.error(key, format!("is {shown}, which is not supported; leave it out")))
        }
        None => Ok(()),
    }
}

/// Channels as timm rounds them: to multiples of 8, and by no more than a tenth down.
fn divisible(channels: f64) -> usize {
    let nearest = ((channels + 4.0) as usize / 8 * 8).max(8);
    if (nearest as f64) < 0.9 * channels { nearest + 8 } else { nearest }
}

/// Reads blocks, each of which takes the channels of the one before.
struct Stages<'a, 'b> {
    fields: &'a HfFields<'b>,
    channels: usize,
}

impl Stages<'_, '_> {
    fn stage(&mut self, stage: usize, blocks: &Blocks) -> Result<Vec<BlockConfig>, EngineError> {
        if blocks.is_empty() {
            return Err(self.fields.error("block_args", format!("has no blocks in stage {stage}")));
        }
        let read: Vec<_> =
            blocks.iter().enumerate().map(|(at, block)| self.block((stage, at), block)).collect::<Result<_, _>>()?;
        if let Some(BlockConfig { kind: BlockKind::Attention { .. }, .. }) = read.last() {
            return Err(self.fields.error("block_args", format!("has `mqa` at the end of stage {stage}; timm makes none such")));
        }
        Ok(read)
    }

    fn block(&mut self, (stage, at): (usize, usize), block: &Map<String, Value>) -> Result<BlockConfig, EngineError> {
        let what = format!("{}: block {at} of stage {stage}", self.fields.what);
        let fields = HfFields::new(&what, block.clone());
        let wanted = if at == 0 { 2 } else { 1 };
        let stride = fields.required_size("stride")?;
        if stride != wanted {
            return Err(fields.error("stride", format!("is {stride}; implemented: 2 of a stage's first block, 1 of others")));
        }
        let within = |key: &str, least: usize, most: usize| {
            let value = fields.required_size(key)?;
            if (least..=most).contains(&value) {
                Ok(value)
            } else {
                Err(fields.error(key, format!("is {value}; it must be from {least} to {most}")))
            }
        };
        let inner = |channels: usize| {
            let ratio = fields.number("exp_ratio")?.unwrap_or(1.0);
            let inner = ratio * channels as f64;
            if ratio > 0.0 && inner <= MAX_CHANNELS as f64 {
                Ok(divisible(inner))
            } else {
                Err(fields.error("exp_ratio", format!("is {ratio}, of {channels} channels; 1 to {MAX_CHANNELS} may be between")))
            }
        };
        let (in_channels, out_channels) = (self.channels, divisible(within("out_chs", 1, MAX_CHANNELS)? as f64));
        let common = ["block_type", "out_chs", "stride"];
        let check = |read: &[&str]| only(&fields, &[&common[..], read].concat());
        let kind = match fields.text("block_type")?.as_deref() {
            Some("er") => {
                let squares = fields.size("pw_kernel_size")?.unwrap_or(1);
                if squares != 1 {
                    return Err(fields.error("pw_kernel_size", format!("is {squares}; implemented: 1")));
                }
                check(&["exp_kernel_size", "pw_kernel_size", "exp_ratio"])?;
                BlockKind::Edge { side: within("exp_kernel_size", 1, MAX_SIDE)?, inner: inner(in_channels)? }
            }
            Some("uir") => {
                check(&["dw_kernel_size_start", "dw_kernel_size_mid", "exp_ratio"])?;
                let (start, middle) = (within("dw_kernel_size_start", 0, MAX_SIDE)?, within("dw_kernel_size_mid", 0, MAX_SIDE)?);
                if stride > 1 && start == 0 && middle == 0 {
                    return Err(fields.error("dw_kernel_size_mid", "is 0, and nothing takes every other place"));
                }
                BlockKind::Inverted { start, middle, inner: inner(in_channels)? }
            }
            Some("mqa") if stride == 1 => {
                check(&["dw_kernel_size", "num_heads", "key_dim", "value_dim", "kv_stride"])?;
                let head_dim = within("key_dim", 1, 512)?;
                let of_values = fields.required_size("value_dim")?;
                if of_values != head_dim {
                    return Err(fields.error("value_dim", format!("is {of_values}; implemented: `key_dim`, {head_dim}")));
                }
                BlockKind::Attention {
                    num_heads: within("num_heads", 1, MAX_CHANNELS / head_dim)?,
                    head_dim,
                    stride: within("kv_stride", 1, 8)?,
                    side: within("dw_kernel_size", 1, MAX_SIDE)?,
                }
            }
            other => {
                let why = format!("is {other:?}; implemented: er, uir, and mqa behind a stage's first block");
                return Err(fields.error("block_type", why));
            }
        };
        self.channels = out_channels;
        Ok(BlockConfig { kind, in_channels, out_channels, stride })
    }
}

/// The blocks of `mobilenetv5_300m_enc`.
fn usual() -> Vec<Blocks> {
    let object = |value: Value| if let Value::Object(object) = value { object } else { Map::new() };
    let edge = |stride: usize, out: usize| {
        object(json!({ "block_type": "er", "out_chs": out, "stride": stride, "exp_kernel_size": 3, "exp_ratio": 4.0 }))
    };
    let inverted = |[start, middle, stride, ratio, out]: [usize; 5]| {
        object(json!({
            "block_type": "uir", "out_chs": out, "stride": stride, "exp_ratio": ratio,
            "dw_kernel_size_start": start, "dw_kernel_size_mid": middle,
        }))
    };
    let attention = |[heads, stride, width, out]: [usize; 4]| {
        object(json!({
            "block_type": "mqa", "out_chs": out, "stride": 1, "dw_kernel_size": 3, "num_heads": heads, "key_dim": width,
            "value_dim": width, "kv_stride": stride,
        }))
    };
    let first = vec![edge(2, 128), edge(1, 128), edge(1, 128)];
    let second = [[3, 5, 2, 6, 256], [5, 0, 1, 4, 256], [3, 0, 1, 4, 256], [5, 0, 1, 4, 256], [3, 0, 1, 4, 256]];
    let mut third = vec![inverted([5, 5, 2, 6, 640])];
    third.extend((0..7).map(|_| inverted([5, 0, 1, 4, 640])));
    third.push(inverted([0, 0, 1, 1, 640]));
    third.extend((0..14).flat_map(|_| [attention([12, 2, 64, 640]), inverted([0, 0, 1, 2, 640])]));
    let mut fourth = vec![inverted([5, 5, 2, 6, 1280])];
    fourth.extend((0..19).flat_map(|_| [attention([16, 1, 96, 1280]), inverted([0, 0, 1, 2, 1280])]));
    vec![first, second.map(inverted).to_vec(), third, fourth]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `make_divisible` of timm.
    #[test]
    fn channels_are_multiples_of_eight() {
        let given = [1.0, 8.0, 11.0, 12.0, 20.0, 22.9, 60.0, 640.0];
        assert_eq!(given.map(divisible), [8, 8, 16, 16, 24, 24, 64, 640]);
    }

    #[test]
    fn the_usual_encoder_has_its_84_blocks() {
        let sizes: Vec<_> = usual().iter().map(Vec::len).collect();
        assert_eq!(sizes, [3, 5, 37, 39]);
        let fields = HfFields::new("config.json", Map::new());
        let encoder = read_encoder(&fields, [768; 2]).unwrap();
        assert_eq!(encoder.sizes(), [[192; 2], [96; 2], [48; 2], [24; 2]]);
        assert_eq!([encoder.fused_channels(), encoder.widest()], [1920, 3840]);
    }
}

//! Families of models that see or hear: each maps its configuration to the one encoder.

mod check;
mod cohere;
mod gemma3n;
mod gemma3n_audio;
mod gemma4;
mod gemma4_audio;
mod glm4v;
mod internvl;
mod lfm2;
mod llama4;
mod mllama;
mod phi3;
mod phi4;
mod pixtral;
mod qwen;
mod video;
mod whisper;

pub(super) use self::video::families_with_videos;
pub(super) use phi4::PHI4;
pub(super) use whisper::{QWEN2_AUDIO, QWEN2_AUDIO_TEMPLATE, VOXTRAL};

use std::path::Path;

use device::{Activation, NormKind};
use serde_json::{Map, Value};

use super::{
    Encoders,
    config::{
        Arrangement, Body, MediaConfig, MediaProcessor, PatchLayout, Placeholder, Places, Positions, ProjectorConfig,
        ProjectorGate, ProjectorLayer, ProjectorLayout, ProjectorNorm, Regroup, ResamplerConfig, Silence, TowerConfig,
        TowerNames,
    },
};
use crate::{
    EngineError, MediaKind,
    model::{
        config::{DecoderConfig, MAX_LAYERS, MAX_SIZE},
        fields::{Fields, HfFields},
    },
};

/// A family's encoder of images or of sounds, by HF `model_type` of the whole model. One that has both has two.
struct Family {
    model_types: &'static [&'static str],
    /// Where config.json says what the encoder is like.
    key: &'static str,
    /// It need not: the encoder is always the same.
    is_one: bool,
    read: fn(&Reader<'_, '_>) -> Result<MediaConfig, EngineError>,
}

const VISION: &str = "vision_config";
const AUDIO: &str = "audio_config";

/// Why an argument goes with no model that only hears.
pub(super) const ABOUT_IMAGES: &str = "max_edge (--max-edge) is about images, and this model takes sounds: leave it out";

/// Every family whose images or sounds are computed.
const FAMILIES: [Family; 32] = [
    Family { model_types: &["llava"], key: VISION, is_one: false, read: llava },
    Family { model_types: &["llava_next"], key: VISION, is_one: false, read: llava_next },
    Family { model_types: &["idefics2"], key: VISION, is_one: false, read: idefics2 },
    Family { model_types: &["idefics3", "smolvlm"], key: VISION, is_one: false, read: idefics3 },
    Family { model_types: &["qwen2_vl"], key: VISION, is_one: false, read: qwen::qwen2_vl },
    Family { model_types: &["qwen2_5_vl"], key: VISION, is_one: false, read: qwen::qwen2_5_vl },
    Family { model_types: &["exaone4_5"], key: VISION, is_one: false, read: qwen::exaone4_5 },
    Family { model_types: &["qwen3_vl", "qwen3_vl_moe"], key: VISION, is_one: false, read: qwen::qwen3_vl },
    Family { model_types: &["qwen3_5", "qwen3_5_moe"], key: VISION, is_one: false, read: qwen::qwen3_5 },
    Family { model_types: &["gemma3"], key: VISION, is_one: false, read: gemma3 },
    Family { model_types: &["gemma3n"], key: VISION, is_one: false, read: gemma3n::gemma3n },
    Family { model_types: &["gemma3n"], key: AUDIO, is_one: false, read: gemma3n_audio::gemma3n_audio },
    Family { model_types: &["gemma4"], key: VISION, is_one: false, read: gemma4::gemma4 },
    Family { model_types: &["gemma4"], key: AUDIO, is_one: false, read: gemma4_audio::gemma4_audio },
    Family { model_types: &["mistral3"], key: VISION, is_one: false, read: pixtral::mistral3 },
    Family { model_types: &["lighton_ocr"], key: VISION, is_one: false, read: pixtral::lighton_ocr },
    Family { model_types: &["glm4v"], key: VISION, is_one: false, read: glm4v::glm4v },
    Family { model_types: &["glm46v", "glm4v_moe"], key: VISION, is_one: false, read: glm4v::glm46v },
    Family { model_types: &["glm_ocr"], key: VISION, is_one: false, read: glm4v::glm_ocr },
    Family { model_types: &["internvl"], key: VISION, is_one: false, read: internvl::internvl },
    Family { model_types: &["aya_vision"], key: VISION, is_one: false, read: cohere::aya_vision },
    Family { model_types: &["cohere2_vision"], key: VISION, is_one: false, read: cohere::cohere2_vision },
    Family { model_types: &["lfm2_vl"], key: VISION, is_one: false, read: lfm2::lfm2_vl },
    Family { model_types: &["llama4"], key: VISION, is_one: false, read: llama4::llama4 },
    Family { model_types: &["mllama"], key: VISION, is_one: false, read: mllama::mllama },
    Family { model_types: &["phi3_v"], key: VISION, is_one: true, read: phi3::phi3_v },
    Family { model_types: &[phi4::PHI4, phi4::PHI4_REMOTE], key: VISION, is_one: true, read: phi4::images },
    Family { model_types: &[phi4::PHI4, phi4::PHI4_REMOTE], key: AUDIO, is_one: true, read: phi4::sounds },
    Family { model_types: &["voxtral"], key: AUDIO, is_one: false, read: whisper::voxtral },
    Family { model_types: &["qwen2_audio"], key: AUDIO, is_one: false, read: whisper::qwen2_audio },
    Family { model_types: &["glmasr"], key: AUDIO, is_one: false, read: whisper::glmasr },
    Family { model_types: &["audioflamingo3"], key: AUDIO, is_one: false, read: whisper::audioflamingo3 },
];

/// The names of all families.
pub(crate) fn families() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().flat_map(|family| family.model_types.iter().copied())
}

/// Whether models of this `model_type` hear.
pub(crate) fn hears(model_type: &str) -> bool {
    FAMILIES.iter().any(|family| family.key == AUDIO && family.model_types.contains(&model_type))
}

/// What is read.
struct Reader<'a, 'b> {
    /// config.json.
    whole: &'a HfFields<'b>,
    /// Its `vision_config` or `audio_config`.
    encoder: HfFields<'b>,
    decoder: &'a DecoderConfig,
    processor: MediaProcessor,
}

/// A folder that says nothing of how its encoder's input is made.
fn no_processor(folder: &Path) -> EngineError {
    EngineError::Load(format!("{}: neither preprocessor_config.json nor processor_config.json is there", folder.display()))
}

/// Those of the family that config.json names: of images, of sounds, or both.
fn families_of(whole: &HfFields<'_>) -> Result<Vec<&'static Family>, EngineError> {
    let model_type = whole.text("model_type")?.unwrap_or_default();
    let found: Vec<_> = FAMILIES.iter().filter(|family| family.model_types.contains(&&model_type[..])).collect();
    if found.is_empty() {
        let mut known: Vec<_> = families().collect();
        known.dedup();
        let text =
            format!("{}: images and sounds of `{model_type}` are not computed; those of {} are", whole.what, known.join(", "));
        return Err(EngineError::NotSupported(text));
    }
    Ok(found)
}

impl Encoders<MediaConfig> {
    /// From config.json and the processor's file beside it; `decoder` is the language model.
    ///
    /// # Errors
    /// [`EngineError::NotSupported`] for a family whose images and sounds are not computed, [`EngineError::Load`] for files that
    /// are not there, and fields that make no sense.
    pub(crate) fn from_folder(
        folder: &Path,
        whole: &HfFields<'_>,
        decoder: &DecoderConfig,
        max_edge: Option<usize>,
    ) -> Result<Self, EngineError> {
        let families = match families_of(whole) {
            Ok(families) => families,
            // A folder without images or sounds is told so by what is missing.
            Err(error) => {
                images_of(folder, max_edge)?;
                return Err(error);
            }
        };
        // One that has only one kind must say what it is like.
        let is_given = |family: &&&Family| families.len() == 1 || family.is_one || whole.value(family.key).is_some();
        let given: Vec<_> = families.iter().filter(is_given).collect();
        let Some(first) = given.first() else { return Err(whole.error(families[0].key, "is missing")) };
        if first.key == AUDIO && max_edge.is_some() {
            return Err(EngineError::InvalidArgument(ABOUT_IMAGES.into()));
        }
        let mut configs = Self::default();
        for family in given {
            let processor = if family.key == AUDIO { whisper::processor(folder)? } else { images_of(folder, max_edge)? };
            let config = MediaConfig::read(whole, decoder, processor)?.with_videos(folder, whole, max_edge)?;
            configs = configs.with(config.kind(), config);
        }
        let [image, sound] = [MediaKind::Image, MediaKind::Sound].map(|kind| configs.token_id(kind));
        if let (Some(image), Some(sound)) = (image, sound)
            && image == sound
        {
            return Err(whole.error("audio_token_id", format!("is {sound}, which stands for images")));
        }
        Ok(configs)
    }
}

/// What makes tiles of images, as the folder says.
fn images_of(folder: &Path, max_edge: Option<usize>) -> Result<MediaProcessor, EngineError> {
    let processor = images::Processor::from_folder(folder).map_err(|why| EngineError::Load(why.to_string()))?;
    Ok(MediaProcessor::Images(Box::new(images::Processor { max_edge, ..processor.ok_or_else(|| no_processor(folder))? })))
}

impl MediaConfig {
    /// From config.json and its processor.
    pub(crate) fn read(whole: &HfFields<'_>, decoder: &DecoderConfig, processor: MediaProcessor) -> Result<Self, EngineError> {
        let families = families_of(whole)?;
        let key = if matches!(processor, MediaProcessor::Images(_)) { VISION } else { AUDIO };
        // A family of the other kind says what is missing.
        let family = families.iter().find(|family| family.key == key).unwrap_or(&families[0]);
        let encoder = match whole.child(family.key)? {
            Some(encoder) => encoder,
            None if family.is_one => HfFields::new(whole.what, Map::new()),
            None => return Err(whole.error(family.key, "is missing")),
        };
        let config = (family.read)(&Reader { whole, encoder, decoder, processor })?;
        config.check(decoder).map_err(|why| EngineError::Load(format!("{}: the encoder {why}", whole.what)))?;
        Ok(config)
    }
}

impl Reader<'_, '_> {
    fn size(&self, key: &str, usual: usize) -> Result<usize, EngineError> {
        Ok(self.encoder.size(key)?.unwrap_or(usual))
    }

    fn number(&self, key: &str, usual: f64) -> Result<f32, EngineError> {
        Ok(self.encoder.number(key)?.unwrap_or(usual) as f32)
    }

    /// An edge of a square, which may be there twice.
    fn edge(&self, key: &str, usual: usize) -> Result<usize, EngineError> {
        let edge = |value: &Value| match value {
            Value::Array(edges) if edges.len() == 2 && edges[0] == edges[1] => edges[0].as_u64(),
            value => value.as_u64(),
        };
        let wanted = "an edge in pixels, or the same twice";
        let edge = self.encoder.typed(key, wanted, |value| edge(value).filter(|edge| *edge <= MAX_SIZE as u64))?;
        Ok(edge.map_or(usual, |edge| edge as usize))
    }

    /// The edge of a square of patches that a tile of `side` by `side` is put together by, whose inverse the file says.
    fn square(fields: &HfFields<'_>, key: &str, side: usize) -> Result<usize, EngineError> {
        let ratio = fields.number(key)?.unwrap_or(0.5);
        let square = (1.0 / ratio).round() as usize;
        if !(1..=64).contains(&square) || (ratio * square as f64 - 1.0).abs() > 1e-9 || !side.is_multiple_of(square) {
            let why = format!("is {ratio}; it must be 1, 1/2, 1/3, ... and divide the {side} patches of an edge");
            return Err(fields.error(key, why));
        }
        Ok(square)
    }

    /// Whether the image processor's patches are the tower's, and as many of them a side become one vector.
    fn check_processor(&self, tower: &TowerConfig, side: usize) -> Result<(), String> {
        let MediaProcessor::Images(own) = &self.processor else { return Err("is no image processor's".into()) };
        if [own.patch_size, own.merge_size] == [tower.patch_size, side] {
            return Ok(());
        }
        Err(format!(
            "is {side} and patches have {} pixels a side; the image processor has {} and {}",
            tower.patch_size, own.merge_size, own.patch_size
        ))
    }

    /// A token's id, under any of these keys.
    fn token(&self, keys: [&str; 2]) -> Result<u32, EngineError> {
        for key in keys {
            if let Some(id) = self.whole.size(key)? {
                return u32::try_from(id).map_err(|_| self.whole.error(key, "is no token id"));
            }
        }
        Err(self.whole.error(keys[0], "is missing"))
    }

    fn activation(fields: &HfFields<'_>, key: &str, usual: &str) -> Result<Activation, EngineError> {
        let name = fields.text(key)?.unwrap_or_else(|| usual.to_owned());
        Ok(match &name[..] {
            "gelu" => Activation::Gelu,
            "gelu_pytorch_tanh" | "gelu_new" => Activation::GeluTanh,
            "quick_gelu" => Activation::Swish(1.702),
            "silu" | "swish" => Activation::Silu,
            other => {
                let why = format!("is `{other}`; implemented: gelu, gelu_pytorch_tanh, quick_gelu, silu");
                return Err(fields.error(key, why));
            }
        })
    }

    /// A matrix that gives vectors of the decoder's width.
    fn last(&self, name: &'static str) -> ProjectorLayer {
        ProjectorLayer {
            name,
            out_features: self.decoder.hidden_size,
            gate: ProjectorGate::None,
            layout: ProjectorLayout::Plain,
            norm: None,
            activation: None,
        }
    }

    /// A CLIP or SigLIP tower (arXiv:2103.00020, arXiv:2303.15343), with these usual sizes: width, feed-forward size, layers,
    /// heads, image and patch.
    fn clip(
        &self,
        [hidden, inner, layers, heads, image, patch]: [usize; 6],
        activation: &str,
        eps: f64,
    ) -> Result<TowerConfig, EngineError> {
        let (image_size, patch_size) = (self.edge("image_size", image)?, self.edge("patch_size", patch)?);
        Ok(TowerConfig {
            hidden_size: self.size("hidden_size", hidden)?,
            num_heads: self.size("num_attention_heads", heads)?,
            num_kv_heads: None,
            intermediate_size: self.size("intermediate_size", inner)?,
            num_layers: self.size("num_hidden_layers", layers)?,
            patch_size,
            frames: None,
            patch_layout: PatchLayout::Convolution,
            num_frames: 1,
            sees_frames: false,
            norm: NormKind::Layer,
            eps: self.number("layer_norm_eps", eps)?,
            activation: Self::activation(&self.encoder, "hidden_act", activation)?,
            is_gated: false,
            positions: Positions::Learned { side: image_size / patch_size.max(1) },
            has_class: false,
            has_pre_norm: false,
            norms_first: false,
            has_post_norm: true,
            windows: None,
            qk_norms: None,
            inner_norms: None,
            is_bounded: false,
            standard: None,
            tiled: None,
            names: SIGLIP,
        })
    }

    fn config(
        &self,
        architecture: &'static str,
        body: impl Into<Body>,
        projector: ProjectorConfig,
    ) -> Result<MediaConfig, EngineError> {
        let token = match self.processor {
            MediaProcessor::Images(_) => ["image_token_index", "image_token_id"],
            MediaProcessor::Sounds(_) => ["audio_token_index", "audio_token_id"],
        };
        Ok(self.config_of_token(architecture, body, projector, self.token(token)?))
    }

    /// The same with a token that stands for images or sounds.
    fn config_of_token(
        &self,
        architecture: &'static str,
        body: impl Into<Body>,
        projector: ProjectorConfig,
        token_id: u32,
    ) -> MediaConfig {
        MediaConfig {
            architecture,
            body: body.into(),
            projector,
            arrangement: Arrangement::Tiles,
            placeholder: Placeholder::Repeated,
            token_id,
            sees_spans: false,
            spans_in_windows: false,
            is_crossed: false,
            resampler: None,
            deep: Vec::new(),
            places: PLACES,
            has_own_file: false,
            processor: self.processor.clone(),
            silence: Silence::Heard,
            beside_images: None,
            hard: None,
            video: None,
        }
    }

    /// Two matrices with an activation between them.
    fn two_layers(&self, activation: Activation) -> ProjectorConfig {
        let first = ProjectorLayer { activation: Some(activation), ..self.last("linear_1") };
        ProjectorConfig { norm: None, regroup: Regroup::Each, late_norm: None, layers: vec![first, self.last("linear_2")] }
    }

    /// Layers up to the one whose output is taken: `usual` unless the file says another, under this key.
    fn layers_up_to(fields: &HfFields<'_>, key: &str, num_layers: usize, usual: i64) -> Result<usize, EngineError> {
        let wanted = "the number of one layer, or of one from the last: -1, -2, ...";
        let layer = fields.typed(key, wanted, Value::as_i64)?.unwrap_or(usual);
        let num_layers = num_layers as i64;
        let count = if layer < 0 { num_layers + 1 + layer } else { layer };
        if !(1..=num_layers).contains(&count) {
            return Err(fields.error(key, format!("is {layer}, and the encoder has {num_layers} layers")));
        }
        Ok(count as usize)
    }
}

const SIGLIP: TowerNames = TowerNames {
    patch: "embeddings.patch_embedding",
    positions: "embeddings.position_embedding.weight",
    class: "embeddings.class_embedding",
    pre_norm: "pre_layrnorm",
    post_norm: "post_layernorm",
    attn_norm: "encoder.layers.*.layer_norm1",
    qkv: ["encoder.layers.*.self_attn.q_proj", "encoder.layers.*.self_attn.k_proj", "encoder.layers.*.self_attn.v_proj"],
    attn_output: "encoder.layers.*.self_attn.out_proj",
    ffn_norm: "encoder.layers.*.layer_norm2",
    gate: "",
    up: "encoder.layers.*.mlp.fc1",
    down: "encoder.layers.*.mlp.fc2",
    scales: [""; 2],
    is_paired: false,
};

/// In older checkpoints the tower has a name within it, and in newer ones everything is below `model`.
const PLACES: Places = Places {
    tower: &[
        "vision_tower.vision_model.",
        "vision_tower.",
        "model.vision_tower.vision_model.",
        "model.vision_tower.",
        "model.vision_model.",
    ],
    projector: &["multi_modal_projector.", "model.multi_modal_projector.", "model.connector."],
    newline: &["", "model."],
};

/// LLaVA 1.5 (arXiv:2310.03744), by a CLIP tower without its first row or by a SigLIP one, which has no such row.
fn llava(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    let kind = reader.encoder.text("model_type")?;
    let is_plain = reader.whole.text("model_type")?.as_deref() == Some("llava");
    let (tower, selected) = match kind.as_deref() {
        None | Some("clip_vision_model") => {
            let tower = reader.clip([768, 3072, 12, 12, 224, 32], "quick_gelu", 1e-5)?;
            (TowerConfig { has_class: true, has_pre_norm: true, ..tower }, "default")
        }
        Some("siglip_vision_model") => (reader.clip([768, 3072, 12, 12, 224, 16], "gelu_pytorch_tanh", 1e-6)?, "full"),
        Some("pixtral") if is_plain => return pixtral::pixtral(reader),
        Some(other) => {
            let known = if is_plain { ", pixtral" } else { "" };
            let why = format!("is `{other}`; implemented: clip_vision_model, siglip_vision_model{known}");
            return Err(reader.encoder.error("model_type", why));
        }
    };
    let strategy = reader.whole.text("vision_feature_select_strategy")?.unwrap_or_else(|| "default".into());
    if strategy != selected {
        let why = format!("is `{strategy}`; implemented with such a tower: {selected}");
        return Err(reader.whole.error("vision_feature_select_strategy", why));
    }
    let num_layers = Reader::layers_up_to(reader.whole, "vision_feature_layer", tower.num_layers, -2)?;
    let activation = Reader::activation(reader.whole, "projector_hidden_act", "gelu")?;
    reader.config("llava", TowerConfig { num_layers, has_post_norm: false, ..tower }, reader.two_layers(activation))
}

/// LLaVA 1.6, with tiles.
fn llava_next(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    Ok(MediaConfig { architecture: "llava_next", arrangement: Arrangement::Unpadded, ..llava(reader)? })
}

/// Idefics 3 and `SmolVLM` (arXiv:2408.12637, arXiv:2504.05299).
fn idefics3(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    let tower = reader.clip([1152, 3072, 12, 16, 224, 32], "gelu_pytorch_tanh", 1e-6)?;
    let Positions::Learned { side } = tower.positions else { unreachable!("the tower is a SigLIP") };
    let tower = TowerConfig { positions: Positions::Fractions { side }, ..tower };
    let scale = reader.whole.size("scale_factor")?.unwrap_or(2);
    let layers = vec![reader.last("modality_projection.proj")];
    let projector = ProjectorConfig { norm: None, regroup: Regroup::Squares(scale), late_norm: None, layers };
    Ok(MediaConfig { placeholder: Placeholder::Tiles, ..reader.config("idefics3", tower, projector)? })
}

/// Idefics 2 (arXiv:2405.02246).
fn idefics2(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    let tower = reader.clip([768, 3072, 12, 12, 224, 32], "gelu_pytorch_tanh", 1e-6)?;
    let Positions::Learned { side } = tower.positions else { unreachable!("the tower is a SigLIP") };
    let tower = TowerConfig { positions: Positions::Fractions { side }, ..tower };
    let perceiver =
        reader.whole.child("perceiver_config")?.ok_or_else(|| reader.whole.error("perceiver_config", "is missing"))?;
    let size = |key: &str, usual: usize| {
        let value = perceiver.size(key)?.unwrap_or(usual);
        if (1..=1 << 20).contains(&value) {
            Ok(value)
        } else {
            Err(perceiver.error(key, format!("is {value}; it must be from 1 to 1048576")))
        }
    };
    let resampler = ResamplerConfig {
        in_features: tower.hidden_size,
        inner_size: reader.decoder.largest(|layer| layer.ffn.intermediate_size()),
        hidden_size: reader.decoder.hidden_size,
        num_latents: size("resampler_n_latents", 64)?,
        num_layers: size("resampler_depth", 3)?.min(MAX_LAYERS),
        num_heads: size("resampler_n_heads", 16)?,
        num_kv_heads: size("num_key_value_heads", 4)?,
        head_dim: size("resampler_head_dim", 96)?,
        activation: Reader::activation(&perceiver, "hidden_act", "silu")?,
        eps: perceiver.number("rms_norm_eps")?.unwrap_or(1e-6) as f32,
    };
    if !resampler.num_heads.is_multiple_of(resampler.num_kv_heads) || resampler.head_dim > 1024 {
        return Err(perceiver.error("resampler_n_heads", "goes with no such number of key and value heads"));
    }
    let projector = ProjectorConfig { norm: None, regroup: Regroup::Each, late_norm: None, layers: Vec::new() };
    let config = reader.config("idefics2", tower, projector)?;
    Ok(MediaConfig { placeholder: Placeholder::Fenced, resampler: Some(resampler), ..config })
}

/// Gemma 3 (arXiv:2503.19786).
fn gemma3(reader: &Reader<'_, '_>) -> Result<MediaConfig, EngineError> {
    let tower = reader.clip([768, 3072, 12, 12, 224, 16], "gelu_pytorch_tanh", 1e-6)?;
    let num_rows = reader.whole.size("mm_tokens_per_image")?.unwrap_or(256);
    let side = num_rows.isqrt();
    if side * side != num_rows {
        return Err(reader.whole.error("mm_tokens_per_image", format!("is {num_rows}, which is no square")));
    }
    let name = "mm_soft_emb_norm";
    let norm = ProjectorNorm { name, kind: NormKind::Rms, eps: tower.eps, offset: 1.0 };
    let last = ProjectorLayer { layout: ProjectorLayout::Transposed, ..reader.last("mm_input_projection_weight") };
    let projector = ProjectorConfig { norm: None, regroup: Regroup::Means(side), late_norm: Some(norm), layers: vec![last] };
    let placeholder = Placeholder::Between {
        replaced: reader.token(["boi_token_index", "boi_token_id"])?,
        before: "\n\n<start_of_image>".into(),
        after: "<end_of_image>\n\n".into(),
    };
    Ok(MediaConfig { placeholder, sees_spans: true, ..reader.config("gemma3", tower, projector)? })
}

//! Encoders that lie in a GGUF file of their own, beside that of their language model (`mmproj`): the keys and names of
//! llama.cpp's converter (its `gguf-py/gguf/constants.py`, `ClipVision` and `ClipAudio`), in the terms of config.json and
//! preprocessor_config.json.

mod gemma4;
mod glm4v;
mod keys;
mod qwen;
mod tiles;
mod whisper;

use std::path::PathBuf;

use serde_json::{Map, Value, json};

use super::{
    Encoders,
    arch::ABOUT_IMAGES,
    config::{Body, MediaConfig, MediaProcessor, PatchLayout, Places, ProjectorConfig, ProjectorGate, TowerNames},
    weights::TowerWeights,
};
use crate::{
    EngineError, MediaKind,
    model::{
        config::{DecoderConfig, MAX_LAYERS, MAX_SIZE},
        fields::{Fields, GgufFields, HfFields},
    },
    weights::{GgufFiles, Metadata, WeightSource},
};

/// A projector of images, as `clip.projector_type` names it.
struct Kind {
    name: &'static str,
    /// The activation of the tower's networks with `clip.use_gelu`.
    gelu: &'static str,
    /// The token in whose places vectors go: the first of these that the vocabulary has. The last are tokens that no text uses:
    /// some vocabularies end before the one that is meant.
    image_tokens: &'static [&'static str],
    /// What the parts of the projector are called in Hugging Face's layout, and here.
    names: &'static [(&'static str, &'static str)],
    /// Of the keys that only some projectors go with, those that it reads, or that say what others say as well.
    own_keys: &'static [&'static str],
    /// Adds what only this family has.
    fill: fn(&Reader<'_>, &mut Files) -> Result<(), EngineError>,
}

/// The same of sounds.
struct SoundKind {
    name: &'static str,
    /// The tokens in whose places vectors go, as of images.
    tokens: &'static [&'static str],
    /// What the encoder is like, for such a token.
    read: fn(&Reader<'_>, usize) -> Result<MediaConfig, EngineError>,
}

/// Every projector of sounds that is computed.
const SOUND_KINDS: [SoundKind; 4] = [whisper::VOXTRAL, whisper::QWEN2_AUDIO, whisper::AUDIO_FLAMINGO, gemma4::SOUNDS];

/// Every projector of images that is computed.
const KINDS: [Kind; 12] = [
    Kind {
        name: "mlp",
        gelu: "gelu",
        image_tokens: &["<image>", "<unk>"],
        names: &[("linear_1", "mm.0"), ("linear_2", "mm.2")],
        own_keys: &[
            "feature_layer",
            "image_aspect_ratio",
            "image_crop_resolution",
            "image_grid_pinpoints",
            "mm_patch_merge_type",
        ],
        fill: llava,
    },
    Kind {
        name: "idefics3",
        gelu: "gelu_pytorch_tanh",
        image_tokens: &["<image>"],
        names: &[("modality_projection.proj", "mm.model.fc")],
        own_keys: &["preproc_image_size", "projector.scale_factor"],
        fill: idefics3,
    },
    Kind {
        name: "gemma3",
        gelu: "gelu_pytorch_tanh",
        image_tokens: &["<image_soft_token>", "<unused98>"],
        names: &[("mm_input_projection_weight", "mm.input_projection.weight"), ("mm_soft_emb_norm", "mm.soft_emb_norm")],
        own_keys: &["projector.scale_factor"],
        fill: gemma3,
    },
    Kind {
        name: "pixtral",
        gelu: "gelu",
        image_tokens: &["[IMG]"],
        names: &[
            ("norm", "mm.input_norm"),
            ("patch_merger.merging_layer", "mm.patch_merger"),
            ("linear_1", "mm.1"),
            ("linear_2", "mm.2"),
        ],
        own_keys: &["spatial_merge_size"],
        fill: pixtral,
    },
    Kind {
        name: "qwen2vl_merger",
        gelu: "gelu",
        image_tokens: &["<|image_pad|>"],
        names: &[("ln_q", "v.post_ln"), ("mlp.0", "mm.0"), ("mlp.2", "mm.2")],
        own_keys: &["image_max_pixels", "image_min_pixels", "spatial_merge_size"],
        fill: |reader, files| qwen::qwen(reader, files, "qwen2_vl", [56 * 56, 28 * 28 * 16_384]),
    },
    Kind {
        name: "qwen2.5vl_merger",
        gelu: "gelu",
        image_tokens: &["<|image_pad|>"],
        names: &[("ln_q", "v.post_ln"), ("mlp.0", "mm.0"), ("mlp.2", "mm.2")],
        own_keys: &["image_max_pixels", "image_min_pixels", "n_wa_pattern", "spatial_merge_size", "window_size"],
        fill: qwen::qwen2_5_vl,
    },
    Kind {
        name: "qwen3vl_merger",
        gelu: "gelu_pytorch_tanh",
        image_tokens: &["<|image_pad|>"],
        names: &[("norm", "v.post_ln"), ("linear_fc1", "mm.0"), ("linear_fc2", "mm.2")],
        own_keys: &["image_max_pixels", "image_min_pixels", "is_deepstack_layers", "spatial_merge_size"],
        fill: qwen::qwen3_vl,
    },
    gemma4::IMAGES,
    tiles::INTERNVL,
    tiles::LFM2,
    tiles::LLAMA4,
    glm4v::IMAGES,
];

/// Names behind `v.deepstack.N.`.
const DEEP_NAMES: [(&str, &str); 3] = [("norm", "norm"), ("linear_fc1", "fc1"), ("linear_fc2", "fc2")];

const TOWER: TowerNames = TowerNames {
    patch: "patch_embd",
    positions: "position_embd.weight",
    class: "class_embd",
    pre_norm: "pre_ln",
    post_norm: "post_ln",
    attn_norm: "blk.*.ln1",
    qkv: ["blk.*.attn_q", "blk.*.attn_k", "blk.*.attn_v"],
    attn_output: "blk.*.attn_out",
    ffn_norm: "blk.*.ln2",
    gate: "blk.*.ffn_gate",
    up: "blk.*.ffn_up",
    down: "blk.*.ffn_down",
    scales: [""; 2],
    is_paired: false,
};

const PLACES: Places = Places { tower: &["v."], projector: &[""], newline: &["model.", "v."] };

/// An encoder's file, and what is known of its language model.
struct Reader<'a> {
    what: &'a str,
    files: &'a WeightSource,
    metadata: &'a Metadata,
    /// `clip.vision`.
    vision: GgufFields<'a>,
    /// `clip.audio`.
    audio: GgufFields<'a>,
    /// The language model's.
    vocabulary: &'a [String],
    decoder: &'a DecoderConfig,
}

/// The same as a Hugging Face folder would say it.
#[derive(Default)]
struct Files {
    /// config.json, without `vision_config`.
    whole: Map<String, Value>,
    /// `vision_config`: every family's keys for what all have, of which each reads its own.
    vision: Map<String, Value>,
    /// preprocessor_config.json.
    processor: Map<String, Value>,
}

fn set(map: &mut Map<String, Value>, entries: Value) {
    if let Value::Object(entries) = entries {
        map.extend(entries);
    }
}

/// Opens an encoder's file, as `clip.vision` says of itself.
///
/// # Errors
/// [`EngineError::Load`] for a file that is none.
pub(crate) fn open(path: PathBuf) -> Result<WeightSource, EngineError> {
    let files = GgufFiles::open(&[path])?;
    let found = files.metadata().str("general.architecture").unwrap_or("missing").to_owned();
    if found != "clip" {
        let why = "it must be `clip`, that of encoders of images and sounds";
        return Err(EngineError::Load(format!("{}: `general.architecture` is `{found}`; {why}", files.path().display())));
    }
    Ok(WeightSource::Gguf(files))
}

impl Encoders<MediaConfig> {
    /// From an encoder's file, or that of two, for the language model `decoder` with the metadata `language`. An image whose
    /// longer edge has more pixels than `max_edge` is made smaller first.
    ///
    /// # Errors
    /// [`EngineError::NotSupported`] for a projector that is not computed; [`EngineError::Load`] for keys that make no sense, and
    /// for an encoder of another model. They name the key.
    pub(crate) fn from_mmproj(
        files: &WeightSource,
        language: &Metadata,
        decoder: &DecoderConfig,
        max_edge: Option<usize>,
    ) -> Result<Self, EngineError> {
        let what = files.path().display().to_string();
        let metadata = files.metadata().ok_or_else(|| EngineError::Internal("a GGUF file without metadata".into()))?;
        let vocabulary = language.strings("tokenizer.ggml.tokens").unwrap_or_default();
        let fields = |prefix| GgufFields { what: &what, prefix, metadata, weights: files, by_layer: &[] };
        let (vision, audio) = (fields("clip.vision"), fields("clip.audio"));
        let reader = Reader { what: &what, files, metadata, vision, audio, vocabulary, decoder };
        let (images, sounds) = reader.kinds()?;
        reader.check_keys()?;
        reader.check_tensors(images.is_some(), sounds.is_some())?;
        let mut configs = Self::default();
        match images {
            Some(kind) => configs = configs.with(MediaKind::Image, reader.images(kind, max_edge)?),
            None if max_edge.is_some() => return Err(EngineError::InvalidArgument(ABOUT_IMAGES.into())),
            None => {}
        }
        if let Some(kind) = sounds {
            let config = (kind.read)(&reader, reader.token(kind.tokens)?)?;
            configs = configs.with(MediaKind::Sound, MediaConfig { has_own_file: true, ..config });
        }
        reader.check_pair(&configs)?;
        Ok(configs)
    }
}

/// Names of this file; the converter has added what is added to norms elsewhere.
fn rename(projector: &mut ProjectorConfig, names: &[(&str, &'static str)]) {
    let renamed = |name: &mut &'static str| {
        if let Some((_, here)) = names.iter().find(|(there, _)| there == name) {
            *name = here;
        }
    };
    for layer in &mut projector.layers {
        renamed(&mut layer.name);
        if let ProjectorGate::Named(gate) = &mut layer.gate {
            renamed(gate);
        }
    }
    let of_layers = projector.layers.iter_mut().filter_map(|layer| layer.norm.as_mut());
    for norm in projector.norm.iter_mut().chain(&mut projector.late_norm).chain(of_layers) {
        renamed(&mut norm.name);
        norm.offset = 0.0;
    }
}

/// Whether a tensor is of an encoder of sounds.
fn is_of_sounds(name: &str) -> bool {
    name.starts_with("a.") || name.starts_with("mm.a.")
}

/// That nothing in the file would be left out.
///
/// # Errors
/// [`EngineError::NotSupported`] that names a tensor which this encoder has no use for.
pub(super) fn check_rest(weights: &TowerWeights<'_>, config: &MediaConfig) -> Result<(), EngineError> {
    let (num_layers, hears) = (config.tower().map_or(0, |tower| tower.num_layers), config.kind() == MediaKind::Sound);
    let is_behind = |name: &str| {
        let number = name.strip_prefix("v.blk.").and_then(|rest| rest.split('.').next()).and_then(|number| number.parse().ok());
        number.is_some_and(|number: usize| number >= num_layers)
    };
    // A row of the language model's embedding, and the other encoder.
    let is_others = |name: &str| name == "v.token_embd.img_break" || is_of_sounds(name) != hears;
    let Some(name) = weights.unread().into_iter().find(|name| !is_behind(name) && !is_others(name)) else { return Ok(()) };
    Err(EngineError::NotSupported(format!(
        "{}: tensor `{name}` is of a kind of encoder that is not computed: {} has none",
        weights.path().display(),
        config.architecture
    )))
}

impl<'a> Reader<'a> {
    /// The projectors of images and of sounds.
    fn kinds(&self) -> Result<(Option<&'static Kind>, Option<&'static SoundKind>), EngineError> {
        let hears = self.metadata.bool("clip.has_audio_encoder") == Some(true);
        // A file with sounds alone need not say that there are no images.
        let sees = self.metadata.bool("clip.has_vision_encoder").unwrap_or(!hears);
        if !sees && !hears {
            return Err(self.error("neither `clip.has_vision_encoder` nor `clip.has_audio_encoder` is true: there is no encoder"));
        }
        let images = sees.then(|| self.kind("vision", &KINDS, |kind| kind.name)).transpose()?;
        let sounds = hears.then(|| self.kind("audio", &SOUND_KINDS, |kind| kind.name)).transpose()?;
        Ok((images, sounds))
    }

    /// The projector that the file names, for all of its encoders or for one.
    fn kind<K>(&self, encoder: &str, kinds: &'static [K], name_of: fn(&K) -> &'static str) -> Result<&'static K, EngineError> {
        let keys = ["clip.projector_type".to_owned(), format!("clip.{encoder}.projector_type")];
        let found = keys.iter().find_map(|key| Some((&key[..], self.metadata.str(key)?)));
        // The first files did not say.
        let is_llava = || encoder == "vision" && self.metadata.bool("clip.has_llava_projector") == Some(true);
        let found = found.or_else(|| is_llava().then_some(("clip.has_llava_projector", "mlp")));
        let (key, name) = found.ok_or_else(|| self.error("`clip.projector_type` is missing or not a string"))?;
        kinds.iter().find(|kind| name_of(kind) == name).ok_or_else(|| {
            let known = kinds.iter().map(name_of).collect::<Vec<_>>().join(", ");
            EngineError::NotSupported(format!("{}: `{key}` is `{name}`, which is not computed; {known} are", self.what))
        })
    }

    /// That there are no tensors of an encoder of which the keys say nothing.
    fn check_tensors(&self, sees: bool, hears: bool) -> Result<(), EngineError> {
        let is_unsaid = |name: &&&str| if is_of_sounds(name) { !hears } else { !sees };
        let names = self.files.tensor_names();
        let Some(name) = names.iter().find(is_unsaid) else { return Ok(()) };
        let key = if is_of_sounds(name) { "clip.has_audio_encoder" } else { "clip.has_vision_encoder" };
        let text = format!("{}: tensor `{name}` is of an encoder, and `{key}` does not say that there is one", self.what);
        Err(EngineError::NotSupported(text))
    }

    /// That two encoders are of one model.
    fn check_pair(&self, configs: &Encoders<MediaConfig>) -> Result<(), EngineError> {
        match configs.iter().map(|config| config.architecture).collect::<Vec<_>>()[..] {
            [images, sounds] if images != sounds => Err(EngineError::NotSupported(format!(
                "{}: `clip.vision.projector_type` is of {images} and `clip.audio.projector_type` of {sounds}: a model with both is \
                 not computed",
                self.what
            ))),
            _ => Ok(()),
        }
    }

    /// The encoder of images.
    fn images(&self, kind: &Kind, max_edge: Option<usize>) -> Result<MediaConfig, EngineError> {
        let (inner_size, is_swapped) = self.inner_size()?;
        let mut described = self.common(kind, inner_size)?;
        self.check_own_keys(kind.own_keys)?;
        (kind.fill)(self, &mut described)?;
        let mut processor =
            images::Processor::from_json(self.what, &described.processor).map_err(|why| EngineError::Load(why.to_string()))?;
        processor.max_edge = max_edge;
        described.whole.insert("vision_config".into(), described.vision.into());
        let fields = HfFields::new(self.what, described.whole);
        let mut config = MediaConfig::read(&fields, self.decoder, MediaProcessor::Images(Box::new(processor)))?;
        if let Body::Tower(tower) = &mut config.body {
            tower.intermediate_size = inner_size;
            tower.eps = self.eps()?;
            let is_scaled = !tower.names.scales[0].is_empty();
            tower.names = self.names(kind, is_swapped);
            if is_scaled {
                tower.names.scales = ["blk.*.ls1.weight", "blk.*.ls2.weight"];
            }
            if tower.patch_layout == PatchLayout::Pixels {
                tower.patch_layout = PatchLayout::Convolution;
            }
            if let Some(inner) = &mut tower.inner_norms {
                *inner = gemma4::INNER_NORMS;
            }
        }
        rename(&mut config.projector, kind.names);
        for deep in &mut config.deep {
            rename(&mut deep.projector, &DEEP_NAMES);
            deep.place = format!("deepstack.{}.", deep.layer);
        }
        Ok(MediaConfig { places: PLACES, has_own_file: true, ..config })
    }

    /// Columns of the feed-forward networks, and whether their two matrices have each other's names, as in older files. The key
    /// is wrong in some files.
    fn inner_size(&self) -> Result<(usize, bool), EngineError> {
        const UP: &str = "v.blk.0.ffn_up.weight";
        let hidden = self.required("embedding_length")?;
        let (_, shape) = self.files.tensor(UP)?;
        match shape[..] {
            [inner, columns] if columns == hidden && (1..=MAX_SIZE).contains(&inner) => Ok((inner, false)),
            [rows, inner] if rows == hidden && (1..=MAX_SIZE).contains(&inner) => Ok((inner, true)),
            _ => Err(self.error(&format!("tensor `{UP}` has shape {shape:?}; one of its sides must be {hidden}"))),
        }
    }

    /// What all families have.
    fn common(&self, kind: &Kind, inner_size: usize) -> Result<Files, EngineError> {
        let flag = |key: &str| self.metadata.bool(key) == Some(true);
        let activation = match (flag("clip.use_gelu"), flag("clip.use_silu")) {
            (true, true) => return Err(self.error("both `clip.use_gelu` and `clip.use_silu` are true")),
            (true, false) => kind.gelu,
            (false, true) => "silu",
            (false, false) => "quick_gelu",
        };
        let (hidden, layers, heads) =
            (self.required("embedding_length")?, self.required("block_count")?, self.required("attention.head_count")?);
        if layers > MAX_LAYERS {
            return Err(self.vision.error("block_count", format!("is {layers}; at most {MAX_LAYERS} are supported")));
        }
        let patch = self.required("patch_size")?;
        let token = self.token(kind.image_tokens)?;
        let mut files = Files::default();
        set(&mut files.whole, json!({ "image_token_id": token }));
        let vision = json!({
            "hidden_size": hidden, "embed_dim": hidden, "intermediate_size": inner_size, "num_hidden_layers": layers,
            "depth": layers, "num_attention_heads": heads, "num_heads": heads, "patch_size": patch,
            "image_size": self.vision.size("image_size")?.unwrap_or(0), "layer_norm_eps": self.eps()?,
            "hidden_act": activation,
        });
        set(&mut files.vision, vision);
        let (mean, std) = (self.colors("clip.vision.image_mean")?, self.colors("clip.vision.image_std")?);
        set(&mut files.processor, json!({ "image_mean": mean, "image_std": std }));
        Ok(files)
    }

    fn eps(&self) -> Result<f32, EngineError> {
        let key = "attention.layer_norm_epsilon";
        let eps = self.vision.number(key)?.ok_or_else(|| self.vision.error(key, "is missing"))?;
        Ok(eps as f32)
    }

    fn sound_eps(&self) -> Result<f32, EngineError> {
        let key = "attention.layer_norm_epsilon";
        let eps = self.audio.number(key)?.ok_or_else(|| self.audio.error(key, "is missing"))?;
        Ok(eps as f32)
    }

    fn names(&self, kind: &Kind, is_swapped: bool) -> TowerNames {
        let mut names = TowerNames { is_paired: kind.name == "pixtral", ..TOWER };
        if is_swapped {
            (names.up, names.down) = (TOWER.down, TOWER.up);
        }
        if kind.name == glm4v::IMAGES.name {
            names.pre_norm = "norm_embd";
        }
        // A name of Gemma 4's, which newer converters give Llama 4's as well.
        if !self.has("v.blk.0.ln2.weight") && kind.name == tiles::LLAMA4.name {
            names.ffn_norm = gemma4::INNER_NORMS.post_attn;
        }
        if self.has("v.blk.0.attn_qkv.weight") {
            names.qkv = ["blk.*.attn_qkv"; 3];
        }
        names
    }

    fn has(&self, tensor: &str) -> bool {
        self.files.tensor(tensor).is_ok()
    }

    /// A size of the encoder of images that is not 0.
    fn required(&self, key: &str) -> Result<usize, EngineError> {
        positive(&self.vision, key)
    }

    /// The shape of a tensor of so many dimensions.
    fn shape<const N: usize>(&self, name: &str) -> Result<[usize; N], EngineError> {
        let (_, shape) = self.files.tensor(name)?;
        let wrong = |_| self.error(&format!("tensor `{name}` has shape {shape:?}; it must have {N} dimensions"));
        <[usize; N]>::try_from(&shape[..]).map_err(wrong)
    }

    /// Three numbers, of red, green and blue.
    fn colors(&self, key: &str) -> Result<&'a [f32], EngineError> {
        let colors = self.metadata.floats(key).filter(|colors| colors.len() == 3 && colors.iter().all(|x| x.is_finite()));
        colors.ok_or_else(|| self.error(&format!("`{key}` must be a list of three numbers")))
    }

    /// That the language model tells rows of images from columns.
    fn check_axes(&self) -> Result<(), EngineError> {
        if self.decoder.ropes.iter().any(|rope| rope.axes.is_some()) {
            return Ok(());
        }
        Err(self.error("the language model's file has no `rope.dimension_sections`, by which images have rows and columns"))
    }

    /// The id of the first of some tokens that the vocabulary has.
    fn token(&self, texts: &[&str]) -> Result<usize, EngineError> {
        let find = |text: &&str| self.vocabulary.iter().position(|token| token == text);
        texts.iter().find_map(find).ok_or_else(|| {
            self.error(&format!(
                "the language model's vocabulary (`tokenizer.ggml.tokens`) has no token `{}`: it belongs to another encoder",
                texts[0]
            ))
        })
    }

    fn error(&self, why: &str) -> EngineError {
        EngineError::Load(format!("{}: {why}", self.what))
    }
}

/// A size that is not 0.
fn positive(fields: &GgufFields<'_>, key: &str) -> Result<usize, EngineError> {
    match fields.required_size(key)? {
        0 => Err(fields.error(key, "is 0")),
        size => Ok(size),
    }
}

/// LLaVA 1.5 and 1.6. A file says up to which layer the encoder is computed.
fn llava(reader: &Reader<'_>, files: &mut Files) -> Result<(), EngineError> {
    let image = reader.required("image_size")?;
    let layers = reader.required("block_count")?;
    let last = reader.vision.size("feature_layer")?.unwrap_or(layers);
    set(&mut files.vision, json!({ "num_hidden_layers": layers.max(last) }));
    let pinpoints = match reader.metadata.get("clip.vision.image_grid_pinpoints") {
        None => None,
        Some(value) => {
            let sides = reader.metadata.ints("clip.vision.image_grid_pinpoints").filter(|sides| sides.len().is_multiple_of(2));
            let wanted = "a list of heights and widths";
            let sides =
                sides.ok_or_else(|| reader.vision.error("image_grid_pinpoints", format!("is {}, not {wanted}", value.json())))?;
            Some(sides.as_chunks::<2>().0.to_vec())
        }
    };
    let has_newline = reader.has("model.image_newline") || reader.has("v.image_newline");
    let model_type = if pinpoints.is_some() || has_newline { "llava_next" } else { "llava" };
    let processor = if model_type == "llava" { "CLIPImageProcessor" } else { "LlavaNextImageProcessor" };
    set(&mut files.whole, json!({ "model_type": model_type, "vision_feature_layer": last }));
    set(
        &mut files.processor,
        json!({
            "image_processor_type": processor, "image_grid_pinpoints": pinpoints, "size": { "shortest_edge": image },
            "crop_size": { "height": image, "width": image },
        }),
    );
    Ok(())
}

/// Idefics 3 and `SmolVLM`.
fn idefics3(reader: &Reader<'_>, files: &mut Files) -> Result<(), EngineError> {
    let tile = reader.required("image_size")?;
    let longest = reader.vision.size("preproc_image_size")?.unwrap_or(4 * tile);
    let scale = reader.vision.size("projector.scale_factor")?.unwrap_or(2);
    set(&mut files.whole, json!({ "model_type": "idefics3", "scale_factor": scale }));
    set(
        &mut files.processor,
        json!({
            "image_processor_type": "Idefics3ImageProcessor", "size": { "longest_edge": longest },
            "max_image_size": { "longest_edge": tile },
        }),
    );
    Ok(())
}

/// Gemma 3.
fn gemma3(reader: &Reader<'_>, files: &mut Files) -> Result<(), EngineError> {
    let (image, patch) = (reader.required("image_size")?, reader.required("patch_size")?);
    let scale = reader.vision.size("projector.scale_factor")?.unwrap_or(4);
    let side = (image / patch).checked_div(scale).filter(|side| *side > 0);
    let side = side.ok_or_else(|| reader.vision.error("projector.scale_factor", format!("is {scale}, which leaves nothing")))?;
    set(
        &mut files.whole,
        json!({
            "model_type": "gemma3", "mm_tokens_per_image": side.saturating_mul(side),
            "boi_token_id": reader.token(&["<start_of_image>"])?,
        }),
    );
    set(
        &mut files.processor,
        json!({ "image_processor_type": "Gemma3ImageProcessor", "size": { "height": image, "width": image } }),
    );
    Ok(())
}

/// Pixtral and Mistral Small 3.1.
fn pixtral(reader: &Reader<'_>, files: &mut Files) -> Result<(), EngineError> {
    let (image, patch) = (reader.required("image_size")?, reader.required("patch_size")?);
    let merge = reader.vision.size("spatial_merge_size")?.unwrap_or(1);
    set(&mut files.whole, json!({ "model_type": "mistral3", "spatial_merge_size": merge }));
    set(
        &mut files.processor,
        json!({
            "image_processor_type": "PixtralImageProcessor", "size": { "longest_edge": image },
            "patch_size": patch.saturating_mul(merge),
        }),
    );
    Ok(())
}

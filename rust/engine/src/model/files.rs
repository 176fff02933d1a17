//! The files of a model, opened and checked.

use std::{path::Path, sync::Arc};

use device::{DType, Mask, mmap::FileWatch};
use serde_json::Value;

use super::{
    arch::{Found, check_architecture},
    config::{DecoderConfig, FfnConfig},
    fields::{Fields, GgufFields, HfFields},
    language_model,
};
use crate::{
    EmbeddingConfig, EmbeddingOptions, EngineError, Importance, Isq, ModelSource, embedding, importance,
    json::required_json,
    keys,
    lora::OwnAdapter,
    media::{Encoders, MediaConfig, MediaOptions, hears, mmproj},
    weights::{self, GgufFiles, Metadata, ModelPlace, Names, Role, SafetensorsFiles, WeightId, WeightSource, hub::HubFormat},
};

/// What its config.json says of what it takes beside text.
#[derive(Clone, Copy, Debug, Default)]
struct Senses {
    /// It speaks of images or sounds.
    are_there: bool,
    /// It names a family that hears.
    hears: bool,
    /// It names Phi-4-multimodal.
    is_phi4: bool,
}

/// What the weight of a norm is called in checkpoints that come from TensorFlow.
const OLDER_NORM: &str = "LayerNorm.gamma";

/// As PyTorch calls it, and its bias.
fn newer_norm(name: String) -> String {
    let norm = |suffix: &str| name.strip_suffix(suffix).filter(|norm| norm.ends_with("LayerNorm"));
    match (norm(".gamma"), norm(".beta")) {
        (Some(norm), _) => format!("{norm}.weight"),
        (None, Some(norm)) => format!("{norm}.bias"),
        (None, None) => name,
    }
}

/// The files of a model, opened and checked; no weight has been read yet.
pub struct ModelFiles {
    config: DecoderConfig,
    weights: WeightSource,
    isq: Option<Isq>,
    embedding: Option<EmbeddingConfig>,
    importance: Option<Arc<Importance>>,
    media: Option<Encoders<MediaConfig>>,
    /// The encoder's, where it has files of its own.
    encoder: Option<WeightSource>,
    /// Adapters of its own, one of which goes with what a request holds.
    own_adapters: Option<Encoders<OwnAdapter>>,
    senses: Senses,
}

impl ModelFiles {
    /// Opens a model's files and reads its configuration: what a decoder is like. What it is for, [`Self::for_embeddings`] says.
    ///
    /// Errors: [`EngineError::Load`] for a missing or malformed file, [`EngineError::Architecture`] for an architecture that is
    /// not implemented or contradicts `architecture` (HF `model_type`).
    pub fn open(source: &ModelSource, architecture: Option<&str>) -> Result<Self, EngineError> {
        match source {
            ModelSource::HuggingFace { path, .. } => Self::open_hugging_face(path, architecture),
            ModelSource::Gguf { files, .. } => Self::open_gguf(GgufFiles::open(files)?, architecture),
            ModelSource::Ggml { file, gqa, .. } => Self::open_gguf(weights::ggml::open(file, *gqa)?, architecture),
        }
    }

    fn open_hugging_face(dir: &Path, expected: Option<&str>) -> Result<Self, EngineError> {
        if let Some(dir) = weights::meta::folder_of(dir) {
            return Self::open_gguf(weights::meta::open(&dir)?, expected);
        }
        let (mut config, names, hub, senses) = Self::read_config(dir, expected)?;
        let mut files = SafetensorsFiles::open(dir)?.quantized(hub);
        if senses.is_phi4 {
            files = files.renamed(weights::phi4::common_name)?;
        }
        if files.names().any(|name| name.ends_with(OLDER_NORM)) {
            files = files.renamed(newer_norm)?;
        }
        let has_some = |start: &str| files.names().any(|name| name.starts_with(start));
        let place = ModelPlace::find(names, |name| files.contains(name), has_some);
        let beyond = place.name(format!("model.layers.{}.", config.layers.len()));
        if files.contains("mtp.fc.weight") && has_some(&beyond) {
            return Err(EngineError::Load(format!(
                "{}: `num_hidden_layers` is {}, but there are tensors `{beyond}*`: layers are counted from 0",
                dir.display(),
                config.layers.len()
            )));
        }
        let place = place.with_head(config.layers.len(), |name| files.contains(name));
        let weights = WeightSource::Safetensors { files, names, place };
        // The files of A.X K1 leave corrections out.
        if config.architecture == "axk1" {
            for (number, layer) in config.layers.iter_mut().enumerate() {
                if let FfnConfig::Experts(experts) = &mut layer.ffn {
                    experts.has_correction = weights.contains(WeightId::layer(number, Role::RouterCorrection));
                }
            }
        }
        // Of a language model within a larger one, its own part of the file need not say so.
        config.tie_word_embeddings |= !place.is_alone() && !weights.contains(WeightId::global(Role::Output));
        Ok(Self { senses, ..Self::checked(config, weights, "num_hidden_layers")? })
    }

    /// A model with weights for more layers than it says is another one. `key` says how many layers it has.
    fn checked(config: DecoderConfig, weights: WeightSource, key: &str) -> Result<Self, EngineError> {
        let num_layers = config.layers.len() + config.num_mtp_layers;
        let beyond =
            [Role::AttnOutput, Role::FfnDown, Role::MixOutput, Role::SharedDown].map(|role| WeightId::layer(num_layers, role));
        match beyond.into_iter().find(|id| weights.contains(*id)) {
            None => Ok(Self {
                config,
                weights,
                isq: None,
                embedding: None,
                importance: None,
                media: None,
                encoder: None,
                own_adapters: None,
                senses: Senses::default(),
            }),
            Some(id) => Err(EngineError::Load(format!(
                "{}: `{key}` is {num_layers}, but there is a tensor `{}`: layers are counted from 0",
                weights.path().display(),
                weights.name(id)
            ))),
        }
    }

    /// Reads a folder's config.json alone. Errors as [`Self::open`]'s.
    pub fn hugging_face_config(dir: &Path, expected: Option<&str>) -> Result<DecoderConfig, EngineError> {
        Ok(Self::read_config(dir, expected)?.0)
    }

    /// The decoder's hyperparameters, what its checkpoints call otherwise, how they are quantized, and what it says of images
    /// and sounds.
    fn read_config(dir: &Path, expected: Option<&str>) -> Result<(DecoderConfig, Names, Option<HubFormat>, Senses), EngineError> {
        let path = dir.join("config.json");
        let what = path.display().to_string();
        let Value::Object(object) = required_json(&path)? else {
            return Err(EngineError::Load(format!("{what}: not a JSON object")));
        };
        let are_there =
            ["vision_config", "audio_config", "img_processor", "audio_processor"].iter().any(|key| object.contains_key(*key));
        let is_of = |family: &dyn Fn(&str) -> bool| object.get("model_type").and_then(Value::as_str).is_some_and(family);
        let (hears, is_phi4) = (is_of(&hears), is_of(&|name| ["phi4mm", "phi4_multimodal"].contains(&name)));
        let fields = HfFields::new(&what, language_model::config_of(object));
        let (model_type, classes) = (fields.text("model_type")?, fields.texts("architectures")?.unwrap_or_default());
        let classes: Vec<_> = classes.iter().map(String::as_str).collect();
        let found = Found::HuggingFace { model_type: model_type.as_deref(), classes: &classes };
        let architecture = check_architecture(expected, found)?;
        let hub = fields.quantization()?;
        let config = (architecture.from_hf)(&fields)?;
        config.validate(&what)?;
        keys::warn_of(&fields.unknown_keys()?, &what);
        Ok((config, architecture.names, hub, Senses { are_there, hears, is_phi4 }))
    }

    fn open_gguf(files: GgufFiles, expected: Option<&str>) -> Result<Self, EngineError> {
        let weights = WeightSource::Gguf(files);
        let what = weights.path().display().to_string();
        let metadata = weights.metadata().ok_or_else(|| EngineError::Internal("a GGUF file without metadata".into()))?;
        let prefix = metadata
            .str("general.architecture")
            .ok_or_else(|| EngineError::Load(format!("{what}: `general.architecture` is missing or not a string")))?;
        let architecture = check_architecture(expected, Found::Gguf(prefix))?;
        let config = (architecture.from_gguf)(&GgufFields { what: &what, prefix, metadata, weights: &weights, by_layer: &[] })?;
        config.validate(&what)?;
        let key = format!("{prefix}.block_count");
        Self::checked(config, weights, &key)
    }

    /// The decoder's hyperparameters.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// The same, to make embeddings instead of text; `source` is what they were opened from.
    ///
    /// # Errors
    /// [`EngineError::InvalidArgument`] where neither the files nor `options` say how. [`EngineError::Load`] and
    /// [`EngineError::NotSupported`] for files that cannot be honoured; they name the key.
    pub fn for_embeddings(mut self, source: &ModelSource, options: EmbeddingOptions) -> Result<Self, EngineError> {
        let (embedding, heads) = match source {
            ModelSource::HuggingFace { path, .. } => {
                let scores = if options.pooling.is_none() { self.scores(path)? } else { None };
                match scores {
                    Some(scores) => (scores, Vec::new()),
                    None => embedding::of_folder(path, options, &self.config)?,
                }
            }
            ModelSource::Gguf { .. } | ModelSource::Ggml { .. } => {
                let what = self.weights.path().display().to_string();
                let (weights, metadata) = (&self.weights, self.weights.metadata());
                let metadata = metadata.ok_or_else(|| EngineError::Internal("a GGUF file without metadata".into()))?;
                let prefix = metadata.str("general.architecture").unwrap_or_default();
                let fields = GgufFields { what: &what, prefix, metadata, weights, by_layer: &[] };
                (embedding::of_gguf(&fields, options, &self.config)?, Vec::new())
            }
        };
        embedding::add_heads(&mut self.weights, &heads)?;
        // Nothing asks for logits, so nothing but the rows of the embedding is kept.
        self.config.tie_word_embeddings = true;
        Ok(Self { embedding: Some(embedding), ..self })
    }

    fn scores(&self, dir: &Path) -> Result<Option<EmbeddingConfig>, EngineError> {
        match embedding::logits_of_folder(dir, &self.config)? {
            None => embedding::scores_of_folder(dir, &self.config, &self.weights),
            of_logits => Ok(of_logits),
        }
    }

    /// The same, to see or hear too; `source` is what they were opened from.
    ///
    /// # Errors
    /// [`EngineError::NotSupported`] for a family whose images and sounds are not computed; [`EngineError::Load`] for files that
    /// cannot be honoured; they name the key.
    pub fn with_media(self, source: &ModelSource, options: &MediaOptions) -> Result<Self, EngineError> {
        let refused = |why: &str| Err(EngineError::NotSupported(format!("{}: {why}", self.weights.path().display())));
        match (source, &options.mmproj) {
            (ModelSource::HuggingFace { path, .. }, None) => self.with_media_of_folder(path, options),
            (ModelSource::Gguf { .. }, Some(mmproj)) => {
                let encoder = mmproj::open(mmproj.clone())?;
                let language = self.weights.metadata().ok_or_else(|| EngineError::Internal("no metadata".into()))?;
                let media = Encoders::from_mmproj(&encoder, language, &self.config, options.max_edge)?;
                Ok(Self { encoder: Some(encoder), ..self.seeing(media) })
            }
            (ModelSource::HuggingFace { .. }, Some(_)) => {
                refused("a folder has its encoder itself: leave out mmproj_filename (--mmproj), which goes with a GGUF file")
            }
            (ModelSource::Gguf { .. }, None) => refused(
                "images and sounds need the GGUF file of their encoder as well: name it with mmproj_filename (--mmproj), or load the model's \
                 Hugging Face folder",
            ),
            (ModelSource::Ggml { .. }, _) => {
                refused("images and sounds with a GGML file are not supported: load a GGUF file with its mmproj")
            }
        }
    }

    fn with_media_of_folder(self, path: &Path, options: &MediaOptions) -> Result<Self, EngineError> {
        let file = path.join("config.json");
        let what = file.display().to_string();
        let Value::Object(object) = required_json(&file)? else {
            return Err(EngineError::Load(format!("{what}: not a JSON object")));
        };
        let fields = HfFields::new(&what, object);
        let media = Encoders::from_folder(path, &fields, &self.config, options.max_edge)?;
        let own_adapters = if media.is_phi4() { Encoders::of_phi4(path, &fields, &media.kinds())? } else { None };
        Ok(Self { own_adapters, ..self.seeing(media) })
    }

    fn seeing(mut self, media: Encoders<MediaConfig>) -> Self {
        if let Some(seen) = media.with_spans() {
            let is_seen = |window: Option<usize>| window.is_some() || !seen.spans_in_windows;
            self.config = self.config.with_layers(|layer| {
                if is_seen(layer.attention.window) {
                    layer.attention.mask = Mask::Spans;
                }
            });
        }
        Self { media: Some(media), ..self }
    }

    /// Whether images or sounds that its config.json speaks of are left out.
    pub(crate) fn leaves_out_senses(&self) -> bool {
        self.senses.are_there && self.media.is_none()
    }

    /// Whether its config.json names a family that hears, also where sounds are left out.
    pub(crate) fn hears(&self) -> bool {
        self.senses.hears
    }

    /// How it sees or hears; `None`: it takes text alone.
    pub(crate) fn media(&self) -> Option<&Encoders<MediaConfig>> {
        self.media.as_ref()
    }

    /// Adapters of its own, one of which goes with what a request holds; `None`: it has no such choice.
    pub(crate) fn own_adapters(&self) -> Option<&Encoders<OwnAdapter>> {
        self.own_adapters.as_ref()
    }

    /// The files that its encoder lies in.
    pub(crate) fn encoder_weights(&self) -> &WeightSource {
        self.encoder.as_ref().unwrap_or(&self.weights)
    }

    /// Watches all files, as long as they are in use.
    pub(crate) fn watches(&self) -> impl Iterator<Item = &FileWatch> {
        let of_encoder = self.encoder.iter().flat_map(WeightSource::watches);
        self.weights.watches().iter().chain(of_encoder)
    }

    /// How it makes embeddings; `None`: it makes text.
    pub fn embedding(&self) -> Option<&EmbeddingConfig> {
        self.embedding.as_ref()
    }

    /// The same weights for another decoder, which no file describes.
    ///
    /// # Errors
    /// [`EngineError::Load`] for a configuration that makes no sense.
    pub fn with_config(self, config: DecoderConfig) -> Result<Self, EngineError> {
        config.validate("the configuration")?;
        Ok(Self { config, ..self })
    }

    /// The head behind this model's layers that predicts further tokens, with weights of the same files.
    ///
    /// # Errors
    /// [`EngineError::NotSupported`] where there is none, or nothing of it is computed.
    pub(crate) fn into_head(self) -> Result<Self, EngineError> {
        let config = super::mtp::head_config(&self.config, Some(&self.weights))?;
        self.with_config(config)
    }

    /// The same, whose float weights are quantized as they are loaded.
    #[must_use]
    pub fn with_isq(self, isq: Option<Isq>) -> Self {
        Self { isq, ..self }
    }

    /// The same, quantized with an importance matrix.
    #[must_use]
    pub fn with_importance(self, importance: Option<Arc<Importance>>) -> Self {
        Self { importance, ..self }
    }

    /// How much the columns of float weights count as they are quantized.
    pub fn importance(&self) -> Option<&Importance> {
        self.importance.as_deref()
    }

    /// What float weights are quantized to.
    pub fn isq(&self) -> Option<Isq> {
        self.isq
    }

    /// What is quantized already is not quantized again.
    ///
    /// # Errors
    /// [`EngineError::InvalidArgument`] where that is the whole model, or where an importance matrix has no use;
    /// [`EngineError::Load`] for one of another model.
    pub fn check_isq(&self) -> Result<(), EngineError> {
        importance::check(self)?;
        let Some(isq) = self.isq else { return Ok(()) };
        let down = WeightId::layer(0, Role::FfnDown);
        let matrices = [down.with_role(Role::AttnOutput), down, WeightId::global(Role::Embedding)];
        let mut types = matrices.into_iter().filter_map(|id| self.weights.stored_type(id));
        match types.clone().all(|dtype| matches!(dtype, DType::Ggml(_))).then(|| types.next()).flatten() {
            None => Ok(()),
            Some(dtype) => Err(EngineError::InvalidArgument(format!(
                "in_situ_quant is {isq}, but the weights of {} are quantized already ({dtype}): leave it out, or load float weights",
                self.weights.path().display()
            ))),
        }
    }

    /// The weights by role.
    pub fn weights(&self) -> &WeightSource {
        &self.weights
    }

    /// GGUF metadata; `None` for a Hugging Face folder.
    pub fn metadata(&self) -> Option<&Metadata> {
        self.weights.metadata()
    }

    /// Bytes of all weights in the files.
    pub fn weight_bytes(&self) -> u64 {
        self.weights.weight_bytes() + self.encoder.as_ref().map_or(0, WeightSource::weight_bytes)
    }
}

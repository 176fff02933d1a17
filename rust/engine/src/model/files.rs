//! The files of a model, opened and checked.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{
    arch::{Found, check_architecture},
    config::DecoderConfig,
    fields::{Fields, GgufFields, HfFields},
};
use crate::{
    EngineError, ModelSource,
    json::required_json,
    weights::{GgufFiles, Metadata, Names, SafetensorsFiles, WeightSource},
};

/// The files of a model, opened and checked; no weight has been read yet.
pub struct ModelFiles {
    config: DecoderConfig,
    weights: WeightSource,
}

impl ModelFiles {
    /// Opens a model's files and reads its configuration.
    ///
    /// Errors: [`EngineError::Load`] for a missing or malformed file, [`EngineError::Architecture`] for an architecture that is
    /// not implemented or contradicts `architecture` (HF `model_type`).
    pub fn open(source: &ModelSource, architecture: Option<&str>) -> Result<Self, EngineError> {
        match source {
            ModelSource::HuggingFace { path, .. } => Self::open_hugging_face(path, architecture),
            ModelSource::Gguf { files, .. } => Self::open_gguf(files, architecture),
        }
    }

    fn open_hugging_face(dir: &Path, expected: Option<&str>) -> Result<Self, EngineError> {
        let (config, names) = Self::read_config(dir, expected)?;
        let weights = WeightSource::Safetensors { files: SafetensorsFiles::open(dir)?, names };
        Ok(Self { config, weights })
    }

    /// Reads a folder's config.json alone. Errors as [`Self::open`]'s.
    pub fn hugging_face_config(dir: &Path, expected: Option<&str>) -> Result<DecoderConfig, EngineError> {
        Ok(Self::read_config(dir, expected)?.0)
    }

    fn read_config(dir: &Path, expected: Option<&str>) -> Result<(DecoderConfig, Names), EngineError> {
        let path = dir.join("config.json");
        let what = path.display().to_string();
        let Value::Object(object) = required_json(&path)? else {
            return Err(EngineError::Load(format!("{what}: not a JSON object")));
        };
        let fields = HfFields { what: &what, object };
        let (model_type, classes) = (fields.text("model_type")?, fields.texts("architectures")?.unwrap_or_default());
        let classes: Vec<_> = classes.iter().map(String::as_str).collect();
        let found = Found::HuggingFace { model_type: model_type.as_deref(), classes: &classes };
        let architecture = check_architecture(expected, found)?;
        let config = (architecture.from_hf)(&fields)?;
        config.validate(&what)?;
        Ok((config, architecture.names))
    }

    fn open_gguf(paths: &[PathBuf], expected: Option<&str>) -> Result<Self, EngineError> {
        let weights = WeightSource::Gguf(GgufFiles::open(paths)?);
        let what = weights.path().display().to_string();
        let metadata = weights.metadata().ok_or_else(|| EngineError::Internal("a GGUF file without metadata".into()))?;
        let prefix = metadata
            .str("general.architecture")
            .ok_or_else(|| EngineError::Load(format!("{what}: `general.architecture` is missing or not a string")))?;
        let architecture = check_architecture(expected, Found::Gguf(prefix))?;
        let config = (architecture.from_gguf)(&GgufFields { what: &what, prefix, metadata, weights: &weights })?;
        config.validate(&what)?;
        Ok(Self { config, weights })
    }

    /// The decoder's hyperparameters.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// The same weights for another decoder, which no file describes.
    ///
    /// # Errors
    /// [`EngineError::Load`] for a configuration that makes no sense.
    pub fn with_config(self, config: DecoderConfig) -> Result<Self, EngineError> {
        config.validate("the configuration")?;
        Ok(Self { config, ..self })
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
        self.weights.weight_bytes()
    }
}

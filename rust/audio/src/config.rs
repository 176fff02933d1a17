//! A model's `preprocessor_config.json`, as far as it is about sounds.

use std::{fs, io, path::Path};

use serde::Serialize;
use serde_json::{Map, Value};

use crate::{RATES, SoundError};

/// What makes features of a sound: `WhisperFeatureExtractor`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Processor {
    /// `feature_size`: values of a frame.
    pub num_mel_bins: usize,
    /// Samples a second that features are made of.
    pub sampling_rate: u32,
    /// Samples of a spectrum.
    pub n_fft: usize,
    /// Samples from one frame to the next.
    pub hop_length: usize,
    /// `chunk_length`: sounds are filled up with silence to a multiple of so many seconds.
    pub chunk_seconds: usize,
    /// A longer sound is refused. No file sets it.
    pub max_seconds: Option<u32>,
}

/// Keys that change nothing here, or follow from others.
const IGNORED: [&str; 11] = [
    "_valid_processor_keys",
    "auto_map",
    "feature_extractor_type",
    "model_input_names",
    "nb_max_frames",
    "n_samples",
    "padding_side",
    "processor_class",
    "return_attention_mask",
    "transformers_version",
    "audio_token",
];
const READ: [&str; 7] = ["chunk_length", "dither", "feature_size", "hop_length", "n_fft", "padding_value", "sampling_rate"];

impl Processor {
    /// From a model's folder: the `feature_extractor` of its `processor_config.json`, or else its `preprocessor_config.json`.
    /// `None` where the folder has neither.
    ///
    /// # Errors
    /// For files that cannot be read, and as [`Self::from_json`].
    pub fn from_folder(dir: &Path) -> Result<Option<Self>, SoundError> {
        let inner = read_object(&dir.join("processor_config.json"))?
            .and_then(|(what, json)| Some((what, json.get("feature_extractor")?.as_object()?.clone())));
        let found = inner.map_or_else(|| read_object(&dir.join("preprocessor_config.json")), |inner| Ok(Some(inner)))?;
        found.map(|(what, json)| Self::from_json(&what, &json)).transpose()
    }

    /// From the object of such a file; `what` is the file's name in errors.
    ///
    /// # Errors
    /// [`SoundError::Config`] for other feature extractors, values of a wrong form, and keys that would change the result and are
    /// not honoured.
    pub fn from_json(what: &str, json: &Map<String, Value>) -> Result<Self, SoundError> {
        let error = |reason: String| SoundError::Config { what: what.into(), reason };
        match json.get("feature_extractor_type").and_then(Value::as_str) {
            Some("WhisperFeatureExtractor") => {}
            Some(other) => {
                return Err(error(format!("feature_extractor_type {other} is not known; WhisperFeatureExtractor is")));
            }
            None => return Err(error("feature_extractor_type is missing; WhisperFeatureExtractor is known".into())),
        }
        for (key, value) in json.iter().filter(|(key, _)| !IGNORED.contains(&&key[..]) && !READ.contains(&&key[..])) {
            if value == &Value::Bool(true) {
                return Err(error(format!("{key} is true, which is not supported; without it sounds can be processed")));
            }
            if !value.is_null() && value != &Value::Bool(false) {
                tracing::warn!("{what}: {key} is not known and not used");
            }
        }
        for key in ["dither", "padding_value"] {
            if json.get(key).is_some_and(|value| !value.is_null() && value.as_f64() != Some(0.0)) {
                return Err(error(format!("{key} is {}; only 0 is supported", json[key])));
            }
        }
        let whole = |key: &str, usual: usize, [least, most]: [usize; 2]| match json.get(key).filter(|value| !value.is_null()) {
            None => Ok(usual),
            Some(value) => value
                .as_u64()
                .map(|number| number as usize)
                .filter(|number| (least..=most).contains(number))
                .ok_or_else(|| error(format!("{key} is {value}, and a whole number from {least} to {most} is wanted"))),
        };
        let processor = Self {
            num_mel_bins: whole("feature_size", 80, [1, 1024])?,
            sampling_rate: whole("sampling_rate", 16_000, [*RATES.start() as usize, *RATES.end() as usize])? as u32,
            n_fft: whole("n_fft", 400, [2, 1 << 14])?,
            hop_length: whole("hop_length", 160, [1, 1 << 14])?,
            chunk_seconds: whole("chunk_length", 30, [1, 300])?,
            max_seconds: None,
        };
        if !processor.n_fft.is_multiple_of(2) || !processor.chunk_samples().is_multiple_of(processor.hop_length) {
            return Err(error("n_fft must be even, and hop_length must divide the samples of a chunk".into()));
        }
        Ok(processor)
    }

    /// Samples of a chunk.
    pub(crate) fn chunk_samples(&self) -> usize {
        self.chunk_seconds * self.sampling_rate as usize
    }

    /// Frames of a chunk.
    pub fn chunk_frames(&self) -> usize {
        self.chunk_samples() / self.hop_length
    }

    /// Bytes that differ where these parameters differ: a part of the key of whatever is kept of a sound.
    pub fn identity(&self) -> Vec<u8> {
        let mut bytes = b"sound processor 1\n".to_vec();
        bytes.extend(serde_json::to_vec(self).unwrap_or_else(|_| format!("{self:?}").into_bytes()));
        bytes
    }
}

type Object = (String, Map<String, Value>);

/// The name and the object of a file. `None` where there is no such file.
fn read_object(path: &Path) -> Result<Option<Object>, SoundError> {
    let text = match fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(SoundError::Io { path: path.into(), source }),
    };
    let what = path.display().to_string();
    match serde_json::from_slice(&text) {
        Ok(json) => Ok(Some((what, json))),
        Err(error) => Err(SoundError::Config { what, reason: error.to_string() }),
    }
}

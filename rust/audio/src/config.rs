//! A model's `preprocessor_config.json`, as far as it is about sounds.

use std::{fs, io, path::Path};

use serde::Serialize;
use serde_json::{Map, Value};

use crate::{
    RATES, SoundError,
    gemma4::{self, Gemma4},
    phi4::{self, Phi4},
};

/// The feature extractors that are implemented.
const KNOWN: &str =
    "WhisperFeatureExtractor, Gemma3nAudioFeatureExtractor, Gemma4AudioFeatureExtractor and Phi4MultimodalFeatureExtractor";

/// What makes features of a sound.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Processor {
    /// `feature_size`: values of a frame.
    pub num_mel_bins: usize,
    /// Samples a second that features are made of.
    pub sampling_rate: u32,
    /// Samples of a spectrum.
    pub n_fft: usize,
    /// Samples from one frame to the next.
    pub hop_length: usize,
    /// A longer sound is refused: `max_audio_len` of the processor, as far as chunks are whole, or what a family of models takes.
    pub max_seconds: Option<u32>,
    /// Each chunk becomes features by itself, not the whole sound. No file sets it.
    pub are_chunks_apart: bool,
    /// How features are made of spectra.
    pub kind: Kind,
}

/// How features are made of spectra.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub enum Kind {
    /// `WhisperFeatureExtractor`.
    Whisper {
        /// `chunk_length`: sounds are filled up with silence to a multiple of so many seconds.
        chunk_seconds: usize,
    },
    /// `Gemma4AudioFeatureExtractor` and `Gemma3nAudioFeatureExtractor`.
    Gemma4(Gemma4),
    /// `Phi4MultimodalFeatureExtractor`.
    Phi4(Phi4),
}

/// Keys that change nothing here, or follow from others.
const IGNORED: [&str; 10] = [
    "_valid_processor_keys",
    "auto_map",
    "feature_extractor_type",
    "model_input_names",
    "nb_max_frames",
    "n_samples",
    "processor_class",
    "return_attention_mask",
    "transformers_version",
    "audio_token",
];
/// Keys of images, in a file that is of both.
const OF_IMAGES: [&str; 17] = [
    "audio_seq_length",
    "crop_size",
    "data_format",
    "default_to_square",
    "device",
    "disable_grouping",
    "image_mean",
    "image_processor_type",
    "image_seq_length",
    "image_std",
    "image_token",
    "input_data_format",
    "pad_size",
    "resample",
    "rescale_factor",
    "return_tensors",
    "size",
];
const READ: [&str; 8] =
    ["chunk_length", "dither", "feature_size", "hop_length", "n_fft", "padding_side", "padding_value", "sampling_rate"];

impl Processor {
    /// From a model's folder: the `feature_extractor`, or `audio_processor`, of its `processor_config.json`, or else its
    /// `preprocessor_config.json`.
    /// `None` where the folder has neither.
    ///
    /// # Errors
    /// For files that cannot be read, and as [`Self::from_json`].
    pub fn from_folder(dir: &Path) -> Result<Option<Self>, SoundError> {
        let whole = read_object(&dir.join("processor_config.json"))?;
        let inner = whole.and_then(|(what, json)| {
            let of = |key: &str| json.get(key).and_then(Value::as_object).cloned();
            Some((of("feature_extractor").or_else(|| of("audio_processor"))?, what, json))
        });
        let Some((inner, what, json)) = inner else {
            let found = read_object(&dir.join("preprocessor_config.json"))?;
            return found.map(|(what, json)| Self::from_json(&what, &json)).transpose();
        };
        let mut processor = Self::from_json(&what, &inner)?;
        let fields = Fields { what: &what, json: &json };
        let longest = fields.whole("max_audio_len", 0, [1, 1 << 20])?;
        match processor.kind {
            Kind::Whisper { chunk_seconds } if longest == 0 || longest >= chunk_seconds => processor.set_max_seconds(longest),
            Kind::Whisper { chunk_seconds } => {
                return Err(fields.error(format!("max_audio_len is {longest}, less than a chunk of {chunk_seconds} seconds")));
            }
            Kind::Gemma4(_) | Kind::Phi4(_) if longest > 0 => {
                return Err(fields.error(format!("max_audio_len is {longest}, which is not supported; leave it out")));
            }
            Kind::Gemma4(_) | Kind::Phi4(_) => {}
        }
        Ok(Some(processor))
    }

    /// Refuses sounds of more chunks than so many seconds have; 0: none.
    pub fn set_max_seconds(&mut self, seconds: usize) {
        if let Kind::Whisper { chunk_seconds } = self.kind
            && seconds > 0
        {
            self.max_seconds = Some((seconds / chunk_seconds * chunk_seconds) as u32);
        }
    }

    /// From the object of such a file; `what` is the file's name in errors.
    ///
    /// # Errors
    /// [`SoundError::Config`] for other feature extractors, values of a wrong form, and keys that would change the result and are
    /// not honoured.
    pub fn from_json(what: &str, json: &Map<String, Value>) -> Result<Self, SoundError> {
        let fields = Fields { what, json };
        match json.get("feature_extractor_type").and_then(Value::as_str) {
            Some("WhisperFeatureExtractor") => Self::whisper(&fields),
            Some("Gemma4AudioFeatureExtractor") => gemma4::read(&fields, false),
            Some("Gemma3nAudioFeatureExtractor") => gemma4::read(&fields, true),
            Some("Phi4MultimodalFeatureExtractor" | "Phi4MMAudioFeatureExtractor") => phi4::read(&fields),
            Some(other) => Err(fields.error(format!("feature_extractor_type {other} is not known; {KNOWN} are"))),
            None => Err(fields.error(format!("feature_extractor_type is missing; {KNOWN} are known"))),
        }
    }

    fn whisper(fields: &Fields<'_>) -> Result<Self, SoundError> {
        fields.check(&READ)?;
        let processor = Self {
            num_mel_bins: fields.whole("feature_size", 80, [1, 1024])?,
            sampling_rate: fields.rate()?,
            n_fft: fields.whole("n_fft", 400, [2, 1 << 14])?,
            hop_length: fields.whole("hop_length", 160, [1, 1 << 14])?,
            max_seconds: None,
            are_chunks_apart: false,
            kind: Kind::Whisper { chunk_seconds: fields.whole("chunk_length", 30, [1, 300])? },
        };
        if !processor.n_fft.is_multiple_of(2) || !processor.chunk_samples().is_multiple_of(processor.hop_length) {
            return Err(fields.error("n_fft must be even, and hop_length must divide the samples of a chunk".into()));
        }
        Ok(processor)
    }

    /// Samples of a chunk; 0 where sounds are not cut.
    pub(crate) fn chunk_samples(&self) -> usize {
        match self.kind {
            Kind::Whisper { chunk_seconds } => chunk_seconds * self.sampling_rate as usize,
            Kind::Gemma4(_) | Kind::Phi4(_) => 0,
        }
    }

    /// Frames of a chunk; 0 where sounds are not cut.
    pub fn chunk_frames(&self) -> usize {
        self.chunk_samples() / self.hop_length
    }

    /// Frames of the longest chunk.
    pub fn max_frames(&self) -> usize {
        match &self.kind {
            Kind::Whisper { .. } => self.chunk_frames(),
            Kind::Gemma4(gemma4) => gemma4.max_frames(self.hop_length),
            Kind::Phi4(phi4) => phi4.max_frames(),
        }
    }

    /// Bytes that differ where these parameters differ: a part of the key of whatever is kept of a sound.
    pub fn identity(&self) -> Vec<u8> {
        let mut bytes = b"sound processor 1\n".to_vec();
        bytes.extend(serde_json::to_vec(self).unwrap_or_else(|_| format!("{self:?}").into_bytes()));
        bytes
    }
}

/// The object of a file, and its name in errors.
pub(crate) struct Fields<'a> {
    what: &'a str,
    json: &'a Map<String, Value>,
}

impl Fields<'_> {
    pub(crate) fn error(&self, reason: String) -> SoundError {
        SoundError::Config { what: self.what.into(), reason }
    }

    /// The value of a key; `None` where it is null too.
    pub(crate) fn value(&self, key: &str) -> Option<&Value> {
        self.json.get(key).filter(|value| !value.is_null())
    }

    /// That no key beside those which are read would change the result, and nothing asks for noise or other padding.
    pub(crate) fn check(&self, read: &[&str]) -> Result<(), SoundError> {
        // Some files are of both processors of a model.
        let is_both = self.value("image_processor_type").is_some();
        let is_image_s = |key: &str| is_both && (OF_IMAGES.contains(&key) || key.starts_with("do_"));
        let is_known = |key: &str| IGNORED.contains(&key) || read.contains(&key) || is_image_s(key);
        for (key, value) in self.json.iter().filter(|(key, _)| !is_known(key)) {
            if value == &Value::Bool(true) {
                return Err(self.error(format!("{key} is true, which is not supported; without it sounds can be processed")));
            }
            if !value.is_null() && value != &Value::Bool(false) {
                tracing::warn!("{}: {key} is not known and not used", self.what);
            }
        }
        for key in ["dither", "padding_value"] {
            if let Some(value) = self.value(key).filter(|value| value.as_f64() != Some(0.0)) {
                return Err(self.error(format!("{key} is {value}; only 0 is supported")));
            }
        }
        match self.value("padding_side") {
            Some(value) if value != "right" => Err(self.error(format!("padding_side is {value}; only \"right\" is supported"))),
            _ => Ok(()),
        }
    }

    /// A whole number within bounds.
    pub(crate) fn whole(&self, key: &str, usual: usize, [least, most]: [usize; 2]) -> Result<usize, SoundError> {
        let Some(value) = self.value(key) else { return Ok(usual) };
        let number = value.as_u64().map(|number| number as usize).filter(|number| (least..=most).contains(number));
        number.ok_or_else(|| self.error(format!("{key} is {value}, and a whole number from {least} to {most} is wanted")))
    }

    /// A number within bounds.
    pub(crate) fn number(&self, key: &str, usual: f64, [least, most]: [f64; 2]) -> Result<f64, SoundError> {
        let Some(value) = self.value(key) else { return Ok(usual) };
        let number = value.as_f64().filter(|number| (least..=most).contains(number));
        number.ok_or_else(|| self.error(format!("{key} is {value}, and a number from {least} to {most} is wanted")))
    }

    /// True or false.
    pub(crate) fn flag(&self, key: &str, usual: bool) -> Result<bool, SoundError> {
        let Some(value) = self.value(key) else { return Ok(usual) };
        value.as_bool().ok_or_else(|| self.error(format!("{key} is {value}, and true or false is wanted")))
    }

    /// Samples a second.
    pub(crate) fn rate(&self) -> Result<u32, SoundError> {
        Ok(self.whole("sampling_rate", 16_000, [*RATES.start() as usize, *RATES.end() as usize])? as u32)
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

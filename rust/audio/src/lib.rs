//! From the bytes of a sound to the values that a sound encoder takes.
//!
//! [`decode`] makes samples of a file, [`Processor`] makes log-mel features of samples, as a model's `preprocessor_config.json`
//! says. These are the features of Whisper (arXiv:2212.04356) and of Gemma 4 and Phi-4-multimodal, as Transformers 5.24
//! computes them.
#![forbid(unsafe_code)]

mod config;
mod decode;
mod features;
mod gemma4;
mod phi4;
mod resample;

use std::{io, path::PathBuf};

pub use config::{Kind, Processor};
pub use decode::{Limits, decode};
pub use features::Features;
pub use gemma4::Gemma4;
pub use phi4::Phi4;

/// Samples a second that a sound may have.
pub const RATES: std::ops::RangeInclusive<u32> = 1000..=192_000;

/// A sample's size at most: far larger ones have energies that are no numbers.
pub const MAX_SAMPLE: f32 = 1e4;

/// Why there is no sound, or no processor.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SoundError {
    /// The file is larger than [`Limits::max_bytes`].
    #[error("the sound file has {bytes} bytes, more than the {max_bytes} that are allowed")]
    TooManyBytes {
        /// What the file has.
        bytes: usize,
        /// What is allowed.
        max_bytes: usize,
    },
    /// It is longer than [`Limits::max_seconds`].
    #[error("the sound is longer than the {max_seconds} seconds that are allowed")]
    TooLong {
        /// What is allowed.
        max_seconds: u32,
    },
    /// It has no whole frame.
    #[error("the sound has {num_samples} samples, and a frame needs {least}")]
    TooShort {
        /// What it has, at the rate of the features.
        num_samples: usize,
        /// What it must have.
        least: usize,
    },
    /// It has more samples than [`Limits::max_samples`].
    #[error("the sound has more than the {max_samples} samples that are allowed")]
    TooManySamples {
        /// What is allowed.
        max_samples: usize,
    },
    /// It is over before it begins.
    #[error("the sound has no samples")]
    Empty,
    /// It has more or fewer samples a second than anything that is heard.
    #[error("the sound has {rate} samples a second; it must have {} to {}", RATES.start(), RATES.end())]
    Rate {
        /// Samples a second.
        rate: u32,
    },
    /// A sample is no number, or far from what samples are.
    #[error(
        "sample {index} of the sound is {value}; samples lie from -1 to 1 usually, and from -{MAX_SAMPLE} to {MAX_SAMPLE} in any case"
    )]
    Sample {
        /// Which of them.
        index: usize,
        /// What it is.
        value: f32,
    },
    /// The bytes are of no known format.
    #[error("the sound is no WAV, FLAC, MP3 or Ogg Vorbis file; it begins with {begin:02x?}")]
    UnknownFormat {
        /// The first bytes, at most eight.
        begin: Vec<u8>,
    },
    /// The file breaks its format, or holds something else in it.
    #[error("the {format} file cannot be decoded: {reason}")]
    Malformed {
        /// "WAV" and so on.
        format: &'static str,
        /// What the decoder says.
        reason: String,
    },
    /// A processor's file says what this crate does not do.
    #[error("{what}: {reason}")]
    Config {
        /// The file.
        what: String,
        /// The key, and what would do.
        reason: String,
    },
    /// A file cannot be read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

/// A sound of one channel.
#[derive(Clone, Debug, PartialEq)]
pub struct Sound {
    rate: u32,
    samples: Vec<f32>,
}

impl Sound {
    /// Of samples, `rate` of them a second.
    ///
    /// # Errors
    /// [`SoundError::Rate`], [`SoundError::Empty`] and [`SoundError::Sample`] for what is no sound.
    pub fn new(rate: u32, samples: Vec<f32>) -> Result<Self, SoundError> {
        if !RATES.contains(&rate) {
            return Err(SoundError::Rate { rate });
        }
        if samples.is_empty() {
            return Err(SoundError::Empty);
        }
        match samples.iter().position(|value| !(-MAX_SAMPLE..=MAX_SAMPLE).contains(value)) {
            Some(index) => Err(SoundError::Sample { index, value: samples[index] }),
            None => Ok(Self { rate, samples }),
        }
    }

    /// Samples a second.
    pub fn rate(&self) -> u32 {
        self.rate
    }

    /// All of them, from -1 to 1 where a file says nothing else.
    pub fn samples(&self) -> &[f32] {
        &self.samples
    }

    /// Its samples at another rate: as many as begin within the sound.
    pub fn resampled(&self, rate: u32) -> Vec<f32> {
        resample::resample(&self.samples, self.rate, rate)
    }

    /// How long it is.
    pub fn seconds(&self) -> f64 {
        self.samples.len() as f64 / f64::from(self.rate)
    }
}

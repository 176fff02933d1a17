//! Log-mel features of Phi-4-multimodal, by `Phi4MultimodalFeatureExtractor`.

use std::f64::consts::TAU;

use realfft::RealFftPlanner;
use serde::Serialize;

use crate::{Features, Kind, Processor, SoundError, config::Fields, features::triangles_of};

/// What makes features of spectra. A sound is cut into chunks of [`Phi4::PART`] vectors, each of which but the first has the
/// frames of the vector before it as well: the encoder sees some of them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Phi4 {
    /// Samples of a frame, behind which a spectrum has zeros.
    pub win_length: usize,
    /// The lowest and the highest frequency that have a mel bin.
    pub hertz: [f64; 2],
    /// How much of the sample before is taken away from each.
    pub preemphasis: f64,
    /// Frames of a vector.
    pub compression: usize,
}

/// Seconds that a sound may have: as many as the model was trained for.
const MAX_SECONDS: u32 = 1800;
/// What samples are multiplied by.
const SCALE: f32 = 32_768.0;

const READ: [&str; 12] = [
    "audio_compression_rate",
    "audio_downsample_rate",
    "audio_feat_stride",
    "feature_size",
    "hop_length",
    "mel_max_frequency",
    "mel_min_frequency",
    "n_fft",
    "padding_side",
    "padding_value",
    "preemphasis",
    "win_length",
];
/// Of images, about which its files are as well.
const OF_IMAGES: [&str; 14] = [
    "crop_size",
    "data_format",
    "do_convert_rgb",
    "do_normalize",
    "do_rescale",
    "do_resize",
    "dynamic_hd",
    "image_mean",
    "image_processor_type",
    "image_std",
    "patch_size",
    "resample",
    "rescale_factor",
    "size",
];

/// From the object of a model's file.
pub(crate) fn read(fields: &Fields<'_>) -> Result<Processor, SoundError> {
    fields.check(&[&READ[..], &OF_IMAGES, &["dither", "sampling_rate"]].concat())?;
    for key in ["audio_downsample_rate", "audio_feat_stride"] {
        let rate = fields.whole(key, 1, [1, 1 << 16])?;
        if rate != 1 {
            return Err(fields.error(format!("{key} is {rate}; only 1 is supported")));
        }
    }
    let sampling_rate = fields.rate()?;
    let (n_fft, win_length) = (fields.whole("n_fft", 512, [2, 1 << 14])?, fields.whole("win_length", 400, [2, 1 << 14])?);
    if !n_fft.is_multiple_of(2) || win_length > n_fft {
        return Err(fields.error(format!("n_fft is {n_fft}; it must be even, and no less than win_length, {win_length}")));
    }
    let nyquist = f64::from(sampling_rate) / 2.0;
    let [low, high] = [("mel_min_frequency", 0.0), ("mel_max_frequency", 7690.0)];
    let hertz = [fields.number(low.0, low.1, [0.0, nyquist])?, fields.number(high.0, high.1, [0.0, nyquist])?];
    if hertz[0] >= hertz[1] {
        return Err(fields.error(format!("mel_min_frequency is {} and mel_max_frequency {}", hertz[0], hertz[1])));
    }
    let phi4 = Phi4 {
        win_length,
        hertz,
        preemphasis: fields.number("preemphasis", 0.97, [0.0, 1.0])?,
        compression: fields.whole("audio_compression_rate", 8, [1, 1024])?,
    };
    Ok(Processor {
        num_mel_bins: fields.whole("feature_size", 80, [1, 1024])?,
        sampling_rate,
        n_fft,
        hop_length: fields.whole("hop_length", 160, [1, 1 << 14])?,
        max_seconds: Some(MAX_SECONDS),
        are_chunks_apart: false,
        kind: Kind::Phi4(phi4),
    })
}

/// Hamming's window of so many samples, symmetric.
fn hamming(len: usize) -> Vec<f64> {
    let last = len.saturating_sub(1).max(1) as f64;
    (0..len).map(|at| 0.54 - 0.46 * (TAU * at as f64 / last).cos()).collect()
}

fn mel(hertz: f64) -> f64 {
    1127.0 * (1.0 + hertz / 700.0).ln()
}

impl Phi4 {
    /// Vectors that see each other, and no others.
    pub const PART: usize = 500;

    /// Frames of the chunks of a sound of so many, without those of the vectors before.
    pub(crate) fn lens(&self, num_frames: usize) -> Vec<usize> {
        let of_chunk = Self::PART * self.compression;
        (0..num_frames.max(1)).step_by(of_chunk).map(|first| (num_frames - first).min(of_chunk)).collect()
    }

    /// Frames of so many samples: those that end within them.
    pub(crate) fn num_frames(&self, num_samples: usize, hop_length: usize) -> usize {
        num_samples.checked_sub(self.win_length).map_or(0, |rest| rest / hop_length + 1)
    }

    /// Frames of the longest chunk.
    pub(crate) fn max_frames(&self) -> usize {
        (Self::PART + 1) * self.compression
    }

    /// Triangles over the frequencies of a spectrum, equally wide in mels, and straight in these too.
    fn filters(&self, processor: &Processor) -> Vec<(usize, Vec<f32>)> {
        let ([low, high], num_bins) = (self.hertz.map(mel), processor.num_mel_bins);
        let edges: Vec<_> = (0..num_bins + 2).map(|at| low + (high - low) * at as f64 / (num_bins + 1) as f64).collect();
        let step = f64::from(processor.sampling_rate) / processor.n_fft as f64;
        let frequencies: Vec<_> = (0..=processor.n_fft / 2).map(|frequency| mel(frequency as f64 * step)).collect();
        triangles_of(&frequencies, &edges, |_| 1.0)
    }

    /// The features of samples at the rate of the features.
    pub(crate) fn process(&self, processor: &Processor, samples: &[f32]) -> Result<Features, SoundError> {
        let Processor { num_mel_bins, hop_length, n_fft, .. } = *processor;
        let num_frames = self.num_frames(samples.len(), hop_length);
        if num_frames == 0 {
            return Err(SoundError::TooShort { num_samples: samples.len(), least: self.win_length });
        }
        let (window, filters) = (hamming(self.win_length), self.filters(processor));
        let transform = RealFftPlanner::<f64>::new().plan_fft_forward(n_fft);
        let (mut frame, mut spectrum) = (transform.make_input_vec(), transform.make_output_vec());
        let mut energies = vec![0.0_f32; spectrum.len()];
        let mut values = Vec::with_capacity(num_frames * num_mel_bins);
        for own in samples.windows(self.win_length).step_by(hop_length) {
            frame.fill(0.0);
            for (at, (value, window)) in frame.iter_mut().zip(&window).enumerate() {
                // The first sample has itself before it.
                let emphasized = (own[at] - self.preemphasis as f32 * own[at.saturating_sub(1)]) * SCALE;
                *value = f64::from(emphasized) * window;
            }
            // The lengths are those that it was made for.
            let done = transform.process(&mut frame, &mut spectrum);
            debug_assert!(done.is_ok());
            energies.iter_mut().zip(&spectrum).for_each(|(energy, value)| *energy = value.norm_sqr() as f32);
            values.extend(filters.iter().map(|(first, weights)| {
                let sum: f32 = weights.iter().zip(&energies[*first..]).map(|(weight, energy)| weight * energy).sum();
                sum.max(1.0).ln()
            }));
        }
        let lens = self.lens(num_frames);
        let chunk = |(number, len): (usize, &usize)| {
            let first = number * Self::PART * self.compression;
            let before = if number == 0 { 0 } else { self.compression };
            values[(first - before) * num_mel_bins..(first + len) * num_mel_bins].to_vec()
        };
        let chunks: Vec<_> = lens.iter().enumerate().map(chunk).collect();
        let longest = chunks.iter().map(Vec::len).max().unwrap_or(0);
        Ok(Features { num_mel_bins, num_frames: longest / num_mel_bins, chunks, lens })
    }
}

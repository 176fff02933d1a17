//! Log-mel features of Whisper.

use std::sync::Arc;

use realfft::{RealFftPlanner, RealToComplex};

use crate::{Kind, Processor, Sound, SoundError};

/// What an encoder takes of a sound.
#[derive(Clone, Debug, PartialEq)]
pub struct Features {
    /// Values of a frame.
    pub num_mel_bins: usize,
    /// Frames of the longest chunk: but for those of Phi-4-multimodal, of each.
    pub num_frames: usize,
    /// Chunk after chunk, `[num_frames, num_mel_bins]` each; the last one ends in silence.
    pub chunks: Vec<Vec<f32>>,
    /// Frames of each that begin within the sound and are its own. Silence may come behind them, and some of the chunk before
    /// before them.
    pub lens: Vec<usize>,
}

impl Processor {
    /// The chunks that [`Self::process`] makes of a sound, by their frames that begin within it.
    pub fn frames_of(&self, sound: &Sound) -> Vec<usize> {
        let num_samples = (sound.samples().len() as u64 * u64::from(self.sampling_rate)).div_ceil(u64::from(sound.rate()));
        match &self.kind {
            Kind::Whisper { .. } => self.lens(num_samples as usize),
            Kind::Gemma4(gemma4) => vec![gemma4.num_frames(num_samples as usize, self.hop_length)],
            Kind::Phi4(phi4) => phi4.lens(phi4.num_frames(num_samples as usize, self.hop_length)),
        }
    }

    /// Frames of the chunks of so many samples that begin within these.
    fn lens(&self, num_samples: usize) -> Vec<usize> {
        let of_chunk = self.chunk_samples();
        let firsts = (0..num_samples).step_by(of_chunk);
        firsts.map(|first| (num_samples - first).min(of_chunk).div_ceil(self.hop_length)).collect()
    }

    /// The features of a sound.
    ///
    /// # Errors
    /// [`SoundError::TooLong`] for a sound of more than [`Self::max_seconds`], or than the model was trained for;
    /// [`SoundError::TooShort`] for one that has no frame.
    pub fn process(&self, sound: &Sound) -> Result<Features, SoundError> {
        if let Some(max_seconds) = self.max_seconds.filter(|most| sound.seconds() > f64::from(*most)) {
            return Err(SoundError::TooLong { max_seconds });
        }
        let mut samples = sound.resampled(self.sampling_rate);
        if let Kind::Gemma4(gemma4) = &self.kind {
            return gemma4.process(self, &samples);
        }
        if let Kind::Phi4(phi4) = &self.kind {
            return phi4.process(self, &samples);
        }
        let (num_samples, lens) = (self.chunk_samples(), self.lens(samples.len()));
        samples.resize(samples.len().next_multiple_of(num_samples), 0.0);
        let num_frames = num_samples / self.hop_length;
        let spectrum = Spectrum::new(self);
        let frames = |samples: &[f32]| {
            let mut values = spectrum.log_mel(samples, samples.len() / self.hop_length);
            normalize(&mut values);
            values
        };
        let of_chunk = num_frames * self.num_mel_bins;
        let chunks = if self.are_chunks_apart {
            samples.chunks_exact(num_samples).map(frames).collect()
        } else {
            frames(&samples).chunks_exact(of_chunk).map(<[f32]>::to_vec).collect()
        };
        Ok(Features { num_mel_bins: self.num_mel_bins, num_frames, chunks, lens })
    }
}

/// Eight decades below the loudest value, and not less; then about -1 to 1.
fn normalize(values: &mut [f32]) {
    let loudest = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    for value in values {
        *value = (value.max(loudest - 8.0) + 4.0) / 4.0;
    }
}

/// From samples to logarithms of energies.
struct Spectrum {
    transform: Arc<dyn RealToComplex<f64>>,
    /// Hann's.
    window: Vec<f64>,
    /// Of each mel bin, its first frequency, and the weights from there.
    filters: Vec<(usize, Vec<f32>)>,
    hop_length: usize,
}

impl Spectrum {
    fn new(processor: &Processor) -> Self {
        Self {
            transform: RealFftPlanner::new().plan_fft_forward(processor.n_fft),
            window: hann(processor.n_fft),
            filters: mel_filters(processor),
            hop_length: processor.hop_length,
        }
    }

    /// `[num_frames, num_mel_bins]`; the samples are mirrored at both ends.
    fn log_mel(&self, samples: &[f32], num_frames: usize) -> Vec<f32> {
        let half = (self.window.len() / 2) as i64;
        let last = samples.len() as i64 - 1;
        let mirrored = |at: i64| {
            let at = at.abs();
            samples[if at > last { (2 * last - at).max(0) } else { at } as usize]
        };
        let (mut frame, mut spectrum) = (self.transform.make_input_vec(), self.transform.make_output_vec());
        let mut energies = vec![0.0_f32; spectrum.len()];
        let mut values = Vec::with_capacity(num_frames * self.filters.len());
        for number in 0..num_frames {
            let first = (number * self.hop_length) as i64 - half;
            for (at, (value, window)) in frame.iter_mut().zip(&self.window).enumerate() {
                *value = f64::from(mirrored(first + at as i64)) * window;
            }
            // The lengths are those that it was made for.
            let done = self.transform.process(&mut frame, &mut spectrum);
            debug_assert!(done.is_ok());
            energies.iter_mut().zip(&spectrum).for_each(|(energy, value)| *energy = value.norm_sqr() as f32);
            values.extend(self.filters.iter().map(|(first, weights)| {
                let sum: f32 = weights.iter().zip(&energies[*first..]).map(|(weight, energy)| weight * energy).sum();
                sum.max(1e-10).log10()
            }));
        }
        values
    }
}

/// Hann's window of so many samples, periodic.
pub(crate) fn hann(len: usize) -> Vec<f64> {
    (0..len).map(|at| 0.5 - 0.5 * (std::f64::consts::TAU * at as f64 / len as f64).cos()).collect()
}

/// Triangles over the frequencies of a spectrum, equally wide in mels as Slaney has them, and of equal areas.
fn mel_filters(processor: &Processor) -> Vec<(usize, Vec<f32>)> {
    let num_bins = processor.num_mel_bins;
    let most = hertz_to_mel(MAX_HERTZ);
    let edges: Vec<_> = (0..num_bins + 2).map(|at| mel_to_hertz(most * at as f64 / (num_bins + 1) as f64)).collect();
    triangles(processor, &edges, |width| 2.0 / width)
}

/// A filter between each three of these edges in hertz, by its first frequency with a weight and the weights from there; `height`
/// is that of a triangle of such a width.
pub(crate) fn triangles(processor: &Processor, edges: &[f64], height: fn(f64) -> f64) -> Vec<(usize, Vec<f32>)> {
    let num_frequencies = processor.n_fft / 2 + 1;
    let nyquist = f64::from(processor.sampling_rate / 2);
    let hertz = |frequency: usize| nyquist * frequency as f64 / (num_frequencies - 1) as f64;
    triangles_of(&(0..num_frequencies).map(hertz).collect::<Vec<_>>(), edges, height)
}

/// The same of frequencies that are told as edges are.
pub(crate) fn triangles_of(frequencies: &[f64], edges: &[f64], height: fn(f64) -> f64) -> Vec<(usize, Vec<f32>)> {
    let filter = |edges: &[f64]| {
        let [low, middle, high] = [edges[0], edges[1], edges[2]];
        let weight = |frequency: &f64| {
            let triangle = ((frequency - low) / (middle - low)).min((high - frequency) / (high - middle)).max(0.0);
            (triangle * height(high - low)) as f32
        };
        let weights: Vec<_> = frequencies.iter().map(weight).collect();
        let first = weights.iter().position(|weight| *weight > 0.0).unwrap_or(0);
        let end = weights.iter().rposition(|weight| *weight > 0.0).map_or(first, |last| last + 1);
        (first, weights[first..end].to_vec())
    };
    edges.windows(3).map(filter).collect()
}

/// The highest frequency that has a mel bin.
const MAX_HERTZ: f64 = 8000.0;
/// From here on mels grow with the logarithm.
const LOG_HERTZ: f64 = 1000.0;
const LOG_MEL: f64 = 15.0;

fn log_step() -> f64 {
    6.4_f64.ln() / 27.0
}

fn hertz_to_mel(hertz: f64) -> f64 {
    if hertz < LOG_HERTZ { hertz * 3.0 / 200.0 } else { LOG_MEL + (hertz / LOG_HERTZ).ln() / log_step() }
}

fn mel_to_hertz(mel: f64) -> f64 {
    if mel < LOG_MEL { mel * 200.0 / 3.0 } else { LOG_HERTZ * (log_step() * (mel - LOG_MEL)).exp() }
}

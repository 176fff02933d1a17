//! Log-mel features of Gemma 4 and of Gemma 3n, by `Gemma4AudioFeatureExtractor` and `Gemma3nAudioFeatureExtractor`.

use realfft::RealFftPlanner;
use serde::Serialize;
use serde_json::Value;

use crate::{
    Features, Kind, Processor, SoundError,
    config::Fields,
    features::{hann, triangles},
};

/// What makes features of spectra. A sound is one chunk, as long as it is.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gemma4 {
    /// Samples of a frame, behind which a spectrum has zeros.
    pub frame_length: usize,
    /// The lowest and the highest frequency that have a mel bin.
    pub hertz: [f64; 2],
    /// How much of the sample before is taken away from each; 0: nothing.
    pub preemphasis: f64,
    /// The first sample of a frame has nothing before it (HTK).
    pub is_htk: bool,
    /// What samples are multiplied by.
    pub scale: f64,
    /// Added to each value before its logarithm, or the least of values.
    pub floor: f64,
    /// Taken away from each bin.
    pub means: Option<Vec<f64>>,
    /// By which each bin is divided.
    pub deviations: Option<Vec<f64>>,
    /// As Gemma 3n has them: nothing is before the first sample, zeros are behind the last, and values are no less than the
    /// floor, which is not added.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_gemma3n: bool,
}

/// Samples that a sound may have: 30 seconds.
const MAX_SAMPLES: usize = 480_000;

/// What a family takes where a file says nothing.
struct Usual {
    frame_ms: f64,
    hertz: [f64; 2],
    preemphasis: f64,
    floor: f64,
}

const GEMMA4: Usual = Usual { frame_ms: 20.0, hertz: [0.0, 8000.0], preemphasis: 0.0, floor: 1e-3 };
const GEMMA3N: Usual = Usual { frame_ms: 32.0, hertz: [125.0, 7600.0], preemphasis: 0.97, floor: 1e-5 };

const READ: [&str; 19] = [
    "dither",
    "feature_size",
    "fft_length",
    "fft_overdrive",
    "frame_length",
    "frame_length_ms",
    "hop_length",
    "hop_length_ms",
    "input_scale_factor",
    "max_frequency",
    "mel_floor",
    "min_frequency",
    "padding_side",
    "padding_value",
    "per_bin_mean",
    "per_bin_stddev",
    "preemphasis",
    "preemphasis_htk_flavor",
    "sampling_rate",
];

/// Of so many samples a sound of Gemma 3n has a multiple.
const MULTIPLE: usize = 128;

/// From the object of a model's file.
pub(crate) fn read(fields: &Fields<'_>, is_gemma3n: bool) -> Result<Processor, SoundError> {
    let usual = if is_gemma3n { GEMMA3N } else { GEMMA4 };
    fields.check(&READ)?;
    let (num_mel_bins, sampling_rate) = (fields.whole("feature_size", 128, [1, 1024])?, fields.rate()?);
    let samples = |key: &str, usual: f64| {
        let length = f64::from(sampling_rate) * fields.number(key, usual, [0.01, 1000.0])? / 1000.0;
        let length = length.round_ties_even() as usize;
        if (2..=1 << 14).contains(&length) {
            Ok(length)
        } else {
            Err(fields.error(format!("{key} gives {length} samples, and 2 to 16384 are wanted")))
        }
    };
    let (frame_length, hop_length) = (samples("frame_length_ms", usual.frame_ms)?, samples("hop_length_ms", 10.0)?);
    let n_fft = frame_length.next_power_of_two() << usize::from(fields.flag("fft_overdrive", is_gemma3n)?);
    // These follow from others, whatever a file says.
    for (key, wanted) in [("frame_length", frame_length), ("hop_length", hop_length), ("fft_length", n_fft)] {
        if let Some(given) = fields.value(key).filter(|given| given.as_u64() != Some(wanted as u64)) {
            return Err(fields.error(format!("{key} is {given}, and by the other keys it is {wanted}")));
        }
    }
    let nyquist = f64::from(sampling_rate / 2);
    let hertz = [
        fields.number("min_frequency", usual.hertz[0], [0.0, nyquist])?,
        fields.number("max_frequency", usual.hertz[1], [0.0, nyquist])?,
    ];
    if hertz[0] >= hertz[1] {
        return Err(fields.error(format!("min_frequency is {} and max_frequency {}", hertz[0], hertz[1])));
    }
    let means = bins(fields, "per_bin_mean", num_mel_bins, |value| value.abs() < 1e6)?;
    let deviations = bins(fields, "per_bin_stddev", num_mel_bins, |value| (1e-6..1e6).contains(&value.abs()))?;
    let gemma4 = Gemma4 {
        frame_length,
        hertz,
        preemphasis: fields.number("preemphasis", usual.preemphasis, [0.0, 1.0])?,
        is_htk: fields.flag("preemphasis_htk_flavor", true)?,
        scale: fields.number("input_scale_factor", 1.0, [-1e6, 1e6])?,
        floor: fields.number("mel_floor", usual.floor, [1e-30, 1e6])?,
        means,
        deviations,
        is_gemma3n,
    };
    if is_gemma3n && frame_length < MULTIPLE {
        let why = format!("frame_length_ms gives {frame_length} samples, and {MULTIPLE} or more are wanted");
        return Err(fields.error(why));
    }
    Ok(Processor {
        num_mel_bins,
        sampling_rate,
        n_fft,
        hop_length,
        max_seconds: None,
        are_chunks_apart: false,
        kind: Kind::Gemma4(gemma4),
    })
}

/// A list with a number of each mel bin.
fn bins(fields: &Fields<'_>, key: &str, count: usize, is_usable: fn(f64) -> bool) -> Result<Option<Vec<f64>>, SoundError> {
    let Some(value) = fields.value(key) else { return Ok(None) };
    let numbers = value.as_array().map(|values| values.iter().filter_map(Value::as_f64).collect::<Vec<_>>());
    let numbers = numbers.filter(|numbers| numbers.len() == count && numbers.iter().all(|number| is_usable(*number)));
    numbers.map(Some).ok_or_else(|| fields.error(format!("{key} must have {count} numbers that can be used")))
}

impl Gemma4 {
    /// Samples before the first, which are zeros.
    fn num_before(&self) -> usize {
        if self.is_gemma3n { 0 } else { self.frame_length / 2 }
    }

    /// Samples of a sound of so many, with those that are filled up behind.
    fn filled(&self, num_samples: usize) -> usize {
        if self.is_gemma3n { num_samples.next_multiple_of(MULTIPLE) } else { num_samples }
    }

    /// Samples without which there is no frame. A frame looks at one sample behind it.
    fn least(&self) -> usize {
        self.frame_length - self.num_before() + 1
    }

    /// Frames of so many samples: those that end within them.
    pub(crate) fn num_frames(&self, num_samples: usize, hop_length: usize) -> usize {
        self.filled(num_samples).checked_sub(self.least()).map_or(0, |rest| rest / hop_length + 1)
    }

    /// Frames of the longest sound.
    pub(crate) fn max_frames(&self, hop_length: usize) -> usize {
        self.num_frames(MAX_SAMPLES, hop_length)
    }

    /// The features of samples at the rate of the features.
    pub(crate) fn process(&self, processor: &Processor, samples: &[f32]) -> Result<Features, SoundError> {
        let Processor { num_mel_bins, sampling_rate, hop_length, n_fft, .. } = *processor;
        if samples.len() > MAX_SAMPLES {
            return Err(SoundError::TooLong { max_seconds: MAX_SAMPLES as u32 / sampling_rate });
        }
        let num_frames = self.num_frames(samples.len(), hop_length);
        if num_frames == 0 {
            return Err(SoundError::TooShort { num_samples: samples.len(), least: self.least() });
        }
        let edges: Vec<_> = {
            let [low, high] = self.hertz.map(|hertz| (1.0 + hertz / 700.0).ln());
            let edge = |at: usize| low + (high - low) * at as f64 / (num_mel_bins + 1) as f64;
            (0..num_mel_bins + 2).map(|at| 700.0 * (edge(at).exp() - 1.0)).collect()
        };
        let (window, filters) = (hann(self.frame_length), triangles(processor, &edges, |_| 1.0));
        let transform = RealFftPlanner::<f64>::new().plan_fft_forward(n_fft);
        let (mut frame, mut spectrum) = (transform.make_input_vec(), transform.make_output_vec());
        let mut values = Vec::with_capacity(num_frames * num_mel_bins);
        let sample = |at: usize| {
            let sample = at.checked_sub(self.num_before()).and_then(|at| samples.get(at)).copied().unwrap_or_default();
            f64::from(sample) * self.scale
        };
        for number in 0..num_frames {
            frame.fill(0.0);
            let first = number * hop_length;
            for (at, (value, window)) in frame.iter_mut().zip(&window).enumerate() {
                *value = self.emphasized(at, |at| sample(first + at)) * window;
            }
            // The lengths are those that it was made for.
            let done = transform.process(&mut frame, &mut spectrum);
            debug_assert!(done.is_ok());
            for (bin, (first, weights)) in filters.iter().enumerate() {
                let sum: f64 =
                    weights.iter().zip(&spectrum[*first..]).map(|(weight, value)| f64::from(*weight) * value.norm()).sum();
                let mean = self.means.as_ref().map_or(0.0, |means| means[bin]);
                let deviation = self.deviations.as_ref().map_or(1.0, |deviations| deviations[bin]);
                let value = if self.is_gemma3n { sum.max(self.floor) } else { sum + self.floor };
                values.push(((value.ln() - mean) / deviation) as f32);
            }
        }
        Ok(Features { num_mel_bins, num_frames, chunks: vec![values], lens: vec![num_frames] })
    }

    /// A sample of a frame, less a part of the one before it.
    fn emphasized(&self, at: usize, sample: impl Fn(usize) -> f64) -> f64 {
        match (self.preemphasis > 0.0, self.is_htk) {
            (false, _) => sample(at),
            (true, true) if at == 0 => sample(0) * (1.0 - self.preemphasis),
            (true, true) => sample(at) - self.preemphasis * sample(at - 1),
            (true, false) => sample(at + 1) - self.preemphasis * sample(at),
        }
    }
}

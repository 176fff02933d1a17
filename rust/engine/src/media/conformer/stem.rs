//! What comes before the layers: two convolutions over frames and mel bins, as products over squares of neighbours.

use std::ops::Range;

use device::{Backend, Linear, Norm, NormKind};
use images::Tile;

use super::{
    Reader,
    config::{ConformerConfig, ConformerStyle},
    product,
};
use crate::{EngineError, media::tower::MAX_ROWS};

/// Places along a side of the square that a convolution sees.
const SIDE: usize = 3;
/// Places from one output to the next.
const STRIDE: usize = 2;

/// Places that so many become behind a convolution.
pub(super) fn halved(num_places: usize) -> usize {
    num_places.div_ceil(STRIDE)
}

/// Both convolutions, and the matrix behind them.
pub(super) struct Stem {
    num_mel_bins: usize,
    style: ConformerStyle,
    convolutions: [(Linear, Norm); 2],
    input: Linear,
}

impl ConformerConfig {
    /// Columns of the products before the layers.
    pub(super) fn stem_columns(&self) -> [usize; 3] {
        let [first, second] = self.channels;
        [SIDE * SIDE, SIDE * SIDE * first, halved(halved(self.num_mel_bins)) * second]
    }
}

impl Stem {
    pub(super) fn new(reader: &mut Reader<'_, '_>, config: &ConformerConfig) -> Result<Self, EngineError> {
        let mut convolution = |number: usize, channels: usize| {
            let [conv, norm] = reader.names.convolutions[number].map(|name| format!("{}{name}", reader.place));
            let rows = config.channels[number];
            let linear = reader.weights.over_squares(&conv, [rows, channels], SIDE)?;
            let norm = reader.weights.norm(&norm, rows, (NormKind::Layer, config.stem_eps, 0.0))?;
            Ok::<_, EngineError>((linear, norm))
        };
        let convolutions = [convolution(0, 1)?, convolution(1, config.channels[0])?];
        let [_, _, columns] = config.stem_columns();
        let input = reader.linear(reader.names.input, [config.hidden_size, columns])?;
        Ok(Self { num_mel_bins: config.num_mel_bins, style: config.style, convolutions, input })
    }

    /// `[places, hidden_size]`.
    pub(super) fn run(&self, backend: &dyn Backend, sound: &Tile) -> Result<Vec<f32>, EngineError> {
        // Of a convolution that sees what is behind a place in time alone, none before it.
        let before = usize::from(self.style == ConformerStyle::Gemma4);
        let (mut plane, mut channels) = (Plane { height: sound.width, width: self.num_mel_bins, before }, 1);
        let mut values = sound.pixels.clone();
        for (linear, norm) in &self.convolutions {
            let places = halved(plane.height) * halved(plane.width);
            let mut out = Vec::with_capacity(places * linear.out_features);
            for first in (0..places).step_by(MAX_ROWS) {
                let rows = plane.squares(&values, channels, first..places.min(first + MAX_ROWS), linear.in_features);
                out.extend(product(backend, linear, &rows)?);
            }
            match self.style {
                ConformerStyle::Gemma4 => out.chunks_exact_mut(linear.out_features).for_each(|row| norm.apply(row)),
                ConformerStyle::Gemma3n { .. } => norm_by_time(norm, halved(plane.width), &mut out),
            }
            for value in &mut out {
                *value = value.max(0.0);
            }
            (values, channels) = (out, linear.out_features);
            plane = Plane { height: halved(plane.height), width: halved(plane.width), before };
        }
        product(backend, &self.input, &values)
    }
}

/// Places by frame and by mel bin.
struct Plane {
    height: usize,
    width: usize,
    /// Frames that the square of a place begins before it.
    before: usize,
}

impl Plane {
    /// What each of these places of the output sees of `[height, width, channels]`, row by row of its square, with zeros beyond
    /// the edges and up to `columns`.
    fn squares(&self, values: &[f32], channels: usize, places: Range<usize>, columns: usize) -> Vec<f32> {
        let mut rows = vec![0.0; places.len() * columns];
        let inside = |at: usize, before: usize, len: usize| at.checked_sub(before).filter(|at| *at < len);
        for (place, row) in places.zip(rows.chunks_exact_mut(columns)) {
            let (y, x) = (place / halved(self.width), place % halved(self.width));
            for (square, out) in row.chunks_exact_mut(channels).take(SIDE * SIDE).enumerate() {
                let seen = inside(y * STRIDE + square / SIDE, self.before, self.height).zip(inside(
                    x * STRIDE + square % SIDE,
                    1,
                    self.width,
                ));
                if let Some((y, x)) = seen {
                    out.copy_from_slice(&values[(y * self.width + x) * channels..][..channels]);
                }
            }
        }
        rows
    }
}

/// Norms the values of all mel bins and channels at a place in time, `[places, mel bins, channels]`, by the mean and the variance
/// of those up to it, where the variance of earlier ones is from the mean as it was then.
fn norm_by_time(norm: &Norm, num_bins: usize, values: &mut [f32]) {
    let channels = norm.weight.len();
    let (mut sum, mut squares, mut count) = (0.0, 0.0, 0.0);
    for place in values.chunks_exact_mut(num_bins * channels) {
        count += place.len() as f64;
        sum += place.iter().map(|value| f64::from(*value)).sum::<f64>();
        let mean = sum / count;
        squares += place.iter().map(|value| (f64::from(*value) - mean).powi(2)).sum::<f64>();
        let factor = (squares / count + f64::from(norm.eps)).sqrt().recip();
        for row in place.chunks_exact_mut(channels) {
            for (value, weight) in row.iter_mut().zip(norm.weight.iter()) {
                *value = ((f64::from(*value) - mean) * factor) as f32 * weight;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `Gemma3nAudioCumulativeGroupNorm` of Transformers has it, of values 1 and 3, then 5 and 11.
    #[test]
    fn a_place_is_normed_by_all_up_to_it() {
        let norm = Norm { kind: NormKind::Layer, weight: vec![1.0, 2.0].into(), bias: None, eps: 0.0 };
        let mut values = [1.0, 3.0, 5.0, 11.0];
        norm_by_time(&norm, 1, &mut values);
        // The second mean is 5 and the squares are 1, 1, 0 and 36.
        let last = (6.0 / (38.0_f64 / 4.0).sqrt()) as f32 * 2.0;
        assert!(values[..3] == [-1.0, 2.0, 0.0] && (values[3] - last).abs() < 1e-6, "{values:?}, and {last} at the end");
    }

    #[test]
    fn each_place_sees_its_square_and_zeros_beyond_the_edges() {
        let plane = Plane { height: 2, width: 3, before: 1 };
        let values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let rows = plane.squares(&values, 1, 0..2, 10);
        assert_eq!(rows[..10], [0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 0.0, 4.0, 5.0, 0.0]);
        assert_eq!(rows[10..], [0.0, 0.0, 0.0, 2.0, 3.0, 0.0, 5.0, 6.0, 0.0, 0.0]);
        let rows = Plane { before: 0, ..plane }.squares(&values, 1, 0..1, 10);
        assert_eq!(rows[..9], [0.0, 1.0, 2.0, 0.0, 4.0, 5.0, 0.0, 0.0, 0.0]);
        assert_eq!([halved(1), halved(4), halved(5)], [1, 2, 3]);
    }
}

//! What comes before the layers: two convolutions over frames and mel bins, as products over squares of neighbours.

use std::ops::Range;

use device::{Backend, Linear, Norm, NormKind};
use images::Tile;

use super::{Reader, product};
use crate::{
    EngineError,
    media::{config::ConformerConfig, tower::MAX_ROWS},
};

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
            let named = |part: &str| reader.named(&format!("subsample_conv_projection.layer{number}.{part}"));
            let (conv, norm, rows) = (named("conv"), named("norm"), config.channels[number]);
            let linear = reader.weights.over_squares(&conv, [rows, channels], SIDE)?;
            let norm = reader.weights.norm(&norm, rows, (NormKind::Layer, config.eps, 0.0))?;
            Ok::<_, EngineError>((linear, norm))
        };
        let convolutions = [convolution(0, 1)?, convolution(1, config.channels[0])?];
        let [_, _, columns] = config.stem_columns();
        let input = reader.linear("subsample_conv_projection.input_proj_linear", [config.hidden_size, columns])?;
        Ok(Self { num_mel_bins: config.num_mel_bins, convolutions, input })
    }

    /// `[places, hidden_size]`.
    pub(super) fn run(&self, backend: &dyn Backend, sound: &Tile) -> Result<Vec<f32>, EngineError> {
        let (mut plane, mut channels) = (Plane { height: sound.width, width: self.num_mel_bins }, 1);
        let mut values = sound.pixels.clone();
        for (linear, norm) in &self.convolutions {
            let places = halved(plane.height) * halved(plane.width);
            let mut out = Vec::with_capacity(places * linear.out_features);
            for first in (0..places).step_by(MAX_ROWS) {
                let rows = plane.squares(&values, channels, first..places.min(first + MAX_ROWS), linear.in_features);
                out.extend(product(backend, linear, &rows)?);
            }
            for row in out.chunks_exact_mut(linear.out_features) {
                norm.apply(row);
                for value in row {
                    *value = value.max(0.0);
                }
            }
            (values, channels) = (out, linear.out_features);
            plane = Plane { height: halved(plane.height), width: halved(plane.width) };
        }
        product(backend, &self.input, &values)
    }
}

/// Places by frame and by mel bin.
struct Plane {
    height: usize,
    width: usize,
}

impl Plane {
    /// What each of these places of the output sees of `[height, width, channels]`, row by row of its square, with zeros beyond
    /// the edges and up to `columns`.
    fn squares(&self, values: &[f32], channels: usize, places: Range<usize>, columns: usize) -> Vec<f32> {
        let mut rows = vec![0.0; places.len() * columns];
        let inside = |at: usize, d: usize, len: usize| (at * STRIDE + d).checked_sub(1).filter(|at| *at < len);
        for (place, row) in places.zip(rows.chunks_exact_mut(columns)) {
            let (y, x) = (place / halved(self.width), place % halved(self.width));
            for (square, out) in row.chunks_exact_mut(channels).take(SIDE * SIDE).enumerate() {
                let seen = inside(y, square / SIDE, self.height).zip(inside(x, square % SIDE, self.width));
                if let Some((y, x)) = seen {
                    out.copy_from_slice(&values[(y * self.width + x) * channels..][..channels]);
                }
            }
        }
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_place_sees_its_square_and_zeros_beyond_the_edges() {
        let plane = Plane { height: 2, width: 3 };
        let values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let rows = plane.squares(&values, 1, 0..2, 10);
        assert_eq!(rows[..10], [0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 0.0, 4.0, 5.0, 0.0]);
        assert_eq!(rows[10..], [0.0, 0.0, 0.0, 2.0, 3.0, 0.0, 5.0, 6.0, 0.0, 0.0]);
        assert_eq!([halved(1), halved(4), halved(5)], [1, 2, 3]);
    }
}

//! What comes before the layers of a tower that hears: two convolutions over the frames of a chunk, as products over frames that
//! lie side by side.

use std::ops::Range;

use device::{Activation, Backend, GateUpArgs, Linear, StepMetadata, Tensor};
use images::Tile;

use super::{config::Frames, stored, tower::MAX_ROWS, weights::TowerWeights};
use crate::EngineError;

/// Places that a convolution sees at once.
pub(super) const WIDTH: usize = 3;
/// Frames from one output of the second to the next.
pub(super) const STRIDE: usize = 2;

/// Both convolutions, loaded.
pub(super) struct Convolutions {
    num_mel_bins: usize,
    first: Linear,
    second: Linear,
}

impl Convolutions {
    /// `named` gives the whole name of a weight of the tower.
    pub(super) fn new(
        weights: &mut TowerWeights<'_>,
        frames: &Frames,
        hidden_size: usize,
        named: &dyn Fn(&str) -> String,
    ) -> Result<Self, EngineError> {
        let [first, second] = frames.names.map(named);
        Ok(Self {
            num_mel_bins: frames.num_mel_bins,
            first: weights.over_time(&first, [hidden_size, frames.num_mel_bins], WIDTH)?,
            second: weights.over_time(&second, [hidden_size; 2], WIDTH)?,
        })
    }

    /// Hidden states of a chunk, `[frames / 2, hidden_size]`, of its features, `[frames, mel bins]`.
    pub(super) fn run(&self, backend: &dyn Backend, chunk: &Tile) -> Result<Vec<f32>, EngineError> {
        let first = convolved(backend, &self.first, (&chunk.pixels, self.num_mel_bins), 1)?;
        convolved(backend, &self.second, (&first, self.first.out_features), STRIDE)
    }
}

/// GELU of a convolution over rows of `cols` values, zeros before and behind them, at every `stride`th place.
fn convolved(
    backend: &dyn Backend,
    linear: &Linear,
    (rows, cols): (&[f32], usize),
    stride: usize,
) -> Result<Vec<f32>, EngineError> {
    let num_out = (rows.len() / cols).div_ceil(stride);
    let mut values = Vec::with_capacity(num_out * linear.out_features);
    for first in (0..num_out).step_by(MAX_ROWS) {
        let places = first..num_out.min(first + MAX_ROWS);
        let x = stored(backend, &unfolded(rows, cols, stride, places.clone()), linear.in_features)?;
        let mut out: Tensor = backend.alloc(places.len(), linear.out_features)?;
        let args =
            GateUpArgs { x: &x, norm: None, gate: None, up: linear, activation: Activation::Gelu, out: &mut out, next: None };
        backend.gate_up(args, &StepMetadata::default());
        backend.fetch(&mut out);
        values.extend_from_slice(out.as_slice());
    }
    Ok(values)
}

/// The rows that each of these places sees, side by side, `[places, WIDTH * cols]`.
fn unfolded(rows: &[f32], cols: usize, stride: usize, places: Range<usize>) -> Vec<f32> {
    let mut values = Vec::with_capacity(places.len() * WIDTH * cols);
    for place in places {
        for at in 0..WIDTH {
            // One row lies before the first.
            match (place * stride + at).checked_sub(WIDTH / 2).and_then(|row| rows.get(row * cols..(row + 1) * cols)) {
                Some(row) => values.extend_from_slice(row),
                None => values.resize(values.len() + cols, 0.0),
            }
        }
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_place_sees_its_neighbours_and_zeros_beyond_the_ends() {
        let rows = [1.0, 10.0, 2.0, 20.0, 3.0, 30.0, 4.0, 40.0];
        let first = [0.0, 0.0, 1.0, 10.0, 2.0, 20.0];
        assert_eq!(unfolded(&rows, 2, 1, 0..1), first);
        assert_eq!(unfolded(&rows, 2, 1, 3..4), [3.0, 30.0, 4.0, 40.0, 0.0, 0.0]);
        assert_eq!(unfolded(&rows, 2, 2, 0..2)[..6], first);
        assert_eq!(unfolded(&rows, 2, 2, 1..2), [2.0, 20.0, 3.0, 30.0, 4.0, 40.0]);
    }
}

//! What comes before the layers: convolutions over frames and mel bins, each of which takes every other place of both. All but
//! the first are of each channel by itself, with a product behind.

use std::ops::Range;

use device::{Activation, Backend, Constant, Linear};
use images::Tile;

use super::{Reader, SpeechConfig};
use crate::{
    EngineError,
    media::conformer::{by_rows, product},
};

/// Places along a side of the square that a convolution sees.
const SIDE: usize = 3;
/// Places in time that are computed at once: what comes before them is much larger.
const BLOCK: usize = 16;

impl SpeechConfig {
    /// Mel bins behind so many convolutions.
    fn bins(&self, level: u32) -> usize {
        self.num_mel_bins.div_ceil(1 << level)
    }

    fn num_levels(&self) -> u32 {
        self.reduction.ilog2()
    }

    /// Columns of the product behind the convolutions.
    pub(super) fn stem_columns(&self) -> usize {
        self.channels.saturating_mul(self.bins(self.num_levels()))
    }

    /// Values that there are at once at most.
    pub(super) fn stem_values(&self) -> usize {
        let first = (BLOCK * self.reduction / 2 + self.reduction) * self.bins(1);
        first.saturating_mul(3 * self.channels + 16)
    }
}

/// A convolution of each channel by itself, and the product behind it.
struct Depthwise {
    /// `[places of the square, channels]`.
    kernel: Vec<f32>,
    bias: Constant,
    point: Linear,
}

/// The convolutions, and the matrix behind them.
pub(super) struct Stem {
    config: SpeechConfig,
    mean: Constant,
    inverse_deviation: Constant,
    first: Linear,
    others: Vec<Depthwise>,
    output: Linear,
}

impl Stem {
    pub(super) fn new(reader: &mut Reader<'_, '_>, config: &SpeechConfig) -> Result<Self, EngineError> {
        let channels = config.channels;
        let mut others = Vec::new();
        for level in 1..config.num_levels() {
            // An activation has a number too.
            let number = 3 * level - 1;
            let stored = reader.constant(&format!("embed.conv.{number}.weight"), &[channels, 1, SIDE, SIDE])?;
            let area = SIDE * SIDE;
            let at = |at: usize| stored[at % channels * area + at / channels];
            let point = reader.name(&format!("embed.conv.{}", number + 1));
            others.push(Depthwise {
                kernel: (0..area * channels).map(at).collect(),
                bias: reader.constant(&format!("embed.conv.{number}.bias"), &[channels])?,
                point: reader.weights.convolution(&point, [channels; 2], 1)?,
            });
        }
        let first = reader.name("embed.conv.0");
        Ok(Self {
            mean: reader.constant("encoder_embedding.global_mean", &[config.num_mel_bins])?,
            inverse_deviation: reader.constant("encoder_embedding.global_invstd", &[config.num_mel_bins])?,
            first: reader.weights.over_squares(&first, [channels, 1], SIDE)?,
            others,
            output: reader.linear("embed.out", [config.hidden_size, config.stem_columns()])?,
            config: config.clone(),
        })
    }

    /// States of some places of a sound, `[places, hidden_size]`.
    pub(super) fn run(&self, backend: &dyn Backend, sound: &Tile, places: Range<usize>) -> Result<Vec<f32>, EngineError> {
        let (channels, level) = (self.config.channels, self.config.num_levels());
        let bins = self.config.bins(level);
        let mut states = Vec::with_capacity(places.len() * self.config.hidden_size);
        for first in places.clone().step_by(BLOCK) {
            let values = self.rows(backend, sound, level, first..places.end.min(first + BLOCK))?;
            // The matrix has all bins of a channel together.
            let row = |row: &[f32]| {
                (0..channels)
                    .flat_map(|channel| (0..bins).map(move |bin| bin * channels + channel))
                    .map(|at| row[at])
                    .collect::<Vec<_>>()
            };
            let rows: Vec<f32> = values.chunks_exact(bins * channels).flat_map(row).collect();
            states.extend(product(backend, &self.output, &rows)?);
        }
        Ok(states)
    }

    /// Rows in time behind so many convolutions, `[rows, bins, channels]`.
    fn rows(&self, backend: &dyn Backend, sound: &Tile, level: u32, rows: Range<usize>) -> Result<Vec<f32>, EngineError> {
        let (channels, bins) = (self.config.channels, self.config.bins(level));
        // What the rows see, as far as there is any.
        let height = sound.width.div_ceil(1 << (level - 1));
        let seen = (2 * rows.start).saturating_sub(1)..height.min(2 * rows.end);
        let mut out = if level == 1 {
            let squares = self.squares(sound, rows, bins);
            product(backend, &self.first, &squares)?
        } else {
            let before = self.rows(backend, sound, level - 1, seen.clone())?;
            let own = &self.others[level as usize - 2];
            let mut out = vec![0.0; rows.len() * bins * channels];
            let width = self.config.bins(level - 1);
            by_rows(backend, &mut out, channels, |place, out| {
                let (y, x) = (rows.start + place / bins, place % bins);
                out.copy_from_slice(&own.bias);
                for (square, kernel) in own.kernel.chunks_exact(channels).enumerate() {
                    let Some((y, x)) = within((y, x), square, (height, width)) else { continue };
                    let row = &before[((y - seen.start) * width + x) * channels..][..channels];
                    out.iter_mut().zip(row.iter().zip(kernel)).for_each(|(out, (x, weight))| *out += x * weight);
                }
            });
            product(backend, &own.point, &out)?
        };
        activate(&mut out, self.config.stem_activation);
        Ok(out)
    }

    /// What each place of these rows sees of the features, with zeros beyond the edges and up to the columns of the first matrix.
    fn squares(&self, sound: &Tile, rows: Range<usize>, bins: usize) -> Vec<f32> {
        let (columns, width) = (self.first.in_features, self.config.num_mel_bins);
        let mut squares = vec![0.0; rows.len() * bins * columns];
        for (place, out) in squares.chunks_exact_mut(columns).enumerate() {
            let at = (rows.start + place / bins, place % bins);
            for (square, out) in out.iter_mut().take(SIDE * SIDE).enumerate() {
                if let Some((y, x)) = within(at, square, (sound.width, width)) {
                    *out = (sound.pixels[y * width + x] - self.mean[x]) * self.inverse_deviation[x];
                }
            }
        }
        squares
    }
}

/// The place that a place of the next level sees in a place of its square; `None` beyond the edges.
fn within((y, x): (usize, usize), square: usize, (height, width): (usize, usize)) -> Option<(usize, usize)> {
    let inside = |at: usize, d: usize, len: usize| (2 * at + d).checked_sub(1).filter(|at| *at < len);
    inside(y, square / SIDE, height).zip(inside(x, square % SIDE, width))
}

fn activate(values: &mut [f32], activation: Activation) {
    for value in values {
        *value = activation.apply(*value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_sees_its_square_as_far_as_there_is_one() {
        let seen: Vec<_> = (0..9).map(|square| within((1, 0), square, (3, 2))).collect();
        let at = |y, x| Some((y, x));
        assert_eq!(seen, [None, at(1, 0), at(1, 1), None, at(2, 0), at(2, 1), None, None, None]);
    }
}

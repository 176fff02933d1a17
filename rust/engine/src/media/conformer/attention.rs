//! Attention to what is near, with keys of distances beside those of places (Dai et al. 2019, arXiv:1901.02860).

use device::{Backend, Linear};

use super::{
    Bounded, Reader, by_rows,
    config::{ConformerConfig, ConformerStyle},
    product,
};
use crate::EngineError;

/// The slowest of the waves that tell distances.
const MAX_TIMESCALE: f64 = 10_000.0;

pub(super) struct Attention {
    q: Bounded,
    k: Bounded,
    v: Bounded,
    output: Bounded,
    /// Makes keys of distances.
    relative: Linear,
    /// Those, as waves, `[distances, hidden_size]`.
    waves: Vec<f32>,
    /// What each element of a head of the queries is multiplied by.
    q_scale: Vec<f32>,
    /// The same of the keys of places.
    k_scale: f32,
    num_heads: usize,
    /// Places before its own that a distance reaches.
    left: usize,
    /// Places that are seen before its own, and behind.
    seen: [usize; 2],
    cap: f32,
}

impl Attention {
    pub(super) fn new(reader: &mut Reader<'_, '_>, config: &ConformerConfig) -> Result<Self, EngineError> {
        let (hidden, head_dim) = (config.hidden_size, config.hidden_size / config.num_heads);
        let names = reader.names;
        let [q, k, v, output] = names.attention.map(|name| reader.bounded(name, [hidden; 2]));
        let (q, k, v, output) = (q?, k?, v?, output?);
        let relative = reader.linear(names.relative, [hidden; 2])?;
        let scales = reader.constant(names.scale, &[head_dim])?;
        let scale = (head_dim as f64).powf(-0.5) / std::f64::consts::LN_2;
        let softplus = |x: f64| if x > 20.0 { x } else { x.exp().ln_1p() };
        let factor = |value: f32| if names.is_scale_soft { f64::from(value) } else { softplus(f64::from(value)) };
        let q_scale = scales.iter().map(|value| (scale * factor(*value)) as f32).collect();
        let (num_heads, left, right) = (config.num_heads, config.left, config.right);
        let (k_scale, distances, seen) = match config.style {
            ConformerStyle::Gemma4 => {
                let k_scale = (softplus(1.0) / std::f64::consts::LN_2) as f32;
                // The farthest of those that a distance reaches are not seen, and neither is one behind where none is reached.
                let seen = [left - 1, right.saturating_sub(1)];
                (k_scale, 0..=((config.chunk_size + left + right) / 2) as isize, seen)
            }
            ConformerStyle::Gemma3n { .. } => (1.0, -(right as isize)..=left as isize, [left, right]),
        };
        let waves = waves(hidden, distances);
        Ok(Self { q, k, v, output, relative, waves, q_scale, k_scale, num_heads, left, seen, cap: config.score_cap })
    }

    /// `[places, hidden_size]`.
    pub(super) fn run(&self, backend: &dyn Backend, x: Vec<f32>) -> Result<Vec<f32>, EngineError> {
        let k = self.k.run(backend, x.clone())?;
        let v = self.v.run(backend, x.clone())?;
        let mut q = self.q.run(backend, x)?;
        let relative = product(backend, &self.relative, &self.waves)?;
        let hidden = self.output.linear.in_features;
        for head in q.chunks_exact_mut(self.q_scale.len()) {
            head.iter_mut().zip(&self.q_scale).for_each(|(q, scale)| *q *= scale);
        }
        let mut out = vec![0.0; q.len()];
        let rows = Rows { q: &q, k: &k, v: &v, relative: &relative, hidden };
        by_rows(backend, &mut out, hidden, |place, out| {
            for (head, out) in out.chunks_exact_mut(hidden / self.num_heads).enumerate() {
                self.head(&rows, place, head, out);
            }
        });
        self.output.run(backend, out)
    }

    /// What a head of a place takes from those that it sees.
    fn head(&self, rows: &Rows<'_>, place: usize, head: usize, out: &mut [f32]) {
        let num_places = rows.q.len() / rows.hidden;
        let [before, behind] = self.seen;
        let seen = place.saturating_sub(before)..num_places.min(place + behind + 1);
        let head_dim = out.len();
        let part = |row: usize| row * rows.hidden + head * head_dim..row * rows.hidden + (head + 1) * head_dim;
        let q = &rows.q[part(place)];
        let mut scores: Vec<f32> = seen
            .clone()
            .map(|other| {
                let mut score = dot(q, &rows.k[part(other)]) * self.k_scale;
                let distance = self.left + other - place;
                if distance < rows.relative.len() / rows.hidden {
                    score += dot(q, &rows.relative[part(distance)]);
                }
                (score / self.cap).tanh() * self.cap
            })
            .collect();
        let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        for score in &mut scores {
            *score = (*score - most).exp();
        }
        let sum: f32 = scores.iter().sum();
        for (other, score) in seen.zip(scores) {
            out.iter_mut().zip(&rows.v[part(other)]).for_each(|(out, v)| *out += score / sum * v);
        }
    }
}

/// `[places, hidden]` each, and those of distances.
struct Rows<'a> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    relative: &'a [f32],
    hidden: usize,
}

/// Sums that a processor adds up beside each other.
const LANES: usize = 16;

pub(in crate::media) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (of_a, of_b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest: f32 = of_a.remainder().iter().zip(of_b.remainder()).map(|(a, b)| a * b).sum();
    let mut sums = [0.0; LANES];
    for (a, b) in of_a.zip(of_b) {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum += a * b);
    }
    sums.iter().sum::<f32>() + rest
}

/// Sines and cosines of distances, the largest first, `[distances, hidden_size]`.
fn waves(hidden_size: usize, distances: std::ops::RangeInclusive<isize>) -> Vec<f32> {
    let half = hidden_size / 2;
    let step = MAX_TIMESCALE.ln() / half.saturating_sub(1).max(1) as f64;
    let angle = |distance: isize, wave: usize| distance as f64 * (-step * wave as f64).exp();
    let row = |distance: isize| {
        let angles = move || (0..half).map(move |wave| angle(distance, wave));
        angles().map(f64::sin).chain(angles().map(f64::cos)).map(|value| value as f32).collect::<Vec<_>>()
    };
    distances.rev().flat_map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_have_all_lanes_and_the_rest() {
        let values: Vec<f32> = (0..37).map(|i| i as f32).collect();
        assert_eq!(dot(&values, &values), 16_206.0);
        assert_eq!(dot(&values[..3], &values[..3]), 5.0);
    }

    #[test]
    fn distances_are_sines_and_cosines() {
        let rows = waves(4, 0..=1);
        let slow = 1e-4_f32;
        assert_eq!(rows, [1.0_f32.sin(), slow.sin(), 1.0_f32.cos(), slow.cos(), 0.0, 0.0, 1.0, 1.0]);
    }
}

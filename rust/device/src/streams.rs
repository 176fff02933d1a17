//! What a model with several residual streams does between products (`AltUp`, arXiv:2301.13310; Gemma 3n): its layers run on
//! one of them, the active one. Before a layer all are predicted by a mixture of each other, and after it they are corrected by
//! what the layer has changed; a router says how, for each token. Its feed-forward networks may keep the largest values only.

use crate::{Constant, Norm, Tensor};

/// Largest number of streams.
pub const MAX_STREAMS: usize = 8;

/// Columns that are mixed at once.
const CHUNK: usize = 64;

/// Arguments of [`StreamPhases::predict`] and [`StreamPhases::correct`].
pub struct StreamArgs<'a> {
    /// `[num_tokens, num_streams]`: what a router made of the hidden state; the tangent is taken here.
    pub routed: &'a Tensor,
    /// What makes coefficients of it: `[num_streams * num_streams, num_streams]` to predict, where row `to * num_streams + from`
    /// is of what goes from a stream to another, and `[num_streams, num_streams]` to correct.
    pub coefficients: &'a Constant,
    /// `[num_tokens, hidden_size]` each.
    pub streams: &'a mut [Tensor],
    /// Which of them the layers run on.
    pub active: usize,
    /// `[num_tokens, hidden_size]`: the active stream, as a layer reads it and changes it.
    pub hidden: &'a mut Tensor,
}

/// Phases that only models with several residual streams need. What is given here are plain loops, for a backend whose tensors
/// lie on the host.
pub trait StreamPhases {
    /// Adds to each stream a mixture of all of them; `hidden` becomes the active one.
    fn predict(&self, args: StreamArgs<'_>) {
        let StreamArgs { routed, coefficients, streams, active, hidden } = args;
        let count = streams.len();
        hidden.set_rows(routed.rows());
        for row in 0..routed.rows() {
            let mut factors = [0.0; MAX_STREAMS * MAX_STREAMS];
            mix(routed.row(row), coefficients, &mut factors[..count * count]);
            for first in (0..hidden.cols()).step_by(CHUNK) {
                let columns = first..hidden.cols().min(first + CHUNK);
                let mut before = [[0.0; CHUNK]; MAX_STREAMS];
                for (before, stream) in before.iter_mut().zip(&*streams) {
                    before[..columns.len()].copy_from_slice(&stream.row(row)[columns.clone()]);
                }
                for (stream, factors) in streams.iter_mut().zip(factors.chunks_exact(count)) {
                    let stream = &mut stream.row_mut(row)[columns.clone()];
                    for (before, factor) in before.iter().zip(factors) {
                        stream.iter_mut().zip(before).for_each(|(x, before)| *x += before * factor);
                    }
                }
            }
            hidden.row_mut(row).copy_from_slice(streams[active].row(row));
        }
    }

    /// Adds to each stream what `hidden` is more than the active one, times one and a coefficient; `hidden` becomes the active
    /// one, times `scale`, `[hidden_size]`, if there is one.
    fn correct(&self, args: StreamArgs<'_>, scale: Option<&Constant>) {
        let StreamArgs { routed, coefficients, streams, active, hidden } = args;
        let count = streams.len();
        for row in 0..routed.rows() {
            let mut factors = [0.0; MAX_STREAMS];
            mix(routed.row(row), coefficients, &mut factors[..count]);
            let hidden = hidden.row_mut(row);
            hidden.iter_mut().zip(streams[active].row(row)).for_each(|(x, predicted)| *x -= predicted);
            for (stream, factor) in streams.iter_mut().zip(factors) {
                stream.row_mut(row).iter_mut().zip(&*hidden).for_each(|(x, change)| *x += change * (factor + 1.0));
            }
            hidden.copy_from_slice(streams[active].row(row));
            if let Some(scale) = scale {
                hidden.iter_mut().zip(&scale[..]).for_each(|(x, scale)| *x *= scale);
            }
        }
    }

    /// `out = norm(x)`, or without a norm `out = x`; sets out's rows.
    fn copy(&self, x: &Tensor, norm: Option<&Norm>, out: &mut Tensor) {
        out.set_rows(x.rows());
        for row in 0..x.rows() {
            let out = out.row_mut(row);
            out.copy_from_slice(x.row(row));
            if let Some(norm) = norm {
                norm.apply(out);
            }
        }
    }

    /// `x = (x + added) * scale`.
    fn add(&self, x: &mut Tensor, added: &Tensor, scale: f32) {
        x.as_mut_slice().iter_mut().zip(added.as_slice()).for_each(|(x, added)| *x = (*x + added) * scale);
    }

    /// Gives each row of `x` the root mean square of the same row of `like`; that of `x` counts as 1e-5's root at least.
    fn match_size(&self, x: &mut Tensor, like: &Tensor) {
        for row in 0..x.rows() {
            let (wanted, there) = (mean_square(like.row(row)).sqrt(), mean_square(x.row(row)).max(1e-5).sqrt());
            x.row_mut(row).iter_mut().for_each(|x| *x = (f64::from(*x) * wanted / there) as f32);
        }
    }

    /// Takes from each value of a row the mean and so many standard deviations; what is then negative becomes 0. So of normally
    /// distributed values the largest are left.
    fn keep_largest(&self, x: &mut Tensor, deviations: f32) {
        for row in 0..x.rows() {
            let values = x.row_mut(row);
            let count = values.len() as f64;
            let mean = values.iter().map(|x| f64::from(*x)).sum::<f64>() / count;
            let variance = values.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / count;
            let cutoff = (mean + variance.sqrt() * f64::from(deviations)) as f32;
            for x in values {
                *x = if *x < cutoff { 0.0 } else { *x - cutoff };
            }
        }
    }
}

/// `out = coefficients @ tanh(routed)`.
fn mix(routed: &[f32], coefficients: &[f32], out: &mut [f32]) {
    for (out, coefficients) in out.iter_mut().zip(coefficients.chunks_exact(routed.len())) {
        *out = coefficients.iter().zip(routed).map(|(a, x)| f64::from(*a) * f64::from(*x).tanh()).sum::<f64>() as f32;
    }
}

fn mean_square(row: &[f32]) -> f64 {
    row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / row.len() as f64
}

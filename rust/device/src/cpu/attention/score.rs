//! The scores of a tile's keys, and what softmax makes of them.
#![allow(unsafe_op_in_unsafe_fn)] // One contract for all, stated on `kernel::attend`.
#![allow(clippy::inline_always, clippy::needless_range_loop)] // Tier code must be inlined; counted loops over registers unroll.

use std::ops::Range;

use crate::{
    AttentionParams,
    cpu::simd::{Simd, exp, tanh},
};

use super::{TILE_KEYS, product::Product, tile::Scales};

/// `scores[row, key] = q[row] · k[key]` for `rows` rows, each summed over the dimensions in order.
///
/// `q` is `[steps, rows]`, `keys` `[steps, TILE_KEYS]`, `scores` `[rows, TILE_KEYS]`: a step is a dimension, or as many as lie together in
/// 32 bits. Lanes beyond `lanes` get anything.
#[inline(always)]
pub(super) unsafe fn score_rows<S: Simd, P: Product>(
    rows: usize,
    q: *const f32,
    keys: *const f32,
    steps: usize,
    lanes: &Range<usize>,
    scores: *mut f32,
) {
    match rows {
        1 => score_block::<S, P, 1, 4>(q, keys, steps, lanes, scores),
        2 => score_block::<S, P, 2, 4>(q, keys, steps, lanes, scores),
        3 if S::LANES == 16 => score_block::<S, P, 3, 4>(q, keys, steps, lanes, scores),
        4 if S::LANES == 16 => score_block::<S, P, 4, 4>(q, keys, steps, lanes, scores),
        3 if S::ROWS >= 3 => score_block::<S, P, 3, 2>(q, keys, steps, lanes, scores),
        4 if S::ROWS >= 4 => score_block::<S, P, 4, 2>(q, keys, steps, lanes, scores),
        5 if S::ROWS >= 5 => score_block::<S, P, 5, 2>(q, keys, steps, lanes, scores),
        6 if S::ROWS >= 6 => score_block::<S, P, 6, 2>(q, keys, steps, lanes, scores),
        7 if S::ROWS >= 7 => score_block::<S, P, 7, 2>(q, keys, steps, lanes, scores),
        8 if S::ROWS >= 8 => score_block::<S, P, 8, 2>(q, keys, steps, lanes, scores),
        _ => unreachable!("{rows} rows in a block of up to {}", S::ROWS),
    }
}

/// `R` rows over `C` vectors of keys at a time.
#[inline(always)]
unsafe fn score_block<S: Simd, P: Product, const R: usize, const C: usize>(
    q: *const f32,
    keys: *const f32,
    steps: usize,
    lanes: &Range<usize>,
    scores: *mut f32,
) {
    let width = C * S::LANES;
    for lane in (lanes.start / width * width..lanes.end).step_by(width) {
        let mut acc = [[S::splat(0.0); C]; R];
        let (mut row, mut q) = (keys.add(lane), q);
        for _ in 0..steps {
            let mut k = [S::splat(0.0); C];
            for i in 0..C {
                k[i] = S::load(row.add(i * S::LANES));
            }
            for r in 0..R {
                let x = S::splat(*q.add(r));
                for i in 0..C {
                    acc[r][i] = P::add::<S>(acc[r][i], x, k[i]);
                }
            }
            (row, q) = (row.add(TILE_KEYS), q.add(R));
        }
        for r in 0..R {
            for i in 0..C {
                S::store(scores.add(r * TILE_KEYS + lane + i * S::LANES), acc[r][i]);
            }
        }
    }
}

/// Softmax of one row so far.
pub(super) struct Softmax {
    pub(super) max: *mut f32,
    /// Sum of weights, lane by lane, `[16]`.
    pub(super) sum: *mut f32,
}

/// Infinities, to be cut at: a lane below the middle third is not visible, nor is one above it.
static LIMITS: [f32; 3 * TILE_KEYS] = {
    let mut limits = [f32::NEG_INFINITY; 3 * TILE_KEYS];
    let mut i = TILE_KEYS;
    while i < 2 * TILE_KEYS {
        limits[i] = f32::INFINITY;
        i += 1;
    }
    limits
};

/// Turns the scores of a row into weights of the values as they were loaded, packed, and updates its softmax; returns what the sums so far are
/// to be multiplied by. Lanes that are not visible weigh 0, or anything where there are scales; one at least is visible.
#[inline(always)]
pub(super) unsafe fn soften<S: Simd, P: Product>(
    params: &AttentionParams,
    scores: *mut f32,
    softmax: &Softmax,
    scales: Option<&Scales>,
    lanes: &Range<usize>,
) -> f32 {
    let vectors = TILE_KEYS / S::LANES;
    let mut v = [S::splat(0.0); 8];
    for c in 0..vectors {
        v[c] = S::mul(S::load(scores.add(c * S::LANES)), S::splat(params.scale));
        if let Some(scales) = scales {
            v[c] = S::mul(v[c], S::load(scales.keys.as_ptr().add(c * S::LANES)));
        }
        if let Some(cap) = params.softcap {
            v[c] = S::mul(S::splat(cap), tanh::<S>(S::mul(v[c], S::splat(cap.recip()))));
        }
    }
    if lanes.len() < TILE_KEYS {
        let from = LIMITS.as_ptr().add(TILE_KEYS - lanes.start);
        let to = LIMITS.as_ptr().add(2 * TILE_KEYS - lanes.end);
        for c in 0..vectors {
            // Of a NaN and a limit the limit is taken, so a visible NaN becomes an infinite score, whose weight is NaN.
            v[c] = S::min(S::min(v[c], S::load(from.add(c * S::LANES))), S::load(to.add(c * S::LANES)));
        }
    }
    let mut highest = v[0];
    for c in 1..vectors {
        highest = S::max(highest, v[c]);
    }
    let old = *softmax.max;
    let highest = S::reduce_max(highest);
    let mut new = old;
    let mut total = S::load(softmax.sum);
    let mut factor = 1.0;
    if highest > old {
        new = highest;
        let factors = exp::<S>(S::splat(old - new));
        total = S::mul(total, factors);
        factor = S::reduce_max(factors);
        softmax.max.write(new);
    }
    for c in 0..vectors {
        v[c] = P::exp::<S>(S::sub(v[c], S::splat(new)));
    }
    // The sum is that of the weights as they are multiplied, so what rounds them does not shift the mean.
    for c in 0..P::pack::<S>(&mut v, vectors) {
        total = P::add::<S>(total, v[c], P::one::<S>());
        if let Some(scales) = scales {
            v[c] = S::mul(v[c], S::load(scales.values.as_ptr().add(c * S::LANES)));
        }
        S::store(scores.add(c * S::LANES), v[c]);
    }
    S::store(softmax.sum, total);
    factor
}

//! The scores of a tile's keys, and what softmax makes of them.
#![allow(unsafe_op_in_unsafe_fn)] // One contract for all, stated on `kernel::attend`.
#![allow(clippy::inline_always, clippy::needless_range_loop)] // ISA code must be inlined; counted loops over registers unroll.

use std::ops::Range;

use crate::{
    AttentionParams,
    cpu::simd::{Simd, exp, tanh},
};

use super::{STRIP_KEYS, STRIPS, TILE_KEYS, ahead::Ahead, element::KeyUnit, product::Product};

/// Units of keys that are read between two prefetches, where products are not fast.
const UNITS_AT_ONCE: usize = 8;

/// The keys of a tile, unit after unit, `LANES` keys side by side.
pub(super) struct Keys {
    /// Where the first units of each strip of [`STRIP_KEYS`] keys are: those of a vector's strips follow each other.
    pub(super) strips: [*const u8; STRIPS],
    pub(super) unit_bytes: usize,
    /// Bytes from a unit to the next one.
    pub(super) stride: usize,
    /// Units of a key.
    pub(super) units: usize,
    /// What is prefetched along with these.
    pub(super) ahead: Option<Ahead>,
}

impl Keys {
    /// Where the first units of the keys from `lane` on are, a pointer a vector.
    #[inline(always)]
    unsafe fn vectors<S: Simd, const C: usize>(&self, lane: usize) -> [*const u8; C] {
        let mut vectors = [std::ptr::null(); C];
        for i in 0..C {
            vectors[i] = *self.strips.get_unchecked((lane + i * S::LANES) / STRIP_KEYS);
        }
        vectors
    }

    /// Prefetches as many bytes as `units` of `width` keys take, each line twice if `twice`.
    #[inline(always)]
    fn prefetch_next(&self, units: usize, width: usize, twice: bool) {
        if let Some(ahead) = &self.ahead {
            ahead.prefetch(units * width * self.unit_bytes, twice);
        }
    }

    /// Writes the keys in `lanes` as they are multiplied, `[steps, TILE_KEYS]`, without their scales. Others of their vectors get
    /// anything.
    #[inline(always)]
    pub(super) unsafe fn widen<S: Simd, U: KeyUnit>(&self, lanes: &Range<usize>, keys: *mut f32) {
        for unit in 0..self.units {
            if unit.is_multiple_of(UNITS_AT_ONCE) {
                self.prefetch_next(UNITS_AT_ONCE, TILE_KEYS, false);
            }
            for lane in (lanes.start / S::LANES * S::LANES..lanes.end).step_by(S::LANES) {
                let [vector] = self.vectors::<S, 1>(lane);
                let loaded = U::load_units::<S>(vector.add(unit * self.stride));
                for d in 0..U::DIMS {
                    S::store(keys.add((unit * U::DIMS + d) * TILE_KEYS + lane), U::unpack::<S>(loaded, d));
                }
            }
        }
    }
}

/// `scores[row, key] = q[row] · k[key]` for `rows` rows, each summed over the dimensions in order.
///
/// `q` is `[steps, rows]`, `scores` `[rows, TILE_KEYS]`: a step is a dimension, or as many as are multiplied at once. Lanes
/// beyond `lanes` get anything.
#[inline(always)]
pub(super) unsafe fn score_rows<S: Simd, P: Product, U: KeyUnit>(
    rows: usize,
    q: *const f32,
    keys: &Keys,
    lanes: &Range<usize>,
    scores: *mut f32,
) {
    match rows {
        // Registers hold the sums of a whole tile for two rows of 8 lanes, and always for 16 lanes.
        1 if const { S::LANES == 8 } => score_block::<S, P, U, 1, 4>(q, keys, lanes, scores),
        2 if const { S::LANES == 8 } => score_block::<S, P, U, 2, 4>(q, keys, lanes, scores),
        1 => score_block::<S, P, U, 1, 2>(q, keys, lanes, scores),
        2 => score_block::<S, P, U, 2, 2>(q, keys, lanes, scores),
        3 if const { S::ROWS >= 3 } => score_block::<S, P, U, 3, 2>(q, keys, lanes, scores),
        4 if const { S::ROWS >= 4 } => score_block::<S, P, U, 4, 2>(q, keys, lanes, scores),
        5 if const { S::ROWS >= 5 } => score_block::<S, P, U, 5, 2>(q, keys, lanes, scores),
        6 if const { S::ROWS >= 6 } => score_block::<S, P, U, 6, 2>(q, keys, lanes, scores),
        7 if const { S::ROWS >= 7 } => score_block::<S, P, U, 7, 2>(q, keys, lanes, scores),
        8 if const { S::ROWS >= 8 } => score_block::<S, P, U, 8, 2>(q, keys, lanes, scores),
        _ => unreachable!("{rows} rows in a block of up to {}", S::ROWS),
    }
}

/// `R` rows over `C` vectors of keys at a time.
#[inline(always)]
unsafe fn score_block<S: Simd, P: Product, U: KeyUnit, const R: usize, const C: usize>(
    q: *const f32,
    keys: &Keys,
    lanes: &Range<usize>,
    scores: *mut f32,
) {
    let width = C * S::LANES;
    for lane in (lanes.start / width * width..lanes.end).step_by(width) {
        let mut acc = [[S::splat(0.0); C]; R];
        let (vectors, mut q, mut offset) = (keys.vectors::<S, C>(lane), q, 0);
        let units_at_once = if P::FAST { 1 } else { UNITS_AT_ONCE };
        let at_once = if keys.ahead.is_some() { units_at_once } else { keys.units };
        for first in (0..keys.units).step_by(at_once) {
            keys.prefetch_next(units_at_once, width, P::FAST);
            for _ in first..(first + at_once).min(keys.units) {
                let mut loaded = [S::splat(0.0); C];
                for i in 0..C {
                    loaded[i] = U::load_units::<S>(vectors[i].add(offset));
                }
                offset += keys.stride;
                for d in 0..U::DIMS {
                    let mut k = [S::splat(0.0); C];
                    for i in 0..C {
                        k[i] = U::unpack::<S>(loaded[i], d);
                    }
                    for r in 0..R {
                        let x = S::splat(*q.add(r));
                        for i in 0..C {
                            acc[r][i] = P::add::<S>(acc[r][i], x, k[i]);
                        }
                    }
                    q = q.add(R);
                }
            }
        }
        for r in 0..R {
            for i in 0..C {
                S::store(scores.add(r * TILE_KEYS + lane + i * S::LANES), acc[r][i]);
            }
        }
    }
}

/// Scales of a tile, times what the elements are loaded divided by. Lanes that are not read hold anything.
pub(super) struct Scales {
    pub(super) keys: [f32; TILE_KEYS],
    pub(super) values: [f32; TILE_KEYS],
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

/// Turns the scores of a row into weights of the values as they were loaded, packed, and updates its softmax; returns what the
/// sums so far are to be multiplied by. Lanes that are not visible weigh 0, or anything where there are scales; one at least is
/// visible.
#[inline(always)]
pub(super) unsafe fn online_softmax_update<S: Simd, P: Product>(
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

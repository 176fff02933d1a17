//! The weighted sum of a tile's values.
#![allow(unsafe_op_in_unsafe_fn)] // One contract for all, stated on `kernel::attend`.
#![allow(clippy::inline_always, clippy::needless_range_loop)] // Tier code must be inlined; counted loops over registers unroll.

use std::ops::Range;

use crate::cpu::simd::Simd;

use super::{
    TILE_KEYS,
    kernel::{Scratch, block_rows},
};

/// Values of a tile.
pub(super) trait Values {
    /// `LANES` elements from column `c` on, of the value at `lane`.
    unsafe fn at<S: Simd>(&self, lane: usize, c: usize) -> S::V;
}

/// Values converted before, `[TILE_KEYS, padded]`.
pub(super) struct Loaded {
    pub(super) values: *const f32,
    pub(super) padded: usize,
}

impl Values for Loaded {
    #[inline(always)]
    unsafe fn at<S: Simd>(&self, lane: usize, c: usize) -> S::V {
        S::load(self.values.add(lane * self.padded + c))
    }
}

/// `acc[row] = acc[row] * factor[row] + weights[row, lanes] @ values[lanes]`, each element summed over the keys in order.
#[inline(always)]
pub(super) unsafe fn weigh_rows<S: Simd, V: Values>(
    s: &Scratch,
    values: &V,
    rows: Range<usize>,
    lanes: &Range<usize>,
    padded: usize,
) {
    let mut row = rows.start;
    while row < rows.end {
        let n = block_rows(rows.end - row);
        match n {
            1 => weigh_block::<S, V, 1>(s, values, row, lanes, padded),
            2 => weigh_block::<S, V, 2>(s, values, row, lanes, padded),
            3 => weigh_block::<S, V, 3>(s, values, row, lanes, padded),
            4 => weigh_block::<S, V, 4>(s, values, row, lanes, padded),
            5 => weigh_block::<S, V, 5>(s, values, row, lanes, padded),
            _ => weigh_block::<S, V, 6>(s, values, row, lanes, padded),
        }
        row += n;
    }
}

#[inline(always)]
unsafe fn weigh_block<S: Simd, V: Values, const R: usize>(
    s: &Scratch,
    values: &V,
    row: usize,
    lanes: &Range<usize>,
    padded: usize,
) {
    let mut c = 0;
    while c < padded {
        let left = (padded - c) / S::LANES;
        let n = match left {
            4.. if S::LANES == 16 => weigh_columns::<S, V, R, 4>(s, values, row, lanes, (padded, c)),
            2.. => weigh_columns::<S, V, R, 2>(s, values, row, lanes, (padded, c)),
            _ => weigh_columns::<S, V, R, 1>(s, values, row, lanes, (padded, c)),
        };
        c += n;
    }
}

/// Columns `c..c + C * LANES` of a block of rows; returns their number.
#[inline(always)]
unsafe fn weigh_columns<S: Simd, V: Values, const R: usize, const C: usize>(
    s: &Scratch,
    values: &V,
    row: usize,
    lanes: &Range<usize>,
    (padded, c): (usize, usize),
) -> usize {
    let mut acc = [[S::splat(0.0); C]; R];
    for r in 0..R {
        let factor = S::splat(*s.factor.add(row + r));
        for i in 0..C {
            acc[r][i] = S::mul(S::load(s.acc.add((row + r) * padded + c + i * S::LANES)), factor);
        }
    }
    for lane in lanes.clone() {
        let mut v = [S::splat(0.0); C];
        for i in 0..C {
            v[i] = values.at::<S>(lane, c + i * S::LANES);
        }
        for r in 0..R {
            let weight = S::splat(*s.scores.add((row + r) * TILE_KEYS + lane));
            for i in 0..C {
                acc[r][i] = S::fma(weight, v[i], acc[r][i]);
            }
        }
    }
    for r in 0..R {
        for i in 0..C {
            S::store(s.acc.add((row + r) * padded + c + i * S::LANES), acc[r][i]);
        }
    }
    C * S::LANES
}

//! The weighted sum of a tile's values.
#![allow(unsafe_op_in_unsafe_fn)] // One contract for all, stated on `kernel::attend`.
#![allow(clippy::inline_always, clippy::needless_range_loop)] // Tier code must be inlined; counted loops over registers unroll.

use std::ops::Range;

use crate::cpu::simd::Simd;

use super::TILE_KEYS;

/// Values of a tile.
pub(super) trait Values {
    /// `C * LANES` elements from column `c` on, of the value at `lane`.
    unsafe fn columns<S: Simd, const C: usize>(&self, lane: usize, c: usize) -> [S::V; C];
}

/// Values converted before, `[TILE_KEYS, padded]`.
pub(super) struct Loaded {
    pub(super) values: *const f32,
    pub(super) padded: usize,
}

impl Values for Loaded {
    #[inline(always)]
    unsafe fn columns<S: Simd, const C: usize>(&self, lane: usize, c: usize) -> [S::V; C] {
        let row = self.values.add(lane * self.padded + c);
        let mut columns = [S::splat(0.0); C];
        for i in 0..C {
            columns[i] = S::load(row.add(i * S::LANES));
        }
        columns
    }
}

/// Rows that are computed together.
pub(super) struct RowBlock {
    pub(super) rows: usize,
    /// Weights of the keys, `[rows, TILE_KEYS]`.
    pub(super) weights: *const f32,
    /// What the sums so far are multiplied by, `[rows]`.
    pub(super) factors: *const f32,
    /// Those sums, `[rows, padded]`.
    pub(super) acc: *mut f32,
    pub(super) padded: usize,
}

impl RowBlock {
    /// The rows `range` of these.
    #[inline(always)]
    pub(super) unsafe fn part(&self, range: Range<usize>) -> Self {
        Self {
            rows: range.len(),
            weights: self.weights.add(range.start * TILE_KEYS),
            factors: self.factors.add(range.start),
            acc: self.acc.add(range.start * self.padded),
            padded: self.padded,
        }
    }
}

/// `acc[row] = acc[row] * factors[row] + weights[row, lanes] @ values[lanes]`, each element summed over the keys in order.
#[inline(always)]
pub(super) unsafe fn weigh_rows<S: Simd, V: Values>(block: &RowBlock, values: &V, lanes: &Range<usize>) {
    match block.rows {
        1 => weigh_block::<S, V, 1>(block, values, lanes),
        2 => weigh_block::<S, V, 2>(block, values, lanes),
        3 => weigh_block::<S, V, 3>(block, values, lanes),
        4 => weigh_block::<S, V, 4>(block, values, lanes),
        5 => weigh_block::<S, V, 5>(block, values, lanes),
        6 => weigh_block::<S, V, 6>(block, values, lanes),
        7 => weigh_block::<S, V, 7>(block, values, lanes),
        _ => weigh_block::<S, V, 8>(block, values, lanes),
    }
}

#[inline(always)]
unsafe fn weigh_block<S: Simd, V: Values, const R: usize>(block: &RowBlock, values: &V, lanes: &Range<usize>) {
    let mut c = 0;
    while c < block.padded {
        let left = (block.padded - c) / S::LANES;
        // As many sums as registers hold beside a value of each column and a weight.
        c += match left {
            4.. if S::LANES == 16 && R <= 6 || R <= 2 => weigh_columns::<S, V, R, 4>(block, values, lanes, c),
            2.. => weigh_columns::<S, V, R, 2>(block, values, lanes, c),
            _ => weigh_columns::<S, V, R, 1>(block, values, lanes, c),
        };
    }
}

/// Columns `c..c + C * LANES` of a block of `R` rows; returns their number.
#[inline(always)]
unsafe fn weigh_columns<S: Simd, V: Values, const R: usize, const C: usize>(
    block: &RowBlock,
    values: &V,
    lanes: &Range<usize>,
    c: usize,
) -> usize {
    let mut acc = [[S::splat(0.0); C]; R];
    for r in 0..R {
        let factor = S::splat(*block.factors.add(r));
        for i in 0..C {
            acc[r][i] = S::mul(S::load(block.acc.add(r * block.padded + c + i * S::LANES)), factor);
        }
    }
    for lane in lanes.clone() {
        let v = values.columns::<S, C>(lane, c);
        for r in 0..R {
            let weight = S::splat(*block.weights.add(r * TILE_KEYS + lane));
            for i in 0..C {
                acc[r][i] = S::fma(weight, v[i], acc[r][i]);
            }
        }
    }
    for r in 0..R {
        for i in 0..C {
            S::store(block.acc.add(r * block.padded + c + i * S::LANES), acc[r][i]);
        }
    }
    C * S::LANES
}

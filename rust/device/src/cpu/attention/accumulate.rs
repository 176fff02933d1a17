//! The weighted sum of a tile's values.
#![allow(clippy::cast_ptr_alignment)] // The values are f32.
#![allow(unsafe_op_in_unsafe_fn)] // One contract for all, stated on `kernel::attend`.
#![allow(clippy::inline_always, clippy::needless_range_loop)] // ISA code must be inlined; counted loops over registers unroll.

use std::{marker::PhantomData, ops::Range};

use crate::cpu::simd::Simd;

use super::{TILE_KEYS, product::Product};

/// Values of a tile.
pub(super) trait Values {
    /// How they are multiplied.
    type Product: Product;
    /// Keys whose values lie at equal distances: of so many from a multiple of it on.
    const RUN: usize;
    /// Prefetches what comes next, as many bytes as `columns` of the values of a run take, or of a step where products are fast.
    fn prefetch_next(&self, _columns: usize) {}
    /// Where the values of a run start.
    unsafe fn run(&self, run: usize) -> *const u8;
    /// `C * LANES` columns from `c` on, of the values of a step of a run: those of one key, or of as many as lie together in 32
    /// bits.
    unsafe fn columns<S: Simd, const C: usize>(&self, run: (usize, *const u8), step: usize, c: usize) -> [S::V; C];
}

/// Values converted before, `[steps, padded]`.
pub(super) struct Loaded<P> {
    pub(super) values: *const f32,
    pub(super) padded: usize,
    pub(super) product: PhantomData<P>,
}

impl<P: Product> Values for Loaded<P> {
    type Product = P;
    const RUN: usize = TILE_KEYS;
    #[inline(always)]
    unsafe fn run(&self, _: usize) -> *const u8 {
        self.values.cast()
    }
    #[inline(always)]
    unsafe fn columns<S: Simd, const C: usize>(&self, (_, first): (usize, *const u8), step: usize, c: usize) -> [S::V; C] {
        let row = first.cast::<f32>().add(step * self.padded + c);
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
    /// Weights of the keys, step after step, a row at every [`TILE_KEYS`] floats.
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
pub(super) unsafe fn accumulate_values<S: Simd, V: Values>(block: &RowBlock, values: &V, lanes: &Range<usize>) {
    match block.rows {
        1 => accumulate_block::<S, V, 1>(block, values, lanes),
        2 => accumulate_block::<S, V, 2>(block, values, lanes),
        3 if const { S::ROWS >= 3 } => accumulate_block::<S, V, 3>(block, values, lanes),
        4 if const { S::ROWS >= 4 } => accumulate_block::<S, V, 4>(block, values, lanes),
        5 if const { S::ROWS >= 5 } => accumulate_block::<S, V, 5>(block, values, lanes),
        6 if const { S::ROWS >= 6 } => accumulate_block::<S, V, 6>(block, values, lanes),
        7 if const { S::ROWS >= 7 } => accumulate_block::<S, V, 7>(block, values, lanes),
        8 if const { S::ROWS >= 8 } => accumulate_block::<S, V, 8>(block, values, lanes),
        rows => unreachable!("{rows} rows in a block of up to {}", S::ROWS),
    }
}

#[inline(always)]
unsafe fn accumulate_block<S: Simd, V: Values, const R: usize>(block: &RowBlock, values: &V, lanes: &Range<usize>) {
    let mut c = 0;
    while c < block.padded {
        let left = (block.padded - c) / S::LANES;
        // As many sums as registers hold beside a value of each column and a weight; nine rather than six of three rows, since an
        // addition waits for the one before it.
        c += match left {
            4.. if const { S::LANES == 16 && R <= 6 || R <= 2 } => accumulate_columns::<S, V, R, 4>(block, values, lanes, c),
            3 | 5.. if const { R == 3 } => accumulate_columns::<S, V, R, 3>(block, values, lanes, c),
            2.. => accumulate_columns::<S, V, R, 2>(block, values, lanes, c),
            _ => accumulate_columns::<S, V, R, 1>(block, values, lanes, c),
        };
    }
}

/// Columns `c..c + C * LANES` of a block of `R` rows; returns their number.
#[inline(always)]
unsafe fn accumulate_columns<S: Simd, V: Values, const R: usize, const C: usize>(
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
    for run in lanes.start / V::RUN..lanes.end.div_ceil(V::RUN) {
        let lane = run * V::RUN;
        let (start, end) = (lanes.start.max(lane) - lane, (lanes.end - lane).min(V::RUN));
        let weights = block.weights.add(lane / V::Product::PACKED);
        let run = (run, values.run(run));
        if !V::Product::FAST {
            values.prefetch_next(C * S::LANES);
        }
        for step in start / V::Product::PACKED..end.div_ceil(V::Product::PACKED) {
            if V::Product::FAST {
                values.prefetch_next(C * S::LANES);
            }
            let v = values.columns::<S, C>(run, step, c);
            for r in 0..R {
                let weight = S::splat(*weights.add(r * TILE_KEYS + step));
                for i in 0..C {
                    acc[r][i] = V::Product::add::<S>(acc[r][i], weight, v[i]);
                }
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

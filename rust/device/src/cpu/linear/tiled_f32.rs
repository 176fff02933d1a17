//! f32 activations times a panel of [`tiled`](super::tiled) weights: `out[M, 32] = x[M, K] * panel[32, K]^T`, for every tier.
//!
//! ```text
//!              panel, a column pair: 32 even columns, 32 odd columns     AVX-512: 2 + 2 registers
//!   x, M rows  a row's even and odd column, each splat over them         up to 4 rows: 16 sums
//! ```
//!
//! Every output is the sum of its even columns plus the sum of its odd ones, each by increasing column, so a row has the same bits
//! whatever the rows beside it. A panel is read once for 4 rows (AVX-512) or 2.
//!
//! Cost an output and column: one fused multiplication; 2 bytes of weight (4 of F32) for each group of rows. For one row that is the
//! memory's rate.
//!
//! Measured on one core of a Zen 5: the inner loop of AVX-512 alone 260 GFLOP/s of a peak of 265, BF16 panels in the level 2 cache.
//! One row on two cores of a Milan (AVX2) read BF16 panels at 21 to 27 GB/s, where reading alone made 24 to 27, and in a slower minute at 17 to
//! 23 (`examples/bench_linear.rs`). It was 15 to 19 in turn with the first when the two tiles of 16 rows, 1 KiB apart, were read line by line
//! one after the other, which the processor's prefetchers do not follow.

#![allow(unsafe_op_in_unsafe_fn)]
#![allow(clippy::inline_always, clippy::needless_range_loop)] // Tier code must be inlined; counted loops over registers unroll.

use super::{
    PANEL,
    float::{BF16, F16, F32, element_bytes},
    tiled::{K_TILE, TILE, TILE_ELEMENTS},
};
use crate::cpu::simd::{Simd, prefetch, tier_entry};

/// Bytes ahead of use that weights are prefetched.
const AHEAD: usize = 4 << 10;

tier_entry! {
    /// `out[m][n] = dot(panel row n, x row m)`, `x` being `[out.len(), cols]`. The caller promises that the machine has the tier.
    pub(super) fn multiply_f32 => f32s(panel: &[u8], x: &[f32], out: &mut [[f32; PANEL]])
}
tier_entry! {
    /// As [`multiply_f32`], of F16.
    pub(super) fn multiply_f16 => f16s(panel: &[u8], x: &[f32], out: &mut [[f32; PANEL]])
}
tier_entry! {
    /// As [`multiply_f32`], of BF16.
    pub(super) fn multiply_bf16 => bf16s(panel: &[u8], x: &[f32], out: &mut [[f32; PANEL]])
}

#[inline(always)]
unsafe fn f32s<S: Simd>(panel: &[u8], x: &[f32], out: &mut [[f32; PANEL]]) {
    groups::<S, F32>(panel, x, out);
}

#[inline(always)]
unsafe fn f16s<S: Simd>(panel: &[u8], x: &[f32], out: &mut [[f32; PANEL]]) {
    groups::<S, F16>(panel, x, out);
}

#[inline(always)]
unsafe fn bf16s<S: Simd>(panel: &[u8], x: &[f32], out: &mut [[f32; PANEL]]) {
    groups::<S, BF16>(panel, x, out);
}

/// As many rows at a time as there are registers for.
#[inline(always)]
unsafe fn groups<S: Simd, const D: u8>(panel: &[u8], x: &[f32], out: &mut [[f32; PANEL]]) {
    let cols = x.len().checked_div(out.len()).unwrap_or(0);
    assert!(x.len() == out.len() * cols && panel.len() == PANEL * cols * element_bytes(D) && cols.is_multiple_of(K_TILE));
    let most = if S::LANES == 16 { 4 } else { 2 };
    for (i, out) in out.chunks_mut(most).enumerate() {
        let x = &x[i * most * cols..];
        match (S::LANES, out.len()) {
            (16, 1) => block::<S, D, 1, 2, 1>(panel, x, cols, out),
            (16, 2) => block::<S, D, 2, 2, 1>(panel, x, cols, out),
            (16, 3) => block::<S, D, 3, 2, 1>(panel, x, cols, out),
            (16, _) => block::<S, D, 4, 2, 1>(panel, x, cols, out),
            (_, 1) if D == BF16 => block::<S, D, 1, 2, 2>(panel, x, cols, out),
            (_, 1) => block::<S, D, 1, 4, 1>(panel, x, cols, out),
            _ => block::<S, D, 2, 2, 1>(panel, x, cols, out),
        }
    }
}

/// Sums of the even columns and of the odd ones of `N` vectors of panel rows, for `R` rows of `x`.
type Sums<S, const R: usize, const N: usize> = [[[<S as Simd>::V; 2]; N]; R];

/// Outputs of `R` rows of `x`, `N` vectors at a time; of one k tile those of `PARTS` times as many, one after the other, so that the tiles
/// of a BF16 panel are read in the order in which they lie.
#[inline(always)]
unsafe fn block<S: Simd, const D: u8, const R: usize, const N: usize, const PARTS: usize>(
    panel: &[u8],
    x: &[f32],
    cols: usize,
    out: &mut [[f32; PANEL]],
) {
    const { assert!(PARTS == 1 || PARTS == 2) };
    debug_assert!(out.len() == R && x.len() >= R * cols);
    let width = N * S::LANES;
    for first in (0..PANEL).step_by(PARTS * width) {
        // Apart, for registers cannot be indexed.
        let mut acc: Sums<S, R, N> = [[[S::splat(0.0); 2]; N]; R];
        let mut second = acc;
        for t in 0..cols / K_TILE {
            let (tile, x) = (panel.as_ptr().add(t * TILE_ELEMENTS * element_bytes(D)), x.as_ptr().add(t * K_TILE));
            add_tile::<S, D, R, N>(tile, first, x, cols, &mut acc);
            if PARTS == 2 {
                add_tile::<S, D, R, N>(tile, first + width, x, cols, &mut second);
            }
        }
        for (part, acc) in [acc, second].iter().enumerate().take(PARTS) {
            for m in 0..R {
                for n in 0..N {
                    let place = out[m].as_mut_ptr().add(first + part * width + n * S::LANES);
                    S::store(place, S::add(acc[m][n][0], acc[m][n][1]));
                }
            }
        }
    }
}

/// Adds the products of a k tile, of its rows from `first` on, by the same columns of rows of `x` that lie `cols` apart.
#[inline(always)]
unsafe fn add_tile<S: Simd, const D: u8, const R: usize, const N: usize>(
    tile: *const u8,
    first: usize,
    x: *const f32,
    cols: usize,
    acc: &mut Sums<S, R, N>,
) {
    for pair in 0..K_TILE / 2 {
        let mut w = [(S::splat(0.0), S::splat(0.0)); N];
        for n in 0..N {
            w[n] = columns::<S, D>(tile, pair, first + n * S::LANES);
        }
        for m in 0..R {
            let x = x.add(m * cols + 2 * pair);
            let (x0, x1) = (S::splat(*x), S::splat(*x.add(1)));
            for n in 0..N {
                acc[m][n][0] = S::fma(w[n].0, x0, acc[m][n][0]);
                acc[m][n][1] = S::fma(w[n].1, x1, acc[m][n][1]);
            }
        }
    }
}

/// Columns `2 * pair` and `2 * pair + 1` of a k tile, of as many rows from `row` on as a vector has lanes.
#[inline(always)]
unsafe fn columns<S: Simd, const D: u8>(tile: *const u8, pair: usize, row: usize) -> (S::V, S::V) {
    let line = |element: usize| {
        let p = tile.add(element * element_bytes(D));
        prefetch(p.wrapping_add(AHEAD));
        p
    };
    if D == BF16 {
        return S::load_bf16_pairs(line((row / TILE * TILE + pair) * K_TILE + row % TILE * 2).cast());
    }
    let (even, odd) = (line(2 * pair * PANEL + row), line((2 * pair + 1) * PANEL + row));
    if D == F16 { (S::load_f16(even.cast()), S::load_f16(odd.cast())) } else { (S::load(even.cast()), S::load(odd.cast())) }
}

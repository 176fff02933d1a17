//! f32 activations times a panel of [`tiled`](super::tiled) weights: `out[M, 32] = x[M, K] * panel[32, K]^T`, for every ISA.
//!
//! ```text
//!              panel, a column pair: 32 even columns, 32 odd columns     AVX-512: 2 + 2 registers
//!   x, M rows  a row's even and odd column, each splat over them         up to 4 rows: 16 sums
//! ```
//!
//! Every output is the sum of its even columns plus the sum of its odd ones, each by increasing column, so a row has the same
//! bits whatever the rows beside it. AVX-512 reads a panel once for 4 rows. Of eight lanes too few registers would be left, so
//! there a panel is read once for up to 64 rows, some k tiles at a time, and sums go to memory and back:
//!
//! ```text
//!   2 to 8 rows   a k tile     up to 5 rows, 8 even and 8 odd sums of each     elements widened where they are used
//!   more          4 k tiles    up to 6 rows, 16 even or odd sums of each       elements widened first, once for all rows
//! ```
//!
//! Cost an output and column: one fused multiplication; 2 bytes of weight (4 of F32) each time that the panel is read. For one
//! row that is the memory's rate.
//!
//! Measured on one core of a Zen 5: the inner loop of AVX-512 alone 260 GFLOP/s of a peak of 265, BF16 panels in the level 2
//! cache. One row on two cores of a Milan (AVX2) read BF16 panels at 21 to 27 GB/s, where reading alone made 24 to 27, and in a
//! slower minute at 17 to 23 (`examples/bench_linear.rs`). It was 15 to 19 in turn with the first when the two tiles of 16 rows,
//! 1 KiB apart, were read line by line one after the other, which the processor's prefetchers do not follow. More rows of BF16
//! made there, as GFLOP/s of a peak of 200, with the panel read again for every two rows and now, in turn: 2 rows 38 and 53, 3
//! rows 45 and 79, 5 rows 61 and 116, 8 rows 79 and 115, 16 rows 105 and 119, 64 rows 127 and 150.

#![allow(unsafe_op_in_unsafe_fn)]
#![allow(clippy::inline_always, clippy::needless_range_loop)] // ISA code must be inlined; counted loops over registers unroll.

use std::mem::MaybeUninit;

use super::{
    MANY_ROWS, PANEL,
    float::{BF16, F16, F32, element_bytes},
    tiled::{K_TILE, TILE, TILE_ELEMENTS},
};
use crate::cpu::simd::{Simd, isa_entry, prefetch};

/// Beside those of rows in the order of the file: F16 laid out as BF16 is.
const F16_PAIRS: u8 = 3;
/// Bytes ahead of use that weights are prefetched.
const AHEAD: usize = 4 << 10;

isa_entry! {
    /// `out[m][n] = dot(panel row n, x row m)`, `x` being `[out.len(), cols]`, at most 64 rows. The caller promises that the
    /// machine has the ISA.
    pub(super) fn multiply_f32 => f32s(panel: &[u8], x: &[f32], out: &mut [[f32; PANEL]])
}
isa_entry! {
    /// As [`multiply_f32`], of F16.
    pub(super) fn multiply_f16 => f16s(panel: &[u8], x: &[f32], out: &mut [[f32; PANEL]])
}
isa_entry! {
    /// As [`multiply_f32`], of F16 in pairs; their scale is the caller's.
    pub(super) fn multiply_f16_pairs => f16_pairs(panel: &[u8], x: &[f32], out: &mut [[f32; PANEL]])
}
isa_entry! {
    /// As [`multiply_f32`], of BF16.
    pub(super) fn multiply_bf16 => bf16s(panel: &[u8], x: &[f32], out: &mut [[f32; PANEL]])
}

#[inline(always)]
unsafe fn f32s<S: Simd>(panel: &[u8], x: &[f32], out: &mut [[f32; PANEL]]) {
    by_row_blocks::<S, F32>(panel, x, out);
}

#[inline(always)]
unsafe fn f16s<S: Simd>(panel: &[u8], x: &[f32], out: &mut [[f32; PANEL]]) {
    by_row_blocks::<S, F16>(panel, x, out);
}

#[inline(always)]
unsafe fn f16_pairs<S: Simd>(panel: &[u8], x: &[f32], out: &mut [[f32; PANEL]]) {
    by_row_blocks::<S, F16_PAIRS>(panel, x, out);
}

#[inline(always)]
unsafe fn bf16s<S: Simd>(panel: &[u8], x: &[f32], out: &mut [[f32; PANEL]]) {
    by_row_blocks::<S, BF16>(panel, x, out);
}

#[inline(always)]
unsafe fn by_row_blocks<S: Simd, const D: u8>(panel: &[u8], x: &[f32], out: &mut [[f32; PANEL]]) {
    let cols = x.len().checked_div(out.len()).unwrap_or(0);
    assert!(x.len() == out.len() * cols && panel.len() == PANEL * cols * element_bytes(D) && cols.is_multiple_of(K_TILE));
    assert!(out.len() <= MANY_ROWS);
    match (S::LANES, out.len()) {
        (16, _) => {
            for (i, out) in out.chunks_mut(4).enumerate() {
                let x = &x[i * 4 * cols..];
                match out.len() {
                    1 => block::<S, D, 1, 2, 1>(panel, x, cols, out),
                    2 => block::<S, D, 2, 2, 1>(panel, x, cols, out),
                    3 => block::<S, D, 3, 2, 1>(panel, x, cols, out),
                    _ => block::<S, D, 4, 2, 1>(panel, x, cols, out),
                }
            }
        }
        (_, 1) if matches!(D, BF16 | F16_PAIRS) => block::<S, D, 1, 2, 2>(panel, x, cols, out),
        (_, 1) => block::<S, D, 1, 4, 1>(panel, x, cols, out),
        (_, 0) => {}
        (_, rows) if rows <= FEW => by_tiles::<S, D, FEW, false>(panel, x, cols, out),
        _ => by_tiles::<S, D, MANY_ROWS, true>(panel, x, cols, out),
    }
}

/// Sums of the even columns and of the odd ones of `N` vectors of panel rows, for `R` rows of `x`.
type Sums<S, const R: usize, const N: usize> = [[[<S as Simd>::V; 2]; N]; R];

/// Outputs of `R` rows of `x`, `N` vectors at a time; of one k tile those of `PARTS` times as many, one after the other, so that
/// the tiles of a panel of pairs are read in the order in which they lie.
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

/// Rows up to which elements are widened anew for every block of rows: reading leaves the time for it.
const FEW: usize = 8;

/// Cache lines: vectors do not straddle two.
#[repr(align(64))]
struct Lines<T>(T);

/// Outputs of up to `ROWS` rows, on eight lanes. The panel is read once, some k tiles at a time; sums wait in memory while other
/// rows and columns have the registers. `WIDEN` has elements made f32 once for all rows.
#[inline(always)]
unsafe fn by_tiles<S: Simd, const D: u8, const ROWS: usize, const WIDEN: bool>(
    panel: &[u8],
    x: &[f32],
    cols: usize,
    out: &mut [[f32; PANEL]],
) {
    let rows = out.len();
    debug_assert!(rows <= ROWS && x.len() == rows * cols && 2 * S::LANES == TILE);
    let mut sums = MaybeUninit::<Lines<[[f32; SUMS]; ROWS]>>::uninit();
    let sums = sums.as_mut_ptr().cast::<[f32; SUMS]>();
    for m in 0..rows {
        sums.add(m).write([0.0; SUMS]);
    }
    let mut wide = MaybeUninit::<Lines<Wide>>::uninit();
    let wide = wide.as_mut_ptr().cast::<Wide>();
    // What registers have room for, in blocks of about one size.
    let most = if WIDEN { 6 } else { 5 };
    let row_block = rows.div_ceil(rows.div_ceil(most));
    let step = if WIDEN { WIDE_COLS } else { K_TILE };
    for k in (0..cols).step_by(step) {
        let tiles = panel.as_ptr().add(k * PANEL * element_bytes(D));
        let len = step.min(cols - k);
        if WIDEN {
            widen::<S, D>(tiles, len, wide);
        }
        for m in (0..rows).step_by(row_block) {
            let (x, sums) = (x.as_ptr().add(m * cols + k), sums.add(m));
            match (WIDEN, row_block.min(rows - m)) {
                (false, 1) => add_stored::<S, D, 1>(tiles, x, cols, sums),
                (false, 2) => add_stored::<S, D, 2>(tiles, x, cols, sums),
                (false, 3) => add_stored::<S, D, 3>(tiles, x, cols, sums),
                (false, 4) => add_stored::<S, D, 4>(tiles, x, cols, sums),
                (false, _) => add_stored::<S, D, 5>(tiles, x, cols, sums),
                (true, 1) => add_wide::<S, 1>(wide, len, x, cols, sums),
                (true, 2) => add_wide::<S, 2>(wide, len, x, cols, sums),
                (true, 3) => add_wide::<S, 3>(wide, len, x, cols, sums),
                (true, 4) => add_wide::<S, 4>(wide, len, x, cols, sums),
                (true, 5) => add_wide::<S, 5>(wide, len, x, cols, sums),
                (true, _) => add_wide::<S, 6>(wide, len, x, cols, sums),
            }
        }
    }
    for (m, out) in out.iter_mut().enumerate() {
        let sums = sums.add(m).cast::<f32>();
        for n in (0..PANEL).step_by(S::LANES) {
            S::store(out.as_mut_ptr().add(n), S::add(S::load(sums.add(n)), S::load(sums.add(PANEL + n))));
        }
    }
}

/// Floats of the sums of a row: those of even columns, `[PANEL]`, and those of odd ones.
const SUMS: usize = 2 * PANEL;

/// As [`add_tile`], a vector of panel rows after the other, to sums in memory.
#[inline(always)]
unsafe fn add_stored<S: Simd, const D: u8, const R: usize>(tile: *const u8, x: *const f32, cols: usize, sums: *mut [f32; SUMS]) {
    for first in (0..PANEL).step_by(S::LANES) {
        let place = |m: usize, odd: usize| sums.add(m).cast::<f32>().add(odd * PANEL + first);
        let mut acc: Sums<S, R, 1> = [[[S::splat(0.0); 2]; 1]; R];
        for m in 0..R {
            acc[m][0] = [S::load(place(m, 0)), S::load(place(m, 1))];
        }
        add_tile::<S, D, R, 1>(tile, first, x, cols, &mut acc);
        for m in 0..R {
            S::store(place(m, 0), acc[m][0][0]);
            S::store(place(m, 1), acc[m][0][1]);
        }
    }
}

/// Columns that are widened together: with the sums of a block of rows they stay in the level 1 cache.
const WIDE_COLS: usize = 4 * K_TILE;

/// `[even or odd columns][tile][column][TILE]`; fewer columns lie at its beginning.
type Wide = [f32; WIDE_COLS * PANEL];

/// Makes `cols` columns of a panel f32.
#[inline(always)]
unsafe fn widen<S: Simd, const D: u8>(panel: *const u8, cols: usize, wide: *mut Wide) {
    let half = cols / 2 * TILE;
    for t in 0..cols / K_TILE {
        let tile = panel.add(t * TILE_ELEMENTS * element_bytes(D));
        for i in 0..PANEL / TILE {
            for pair in 0..K_TILE / 2 {
                let place = wide.cast::<f32>().add(i * half + (t * K_TILE / 2 + pair) * TILE);
                for lane in (0..TILE).step_by(S::LANES) {
                    let (even, odd) = columns::<S, D>(tile, pair, i * TILE + lane);
                    S::store(place.add(lane), even);
                    S::store(place.add(2 * half + lane), odd);
                }
            }
        }
    }
}

/// Adds the products of `len` widened columns, two vectors a tile, by the same columns of rows of `x` that lie `cols` apart.
#[inline(always)]
unsafe fn add_wide<S: Simd, const R: usize>(wide: *const Wide, len: usize, x: *const f32, cols: usize, sums: *mut [f32; SUMS]) {
    for odd in 0..2 {
        for i in 0..PANEL / TILE {
            let place = |m: usize, n: usize| sums.add(m).cast::<f32>().add(odd * PANEL + i * TILE + n * S::LANES);
            let mut acc = [[S::splat(0.0); 2]; R];
            for m in 0..R {
                acc[m] = [S::load(place(m, 0)), S::load(place(m, 1))];
            }
            let (mut w, mut x) = (wide.cast::<f32>().add((odd * 2 + i) * (len / 2) * TILE), x.add(odd));
            for _ in 0..len / 2 {
                let (w0, w1) = (S::load(w), S::load(w.add(S::LANES)));
                for m in 0..R {
                    let x = S::splat(*x.add(m * cols));
                    acc[m] = [S::fma(w0, x, acc[m][0]), S::fma(w1, x, acc[m][1])];
                }
                // Wrapping, for the last row's last step goes beyond `x`.
                (w, x) = (w.add(TILE), x.wrapping_add(2));
            }
            for m in 0..R {
                S::store(place(m, 0), acc[m][0]);
                S::store(place(m, 1), acc[m][1]);
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
    if matches!(D, BF16 | F16_PAIRS) {
        let pairs = line((row / TILE * TILE + pair) * K_TILE + row % TILE * 2).cast();
        return if D == BF16 { S::load_bf16_pairs(pairs) } else { S::load_f16_pairs(pairs) };
    }
    let (even, odd) = (line(2 * pair * PANEL + row), line((2 * pair + 1) * PANEL + row));
    if D == F16 { (S::load_f16(even.cast()), S::load_f16(odd.cast())) } else { (S::load(even.cast()), S::load(odd.cast())) }
}

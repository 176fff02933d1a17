//! bf16 activations times a BF16 panel of [`tiled`](super::tiled) weights: `out[M, 32] = x[M, K] * panel[32, K]^T` by
//! `vdpbf16ps`.
//!
//! ```text
//!              panel, a column pair: [2 tiles][16 rows][2 columns]      2 registers
//!   x, M rows  a row's pair, splat over each                            up to 8 rows: 16 sums
//! ```
//!
//! A `vdpbf16ps` adds the product of odd columns, then that of even ones, each sum rounded to nearest f32; denormal numbers count
//! as zeros. An output is one chain of them by increasing column, so a row has the same bits whatever the rows beside it.
//!
//! Cost an output: K / 2 of them, each 16 outputs wide, and 2 bytes of weight a column for each block of 8 rows.
//!
//! Measured on one core of a Zen 5, whose peak is 535 GFLOP/s (f32: 265): the inner loop alone 530 of them with panels in the
//! level 2 cache, and over 256 MB of panels 41 GB/s for 1 row, 38 for 2 and 31 for 8, where its memory gives about 42. As phases
//! of 512 rows 430 to 450 GFLOP/s, outputs copied to their rows included. Two cores of a Zen 4, in turn with prefetches in
//! the order of the loads, all for the first-level cache: 1.4 to 1.7 times as fast for 1 to 4 rows, 1.7 to 2.1 times for 8 (219
//! GFLOP/s). Two cores of a Zen 5, in turn with one prefetch a line: 1.1 times for 2 rows, 1.03 to 1.06 for 4, 1.1 to 1.16 for 8.

#[allow(clippy::wildcard_imports)] // Intrinsics.
use std::arch::x86_64::*;

use super::{
    PANEL,
    tiled::{K_TILE, TILE, TILE_ELEMENTS},
};
use crate::cpu::{isa::reads_ahead_to_l2, simd::prefetch_stream};

/// Bytes ahead of use that weights are prefetched: what 8 rows take about the latency of memory to multiply.
const AHEAD: usize = 8 << 10;
/// Rows whose sums are in registers: as many chains as hide the latency of an addition, and a broadcast for two of them.
const ROWS: usize = 8;

/// Rounds a row to bf16 in pairs, `[cols / 2]`; `cols` is a multiple of 32.
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) fn round_row(row: &[f32], pairs: &mut [u32]) {
    assert!(row.len().is_multiple_of(K_TILE) && pairs.len() == row.len() / 2);
    for (x, out) in row.as_chunks::<K_TILE>().0.iter().zip(pairs.as_chunks_mut::<{ K_TILE / 2 }>().0) {
        // SAFETY: x has 32 values, `out` is 64 bytes; a __m512bh is 64 plain bytes.
        unsafe {
            let (low, high) = (_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(x.as_ptr().add(16)));
            // To nearest, ties to even.
            let rounded = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
            _mm512_storeu_si512(out.as_mut_ptr().cast(), rounded);
        }
    }
}

/// `out[m][n] = dot(panel row n, x row m)`, `x` being pairs, `[out.len(), cols / 2]`.
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) fn multiply(panel: &[[u16; TILE_ELEMENTS]], x: &[u32], out: &mut [[f32; PANEL]]) {
    let pairs = panel.len() * K_TILE / 2;
    assert!(x.len() == out.len() * pairs);
    let to_l2 = reads_ahead_to_l2();
    for (x, out) in x.chunks(ROWS * pairs.max(1)).zip(out.chunks_mut(ROWS)) {
        match out.len() {
            1 => rows_of::<1>(panel, x, out, to_l2),
            2 => rows_of::<2>(panel, x, out, to_l2),
            3 => rows_of::<3>(panel, x, out, to_l2),
            4 => rows_of::<4>(panel, x, out, to_l2),
            5 => rows_of::<5>(panel, x, out, to_l2),
            6 => rows_of::<6>(panel, x, out, to_l2),
            7 => rows_of::<7>(panel, x, out, to_l2),
            _ => rows_of::<ROWS>(panel, x, out, to_l2),
        }
    }
}

/// A line of a k tile.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn load(lines: &[u16; TILE_ELEMENTS], line: usize) -> __m512bh {
    let line = &lines.as_chunks::<K_TILE>().0[line];
    // SAFETY: a line is 64 bytes, as is a __m512bh.
    unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_loadu_si512(line.as_ptr().cast())) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn rows_of<const R: usize>(panel: &[[u16; TILE_ELEMENTS]], x: &[u32], out: &mut [[f32; PANEL]], to_l2: bool) {
    let pairs = panel.len() * K_TILE / 2;
    assert!(x.len() == R * pairs && out.len() == R);
    let mut acc = [[_mm512_setzero_ps(); 2]; R];
    for (t, lines) in panel.iter().enumerate() {
        for pair in 0..K_TILE / 2 {
            // In the order in which they lie, as processors expect. One row would wait for the second-level cache.
            for line in [2 * pair, 2 * pair + 1] {
                prefetch_stream(lines.as_ptr().wrapping_byte_add(64 * line).cast(), AHEAD, to_l2 && R > 1);
            }
            let w = [load(lines, pair), load(lines, TILE + pair)];
            for (m, acc) in acc.iter_mut().enumerate() {
                // SAFETY: m < R and the pair is below `pairs`; see the assertion. A __m512bh is 64 plain bytes.
                let x = unsafe {
                    let x = *x.get_unchecked(m * pairs + t * (K_TILE / 2) + pair);
                    std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(x as i32))
                };
                for (acc, w) in acc.iter_mut().zip(w) {
                    *acc = _mm512_dpbf16_ps(*acc, x, w);
                }
            }
        }
    }
    for (acc, out) in acc.iter().zip(out) {
        for (acc, out) in acc.iter().zip(out.as_chunks_mut::<TILE>().0) {
            // SAFETY: half a row of the output is 16 f32.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), *acc) }
        }
    }
}

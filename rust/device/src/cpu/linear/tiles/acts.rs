//! The left operand of products by tiles: activations rounded to 16 bits, packed once a phase for all of its weights.

#[allow(clippy::wildcard_imports)] // Intrinsics.
use std::arch::x86_64::*;

use super::super::{
    out::SharedOut,
    phases::{LinearContext, grown},
};
use crate::{
    DeviceError,
    cpu::{
        amx::{ActTile, Amx, K_TILE, TILE_ROWS},
        simd::power_to_f16,
    },
    mmap::Pages,
};

/// Below this many values one thread packs them.
const MIN_PARALLEL: usize = 1 << 12;

/// What activations become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// bf16, columns in order, for float weights.
    Bf16,
    /// f16, columns in order, for float weights, each row scaled by a power of two.
    F16,
    /// bf16, columns 0 2 1 3 of every four, for packed weights.
    Bf16Quads,
    /// f16, likewise, each row scaled by a power of two.
    F16Quads,
}

/// `[M, K]` as `[16 rows][k tile][16 rows][32 columns]`; reused from product to product. What lies in rows beyond the last is
/// never read.
pub(super) struct ActTiles {
    data: Pages<u16>,
    /// What products of a row are to be multiplied by.
    factors: Vec<f32>,
    k_tiles: usize,
}

impl ActTiles {
    /// An empty one.
    pub(super) fn new() -> Result<Self, DeviceError> {
        Ok(Self { data: Pages::zeroed(0)?, factors: Vec::new(), k_tiles: 0 })
    }

    /// Packs `rows` rows of `k` columns, whole k tiles: `row(i, x)` writes row i to `x`, `[k]`. `lines` has room for a row of
    /// each worker, `[workers, k]`.
    pub(super) fn pack(
        &mut self,
        (_proof, form): (Amx, Form),
        context: LinearContext<'_>,
        lines: &mut Vec<f32>,
        [rows, k]: [usize; 2],
        row: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) -> Result<(), DeviceError> {
        let k_tiles = k / K_TILE;
        let needed = rows.next_multiple_of(TILE_ROWS) * k;
        if self.data.as_slice().len() < needed {
            self.data = Pages::zeroed(needed)?;
            self.data.advise_huge();
        }
        self.k_tiles = k_tiles;
        let factors = SharedOut::new(grown(&mut self.factors, rows, 1.0));
        let lines = SharedOut::new(grown(lines, context.pool.num_threads() * k, 0.0));
        let data = SharedOut::new(self.data.as_mut_slice());
        let pack = |worker: usize, start: usize, end: usize| {
            // SAFETY: each worker has a line of its own.
            let x = unsafe { lines.part(worker * k, k) };
            for r in start..end {
                row(r, x);
                // SAFETY: a worker has its rows for itself: the factors, and below 64 bytes of every k tile.
                let factor = &mut unsafe { factors.part(r, 1) }[0];
                let line = |t: usize| {
                    let at = (r / TILE_ROWS * k_tiles + t) * size_of::<ActTile>() / 2 + r % TILE_ROWS * K_TILE;
                    // SAFETY: as above.
                    &mut unsafe { data.part(at, K_TILE) }.as_chunks_mut().0[0]
                };
                // SAFETY: `_proof` says that the processor has AVX-512 with BF16.
                unsafe {
                    *factor = match form {
                        Form::Bf16 => bf16_row::<false>(x, line),
                        Form::Bf16Quads => bf16_row::<true>(x, line),
                        Form::F16 => f16_row::<false>(x, line),
                        Form::F16Quads => f16_row::<true>(x, line),
                    };
                }
            }
        };
        if rows < 2 || rows * k < MIN_PARALLEL {
            pack(0, 0, rows);
        } else {
            context.pool.for_each_share(rows, rows.div_ceil(context.pool.num_threads() * 4), &pack);
        }
        Ok(())
    }

    /// K tile `t` of the 16 rows from row `16 * group` on.
    pub(super) fn tile(&self, group: usize, t: usize) -> &ActTile {
        &self.data.as_slice().as_chunks().0[group * self.k_tiles + t]
    }

    /// What the products of row `r` are to be multiplied by: a power of two.
    pub(super) fn factor(&self, r: usize) -> f32 {
        self.factors[r]
    }
}

/// Columns of a quarter of a register in the order 0 2 1 3.
#[inline]
#[target_feature(enable = "avx512f")]
fn quads(v: __m512) -> __m512 {
    _mm512_permute_ps::<0b11_01_10_00>(v)
}

/// Halves of a line of 32 values.
#[inline]
#[target_feature(enable = "avx512f")]
fn halves(x: &[f32; K_TILE]) -> [__m512; 2] {
    // SAFETY: x is 32 f32.
    unsafe { [_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(x.as_ptr().add(K_TILE / 2))] }
}

/// Rounds a row to bf16 (to nearest, ties to even); its factor is 1.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn bf16_row<'a, const QUADS: bool>(x: &[f32], line: impl Fn(usize) -> &'a mut [u16; K_TILE]) -> f32 {
    for (t, x) in x.as_chunks().0.iter().enumerate() {
        let halves = halves(x).map(|v| if QUADS { quads(v) } else { v });
        let rounded = _mm512_cvtne2ps_pbh(halves[1], halves[0]);
        // SAFETY: a line is 64 bytes, as is a __m512bh.
        unsafe { _mm512_storeu_si512(line(t).as_mut_ptr().cast(), std::mem::transmute::<__m512bh, __m512i>(rounded)) }
    }
    1.0
}

/// Scales a row by a power of two and rounds it to f16, likewise; returns what undoes the scaling.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
fn f16_row<'a, const QUADS: bool>(x: &[f32], line: impl Fn(usize) -> &'a mut [u16; K_TILE]) -> f32 {
    let (lines, _) = x.as_chunks::<K_TILE>();
    let magnitude = _mm512_set1_epi32(0x7fff_ffff);
    // As integers: infinities are larger than all numbers, and NaN than those.
    let largest = lines.iter().fold(_mm512_setzero_si512(), |largest, x| {
        let [low, high] = halves(x).map(|v| _mm512_and_si512(_mm512_castps_si512(v), magnitude));
        _mm512_max_epu32(largest, _mm512_max_epu32(low, high))
    });
    let up = power_to_f16(_mm512_reduce_max_epu32(largest));
    let splat = _mm512_set1_ps(up);
    for (t, x) in lines.iter().enumerate() {
        let [low, high] = halves(x).map(|v| {
            let scaled = _mm512_mul_ps(v, splat);
            _mm512_cvtps_ph::<0>(if QUADS { quads(scaled) } else { scaled })
        });
        let rounded = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
        // SAFETY: a line is 64 bytes.
        unsafe { _mm512_storeu_si512(line(t).as_mut_ptr().cast(), rounded) }
    }
    1.0 / up
}

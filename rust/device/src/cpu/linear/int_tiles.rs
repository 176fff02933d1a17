//! Packed weights times many rows by AMX, to the bit what the kernels of few rows compute.
//!
//! Codes of weights and both parts of activations are integers that bf16 holds, upper parts times 128 included, and `tdpbf16ps`
//! adds products in f32: as long as sums stay below 2^24 they are the integers that the other kernels compute. Weights less their
//! zero are at most 31 in magnitude with sub-blocks of 32 columns (31 * 32 * 16320 < 2^24) and 64 with sub-blocks of 16; those of
//! 8 bits and of tables with sub-blocks of 32 get a sum for each part, whose addition rounds once, as the conversion of an
//! integer does. Scales and minima are then applied by the same operations.
//!
//! A panel is unpacked once for many rows: of each block of 32 columns and each tile of 16 rows, for each sub-block
//! `[16 column pairs][16 rows][2 columns]` bf16 with zeros beside the sub-block's columns, then 16 scales and 16 minima.
//!
//! Measured on one core of a busy Granite Rapids, 1536 x 576, GFLOP/s (VNNI kernels 230): `Q4_1` 315 at 32 rows, 350 at 64, 378
//! at 256; `Q8_0` 220 to 250, 255 to 290, 275 to 325 (VNNI 210 to 240). Tile loads and stores take most of it, AMX a quarter.

#[allow(clippy::wildcard_imports)] // Intrinsics.
use std::arch::x86_64::*;

use super::{
    PANEL,
    activations::{ACT_ROWS, ActTile},
    avx512::{codes, scales_or_minima},
    layout::{Codes, Layout, Lookup, T4, blocks_of, is_wide, select, zero_point},
};
use crate::cpu::amx::{IntTiles, Sums};

/// Blocks whose activations and weights are in the level 1 cache at once.
const BLOCKS: usize = 8;
/// f32 of a cache line; a tile is loaded by whole lines.
pub(super) const LINE: usize = 16;
/// f32 of a sub-block of a tile of a block.
const SUB_BLOCK: usize = 256 + 16 + 16;

/// Unpacks a panel.
pub(super) type Unpack = unsafe fn(panel: &[u8], lookup: &Lookup, out: &mut [f32]);
/// Multiplies an unpacked panel by rows, `[rows / 16, blocks]`; writes whole tiles of 16 rows.
pub(super) type AmxKernel = unsafe fn(tiles: &IntTiles, panel: &[f32], acts: &[ActTile], out: &mut [[f32; PANEL]]);

pub(super) fn unpack(layout: Layout) -> Unpack {
    select!(layout, unpack_panel)
}

/// From this number of rows on, AMX is faster than the kernels of few rows (`examples/bench_amx.rs`).
pub(super) const fn min_rows(layout: Layout) -> usize {
    match layout.codes {
        Codes::U4 | Codes::U5 if !layout.halves => 24,
        // They take two tiles of sums.
        _ => 48,
    }
}

pub(super) fn kernel(layout: Layout) -> AmxKernel {
    select!(layout, multiply)
}

/// f32 of an unpacked block.
pub(super) const fn unpacked_len(halves: bool) -> usize {
    2 * (1 + halves as usize) * SUB_BLOCK
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn unpack_panel<const CODES: u8, const HALVES: bool, const MIN: bool, const SUPER: bool>(
    panel: &[u8],
    lookup: &Lookup,
    out: &mut [f32],
) {
    let sub_blocks = const { 1 + HALVES as usize };
    let zero = const { zero_point(CODES, MIN) };
    // bf16 of every code of up to 6 bits, or of the table.
    let mut table = [0u16; 64];
    for (i, v) in table.iter_mut().enumerate() {
        let code = if CODES == T4 { i32::from(lookup.codes[i % 16]) } else { i as i32 };
        *v = ((code - zero) as f32).to_bits().wrapping_shr(16) as u16;
    }
    // SAFETY: the table is two registers long.
    let table = unsafe { [_mm512_loadu_si512(table.as_ptr().cast()), _mm512_loadu_si512(table.as_ptr().add(32).cast())] };
    for ((block, floats), out) in
        blocks_of::<CODES, HALVES, MIN, SUPER>(panel).zip(out.chunks_exact_mut(const { unpacked_len(HALVES) }))
    {
        for (tile, out) in out.chunks_exact_mut(sub_blocks * SUB_BLOCK).enumerate() {
            for g in 0..4 {
                // SAFETY: the features are enabled.
                let quads = unsafe { codes::<CODES>(block, g, tile) };
                for (half, quad) in quads.into_iter().enumerate() {
                    let pairs = [to_bf16::<CODES, 0>(quad, table, zero), to_bf16::<CODES, 1>(quad, table, zero)];
                    for sub_block in 0..sub_blocks {
                        let own = !HALVES || half == sub_block;
                        for (i, pairs) in pairs.into_iter().enumerate() {
                            let at = sub_block * SUB_BLOCK + (8 * half + 2 * g + i) * 16;
                            let line = if own { pairs } else { _mm512_setzero_si512() };
                            // SAFETY: `at` is a line of the sub-block's 16.
                            unsafe { _mm512_storeu_si512(out.as_mut_ptr().add(at).cast(), line) }
                        }
                    }
                }
            }
            for (sub_block, out) in out.chunks_exact_mut(SUB_BLOCK).enumerate() {
                let own = |kind| {
                    // SAFETY: the features are enabled.
                    unsafe { scales_or_minima::<CODES, HALVES, SUPER>(block, floats, (kind, sub_block, tile)) }
                };
                // SAFETY: 16 scales and 16 minima end the sub-block.
                unsafe {
                    _mm512_storeu_ps(out.as_mut_ptr().add(256), _mm512_mul_ps(own(0), _mm512_set1_ps(lookup.unit)));
                    if MIN {
                        _mm512_storeu_ps(out.as_mut_ptr().add(272), own(1));
                    }
                }
            }
        }
    }
}

/// Bytes 2 `PAIR` and 2 `PAIR` + 1 of each word of 4 codes, as bf16, their zero subtracted.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn to_bf16<const CODES: u8, const PAIR: u32>(quad: __m512i, table: [__m512i; 2], zero: i32) -> __m512i {
    let byte = _mm512_set1_epi32(255);
    let quad = if PAIR == 0 { quad } else { _mm512_srli_epi32::<16>(quad) };
    let first = _mm512_and_si512(quad, byte);
    let second = _mm512_and_si512(_mm512_srli_epi32::<8>(quad), byte);
    if CODES != 8 {
        let words = _mm512_or_si512(first, _mm512_slli_epi32::<16>(second));
        return _mm512_permutex2var_epi16(table[0], words, table[1]);
    }
    let float = |codes| _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_sub_epi32(codes, _mm512_set1_epi32(zero))));
    _mm512_or_si512(_mm512_srli_epi32::<16>(float(first)), float(second))
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn multiply<const CODES: u8, const HALVES: bool, const MIN: bool, const SUPER: bool>(
    tiles: &IntTiles,
    panel: &[f32],
    acts: &[ActTile],
    out: &mut [[f32; PANEL]],
) {
    let sub_blocks = const { 1 + HALVES as usize };
    let blocks = panel.len() / unpacked_len(HALVES);
    assert!(acts.len() >= out.len().div_ceil(ACT_ROWS) * blocks);
    let mut sums = [Sums::ZERO; 2];
    let mut first = 0;
    while first < blocks {
        let end = blocks.min(first + BLOCKS);
        for (acts, out) in acts.chunks_exact(blocks).zip(out.chunks_exact_mut(ACT_ROWS)) {
            for tile in 0..2 {
                let weights = |b: usize, sub_block: usize| {
                    let at = ((b * 2 + tile) * sub_blocks + sub_block) * SUB_BLOCK;
                    panel[at..at + SUB_BLOCK].first_chunk::<SUB_BLOCK>().expect("a sub-block's length")
                };
                let product = |b: usize, sums: &mut Sums| {
                    let codes = |sub_block| weights(b, sub_block)[..256].first_chunk().expect("16 lines");
                    if HALVES {
                        tiles.of_halves(&acts[b].parts, [codes(0), codes(1)], sums);
                    } else if is_wide(CODES) {
                        tiles.of_parts(&acts[b].parts, codes(0), sums);
                    } else {
                        tiles.of_block(&acts[b].parts, codes(0), sums);
                    }
                };
                let mut acc = [_mm512_setzero_ps(); ACT_ROWS];
                if first > 0 {
                    for (acc, out) in acc.iter_mut().zip(out.iter()) {
                        // SAFETY: half a row is 16 f32.
                        *acc = unsafe { _mm512_loadu_ps(out.as_ptr().add(16 * tile)) };
                    }
                }
                product(first, &mut sums[first % 2]);
                for b in first..end {
                    // AMX is a block ahead.
                    if b + 1 < end {
                        product(b + 1, &mut sums[(b + 1) % 2]);
                    }
                    let (x, dots) = (&acts[b], &sums[b % 2].0);
                    for sub_block in 0..sub_blocks {
                        let weights = weights(b, sub_block);
                        // SAFETY: a sub-block ends with 16 scales and 16 minima.
                        let (scale, min) =
                            unsafe { (_mm512_loadu_ps(weights.as_ptr().add(256)), _mm512_loadu_ps(weights.as_ptr().add(272))) };
                        let scaled_sums = &x.scaled_sums[if HALVES { 1 + sub_block } else { 0 }];
                        for (m, acc) in acc.iter_mut().enumerate() {
                            // SAFETY: a row of sums is 16 f32.
                            let row = |i: usize| unsafe { _mm512_load_ps(dots[i][m].as_ptr()) };
                            let dot = if is_wide(CODES) && !HALVES { _mm512_add_ps(row(0), row(1)) } else { row(sub_block) };
                            let dot = _mm512_mul_ps(dot, _mm512_set1_ps(x.scale[m]));
                            *acc = _mm512_fmadd_ps(dot, scale, *acc);
                            if MIN {
                                *acc = _mm512_fmadd_ps(min, _mm512_set1_ps(scaled_sums[m]), *acc);
                            }
                        }
                    }
                }
                for (acc, out) in acc.iter().zip(out.iter_mut()) {
                    // SAFETY: half a row is 16 f32.
                    unsafe { _mm512_storeu_ps(out.as_mut_ptr().add(16 * tile), *acc) }
                }
            }
        }
        first = end;
    }
}

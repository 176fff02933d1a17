//! Packed panels as bf16 pairs for the tile units.
//!
//! A code becomes a float in the vector where it lies: byte 2 of a lane of 128.0 is the mantissa's upper 7 bits, so the lane is
//! 128 + code, and `scale * (128 + code) + (min - 128 * scale)` is one fused operation; only 8-bit codes need a conversion. Lanes are
//! taken from the line of codes in the order (row 0, column k), (row 0, column k + 1), (row 1, column k) ..., so that rounding two such
//! vectors to bf16 gives a row of pairs of a tile. For 32 values: 2 byte permutations, 2 fused operations, 1 rounding, 1 store.

#[allow(clippy::wildcard_imports)] // Intrinsics.
use std::arch::x86_64::*;

use super::{
    avx512::codes,
    packed::{Codes, Layout, block_bytes, codes_bytes, select, zero_point},
};

/// Elements of a k tile of a panel.
const TILE_PAIR: usize = 1024;

/// Writes whole blocks of 32 columns of a panel, as [`PanelSource::fill`](crate::cpu::amx::PanelSource::fill) does.
/// Needs AVX-512 F, BW, VL, DQ, VNNI, BF16, VBMI.
pub(super) type Fill = unsafe fn(blocks: &[u8], out: &mut [u16]);

pub(super) fn fill(layout: Layout) -> Fill {
    select!(layout, fill_blocks)
}

/// Byte indices into a line of codes (byte 4 r + j: row r, column j) for lanes (row first + i / 2, column j + i % 2), at `byte` of each lane.
const fn lane_bytes(first: usize, j: usize, byte: usize) -> [u8; 64] {
    let mut index = [0; 64];
    let mut i = 0;
    while i < 16 {
        index[4 * i + byte] = (4 * (first + i / 2) + j + i % 2) as u8;
        i += 1;
    }
    index
}

const fn bytes_of(code_bits: u8) -> [[[u8; 64]; 2]; 2] {
    let byte = if code_bits == 8 { 0 } else { 2 };
    [[lane_bytes(0, 0, byte), lane_bytes(8, 0, byte)], [lane_bytes(0, 2, byte), lane_bytes(8, 2, byte)]]
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx512vbmi,avx2,fma,f16c")]
fn fill_blocks<const CODES: u8, const HALVES: bool, const MIN: bool>(blocks: &[u8], out: &mut [u16]) {
    let index = const { bytes_of(CODES) };
    // SAFETY: an array of 64 bytes.
    let index = index.map(|pair| pair.map(|bytes| unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }));
    // Rows 0 to 7, and 8 to 15, each twice.
    let twice = [
        _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7),
        _mm512_setr_epi32(8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15),
    ];
    let groups = const { 1 + HALVES as usize };
    // What a lane holds beyond its code, and what is to be subtracted.
    let added = const { if CODES == 8 { 0 } else { 128 } };
    let zero = _mm512_set1_ps((added + zero_point(CODES, MIN)) as f32);
    let base = _mm512_castps_si512(_mm512_set1_ps(128.0));
    for (block, out) in blocks.chunks_exact(const { block_bytes(CODES, HALVES, MIN) }).zip(out.chunks_exact_mut(TILE_PAIR)) {
        // SAFETY: lines of scales and minima lie within the block.
        let f16s = |at: usize| unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(block.as_ptr().add(at).cast())) };
        for (tile, out) in out.chunks_exact_mut(TILE_PAIR / 2).enumerate() {
            let mut scales = [[_mm512_setzero_ps(); 2]; 2];
            let mut mins = [[_mm512_setzero_ps(); 2]; 2];
            for group in 0..groups {
                let at = const { codes_bytes(CODES) } + 64 * group + 32 * tile;
                let scale = f16s(at);
                let min = if MIN { f16s(at + 64 * groups) } else { _mm512_setzero_ps() };
                let min = _mm512_fnmadd_ps(scale, zero, min);
                for rows in 0..2 {
                    scales[group][rows] = _mm512_permutexvar_ps(twice[rows], scale);
                    mins[group][rows] = _mm512_permutexvar_ps(twice[rows], min);
                }
            }
            for g in 0..4 {
                let lines = codes::<CODES>(block, g, tile);
                for (half, line) in lines.into_iter().enumerate() {
                    let group = if HALVES { half } else { 0 };
                    for (pair, index) in index.iter().enumerate() {
                        let value = |rows: usize| {
                            let lanes = if CODES == 8 {
                                let bytes = _mm512_maskz_permutexvar_epi8(0x1111_1111_1111_1111, index[rows], line);
                                _mm512_cvtepi32_ps(bytes)
                            } else {
                                let mask = 0x4444_4444_4444_4444;
                                _mm512_castsi512_ps(_mm512_mask_permutexvar_epi8(base, mask, index[rows], line))
                            };
                            _mm512_fmadd_ps(lanes, scales[group][rows], mins[group][rows])
                        };
                        let pairs = _mm512_cvtne2ps_pbh(value(1), value(0));
                        let row = half * 8 + g * 2 + pair;
                        // SAFETY: row < 16, and a tile is 16 rows of 64 bytes; a __m512bh is 64 plain bytes.
                        unsafe {
                            _mm512_storeu_si512(
                                out.as_mut_ptr().add(row * 32).cast(),
                                std::mem::transmute::<__m512bh, __m512i>(pairs),
                            );
                        }
                    }
                }
            }
        }
    }
}

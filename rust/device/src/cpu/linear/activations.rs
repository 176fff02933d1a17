//! Activations as integers of 8 bits, or of 15 in two int8 parts, quantized once a phase and shared by all of its projections.
//!
//! A few channels are much larger than the others, the same ones for most tokens, and there 8 bits are not enough. Outlier blocks
//! of a row have a lower part, the others have zeros there, and kernels leave out lower parts that are zero for all of their
//! rows: an integer sum does not change. Over 768 tokens of text, against float activations:
//!
//! | lower parts | perplexity, SmolLM2 | likeliest token | perplexity, gemma-3-270m | likeliest token | of blocks, 576 / 1536 |
//! | --- | --- | --- | --- | --- | --- |
//! | everywhere | 1.0000 | 1.000 | 1.0001 | 0.999 | 1 / 1 |
//! | where the scale is above 2 means | 1.0008 | 0.988 | 0.9978 | 0.990 | 0.09 / 0.06 |
//! | nowhere | 1.0104 | 0.962 | 1.0047 | 0.970 | 0 / 0 |

// A body that is not inlined would be compiled for the baseline instructions only.
#![allow(clippy::inline_always)]

use super::{
    act_block::{ActBlock, BLOCK, MAX_CODE, UPPER, quantize_blocks},
    elementwise::{ROUND, per_isa},
};
use crate::cpu::Isa;

/// Blocks from one row to the next: an odd number of cache lines, so that the same block of many rows lies in different sets of a
/// cache.
pub(super) const fn stride(cols: usize) -> usize {
    let blocks = cols / BLOCK;
    blocks + (6 - blocks % 4) % 4
}

/// The magnitudes are compared as integers: a NaN is above them all, becomes the scale, and so is not lost.
fn largest(x: &[f32; BLOCK]) -> f32 {
    f32::from_bits(x.iter().fold(0, |m, v| m.max(v.to_bits() & 0x7fff_ffff)))
}

fn quantize_block(x: &[f32; BLOCK], inverse: f32, out: &mut ActBlock) {
    let mut codes = [0i32; BLOCK];
    for (code, v) in codes.iter_mut().zip(x) {
        *code = ((v * inverse + ROUND).to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32).clamp(-MAX_CODE, MAX_CODE);
    }
    let keep = if out.has_lower != 0 { -1 } else { 0 };
    for ((upper, lower), code) in out.upper.iter_mut().zip(&mut out.lower).zip(&mut codes) {
        let part = (*code + UPPER / 2).div_euclid(UPPER);
        let rest = (*code - part * UPPER) & keep;
        *code = part * UPPER + rest;
        (*upper, *lower) = (part as i8, rest as i8);
    }
    let (first, last) = codes.split_at(BLOCK / 2);
    out.set_sums([first.iter().sum(), last.iter().sum()]);
}

/// Quantizes one row: `out` is `[row length / 32]`.
pub(super) fn quantize_row(isa: Isa, x: &[f32], out: &mut [ActBlock]) {
    match isa {
        // SAFETY: the phases never pass an ISA above `Isa::detect`.
        #[cfg(target_arch = "x86_64")]
        Isa::Amx | Isa::Avx512 => unsafe { super::activations_avx512::quantize_row(x, out) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { super::activations_avx2::quantize_row(x, out) },
        _ => quantize_blocks!(x, out, largest, quantize_block),
    }
}

/// Rows of a tile.
pub(super) const ACT_ROWS: usize = 16;

/// 32 columns of 16 rows for AMX; what lies in rows that there are not affects no other.
#[derive(Clone)]
#[repr(C, align(64))]
pub(super) struct ActTile {
    /// 128 times the upper parts, and the lower parts, as bf16.
    pub parts: [[[u16; BLOCK]; ACT_ROWS]; 2],
    /// As those of [`ActBlock`], of each row.
    pub scale: [f32; ACT_ROWS],
    pub scaled_sums: [[f32; ACT_ROWS]; 3],
}

impl ActTile {
    pub(super) const ZERO: Self =
        Self { parts: [[[0; BLOCK]; ACT_ROWS]; 2], scale: [0.0; ACT_ROWS], scaled_sums: [[0.0; ACT_ROWS]; 3] };
}

#[inline(always)]
fn tile_body(row: usize, acts: &[ActBlock], out: &mut [ActTile]) {
    for (b, out) in out.iter_mut().enumerate() {
        let x = &acts[b];
        for ((part, codes), factor) in out.parts.iter_mut().zip([&x.upper, &x.lower]).zip([UPPER, 1]) {
            for (v, code) in part[row].iter_mut().zip(codes) {
                *v = (((i32::from(*code) * factor) as f32).to_bits() >> 16) as u16;
            }
        }
        out.scale[row] = x.scale;
        for (sums, sum) in out.scaled_sums.iter_mut().zip(x.scaled_sums) {
            sums[row] = sum;
        }
    }
}

per_isa!(
    /// Writes a row's blocks as row `row` (0 to 15) of tiles.
    tile_row = tile_body(row: usize, acts: &[ActBlock], out: &mut [ActTile])
);

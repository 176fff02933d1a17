//! Packed weights to k tiles of 16 bits: the columns of a block of 32 rows, `[2 tiles][16 column pairs][16 rows][2 columns]`.
//!
//! A register of a packed block has four columns of 16 rows, a byte each. Masked to words it has columns 0 and 2 of every row,
//! shifted by a byte 1 and 3: two lines of a tile, if activations have the columns of every four in the order 0 2 1 3. So nothing
//! is permuted, and one packing of activations serves every format.
//!
//! - f16: `0x6400 | code` is 1024 + code. Less 1024 and the code's zero, times the scale, plus the minimum: two operations for 32
//!   weights. A code less its zero is exact, the scale is rounded to 11 bits, and so is the weight.
//! - bf16, which has no arithmetic: two halves in f32, rounded together.
//!
//! Weights are kept times [`UNIT`], which keeps those of small scales out of f16's denormal numbers.
//!
//! Cost for 32 weights of `U4`, instructions: f16 4 (1.75 to part the nibbles, 2 to scale them, a store aside), bf16 9.

// A helper that is not inlined would pass registers through memory.
#![allow(clippy::inline_always, unsafe_op_in_unsafe_fn)]

#[allow(clippy::wildcard_imports)] // Intrinsics.
use std::arch::x86_64::*;

use super::super::{
    avx512::{Registers, codes, line, scales_or_minima},
    layout::{
        Codes, LOWER_BYTES, Layout, Lookup, T4, UPPER_BYTES, block_bytes, select, super_block_body_bytes, super_block_bytes,
        super_block_len, zero_point,
    },
};
use crate::cpu::{
    amx::{K_TILE, WeightTile, scale_codes},
    simd::prefetch,
};

/// What weights are multiplied by; a power of two.
pub(super) const UNIT: f32 = 16.0;
/// The largest magnitude of a weight that is still an f16 times [`UNIT`].
pub(in crate::cpu::linear) const MAX_WEIGHT: f32 = 65504.0 / UNIT;
/// Of codes that stand for themselves.
pub(super) static NO_LOOKUP: Lookup = Lookup { codes: [0; 16], unit: 1.0 };
/// Bytes ahead of use that weights are prefetched.
const AHEAD: usize = 2048;

/// Writes k tile `t` of a panel, which a matrix of logits has in two planes, the upper and the lower one.
pub(super) type Dequantize = unsafe fn(panel: [&[u8]; 2], lookup: &Lookup, t: usize, out: &mut WeightTile);

/// The kernel of a layout. It needs AVX-512 with BF16, for f16 AVX-512 FP16 too.
pub(super) fn kernel(layout: Layout, fp16: bool) -> Dequantize {
    if fp16 { select!(layout, to_f16) } else { select!(layout, to_bf16) }
}

/// The kernel of codes of 8 bits in planes.
pub(super) fn planes_kernel(fp16: bool) -> Dequantize {
    if fp16 { planes::<true> } else { planes::<false> }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn to_f16<const CODES: u8, const HALVES: bool, const MIN: bool, const SUPER: bool>(
    [panel, _]: [&[u8]; 2],
    lookup: &Lookup,
    t: usize,
    out: &mut WeightTile,
) {
    // SAFETY: the features are enabled, and the caller's processor has AVX-512 FP16.
    unsafe { dequantize::<CODES, HALVES, MIN, SUPER, true>(panel, lookup, t, out) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c")]
fn to_bf16<const CODES: u8, const HALVES: bool, const MIN: bool, const SUPER: bool>(
    [panel, _]: [&[u8]; 2],
    lookup: &Lookup,
    t: usize,
    out: &mut WeightTile,
) {
    // SAFETY: the features are enabled.
    unsafe { dequantize::<CODES, HALVES, MIN, SUPER, false>(panel, lookup, t, out) }
}

#[inline(always)]
unsafe fn dequantize<const CODES: u8, const HALVES: bool, const MIN: bool, const SUPER: bool, const FP16: bool>(
    panel: &[u8],
    lookup: &Lookup,
    t: usize,
    out: &mut WeightTile,
) {
    let (span, len) = (const { super_block_bytes(CODES, HALVES, MIN, SUPER) }, const { super_block_len(SUPER) });
    let (blocks, floats) = panel[t / len * span..][..span].split_at(const { super_block_body_bytes(CODES, HALVES, MIN, SUPER) });
    let bytes = const { block_bytes(CODES, HALVES, MIN, SUPER) };
    let block = &blocks[t % len * bytes..][..bytes];
    prefetch_ahead(block);
    let lookup_registers = Registers::of(lookup);
    for tile in 0..2 {
        let scaling = |sub_block| {
            let own = |kind| scales_or_minima::<CODES, HALVES, SUPER>(block, floats, (kind, sub_block, tile));
            let min = if MIN { own(1) } else { _mm512_setzero_ps() };
            Scaling::<FP16>::new(_mm512_mul_ps(own(0), _mm512_set1_ps(lookup.unit)), min, const { zero_point(CODES, MIN) })
        };
        let scaling = [scaling(0), if HALVES { scaling(1) } else { scaling(0) }];
        for g in 0..4 {
            let words = if CODES == 4 {
                nibbles(line(block, tile * 256 + g * 64))
            } else {
                lookup_registers.look_up::<CODES>(codes::<CODES>(block, g, tile)).map(|bytes| words(bytes))
            };
            put(scaling, words, (tile, g), out);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c")]
fn planes<const FP16: bool>([upper, lower]: [&[u8]; 2], _: &Lookup, t: usize, out: &mut WeightTile) {
    let (upper, lower) = (&upper[t * UPPER_BYTES..][..UPPER_BYTES], &lower[t * LOWER_BYTES..][..LOWER_BYTES]);
    prefetch_ahead(upper);
    prefetch_ahead(lower);
    // SAFETY: the features are enabled, and for f16 the caller's processor has AVX-512 FP16.
    unsafe {
        let nibble = _mm512_set1_epi8(15);
        for tile in 0..2 {
            // They lie as those of four bits.
            let scales = scales_or_minima::<{ Codes::U4 as u8 }, false, false>(upper, &upper[512..], (0, 0, tile));
            let scaling = Scaling::<FP16>::new(scales, _mm512_setzero_ps(), const { zero_point(8, false) });
            for g in 0..4 {
                let at = tile * 256 + g * 64;
                let (upper, lower) = (line(upper, at), line(lower, at));
                let low =
                    _mm512_or_si512(_mm512_slli_epi16::<4>(_mm512_and_si512(upper, nibble)), _mm512_and_si512(lower, nibble));
                let high =
                    _mm512_or_si512(_mm512_andnot_si512(nibble, upper), _mm512_and_si512(_mm512_srli_epi16::<4>(lower), nibble));
                put([scaling; 2], [words(low), words(high)], (tile, g), out);
            }
        }
    }
}

/// In the order in which they lie, as processors expect.
#[inline(always)]
fn prefetch_ahead(block: &[u8]) {
    for at in (0..block.len()).step_by(64) {
        prefetch(block.as_ptr().wrapping_add(AHEAD + at));
    }
}

/// Even and odd bytes of a register of codes, as words.
#[inline(always)]
unsafe fn words(bytes: __m512i) -> [__m512i; 2] {
    [_mm512_and_si512(bytes, _mm512_set1_epi16(255)), _mm512_srli_epi16::<8>(bytes)]
}

/// The same of low and of high nibbles.
#[inline(always)]
unsafe fn nibbles(bytes: __m512i) -> [[__m512i; 2]; 2] {
    let low = |v| _mm512_and_si512(v, _mm512_set1_epi16(15));
    [[low(bytes), low(_mm512_srli_epi16::<8>(bytes))], [low(_mm512_srli_epi16::<4>(bytes)), _mm512_srli_epi16::<12>(bytes)]]
}

/// Writes lines of columns 4 g.. and 16 + 4 g.. of a tile.
#[inline(always)]
unsafe fn put<const FP16: bool>(
    scaling: [Scaling<FP16>; 2],
    words: [[__m512i; 2]; 2],
    (tile, g): (usize, usize),
    out: &mut WeightTile,
) {
    let (lines, _) = out.as_chunks_mut::<K_TILE>();
    for half in 0..2 {
        for pair in 0..2 {
            let values = scaling[half].apply(words[half][pair]);
            let line = &mut lines[16 * tile + 8 * half + 2 * g + pair];
            _mm512_storeu_si512(line.as_mut_ptr().cast(), values);
        }
    }
}

/// Scales and minima of 16 rows, times [`UNIT`]: of f16 each twice, a word for each column of a pair.
#[derive(Clone, Copy)]
struct Scaling<const FP16: bool> {
    scale: __m512i,
    min: __m512i,
    /// Of f16: 1024 and the code of zero.
    zero: __m512i,
}

impl<const FP16: bool> Scaling<FP16> {
    /// # Safety
    /// The processor has AVX-512; likewise below.
    #[inline(always)]
    unsafe fn new(scale: __m512, min: __m512, zero: i32) -> Self {
        let unit = _mm512_set1_ps(UNIT);
        let (scale, min) = (_mm512_mul_ps(scale, unit), _mm512_mul_ps(min, unit));
        if FP16 {
            let twice = |v: __m512| {
                let v = _mm512_cvtepu16_epi32(_mm512_cvtps_ph::<0>(v));
                _mm512_or_si512(v, _mm512_slli_epi32::<16>(v))
            };
            // Of numbers from 1024 on the last bit of an f16 is 1.
            return Self { scale: twice(scale), min: twice(min), zero: _mm512_set1_epi16((0x6400 + zero) as i16) };
        }
        let min = _mm512_fnmadd_ps(_mm512_set1_ps(zero as f32), scale, min);
        Self { scale: _mm512_castps_si512(scale), min: _mm512_castps_si512(min), zero: _mm512_setzero_si512() }
    }

    /// The weights of 32 codes.
    #[inline(always)]
    unsafe fn apply(self, words: __m512i) -> __m512i {
        if FP16 {
            let codes = _mm512_or_si512(words, _mm512_set1_epi16(0x6400));
            return scale_codes(codes, self.zero, self.scale, self.min);
        }
        let weights = |codes: __m512i| {
            _mm512_fmadd_ps(_mm512_cvtepi32_ps(codes), _mm512_castsi512_ps(self.scale), _mm512_castsi512_ps(self.min))
        };
        let even = weights(_mm512_and_si512(words, _mm512_set1_epi32(0xffff)));
        let odd = weights(_mm512_srli_epi32::<16>(words));
        to_bf16_pairs(even, odd)
    }
}

/// Rounds to bf16, to nearest, ties to even: each word pair an even and an odd value.
#[inline(always)]
unsafe fn to_bf16_pairs(even: __m512, odd: __m512) -> __m512i {
    // 16 even ones, then 16 odd ones.
    let rounded = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(odd, even));
    let order = _mm512_add_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
        _mm512_slli_epi32::<16>(_mm512_setr_epi32(16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31)),
    );
    _mm512_permutexvar_epi16(order, rounded)
}

//! Quantization of activations by AVX-512, of finite values with the bits of [`activations`](super::activations).

#[allow(clippy::wildcard_imports)] // Intrinsics.
use std::arch::x86_64::*;

use super::act_block::{ActBlock, BLOCK, UPPER, quantize_blocks};

/// Values of a register.
const LANES: usize = 16;

/// Quantizes one row: `out` is `[row length / 32]`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) fn quantize_row(ratio: f32, x: &[f32], out: &mut [ActBlock]) {
    quantize_blocks!(ratio, x, out, largest, quantize_block);
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn largest(x: &[f32; BLOCK]) -> f32 {
    let (halves, _) = x.as_chunks();
    f32::from_bits(_mm512_reduce_max_epu32(_mm512_max_epu32(magnitudes(&halves[0]), magnitudes(&halves[1]))))
}

/// Writes codes and sums.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn quantize_block(x: &[f32; BLOCK], inverse: f32, out: &mut ActBlock) {
    let (mut sums, has_lower) = ([0; 2], out.has_lower != 0);
    let ((halves, _), (upper, _), (lower, _)) = (x.as_chunks(), out.upper.as_chunks_mut(), out.lower.as_chunks_mut());
    for (half, sum) in sums.iter_mut().enumerate() {
        *sum = quantize_half(&halves[half], (inverse, has_lower), &mut upper[half], &mut lower[half]);
    }
    out.set_sums(sums);
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn load(x: &[f32; LANES]) -> __m512 {
    // SAFETY: it is as long as a register.
    unsafe { _mm512_loadu_ps(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn magnitudes(x: &[f32; LANES]) -> __m512i {
    _mm512_and_si512(_mm512_castps_si512(load(x)), _mm512_set1_epi32(0x7fff_ffff))
}

/// Quantizes half a block; returns the sum of the codes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn quantize_half(x: &[f32; LANES], (inverse, has_lower): (f32, bool), upper: &mut [i8; LANES], lower: &mut [i8; LANES]) -> i32 {
    let codes = _mm512_cvtps_epi32(_mm512_mul_ps(load(x), _mm512_set1_ps(inverse)));
    let parts = _mm512_srai_epi32::<{ UPPER.ilog2() }>(_mm512_add_epi32(codes, _mm512_set1_epi32(UPPER / 2)));
    let rest =
        if has_lower { _mm512_sub_epi32(codes, _mm512_slli_epi32::<{ UPPER.ilog2() }>(parts)) } else { _mm512_setzero_si512() };
    let (parts, rest) = (_mm512_cvtepi32_epi8(parts), _mm512_cvtepi32_epi8(rest));
    // SAFETY: each is 16 bytes.
    unsafe {
        _mm_storeu_si128(upper.as_mut_ptr().cast(), parts);
        _mm_storeu_si128(lower.as_mut_ptr().cast(), rest);
    }
    let ones = _mm_set1_epi8(1);
    let sums = _mm_slli_epi32::<{ UPPER.ilog2() as i32 }>(_mm_dpbusd_epi32(_mm_setzero_si128(), ones, parts));
    let sums = _mm_dpbusd_epi32(sums, ones, rest);
    let sums = _mm_add_epi32(sums, _mm_shuffle_epi32::<0b01_00_11_10>(sums));
    _mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_shuffle_epi32::<0b10_11_00_01>(sums)))
}

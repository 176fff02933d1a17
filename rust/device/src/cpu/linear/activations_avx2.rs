//! Quantization of activations by AVX2, of finite values with the bits of [`activations`](super::activations).

#[allow(clippy::wildcard_imports)] // Intrinsics.
use std::arch::x86_64::*;

use super::act_block::{ActBlock, BLOCK, UPPER, quantize_blocks};

/// Values of a register.
const LANES: usize = 8;
/// Registers of a block.
const PARTS: usize = BLOCK / LANES;

/// Quantizes one row: `out` is `[row length / 32]`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn quantize_row(ratio: f32, x: &[f32], out: &mut [ActBlock]) {
    quantize_blocks!(ratio, x, out, largest, quantize_block);
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load(x: &[f32; BLOCK]) -> [__m256; PARTS] {
    // SAFETY: a block is that many registers long.
    std::array::from_fn(|i| unsafe { _mm256_loadu_ps(x.as_ptr().add(i * LANES)) })
}

/// The magnitudes are compared as integers, see `activations`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn largest(x: &[f32; BLOCK]) -> f32 {
    let [a, b, c, d] = load(x).map(|v| _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7fff_ffff)));
    let max = _mm256_max_epu32(_mm256_max_epu32(a, b), _mm256_max_epu32(c, d));
    let max = _mm_max_epu32(_mm256_castsi256_si128(max), _mm256_extracti128_si256::<1>(max));
    let max = _mm_max_epu32(max, _mm_shuffle_epi32::<0b01_00_11_10>(max));
    let max = _mm_max_epu32(max, _mm_shuffle_epi32::<0b10_11_00_01>(max));
    f32::from_bits(_mm_cvtsi128_si32(max).cast_unsigned())
}

/// Writes codes and sums.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn quantize_block(x: &[f32; BLOCK], inverse: f32, out: &mut ActBlock) {
    const SHIFT: i32 = UPPER.ilog2() as i32;
    let codes = load(x).map(|v| _mm256_cvtps_epi32(_mm256_mul_ps(v, _mm256_set1_ps(inverse))));
    let parts = codes.map(|code| _mm256_srai_epi32::<SHIFT>(_mm256_add_epi32(code, _mm256_set1_epi32(UPPER / 2))));
    let upper = pack(parts);
    let mut lower = _mm256_setzero_si256();
    if out.has_lower != 0 {
        lower = pack(std::array::from_fn(|i| _mm256_sub_epi32(codes[i], _mm256_slli_epi32::<SHIFT>(parts[i]))));
    }
    // SAFETY: each is 32 bytes.
    unsafe {
        _mm256_storeu_si256(out.upper.as_mut_ptr().cast(), upper);
        _mm256_storeu_si256(out.lower.as_mut_ptr().cast(), lower);
    }
    let fours = |bytes| _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), _mm256_set1_epi16(1));
    let sums = _mm256_add_epi32(_mm256_slli_epi32::<SHIFT>(fours(upper)), fours(lower));
    let sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32::<0b01_00_11_10>(sums));
    let sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32::<0b10_11_00_01>(sums));
    out.set_sums([_mm256_cvtsi256_si32(sums), _mm_cvtsi128_si32(_mm256_extracti128_si256::<1>(sums))]);
}

/// 32 integers as bytes, in order.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn pack([a, b, c, d]: [__m256i; PARTS]) -> __m256i {
    // Both steps take from the halves of registers in turn.
    let bytes = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
    _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
}

//! AVX2 with FMA and F16C: eight lanes.

#[allow(clippy::wildcard_imports)]
use std::arch::x86_64::*;

use super::{F16_TO_F32, Simd};
use crate::cpu::Isa;

/// AVX2, FMA and F16C.
pub(crate) struct Avx2;

impl Simd for Avx2 {
    const ISA: Isa = Isa::Avx2;
    const LANES: usize = 8;
    const ROWS: usize = 6;
    type V = __m256;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m256 {
        _mm256_set1_ps(x)
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m256 {
        _mm256_loadu_ps(p)
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: __m256) {
        _mm256_storeu_ps(p, v);
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> __m256 {
        _mm256_cvtph_ps(_mm_loadu_si128(p.cast()))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> __m256 {
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()))))
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(p: *const u16) -> (__m256, __m256) {
        let pairs = _mm256_loadu_si256(p.cast());
        let odd = _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff_0000_u32 as i32));
        (_mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)), _mm256_castsi256_ps(odd))
    }
    #[inline(always)]
    unsafe fn load_f16_pairs(p: *const u16) -> (__m256, __m256) {
        // From the upper half of a lane: the sign stays, exponent and fraction go to where those of binary32 are.
        let widen = |high: __m256i| {
            let moved = _mm256_and_si256(_mm256_srai_epi32::<3>(high), _mm256_set1_epi32(0x8fff_e000_u32 as i32));
            _mm256_mul_ps(_mm256_castsi256_ps(moved), _mm256_set1_ps(F16_TO_F32))
        };
        let pairs = _mm256_loadu_si256(p.cast());
        (widen(_mm256_slli_epi32::<16>(pairs)), widen(pairs))
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> __m256 {
        _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast())))
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> __m256 {
        // The sign to the top, exponent and fraction to where those of binary16 are.
        let codes = _mm_cvtepi8_epi16(_mm_loadl_epi64(p.cast()));
        let sign = _mm_and_si128(codes, _mm_set1_epi16(i16::MIN));
        let rest = _mm_and_si128(_mm_slli_epi16::<7>(codes), _mm_set1_epi16(0x3f80));
        _mm256_cvtph_ps(_mm_or_si128(sign, rest))
    }
    #[inline(always)]
    unsafe fn unpack_bf16(v: __m256, i: usize) -> __m256 {
        let v = _mm256_castps_si256(v);
        let high = _mm256_set1_epi32(0xffff_0000_u32.cast_signed());
        _mm256_castsi256_ps(if i == 0 { _mm256_slli_epi32::<16>(v) } else { _mm256_and_si256(v, high) })
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, v: __m256) {
        let v = _mm256_min_ps(_mm256_set1_ps(65504.0), _mm256_max_ps(_mm256_set1_ps(-65504.0), v));
        _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v));
    }
    #[inline(always)]
    unsafe fn store_bf16(p: *mut u16, v: __m256) {
        let bits = _mm256_castps_si256(v);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
        let high = _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan));
        let packed = _mm256_permute4x64_epi64::<0b00_00_10_00>(_mm256_packus_epi32(high, high));
        _mm_storeu_si128(p.cast(), _mm256_castsi256_si128(packed));
    }
    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        _mm256_add_ps(a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: __m256, b: __m256) -> __m256 {
        _mm256_sub_ps(a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        _mm256_mul_ps(a, b)
    }
    #[inline(always)]
    unsafe fn div(a: __m256, b: __m256) -> __m256 {
        _mm256_div_ps(a, b)
    }
    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        _mm256_fmadd_ps(a, b, c)
    }
    #[inline(always)]
    unsafe fn max(a: __m256, b: __m256) -> __m256 {
        _mm256_max_ps(a, b)
    }
    #[inline(always)]
    unsafe fn min(a: __m256, b: __m256) -> __m256 {
        _mm256_min_ps(a, b)
    }
    #[inline(always)]
    unsafe fn round(v: __m256) -> __m256 {
        _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(v)
    }
    #[inline(always)]
    unsafe fn scale2(v: __m256, n: __m256) -> __m256 {
        let power = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)));
        _mm256_mul_ps(v, _mm256_castsi256_ps(power))
    }
    #[inline(always)]
    unsafe fn zero_below(v: __m256, x: __m256, limit: __m256) -> __m256 {
        _mm256_and_ps(v, _mm256_cmp_ps::<_CMP_NLT_UQ>(x, limit))
    }
    #[inline(always)]
    unsafe fn select_below(a: __m256, b: __m256, x: __m256, y: __m256) -> __m256 {
        _mm256_blendv_ps(y, x, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b))
    }
    #[inline(always)]
    unsafe fn reaches(v: __m256, limit: __m256) -> u32 {
        _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GE_OQ>(v, limit)).cast_unsigned()
    }
    #[inline(always)]
    unsafe fn reduce_max(v: __m256) -> f32 {
        let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)))
    }
    #[inline(always)]
    unsafe fn reduce_add(v: __m256) -> f32 {
        let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
    }
}

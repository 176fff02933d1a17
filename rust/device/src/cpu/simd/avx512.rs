//! AVX-512: sixteen lanes.

#[allow(clippy::wildcard_imports)]
use std::arch::x86_64::*;

use super::{F16_TO_F32, Simd};
use crate::cpu::Isa;

/// AVX-512 F, BW, VL and DQ, and BF16 if so.
pub(crate) struct Avx512<const BF16: bool = false>;

impl<const BF16: bool> Simd for Avx512<BF16> {
    const ISA: Isa = Isa::Avx512;
    const LANES: usize = 16;
    const ROWS: usize = 8;
    type V = __m512;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        _mm512_set1_ps(x)
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m512 {
        _mm512_loadu_ps(p)
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: __m512) {
        _mm512_storeu_ps(p, v);
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> __m512 {
        _mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> __m512 {
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()))))
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(p: *const u16) -> (__m512, __m512) {
        let pairs = _mm512_loadu_si512(p.cast());
        let odd = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32 as i32));
        (_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)), _mm512_castsi512_ps(odd))
    }
    #[inline(always)]
    unsafe fn load_f16_pairs(p: *const u16) -> (__m512, __m512) {
        // From the upper half of a lane: the sign stays, exponent and fraction go to where those of binary32 are.
        let widen = |high: __m512i| {
            let moved = _mm512_and_si512(_mm512_srai_epi32::<3>(high), _mm512_set1_epi32(0x8fff_e000_u32 as i32));
            _mm512_mul_ps(_mm512_castsi512_ps(moved), _mm512_set1_ps(F16_TO_F32))
        };
        let pairs = _mm512_loadu_si512(p.cast());
        (widen(_mm512_slli_epi32::<16>(pairs)), widen(pairs))
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> __m512 {
        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast())))
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> __m512 {
        // The sign to the top, exponent and fraction to where those of binary16 are.
        let codes = _mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast()));
        let sign = _mm256_and_si256(codes, _mm256_set1_epi16(i16::MIN));
        let rest = _mm256_and_si256(_mm256_slli_epi16::<7>(codes), _mm256_set1_epi16(0x3f80));
        _mm512_cvtph_ps(_mm256_or_si256(sign, rest))
    }
    #[inline(always)]
    unsafe fn unpack_bf16(v: __m512, i: usize) -> __m512 {
        let v = _mm512_castps_si512(v);
        let high = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
        _mm512_castsi512_ps(if i == 0 { _mm512_slli_epi32::<16>(v) } else { _mm512_and_si512(v, high) })
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, v: __m512) {
        let v = _mm512_min_ps(_mm512_set1_ps(65504.0), _mm512_max_ps(_mm512_set1_ps(-65504.0), v));
        _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v));
    }
    #[inline(always)]
    unsafe fn store_bf16(p: *mut u16, v: __m512) {
        let bits = _mm512_castps_si512(v);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
        let rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x40_0000));
        _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded)));
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        _mm512_add_ps(a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        _mm512_sub_ps(a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        _mm512_mul_ps(a, b)
    }
    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        _mm512_div_ps(a, b)
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, c)
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        _mm512_max_ps(a, b)
    }
    #[inline(always)]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        _mm512_min_ps(a, b)
    }
    #[inline(always)]
    unsafe fn round(v: __m512) -> __m512 {
        _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(v)
    }
    #[inline(always)]
    unsafe fn scale2(v: __m512, n: __m512) -> __m512 {
        _mm512_scalef_ps(v, n)
    }
    #[inline(always)]
    unsafe fn zero_below(v: __m512, x: __m512, limit: __m512) -> __m512 {
        _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, limit), v)
    }
    #[inline(always)]
    unsafe fn select_below(a: __m512, b: __m512, x: __m512, y: __m512) -> __m512 {
        _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), x)
    }
    #[inline(always)]
    unsafe fn reaches(v: __m512, limit: __m512) -> u32 {
        _mm512_cmp_ps_mask::<_CMP_GE_OQ>(v, limit).into()
    }
    #[inline(always)]
    unsafe fn reduce_max(v: __m512) -> f32 {
        _mm512_reduce_max_ps(v)
    }
    #[inline(always)]
    unsafe fn reduce_add(v: __m512) -> f32 {
        // Spelled out, because the order of `_mm512_reduce_add_ps` is the compiler's.
        let v = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
        let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
    }
    #[inline(always)]
    unsafe fn dot_bf16(acc: __m512, x: __m512, y: __m512) -> __m512 {
        _mm512_dpbf16_ps(acc, std::mem::transmute::<__m512, __m512bh>(x), std::mem::transmute::<__m512, __m512bh>(y))
    }
    #[inline(always)]
    unsafe fn pack_bf16(first: __m512, second: __m512) -> __m512 {
        std::mem::transmute::<__m512bh, __m512>(_mm512_cvtne2ps_pbh(second, first))
    }
    #[inline(always)]
    unsafe fn exp_bf16(x: __m512) -> __m512 {
        // 2^t is 2^floor(t), which the last instruction multiplies by, times that of the fraction: a polynomial that is 1 for 0
        // and otherwise fitted for the least relative error.
        let t = _mm512_mul_ps(x, _mm512_set1_ps(std::f32::consts::LOG2_E));
        let fraction = _mm512_reduce_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(t);
        let mut p = _mm512_set1_ps(0.013_426_684);
        for c in [0.052_242_473, 0.241_280_2, 0.693_044_84, 1.0] {
            p = _mm512_fmadd_ps(p, fraction, _mm512_set1_ps(c));
        }
        _mm512_scalef_ps(p, t)
    }
    #[inline(always)]
    unsafe fn interleave_bf16(first: *const u16, second: *const u16) -> __m512 {
        let first = _mm512_castsi256_si512(_mm256_loadu_si256(first.cast()));
        let second = _mm512_castsi256_si512(_mm256_loadu_si256(second.cast()));
        #[rustfmt::skip]
        let places = _mm512_set_epi16(
            47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0,
        );
        _mm512_castsi512_ps(_mm512_permutex2var_epi16(first, places, second))
    }
}

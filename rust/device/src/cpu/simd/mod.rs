//! Vectors of f32, one type an instruction set, so that a kernel is written once.
//!
//! Every method is `inline(always)`: a generic kernel compiles to the ISA's instructions when it is inlined into an entry point
//! with the ISA's target features, which [`isa_entry`] makes. Within an ISA an operation gives the same bits wherever it is used.
//!
//! All of it is `unsafe` for one reason, stated on [`Simd`].
#![allow(unsafe_op_in_unsafe_fn)]
#![allow(clippy::inline_always, clippy::needless_range_loop)] // ISA code must be inlined; counted loops over registers unroll.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod scalar;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512;
pub(crate) use scalar::Scalar;

/// The exponent that [`power_to_f16`] gives the largest magnitude.
const LARGEST_EXPONENT: u32 = 13;

/// The power of two that brings the largest of some magnitudes, given its bits, to 2^13..2^14; 1 where it is not finite. The
/// product of two such f16 is far from the ends of f32, and what is 2^27 times smaller than the largest is still a normal f16.
pub(crate) fn power_to_f16(largest: u32) -> f32 {
    match largest >> 23 {
        255 => 1.0,
        exponent => f32::from_bits((127 + 127 + LARGEST_EXPONENT - exponent).min(254) << 23),
    }
}

/// What makes an f32 of an f16 whose sign, exponent and fraction were moved to where those of an f32 are: the difference of the
/// exponents' biases.
#[cfg(target_arch = "x86_64")]
const F16_TO_F32: f32 = f32::from_bits((127 + 127 - 15) << 23);

/// An ISA's vector.
///
/// # Safety
/// Methods may be called only where the machine has the ISA, inlined into a function with its target features; pointers must be
/// good for `LANES` elements. Results with NaN inputs are NaN or unspecified, never undefined.
pub(crate) trait Simd {
    /// The ISA that kernels of this type alone need.
    const ISA: crate::cpu::Isa;
    /// f32 values a vector.
    const LANES: usize;
    /// Rows that attention computes together at most: as many as the registers have room for.
    const ROWS: usize;
    /// The vector.
    type V: Copy;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(p: *const f32) -> Self::V;
    unsafe fn store(p: *mut f32, v: Self::V);
    unsafe fn load_f16(p: *const u16) -> Self::V;
    unsafe fn load_bf16(p: *const u16) -> Self::V;
    /// The even and the odd of `2 * LANES` elements.
    unsafe fn load_bf16_pairs(p: *const u16) -> (Self::V, Self::V);
    /// The even and the odd of `2 * LANES` numbers; infinities and NaN become numbers.
    unsafe fn load_f16_pairs(p: *const u16) -> (Self::V, Self::V);
    unsafe fn load_i8(p: *const i8) -> Self::V;
    /// The 1/256th of e4m3 values: as such they are binary16 values, which every ISA widens. Anything for the codes of NaN.
    unsafe fn load_e4m3(p: *const u8) -> Self::V;
    /// Of each 32-bit lane the bfloat16 value in half `i` (0, 1).
    unsafe fn unpack_bf16(v: Self::V, i: usize) -> Self::V;
    /// Rounds to nearest even; saturates at ±65504.
    unsafe fn store_f16(p: *mut u16, v: Self::V);
    /// Rounds to nearest even.
    unsafe fn store_bf16(p: *mut u16, v: Self::V);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, fused in every ISA but the scalar one.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The greater; `b` where one is NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// The smaller; `b` where one is NaN.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// To the nearest integer.
    unsafe fn round(v: Self::V) -> Self::V;
    /// `v * 2^n`, n integral in -126..=127.
    unsafe fn scale2(v: Self::V, n: Self::V) -> Self::V;
    /// `v`, 0 where `x < limit`.
    unsafe fn zero_below(v: Self::V, x: Self::V, limit: Self::V) -> Self::V;
    /// `x` where `a < b`, and `y` elsewhere, also where one is NaN.
    unsafe fn select_below(a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V;
    /// Of each lane a bit, the first one lowest: whether `v >= limit`; not where one is NaN.
    unsafe fn reaches(v: Self::V, limit: Self::V) -> u32;
    unsafe fn reduce_max(v: Self::V) -> f32;
    unsafe fn reduce_add(v: Self::V) -> f32;
    /// `acc + x.0 * y.0 + x.1 * y.1` in each lane, of pairs of bfloat16 values; subnormal numbers count as 0.
    unsafe fn dot_bf16(_acc: Self::V, _x: Self::V, _y: Self::V) -> Self::V {
        unreachable!("an ISA that multiplies pairs has its own");
    }
    /// The values of two vectors one after the other, rounded to bfloat16, to nearest even.
    unsafe fn pack_bf16(_first: Self::V, _second: Self::V) -> Self::V {
        unreachable!("an ISA that multiplies pairs has its own");
    }
    /// e^x for what is rounded to bfloat16: relative error below 1e-5 down to -87, exactly 1 for 0; 0 below -104.
    unsafe fn exp_bf16(_x: Self::V) -> Self::V {
        unreachable!("an ISA that multiplies pairs has its own");
    }
    /// Pairs of bfloat16 elements, one of each row.
    unsafe fn interleave_bf16(_first: *const u16, _second: *const u16) -> Self::V {
        unreachable!("an ISA that multiplies pairs has its own");
    }
}

/// Prefetches the cache line at `p`, which may be any address.
#[inline(always)]
pub(crate) fn prefetch(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    prefetch_hint::<{ std::arch::x86_64::_MM_HINT_T0 }>(p);
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

/// The same for lines that are read some way ahead, the second-level cache alone if so: see [`super::isa::reads_ahead_to_l2`].
#[inline(always)]
pub(crate) fn prefetch_ahead(p: *const u8, to_l2: bool) {
    #[cfg(target_arch = "x86_64")]
    if to_l2 {
        return prefetch_hint::<{ std::arch::x86_64::_MM_HINT_T1 }>(p);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = to_l2;
    prefetch(p);
}

/// While the line at `p` of what lies in order is read, prefetches the one that comes `ahead` bytes later; where that goes to the
/// second-level cache, half way there again: a core has room for only so many prefetches, and drops those that come when it is
/// full.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) fn prefetch_stream(p: *const u8, ahead: usize, to_l2: bool) {
    prefetch_ahead(p.wrapping_add(ahead), to_l2);
    if to_l2 {
        prefetch(p.wrapping_add(ahead / 2));
    }
}

/// Prefetches a line that is to be written.
#[inline(always)]
pub(crate) fn prefetch_to_write(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    prefetch_hint::<{ std::arch::x86_64::_MM_HINT_ET0 }>(p);
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn prefetch_hint<const HINT: i32>(p: *const u8) {
    // SAFETY: every x86-64 machine has the instruction or takes it for none, and it never faults.
    unsafe { std::arch::x86_64::_mm_prefetch::<HINT>(p.cast()) }
}

/// e^x, relative error below 1e-6, exactly 1 for 0; 0 below -87, e^88 above 88. Polynomial: Cephes `expf`.
#[inline(always)]
pub(crate) unsafe fn exp<S: Simd>(x: S::V) -> S::V {
    let clamped = S::min(S::splat(88.0), S::max(S::splat(-87.0), x));
    let n = S::round(S::mul(clamped, S::splat(std::f32::consts::LOG2_E)));
    // ln 2 in two parts; the first has few enough bits that its product with n is exact.
    let r = S::fma(n, S::splat(-0.693_359_4), clamped);
    let r = S::fma(n, S::splat(2.121_944_4e-4), r);
    let mut p = S::splat(1.987_569_1e-4);
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = S::fma(p, r, S::splat(c));
    }
    let p = S::fma(S::mul(p, r), r, S::add(r, S::splat(1.0)));
    S::zero_below(S::scale2(p, n), x, S::splat(-87.0))
}

/// tanh x, absolute error below 2e-7.
#[inline(always)]
pub(crate) unsafe fn tanh<S: Simd>(x: S::V) -> S::V {
    let x = S::min(S::splat(20.0), S::max(S::splat(-20.0), x));
    let e = exp::<S>(S::add(x, x));
    S::sub(S::splat(1.0), S::div(S::splat(2.0), S::add(e, S::splat(1.0))))
}

/// Defines `unsafe fn $name(isa, args...)`, which runs the generic function in the ISA's target features. Its own type parameter,
/// if any, is the second of the generic function. What these inline to should stay small: a compiler takes time with the square
/// of a function's size.
///
/// The caller promises that the machine has the ISA and whatever the generic function needs.
macro_rules! isa_entry {
    ($(#[$doc:meta])* $vis:vis fn $name:ident$(<$T:ident: $bound:path>)? => $generic:ident($($arg:ident: $ty:ty),* $(,)?)) => {
        $(#[$doc])*
        $vis unsafe fn $name$(<$T: $bound>)?(isa: $crate::cpu::Isa, $($arg: $ty),*) {
            use $crate::cpu::{Isa, simd};
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn avx2$(<$T: $bound>)?($($arg: $ty),*) {
                // SAFETY: the features are enabled; the rest is the caller's promise.
                unsafe { $generic::<simd::Avx2 $(, $T)?>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
            unsafe fn avx512$(<$T: $bound>)?($($arg: $ty),*) {
                // SAFETY: as above.
                unsafe { $generic::<simd::Avx512 $(, $T)?>($($arg),*) }
            }
            // SAFETY: the caller promises that the machine has the ISA.
            unsafe {
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Amx | Isa::Avx512 => avx512$(::<$T>)?($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2 => avx2$(::<$T>)?($($arg),*),
                    _ => $generic::<simd::Scalar $(, $T)?>($($arg),*),
                }
            }
        }
    };
}
pub(crate) use isa_entry;

#[cfg(test)]
#[allow(clippy::float_cmp)] // Conversions are exact.
mod tests {
    use super::*;
    use crate::cpu::Isa;

    #[inline(always)]
    unsafe fn map<S: Simd>(x: &[f32], exponential: &mut [f32], tangent: &mut [f32], halves: &mut [u16], brains: &mut [u16]) {
        for i in (0..x.len()).step_by(S::LANES) {
            let v = S::load(x.as_ptr().add(i));
            S::store(exponential.as_mut_ptr().add(i), exp::<S>(v));
            S::store(tangent.as_mut_ptr().add(i), tanh::<S>(v));
            S::store_f16(halves.as_mut_ptr().add(i), v);
            S::store_bf16(brains.as_mut_ptr().add(i), v);
        }
    }
    isa_entry! { fn map_isa => map(x: &[f32], exponential: &mut [f32], tangent: &mut [f32], halves: &mut [u16], brains: &mut [u16]) }

    fn isas() -> impl Iterator<Item = Isa> {
        Isa::ALL.into_iter().filter(|t| *t <= Isa::detect())
    }

    #[test]
    fn functions_and_conversions_agree_with_the_exact_ones_in_every_isa() {
        let mut x: Vec<f32> = (0..80_000).map(|i| (i as f32 - 40_000.0) * 0.002_17).collect();
        x.extend([0.0, -0.0, f32::NEG_INFINITY, 70_000.0, -70_000.0, 65_519.9, 1.000_488_3, 1.001_464_8]);
        x.extend([3e-8, 5.97e-8, 6.0e-5, 2.98e-8, 1.003_906_3, 1.011_718_8, 1e30, -1e-30]);
        for isa in isas() {
            let n = x.len();
            let (mut e, mut t, mut h, mut b) = (vec![0.0; n], vec![0.0; n], vec![0; n], vec![0; n]);
            // SAFETY: this machine has `isa`; every slice has the length of `x`, a multiple of 16.
            unsafe { map_isa(isa, &x, &mut e, &mut t, &mut h, &mut b) };
            for (i, &v) in x.iter().enumerate() {
                let exact = f64::from(v.min(88.0)).exp();
                if v < -87.0 {
                    assert_eq!(e[i], 0.0, "{isa:?} exp({v})");
                } else {
                    assert!((f64::from(e[i]) / exact - 1.0).abs() < 1e-6, "{isa:?} exp({v}) = {}", e[i]);
                }
                assert!((f64::from(t[i]) - f64::from(v).tanh()).abs() < 2e-7, "{isa:?} tanh({v}) = {}", t[i]);
                assert_eq!(h[i], half::f16::from_f32(v.clamp(-65504.0, 65504.0)).to_bits(), "{isa:?} f16 of {v}");
                assert_eq!(b[i], half::bf16::from_f32(v).to_bits(), "{isa:?} bf16 of {v}");
            }
            assert_eq!(e[80_000], 1.0);
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    fn map_exp_bf16(x: &mut [f32; 16]) {
        // SAFETY: the features are enabled; the array has the vector's length.
        unsafe { Avx512::<true>::store(x.as_mut_ptr(), Avx512::<true>::exp_bf16(Avx512::<true>::load(x.as_ptr()))) };
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn the_exponential_of_weights_in_bfloat16_agrees_with_the_exact_one() {
        if Isa::detect() < Isa::Avx512 {
            return;
        }
        let exp = |x: f32| {
            let mut vector = [x; 16];
            // SAFETY: this machine has the ISA.
            unsafe { map_exp_bf16(&mut vector) };
            vector[0]
        };
        for x in (0..87_000).map(|i| i as f32 * -0.001) {
            assert!((f64::from(exp(x)) / f64::from(x).exp() - 1.0).abs() < 1e-5, "exp({x}) = {}", exp(x));
        }
        assert_eq!([0.0, -105.0, -1e30, f32::NEG_INFINITY].map(exp), [1.0, 0.0, 0.0, 0.0]);
        assert!(exp(f32::NAN).is_nan());
    }

    #[inline(always)]
    unsafe fn widen<S: Simd>(bits: &[u16], half: &mut [f32], brain: &mut [f32], pairs: &mut [[Vec<f32>; 2]; 2]) {
        for i in (0..bits.len()).step_by(S::LANES) {
            S::store(half.as_mut_ptr().add(i), S::load_f16(bits.as_ptr().add(i)));
            S::store(brain.as_mut_ptr().add(i), S::load_bf16(bits.as_ptr().add(i)));
        }
        for i in (0..bits.len() / 2).step_by(S::LANES) {
            let bits = bits.as_ptr().add(2 * i);
            for ([evens, odds], (even, odd)) in pairs.iter_mut().zip([S::load_bf16_pairs(bits), S::load_f16_pairs(bits)]) {
                S::store(evens.as_mut_ptr().add(i), even);
                S::store(odds.as_mut_ptr().add(i), odd);
            }
        }
    }
    #[inline(always)]
    unsafe fn widen_codes<S: Simd>(codes: &[u8], integers: &mut [f32], floats: &mut [f32]) {
        for i in (0..codes.len()).step_by(S::LANES) {
            S::store(integers.as_mut_ptr().add(i), S::load_i8(codes.as_ptr().add(i).cast()));
            S::store(floats.as_mut_ptr().add(i), S::load_e4m3(codes.as_ptr().add(i)));
        }
    }
    isa_entry! { fn widen_codes_isa => widen_codes(codes: &[u8], integers: &mut [f32], floats: &mut [f32]) }

    isa_entry! { fn widen_isa => widen(bits: &[u16], half: &mut [f32], brain: &mut [f32], pairs: &mut [[Vec<f32>; 2]; 2]) }

    #[test]
    fn every_one_byte_code_widens_exactly() {
        let codes: Vec<u8> = (0..=255).collect();
        for isa in isas() {
            let (mut integers, mut floats) = (vec![0.0; 256], vec![0.0; 256]);
            // SAFETY: this machine has `isa`; the slices have one length, a multiple of 16.
            unsafe { widen_codes_isa(isa, &codes, &mut integers, &mut floats) };
            for code in (0..=255u8).filter(|code| code & 0x7f != 0x7f) {
                let (i, value) = (usize::from(code), crate::kv_codes::E4M3_VALUES[usize::from(code)]);
                assert_eq!((integers[i], floats[i] * 256.0), (f32::from(code as i8), value), "{isa:?} code {code:#x}");
            }
        }
    }

    #[test]
    fn every_16_bit_pattern_widens_exactly() {
        let bits: Vec<u16> = (0..=u16::MAX).collect();
        for isa in isas() {
            let (mut h, mut b) = (vec![0.0; bits.len()], vec![0.0; bits.len()]);
            let mut pairs = [(); 2].map(|()| [(); 2].map(|()| vec![0.0; bits.len() / 2]));
            // SAFETY: this machine has `isa`; the slices have one length, a multiple of 32, or half of it.
            unsafe { widen_isa(isa, &bits, &mut h, &mut b, &mut pairs) };
            for (i, &x) in bits.iter().enumerate() {
                let (half, brain) = (half::f16::from_bits(x).to_f32(), half::bf16::from_bits(x).to_f32());
                assert!(h[i] == half || h[i].is_nan() && half.is_nan(), "{isa:?} f16 {x:#x}");
                assert!(b[i] == brain || b[i].is_nan() && brain.is_nan(), "{isa:?} bf16 {x:#x}");
                let [paired, paired_half] = [0, 1].map(|of: usize| pairs[of][i % 2][i / 2]);
                assert!(paired_half == half || !half.is_finite(), "{isa:?} f16 {x:#x} of a pair: {paired_half}");
                assert!(paired == brain || paired.is_nan() && brain.is_nan(), "{isa:?} bf16 {x:#x} of a pair");
            }
        }
    }
}

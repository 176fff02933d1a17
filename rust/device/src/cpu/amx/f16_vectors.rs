//! Arithmetic on vectors of f16. It is assembly because the intrinsics are newer than the oldest supported compiler.

use std::arch::{asm, x86_64::__m512i};

#[cfg(test)]
use super::{detect::is_modelled, model};

/// The exponent that the largest magnitude of a row gets.
const LARGEST_EXPONENT: u32 = 13;

/// The power of two that brings the largest magnitude of a row, given its bits, to 2^13..2^14; 1 where it is not finite. Times
/// a weight that is an f16 as well, a product is far from the ends of f32, and what is 2^27 times smaller than the largest is
/// still a normal f16.
pub(in crate::cpu) fn power_to_f16(largest: u32) -> f32 {
    match largest >> 23 {
        255 => 1.0,
        exponent => f32::from_bits((127 + 127 + LARGEST_EXPONENT - exponent).min(254) << 23),
    }
}

/// `(codes - zero) * scale + min` of 32 f16, rounded after the difference and at the end.
///
/// # Safety
/// The processor has AVX-512 FP16, which a proof with [`has_fp16`](super::Amx::has_fp16) says.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(in crate::cpu) unsafe fn scale_codes(codes: __m512i, zero: __m512i, scale: __m512i, min: __m512i) -> __m512i {
    #[cfg(test)]
    if is_modelled() {
        return model::scale_codes(codes, zero, scale, min);
    }
    let mut out = codes;
    // SAFETY: the instructions exist (see above) and touch nothing but their operands.
    unsafe {
        asm!(
            "vsubph {x}, {x}, {zero}",
            "vfmadd213ph {x}, {scale}, {min}",
            x = inout(zmm_reg) out, zero = in(zmm_reg) zero, scale = in(zmm_reg) scale, min = in(zmm_reg) min,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    out
}

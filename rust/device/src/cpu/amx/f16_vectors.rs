//! Arithmetic on vectors of f16. It is assembly because the intrinsics are newer than the oldest supported compiler.

use std::arch::{asm, x86_64::__m512i};

#[cfg(any(test, amx_model))]
use super::{detect::is_modelled, model};

/// `(codes - zero) * scale + min` of 32 f16, rounded after the difference and at the end.
///
/// # Safety
/// The processor has AVX-512 FP16, which a proof with [`has_fp16`](super::Amx::has_fp16) says.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(in crate::cpu) unsafe fn scale_codes(codes: __m512i, zero: __m512i, scale: __m512i, min: __m512i) -> __m512i {
    #[cfg(any(test, amx_model))]
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

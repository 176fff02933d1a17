//! AVX-512 kernel of float weights.

#[allow(clippy::wildcard_imports)] // Intrinsics.
use std::arch::x86_64::*;

use super::{
    ROWS, Tile,
    elementwise::{LANES, add_lanes},
    float::{BF16, F16, F32, element_bytes},
};

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub(super) fn multiply<const D: u8>(bytes: &[u8], rows: usize, cols: usize, x: &[f32], out: &mut Tile) {
    let row_bytes = cols * element_bytes(D);
    assert!(bytes.len() >= rows * row_bytes);
    let m = x.len().checked_div(cols).unwrap_or(0);
    let mut n = 0;
    while n < rows {
        let w = &bytes[n * row_bytes..];
        let left = rows - n;
        n += match (m, left) {
            (0, _) => return out.fill([0.0; super::PANEL]),
            (1, 8..) => block::<D, 1, 8>(w, cols, x, n, out),
            (1, _) => block::<D, 1, 1>(w, cols, x, n, out),
            (2, 4..) => block::<D, 2, 4>(w, cols, x, n, out),
            (2, _) => block::<D, 2, 1>(w, cols, x, n, out),
            (3, 4..) => block::<D, 3, 4>(w, cols, x, n, out),
            (3, _) => block::<D, 3, 1>(w, cols, x, n, out),
            (_, 4..) => block::<D, ROWS, 4>(w, cols, x, n, out),
            _ => block::<D, ROWS, 1>(w, cols, x, n, out),
        };
    }
}

/// 16 elements, or those that `mask` has, as f32.
///
/// # Safety
/// The elements of `mask` lie in readable memory at `p`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn load<const D: u8>(p: *const u8, mask: __mmask16) -> __m512 {
    // SAFETY: the caller's promise; masked lanes are not read.
    unsafe {
        match D {
            F32 => _mm512_maskz_loadu_ps(mask, p.cast()),
            F16 => _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, p.cast())),
            BF16 => _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p.cast())))),
            _ => unreachable!(),
        }
    }
}

/// Outputs of `M` rows of `x` and the first `N` rows of `w`, into columns `n..n + N`; returns `N`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn block<const D: u8, const M: usize, const N: usize>(w: &[u8], cols: usize, x: &[f32], n: usize, out: &mut Tile) -> usize {
    let row_bytes = cols * element_bytes(D);
    assert!(w.len() >= N * row_bytes && x.len() >= M * cols);
    // Short rows end before a prefetch within them pays: then the next rows are fetched.
    let ahead = if N * row_bytes <= 16 << 10 { N * row_bytes } else { 1024 };
    let mut acc = [[_mm512_setzero_ps(); N]; M];
    let mut step = |k: usize, mask: __mmask16| {
        let mut xs = [_mm512_setzero_ps(); M];
        for (m, xs) in xs.iter_mut().enumerate() {
            // SAFETY: `mask` has only columns below `cols`, and x has M rows of them.
            *xs = unsafe { load::<F32>(x.as_ptr().add(m * cols + k).cast(), mask) };
        }
        for j in 0..N {
            let p = w.as_ptr().wrapping_add(j * row_bytes + k * element_bytes(D));
            if M == 1 {
                // A prefetch may be of any address.
                _mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(ahead).cast());
            }
            // SAFETY: as above; w has N rows.
            let wj = unsafe { load::<D>(p, mask) };
            for (acc, x) in acc.iter_mut().zip(&xs) {
                acc[j] = _mm512_fmadd_ps(wj, *x, acc[j]);
            }
        }
    };
    let whole = cols / LANES * LANES;
    let mut k = 0;
    while k < whole {
        step(k, !0);
        k += LANES;
    }
    if k < cols {
        step(k, (1 << (cols - k)) - 1);
    }
    for (acc, out) in acc.iter().zip(out.iter_mut()) {
        for (acc, out) in acc.iter().zip(&mut out[n..n + N]) {
            let mut lanes = [0.0; LANES];
            // SAFETY: `lanes` is 16 f32.
            unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), *acc) };
            *out = add_lanes(lanes);
        }
    }
    N
}

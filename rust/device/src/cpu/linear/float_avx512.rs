//! AVX-512 kernel of float weights.

#[allow(clippy::wildcard_imports)] // Intrinsics.
use std::arch::x86_64::*;

use super::{
    PANEL,
    elementwise::LANES,
    float::{BF16, F16, F32, ahead, element_bytes},
};

/// Rows of `x` that a block takes: with 4 rows of the weight, as many sums as registers hold.
const MAX_ROWS: usize = 6;

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub(super) fn multiply<const D: u8>(bytes: &[u8], rows: usize, cols: usize, x: &[f32], out: &mut [[f32; PANEL]]) {
    if cols == 0 {
        return out.fill([0.0; PANEL]);
    }
    let mut m = 0;
    while m < out.len() {
        let (x, left, out) = (&x[m * cols..], out.len() - m, &mut out[m..]);
        m += match left {
            1 => few_rows::<D, 1>(bytes, rows, cols, x, out),
            2 => few_rows::<D, 2>(bytes, rows, cols, x, out),
            3 => few_rows::<D, 3>(bytes, rows, cols, x, out),
            // 7 are 4 and 3, and 8 twice 4.
            4 | 7 | 8 => few_rows::<D, 4>(bytes, rows, cols, x, out),
            5 => few_rows::<D, 5>(bytes, rows, cols, x, out),
            _ => few_rows::<D, MAX_ROWS>(bytes, rows, cols, x, out),
        };
    }
}

/// The first `M` rows of `x`; returns `M`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn few_rows<const D: u8, const M: usize>(bytes: &[u8], rows: usize, cols: usize, x: &[f32], out: &mut [[f32; PANEL]]) -> usize {
    let mut n = 0;
    while n < rows {
        let w = &bytes[n * cols * element_bytes(D)..];
        n += match rows - n {
            8.. if M == 1 => block::<D, M, 8>(w, cols, x, n, out),
            4.. => block::<D, M, 4>(w, cols, x, n, out),
            _ => block::<D, M, 1>(w, cols, x, n, out),
        };
    }
    M
}

/// Where [`add_lanes`] takes what becomes a lane of its result.
const SUM_OF_LANE: [usize; LANES] = [0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15];

/// The sums of the lanes of 16 vectors, added as [`elementwise::add_lanes`](super::elementwise::add_lanes) adds them; lane `i` is
/// that of `vectors[SUM_OF_LANE[i]]`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn add_lanes(vectors: &[__m512; LANES]) -> __m512 {
    // i and i + 8, of two vectors at once; then i and i + 4, and so on.
    let eight: [__m512; 8] = std::array::from_fn(|j| {
        let [a, b] = [vectors[j], vectors[j + 8]];
        _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b))
    });
    let four: [__m512; 4] = std::array::from_fn(|j| {
        let [a, b] = [eight[j], eight[j + 4]];
        _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b))
    });
    let [a, b]: [__m512; 2] = std::array::from_fn(|j| {
        let [a, b] = [four[j], four[j + 2]];
        _mm512_add_ps(_mm512_shuffle_ps::<0x44>(a, b), _mm512_shuffle_ps::<0xee>(a, b))
    });
    _mm512_add_ps(_mm512_shuffle_ps::<0x88>(a, b), _mm512_shuffle_ps::<0xdd>(a, b))
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
fn block<const D: u8, const M: usize, const N: usize>(
    w: &[u8],
    cols: usize,
    x: &[f32],
    n: usize,
    out: &mut [[f32; PANEL]],
) -> usize {
    let row_bytes = cols * element_bytes(D);
    assert!(w.len() >= N * row_bytes && x.len() >= M * cols && out.len() >= M);
    let ahead = ahead(N * row_bytes);
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
    for first in (0..M * N).step_by(LANES) {
        let mut vectors = [_mm512_setzero_ps(); LANES];
        for (lane, i) in (first..M * N).take(LANES).enumerate() {
            vectors[SUM_OF_LANE[lane]] = acc[i / N][i % N];
        }
        let mut sums = [0.0; LANES];
        // SAFETY: `sums` is 16 f32.
        unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), add_lanes(&vectors)) };
        for (i, sum) in (first..M * N).zip(sums) {
            out[i / N][n + i % N] = sum;
        }
    }
    N
}

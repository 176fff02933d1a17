//! AVX2 kernel of float weights: 16 partial sums in two registers.

#[allow(clippy::wildcard_imports)] // Intrinsics.
use std::arch::x86_64::*;

use super::{
    PANEL,
    elementwise::{self, LANES},
    float::{BF16, F16, F32, ahead, element_bytes, pad, widen},
};

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn multiply<const D: u8>(bytes: &[u8], rows: usize, cols: usize, x: &[f32], out: &mut [[f32; PANEL]]) {
    let row_bytes = cols * element_bytes(D);
    assert!(bytes.len() >= rows * row_bytes);
    if cols == 0 {
        return out.fill([0.0; PANEL]);
    }
    let mut m = 0;
    while m < out.len() {
        let (x, pair, outs) = (&x[m * cols..], out.len() - m >= 2, &mut out[m..]);
        let mut n = 0;
        while n < rows {
            let w = &bytes[n * row_bytes..];
            n += match (pair, rows - n) {
                (true, 2..) => block::<D, 2, 2>(w, cols, x, n, outs),
                (true, _) => block::<D, 2, 1>(w, cols, x, n, outs),
                (false, 4..) => block::<D, 1, 4>(w, cols, x, n, outs),
                (false, _) => block::<D, 1, 1>(w, cols, x, n, outs),
            };
        }
        m += 1 + usize::from(pair);
    }
}

/// 8 elements as f32.
///
/// # Safety
/// They lie in readable memory at `p`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load<const D: u8>(p: *const u8) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe {
        match D {
            F32 => _mm256_loadu_ps(p.cast()),
            F16 => _mm256_cvtph_ps(_mm_loadu_si128(p.cast())),
            BF16 => _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())))),
            _ => unreachable!(),
        }
    }
}

/// The sums of 4 times 16 partial sums, added as [`elementwise::add_lanes`] adds them.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn add_lanes(partial: [[__m256; 2]; 4]) -> [f32; 4] {
    // i and i + 8; i and i + 4, of two sums at once; then i and i + 2, of all four.
    let [a, b, c, d] = partial.map(|[low, high]| _mm256_add_ps(low, high));
    let [ac, bd] =
        [[a, c], [b, d]].map(|[a, b]| _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b)));
    let all = _mm256_add_ps(_mm256_shuffle_ps::<0x44>(ac, bd), _mm256_shuffle_ps::<0xee>(ac, bd));
    let all = _mm256_hadd_ps(all, all);
    let mut sums = [0.0; 8];
    // SAFETY: `sums` is 8 f32.
    unsafe { _mm256_storeu_ps(sums.as_mut_ptr(), all) };
    [sums[0], sums[1], sums[4], sums[5]]
}

/// Outputs of `M` rows of `x` and the first `N` rows of `w`, into columns `n..n + N`; returns `N`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn block<const D: u8, const M: usize, const N: usize>(
    w: &[u8],
    cols: usize,
    x: &[f32],
    n: usize,
    out: &mut [[f32; PANEL]],
) -> usize {
    let size = element_bytes(D);
    let row_bytes = cols * size;
    assert!(w.len() >= N * row_bytes && x.len() >= M * cols && out.len() >= M);
    let ahead = ahead(N * row_bytes);
    let mut acc = [[[_mm256_setzero_ps(); 2]; N]; M];
    let whole = cols / LANES * LANES;
    let mut k = 0;
    while k < whole {
        for j in 0..N {
            let p = w.as_ptr().wrapping_add(j * row_bytes + k * size);
            if M == 1 {
                // A prefetch may be of any address.
                _mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(ahead).cast());
            }
            // SAFETY: k + 16 <= cols, and w has N rows of cols.
            let wj = unsafe { [load::<D>(p), load::<D>(p.add(8 * size))] };
            for (m, acc) in acc.iter_mut().enumerate() {
                // SAFETY: k + 16 <= cols, and x has M rows of cols.
                let xm = unsafe {
                    let p = x.as_ptr().add(m * cols + k);
                    [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))]
                };
                acc[j][0] = _mm256_fmadd_ps(wj[0], xm[0], acc[j][0]);
                acc[j][1] = _mm256_fmadd_ps(wj[1], xm[1], acc[j][1]);
            }
        }
        k += LANES;
    }
    if k == cols && M * N == 4 {
        let sums = add_lanes(std::array::from_fn(|i| acc[i / N][i % N]));
        sums.into_iter().enumerate().for_each(|(i, sum)| out[i / N][n + i % N] = sum);
        return N;
    }
    for (m, (acc, out)) in acc.iter().zip(out.iter_mut()).enumerate() {
        for (j, acc) in acc.iter().enumerate() {
            let mut lanes = [0.0; LANES];
            // SAFETY: `lanes` is 16 f32.
            unsafe {
                _mm256_storeu_ps(lanes.as_mut_ptr(), acc[0]);
                _mm256_storeu_ps(lanes.as_mut_ptr().add(8), acc[1]);
            }
            if k < cols {
                let w = widen::<D>(&w[j * row_bytes + k * size..(j + 1) * row_bytes]);
                let x = pad(&x[m * cols + k..(m + 1) * cols]);
                for i in 0..cols - k {
                    lanes[i] = w[i].mul_add(x[i], lanes[i]);
                }
            }
            out[n + j] = elementwise::add_lanes(lanes);
        }
    }
    N
}

//! AVX2 kernels: packed panels by 8-bit multiply-add.

#[allow(clippy::wildcard_imports)] // Intrinsics.
use std::arch::x86_64::*;

use super::{
    PANEL,
    activations::{ActBlock, UPPER},
    packed::{Codes, Kernel, Layout, block_bytes, codes_bytes, select, zero_point},
};

/// Bytes ahead of use that weights are prefetched.
const AHEAD: usize = 1280;
/// Rows of a panel in one register of 32-bit values.
const LANES: usize = 8;
/// Such registers a panel.
const PARTS: usize = PANEL / LANES;

pub(super) fn kernel(layout: Layout) -> Kernel {
    select!(layout, multiply)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn multiply<const CODES: u8, const HALVES: bool, const MIN: bool>(panel: &[u8], acts: &[ActBlock], out: &mut [[f32; PANEL]]) {
    let rows = out.len();
    for (i, out) in out.chunks_mut(2).enumerate() {
        let acts = (&acts[2 * i..], rows);
        match out.len() {
            1 => rows_of::<CODES, HALVES, MIN, 1>(panel, acts, out),
            _ => rows_of::<CODES, HALVES, MIN, 2>(panel, acts, out),
        }
    }
}

/// Codes of columns 4 g.. and 16 + 4 g.. of 8 rows, the `part`-th of the panel.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn codes<const CODES: u8>(block: &[u8], g: usize, part: usize) -> [__m256i; 2] {
    debug_assert!(block.len() >= codes_bytes(CODES) && g < 4 && part < PARTS);
    let (tile, half) = (part / 2, part % 2 * 32);
    // SAFETY: the offsets below stay within codes_bytes(CODES), which the caller's block has.
    let line = |at: usize| unsafe { _mm256_loadu_si256(block.as_ptr().add(at + half).cast()) };
    if CODES == 8 {
        return [line(tile * 512 + g * 64), line(tile * 512 + 256 + g * 64)];
    }
    let nibble = _mm256_set1_epi8(15);
    let v = line(tile * 256 + g * 64);
    let (low, high_nibble) = (_mm256_and_si256(v, nibble), _mm256_and_si256(_mm256_srli_epi16(v, 4), nibble));
    if CODES == 4 {
        return [low, high_nibble];
    }
    // Moves bit `from` to bit 4, and those above it along.
    let to_bit_4 = |v, from: usize| {
        let (left, right) = (4usize.saturating_sub(from), from.saturating_sub(4));
        _mm256_srl_epi16(_mm256_sll_epi16(v, _mm_cvtsi32_si128(left as i32)), _mm_cvtsi32_si128(right as i32))
    };
    let (high, mask) = if CODES == 5 {
        let bits = line(512 + tile * 64);
        ([to_bit_4(bits, g), to_bit_4(bits, 4 + g)], _mm256_set1_epi8(16))
    } else {
        let bits = [line(512 + tile * 128), line(512 + tile * 128 + 64)];
        (bits.map(|b| to_bit_4(b, 2 * g)), _mm256_set1_epi8(48))
    };
    [_mm256_or_si256(low, _mm256_and_si256(high[0], mask)), _mm256_or_si256(high_nibble, _mm256_and_si256(high[1], mask))]
}

/// Sums of pairs of products as i16. The products of 8-bit codes are taken with their zero subtracted and the sign moved to the
/// activation (|w| <= 128, |x| <= 127: a pair is at most 32512), the others unsigned (a pair of 6-bit codes is at most 16002; four pairs
/// of 5-bit codes are at most 31496).
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn pairs<const CODES: u8>(w: __m256i, x: __m256i) -> __m256i {
    if CODES == 8 {
        let w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
        _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w))
    } else {
        _mm256_maddubs_epi16(w, x)
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn rows_of<const CODES: u8, const HALVES: bool, const MIN: bool, const R: usize>(
    panel: &[u8],
    (acts, stride): (&[ActBlock], usize),
    out: &mut [[f32; PANEL]],
) {
    let bytes = const { block_bytes(CODES, HALVES, MIN) };
    let groups = const { 1 + HALVES as usize };
    // 8-bit codes get their zero subtracted before the product.
    let zero = if CODES == 8 { 0 } else { zero_point(CODES, MIN) };
    let blocks = panel.len() / bytes;
    assert!(acts.len() >= (blocks - 1) * stride + R && stride >= R && out.len() >= R);
    let part_weights = [_mm256_set1_epi16(UPPER as i16), _mm256_set1_epi16(1)];
    let mut acc = [[_mm256_setzero_ps(); PARTS]; R];
    for (b, block) in panel.chunks_exact(bytes).enumerate() {
        let mut line = 0;
        while line < bytes {
            // A prefetch may be of any address.
            _mm_prefetch::<_MM_HINT_T0>(block.as_ptr().wrapping_add(AHEAD + line).cast());
            line += 64;
        }
        // SAFETY: callers read lines of scales and minima, which lie within the block.
        let f16s = |at: usize| unsafe { _mm256_cvtph_ps(_mm_loadu_si128(block.as_ptr().add(at).cast())) };
        for part in 0..PARTS {
            let mut w = [[_mm256_setzero_si256(); 2]; 4];
            for (g, w) in w.iter_mut().enumerate() {
                *w = codes::<CODES>(block, g, part);
            }
            for (m, acc) in acc.iter_mut().enumerate() {
                // SAFETY: m < R and b < blocks; see the assertion.
                let x = unsafe { acts.get_unchecked(b * stride + m) };
                let mut dots = [_mm256_setzero_si256(); 2];
                for (q, weight) in x.parts.iter().zip(part_weights) {
                    for (half, dot) in dots.iter_mut().enumerate() {
                        let mut sum = _mm256_setzero_si256();
                        for (g, w) in w.iter().enumerate() {
                            let at = half * 16 + g * 4;
                            // SAFETY: at + 4 <= 32, the length of q.
                            let q = _mm256_set1_epi32(unsafe { q.as_ptr().add(at).cast::<i32>().read_unaligned() });
                            let p = pairs::<CODES>(w[half], q);
                            if CODES > 5 {
                                *dot = _mm256_add_epi32(*dot, _mm256_madd_epi16(p, weight));
                            } else {
                                sum = _mm256_add_epi16(sum, p);
                            }
                        }
                        if CODES <= 5 {
                            *dot = _mm256_add_epi32(*dot, _mm256_madd_epi16(sum, weight));
                        }
                    }
                }
                if !HALVES {
                    dots[0] = _mm256_add_epi32(dots[0], dots[1]);
                }
                for (g, dot) in dots.iter().enumerate().take(groups) {
                    let sum = if HALVES { 1 + g } else { 0 };
                    let at = const { codes_bytes(CODES) } + 64 * g + 16 * part;
                    let dot = _mm256_sub_epi32(*dot, _mm256_set1_epi32(zero * x.sums[sum]));
                    let dot = _mm256_mul_ps(_mm256_cvtepi32_ps(dot), _mm256_set1_ps(x.scale));
                    acc[part] = _mm256_fmadd_ps(dot, f16s(at), acc[part]);
                    if MIN {
                        acc[part] = _mm256_fmadd_ps(f16s(at + 64 * groups), _mm256_set1_ps(x.scaled_sums[sum]), acc[part]);
                    }
                }
            }
        }
    }
    for (acc, out) in acc.iter().zip(out.iter_mut()) {
        for (acc, out) in acc.iter().zip(out.as_chunks_mut::<LANES>().0) {
            // SAFETY: `out` is 8 f32.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr(), *acc) };
        }
    }
}

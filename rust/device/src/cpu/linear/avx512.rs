//! AVX-512 kernels: packed panels by VNNI.

#[allow(clippy::wildcard_imports)] // Intrinsics.
use std::arch::x86_64::*;

use super::{
    PANEL, ROWS, Tile,
    activations::ActBlock,
    packed::{Codes, Kernel, Layout, block_bytes, codes_bytes, select, zero_point},
};

/// Bytes ahead of use that weights are prefetched.
const AHEAD: usize = 1280;

pub(super) fn kernel(layout: Layout) -> Kernel {
    select!(layout, multiply)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn multiply<const CODES: u8, const HALVES: bool, const MIN: bool>(panel: &[u8], acts: &[ActBlock], rows: usize, out: &mut Tile) {
    match rows {
        1 => rows_of::<CODES, HALVES, MIN, 1>(panel, acts, out),
        2 => rows_of::<CODES, HALVES, MIN, 2>(panel, acts, out),
        3 => rows_of::<CODES, HALVES, MIN, 3>(panel, acts, out),
        _ => rows_of::<CODES, HALVES, MIN, ROWS>(panel, acts, out),
    }
}

/// Line `g` of the codes of both tiles, columns 4 g.. and 16 + 4 g.., as bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn codes<const CODES: u8>(block: &[u8], g: usize, tile: usize) -> [__m512i; 2] {
    debug_assert!(block.len() >= codes_bytes(CODES) && g < 4 && tile < 2);
    // SAFETY: the offsets below stay within codes_bytes(CODES), which the caller's block has.
    let line = |at: usize| unsafe { _mm512_loadu_si512(block.as_ptr().add(at).cast()) };
    if CODES == 8 {
        return [line(tile * 512 + g * 64), line(tile * 512 + 256 + g * 64)];
    }
    let nibble = _mm512_set1_epi8(15);
    let v = line(tile * 256 + g * 64);
    let (low, high_nibble) = (_mm512_and_si512(v, nibble), _mm512_and_si512(_mm512_srli_epi16(v, 4), nibble));
    if CODES == 4 {
        return [low, high_nibble];
    }
    // Moves bit `from` to bit 4, and those above it along.
    let to_bit_4 = |v, from: usize| {
        let (left, right) = (4usize.saturating_sub(from), from.saturating_sub(4));
        _mm512_srl_epi16(_mm512_sll_epi16(v, _mm_cvtsi32_si128(left as i32)), _mm_cvtsi32_si128(right as i32))
    };
    let (high, mask) = if CODES == 5 {
        let bits = line(512 + tile * 64);
        ([to_bit_4(bits, g), to_bit_4(bits, 4 + g)], _mm512_set1_epi8(16))
    } else {
        let bits = [line(512 + tile * 128), line(512 + tile * 128 + 64)];
        (bits.map(|b| to_bit_4(b, 2 * g)), _mm512_set1_epi8(48))
    };
    [_mm512_or_si512(low, _mm512_and_si512(high[0], mask)), _mm512_or_si512(high_nibble, _mm512_and_si512(high[1], mask))]
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn rows_of<const CODES: u8, const HALVES: bool, const MIN: bool, const R: usize>(
    panel: &[u8],
    acts: &[ActBlock],
    out: &mut Tile,
) {
    let bytes = const { block_bytes(CODES, HALVES, MIN) };
    let groups = const { 1 + HALVES as usize };
    let zero = const { zero_point(CODES, MIN) };
    let blocks = panel.len() / bytes;
    assert!(acts.len() >= R * blocks);
    let mut acc = [[_mm512_setzero_ps(); 2]; R];
    for (b, block) in panel.chunks_exact(bytes).enumerate() {
        let mut line = 0;
        while line < bytes {
            // A prefetch may be of any address.
            _mm_prefetch::<_MM_HINT_T0>(block.as_ptr().wrapping_add(AHEAD + line).cast());
            line += 64;
        }
        // SAFETY: m < R and b < blocks; acts has R * blocks elements.
        let x = |m: usize| unsafe { acts.get_unchecked(m * blocks + b) };
        let mut dots = [[[_mm512_setzero_si512(); 2]; 2]; R];
        for (m, dots) in dots.iter_mut().enumerate() {
            for (g, dots) in dots.iter_mut().enumerate().take(groups) {
                *dots = [_mm512_set1_epi32(-zero * x(m).sums[if HALVES { 1 + g } else { 0 }]); 2];
            }
        }
        for g in 0..4 {
            let w = [codes::<CODES>(block, g, 0), codes::<CODES>(block, g, 1)];
            for (m, dots) in dots.iter_mut().enumerate() {
                for half in 0..2 {
                    let at = half * 16 + g * 4;
                    // SAFETY: at + 4 <= 32, the length of q.
                    let q = _mm512_set1_epi32(unsafe { x(m).q.as_ptr().add(at).cast::<i32>().read_unaligned() });
                    let into = &mut dots[if HALVES { half } else { 0 }];
                    into[0] = _mm512_dpbusd_epi32(into[0], w[0][half], q);
                    into[1] = _mm512_dpbusd_epi32(into[1], w[1][half], q);
                }
            }
        }
        // SAFETY: callers read lines of scales and minima, which lie within the block.
        let f16s = |at: usize| unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(block.as_ptr().add(at).cast())) };
        for group in 0..groups {
            for tile in 0..2 {
                let at = const { codes_bytes(CODES) } + 64 * group + 32 * tile;
                let scale = f16s(at);
                for (m, (acc, dots)) in acc.iter_mut().zip(&dots).enumerate() {
                    let dot = _mm512_mul_ps(_mm512_cvtepi32_ps(dots[group][tile]), _mm512_set1_ps(x(m).scale));
                    acc[tile] = _mm512_fmadd_ps(dot, scale, acc[tile]);
                }
                if MIN {
                    let min = f16s(at + 64 * groups);
                    for (m, acc) in acc.iter_mut().enumerate() {
                        let sum = _mm512_set1_ps(x(m).scaled_sums[if HALVES { 1 + group } else { 0 }]);
                        acc[tile] = _mm512_fmadd_ps(min, sum, acc[tile]);
                    }
                }
            }
        }
    }
    for (acc, out) in acc.iter().zip(out.iter_mut()) {
        let (first, second) = out.split_at_mut(PANEL / 2);
        // SAFETY: each half of a row of the tile is 16 f32.
        unsafe {
            _mm512_storeu_ps(first.as_mut_ptr(), acc[0]);
            _mm512_storeu_ps(second.as_mut_ptr(), acc[1]);
        }
    }
}

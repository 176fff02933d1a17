//! AVX-512 kernels: packed panels by VNNI.

#[allow(clippy::wildcard_imports)] // Intrinsics.
use std::arch::x86_64::*;

use super::{
    PANEL, ROWS, Tile,
    activations::{ActBlock, UPPER},
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
        let mut w = [[_mm512_setzero_si512(); 8]; 2];
        for (tile, w) in w.iter_mut().enumerate() {
            for g in 0..4 {
                [w[g], w[4 + g]] = codes::<CODES>(block, g, tile);
            }
        }
        // SAFETY: callers read lines of scales and minima, which lie within the block.
        let f16s = |at: usize| unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(block.as_ptr().add(at).cast())) };
        for group in 0..groups {
            let at = const { codes_bytes(CODES) } + 64 * group;
            let scales = [f16s(at), f16s(at + 32)];
            let mins = if MIN { [f16s(at + 64 * groups), f16s(at + 64 * groups + 32)] } else { scales };
            let sum = if HALVES { 1 + group } else { 0 };
            for (m, acc) in acc.iter_mut().enumerate() {
                // SAFETY: m < R and b < blocks; acts has R * blocks elements.
                let x = unsafe { acts.get_unchecked(m * blocks + b) };
                let mut upper = [_mm512_setzero_si512(); 2];
                let mut lower = [_mm512_set1_epi32(-zero * x.sums[sum]); 2];
                for quad in if HALVES { 4 * group..4 * group + 4 } else { 0..8 } {
                    // SAFETY: 4 * quad + 4 <= 32, the length of a part.
                    let part =
                        |p: usize| unsafe { _mm512_set1_epi32(x.parts[p].as_ptr().add(4 * quad).cast::<i32>().read_unaligned()) };
                    let (x_upper, x_lower) = (part(0), part(1));
                    for tile in 0..2 {
                        upper[tile] = _mm512_dpbusd_epi32(upper[tile], w[tile][quad], x_upper);
                        lower[tile] = _mm512_dpbusd_epi32(lower[tile], w[tile][quad], x_lower);
                    }
                }
                for tile in 0..2 {
                    let dot = _mm512_add_epi32(_mm512_slli_epi32::<{ UPPER.trailing_zeros() }>(upper[tile]), lower[tile]);
                    let dot = _mm512_mul_ps(_mm512_cvtepi32_ps(dot), _mm512_set1_ps(x.scale));
                    acc[tile] = _mm512_fmadd_ps(dot, scales[tile], acc[tile]);
                    if MIN {
                        acc[tile] = _mm512_fmadd_ps(mins[tile], _mm512_set1_ps(x.scaled_sums[sum]), acc[tile]);
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

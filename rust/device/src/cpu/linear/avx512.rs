//! AVX-512 kernels: packed panels by VNNI.

// A helper that is not inlined would pass registers through memory, and with features of its own it may be inlined or not.
#![allow(clippy::inline_always, unsafe_op_in_unsafe_fn)]

#[allow(clippy::wildcard_imports)] // Intrinsics.
use std::{arch::x86_64::*, ops::Range};

use super::{
    PANEL,
    activations::{ActBlock, UPPER},
    packed::{Codes, Kernel, Layout, block_bytes, codes_bytes, select, zero_point},
};

/// Bytes ahead of use that weights are prefetched.
const AHEAD: usize = 1280;

pub(super) fn kernel(layout: Layout) -> Kernel {
    select!(layout, multiply)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn multiply<const CODES: u8, const HALVES: bool, const MIN: bool>(panel: &[u8], acts: &[ActBlock], out: &mut [[f32; PANEL]]) {
    match out.len() {
        1 => few_rows::<CODES, HALVES, MIN, 1>(panel, acts, out),
        2 => few_rows::<CODES, HALVES, MIN, 2>(panel, acts, out),
        3 => few_rows::<CODES, HALVES, MIN, 3>(panel, acts, out),
        4 => few_rows::<CODES, HALVES, MIN, 4>(panel, acts, out),
        _ => many_rows::<CODES, HALVES, MIN>(panel, acts, out),
    }
}

/// One row keeps its sums in registers, many theirs in the level 1 cache.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn few_rows<const CODES: u8, const HALVES: bool, const MIN: bool, const R: usize>(
    panel: &[u8],
    acts: &[ActBlock],
    out: &mut [[f32; PANEL]],
) {
    let mut sums = [[_mm512_setzero_ps(); 2]; R];
    for (block, x) in panel.chunks_exact(const { block_bytes(CODES, HALVES, MIN) }).zip(acts.as_chunks::<R>().0) {
        // SAFETY: the features are enabled.
        unsafe { Block::<HALVES, MIN>::unpack::<CODES>(block).multiply::<R>(x, const { zero_point(CODES, MIN) }, &mut sums) }
    }
    for (sums, out) in sums.iter().zip(out) {
        // SAFETY: the features are enabled.
        unsafe { store(*sums, out) }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn many_rows<const CODES: u8, const HALVES: bool, const MIN: bool>(panel: &[u8], acts: &[ActBlock], out: &mut [[f32; PANEL]]) {
    out.fill([0.0; PANEL]);
    let zero = const { zero_point(CODES, MIN) };
    for (block, x) in panel.chunks_exact(const { block_bytes(CODES, HALVES, MIN) }).zip(acts.chunks_exact(out.len())) {
        // SAFETY: the features are enabled.
        unsafe {
            let block = Block::<HALVES, MIN>::unpack::<CODES>(block);
            for (x, out) in x.chunks(4).zip(out.chunks_mut(4)) {
                match out.len() {
                    1 => block.add::<1>(x, zero, out),
                    2 => block.add::<2>(x, zero, out),
                    3 => block.add::<3>(x, zero, out),
                    _ => block.add::<4>(x, zero, out),
                }
            }
        }
    }
}

/// # Safety
/// The processor has AVX-512.
#[inline(always)]
unsafe fn load(out: &[f32; PANEL]) -> [__m512; 2] {
    // SAFETY: each half of a row is 16 f32.
    unsafe { [_mm512_loadu_ps(out.as_ptr()), _mm512_loadu_ps(out.as_ptr().add(PANEL / 2))] }
}

/// # Safety
/// As of `load`.
#[inline(always)]
unsafe fn store(sums: [__m512; 2], out: &mut [f32; PANEL]) {
    // SAFETY: each half of a row is 16 f32.
    unsafe {
        _mm512_storeu_ps(out.as_mut_ptr(), sums[0]);
        _mm512_storeu_ps(out.as_mut_ptr().add(PANEL / 2), sums[1]);
    }
}

/// Line `g` of the codes of both tiles, columns 4 g.. and 16 + 4 g.., as bytes.
/// # Safety
/// The processor has AVX-512 F and BW.
#[inline(always)]
pub(super) unsafe fn codes<const CODES: u8>(block: &[u8], g: usize, tile: usize) -> [__m512i; 2] {
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

/// A block of a panel in registers: of each tile, codes of columns 4 q.. as bytes, and scales and minima of each group.
struct Block<const HALVES: bool, const MIN: bool> {
    codes: [[__m512i; 8]; 2],
    scales: [[__m512; 2]; 2],
    mins: [[__m512; 2]; 2],
}

impl<const HALVES: bool, const MIN: bool> Block<HALVES, MIN> {
    /// # Safety
    /// The processor has AVX-512; likewise below.
    #[inline(always)]
    unsafe fn unpack<const CODES: u8>(block: &[u8]) -> Self {
        let bytes = const { block_bytes(CODES, HALVES, MIN) };
        let groups = const { 1 + HALVES as usize };
        assert!(block.len() == bytes);
        let mut line = 0;
        while line < bytes {
            // A prefetch may be of any address.
            _mm_prefetch::<_MM_HINT_T0>(block.as_ptr().wrapping_add(AHEAD + line).cast());
            line += 64;
        }
        let mut all = [[_mm512_setzero_si512(); 8]; 2];
        for (tile, all) in all.iter_mut().enumerate() {
            for g in 0..4 {
                [all[g], all[4 + g]] = codes::<CODES>(block, g, tile);
            }
        }
        let (mut scales, mut mins) = ([[_mm512_setzero_ps(); 2]; 2], [[_mm512_setzero_ps(); 2]; 2]);
        for group in 0..groups {
            let at = const { codes_bytes(CODES) } + 64 * group;
            for tile in 0..2 {
                // Lines of scales and minima lie within the block.
                let f16s = |at: usize| _mm512_cvtph_ps(_mm256_loadu_si256(block.as_ptr().add(at + 32 * tile).cast()));
                scales[group][tile] = f16s(at);
                if MIN {
                    mins[group][tile] = f16s(at + 64 * groups);
                }
            }
        }
        Self { codes: all, scales, mins }
    }

    /// Adds the products by R rows to sums in memory.
    #[inline(always)]
    unsafe fn add<const R: usize>(&self, x: &[ActBlock], zero: i32, out: &mut [[f32; PANEL]]) {
        let (Some(x), Some(out)) = (x.first_chunk::<R>(), out.first_chunk_mut::<R>()) else { return };
        let mut sums = [[_mm512_setzero_ps(); 2]; R];
        for (sums, out) in sums.iter_mut().zip(out.iter()) {
            *sums = load(out);
        }
        self.multiply(x, zero, &mut sums);
        for (sums, out) in sums.iter().zip(out) {
            store(*sums, out);
        }
    }

    /// Adds the products by R rows.
    #[inline(always)]
    unsafe fn multiply<const R: usize>(&self, x: &[ActBlock; R], zero: i32, sums: &mut [[__m512; 2]; R]) {
        let groups = const { 1 + HALVES as usize };
        let shift = _mm_cvtsi32_si128(zero.max(1).ilog2() as i32);
        let lower = x.iter().fold(0, |any, x| any | x.has_lower) != 0;
        for group in 0..groups {
            let quads = if HALVES { 4 * group..4 * group + 4 } else { 0..8 };
            let sum = if HALVES { 1 + group } else { 0 };
            let mut dots = [[_mm512_setzero_si512(); 2]; R];
            self.dot(x, 0, quads.clone(), &mut dots);
            for (dots, x) in dots.iter_mut().zip(x) {
                let zeros = _mm512_sll_epi32(_mm512_set1_epi32(x.sums[sum]), shift);
                for dot in dots {
                    *dot = _mm512_slli_epi32::<{ UPPER.trailing_zeros() }>(*dot);
                    if zero > 0 {
                        *dot = _mm512_sub_epi32(*dot, zeros);
                    }
                }
            }
            if lower {
                self.dot(x, 1, quads, &mut dots);
            }
            for ((dots, x), sums) in dots.iter().zip(x).zip(sums.iter_mut()) {
                for tile in 0..2 {
                    let dot = _mm512_mul_ps(_mm512_cvtepi32_ps(dots[tile]), _mm512_set1_ps(x.scale));
                    sums[tile] = _mm512_fmadd_ps(dot, self.scales[group][tile], sums[tile]);
                    if MIN {
                        let scaled = _mm512_set1_ps(x.scaled_sums[sum]);
                        sums[tile] = _mm512_fmadd_ps(self.mins[group][tile], scaled, sums[tile]);
                    }
                }
            }
        }
    }

    /// Adds products of a part of the activations' codes.
    #[inline(always)]
    unsafe fn dot<const R: usize>(&self, x: &[ActBlock; R], part: usize, quads: Range<usize>, dots: &mut [[__m512i; 2]; R]) {
        for quad in quads {
            for (dots, x) in dots.iter_mut().zip(x) {
                let x = _mm512_set1_epi32(x.parts[part].as_ptr().add(4 * quad).cast::<i32>().read_unaligned());
                for (dot, codes) in dots.iter_mut().zip(&self.codes) {
                    *dot = _mm512_dpbusd_epi32(*dot, codes[quad], x);
                }
            }
        }
    }
}

//! AVX-512 kernels: a packed panel of 32 weight rows times 1 to 64 rows of activations, by VNNI.
//!
//! ```text
//!   panel, block by block of 32 columns             activations [blocks][rows], 96 bytes each
//!   | codes, 512 to 1024 B | scales | minima |      | row 0 | row 1 | row 2 | row 3 | ...
//!             | unpacked once for all rows                 | 8 broadcast words, 16 with a lower part
//!    2 tiles x 8 registers of bytes -----> vpdpbusd <------+
//!                          2 tiles of 16 integer sums a row -> f32, times the row's scale, times the weights', plus minima
//! ```
//!
//! One row keeps its sums in registers and waits for memory. More keep theirs in the level 1 cache and go four at a time through a block
//! that stays in registers. 16 outputs of one block take 8 `vpdpbusd`, a conversion, a multiplication and one fused operation, two with
//! minima; products with a lower part, if one of four rows has it, 8 more. On Zen 5 all but the conversion share two ports, which limits
//! kernels to 73 % of the integer peak with minima and 80 % without.
//!
//! Measured on two cores of a Zen 5, on which a loop of `vpdpbusd` alone does 1930 GOP/s, by `examples/bench_linear.rs`: 2048 x 8192,
//! quantisation of the activations included. One row in GB/s of packed weights, where `examples/roofline.rs` reads 52 in the same minutes;
//! more rows in GFLOP/s:
//!
//! | format | 1 row | of the roof | 8 rows | 64 rows | of the peak |
//! | --- | --- | --- | --- | --- | --- |
//! | `Q4_0` | 47 | 90 % | 1168 | 1286 | 67 % |
//! | `Q4_1` | 49 | 94 % | 1135 | 1232 | 64 % |
//! | `Q5_0` | 49 | 95 % | 1059 | 1279 | 66 % |
//! | `Q8_0` | 48 | 93 % | 770 | 1282 | 66 % |
//! | `Q4_K` | 45 | 87 % | 1097 | 1212 | 63 % |
//! | `Q5_K` | 46 | 88 % | 998 | 1215 | 63 % |
//! | `Q6_K` | 50 | 96 % | 713 | 906 | 47 % |

// A helper that is not inlined would pass registers through memory; one with features of its own may be inlined or not, and a closure
// without them is not.
#![allow(clippy::inline_always, unsafe_op_in_unsafe_fn)]

#[allow(clippy::wildcard_imports)] // Intrinsics.
use std::{arch::x86_64::*, ops::Range};

use super::{
    PANEL,
    activations::{ActBlock, UPPER},
    packed::{Codes, Kernel, Layout, block_bytes, codes_bytes, select, zero_point},
};

/// Bytes ahead of use that weights are prefetched.
const AHEAD: usize = 8192;

pub(super) fn kernel(layout: Layout) -> Kernel {
    select!(layout, multiply)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn multiply<const CODES: u8, const HALVES: bool, const MIN: bool>(panel: &[u8], acts: &[ActBlock], out: &mut [[f32; PANEL]]) {
    match out {
        [out] => one_row::<CODES, HALVES, MIN>(panel, acts, out),
        _ => many_rows::<CODES, HALVES, MIN>(panel, acts, out),
    }
}

/// One row keeps its sums in registers, many theirs in the level 1 cache.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn one_row<const CODES: u8, const HALVES: bool, const MIN: bool>(panel: &[u8], acts: &[ActBlock], out: &mut [f32; PANEL]) {
    let zero = const { zero_point(CODES, MIN) };
    let mut sums = [[_mm512_setzero_ps(); 2]];
    for (block, x) in panel.chunks_exact(const { block_bytes(CODES, HALVES, MIN) }).zip(acts.as_chunks().0) {
        // SAFETY: the features are enabled.
        unsafe { Block::<HALVES, MIN>::unpack::<CODES>(block).multiply::<1>(x, zero, &mut sums) }
    }
    // SAFETY: as above.
    unsafe { store(sums[0], out) }
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
            let ((x4, x), (out4, out)) = (x.as_chunks::<4>(), out.as_chunks_mut::<4>());
            for (x, out) in x4.iter().zip(out4) {
                block.add(x, zero, out);
            }
            let ((x2, x), (out2, out)) = (x.as_chunks::<2>(), out.as_chunks_mut::<2>());
            for (x, out) in x2.iter().zip(out2) {
                block.add(x, zero, out);
            }
            for (x, out) in x.as_chunks::<1>().0.iter().zip(out.as_chunks_mut().0) {
                block.add(x, zero, out);
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

/// 64 bytes of a block.
#[inline(always)]
unsafe fn line(block: &[u8], at: usize) -> __m512i {
    debug_assert!(at + 64 <= block.len());
    _mm512_loadu_si512(block.as_ptr().add(at).cast())
}

/// 16 scales or minima of a block.
#[inline(always)]
unsafe fn f16s(block: &[u8], at: usize) -> __m512 {
    debug_assert!(at + 32 <= block.len());
    _mm512_cvtph_ps(_mm256_loadu_si256(block.as_ptr().add(at).cast()))
}

/// Moves bit `from` to bit 4, and those above it along.
#[inline(always)]
unsafe fn to_bit_4(v: __m512i, from: usize) -> __m512i {
    let (left, right) = (4usize.saturating_sub(from), from.saturating_sub(4));
    _mm512_srl_epi16(_mm512_sll_epi16(v, _mm_cvtsi32_si128(left as i32)), _mm_cvtsi32_si128(right as i32))
}

/// Line `g` of the codes of both tiles, columns 4 g.. and 16 + 4 g.., as bytes.
/// # Safety
/// The processor has AVX-512 F and BW.
#[inline(always)]
pub(super) unsafe fn codes<const CODES: u8>(block: &[u8], g: usize, tile: usize) -> [__m512i; 2] {
    debug_assert!(block.len() >= codes_bytes(CODES) && g < 4 && tile < 2);
    if CODES == 8 {
        return [line(block, tile * 512 + g * 64), line(block, tile * 512 + 256 + g * 64)];
    }
    let nibble = _mm512_set1_epi8(15);
    let v = line(block, tile * 256 + g * 64);
    let (low, high_nibble) = (_mm512_and_si512(v, nibble), _mm512_and_si512(_mm512_srli_epi16(v, 4), nibble));
    if CODES == 4 {
        return [low, high_nibble];
    }
    let (high, mask) = if CODES == 5 {
        let bits = line(block, 512 + tile * 64);
        ([to_bit_4(bits, g), to_bit_4(bits, 4 + g)], _mm512_set1_epi8(16))
    } else {
        let [low, high] = [line(block, 512 + tile * 128), line(block, 512 + tile * 128 + 64)];
        ([to_bit_4(low, 2 * g), to_bit_4(high, 2 * g)], _mm512_set1_epi8(48))
    };
    [_mm512_or_si512(low, _mm512_and_si512(high[0], mask)), _mm512_or_si512(high_nibble, _mm512_and_si512(high[1], mask))]
}

/// A block of a panel in registers: of each tile, codes of columns 4 q.. as bytes, and 128 times the scales, and minima, of each group.
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
                scales[group][tile] = _mm512_mul_ps(f16s(block, at + 32 * tile), _mm512_set1_ps(UPPER as f32));
                if MIN {
                    mins[group][tile] = f16s(block, at + 64 * groups + 32 * tile);
                }
            }
        }
        Self { codes: all, scales, mins }
    }

    /// Adds the products by R rows to sums in memory.
    #[inline(always)]
    unsafe fn add<const R: usize>(&self, x: &[ActBlock; R], zero: i32, out: &mut [[f32; PANEL]; R]) {
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
        let shift = const { UPPER.ilog2() as i32 };
        let zero_shift = zero.max(1).ilog2() as i32;
        let lower = x.iter().fold(0, |any, x| any | x.has_lower) != 0;
        for group in 0..const { 1 + HALVES as usize } {
            let quads = if HALVES { 4 * group..4 * group + 4 } else { 0..8 };
            let mut dots = [[_mm512_setzero_si512(); 2]; R];
            self.dot(x, 0, quads.clone(), &mut dots);
            if lower {
                for dot in dots.as_flattened_mut() {
                    *dot = _mm512_sll_epi32(*dot, _mm_cvtsi32_si128(shift));
                }
                self.dot(x, 1, quads, &mut dots);
                if zero > 0 {
                    subtract(x, group_sum::<HALVES>(group), (zero_shift, 0), &mut dots);
                }
                self.scale(x, 1.0 / UPPER as f32, group, &dots, sums);
            } else {
                // All is a multiple of 128, by which the scales are larger.
                if zero > 0 {
                    subtract(x, group_sum::<HALVES>(group), (0, shift - zero_shift), &mut dots);
                }
                self.scale(x, 1.0, group, &dots, sums);
            }
        }
    }

    /// Adds the products of a group, in integers times `unit`, to the sums.
    #[inline(always)]
    unsafe fn scale<const R: usize>(
        &self,
        x: &[ActBlock; R],
        unit: f32,
        group: usize,
        dots: &[[__m512i; 2]; R],
        sums: &mut [[__m512; 2]; R],
    ) {
        for ((dots, x), sums) in dots.iter().zip(x).zip(sums) {
            for tile in 0..2 {
                let dot = _mm512_mul_ps(_mm512_cvtepi32_ps(dots[tile]), _mm512_set1_ps(x.scale * unit));
                sums[tile] = _mm512_fmadd_ps(dot, self.scales[group][tile], sums[tile]);
                if MIN {
                    let scaled = _mm512_set1_ps(x.scaled_sums[group_sum::<HALVES>(group)]);
                    sums[tile] = _mm512_fmadd_ps(self.mins[group][tile], scaled, sums[tile]);
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

/// Which of a block's sums is that of a group.
const fn group_sum<const HALVES: bool>(group: usize) -> usize {
    if HALVES { 1 + group } else { 0 }
}

/// Subtracts what the zeros of the weights' codes add: the sum of the activations' codes, shifted left and then right.
#[inline(always)]
unsafe fn subtract<const R: usize>(x: &[ActBlock; R], sum: usize, shifts: (i32, i32), dots: &mut [[__m512i; 2]; R]) {
    for (dots, x) in dots.iter_mut().zip(x) {
        let zeros = _mm512_sll_epi32(_mm512_set1_epi32(x.sums[sum]), _mm_cvtsi32_si128(shifts.0));
        let zeros = _mm512_sra_epi32(zeros, _mm_cvtsi32_si128(shifts.1));
        for dot in dots {
            *dot = _mm512_sub_epi32(*dot, zeros);
        }
    }
}

//! AVX-512 kernels: a packed panel of 32 weight rows times 1 to 64 rows of activations, by VNNI.
//!
//! ```text
//!   panel, block by block of 32 columns             activations [rows][stride], 96 bytes each
//!   | codes, 512 to 1024 B | scales | minima |      | 8 words of upper parts | scale, sums | 8 words of lower parts |
//!             | unpacked once for all rows                 | broadcast
//!    2 tiles x 8 registers of bytes -----> vpdpbusd <------+
//!                          2 tiles of 16 integer sums a row -> f32, times the row's scale, times the weights', plus minima
//! ```
//!
//! One row keeps its sums in registers and waits for memory. More keep theirs in the level 1 cache and go four at a time through
//! a block that stays in registers; of a block of two sub-blocks of 16 columns, each goes alone. 16 outputs of one block take 8
//! `vpdpbusd`, a conversion, a multiplication and one fused operation, two with minima; products with a lower part, if one of
//! four rows has it, 8 more. On Zen 5 all but the conversion share two ports, which limits kernels to 73 % of the integer peak
//! with minima and 80 % without.
//!
//! Measured on two cores of a Zen 5, on which a loop of `vpdpbusd` alone does 1930 GOP/s, by `examples/bench_linear.rs`: 2048 x
//! 8192, quantization of the activations included. One row in GB/s of packed weights, where `examples/roofline.rs` reads 52 in
//! the same minutes; more rows in GFLOP/s, `Q4_K` to `Q6_K` when they still had an f16 for every scale:
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

// A helper that is not inlined would pass registers through memory; one with features of its own may be inlined or not, and a
// closure without them is not.
#![allow(clippy::inline_always, unsafe_op_in_unsafe_fn)]

#[allow(clippy::wildcard_imports)] // Intrinsics.
use std::arch::x86_64::*;

use super::{
    PANEL,
    act_block::{ActBlock, UPPER},
    layout::{
        Codes, FIFTH_BYTES, Kernel, LOWER_BYTES, Layout, Lookup, PlanesKernels, T4, TILE, UPPER_BYTES, block_bytes, codes_bytes,
        select, super_block_body_bytes, super_block_bytes, super_block_len, zero_point,
    },
};
use crate::cpu::{
    isa::reads_ahead_to_l2,
    simd::{prefetch, prefetch_stream},
};

/// Bytes ahead of use that weights are prefetched.
const AHEAD: usize = 8192;

pub(super) fn kernel(layout: Layout) -> Kernel {
    select!(layout, multiply)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn multiply<const CODES: u8, const HALVES: bool, const MIN: bool, const SUPER: bool>(
    panel: &[u8],
    lookup: &Lookup,
    acts: &[ActBlock],
    out: &mut [[f32; PANEL]],
) {
    let blocks = panel.len() / const { super_block_bytes(CODES, HALVES, MIN, SUPER) } * const { super_block_len(SUPER) };
    assert!(acts.len() >= blocks * out.len());
    // SAFETY: the features are enabled.
    unsafe {
        match out {
            [out] => one_row::<CODES, HALVES, MIN, SUPER>(panel, lookup, acts, out),
            _ => many_rows::<CODES, HALVES, MIN, SUPER>(panel, lookup, acts, out),
        }
    }
}

/// Kernels for 8-bit codes in planes; see [`lm_head`](super::lm_head).
pub(super) fn planes_kernels() -> PlanesKernels {
    PlanesKernels { estimate: multiply_planes::<5>, multiply: multiply_planes::<8> }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn multiply_planes<const CODES: u8>(upper: &[u8], other: &[u8], acts: &[ActBlock], out: &mut [[f32; PANEL]]) {
    assert!(acts.len() >= upper.len() / UPPER_BYTES * out.len());
    let other = other.chunks_exact(if CODES == 5 { FIFTH_BYTES } else { LOWER_BYTES });
    let blocks = upper.chunks_exact(UPPER_BYTES).zip(other);
    let (stride, to_l2) = (acts.len() / out.len(), reads_ahead_to_l2());
    // SAFETY: the features are enabled.
    unsafe {
        if let [out] = out {
            let mut sums = [_mm512_setzero_ps(); 2];
            for ((upper, other), x) in blocks.zip(acts) {
                let sub_block = SubBlock::<CODES, false, false, false, 0>::join(upper, other, to_l2);
                sums = sub_block.scaled(sub_block.products([x])[0], x, sums);
            }
            store(sums, out);
        } else {
            out.fill([0.0; PANEL]);
            for (b, (upper, other)) in blocks.enumerate() {
                SubBlock::<CODES, false, false, false, 0>::join(upper, other, to_l2).add(&acts[b..], stride, out);
            }
        }
    }
}

/// One row keeps its sums in registers.
#[inline(always)]
unsafe fn one_row<const CODES: u8, const HALVES: bool, const MIN: bool, const SUPER: bool>(
    panel: &[u8],
    lookup: &Lookup,
    acts: &[ActBlock],
    out: &mut [f32; PANEL],
) {
    let (mut sums, mut acts, to_l2) = ([_mm512_setzero_ps(); 2], acts.iter(), reads_ahead_to_l2());
    let lookup = Registers::of(lookup);
    for super_block in panel.chunks_exact(const { super_block_bytes(CODES, HALVES, MIN, SUPER) }) {
        let (blocks, floats) = super_block.split_at(const { super_block_body_bytes(CODES, HALVES, MIN, SUPER) });
        for (block, x) in blocks.chunks_exact(const { block_bytes(CODES, HALVES, MIN, SUPER) }).zip(&mut acts) {
            prefetch_ahead(block, to_l2);
            let sub_block = SubBlock::<CODES, HALVES, MIN, SUPER, 0>::unpack(block, floats, lookup);
            sums = sub_block.scaled(sub_block.products([x])[0], x, sums);
            if HALVES {
                let sub_block = SubBlock::<CODES, HALVES, MIN, SUPER, 1>::unpack(block, floats, lookup);
                sums = sub_block.scaled(sub_block.products([x])[0], x, sums);
            }
        }
        prefetch_ahead(floats, to_l2);
    }
    store(sums, out);
}

/// Many rows keep theirs in the level 1 cache.
#[inline(always)]
unsafe fn many_rows<const CODES: u8, const HALVES: bool, const MIN: bool, const SUPER: bool>(
    panel: &[u8],
    lookup: &Lookup,
    acts: &[ActBlock],
    out: &mut [[f32; PANEL]],
) {
    out.fill([0.0; PANEL]);
    let (stride, to_l2) = (acts.len() / out.len(), reads_ahead_to_l2());
    let lookup = Registers::of(lookup);
    let mut b = 0;
    for super_block in panel.chunks_exact(const { super_block_bytes(CODES, HALVES, MIN, SUPER) }) {
        let (blocks, floats) = super_block.split_at(const { super_block_body_bytes(CODES, HALVES, MIN, SUPER) });
        for block in blocks.chunks_exact(const { block_bytes(CODES, HALVES, MIN, SUPER) }) {
            prefetch_ahead(block, to_l2);
            SubBlock::<CODES, HALVES, MIN, SUPER, 0>::unpack(block, floats, lookup).add(&acts[b..], stride, out);
            if HALVES {
                SubBlock::<CODES, HALVES, MIN, SUPER, 1>::unpack(block, floats, lookup).add(&acts[b..], stride, out);
            }
            b += 1;
        }
        prefetch_ahead(floats, to_l2);
    }
}

/// Prefetches lines some way ahead; in the order in which they lie, as processors expect (`avx2.rs`).
#[inline(always)]
fn prefetch_ahead(lines: &[u8], to_l2: bool) {
    for line in (0..lines.len()).step_by(64) {
        prefetch_stream(lines.as_ptr().wrapping_add(line), AHEAD, to_l2);
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
pub(super) unsafe fn line(block: &[u8], at: usize) -> __m512i {
    debug_assert!(at + 64 <= block.len());
    _mm512_loadu_si512(block.as_ptr().add(at).cast())
}

/// Of a block and one of its sub-blocks the scales, `kind` 0, or minima, 1, of a tile.
///
/// # Safety
/// The processor has AVX-512.
#[inline(always)]
pub(super) unsafe fn scales_or_minima<const CODES: u8, const HALVES: bool, const SUPER: bool>(
    block: &[u8],
    floats: &[u8],
    (kind, sub_block, tile): (usize, usize, usize),
) -> __m512 {
    let line = kind * const { 1 + HALVES as usize } + sub_block;
    if SUPER {
        let at = const { codes_bytes(CODES) } + PANEL * line + TILE * tile;
        debug_assert!(at + TILE <= block.len());
        let scales = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(block.as_ptr().add(at).cast())));
        _mm512_mul_ps(f16s(floats, 64 * kind + 32 * tile), scales)
    } else {
        f16s(floats, 64 * line + 32 * tile)
    }
}

/// 16 f16.
#[inline(always)]
unsafe fn f16s(block: &[u8], at: usize) -> __m512 {
    debug_assert!(at + 32 <= block.len());
    _mm512_cvtph_ps(_mm256_loadu_si256(block.as_ptr().add(at).cast()))
}

/// A [`Lookup`] in registers.
#[derive(Clone, Copy)]
pub(super) struct Registers {
    codes: __m512i,
    unit: f32,
}

impl Registers {
    /// # Safety
    /// The processor has AVX-512.
    #[inline(always)]
    pub(super) unsafe fn of(lookup: &Lookup) -> Self {
        Self { codes: _mm512_broadcast_i32x4(_mm_loadu_si128(lookup.codes.as_ptr().cast())), unit: lookup.unit }
    }

    /// Codes of a table for their places in it.
    ///
    /// # Safety
    /// The processor has AVX-512.
    #[inline(always)]
    pub(super) unsafe fn look_up<const CODES: u8>(self, places: [__m512i; 2]) -> [__m512i; 2] {
        if CODES == T4 {
            [_mm512_shuffle_epi8(self.codes, places[0]), _mm512_shuffle_epi8(self.codes, places[1])]
        } else {
            places
        }
    }
}

/// Line `g` of the codes of a tile, columns 4 g.. and 16 + 4 g.., as bytes; of a table their places in it.
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
    if CODES == 4 || CODES == T4 {
        return [low, high_nibble];
    }
    let (high, mask) = if CODES == 5 {
        let bits = line(block, 512 + tile * 64);
        ([shift(bits, g, 4), shift(bits, 4 + g, 4)], _mm512_set1_epi8(16))
    } else {
        let [low, high] = [line(block, 512 + tile * 128), line(block, 512 + tile * 128 + 64)];
        ([shift(low, 2 * g, 4), shift(high, 2 * g, 4)], _mm512_set1_epi8(48))
    };
    [_mm512_or_si512(low, _mm512_and_si512(high[0], mask)), _mm512_or_si512(high_nibble, _mm512_and_si512(high[1], mask))]
}

/// Moves bit `from` to bit `to`, and those beside it along.
#[inline(always)]
unsafe fn shift(v: __m512i, from: usize, to: usize) -> __m512i {
    let (left, right) = (to.saturating_sub(from), from.saturating_sub(to));
    _mm512_srl_epi16(_mm512_sll_epi16(v, _mm_cvtsi32_si128(left as i32)), _mm_cvtsi32_si128(right as i32))
}

impl<const CODES: u8> SubBlock<CODES, false, false, false, 0> {
    /// From a block of the upper plane and one of the fifth, or of the lower.
    ///
    /// # Safety
    /// The processor has AVX-512.
    #[inline(always)]
    unsafe fn join(upper: &[u8], other: &[u8], to_l2: bool) -> Self {
        assert!(upper.len() == UPPER_BYTES && other.len() == if CODES == 5 { FIFTH_BYTES } else { LOWER_BYTES });
        prefetch_ahead(upper, to_l2);
        prefetch_ahead(other, to_l2);
        let mut all = [[_mm512_setzero_si512(); 8]; 2];
        let mut scales = [_mm512_setzero_ps(); 2];
        for tile in 0..2 {
            for g in 0..4 {
                let [low, high] = codes::<4>(upper, g, tile);
                let lower = if CODES == 5 {
                    let (bits, one) = (line(other, 64 * tile), _mm512_set1_epi8(1));
                    [_mm512_and_si512(shift(bits, g, 0), one), _mm512_and_si512(shift(bits, 4 + g, 0), one)]
                } else {
                    codes::<4>(other, g, tile)
                };
                let to = usize::from(CODES) - 4;
                all[tile][g] = _mm512_or_si512(shift(low, 0, to), lower[0]);
                all[tile][4 + g] = _mm512_or_si512(shift(high, 0, to), lower[1]);
            }
            scales[tile] = _mm512_mul_ps(f16s(upper, const { codes_bytes(4) } + 32 * tile), _mm512_set1_ps(UPPER as f32));
        }
        Self { codes: all, scales, mins: [_mm512_setzero_ps(); 2] }
    }
}

/// A sub-block in registers: of each tile, codes of columns 4 q.. as bytes (of 16 columns half as many), 128 times
/// the scales, and minima.
struct SubBlock<const CODES: u8, const HALVES: bool, const MIN: bool, const SUPER: bool, const SUB: usize> {
    codes: [[__m512i; 8]; 2],
    scales: [__m512; 2],
    mins: [__m512; 2],
}

impl<const CODES: u8, const HALVES: bool, const MIN: bool, const SUPER: bool, const SUB: usize>
    SubBlock<CODES, HALVES, MIN, SUPER, SUB>
{
    const QUADS: usize = if HALVES { 4 } else { 8 };
    /// Which of a block's sums is that of the sub-block.
    const SUM: usize = if HALVES { 1 + SUB } else { 0 };
    const ZERO: i32 = zero_point(CODES, MIN);
    const ZERO_BITS: i32 = if Self::ZERO > 0 { Self::ZERO.ilog2() as i32 } else { 0 };

    /// # Safety
    /// The processor has AVX-512; likewise below.
    #[inline(always)]
    unsafe fn unpack(block: &[u8], floats: &[u8], lookup: Registers) -> Self {
        assert!(block.len() == const { block_bytes(CODES, HALVES, MIN, SUPER) });
        assert!(
            floats.len()
                == const { super_block_bytes(CODES, HALVES, MIN, SUPER) - super_block_body_bytes(CODES, HALVES, MIN, SUPER) }
        );
        let mut all = [[_mm512_setzero_si512(); 8]; 2];
        let (mut scales, mut mins) = ([_mm512_setzero_ps(); 2], [_mm512_setzero_ps(); 2]);
        for tile in 0..2 {
            for g in 0..4 {
                let halves = lookup.look_up::<CODES>(codes::<CODES>(block, g, tile));
                if HALVES {
                    all[tile][g] = halves[SUB];
                } else {
                    [all[tile][g], all[tile][4 + g]] = halves;
                }
            }
            let own = |kind| scales_or_minima::<CODES, HALVES, SUPER>(block, floats, (kind, SUB, tile));
            scales[tile] = _mm512_mul_ps(own(0), _mm512_set1_ps(UPPER as f32 * lookup.unit));
            if MIN {
                mins[tile] = own(1);
            }
        }
        Self { codes: all, scales, mins }
    }

    /// Adds the products by rows, whose blocks lie `stride` apart, to sums in memory.
    #[inline(always)]
    unsafe fn add(&self, acts: &[ActBlock], stride: usize, out: &mut [[f32; PANEL]]) {
        let (fours, rest) = out.as_chunks_mut();
        let last = 4 * fours.len() * stride;
        for (i, out) in fours.iter_mut().enumerate() {
            self.add_rows::<4>(&acts[4 * i * stride..], stride, out);
        }
        match rest.len() {
            1 => self.add_rows::<1>(&acts[last..], stride, &mut rest.as_chunks_mut().0[0]),
            2 => self.add_rows::<2>(&acts[last..], stride, &mut rest.as_chunks_mut().0[0]),
            3 => self.add_rows::<3>(&acts[last..], stride, &mut rest.as_chunks_mut().0[0]),
            _ => {}
        }
    }

    #[inline(always)]
    unsafe fn add_rows<const R: usize>(&self, acts: &[ActBlock], stride: usize, out: &mut [[f32; PANEL]; R]) {
        let mut x = [&acts[0]; R];
        for (r, x) in x.iter_mut().enumerate() {
            *x = &acts[r * stride];
            // The row's next block: rows are too far from each other for a processor to see where this goes.
            let next = std::ptr::from_ref::<ActBlock>(x).wrapping_add(1).cast();
            prefetch(next);
            prefetch(next.wrapping_add(64));
        }
        for ((products, x), out) in self.products(x).into_iter().zip(x).zip(out) {
            store(self.scaled(products, x, load(out)), out);
        }
    }

    /// The sums plus a row's products and minima.
    #[inline(always)]
    unsafe fn scaled(&self, products: [__m512; 2], x: &ActBlock, mut sums: [__m512; 2]) -> [__m512; 2] {
        for tile in 0..2 {
            sums[tile] = _mm512_fmadd_ps(products[tile], self.scales[tile], sums[tile]);
            if MIN {
                sums[tile] = _mm512_fmadd_ps(self.mins[tile], _mm512_set1_ps(x.scaled_sums[Self::SUM]), sums[tile]);
            }
        }
        sums
    }

    /// Codes of weights less their zeros times activations, of R rows.
    #[inline(always)]
    unsafe fn products<const R: usize>(&self, x: [&ActBlock; R]) -> [[__m512; 2]; R] {
        let shift = const { UPPER.ilog2() as i32 };
        let mut dots = [[_mm512_setzero_si512(); 2]; R];
        self.dot(x, false, &mut dots);
        if x.iter().fold(0, |any, x| any | x.has_lower) == 0 {
            // All is a multiple of 128, by which the scales are larger.
            return Self::less_zeros(x, 1.0, [0, shift - Self::ZERO_BITS], dots);
        }
        for dot in dots.as_flattened_mut() {
            *dot = _mm512_slli_epi32::<{ UPPER.ilog2() }>(*dot);
        }
        self.dot(x, true, &mut dots);
        Self::less_zeros(x, 1.0 / UPPER as f32, [Self::ZERO_BITS, 0], dots)
    }

    /// Likewise, integers times `unit`, whose zeros are the sums of codes shifted left and then right.
    #[inline(always)]
    unsafe fn less_zeros<const R: usize>(
        x: [&ActBlock; R],
        unit: f32,
        shifts: [i32; 2],
        dots: [[__m512i; 2]; R],
    ) -> [[__m512; 2]; R] {
        let mut products = [[_mm512_setzero_ps(); 2]; R];
        for ((products, dots), x) in products.iter_mut().zip(dots).zip(x) {
            let zeros = _mm512_sll_epi32(_mm512_set1_epi32(x.sums[Self::SUM]), _mm_cvtsi32_si128(shifts[0]));
            let zeros = _mm512_sra_epi32(zeros, _mm_cvtsi32_si128(shifts[1]));
            for (product, dot) in products.iter_mut().zip(dots) {
                let dot = if Self::ZERO > 0 { _mm512_sub_epi32(dot, zeros) } else { dot };
                *product = _mm512_mul_ps(_mm512_cvtepi32_ps(dot), _mm512_set1_ps(x.scale * unit));
            }
        }
        products
    }

    /// Adds the products of the upper or the lower parts of the activations' codes.
    #[inline(always)]
    unsafe fn dot<const R: usize>(&self, x: [&ActBlock; R], lower: bool, dots: &mut [[__m512i; 2]; R]) {
        for quad in 0..Self::QUADS {
            for (dots, x) in dots.iter_mut().zip(x) {
                let part = if lower { &x.lower } else { &x.upper };
                let x = part.as_ptr().add(const { 16 * SUB } + 4 * quad).cast::<i32>().read_unaligned();
                for (dot, codes) in dots.iter_mut().zip(&self.codes) {
                    *dot = _mm512_dpbusd_epi32(*dot, codes[quad], _mm512_set1_epi32(x));
                }
            }
        }
    }
}

//! AVX2 kernels: a packed panel of 32 rows times 1 to 64 rows of activations, with AVX-VNNI where there is.
//!
//! `out[row][n] = sum over k of weight[n, k] * x[row, k]`. Of a block of 32 columns the codes of 8 weight rows, a part, are
//! unpacked into 8 registers and stay there while all rows of activations pass; sums are in `out`, 8 KB of the level 1 cache at
//! 64 rows.
//!
//! ```text
//!                       8 weight rows n, 4 bytes each
//! register q of codes   | 4 q, .. 4 q + 3 | 4 q, .. 4 q + 3 | ...   columns of the block
//! activations           | 4 q, .. 4 q + 3 | 4 q, .. 4 q + 3 | ...   4 bytes of one row, in every lane
//! dot                   | i32             | i32             | ...   sum over q; times two scales, plus the minimum, into 8 f32
//! ```
//!
//! A block is read once for all rows: 0.625 bytes a weight of `Q4_1`, 0.578 of `Q4_K`, 1.06 of `Q8_0`. 8 weight rows by 32
//! columns by one row, 512 operations, take 8 broadcasts and, with AVX-VNNI, 8 `vpdpbusd`; without it 8 `vpmaddubsw` and as many
//! additions as their i16 sums need; some 9 instructions bring the sum to f32. A lower part of the activations is 16 more.
//!
//! Measured on one core of an AMD EPYC (Zen 5, 4.1 GHz), where `vpdpbusd` alone makes 540 GOP/s and two broadcasts a cycle are
//! the limit of this loop: at 64 rows 250 to 280 GOP/s for `Q4_0` to `Q8_0`, 230 to 260 for `Q6_K`; without AVX-VNNI 230 to 280
//! for `Q4_0` to `Q5_0` and 155 for `Q8_0`. A core of Zen 3, which has no AVX-VNNI, makes 108 to 136 GOP/s of `Q4_1`: latency
//! counts more than instructions there, so what does not wait for the integers is computed before them.

#[allow(clippy::wildcard_imports)] // Intrinsics.
use std::{
    arch::{asm, x86_64::*},
    hint::black_box,
};

use super::{
    PANEL,
    act_block::{ActBlock, BLOCK, UPPER},
    layout::{
        Codes, FIFTH_BYTES, Kernel, LOWER_BYTES, Layout, Lookup, PlanesKernels, T4, UPPER_BYTES, block_bytes, codes_bytes,
        is_wide, select, super_block_body_bytes, super_block_bytes, zero_point,
    },
};
use crate::cpu::simd::prefetch;

/// Bytes ahead of use that weights are prefetched. For one row, a core of Zen 5 reads 23 GB/s of weights with 1280, 32 with 5120,
/// 38 with 10240, and no more with 20480.
const AHEAD: usize = 8192;
/// Rows of a panel in one register of 32-bit values.
const LANES: usize = 8;
/// Such registers a panel.
const PARTS: usize = PANEL / LANES;
/// Columns of a row of a panel in one 32-bit value.
const QUAD: usize = 4;
/// Quads of a block.
const QUADS: usize = BLOCK / QUAD;

pub(super) fn kernel(layout: Layout) -> Kernel {
    if has_vnni() { with_vnni(layout) } else { without_vnni(layout) }
}

/// Kernels that must not be called where there is no AVX-VNNI.
pub(super) fn with_vnni(layout: Layout) -> Kernel {
    #[target_feature(enable = "avx2,fma,f16c")]
    fn kernel<const CODES: u8, const HALVES: bool, const MIN: bool, const SUPER: bool>(
        panel: &[u8],
        lookup: &Lookup,
        acts: &[ActBlock],
        out: &mut [[f32; PANEL]],
    ) {
        multiply::<CODES, HALVES, MIN, SUPER, true>(panel, lookup, acts, out);
    }
    select!(layout, kernel)
}

/// Kernels with the instructions of AVX2 alone.
pub(super) fn without_vnni(layout: Layout) -> Kernel {
    #[target_feature(enable = "avx2,fma,f16c")]
    fn kernel<const CODES: u8, const HALVES: bool, const MIN: bool, const SUPER: bool>(
        panel: &[u8],
        lookup: &Lookup,
        acts: &[ActBlock],
        out: &mut [[f32; PANEL]],
    ) {
        multiply::<CODES, HALVES, MIN, SUPER, false>(panel, lookup, acts, out);
    }
    select!(layout, kernel)
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn multiply<const CODES: u8, const HALVES: bool, const MIN: bool, const SUPER: bool, const VNNI: bool>(
    panel: &[u8],
    lookup: &Lookup,
    acts: &[ActBlock],
    out: &mut [[f32; PANEL]],
) {
    out.fill([0.0; PANEL]);
    let stride = stride_bytes(acts, out);
    let mut b = 0;
    for super_block in panel.chunks_exact(const { super_block_bytes(CODES, HALVES, MIN, SUPER) }) {
        let (blocks, floats) = super_block.split_at(const { super_block_body_bytes(CODES, HALVES, MIN, SUPER) });
        assert!(
            floats.len()
                == const { super_block_bytes(CODES, HALVES, MIN, SUPER) - super_block_body_bytes(CODES, HALVES, MIN, SUPER) }
        );
        for block in blocks.chunks_exact(const { block_bytes(CODES, HALVES, MIN, SUPER) }) {
            prefetch_ahead(block);
            for part in 0..PARTS {
                let rows = Part::<CODES, HALVES, MIN, SUPER>::unpack(block, floats, lookup, part);
                rows.add_rows::<VNNI>(&acts[b..], stride, out, part);
            }
            b += 1;
        }
        prefetch_ahead(floats);
    }
}

/// Kernels for 8-bit codes in planes; see [`lm_head`](super::lm_head).
pub(super) fn planes_kernels() -> PlanesKernels {
    if has_vnni() { planes_kernels_of::<true>() } else { planes_kernels_of::<false>() }
}

/// Those with VNNI must not be called where there is no AVX-VNNI.
pub(super) fn planes_kernels_of<const VNNI: bool>() -> PlanesKernels {
    #[target_feature(enable = "avx2,fma,f16c")]
    fn kernel<const CODES: u8, const VNNI: bool>(upper: &[u8], other: &[u8], acts: &[ActBlock], out: &mut [[f32; PANEL]]) {
        out.fill([0.0; PANEL]);
        let stride = stride_bytes(acts, out);
        let other = other.chunks_exact(if CODES == 5 { FIFTH_BYTES } else { LOWER_BYTES });
        for (b, (upper, other)) in upper.chunks_exact(UPPER_BYTES).zip(other).enumerate() {
            prefetch_ahead(upper);
            prefetch_ahead(other);
            for part in 0..PARTS {
                Part::<CODES, false, false, false>::join(upper, other, part).add_rows::<VNNI>(&acts[b..], stride, out, part);
            }
        }
    }
    PlanesKernels { estimate: kernel::<5, VNNI>, multiply: kernel::<8, VNNI> }
}

/// Whether there is AVX-VNNI.
pub(super) fn has_vnni() -> bool {
    is_x86_feature_detected!("avxvnni")
}

/// Bytes from one row of activations to the next. The compiler would rather multiply again for every row than keep the product.
#[inline]
fn stride_bytes(acts: &[ActBlock], out: &[[f32; PANEL]]) -> usize {
    black_box(acts.len() / out.len() * size_of::<ActBlock>())
}

/// Prefetches lines some way ahead; in the order in which they lie, or two cores of a Zen 3 multiply one row at 0.9 times the
/// speed.
#[inline]
fn prefetch_ahead(lines: &[u8]) {
    for line in (0..lines.len()).step_by(64) {
        prefetch(lines.as_ptr().wrapping_add(AHEAD + line));
    }
}

/// 8 rows of a block of a panel, in registers while all rows of activations pass.
struct Part<const CODES: u8, const HALVES: bool, const MIN: bool, const SUPER: bool> {
    /// As bytes, in order of columns.
    codes: [__m256i; QUADS],
    scales: Scales,
}

/// Scales, and minima, of each sub-block of 8 rows.
type Scales = [[__m256; 2]; 2];

impl<const CODES: u8, const HALVES: bool, const MIN: bool, const SUPER: bool> Part<CODES, HALVES, MIN, SUPER> {
    const SUB_BLOCKS: usize = 1 + HALVES as usize;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn unpack(block: &[u8], floats: &[u8], lookup: &Lookup, part: usize) -> Self {
        let mut all = [_mm256_setzero_si256(); QUADS];
        for g in 0..QUADS / 2 {
            [all[g], all[QUADS / 2 + g]] = codes::<CODES>(block, g, part);
        }
        let mut scales = Self::scales(block, floats, part);
        if CODES == T4 {
            // SAFETY: the table is 16 bytes.
            let table = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(lookup.codes.as_ptr().cast()) });
            all = all.map(|places| _mm256_shuffle_epi8(table, places));
            scales[0] = scales[0].map(|scale| _mm256_mul_ps(scale, _mm256_set1_ps(lookup.unit)));
        }
        Self { codes: all, scales }
    }

    /// Scales and minima of each sub-block.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn scales(block: &[u8], floats: &[u8], part: usize) -> Scales {
        let f16s = |line: usize| {
            let at = 64 * line + 2 * LANES * part;
            assert!(at + 2 * LANES <= floats.len());
            // SAFETY: it lies within the lines by the assertion.
            unsafe { _mm256_cvtph_ps(_mm_loadu_si128(floats.as_ptr().add(at).cast())) }
        };
        let sub_block_scales = |line: usize| {
            let at = const { codes_bytes(CODES) } + PANEL * line + LANES * part;
            assert!(at + LANES <= block.len());
            // SAFETY: it lies within the block by the assertion.
            unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(block.as_ptr().add(at).cast()))) }
        };
        let mut scales = [[_mm256_setzero_ps(); 2]; 2];
        for (kind, scales) in scales.iter_mut().enumerate().take(1 + usize::from(MIN)) {
            for (sub_block, scales) in scales.iter_mut().enumerate().take(Self::SUB_BLOCKS) {
                let line = kind * Self::SUB_BLOCKS + sub_block;
                *scales = if SUPER { _mm256_mul_ps(f16s(kind), sub_block_scales(line)) } else { f16s(line) };
            }
        }
        scales
    }

    /// Adds the products by all rows of activations, which are `stride` bytes apart from the first one's block `x[0]` on, to the
    /// sums of a part.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn add_rows<const VNNI: bool>(&self, x: &[ActBlock], stride: usize, out: &mut [[f32; PANEL]], part: usize) {
        if let [out] = out {
            // Outside a loop nothing is prepared in memory for the next row.
            return self.add_products::<VNNI>(&x[0], &mut out.as_chunks_mut().0[part]);
        }
        assert!(stride.is_multiple_of(size_of::<ActBlock>()) && (out.len() - 1) * stride < size_of_val(x));
        let mut x = x.as_ptr();
        for out in out {
            // SAFETY: row `r`'s block lies whole within the slice, by the assertion.
            self.add_products::<VNNI>(unsafe { &*x }, &mut out.as_chunks_mut().0[part]);
            x = x.wrapping_byte_add(stride);
        }
    }

    /// Adds the products by one row of activations.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn add_products<const VNNI: bool>(&self, x: &ActBlock, out: &mut [f32; LANES]) {
        // `pairs` subtracts the zero of 8-bit codes.
        let zero = if is_wide(CODES) && !VNNI { 0 } else { zero_point(CODES, MIN) };
        let zero_bits = _mm_cvtsi32_si128(zero.max(1).ilog2() as i32);
        let mut dots = self.dots::<VNNI>(&x.upper).map(|dot| _mm256_slli_epi32::<{ UPPER.trailing_zeros() as i32 }>(dot));
        if x.has_lower != 0 {
            for (dot, lower) in dots.iter_mut().zip(self.dots::<VNNI>(&x.lower)) {
                *dot = _mm256_add_epi32(*dot, lower);
            }
        }
        // SAFETY: `out` is 8 f32.
        let mut sums = unsafe { _mm256_loadu_ps(out.as_ptr()) };
        for (sub_block, dot) in dots.into_iter().enumerate().take(Self::SUB_BLOCKS) {
            let sum = if HALVES { 1 + sub_block } else { 0 };
            let zeros = _mm256_sll_epi32(_mm256_set1_epi32(x.sums[sum]), zero_bits);
            let dot = if zero > 0 { _mm256_sub_epi32(dot, zeros) } else { dot };
            // All but the last step can be taken before the integers are there.
            let scale = _mm256_mul_ps(self.scales[0][sub_block], _mm256_set1_ps(x.scale));
            if MIN {
                sums = _mm256_fmadd_ps(self.scales[1][sub_block], _mm256_set1_ps(x.scaled_sums[sum]), sums);
            }
            sums = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, sums);
        }
        // SAFETY: as above.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr(), sums) };
    }

    /// Sums of products by one part of the activations' codes, for each sub-block.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn dots<const VNNI: bool>(&self, x: &[i8; BLOCK]) -> [__m256i; 2] {
        let (x, _) = x.as_chunks();
        if HALVES {
            let (codes, _) = self.codes.as_chunks();
            [dot::<CODES, VNNI, { QUADS / 2 }>(&codes[0], x), dot::<CODES, VNNI, { QUADS / 2 }>(&codes[1], &x[QUADS / 2..])]
        } else {
            [dot::<CODES, VNNI, QUADS>(&self.codes, x), _mm256_setzero_si256()]
        }
    }
}

impl<const CODES: u8> Part<CODES, false, false, false> {
    /// From a block of the upper plane and one of the fifth, or of the lower.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn join(upper: &[u8], other: &[u8], part: usize) -> Self {
        assert!(upper.len() == UPPER_BYTES && other.len() == if CODES == 5 { FIFTH_BYTES } else { LOWER_BYTES });
        let mut all = [_mm256_setzero_si256(); QUADS];
        for g in 0..QUADS / 2 {
            let [low, high] = codes::<4>(upper, g, part);
            let lower = if CODES == 5 {
                let (bits, one) = (fifth_bits(other, part), _mm256_set1_epi8(1));
                [_mm256_and_si256(shift(bits, g, 0), one), _mm256_and_si256(shift(bits, 4 + g, 0), one)]
            } else {
                codes::<4>(other, g, part)
            };
            let to = usize::from(CODES) - 4;
            all[g] = _mm256_or_si256(shift(low, 0, to), lower[0]);
            all[QUADS / 2 + g] = _mm256_or_si256(shift(high, 0, to), lower[1]);
        }
        Self { codes: all, scales: Self::scales(&[], &upper[const { codes_bytes(4) }..], part) }
    }
}

/// Sums of products of codes by those of activations.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn dot<const CODES: u8, const VNNI: bool, const N: usize>(w: &[__m256i; N], x: &[[i8; QUAD]]) -> __m256i {
    assert!(x.len() >= N);
    let quad = |i: usize| _mm256_set1_epi32(i32::from_le_bytes(x[i].map(i8::cast_unsigned)));
    let mut sum = _mm256_setzero_si256();
    if VNNI {
        for (i, w) in w.iter().enumerate() {
            // SAFETY: kernels for AVX-VNNI are called where there is AVX-VNNI.
            sum = unsafe { dpbusd(sum, *w, quad(i)) };
        }
        return sum;
    }
    let mut few = _mm256_setzero_si256();
    for (i, w) in w.iter().enumerate() {
        few = _mm256_add_epi16(few, pairs::<CODES>(*w, quad(i)));
        if (i + 1) % const { fitting(CODES) } == 0 || i + 1 == N {
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(few, _mm256_set1_epi16(1)));
            few = _mm256_setzero_si256();
        }
    }
    sum
}

/// `sum` plus sums of four products of unsigned by signed bytes, without saturation. An instruction as text takes no copy of all
/// kernels for processors that have it.
///
/// # Safety
/// Only where there is AVX-VNNI.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn dpbusd(mut sum: __m256i, w: __m256i, x: __m256i) -> __m256i {
    // SAFETY: it reads and writes these registers only.
    unsafe {
        asm!("{{vex}} vpdpbusd {}, {}, {}", inout(ymm_reg) sum, in(ymm_reg) w, in(ymm_reg) x, options(pure, nomem, nostack, preserves_flags));
    }
    sum
}

/// How many results of `pairs` i16 holds the sum of.
const fn fitting(codes: u8) -> usize {
    match codes {
        4 => 8,
        5 => 4,
        6 => 2,
        _ => 1,
    }
}

/// Codes of columns 4 g.. and 16 + 4 g.. of 8 rows, the `part`-th of the panel; of a table their places in it.
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
    if CODES == 4 || CODES == T4 {
        return [low, high_nibble];
    }
    let (high, mask) = if CODES == 5 {
        let bits = fifth_bits(&block[512..], part);
        ([shift(bits, g, 4), shift(bits, 4 + g, 4)], _mm256_set1_epi8(16))
    } else {
        let bits = [line(512 + tile * 128), line(512 + tile * 128 + 64)];
        (bits.map(|b| shift(b, 2 * g, 4)), _mm256_set1_epi8(48))
    };
    [_mm256_or_si256(low, _mm256_and_si256(high[0], mask)), _mm256_or_si256(high_nibble, _mm256_and_si256(high[1], mask))]
}

/// Fifth bits of 8 rows, from their lines of a block.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn fifth_bits(lines: &[u8], part: usize) -> __m256i {
    assert!(lines.len() >= 2 * 64 && part < PARTS);
    // SAFETY: it lies within the two lines.
    unsafe { _mm256_loadu_si256(lines.as_ptr().add(32 * part).cast()) }
}

/// Moves bit `from` to bit `to`, and those beside it along.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn shift(v: __m256i, from: usize, to: usize) -> __m256i {
    let (left, right) = (to.saturating_sub(from), from.saturating_sub(to));
    _mm256_srl_epi16(_mm256_sll_epi16(v, _mm_cvtsi32_si128(left as i32)), _mm_cvtsi32_si128(right as i32))
}

/// Sums of pairs of products as i16. The products of 8-bit codes are taken with their zero subtracted and the sign moved to the
/// activation (|w| <= 128, |x| <= 127: a pair is at most 32512), the others unsigned (eight pairs of 4-bit codes are at most
/// 30480, four of 5-bit codes 31496, two of 6-bit codes 32004).
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn pairs<const CODES: u8>(w: __m256i, x: __m256i) -> __m256i {
    if is_wide(CODES) {
        let w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
        _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w))
    } else {
        _mm256_maddubs_epi16(w, x)
    }
}

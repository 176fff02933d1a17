//! The matrix of logits, of which a greedy step reads two thirds.
//!
//! Small models have large vocabularies: this matrix is up to three quarters of what a step reads, and a greedy step needs the largest of
//! its products alone. So codes of 8 bits lie in two planes:
//!
//! ```text
//! code = 8 * upper + lower        upper, of 5 bits: panels as of Codes::U5, then for each row how far lower parts reach
//!                                 lower, of 3 bits: of each block and tile two lines of bits 1 and 2, like the upper bits of
//!                                 Codes::U6, and one of bit 0, like those of Codes::U5
//! ```
//!
//! The upper plane, 5.5 bits a weight with its scales where both have 8.5, goes through the kernels of 5 bits and gives estimates. By
//! Cauchy and Schwarz no logit is further from its estimate than the length of the row of activations times the length of the weight
//! row's lower parts. The panel with the best estimate is then computed from both planes, with the bits of `Codes::U8`, and after it every
//! panel that may hold a logit as large. Over 60 steps of answers by SmolLM2-135M these are 15 of 1536 panels in the median and 138 in the
//! mean, of gemma-3-270m 4 and 745 of 8192.

use std::sync::atomic::{AtomicBool, Ordering};

use super::{
    PANEL,
    activations::{ActBlock, BLOCK, UPPER},
    out::SharedOut,
    packed::{Codes, Kernel, Layout, TILE, codes_bytes, codes_of, f16_at, kernel, pack_row, put_codes, span_bytes, zero_point},
    slab::SlabBytes,
};
use crate::{
    DType, DeviceError, GgmlType, WeightView,
    cpu::{CpuTier, ThreadPool},
};

const LAYOUT: Layout = Layout { codes: Codes::U8, halves: false, min: false, factors: false };
const UPPER_LAYOUT: Layout = Layout { codes: Codes::U5, halves: false, min: false, factors: false };
/// Bytes of a block as it was, of the upper plane and of the lower one.
const BLOCK_BYTES: usize = span_bytes(Codes::U8 as u8, false, false, false);
pub(super) const UPPER_BYTES: usize = span_bytes(Codes::U5 as u8, false, false, false);
pub(super) const LOWER_BYTES: usize = 2 * LOWER_LINES * 64;
/// Lines of lower bits of a tile of a block.
pub(super) const LOWER_LINES: usize = 3;
/// Bytes of the reaches of a panel.
pub(super) const REACH_BYTES: usize = PANEL * size_of::<f32>();

/// What an upper part counts.
pub(super) const UNIT: f32 = 8.0;
/// The middle of the lower parts.
const MIDDLE: f64 = 3.5;

/// An 8-bit weight in two planes.
pub(super) struct LmHead {
    upper: SlabBytes,
    lower: SlabBytes,
    /// Blocks of a panel.
    blocks: usize,
    estimate: Kernel,
}

/// Whether a weight of this type is laid out so. Where all logits are wanted the planes are joined, which AVX2 is too slow for: 8 streams of
/// gemma-3-270m decoded at 0.86 times the speed.
pub(super) fn is_split(dtype: DType, tier: CpuTier) -> bool {
    dtype == DType::Ggml(GgmlType::Q8_0) && tier >= CpuTier::Avx512
}

impl LmHead {
    /// Lays out `weight`; `None` when it is of another type, a scale is beyond f16, or the tier is below AVX-512.
    pub(super) fn new(weight: &WeightView, tier: CpuTier, pool: &ThreadPool) -> Result<Option<Self>, DeviceError> {
        if !is_split(weight.dtype, tier) {
            return Ok(None);
        }
        let (panels, blocks) = (weight.rows.div_ceil(PANEL), weight.cols / BLOCK);
        let [upper_bytes, lower_bytes] = [blocks * UPPER_BYTES + REACH_BYTES, blocks * LOWER_BYTES];
        let mut upper = SlabBytes::zeroed(panels * upper_bytes)?;
        let mut lower = SlabBytes::zeroed(panels * lower_bytes)?;
        let fits = AtomicBool::new(true);
        let (uppers, lowers) = (SharedOut::new(upper.as_mut_slice()), SharedOut::new(lower.as_mut_slice()));
        pool.for_each_range(panels, 4, &|start, end| {
            let mut panel = vec![0; blocks * BLOCK_BYTES];
            for p in start..end {
                panel.fill(0);
                let rows = p * PANEL..weight.rows.min((p + 1) * PANEL);
                for row in rows.clone() {
                    if !pack_row(GgmlType::Q8_0, LAYOUT, weight.row(row), row - rows.start, &mut panel) {
                        fits.store(false, Ordering::Relaxed);
                    }
                }
                // SAFETY: each panel is packed by one thread.
                let (upper, lower) =
                    unsafe { (uppers.part(p * upper_bytes, upper_bytes), lowers.part(p * lower_bytes, lower_bytes)) };
                let (codes, reaches) = upper.split_at_mut(blocks * UPPER_BYTES);
                split(&panel, codes, lower);
                for (r, out) in reaches.as_chunks_mut().0.iter_mut().take(rows.len()).enumerate() {
                    *out = reach(&panel, r).to_le_bytes();
                }
            }
        });
        Ok(fits.into_inner().then(|| Self { upper, lower, blocks, estimate: kernel(UPPER_LAYOUT, tier) }))
    }

    /// Row `r` of the weight, `[cols]`.
    pub(super) fn row(&self, r: usize, out: &mut [f32]) {
        let (upper, lower) = self.planes(r / PANEL);
        let (tile, lane) = (r % PANEL / TILE, r % TILE);
        let blocks = upper.chunks_exact(UPPER_BYTES).zip(lower.chunks_exact(LOWER_BYTES));
        for ((upper, lower), out) in blocks.zip(out.as_chunks_mut::<BLOCK>().0) {
            let scale = f16_at(upper, const { codes_bytes(5) } + 2 * (r % PANEL));
            let codes = codes_of::<5>(upper, (tile, lane)).into_iter().zip(lower_codes_of(lower, (tile, lane)));
            for (out, (upper, lower)) in out.iter_mut().zip(codes) {
                *out = scale * (i32::from(upper << 3 | lower) - const { zero_point(8, false) }) as f32;
            }
        }
    }

    /// Where the first panel of the upper plane lies, and the bytes of each.
    pub(super) fn upper_panels(&self) -> (usize, usize) {
        (self.upper.as_slice().as_ptr().addr(), self.blocks * UPPER_BYTES + REACH_BYTES)
    }

    /// Bytes of both planes.
    pub(super) fn bytes(&self) -> usize {
        self.upper.as_slice().len() + self.lower.as_slice().len()
    }

    /// Bytes that multiplying one panel touches beside the activations.
    pub(super) fn panel_bytes(&self) -> usize {
        self.blocks * (UPPER_BYTES + LOWER_BYTES)
    }

    /// Multiplies panel `p` by rows of activations, `[rows, stride]`; see [`Kernel`](super::packed::Kernel).
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
    pub(super) fn multiply(&self, p: usize, acts: &[ActBlock], out: &mut [[f32; PANEL]]) {
        let (upper, lower) = self.planes(p);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `new` lays nothing out for tiers below AVX-512, and `CpuLinear` refuses one above the machine's.
        unsafe {
            super::avx512::multiply_planes(upper, lower, acts, out);
        }
    }

    /// Of each of panel `p`'s rows about an eighth of its product by [`shift`]ed activations.
    pub(super) fn estimate(&self, p: usize, acts: &[ActBlock], out: &mut [[f32; PANEL]]) {
        // SAFETY: as above.
        unsafe { (self.estimate)(self.planes(p).0, acts, out) }
    }

    /// How far the products by a row of activations of length 1 may be from 8 times their estimates, of each row of panel `p`.
    pub(super) fn reaches(&self, p: usize) -> [f32; PANEL] {
        let len = self.blocks * UPPER_BYTES + REACH_BYTES;
        let bytes = self.upper.as_slice()[(p + 1) * len - REACH_BYTES..(p + 1) * len].as_chunks().0;
        std::array::from_fn(|r| f32::from_le_bytes(bytes[r]))
    }

    fn planes(&self, p: usize) -> (&[u8], &[u8]) {
        let [upper, lower] = [self.blocks * UPPER_BYTES, self.blocks * LOWER_BYTES];
        (&self.upper.as_slice()[p * (upper + REACH_BYTES)..][..upper], &self.lower.as_slice()[p * lower..][..lower])
    }
}

/// Makes the activations of a row ones for [`LmHead::estimate`]; returns the length of the row.
///
/// Upper parts less their zero, 16, stand for `8 * (upper - 16) + 3.5`, the middle of their codes less 128, if the zero is 15.5625. As a kernel's zero
/// is what it multiplies the sum of activations by, the sums are smaller in that proportion here, in whole units of 8 upper parts.
pub(super) fn shift(acts: &[ActBlock], out: &mut [ActBlock]) -> f32 {
    const STEP: i32 = 8;
    let mut squares = 0.0;
    for (x, out) in acts.iter().zip(out) {
        *out = *x;
        for sum in &mut out.sums {
            *sum = (f64::from(*sum) * ((16.0 - MIDDLE / f64::from(UNIT)) / 16.0) / f64::from(STEP)).round() as i32 * STEP;
        }
        let codes = x.upper.iter().zip(&x.lower).map(|(upper, lower)| UPPER * i32::from(*upper) + i32::from(*lower));
        squares += f64::from(x.scale).powi(2) * codes.map(|code| f64::from(code).powi(2)).sum::<f64>();
    }
    squares.sqrt() as f32
}

/// See [`LmHead::reaches`]: the length of a row's lower parts less their middle, times the scales, and what is lost by rounding, for which
/// each scale counts: the sums of [`shift`] are off by up to 4 units, which are 64 of the 16256 of a block's largest value and times 8 for the
/// code, 1/32; and sums of f32, of the product and of its estimate, by 2^-24 of what they add, up to 128 * sqrt(32) times the scale, twice.
fn reach(panel: &[u8], r: usize) -> f32 {
    let (tile, lane) = (r / TILE, r % TILE);
    let (mut lower, mut scales) = (0.0, 0.0);
    let blocks = panel.chunks_exact(BLOCK_BYTES);
    let slack = 1.0 / 16.0 + blocks.len() as f64 / 4096.0;
    for block in blocks {
        let squared = f64::from(f16_at(block, const { codes_bytes(8) } + 2 * r)).powi(2);
        let codes = codes_of::<8>(block, (tile, lane));
        lower += squared * codes.into_iter().map(|code| (f64::from(code & 7) - MIDDLE).powi(2)).sum::<f64>();
        scales += squared;
    }
    (lower.sqrt() + slack * scales.sqrt()).next_up() as f32 * (1.0 + f32::EPSILON)
}

/// Parts a panel of [`LAYOUT`] in planes.
fn split(panel: &[u8], upper: &mut [u8], lower: &mut [u8]) {
    let planes = upper.chunks_exact_mut(UPPER_BYTES).zip(lower.chunks_exact_mut(LOWER_BYTES));
    for (block, (upper, lower)) in panel.chunks_exact(BLOCK_BYTES).zip(planes) {
        for place in (0..2).flat_map(|tile| (0..TILE).map(move |lane| (tile, lane))) {
            let codes = codes_of::<8>(block, place);
            let quads = std::array::from_fn(|q| u32::from_le_bytes(std::array::from_fn(|i| codes[4 * q + i])));
            put_codes(Codes::U5, &quads.map(|quad| quad >> 3 & 0x1f1f_1f1f), upper, place);
            put_lower_codes(&quads, lower, place);
        }
        upper[const { codes_bytes(5) }..].copy_from_slice(&block[const { codes_bytes(8) }..]);
    }
}

/// Writes the lower 3 bits of the codes of one row of a block; a quad is those of 4 columns.
fn put_lower_codes(quads: &[u32; BLOCK / 4], out: &mut [u8], (tile, lane): (usize, usize)) {
    let mut lines = [0; LOWER_LINES];
    for (q, quad) in quads.iter().enumerate() {
        lines[q / 4] |= (quad >> 1 & 0x0303_0303) << (2 * (q % 4));
        lines[2] |= (quad & 0x0101_0101) << q;
    }
    let out = out.as_chunks_mut().0.iter_mut().skip(LOWER_LINES * tile * TILE + lane).step_by(TILE);
    out.zip(lines).for_each(|(out, line)| *out = line.to_le_bytes());
}

/// The inverse of [`put_lower_codes`].
fn lower_codes_of(block: &[u8], (tile, lane): (usize, usize)) -> [u8; BLOCK] {
    let lines: [u32; LOWER_LINES] =
        std::array::from_fn(|line| u32::from_le_bytes(block.as_chunks().0[(LOWER_LINES * tile + line) * TILE + lane]));
    let mut out = [0; BLOCK];
    for (q, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
        let (two, one) = (lines[q / 4] >> (2 * (q % 4)) & 0x0303_0303, lines[2] >> q & 0x0101_0101);
        *out = (two << 1 | one).to_le_bytes();
    }
    out
}

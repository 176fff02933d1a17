//! The matrix of logits, of which a greedy step reads two thirds.
//!
//! Small models have large vocabularies: this matrix is up to three quarters of what a step reads, and a greedy step needs the
//! largest of its products alone. So codes of 8 bits lie in three planes:
//!
//! ```text
//! bit of a code   7 6 5 4   3   2 1 0
//! upper plane     |-----|                 panels as of Codes::U4, with the scales
//! fifth plane             |-|             lines as those of fifth bits of Codes::U5; after a panel's its error bounds
//! lower plane             |-----|         nibbles as of Codes::U4
//! ```
//!
//! Upper and fifth plane, 5.5 bits a weight where codes of 8 bits have 8.5, give estimates as codes of 5 bits. The panel with the
//! best estimate is then computed from upper and lower plane, with the bits of `Codes::U8`, and after it every panel that may
//! hold a logit as large. That bit 3 lies in two planes costs memory, but where all logits are wanted nothing is read that is not
//! needed, and nibbles are joined fast.
//!
//! An estimate leaves out the sum of activations times lower parts, which are at most 3.5 from their middle. By Cauchy and
//! Schwarz this is at most the length of the activations times that of the row's lower parts, and for a few activations that are
//! much larger than the others their sum times the largest lower part is less. Of 120 answers' steps the panels that may hold the
//! largest logit are 3.2 % of 1536 in the mean by SmolLM2-135M (7.6 % by lengths alone), 0.2 % of 8192 by gemma-3-270m.

use std::sync::atomic::{AtomicBool, Ordering};

use super::{
    PANEL,
    act_block::{ActBlock, BLOCK, UPPER},
    layout::{
        Codes, FIFTH_BYTES, LOWER_BYTES, Layout, PlanesKernels, TILE, UPPER_BYTES, codes_bytes, super_block_bytes, zero_point,
    },
    out::SharedOut,
    packed::{codes_of, f16_at, pack_row, put_codes},
    slab::SlabBytes,
    tiles::MAX_WEIGHT,
};
use crate::{
    DType, DeviceError, GgmlType, WeightView,
    cpu::{Isa, ThreadPool},
};

const LAYOUT: Layout = Layout { codes: Codes::U8, halves: false, min: false, super_blocks: false, table: None };
/// Bytes of a block as it was.
const BLOCK_BYTES: usize = super_block_bytes(Codes::U8 as u8, false, false, false);
/// Bytes of the error bounds of a panel.
pub(super) const ERROR_BOUNDS_BYTES: usize = size_of::<ErrorBounds>();

/// What the upper 5 bits count.
pub(super) const UNIT: f32 = 8.0;
/// The middle of the lower 3 bits, and how far they are from it at most.
const MIDDLE: f64 = 3.5;
/// So many activations of a row are taken for outliers.
const OUTLIERS: usize = 4;

/// Error bounds of a panel: how far its products may be from [`UNIT`] times their estimates, of each row for each of [`Lengths`].
pub(super) type ErrorBounds = [[f32; PANEL]; 2];
/// The length of a row of activations without its outliers, and the sum of theirs.
pub(super) type Lengths = [f32; 2];

/// An 8-bit weight in three planes.
pub(super) struct LmHead {
    upper: SlabBytes,
    fifth: SlabBytes,
    lower: SlabBytes,
    /// Blocks of a panel.
    blocks: usize,
    kernels: PlanesKernels,
    /// Whether its values are well within f16.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    fits_f16: bool,
}

/// Whether a weight of this type is laid out so.
pub(super) fn is_split(dtype: DType, isa: Isa) -> bool {
    dtype == DType::Ggml(GgmlType::Q8_0) && planes_kernels(isa).is_some()
}

/// How many rows of activations are searched together. To kernels with VNNI codes of 5 bits are no faster than those of 8, so
/// that only one row, which waits for memory, gains; others multiply them 1.6 times as fast.
pub(super) fn max_searched_rows(isa: Isa) -> usize {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 if !super::avx2::has_vnni() => usize::MAX,
        _ => 1,
    }
}

/// Bytes of a panel of `cols` columns in all planes.
pub(super) const fn resident_panel_bytes(cols: usize) -> usize {
    let [upper, fifth, lower] = plane_lens(cols / BLOCK);
    upper + fifth + lower
}

fn planes_kernels(isa: Isa) -> Option<PlanesKernels> {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx | Isa::Avx512 => Some(super::avx512::planes_kernels()),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => Some(super::avx2::planes_kernels()),
        _ => None,
    }
}

impl LmHead {
    /// Lays out `weight`; `None` when it is of another type, a scale is beyond f16, or the ISA has no kernels.
    pub(super) fn new(weight: &WeightView, isa: Isa, pool: &ThreadPool) -> Result<Option<Self>, DeviceError> {
        let (true, Some(kernels)) = (is_split(weight.dtype, isa), planes_kernels(isa)) else { return Ok(None) };
        let (panels, blocks) = (weight.rows.div_ceil(PANEL), weight.cols / BLOCK);
        let lens @ [upper_len, fifth_len, lower_len] = plane_lens(blocks);
        let [mut upper, mut fifth, mut lower] = [
            SlabBytes::zeroed(panels * upper_len)?,
            SlabBytes::zeroed(panels * fifth_len)?,
            SlabBytes::zeroed(panels * lower_len)?,
        ];
        let (fits, fits_f16) = (AtomicBool::new(true), AtomicBool::new(true));
        let planes = [&mut upper, &mut fifth, &mut lower].map(|plane| SharedOut::new(plane.as_mut_slice()));
        pool.for_each_range(panels, 4, &|start, end| {
            let mut panel = vec![0; blocks * BLOCK_BYTES];
            for p in start..end {
                panel.fill(0);
                let rows = p * PANEL..weight.rows.min((p + 1) * PANEL);
                for row in rows.clone() {
                    match pack_row(GgmlType::Q8_0, LAYOUT, weight.row(row), row - rows.start, &mut panel) {
                        None => fits.store(false, Ordering::Relaxed),
                        Some(largest) if largest > MAX_WEIGHT => fits_f16.store(false, Ordering::Relaxed),
                        Some(_) => {}
                    }
                }
                // SAFETY: each panel is packed by one thread.
                let [upper, fifth, lower] = std::array::from_fn(|i| unsafe { planes[i].part(p * lens[i], lens[i]) });
                let (fifth, error_bounds) = fifth.split_at_mut(blocks * FIFTH_BYTES);
                split(&panel, upper, fifth, lower);
                let error_bounds = error_bounds.as_chunks_mut().0;
                for r in 0..rows.len() {
                    [error_bounds[r], error_bounds[PANEL + r]] = error_bound(&panel, r).map(f32::to_le_bytes);
                }
            }
        });
        let fits_f16 = fits_f16.into_inner();
        Ok(fits.into_inner().then_some(Self { upper, fifth, lower, blocks, kernels, fits_f16 }))
    }

    /// Row `r` of the weight, `[cols]`.
    pub(super) fn row(&self, r: usize, out: &mut [f32]) {
        let [upper, _, lower] = self.planes(r / PANEL);
        let place = (r % PANEL / TILE, r % TILE);
        let blocks = upper.chunks_exact(UPPER_BYTES).zip(lower.chunks_exact(LOWER_BYTES));
        for ((upper, lower), out) in blocks.zip(out.as_chunks_mut::<BLOCK>().0) {
            let scale = f16_at(upper, const { codes_bytes(4) } + 2 * (r % PANEL));
            let codes = codes_of::<4>(upper, place).into_iter().zip(codes_of::<4>(lower, place));
            for (out, (upper, lower)) in out.iter_mut().zip(codes) {
                *out = scale * (i32::from(upper << 4 | lower) - const { zero_point(8, false) }) as f32;
            }
        }
    }

    /// Whether its values are well within f16.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn fits_f16(&self) -> bool {
        self.fits_f16
    }

    /// Panel `p` of the planes that have all bits of codes, the upper and the lower one.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn code_planes(&self, p: usize) -> [&[u8]; 2] {
        let [upper, _, lower] = self.planes(p);
        [upper, lower]
    }

    /// Where the first panel of the upper plane lies, and the bytes of each.
    pub(super) fn upper_panels(&self) -> (usize, usize) {
        (self.upper.as_slice().as_ptr().addr(), self.blocks * UPPER_BYTES)
    }

    /// Bytes of all planes.
    pub(super) fn bytes(&self) -> usize {
        [&self.upper, &self.fifth, &self.lower].map(|plane| plane.as_slice().len()).into_iter().sum()
    }

    /// Bytes that multiplying one panel touches beside the activations.
    pub(super) fn panel_bytes(&self) -> usize {
        self.blocks * (UPPER_BYTES + LOWER_BYTES)
    }

    /// Multiplies panel `p` by rows of activations, `[rows, stride]`; see [`Kernel`](super::layout::Kernel).
    pub(super) fn multiply(&self, p: usize, acts: &[ActBlock], out: &mut [[f32; PANEL]]) {
        let [upper, _, lower] = self.planes(p);
        // SAFETY: the kernel is of the ISA, and `CpuLinear` refuses one above the machine's.
        unsafe { (self.kernels.multiply)(upper, lower, acts, out) }
    }

    /// Of each of panel `p`'s rows about an eighth of its product by [`shift`]ed activations.
    pub(super) fn estimate(&self, p: usize, acts: &[ActBlock], out: &mut [[f32; PANEL]]) {
        let [upper, fifth, _] = self.planes(p);
        // SAFETY: as above.
        unsafe { (self.kernels.estimate)(upper, &fifth[..self.blocks * FIFTH_BYTES], acts, out) }
    }

    /// The error bounds of panel `p`.
    pub(super) fn error_bounds(&self, p: usize) -> ErrorBounds {
        let [_, fifth, _] = self.planes(p);
        let mut bounds = ErrorBounds::default();
        for (bound, bytes) in bounds.as_flattened_mut().iter_mut().zip(fifth[self.blocks * FIFTH_BYTES..].as_chunks().0) {
            *bound = f32::from_le_bytes(*bytes);
        }
        bounds
    }

    /// Panel `p` of each plane.
    fn planes(&self, p: usize) -> [&[u8]; 3] {
        let (planes, lens) = ([&self.upper, &self.fifth, &self.lower], plane_lens(self.blocks));
        std::array::from_fn(|i| &planes[i].as_slice()[p * lens[i]..(p + 1) * lens[i]])
    }
}

/// Bytes of a panel of some blocks in each plane.
const fn plane_lens(blocks: usize) -> [usize; 3] {
    [blocks * UPPER_BYTES, blocks * FIFTH_BYTES + ERROR_BOUNDS_BYTES, blocks * LOWER_BYTES]
}

/// Makes the activations of a row ones for [`LmHead::estimate`]; returns how long they are.
///
/// The upper 5 bits less their zero, 16, stand for `8 * (upper - 16) + 3.5`, the middle of their codes less 128, if the zero is
/// 15.5625. As a kernel's zero is what it multiplies the sum of activations by, the sums are smaller in that proportion here, in
/// whole units of 8 upper parts.
pub(super) fn shift(acts: &[ActBlock], out: &mut [ActBlock]) -> Lengths {
    const STEP: i32 = 8;
    let mut squares = 0.0;
    let mut outliers = [0.0; OUTLIERS];
    for (x, out) in acts.iter().zip(out) {
        *out = *x;
        for sum in &mut out.sums {
            *sum = (f64::from(*sum) * ((16.0 - MIDDLE / f64::from(UNIT)) / 16.0) / f64::from(STEP)).round() as i32 * STEP;
        }
        let mut sum = 0;
        for (upper, lower) in x.upper.iter().zip(&x.lower) {
            let code = UPPER * i32::from(*upper) + i32::from(*lower);
            sum += i64::from(code.pow(2));
            let value = f64::from(x.scale) * f64::from(code.abs());
            if value > outliers[OUTLIERS - 1] {
                let rank = outliers.partition_point(|outlier| *outlier >= value);
                outliers[rank..].rotate_right(1);
                outliers[rank] = value;
            }
        }
        squares += f64::from(x.scale).powi(2) * sum as f64;
    }
    let rest = squares - outliers.iter().map(|outlier| outlier.powi(2)).sum::<f64>();
    // What rounding may have taken from the rest.
    let rest = rest + 1e-12 * squares;
    [rest.sqrt(), outliers.iter().sum()].map(|length| length as f32)
}

/// The error bounds of row `r` of a panel. For the rest the length of the row's lower parts less their middle, times the scales,
/// for outliers the largest of them. Both with what is lost by rounding, for which each scale counts, by the length of all
/// activations: that of the rest plus the outliers' sum at most. The sums of [`shift`] are off by up to 4 units, which are 64 of
/// the 16256 of a block's largest value and times 8 for the code, about 1/32; and sums of f32, of the product and of its
/// estimate, by 2^-24 of what they add, up to 128 * sqrt(32) times the scale, twice.
fn error_bound(panel: &[u8], r: usize) -> [f32; 2] {
    let (tile, lane) = (r / TILE, r % TILE);
    let (mut lower, mut scales, mut largest) = (0.0, 0.0, 0.0f64);
    let blocks = panel.chunks_exact(BLOCK_BYTES);
    let slack = 1.0 / 16.0 + blocks.len() as f64 / 4096.0;
    for block in blocks {
        let scale = f64::from(f16_at(block, const { codes_bytes(8) } + 2 * r));
        let codes = codes_of::<8>(block, (tile, lane));
        lower += scale.powi(2) * codes.into_iter().map(|code| (f64::from(code & 7) - MIDDLE).powi(2)).sum::<f64>();
        scales += scale.powi(2);
        largest = largest.max(scale.abs());
    }
    [lower.sqrt(), MIDDLE * largest]
        .map(|error_bound| (error_bound + slack * scales.sqrt()).next_up() as f32 * (1.0 + f32::EPSILON))
}

/// Parts a panel of [`LAYOUT`] in planes.
fn split(panel: &[u8], upper: &mut [u8], fifth: &mut [u8], lower: &mut [u8]) {
    let planes = upper.chunks_exact_mut(UPPER_BYTES).zip(fifth.chunks_exact_mut(FIFTH_BYTES));
    let planes = planes.zip(lower.chunks_exact_mut(LOWER_BYTES));
    for (block, ((upper, fifth), lower)) in panel.chunks_exact(BLOCK_BYTES).zip(planes) {
        let mut five = [0; codes_bytes(Codes::U5 as u8)];
        for place in (0..2).flat_map(|tile| (0..TILE).map(move |lane| (tile, lane))) {
            let codes = codes_of::<8>(block, place);
            let quads: [u32; BLOCK / 4] = std::array::from_fn(|q| u32::from_le_bytes(std::array::from_fn(|i| codes[4 * q + i])));
            let with_fifth = |quad: u32| quad >> 4 & 0x0f0f_0f0f | (quad & 0x0808_0808) << 1;
            put_codes(Codes::U5, &quads.map(with_fifth), &mut five, place);
            put_codes(Codes::U4, &quads, lower, place);
        }
        let (nibbles, scales) = upper.split_at_mut(const { codes_bytes(4) });
        nibbles.copy_from_slice(&five[..nibbles.len()]);
        scales.copy_from_slice(&block[const { codes_bytes(8) }..]);
        fifth.copy_from_slice(&five[const { codes_bytes(4) }..]);
    }
}

//! Linear layers on the CPU.
//!
//! A weight is worked on in panels of 32 rows. [`Precision::Fast`](crate::Precision::Fast) packs quantized weights for int8
//! kernels ([`packed`]), and lays out float ones in panels ([`tiled`]); AMX multiplies both by many rows ([`tiles`]). Every other
//! weight stays as it lies in its file and is multiplied in f32 ([`float`]). [`phases`] shares panels among the threads and fuses
//! norms, activation functions and residuals around them.

mod act_block;
mod activations;
#[cfg(target_arch = "x86_64")]
mod activations_avx2;
#[cfg(target_arch = "x86_64")]
mod activations_avx512;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod buffer;
pub(super) mod elementwise;
mod experts;
mod float;
#[cfg(target_arch = "x86_64")]
mod float_avx2;
#[cfg(target_arch = "x86_64")]
mod float_avx512;
mod footprint;
mod gate_up;
mod grouped;
mod largest;
mod layout;
mod lm_head;
mod lora;
pub(in crate::cpu) mod out;
mod packed;
mod panels;
mod phases;
mod slab;
#[cfg(test)]
mod tests;
mod tiled;
#[cfg(target_arch = "x86_64")]
mod tiled_bf16;
mod tiled_f32;
#[cfg(target_arch = "x86_64")]
mod tiles;
#[cfg(not(target_arch = "x86_64"))]
#[path = "no_tiles.rs"]
mod tiles;

use std::{ops::Range, sync::Arc};

pub(super) use buffer::Buffer;
pub use elementwise::{activate, apply_norm};
pub(super) use experts::workspace_bytes as expert_workspace_bytes;
pub use experts::{ExpertScratch, experts};
pub(super) use footprint::{lm_head_bytes, resident_bytes, workspace_bytes};
pub use gate_up::gate_up;
pub use largest::greedy_tokens;
pub use phases::{LinearContext, LinearScratch, linear_residual, norm_linear};
pub(super) use slab::trim;

use self::{act_block::ActBlock, activations::stride, lm_head::LmHead, packed::Packed, tiled::Tiled};
use super::{Isa, ThreadPool, read_ahead::Panels};
use crate::{DType, DeviceError, Linear, LinearOptions, Precision, WeightView, backend::check_bias, quant::dequantize_row};

/// Rows of a weight that are worked on together.
const PANEL: usize = 32;
/// Rows of activations that a kernel of floats takes at once.
const ROWS: usize = 4;
/// Rows of activations that a kernel of packed weights takes at once.
const MANY_ROWS: usize = 64;

enum Weight {
    Packed(Packed),
    LmHead(LmHead),
    Tiled(Tiled),
    Stored(WeightView),
}

/// A weight `[out_features, in_features]` with its bias, in the form that this processor multiplies by.
pub struct CpuLinear {
    name: String,
    out_features: usize,
    in_features: usize,
    weight: Weight,
    bias: Option<Vec<f32>>,
    isa: Isa,
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    precision: Precision,
}

impl CpuLinear {
    /// Packs a weight for `isa`, or keeps its view where it is multiplied as it lies.
    ///
    /// Errors: an ISA above the machine's, a bias of another length than the weight's rows, no memory for the packed form.
    pub fn new(weight: &WeightView, options: &LinearOptions, isa: Isa, pool: &ThreadPool) -> Result<Self, DeviceError> {
        Self::with_pack(weight, options, isa, &|| Self::pack(weight, isa, pool))
    }

    /// The same for the matrix of logits, in a form that [`greedy_tokens`] searches, if there is one for its type.
    pub fn lm_head(weight: &WeightView, options: &LinearOptions, isa: Isa, pool: &ThreadPool) -> Result<Self, DeviceError> {
        Self::with_pack(weight, options, isa, &|| match LmHead::new(weight, isa, pool)? {
            Some(head) => Ok(Some(Weight::LmHead(head))),
            None => Self::pack(weight, isa, pool),
        })
    }

    fn with_pack(
        weight: &WeightView,
        options: &LinearOptions,
        isa: Isa,
        pack: &dyn Fn() -> Result<Option<Weight>, DeviceError>,
    ) -> Result<Self, DeviceError> {
        let best = Isa::detect();
        if isa > best {
            let message = format!("instruction set {} is not available; this machine has {}", isa.name(), best.name());
            return Err(DeviceError::Unsupported(message));
        }
        check_bias(weight, options)?;
        let packed = match options.precision {
            Precision::Fast | Precision::Deterministic => pack()?,
            Precision::Exact => None,
        };
        Ok(Self {
            name: options.name.clone(),
            out_features: weight.rows,
            in_features: weight.cols,
            weight: packed.unwrap_or_else(|| Weight::Stored(weight.clone())),
            bias: options.bias.clone(),
            isa,
            precision: options.precision,
        })
    }

    fn pack(weight: &WeightView, isa: Isa, pool: &ThreadPool) -> Result<Option<Weight>, DeviceError> {
        if let Some(tiled) = Tiled::new(weight, isa, pool)? {
            return Ok(Some(Weight::Tiled(tiled)));
        }
        Ok(Packed::new(weight, isa, pool)?.map(Weight::Packed))
    }

    /// Whether it is multiplied as it lies in its file.
    pub(crate) fn is_in_place(&self) -> bool {
        matches!(self.weight, Weight::Stored(_))
    }

    /// Row `r` of the weight, `[in_features]`.
    pub(crate) fn row(&self, r: usize, out: &mut [f32]) {
        match &self.weight {
            Weight::Packed(packed) => packed.row(r, out),
            Weight::LmHead(head) => head.row(r, out),
            Weight::Tiled(tiled) => tiled.row(r, out),
            Weight::Stored(view) => dequantize_row(view.dtype, view.row(r), out),
        }
    }

    /// Bytes of weight and bias in this form; those of the file where it is used in place.
    pub(crate) fn bytes(&self) -> usize {
        let bias = self.bias.as_deref().map_or(0, size_of_val);
        bias + match &self.weight {
            Weight::Packed(packed) => packed.bytes(),
            Weight::LmHead(head) => head.bytes(),
            Weight::Tiled(tiled) => tiled.bytes(),
            Weight::Stored(view) => view.bytes().len(),
        }
    }

    fn panels(&self) -> usize {
        self.out_features.div_ceil(PANEL)
    }

    /// Rows of the weight that panel `p` holds.
    fn panel_rows(&self, p: usize) -> Range<usize> {
        p * PANEL..self.out_features.min((p + 1) * PANEL)
    }

    /// The bias of some rows of the weight.
    fn panel_bias(&self, rows: &Range<usize>) -> Option<&[f32]> {
        self.bias.as_ref().map(|bias| &bias[rows.clone()])
    }

    /// Adds the bias of some rows of the weight to their products.
    fn add_bias(&self, rows: &Range<usize>, products: &mut [[f32; PANEL]]) {
        let Some(bias) = self.panel_bias(rows) else { return };
        for products in products {
            for (product, bias) in products.iter_mut().zip(bias) {
                *product += bias;
            }
        }
    }

    fn is_packed(&self) -> bool {
        matches!(self.weight, Weight::Packed(_) | Weight::LmHead(_))
    }

    /// Whether it is multiplied by activations in pairs of bf16.
    fn takes_pairs(&self) -> bool {
        matches!(&self.weight, Weight::Tiled(tiled) if tiled.takes_pairs())
    }

    /// Bytes that multiplying one panel touches beside the activations.
    fn panel_bytes(&self) -> usize {
        match &self.weight {
            Weight::Packed(packed) => packed.panel_bytes,
            Weight::LmHead(head) => head.panel_bytes(),
            Weight::Tiled(tiled) => tiled.panel_bytes,
            Weight::Stored(view) => PANEL * view.row_bytes(),
        }
    }

    /// Where its panels lie; of a matrix of logits the plane that every step reads.
    fn memory(&self) -> Panels {
        let (address, bytes) = match &self.weight {
            Weight::Packed(packed) => (packed.address(), packed.panel_bytes),
            Weight::LmHead(head) => head.upper_panels(),
            Weight::Tiled(tiled) => (tiled.address(), tiled.panel_bytes),
            Weight::Stored(view) => (view.bytes().as_ptr().addr(), PANEL * view.row_bytes()),
        };
        Panels { address, count: self.panels(), bytes }
    }

    /// f32 that [`Self::open`] needs to dequantize a panel.
    fn buffer_len(&self) -> usize {
        match &self.weight {
            Weight::Stored(view) if matches!(view.dtype, DType::Ggml(_)) => PANEL * self.in_features,
            _ => 0,
        }
    }

    /// Panel `p`, ready to be multiplied.
    fn open<'a>(&'a self, p: usize, buffer: &'a mut [f32]) -> Panel<'a> {
        let rows = self.panel_rows(p);
        let source = match &self.weight {
            Weight::Packed(packed) => Source::Packed(packed, p),
            Weight::LmHead(head) => Source::LmHead(head, p),
            Weight::Tiled(tiled) => Source::Tiled(tiled, p),
            Weight::Stored(view) => Source::Float(float::float_rows(view, rows.start, rows.end, buffer)),
        };
        Panel { linear: self, rows, source }
    }

    /// Estimates of panel `p` of a matrix of logits.
    fn estimate<'a>(&'a self, head: &'a LmHead, p: usize) -> Panel<'a> {
        Panel { linear: self, rows: self.panel_rows(p), source: Source::Estimate(head, p) }
    }
}

impl From<CpuLinear> for Linear {
    fn from(weight: CpuLinear) -> Self {
        let shape = [weight.out_features, weight.in_features];
        Self::new(shape, weight.bytes() as u64, weight.is_in_place(), Arc::new(weight))
    }
}

enum Source<'a> {
    Packed(&'a Packed, usize),
    LmHead(&'a LmHead, usize),
    /// Estimates of its products.
    Estimate(&'a LmHead, usize),
    Tiled(&'a Tiled, usize),
    Float(float::FloatRows<'a>),
}

/// A panel of a weight.
struct Panel<'a> {
    linear: &'a CpuLinear,
    rows: Range<usize>,
    source: Source<'a>,
}

/// Rows of activations in the forms that their weights need.
#[derive(Clone, Copy)]
struct Input<'a> {
    rows: usize,
    cols: usize,
    /// `[rows, cols]`.
    values: &'a [f32],
    /// `[rows, cols / 2]`, two bf16 each; empty when no weight takes them.
    pairs: &'a [u32],
    /// `[rows, stride]`, of which the first cols / 32 are blocks; empty when no weight is packed.
    acts: &'a [ActBlock],
}

impl<'a> Input<'a> {
    /// Blocks of some rows, `[rows, stride]`.
    fn act_rows(&self, rows: Range<usize>) -> &'a [ActBlock] {
        let stride = stride(self.cols);
        &self.acts[rows.start * stride..rows.end * stride]
    }
}

impl Panel<'_> {
    /// Rows `m..m + num_rows` (up to 64) of `input` times this panel, plus bias; `out` has these rows at least.
    fn multiply(&self, input: &Input<'_>, m: usize, num_rows: usize, out: &mut [[f32; PANEL]]) {
        match &self.source {
            Source::Packed(packed, p) => packed.multiply(*p, input.act_rows(m..m + num_rows), &mut out[..num_rows]),
            Source::LmHead(head, p) => head.multiply(*p, input.act_rows(m..m + num_rows), &mut out[..num_rows]),
            Source::Estimate(head, p) => head.estimate(*p, input.act_rows(m..m + num_rows), &mut out[..num_rows]),
            Source::Tiled(tiled, p) => tiled.multiply(*p, input, m, &mut out[..num_rows]),
            Source::Float(rows) => rows.multiply(self.linear.isa, &input.values[m * input.cols..], &mut out[..num_rows]),
        }
        // Estimates are scaled, and get it later.
        if !matches!(self.source, Source::Estimate(..)) {
            self.linear.add_bias(&self.rows, &mut out[..num_rows]);
        }
    }
}

/// Called with a row of the input, and the products of some rows from there on, at most 64, by each of N panels.
type EachProducts<'a, const N: usize> = &'a mut dyn FnMut(usize, [&mut [[f32; PANEL]]; N]);

/// Calls `each` for all of `rows`.
fn for_products<const N: usize>(panels: &[Panel<'_>; N], input: &Input<'_>, rows: &Range<usize>, each: EachProducts<'_, N>) {
    fn in_steps<const R: usize, const N: usize>(
        panels: &[Panel<'_>; N],
        input: &Input<'_>,
        rows: &Range<usize>,
        each: EachProducts<'_, N>,
    ) {
        let mut tiles = [[[0.0; PANEL]; R]; N];
        for m in rows.clone().step_by(MANY_ROWS) {
            let count = MANY_ROWS.min(rows.end - m);
            for (panel, tile) in panels.iter().zip(&mut tiles) {
                panel.multiply(input, m, count, tile);
            }
            each(m, tiles.each_mut().map(|tile| &mut tile[..count]));
        }
    }
    // Tiles of sums are cleared.
    match rows.len() {
        0..=ROWS => in_steps::<ROWS, N>(panels, input, rows, each),
        5..=16 => in_steps::<16, N>(panels, input, rows, each),
        17..=32 => in_steps::<32, N>(panels, input, rows, each),
        _ => in_steps::<MANY_ROWS, N>(panels, input, rows, each),
    }
}

//! Phases of many rows by AMX; with [`Precision::Deterministic`] of any number of rows.
//!
//! ```text
//! activations --- norm, rounded and packed once a phase ---> tiles of 16 rows          acts
//! packed weights, as the kernels of few rows read them ----> k tiles, when needed      dequantize
//! float weights, laid out as tiles ------------------------> as they lie               ../tiled.rs
//!                                                            products                  gemm
//! ```
//!
//! Weights are multiplied as f16, where the processor has AMX-FP16, else as bf16. A row has the same bits for any number of rows,
//! any groups and any number of threads. They are other ones than those of the kernels of few rows, which round activations
//! otherwise or add in another order.
//!
//! Error of outputs over their root mean square, packed weights of random numbers (`tests.rs` holds them to it): f16 3e-4, bf16
//! 2.4e-3; activations in 8 bits have 5e-3.
//!
//! Measured by prototypes of these loops on two cores of a Granite Rapids, where tile units alone reach 3.9 TFLOP/s a core:
//! `Q4_1` as f16, 4864 x 896 on one core, TFLOP/s: 0.68 at 8 rows, 1.11 at 16, 1.62 at 32, 1.68 at 64, 1.98 at 512; VNNI 0.37.
//! Tiles were faster than VNNI from about 5 rows on, with activations of 8 bits. With 15, which all have by now, they are
//! reckoned to be so from 3 on, f16 at least.

mod acts;
mod dequantize;
mod gemm;
#[cfg(test)]
mod tests;

use std::ops::Range;

pub(super) use dequantize::MAX_WEIGHT;
pub(super) use gemm::WORKER_BYTES;

use self::{
    acts::{ActTiles, Form},
    gemm::{Operands, PanelWork, Weights, Workspace, multiply},
};
use super::{CpuLinear, LinearContext, Weight, elementwise::norm_row, phases::Items};
use crate::{
    DeviceError, Norm, Precision, Tensor,
    cpu::{Amx, Isa, amx::K_TILE},
};

/// From this number of rows on, tiles are reckoned to be faster than the kernels of few rows; `None` without AMX.
pub(super) fn min_rows(isa: Isa) -> Option<usize> {
    Amx::detect().filter(|_| isa == Isa::Amx).map(|amx| if amx.has_fp16() { 3 } else { 5 })
}

/// Buffers.
pub(super) struct TileScratch {
    /// For float weights.
    floats: ActTiles,
    /// For packed ones.
    quads: ActTiles,
    /// A row for each worker, before it is packed.
    lines: Vec<f32>,
    workspace: Workspace,
}

impl TileScratch {
    fn new(num_threads: usize) -> Result<Self, DeviceError> {
        let (floats, quads) = (ActTiles::new()?, ActTiles::new()?);
        Ok(Self { floats, quads, lines: Vec::new(), workspace: Workspace::new(num_threads)? })
    }
}

/// A phase whose input is packed.
pub(super) struct TilePhase<'a> {
    context: LinearContext<'a>,
    operands: Operands<'a>,
    workspace: &'a Workspace,
}

impl CpuLinear {
    /// Whether tiles are to multiply `rows` rows by this weight.
    pub(super) fn is_for_tiles(&self, rows: usize) -> bool {
        let rows = match self.precision {
            Precision::Fast => min_rows(self.isa).is_some_and(|min| rows >= min),
            Precision::Deterministic => rows > 0,
            Precision::Exact => false,
        };
        let weight = match &self.weight {
            Weight::Tiled(tiled) => tiled.is_in_tiles(),
            Weight::Packed(packed) => packed.fits_f16(),
            Weight::LmHead(head) => head.fits_f16(),
            Weight::Stored(_) => false,
        };
        self.isa == Isa::Amx && rows && weight
    }

    /// Panel `p` for tiles.
    fn tile_weights(&self, p: usize, amx: Amx) -> Weights<'_> {
        let fp16 = amx.has_fp16();
        match &self.weight {
            Weight::Tiled(tiled) => Weights::Tiles { tiles: tiled.tiles(p), unit: tiled.unit(p) },
            Weight::Packed(packed) => {
                let (panel, lookup, layout) = packed.panel(p);
                Weights::Packed { planes: [panel, &[]], lookup, dequantize: dequantize::kernel(layout, fp16) }
            }
            Weight::LmHead(head) => {
                let (planes, lookup) = (head.code_planes(p), &dequantize::NO_LOOKUP);
                Weights::Packed { planes, lookup, dequantize: dequantize::planes_kernel(fp16) }
            }
            Weight::Stored(_) => unreachable!("`is_for_tiles` accepts no weights as they are stored"),
        }
    }
}

impl<'a> TilePhase<'a> {
    /// Packs `norm(x)`. `None` when other kernels are to be used: few rows, another ISA, a weight that is exact, of odd shape or
    /// with scales beyond f16, no memory for the buffers.
    pub(super) fn start(
        context: LinearContext<'a>,
        scratch: &'a mut Option<TileScratch>,
        x: &Tensor,
        norm: Option<&Norm>,
        weights: impl Iterator<Item = &'a CpuLinear>,
    ) -> Option<Self> {
        if context.isa != Isa::Amx {
            return None;
        }
        Self::start_as(Amx::detect()?, context, scratch, x, norm, weights)
    }

    /// The same by the instructions of `amx`.
    fn start_as(
        amx: Amx,
        context: LinearContext<'a>,
        scratch: &'a mut Option<TileScratch>,
        x: &Tensor,
        norm: Option<&Norm>,
        weights: impl Iterator<Item = &'a CpuLinear>,
    ) -> Option<Self> {
        let (mut float_form, mut any_packed) = (None, false);
        for weight in weights {
            if !weight.is_for_tiles(x.rows()) {
                return None;
            }
            match &weight.weight {
                Weight::Tiled(tiled) => float_form = Some(if tiled.is_f16_pairs() { Form::F16 } else { Form::Bf16 }),
                _ => any_packed = true,
            }
        }
        let threads = context.pool.num_threads();
        if scratch.as_ref().is_none_or(|s| s.workspace.num_threads() < threads) {
            *scratch = Some(TileScratch::new(threads).ok()?);
        }
        let TileScratch { floats, quads, lines, workspace } = scratch.as_mut()?;
        let row = |m: usize, out: &mut [f32]| match norm {
            Some(norm) => norm_row(context.isa, norm, x.row(m), out),
            None => out.copy_from_slice(x.row(m)),
        };
        let shape = [x.rows(), x.cols()];
        if let Some(form) = float_form {
            floats.pack((amx, form), context, lines, shape, &row).ok()?;
        }
        if any_packed {
            let form = if amx.has_fp16() { Form::F16Quads } else { Form::Bf16Quads };
            quads.pack((amx, form), context, lines, shape, &row).ok()?;
        }
        let operands = Operands { amx, rows: x.rows(), k_tiles: x.cols() / K_TILE, floats, quads };
        Some(Self { context, operands, workspace })
    }

    pub(super) fn run(&self, items: &Items<'_, '_>) {
        let work = Work { items, amx: self.operands.amx };
        multiply(self.context.pool, self.workspace, self.operands, &work);
    }
}

struct Work<'a, 'w> {
    items: &'a Items<'a, 'w>,
    amx: Amx,
}

impl PanelWork for Work<'_, '_> {
    fn items(&self) -> usize {
        self.items.count
    }

    fn width(&self) -> usize {
        self.items.width
    }

    fn panel(&self, panel: usize) -> Weights<'_> {
        let (weight, p) = (self.items.weight)(panel);
        weight.tile_weights(p, self.amx)
    }

    fn store(&self, item: usize, rows: Range<usize>, c: &mut [f32]) {
        let width = self.items.width;
        for (i, c) in c.chunks_exact_mut(c.len() / width).enumerate() {
            let (weight, p) = (self.items.weight)(item * width + i);
            weight.add_bias(&weight.panel_rows(p), c.as_chunks_mut().0);
        }
        (self.items.store)(item, rows, c);
    }
}

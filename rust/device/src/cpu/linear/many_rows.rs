//! Phases of many rows by AMX: float weights of [`Precision::Fast`]. They multiply the bf16 numbers that the kernel of few rows
//! does ([`super::tiled_bf16`]) and add the products in another order, so [`Precision::Deterministic`] has only that.
//!
//! Quantized weights have finer activations: rounding activations and dequantized weights to bf16 moves SmolLM2's log
//! probabilities by up to 0.13.

use super::{CpuLinear, LinearContext, Weight, elementwise::norm_row, phases::Items};
use crate::{
    Norm, Precision, Tensor,
    cpu::{
        Amx, Isa,
        amx::{ActTiles, MAX_K, PanelWork, Workspace, multiply},
    },
};

/// From this number of rows on, AMX is faster than the kernels of few rows (`examples/bench_amx.rs`).
pub(super) const MIN_ROWS: usize = 5;

/// Buffers.
pub(super) struct Tiles {
    acts: ActTiles,
    workspace: Workspace,
}

/// A phase whose input is packed.
pub(super) struct ManyRows<'a> {
    amx: Amx,
    context: LinearContext<'a>,
    tiles: &'a Tiles,
}

impl CpuLinear {
    /// Whether AMX is to multiply `rows` rows by this weight.
    fn is_for_tiles(&self, rows: usize) -> bool {
        self.isa == Isa::Amx
            && self.in_features <= MAX_K
            && self.precision == Precision::Fast
            && rows >= MIN_ROWS
            && matches!(self.weight, Weight::Tiled(_))
    }
}

impl<'a> ManyRows<'a> {
    /// Packs `norm(x)`. `None` when the kernels of few rows are to be used: few rows, another ISA, a weight that is exact or of
    /// odd shape, no memory for the buffers.
    pub(super) fn start(
        context: LinearContext<'a>,
        tiles: &'a mut Option<Tiles>,
        x: &Tensor,
        norm: Option<&Norm>,
        mut weights: impl Iterator<Item = &'a CpuLinear>,
    ) -> Option<Self> {
        if context.isa != Isa::Amx || !weights.all(|w| w.is_for_tiles(x.rows())) {
            return None;
        }
        let amx = Amx::detect()?;
        let threads = context.pool.num_threads();
        if tiles.as_ref().is_none_or(|t| t.workspace.num_threads() < threads) {
            *tiles = Some(Tiles { acts: ActTiles::new().ok()?, workspace: Workspace::new(threads).ok()? });
        }
        let tiles = tiles.as_mut()?;
        let row = |m: usize, out: &mut [f32]| match norm {
            Some(norm) => norm_row(context.isa, norm, x.row(m), out),
            None => out.copy_from_slice(x.row(m)),
        };
        tiles.acts.pack(amx, context.pool, &tiles.workspace, (x.rows(), x.cols()), &row).ok()?;
        Some(Self { amx, context, tiles })
    }

    pub(super) fn run(&self, items: &Items<'_, '_>) {
        multiply(self.amx, self.context.pool, &self.tiles.workspace, &self.tiles.acts, &Work { items });
    }
}

struct Work<'a, 'w> {
    items: &'a Items<'a, 'w>,
}

impl PanelWork for Work<'_, '_> {
    fn items(&self) -> usize {
        self.items.count
    }

    fn width(&self) -> usize {
        self.items.width
    }

    fn panel(&self, panel: usize, k0: usize, k_len: usize) -> &[u16] {
        let (weight, p) = (self.items.weight)(panel);
        let Weight::Tiled(tiled) = &weight.weight else { unreachable!("`is_for_tiles` accepts only weights in panels") };
        tiled.columns(p, (k0, k_len))
    }

    fn store(&self, item: usize, row0: usize, rows: usize, c: &mut [f32]) {
        let width = self.items.width;
        for (i, c) in c.chunks_exact_mut(c.len() / width).enumerate() {
            let (weight, p) = (self.items.weight)(item * width + i);
            weight.add_bias(&weight.panel_rows(p), &mut c.as_chunks_mut().0[..rows]);
        }
        (self.items.store)(item, row0..row0 + rows, c);
    }
}

//! Stands in for AMX where no processor has it: no phase ever starts.

use super::{CpuLinear, LinearContext, phases::Items};
use crate::{Norm, Tensor, cpu::Isa};

/// No number of rows is enough.
pub(super) fn min_rows(_: Isa) -> Option<usize> {
    None
}
/// No weight is too large.
pub(super) const MAX_WEIGHT: f32 = f32::INFINITY;
pub(super) const WORKER_BYTES: usize = 0;

pub(super) enum TileScratch {}
pub(super) enum TilePhase {}

impl CpuLinear {
    pub(super) fn is_for_tiles(&self, _: usize) -> bool {
        false
    }
}

impl TilePhase {
    pub(super) fn start<'a>(
        _: LinearContext<'a>,
        _: &mut Option<TileScratch>,
        _: &Tensor,
        _: Option<&Norm>,
        _: impl Iterator<Item = &'a CpuLinear>,
    ) -> Option<Self> {
        None
    }

    pub(super) fn run(&self, _: &Items<'_, '_>) {
        match *self {}
    }
}

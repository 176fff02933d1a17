//! Stands in for AMX where no processor has it: no phase ever starts.

use super::{CpuLinear, LinearContext, phases::Items};
use crate::{Norm, Tensor};

/// No number of rows is enough.
#[cfg(test)]
pub(super) const MIN_ROWS: usize = usize::MAX;

pub(super) enum Tiles {}
pub(super) enum ManyRows {}

impl ManyRows {
    pub(super) fn start<'a>(
        _: LinearContext<'a>,
        _: &mut Option<Tiles>,
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

//! Stands in for AMX where no processor has it.

use crate::{AttentionParams, KvDType, cpu::Isa};

use super::{Problem, plan::Item};

#[derive(Clone, Copy)]
pub(super) enum ByTiles {}

impl ByTiles {
    pub(super) fn of(_: Isa, _: &AttentionParams, _: KvDType) -> Option<Self> {
        None
    }
}

pub(super) fn is_for_tiles(_: &Item, _: usize) -> bool {
    false
}

pub(super) fn buffer_len(_: usize, _: usize) -> usize {
    0
}

pub(super) unsafe fn attend_by_tiles(_: &Problem<'_>, _: &Item, by: ByTiles, _: *mut f32, _: *mut f32) {
    match by {}
}

//! What is asked for ahead of use.
#![allow(clippy::inline_always)] // Tier code must be inlined.

use std::cell::Cell;

use crate::cpu::simd::prefetch_ahead;

use super::GROUPS;

/// The keys or the values of a tile that is read later, as they lie: in that order the processor's own prefetchers follow.
pub(super) struct Ahead {
    /// Where the head starts in each block of the tile; from the last one on they begin anew.
    runs: [*const u8; GROUPS],
    /// Bytes of a head in a block.
    run_bytes: usize,
    /// See [`prefetch_ahead`].
    to_l2: bool,
    /// The run, and the byte in it, that comes next.
    at: Cell<(usize, usize)>,
}

impl Ahead {
    #[inline(always)]
    pub(super) fn new(runs: [*const u8; GROUPS], run_bytes: usize, to_l2: bool) -> Self {
        Self { runs, run_bytes, to_l2, at: Cell::new((0, 0)) }
    }

    /// Asks for the next `bytes`, of one run: what would be beyond its end is left out. Of blocks of 32 tokens everything is asked for.
    #[inline(always)]
    pub(super) fn ask(&self, bytes: usize) {
        let (run, byte) = self.at.get();
        let (place, end) = (self.runs[run % GROUPS], byte + bytes);
        for line in (byte..end).step_by(64) {
            prefetch_ahead(place.wrapping_add(line), self.to_l2);
        }
        self.at.set(if end < self.run_bytes { (run, end) } else { (run + 1, 0) });
    }
}

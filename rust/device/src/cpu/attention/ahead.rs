//! What is prefetched.
#![allow(clippy::inline_always)] // ISA code must be inlined.

use std::cell::Cell;

use crate::cpu::simd::prefetch_ahead;

use super::STRIPS;

/// The keys or the values of a head in a tile, as they lie: in that order the processor's own prefetchers follow.
pub(super) struct Lines {
    /// Where the head starts in each block of the tile; from the last one on they begin anew.
    runs: [*const u8; STRIPS],
    /// Bytes of a head in a block.
    run_bytes: usize,
    /// The run, and the byte in it, that comes next.
    at: Cell<(usize, usize)>,
}

impl Lines {
    #[inline(always)]
    pub(super) fn new(runs: [*const u8; STRIPS], run_bytes: usize) -> Self {
        Self { runs, run_bytes, at: Cell::new((0, 0)) }
    }

    /// Prefetches the next `bytes`, from one run alone: those beyond its end are not the next run's. Blocks of 32 tokens are
    /// prefetched whole.
    #[inline(always)]
    fn prefetch(&self, bytes: usize, to_l2: bool) {
        let (run, byte) = self.at.get();
        let (place, end) = (self.runs[run % STRIPS], byte + bytes);
        for line in (byte..end).step_by(64) {
            prefetch_ahead(place.wrapping_add(line), to_l2);
        }
        self.at.set(if end < self.run_bytes { (run, end) } else { (run + 1, 0) });
    }
}

/// What is prefetched while keys or values are read, some lines after some others.
pub(super) struct Ahead {
    /// What is read after `next`.
    pub(super) later: Lines,
    /// What is read next, and was `later` before.
    pub(super) next: Lines,
    /// See [`prefetch_ahead`]; of `later`.
    pub(super) to_l2: bool,
}

impl Ahead {
    /// Prefetches `bytes` more of `later`, and of `next` if `twice`. A core has room for only so many prefetches and drops those
    /// that come when it is full; where products are fast that happens often. On two cores of a Zen 5 few lines at a time made
    /// decode attention 1.1 to 1.2 times as fast, and issuing each prefetch twice 1.1 times more.
    #[inline(always)]
    pub(super) fn prefetch(&self, bytes: usize, twice: bool) {
        self.later.prefetch(bytes, self.to_l2);
        if twice {
            self.next.prefetch(bytes, false);
        }
    }
}

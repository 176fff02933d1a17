//! What is asked for ahead of use.
#![allow(clippy::inline_always)] // Tier code must be inlined.

use std::cell::Cell;

use crate::cpu::simd::prefetch_ahead;

use super::GROUPS;

/// The keys or the values of a head in a tile, as they lie: in that order the processor's own prefetchers follow.
pub(super) struct Lines {
    /// Where the head starts in each block of the tile; from the last one on they begin anew.
    runs: [*const u8; GROUPS],
    /// Bytes of a head in a block.
    run_bytes: usize,
    /// The run, and the byte in it, that comes next.
    at: Cell<(usize, usize)>,
}

impl Lines {
    #[inline(always)]
    pub(super) fn new(runs: [*const u8; GROUPS], run_bytes: usize) -> Self {
        Self { runs, run_bytes, at: Cell::new((0, 0)) }
    }

    /// Asks for the next `bytes`, from one run alone: those beyond its end are not the next run's. Of blocks of 32 tokens everything is asked for.
    #[inline(always)]
    fn ask(&self, bytes: usize, to_l2: bool) {
        let (run, byte) = self.at.get();
        let (place, end) = (self.runs[run % GROUPS], byte + bytes);
        for line in (byte..end).step_by(64) {
            prefetch_ahead(place.wrapping_add(line), to_l2);
        }
        self.at.set(if end < self.run_bytes { (run, end) } else { (run + 1, 0) });
    }
}

/// What is asked for while keys or values are read, some lines after some others.
pub(super) struct Ahead {
    /// What is read after `next`.
    pub(super) later: Lines,
    /// What is read next, and was `later` before.
    pub(super) next: Lines,
    /// See [`prefetch_ahead`]; of `later`.
    pub(super) to_l2: bool,
}

impl Ahead {
    /// Asks for `bytes` more of `later`, and of `next` if `twice`. A core has room for only so many requests and drops those that come when it
    /// is full; where products are fast that happens often. On two cores of a Zen 5 few lines at a time made decode attention 1.1 to 1.2 times
    /// as fast, and asking twice 1.1 times more.
    #[inline(always)]
    pub(super) fn ask(&self, bytes: usize, twice: bool) {
        self.later.ask(bytes, self.to_l2);
        if twice {
            self.next.ask(bytes, false);
        }
    }
}

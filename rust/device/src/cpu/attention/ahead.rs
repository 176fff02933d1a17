//! What is asked for ahead of use.
#![allow(clippy::inline_always)] // Tier code must be inlined.

use std::cell::Cell;

use crate::cpu::simd::prefetch_ahead;

use super::{GROUPS, product::Product};

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

    /// Asks for the next `bytes`, of one run: what would be beyond its end is left out. Of blocks of 32 tokens everything is asked for.
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

/// What is asked for while keys or values are read, a few lines after each few.
pub(super) struct Ahead {
    /// What is read after what comes next.
    pub(super) later: Lines,
    /// What comes next, and has been asked for before.
    pub(super) next: Lines,
    /// See [`prefetch_ahead`].
    pub(super) to_l2: bool,
}

impl Ahead {
    /// Asks for `bytes` more. A core has room for only so many requests and drops those that come when it is full; that happens where
    /// products are fast, so there what comes next is asked for again: on two cores of a Zen 5 decode attention streams 1.1 times as fast so.
    #[inline(always)]
    pub(super) fn ask<P: Product>(&self, bytes: usize) {
        self.later.ask(bytes, self.to_l2);
        if P::PACKED > 1 {
            self.next.ask(bytes, false);
        }
    }
}

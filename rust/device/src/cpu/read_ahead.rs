//! What the workers of a pool fetch while they wait: the weights that they are to multiply by next.
//!
//! Between the products of a step come norms, rotation and attention, which leave workers waiting and memory idle. A step
//! multiplies by the same weights in the same order every time, so a worker that waits can bring what its next shares begin with
//! into the caches of its core:
//!
//! ```text
//! phases of a step   | q k v | attention |  o  | gate up | down | q k v ...
//! a worker's shares  ####### ...wait.... #####   its share of o, then of gate and up, at most AHEAD bytes from the next phase on
//!                            ------------------->
//! ```
//!
//! It prefetches lines by their addresses and never reads them, so it does no harm when a weight is gone.

use std::{
    collections::VecDeque,
    ops::Range,
    sync::{
        PoisonError, RwLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use super::{isa::reads_ahead_to_l2, simd::prefetch_ahead};

/// Bytes that a worker fetches ahead of the next phase at most: a part of what a core's second-level cache holds.
const AHEAD: usize = 256 << 10;
/// Bytes that are prefetched between two polls. A processor drops what it has no room for: with 1 KB and a pause a core of a Zen
/// 5 gets 37 GB/s of the 38 that it reads alone.
const PIECE: usize = 1 << 10;
const LINE: usize = 64;
/// Ranges of memory that a worker has in view, so that looking ahead allocates nothing.
const MAX_RANGES: usize = 32;
/// Phases that are remembered at most.
const MAX_PHASES: usize = 1 << 12;

/// Weights that a phase multiplies by at most.
pub(super) const MAX_WEIGHTS: usize = 8;

/// Panels of a weight, which lie one after the other.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Panels {
    pub address: usize,
    pub count: usize,
    /// Bytes of each.
    pub bytes: usize,
}

impl Panels {
    fn memory(&self, panels: &Range<usize>) -> Range<usize> {
        let [start, end] = [panels.start, panels.end].map(|p| self.address + p.min(self.count) * self.bytes);
        start..end
    }
}

/// The weights of a phase, and the order in which workers go through their panels.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Phase {
    weights: [Panels; MAX_WEIGHTS],
    /// So many panels of each weight in turn; `None`: all of a weight before the next.
    in_turn: Option<usize>,
}

impl Phase {
    /// One weight after the other.
    pub(super) fn new(weights: impl Iterator<Item = Panels>) -> Self {
        let mut all = [Panels::default(); MAX_WEIGHTS];
        all.iter_mut().zip(weights).for_each(|(place, panels)| *place = panels);
        Self { weights: all, in_turn: None }
    }

    /// One whose weights are known only when it begins: nobody looks beyond it. `address` is one that no other phase begins with.
    pub(super) fn unforeseen(address: usize) -> Self {
        Self::new(std::iter::once(Panels { address, count: 0, bytes: 0 }))
    }

    fn is_unforeseen(&self) -> bool {
        self.weights[0].count == 0
    }

    /// The same of weights with equally many panels, taken in turn.
    pub(super) fn in_turn(self, stretch: usize) -> Self {
        Self { in_turn: Some(stretch), ..self }
    }

    /// Calls `each` with the memory of the share of worker `id` of `threads`, in order.
    fn share(&self, (id, threads): (usize, usize), each: &mut dyn FnMut(Range<usize>)) {
        let of = |count: usize| count * id / threads..count * (id + 1) / threads;
        if let Some(stretch) = self.in_turn {
            let share = of(self.weights[0].count);
            for start in share.clone().step_by(stretch) {
                let panels = start..share.end.min(start + stretch);
                self.weights.iter().for_each(|weight| each(weight.memory(&panels)));
            }
        } else {
            let mut share = of(self.weights.iter().map(|weight| weight.count).sum());
            for weight in &self.weights {
                each(weight.memory(&share));
                share = share.start.saturating_sub(weight.count)..share.end.saturating_sub(weight.count);
            }
        }
    }
}

/// The phases of a step, in the order in which they were first seen.
#[derive(Default)]
pub(super) struct ReadAhead {
    phases: RwLock<Vec<Phase>>,
    /// Number of the phase that comes after the one that was entered last.
    next: AtomicUsize,
}

impl ReadAhead {
    /// Tells that a phase begins.
    pub(super) fn enter(&self, phase: &Phase) {
        let phases = self.phases.read().unwrap_or_else(PoisonError::into_inner);
        let (expected, count) = (self.next.load(Ordering::Relaxed), phases.len());
        // Most likely the expected one, or again the one before.
        if let Some(this) = (0..count).map(|i| (expected + count - i) % count).find(|i| phases[*i] == *phase) {
            self.next.store((this + 1) % count, Ordering::Relaxed);
            return;
        }
        drop(phases);
        let mut phases = self.phases.write().unwrap_or_else(PoisonError::into_inner);
        if phases.len() == MAX_PHASES {
            phases.clear();
        }
        phases.push(*phase);
        // For all that is known the first one follows.
        self.next.store(0, Ordering::Relaxed);
    }
}

/// How far ahead a worker is.
pub(super) struct Reader {
    next: usize,
    /// Bytes from the start of its share of the next phase on that it has prefetched.
    prefetched: usize,
    /// What it is to prefetch, [`MAX_RANGES`] at most.
    memory: VecDeque<Range<usize>>,
}

impl Reader {
    pub(super) fn new() -> Self {
        Self { next: 0, prefetched: 0, memory: VecDeque::with_capacity(MAX_RANGES) }
    }

    /// Sees what comes next for worker `id` of `threads`.
    pub(super) fn look(&mut self, ahead: &ReadAhead, (id, threads): (usize, usize)) {
        let phases = ahead.phases.read().unwrap_or_else(PoisonError::into_inner);
        let next = ahead.next.load(Ordering::Relaxed);
        self.memory.clear();
        // What it prefetched of phases that have begun is no longer ahead.
        while self.next != next {
            if let Some(phase) = phases.get(self.next) {
                phase.share((id, threads), &mut |memory| self.prefetched = self.prefetched.saturating_sub(memory.len()));
            }
            self.next = if self.prefetched == 0 { next } else { (self.next + 1) % phases.len() };
        }
        let mut at = 0;
        for phase in phases.iter().cycle().skip(next).take(phases.len()) {
            phase.share((id, threads), &mut |memory| {
                let from = memory.start + self.prefetched.saturating_sub(at).min(memory.len());
                let to = memory.start + AHEAD.saturating_sub(at).min(memory.len());
                at += memory.len();
                if from < to && self.memory.len() < MAX_RANGES {
                    self.memory.push_back(from..to);
                }
            });
            if at >= AHEAD || phase.is_unforeseen() {
                break;
            }
        }
    }

    /// Prefetches a little more; `None` when there is nothing left.
    pub(super) fn proceed(&mut self) -> Option<Range<usize>> {
        let memory = self.memory.front_mut()?;
        let piece = memory.start..memory.end.min(memory.start + PIECE);
        let to_l2 = reads_ahead_to_l2();
        for address in piece.clone().step_by(LINE) {
            prefetch_ahead(std::ptr::without_provenance(address), to_l2);
        }
        self.prefetched += piece.len();
        memory.start = piece.end;
        if memory.start == memory.end {
            self.memory.pop_front();
        }
        Some(piece)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A phase of weights of so many panels each; no two of other numbers overlap.
    fn phase(number: usize, counts: &[usize], bytes: usize) -> Phase {
        let weights = counts.iter().enumerate();
        Phase::new(weights.map(|(i, count)| Panels { address: (8 * number + i + 1) << 32, count: *count, bytes }))
    }

    fn share(phase: &Phase, worker: (usize, usize)) -> Vec<Range<usize>> {
        let mut memory = vec![];
        phase.share(worker, &mut |part| memory.push(part));
        memory.retain(|part| part.start < part.end);
        memory
    }

    /// Everything that a reader prefetches, pieces that lie one after the other together.
    fn prefetched(reader: &mut Reader) -> Vec<Range<usize>> {
        let mut all: Vec<Range<usize>> = vec![];
        while let Some(piece) = reader.proceed() {
            match all.last_mut() {
                Some(last) if last.end == piece.start => last.end = piece.end,
                _ => all.push(piece),
            }
        }
        all
    }

    #[test]
    fn the_shares_of_all_workers_are_all_panels_in_order() {
        let phase = phase(0, &[5, 2, 2], 100);
        let at = |weight: usize, panels: Range<usize>| {
            let address = (weight + 1) << 32;
            address + panels.start * 100..address + panels.end * 100
        };
        assert_eq!(share(&phase, (0, 2)), [at(0, 0..4)]);
        assert_eq!(share(&phase, (1, 2)), [at(0, 4..5), at(1, 0..2), at(2, 0..2)]);
        let all: Vec<_> = (0..7).flat_map(|id| share(&phase, (id, 7))).collect();
        assert_eq!(all.iter().map(ExactSizeIterator::len).sum::<usize>(), 900);
    }

    #[test]
    fn weights_that_are_taken_in_turn_are_shared_together() {
        let phase = phase(0, &[5, 5], 100).in_turn(2);
        let at = |weight: usize, panels: Range<usize>| {
            let address = (weight + 1) << 32;
            address + panels.start * 100..address + panels.end * 100
        };
        assert_eq!(share(&phase, (0, 2)), [at(0, 0..2), at(1, 0..2)]);
        assert_eq!(share(&phase, (1, 2)), [at(0, 2..4), at(1, 2..4), at(0, 4..5), at(1, 4..5)]);
    }

    #[test]
    fn what_comes_next_is_prefetched_once_and_in_order() {
        let (ahead, mut reader, worker) = (ReadAhead::default(), Reader::new(), (1, 2));
        // Shares of a quarter, of half and of all that a worker may be ahead.
        let phases = [(0, AHEAD / 2), (1, AHEAD), (2, 2 * AHEAD)].map(|(number, bytes)| phase(number, &[2], bytes / 2));
        let [a, b, c] = phases.map(|phase| share(&phase, worker).remove(0));
        for phase in &phases {
            ahead.enter(phase);
        }
        reader.look(&ahead, worker);
        assert_eq!(prefetched(&mut reader), [a.clone(), b.clone(), c.start..c.start + AHEAD / 4]);
        ahead.enter(&phases[0]);
        reader.look(&ahead, worker);
        assert_eq!(reader.proceed(), Some(c.start + AHEAD / 4..c.start + AHEAD / 4 + PIECE));
        // Interrupted, and looking again in the same phase.
        reader.look(&ahead, worker);
        assert_eq!(prefetched(&mut reader), vec![c.start + AHEAD / 4 + PIECE..c.start + AHEAD / 2; 1]);
        ahead.enter(&phases[1]);
        reader.look(&ahead, worker);
        assert_eq!(prefetched(&mut reader), vec![c.start + AHEAD / 2..c.end; 1]);
        ahead.enter(&phases[2]);
        reader.look(&ahead, worker);
        assert_eq!(prefetched(&mut reader), [a, b, c.start..c.start + AHEAD / 4]);
    }

    #[test]
    fn a_reader_that_missed_phases_begins_with_the_next() {
        let (ahead, mut reader, worker) = (ReadAhead::default(), Reader::new(), (0, 1));
        let phases = [0, 1, 2, 3].map(|number| phase(number, &[1], AHEAD));
        for phase in &phases {
            ahead.enter(phase);
        }
        reader.look(&ahead, worker);
        assert_eq!(prefetched(&mut reader), share(&phases[0], worker));
        for next in [2, 1] {
            ahead.enter(&phases[next - 1]);
            reader.look(&ahead, worker);
            assert_eq!(prefetched(&mut reader), share(&phases[next], worker));
        }
    }

    #[test]
    fn nobody_looks_beyond_a_phase_that_cannot_be_foreseen() {
        let (ahead, mut reader, worker) = (ReadAhead::default(), Reader::new(), (0, 1));
        let phases = [phase(0, &[1], PIECE), Phase::unforeseen(9), phase(1, &[1], PIECE)];
        for phase in &phases {
            ahead.enter(phase);
        }
        reader.look(&ahead, worker);
        assert_eq!(prefetched(&mut reader), share(&phases[0], worker));
        ahead.enter(&phases[0]);
        reader.look(&ahead, worker);
        assert_eq!(prefetched(&mut reader), []);
        ahead.enter(&phases[1]);
        reader.look(&ahead, worker);
        assert_eq!(prefetched(&mut reader), [&phases[2], &phases[0]].map(|phase| share(phase, worker).remove(0)));
    }

    #[test]
    fn the_phases_that_are_remembered_are_bounded() {
        let ahead = ReadAhead::default();
        (0..2 * MAX_PHASES + 2).for_each(|number| ahead.enter(&phase(number, &[1], 1)));
        assert_eq!(ahead.phases.read().unwrap().len(), 2);
    }
}

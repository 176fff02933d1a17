//! What steps make of the memory that requests hold: the sums behind averages over steps.

use super::Scheduler;

/// Sums over all steps that were committed.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct StepTotals {
    pub(super) steps: u64,
    pub(super) slots_live: u64,
    pub(super) slots_held: u64,
    /// Most requests in one step.
    pub(super) peak_running: usize,
    /// The same up to the first preemption.
    pub(super) peak_before_preemption: usize,
    /// Most blocks held while a step is computed.
    pub(super) peak_blocks_used: usize,
}

impl Scheduler {
    /// Slots that requests hold, and how many of them have KV: now, in all groups.
    pub(super) fn slots_held_and_live(&self) -> (usize, usize) {
        let held = self.manager.pool().num_used_blocks() * self.manager.block_size();
        let empty_of = |index: &super::RequestIndex| {
            let request = self.request(*index);
            self.manager.num_empty_slots(&request.blocks, request.num_computed_tokens)
        };
        (held, held - self.running.iter().chain(self.kept.holding()).map(empty_of).sum::<usize>().min(held))
    }

    /// Takes note of the blocks that a scheduled step is computed with.
    pub(super) fn record_blocks(&mut self) {
        self.usage.peak_blocks_used = self.usage.peak_blocks_used.max(self.manager.pool().num_used_blocks());
    }

    /// Takes note of a step of so many requests, after its commit and before any of them ends.
    pub(super) fn record_step(&mut self, num_requests: usize) {
        let (held, live) = self.slots_held_and_live();
        let totals = &mut self.usage;
        totals.steps += 1;
        totals.slots_held += held as u64;
        totals.slots_live += live as u64;
        totals.peak_running = totals.peak_running.max(num_requests);
        if self.totals.preemptions == 0 {
            totals.peak_before_preemption = totals.peak_running;
        }
    }
}

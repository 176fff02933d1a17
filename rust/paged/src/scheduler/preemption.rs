//! Who loses its blocks when there are none, and what that costs.

use super::policy::VictimPolicy;
use super::prefix::free_request;
use super::{Scheduler, Slot};
use crate::output::{Preemption, SchedulerOutput};
use crate::request::{Request, RequestId, RequestStatus};

impl Scheduler {
    /// Makes room for the running request at `index`, which finds no block: takes the blocks of one behind it. Nobody
    /// from `index` on is in the batch yet. If all behind it are protected from it, or nobody is, it gives way itself.
    pub(super) fn preempt_for(&mut self, index: usize, output: &mut SchedulerOutput) {
        let in_need = self.request(self.running[index]);
        let (request_id, priority) = (in_need.id, in_need.standing.rank.priority);
        let behind = index + 1..self.running.len();
        let mut candidates = behind.filter(|&at| {
            let request = self.request(self.running[at]);
            !self.is_protected(request) || request.standing.rank.priority > priority
        });
        let victim = match self.config.victim {
            VictimPolicy::Newest => candidates.next_back(),
            VictimPolicy::LeastCost => candidates.rev().min_by_key(|&at| self.cost_of_preempting(self.request(self.running[at]))),
        };
        self.preempt(victim.unwrap_or(index), request_id, output);
    }

    /// Whether a request has lost its blocks so often that only those of a more urgent priority may still take them.
    pub(super) fn is_protected(&self, request: &Request) -> bool {
        request.standing.cost.preemptions >= self.config.max_preemptions
    }

    /// Tokens that would be computed again: those computed, without the blocks that someone else holds too and that
    /// therefore stay. What the victim alone has published does not count as staying: the request in need takes
    /// those very blocks, for no others are free.
    fn cost_of_preempting(&self, request: &Request) -> usize {
        let table = request.blocks.table(0);
        let num_staying = table.partition_point(|block| self.manager.pool().ref_cnt(*block) > 1);
        request.num_computed_tokens.saturating_sub(num_staying * self.manager.block_size())
    }

    fn preempt(&mut self, index: usize, in_need: RequestId, output: &mut SchedulerOutput) {
        let slot = self.running.remove(index);
        self.offer_held_blocks(slot);
        let num_lost_tokens = self.cost_of_preempting(self.request(slot));
        let Some(request) = self.requests[slot].as_mut() else { return };
        request.standing.cost.preemptions += 1;
        request.standing.lost_below = request.standing.lost_below.max(request.num_computed_tokens);
        free_request(&mut self.manager, request);
        request.status = RequestStatus::Preempted;
        output.preempted.push(Preemption { request_id: request.id, in_need, num_lost_tokens });
        self.totals.preemptions += 1;
        self.blocked = None;
        self.wait(slot);
        self.close_admission_for(slot);
    }

    /// Until there is room for the victim and one more block of each that stays, else it would be back only to leave
    /// again.
    fn close_admission_for(&mut self, slot: Slot) {
        let request = self.request(slot);
        let room = self.peak_blocks(request.num_tokens(), request.num_tokens()) + self.running.len() * self.num_groups();
        self.admission_closed_below = self.admission_closed_below.max(room).min(self.manager.pool().num_blocks());
    }

    /// Counts what of a committed row was computed before.
    pub(super) fn count_recomputed(&mut self, slot: Slot, from: usize, to: usize) {
        let Some(request) = self.requests[slot].as_mut() else { return };
        let again = request.standing.lost_below.min(to).saturating_sub(from) as u64;
        request.standing.cost.recomputed_tokens += again;
        self.totals.recomputed_tokens += again;
    }
}

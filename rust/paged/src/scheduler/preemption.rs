//! Who loses its blocks when there are none, and what that costs.

use std::ops::Range;

use super::policy::VictimPolicy;
use super::prefix::free_request;
use super::{RequestIndex, Scheduler};
use crate::output::{Preemption, SchedulerOutput};
use crate::request::{Request, RequestStatus};

impl Scheduler {
    /// Makes room for the running request at `position`, which finds no block: takes the blocks of one behind it. Nobody
    /// from `position` on is in the batch yet. If all behind it are protected from it, or nobody is, it gives way itself.
    pub(super) fn preempt_for(&mut self, position: usize, output: &mut SchedulerOutput) {
        let in_need = self.running[position];
        let victim = self.choose_victim(in_need, position + 1..self.running.len());
        self.preempt(victim.unwrap_or(position), in_need, output);
    }

    /// Who of the running requests at `among`, none of them ahead of `in_need`, loses its blocks or its seat to it; `None` if
    /// all are protected from it.
    pub(super) fn choose_victim(&self, in_need: RequestIndex, among: Range<usize>) -> Option<usize> {
        let in_need = self.request(in_need);
        let mut candidates = among.filter(|&at| {
            let request = self.request(self.running[at]);
            !self.is_protected(request) || request.standing.rank.priority > in_need.standing.rank.priority
        });
        match self.config.victim {
            VictimPolicy::Newest => candidates.next_back(),
            VictimPolicy::LeastCost => candidates.rev().min_by_key(|&at| {
                let request = self.request(self.running[at]);
                (self.is_of_no_use(request, in_need), self.cost_of_preempting(request))
            }),
        }
    }

    /// Whether a request has lost its blocks so often that only those of a more urgent priority may still take them.
    pub(super) fn is_protected(&self, request: &Request) -> bool {
        request.standing.cost.preemptions >= self.config.max_preemptions
    }

    /// Tokens that would be computed again: those computed, without the blocks that someone else holds too and that
    /// therefore stay. What the victim alone has published does not count as staying: the request in need takes
    /// those very blocks, for no others are free.
    fn cost_of_preempting(&self, request: &Request) -> usize {
        let groups = &self.manager.groups().groups;
        // Window groups have given their first blocks back.
        let group = groups.iter().position(|group| group.retention.window().is_none()).unwrap_or(0);
        let table = request.blocks.table(group);
        let num_staying = table.partition_point(|block| self.manager.pool().ref_cnt(*block) > 1);
        request.num_computed_tokens.saturating_sub(num_staying * self.manager.block_size())
    }

    /// Whether taking a request's blocks would free none, since others hold the last ones and so all, nor make a block that
    /// `in_need` must otherwise copy its own.
    fn is_of_no_use(&self, victim: &Request, in_need: &Request) -> bool {
        let next = in_need.num_computed_tokens / self.manager.block_size();
        (0..self.num_groups()).all(|group| {
            let last = victim.blocks.table(group).last();
            last.is_none_or(|block| {
                self.manager.pool().ref_cnt(*block) > 1 && in_need.blocks.table(group).get(next) != Some(block)
            })
        })
    }

    pub(super) fn preempt(&mut self, position: usize, in_need: RequestIndex, output: &mut SchedulerOutput) {
        let in_need = self.request(in_need).id;
        let index = self.running.remove(position);
        self.offer_held_blocks(index);
        let num_lost_tokens = self.cost_of_preempting(self.request(index));
        let Some(request) = self.requests[index].as_mut() else { return };
        request.standing.cost.preemptions += 1;
        request.standing.lost_below = request.standing.lost_below.max(request.num_computed_tokens);
        free_request(&mut self.manager, request);
        request.status = RequestStatus::Preempted;
        output.preempted.push(Preemption { request_id: request.id, in_need, num_lost_tokens });
        self.totals.preemptions += 1;
        self.blocked = None;
        self.wait(index);
        self.close_admission_for(index);
    }

    /// Until there is room for the victim and one more block of each that stays, else it would be back only to leave
    /// again.
    fn close_admission_for(&mut self, index: RequestIndex) {
        let request = self.request(index);
        let room = self.peak_blocks(request.num_tokens(), request.num_tokens()) + self.running.len() * self.num_groups();
        self.admission_closed_below = self.admission_closed_below.max(room).min(self.manager.pool().num_blocks());
    }

    /// Counts what of a committed row was computed once already.
    pub(super) fn count_recomputed(&mut self, index: RequestIndex, from: usize, to: usize) {
        let Some(request) = self.requests[index].as_mut() else { return };
        let again = request.standing.lost_below.min(to).saturating_sub(from) as u64;
        request.standing.cost.recomputed_tokens += again;
        self.totals.recomputed_tokens += again;
    }
}

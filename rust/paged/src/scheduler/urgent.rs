//! Requests that wait although somebody runs whose priority is less urgent: they are admitted first, and take what they need.

use super::policy::AdmissionPolicy;
use super::{RequestIndex, Scheduler};
use crate::kv_cache_manager::PrefixHit;
use crate::output::{Preemption, SchedulerOutput};

impl Scheduler {
    /// The waiting request whose turn it is, if its priority is more urgent than that of some running one and it is
    /// none of those `preempted` in this step.
    pub(super) fn next_urgent(&self, preempted: &[Preemption]) -> Option<RequestIndex> {
        let last = self.request(*self.running.last()?).standing.rank.priority;
        if self.waiting.most_urgent_priority()? >= last || self.fetching.is_some() {
            return None;
        }
        self.next_to_admit().filter(|index| {
            let request = self.request(*index);
            request.standing.rank.priority < last && preempted.iter().all(|preemption| preemption.request_id != request.id)
        })
    }

    /// Admits `waiting` before the running request at `position`, from whom on all are of less urgent priorities and none is in
    /// the batch yet. If there is no room or no seat otherwise, they lose theirs, provided that it is enough. `false`, and no
    /// change, if it is not.
    pub(super) fn admit_before(
        &mut self,
        position: usize,
        waiting: RequestIndex,
        output: &mut SchedulerOutput,
        budget: &mut usize,
    ) -> bool {
        if !self.fits_the_step(waiting, *budget) {
            return false;
        }
        let Some(hit) = self.find_room(position, waiting, output) else { return false };
        let is_first = self.request(waiting).num_cached_tokens.is_none();
        self.admit(waiting, hit);
        if self.begin_swap_in(waiting, is_first, output) {
            return true;
        }
        // It stands before `position` now, so that those behind begin one further on.
        while !self.schedule_row(waiting, output, budget) {
            let Some(victim) = self.choose_victim(waiting, position + 1..self.running.len()) else {
                debug_assert!(false, "a request that would fit alone beside those ahead gets at least one token");
                return true;
            };
            self.preempt(victim, waiting, output);
        }
        true
    }

    fn find_room(&mut self, position: usize, waiting: RequestIndex, output: &mut SchedulerOutput) -> Option<PrefixHit> {
        let has_seat = self.running.len() < self.config.max_num_seqs;
        if has_seat && let Some(hit) = self.may_be_admitted(waiting, &mut None) {
            return Some(hit);
        }
        // Who was promised that it would never be preempted is not.
        if self.config.admission == AdmissionPolicy::Reserved || !self.would_fit_beside_those_before(position, waiting) {
            return None;
        }
        if !has_seat {
            let victim = self.choose_victim(waiting, position..self.running.len())?;
            self.preempt(victim, waiting, output);
        }
        Some(self.look_up(waiting))
    }

    /// Whether a waiting request has room for its known tokens, or to its end if it is reserved for, once everyone from
    /// `position` on has left. Shared blocks count for each of their holders: nobody is preempted for one who then does not fit.
    fn would_fit_beside_those_before(&self, position: usize, waiting: RequestIndex) -> bool {
        let request = self.request(waiting);
        let is_reserved = self.is_reserved(request);
        // A prefix hit may hold blocks of all known tokens, in whatever chunks the others are computed.
        let claim = if is_reserved {
            self.reserved_blocks(request)
        } else {
            self.peak_blocks(request.num_tokens(), request.num_tokens())
        };
        let copies = if self.manager.prefix_caching() { self.num_groups() } else { 0 };
        let held_by = |index: &RequestIndex| {
            let request = self.request(*index);
            let held = request.blocks.num_held_blocks();
            if is_reserved { self.reserved_blocks(request).max(held) } else { held + self.blocks_promised_to(request) }
        };
        let taken = self.running[..position].iter().map(held_by).sum::<usize>() + self.manager.num_copy_sources();
        claim + copies + taken <= self.manager.pool().num_blocks()
    }
}

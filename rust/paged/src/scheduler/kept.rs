//! Requests that are over but kept: their tokens are known, and their blocks are held as long as nobody needs them.

use std::collections::VecDeque;

use super::prefix::{cache_tail, free_request};
use super::{RequestIndex, Scheduler};
use crate::ids::RequestId;
use crate::request::RequestStatus;

#[derive(Debug, Clone, Default)]
pub(super) struct KeptRequests {
    /// Those that hold blocks, the least recently used first.
    holding: VecDeque<RequestIndex>,
    count: usize,
}

impl KeptRequests {
    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// Those that hold blocks.
    pub(super) fn holding(&self) -> impl Iterator<Item = &RequestIndex> {
        self.holding.iter()
    }

    pub(super) fn remove(&mut self, index: RequestIndex) {
        self.holding.retain(|holding| *holding != index);
        self.count -= 1;
    }

    /// A fork makes its source the most recently used.
    pub(super) fn touch(&mut self, index: RequestIndex) {
        if let Some(place) = self.holding.iter().position(|holding| *holding == index) {
            self.holding.remove(place);
            self.holding.push_back(index);
        }
    }
}

impl Scheduler {
    /// Ends a request as [`Self::finish_request`] does, but keeps it to be forked: its tokens stay known until
    /// [`Self::release`], and its name stays taken. Its computed blocks stay held, and so out of the order of eviction,
    /// until someone needs them: before a running request is preempted or a waiting one made to wait for want of
    /// blocks, kept requests give up theirs, the least recently kept or forked first. What they gave up may still be
    /// found for a while; what cannot be found is computed again by the fork. Without a prefix cache nothing is held.
    /// `false` if no such request is being served.
    pub fn keep_request(&mut self, request_id: RequestId) -> bool {
        let Some(&index) = self.indices.get(&request_id) else { return false };
        if self.request(index).status == RequestStatus::Kept {
            return false;
        }
        self.keep_states_at_end(index);
        self.leave_queue(index);
        let Some(request) = self.requests[index].as_mut() else { return false };
        request.status = RequestStatus::Kept;
        request.standing.deadline = None;
        self.kept.count += 1;
        if self.manager.prefix_caching() && request.num_computed_tokens > 0 {
            cache_tail(&mut self.manager, request);
            self.kept.holding.push_back(index);
        } else {
            free_request(&mut self.manager, request);
        }
        true
    }

    /// Lets go of a kept request. `false` if there is no such one.
    pub fn release(&mut self, request_id: RequestId) -> bool {
        self.status(request_id) == Some(RequestStatus::Kept) && self.abort_request(request_id)
    }

    /// Takes blocks of kept requests until the next `num_tokens` tokens of a request have room, or none is left to take.
    pub(super) fn make_room(&mut self, index: RequestIndex, num_tokens: usize) {
        while !self.kept.holding.is_empty() {
            let request = self.request(index);
            let fitting = self.manager.num_tokens_that_fit(&request.blocks, request.num_computed_tokens, num_tokens);
            if fitting >= num_tokens {
                return;
            }
            self.reclaim_one();
        }
    }

    /// Takes the blocks of the least recently used kept request; `false` if none holds any.
    pub(super) fn reclaim_one(&mut self) -> bool {
        let Some(index) = self.kept.holding.pop_front() else { return false };
        if let Some(request) = self.requests[index].as_mut() {
            free_request(&mut self.manager, request);
        }
        true
    }

    /// Takes the blocks of a request if it is kept.
    pub(super) fn reclaim(&mut self, request_id: RequestId) {
        let Some(&index) = self.indices.get(&request_id) else { return };
        if let Some(place) = self.kept.holding.iter().position(|holding| *holding == index) {
            self.kept.holding.remove(place);
            self.kept.holding.push_front(index);
            self.reclaim_one();
        }
    }

    /// What kept requests hold cannot be found any more.
    pub(super) fn reclaim_all(&mut self) {
        while self.reclaim_one() {}
    }

    /// Blocks in the tables of kept requests; one that several hold counts for each.
    pub(super) fn num_kept_blocks(&self) -> usize {
        self.kept.holding.iter().map(|index| self.request(*index).blocks.num_held_blocks()).sum()
    }
}

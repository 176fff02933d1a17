//! Admission: which requests are taken, and which of those that wait may run.

use super::policy::{AdmissionPolicy, FairnessPolicy};
use super::{RequestIndex, Scheduler};
use crate::error::AdmissionError;
use crate::kv_cache_manager::{PrefixHit, RequestBlocks};
use crate::output::SchedulerOutput;
use crate::request::{FinishReason, NewRequest, PreemptionCost, Rank, Request, RequestStatus, Standing};

/// Of a pool's blocks, the part that admissions leave free so that running requests can grow: one in so many.
const WATERMARK_DIVISOR: usize = 100;

/// Waiting requests that are looked at for one that may run: each is compared with all that run.
pub(super) const MAX_CANDIDATES: usize = 16;

/// The request that was last kept from running, and what it was short of. While nothing has happened that could make its
/// prefix hit longer, it is not looked up again before so much is free.
#[derive(Debug, Clone, Copy)]
pub(super) struct Blocked {
    pub(super) index: RequestIndex,
    pub(super) needed: usize,
}

impl Scheduler {
    /// Queues a request at its rank, or refuses it if it could never be served.
    pub fn add_request(&mut self, new: NewRequest) -> Result<(), AdmissionError> {
        if self.draining {
            return Err(AdmissionError::Draining { request_id: new.request_id });
        }
        self.check_admissible(&new)?;
        let index = self.insert(new, None);
        self.wait(index);
        Ok(())
    }

    /// Whether a request could ever be served.
    pub(super) fn check_admissible(&self, new: &NewRequest) -> Result<(), AdmissionError> {
        let request_id = new.request_id;
        let num_prompt_tokens = new.prompt_token_ids.len();
        let max_model_len = self.config.max_model_len;
        if self.indices.contains_key(&request_id) {
            return Err(AdmissionError::DuplicateRequest { request_id });
        }
        if num_prompt_tokens == 0 {
            return Err(AdmissionError::EmptyPrompt { request_id });
        }
        if new.max_tokens == 0 {
            return Err(AdmissionError::ZeroMaxTokens { request_id });
        }
        if self.config.fairness == FairnessPolicy::Fcfs && new.priority != 0 {
            return Err(AdmissionError::NoPriorities { request_id, priority: new.priority });
        }
        if num_prompt_tokens >= max_model_len {
            return Err(AdmissionError::TooLongForModel { request_id, num_prompt_tokens, max_model_len });
        }
        if let Some(span) = new.spans.iter().find(|span| span.len() > self.config.longest_span) {
            let (len, longest) = (span.len(), self.config.longest_span);
            return Err(AdmissionError::SpanTooLong { request_id, len, longest });
        }
        let needed_blocks = self.least_blocks(num_prompt_tokens);
        let usable_blocks = self.manager.pool().num_blocks();
        if needed_blocks > usable_blocks {
            let num_tokens = if self.config.reserve_full_context { max_model_len } else { num_prompt_tokens };
            return Err(AdmissionError::TooLongForPool {
                request_id,
                num_tokens,
                needed_blocks,
                usable_blocks,
                usable_tokens: self.servable_tokens(),
            });
        }
        Ok(())
    }

    /// Makes a request known, a fork directly behind its `source`; it is in no queue yet.
    pub(super) fn insert(&mut self, new: NewRequest, source: Option<Rank>) -> RequestIndex {
        let num_prompt_tokens = new.prompt_token_ids.len();
        self.last_branch += 1;
        let by_arrival = self.config.fairness == FairnessPolicy::Fcfs;
        let rank = Rank {
            priority: new.priority,
            deadline: new.deadline.filter(|_| !by_arrival).unwrap_or(u64::MAX),
            arrival: source.map_or(self.last_branch, |source| source.arrival),
            branch: self.last_branch,
        };
        let request = Request {
            id: new.request_id,
            status: RequestStatus::Waiting,
            tokens: new.prompt_token_ids,
            drafts: Vec::new(),
            num_again: 0,
            num_prompt_tokens,
            max_num_tokens: num_prompt_tokens.saturating_add(new.max_tokens).min(self.config.max_model_len),
            identity: new.identity,
            skip_prefix_lookup: new.skip_prefix_lookup,
            spans: new.spans,
            cache_salt: new.cache_salt,
            public_prefix_len: new.public_prefix_len.min(num_prompt_tokens),
            standing: Standing {
                rank,
                tenant: new.tenant,
                deadline: new.deadline,
                cost: PreemptionCost::default(),
                lost_below: 0,
            },
            num_computed_tokens: 0,
            num_cached_tokens: None,
            miss: None,
            snapshot_places: Vec::new(),
            num_found_tokens: 0,
            blocks: RequestBlocks::new(self.manager.groups().groups.len(), num_prompt_tokens),
            tier_keys: Vec::new(),
        };
        let index = if let Some(index) = self.vacant.pop() {
            self.requests[index] = Some(request);
            index
        } else {
            self.requests.push(Some(request));
            self.requests.len() - 1
        };
        self.indices.insert(new.request_id, index);
        if let Some(deadline) = new.deadline {
            self.deadlines.insert((deadline, index));
        }
        index
    }

    pub(super) fn wait(&mut self, index: RequestIndex) {
        let standing = self.request(index).standing;
        self.waiting.insert(&standing, index);
        self.ask_for_snapshots(index);
    }

    /// Puts a request among those that run, in its rank.
    pub(super) fn run(&mut self, index: RequestIndex) {
        let rank = self.request(index).standing.rank;
        let place = self.running.partition_point(|running| self.request(*running).standing.rank < rank);
        self.running.insert(place, index);
    }

    pub(super) fn admit_waiting(&mut self, output: &mut SchedulerOutput, budget: &mut usize) {
        let mut promised = None;
        while *budget > 0 && self.running.len() < self.config.max_num_seqs {
            let Some(index) = self.next_to_admit() else { return };
            if !self.fits_the_step(index, *budget) {
                return;
            }
            let Some(hit) = self.may_be_admitted(index, &mut promised) else { return };
            self.admission_closed_below = 0;
            let is_first = self.request(index).num_cached_tokens.is_none();
            self.admit(index, hit);
            if self.begin_swap_in(index, is_first, output) {
                // Whoever shares its prefix finds it in the pool the next time.
                return;
            }
            if !self.schedule_row(index, output, budget) {
                // Admission leaves room for a first chunk beside others. Alone, it has outgrown the pool: its last token was
                // sampled, but never had a block.
                debug_assert_eq!(self.running.len(), 1, "an admitted request gets at least one token");
                self.finish(index, FinishReason::Length, output);
                continue;
            }
            if let Some(promised) = &mut promised {
                *promised += self.blocks_promised_to(self.request(index));
            }
        }
    }

    /// The waiting request whose turn it is. One that waits for what a running one computes lets others pass, and so
    /// does one whose tenant is at another prompt.
    pub(super) fn next_to_admit(&self) -> Option<RequestIndex> {
        let is_free = |index: &RequestIndex| !self.shares.is_computing(self.request(*index).standing.tenant);
        let free = self.waiting.heads().chain(self.waiting.iter()).filter(is_free);
        free.take(MAX_CANDIDATES).find(|index| self.pending_leader(*index).is_none())
    }

    /// What the prefix cache has for a request, if it may run now. `promised` keeps what the running ones will take.
    pub(super) fn may_be_admitted(&mut self, index: RequestIndex, promised: &mut Option<usize>) -> Option<PrefixHit> {
        #[cfg(test)]
        if self.config.admission == AdmissionPolicy::Nobody {
            return None;
        }
        if self.running.is_empty() {
            return Some(self.look_up(index));
        }
        if self.is_reserved(self.request(index)) {
            return self.may_be_reserved_for(index).then(|| self.look_up(index));
        }
        let promised = *promised.get_or_insert_with(|| self.promised_blocks());
        if self.blocked.is_some_and(|blocked| blocked.index == index && self.free_blocks_beside(promised) < blocked.needed) {
            return None;
        }
        let watermark = match self.config.admission {
            // A reserved context does not grow, so it needs no room to.
            AdmissionPolicy::Watermark if !self.config.reserve_full_context => {
                self.manager.pool().num_blocks() / WATERMARK_DIVISOR
            }
            _ => 0,
        };
        loop {
            let hit = self.look_up(index);
            let free = self.free_blocks_beside(promised);
            let needed = (self.blocks_to_admit(index, hit) + watermark).max(self.admission_closed_below);
            self.blocked = (free < needed).then_some(Blocked { index, needed });
            if free >= needed {
                return Some(hit);
            }
            if !self.reclaim_one() {
                return None;
            }
        }
    }

    fn may_be_reserved_for(&mut self, index: RequestIndex) -> bool {
        if self.reserved_blocks(self.request(index)) > self.unreserved_blocks() {
            return false;
        }
        while self.free_blocks_beside(0) < self.admission_closed_below {
            if !self.reclaim_one() {
                return false;
            }
        }
        true
    }

    fn free_blocks_beside(&self, promised: usize) -> usize {
        self.manager.pool().num_free_blocks().saturating_sub(promised)
    }

    pub(super) fn admit(&mut self, index: RequestIndex, hit: PrefixHit) {
        self.take_hit(index, hit);
        self.plan_snapshots(index, hit);
        let standing = self.request(index).standing;
        self.waiting.remove(&standing);
        self.waiting.pass_turn(&standing);
        self.run(index);
    }
}

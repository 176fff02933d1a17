//! Requests over the same blocks: forks, and those that wait for what another one computes.

use super::policy::AdmissionPolicy;
use super::spans::before_span;
use super::{RequestIndex, Scheduler};
use crate::error::{AdmissionError, ForkError};
use crate::ids::RequestId;
use crate::kv_cache_manager::PrefixHit;
use crate::request::{ForkRequest, NewRequest, Request, RequestStatus};

impl Scheduler {
    /// Starts `child` from the tokens that `source` has now, with the source's identity and salt. All that it begins
    /// with is its prompt.
    ///
    /// The child of a request that is being served ranks as if it had arrived with its source, behind it; that of a kept
    /// one as it arrives. If the source runs and the batch has room, the child runs at once and shares every block of
    /// the source that holds computed tokens of both, the last one in part; one token at least is left to compute.
    /// Whoever first writes to a shared block gets a copy of it ([`crate::SchedulerOutput::copies`]), and the last
    /// holder writes in place. Otherwise (a source that waits or is kept, no room in the batch, contexts reserved in
    /// full, a cut before what a windowed layer still has) the child waits without blocks and finds what the prefix
    /// cache has when it is admitted.
    ///
    /// # Errors
    /// [`ForkError`]: an unknown source, a cut that it has no tokens for, a child that could never be served, or a running source
    /// while a step is in flight: what that writes is not there before its update. For `n` answers to one prompt, update with the
    /// first answer's token, then fork with the prompt's length and each other answer's own first token.
    pub fn fork(&mut self, source_id: RequestId, child: ForkRequest) -> Result<(), ForkError> {
        let source = self.find(source_id).ok_or(ForkError::UnknownSource { source_id })?;
        if self.draining && source.status == RequestStatus::Kept {
            return Err(AdmissionError::Draining { request_id: child.request_id }.into());
        }
        let is_running = source.status == RequestStatus::Running;
        if let Some(step_id) = self.in_flight.filter(|_| is_running) {
            return Err(ForkError::StepInFlight { source_id, step_id });
        }
        let num_tokens = source.num_tokens();
        let asked = child.num_source_tokens.unwrap_or(num_tokens);
        if asked == 0 || asked > num_tokens {
            return Err(ForkError::Cut { source_id, asked, num_tokens });
        }
        let mut prompt_token_ids = source.tokens[..asked].to_vec();
        prompt_token_ids.extend(child.token_ids);
        let public_prefix_len = source.public_prefix_len.min(asked);
        let block_size = self.manager.block_size();
        // A cut within the public prefix puts the salt before the block it cuts.
        let is_cut_short =
            !source.cache_salt.is_empty() && public_prefix_len / block_size < source.public_prefix_len / block_size;
        let num_alike = if is_cut_short { asked / block_size * block_size } else { asked };
        let num_shared_tokens = source.num_computed_tokens.min(num_alike).min(prompt_token_ids.len() - 1);
        let num_shared_tokens = before_span(&source.spans, num_shared_tokens);
        let spans = source.spans.iter().filter(|span| span.end <= asked).cloned().chain(child.spans).collect();
        let rank = (source.status != RequestStatus::Kept).then_some(source.standing.rank);
        let new = NewRequest {
            identity: source.identity.clone(),
            cache_salt: source.cache_salt.clone(),
            public_prefix_len,
            // Whoever wants log probabilities of the prompt has them from the source.
            skip_prefix_lookup: false,
            spans,
            priority: child.priority,
            deadline: child.deadline,
            tenant: child.tenant,
            ..NewRequest::new(child.request_id, prompt_token_ids, child.max_tokens)
        };
        self.check_admissible(&new)?;
        let source_index = self.indices[&source_id];
        let index = self.insert(new, rank);
        self.kept.touch(source_index);
        let has_seat = self.running.len() < self.config.max_num_seqs && !self.config.reserve_full_context;
        let has_state = !self.config.has_states || num_shared_tokens == self.request(source_index).num_computed_tokens;
        // The other policies let a fork run into its first preemption.
        let has_room = self.config.admission != AdmissionPolicy::Reserved
            || self.reserved_blocks(self.request(index)) <= self.unreserved_blocks();
        if is_running && has_seat && has_room && has_state && self.share(source_index, index, num_shared_tokens) {
            let num_tokens = num_shared_tokens;
            self.plan_snapshots(index, PrefixHit { num_tokens, ..PrefixHit::default() });
            self.run(index);
        } else {
            self.wait(index);
        }
        Ok(())
    }

    /// Lets the new request `child` run over the blocks of the first `num_tokens` tokens of `source`.
    fn share(&mut self, source: RequestIndex, child: RequestIndex, num_tokens: usize) -> bool {
        let Some(request) = self.requests[source].take() else { return false };
        let shared = self.requests[child].as_mut().is_some_and(|child| {
            let shared = self.manager.share_blocks(&request.blocks, &mut child.blocks, num_tokens);
            if shared {
                child.status = RequestStatus::Running;
                child.num_computed_tokens = num_tokens;
                child.num_cached_tokens = Some(0);
            }
            shared
        });
        self.requests[source] = Some(request);
        shared
    }

    /// The running request, if any, that a waiting one waits for because it computes the next block of both.
    pub fn waits_for(&self, request_id: RequestId) -> Option<RequestId> {
        let index = *self.indices.get(&request_id)?;
        let waits = matches!(self.request(index).status, RequestStatus::Waiting | RequestStatus::Preempted);
        if waits { self.pending_leader(index) } else { None }
    }

    /// The running request, if any, that computes next what the waiting one at `index` would compute as well: the next
    /// block of both is the same, and so is all before it. Waiting for it costs less than computing it twice. It ends
    /// by itself: whoever runs advances, or does not run any more. Who is less urgent is not waited for: it may be held
    /// up by those whom the follower goes ahead of.
    pub(super) fn pending_leader(&self, index: RequestIndex) -> Option<RequestId> {
        let follower = self.request(index);
        if follower.skip_prefix_lookup || !self.manager.prefix_caching() {
            return None;
        }
        if self.manager.has_states() {
            return self.leader_with_states(index).map(|leader| self.request(leader).id);
        }
        let block_size = self.manager.block_size();
        let key = follower.cache_key(block_size);
        let is_leader = |leader: &&Request| {
            let num_full = leader.num_computed_tokens / block_size;
            let end = (num_full + 1) * block_size;
            leader.standing.rank.urgency() <= follower.standing.rank.urgency()
                && end <= leader.num_tokens().min(follower.num_tokens())
                && leader.tokens[..end] == follower.tokens[..end]
                && leader.cache_key(block_size).is_same_at(key, num_full)
                && self.manager.publishes(&leader.blocks)
        };
        self.running.iter().map(|index| self.request(*index)).find(is_leader).map(|leader| leader.id)
    }
}

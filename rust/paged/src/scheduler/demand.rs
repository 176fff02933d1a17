//! How many blocks requests need: what the door and the admission gate go by.

use super::policy::AdmissionPolicy;
use super::{Scheduler, Slot};
use crate::kv_cache_manager::PrefixHit;
use crate::request::Request;

impl Scheduler {
    /// The longest sequence that can be served, in tokens.
    pub fn servable_tokens(&self) -> usize {
        let pool = self.manager.pool().num_blocks();
        let (block_size, longest) = (self.manager.block_size(), self.config.max_model_len);
        if self.config.reserve_full_context {
            return if self.least_blocks(1) <= pool { longest } else { 0 };
        }
        self.manager.groups().servable_tokens(pool, block_size, longest)
    }

    /// Blocks without which `num_tokens` tokens can never be computed: those of the smallest steps.
    pub(super) fn least_blocks(&self, num_tokens: usize) -> usize {
        let block_size = self.manager.block_size();
        if self.config.reserve_full_context {
            return self.config.max_model_len.div_ceil(block_size).saturating_mul(self.num_groups());
        }
        self.manager.groups().peak_blocks(num_tokens, 1, block_size)
    }

    /// Most blocks a request will hold until its first `num_tokens` tokens are computed, `remaining` of its known ones
    /// to go.
    pub(super) fn peak_blocks(&self, num_tokens: usize, remaining: usize) -> usize {
        let chunk = self.longest_chunk(remaining);
        let peak = self.manager.groups().peak_blocks(num_tokens, chunk, self.manager.block_size());
        // Chunks shrink when blocks are short, so no request waits for more than there is.
        peak.max(self.least_blocks(num_tokens)).min(self.manager.pool().num_blocks())
    }

    fn longest_chunk(&self, remaining: usize) -> usize {
        remaining.min(self.config.max_num_batched_tokens).min(self.config.max_chunk_len.unwrap_or(usize::MAX))
    }

    /// The policy that a request is admitted by: one that lost its blocks too often needs room to its end.
    pub(super) fn admission_of(&self, request: &Request) -> AdmissionPolicy {
        if self.is_protected(request) { AdmissionPolicy::Reserved } else { self.config.admission }
    }

    /// Tokens of a request that must have room under a policy: those known, or all there will be (the last one needs no
    /// KV).
    fn num_tokens_under(policy: AdmissionPolicy, request: &Request) -> usize {
        match policy {
            AdmissionPolicy::Reserved => request.num_tokens().max(request.max_num_tokens - 1),
            _ => request.num_tokens(),
        }
    }

    /// Free blocks that admitting a request takes, now and until it has computed what its policy asks room for.
    pub(super) fn blocks_to_admit(&self, slot: Slot, hit: PrefixHit, policy: AdmissionPolicy) -> usize {
        let request = self.request(slot);
        let remaining = request.num_tokens() - hit.num_tokens;
        let peak = match policy {
            AdmissionPolicy::Optimistic => {
                let end = hit.num_tokens + self.longest_chunk(remaining);
                self.peak_blocks(end, end - hit.num_tokens)
            }
            _ => self.peak_blocks(Self::num_tokens_under(policy, request), remaining),
        };
        peak.saturating_sub(hit.num_blocks) + hit.num_free_blocks + hit.num_copies
    }

    /// Free blocks that a running request will take, as far as its policy promises them to it.
    pub(super) fn blocks_promised_to(&self, request: &Request) -> usize {
        self.blocks_promised_under(self.admission_of(request), request)
    }

    fn blocks_promised_under(&self, policy: AdmissionPolicy, request: &Request) -> usize {
        if policy == AdmissionPolicy::Optimistic {
            return 0;
        }
        let copies = self.manager.num_copies_to_write(&request.blocks, request.num_computed_tokens);
        let num_tokens = Self::num_tokens_under(policy, request);
        let peak = self.peak_blocks(num_tokens, request.num_uncomputed_tokens());
        peak.saturating_sub(request.blocks.num_held_blocks()) + copies
    }

    /// Free blocks that the running requests will take before one admitted under `policy` may.
    pub(super) fn promised_blocks(&self, policy: AdmissionPolicy) -> usize {
        let reserved = policy == AdmissionPolicy::Reserved;
        let promised = |request| {
            // Who is promised room to its end takes it from nobody: all others must get to theirs as well.
            if reserved { self.blocks_promised_under(policy, request) } else { self.blocks_promised_to(request) }
        };
        self.running.iter().map(|slot| promised(self.request(*slot))).sum()
    }
}

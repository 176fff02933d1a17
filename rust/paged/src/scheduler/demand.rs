//! How many blocks requests need: what admission goes by.

use super::policy::AdmissionPolicy;
use super::{RequestIndex, Scheduler};
use crate::kv_cache_manager::PrefixHit;
use crate::kv_groups::last_that_holds;
use crate::request::Request;

impl Scheduler {
    /// The longest sequence that can be served, in tokens.
    pub fn servable_tokens(&self) -> usize {
        let pool = self.manager.pool().num_blocks();
        let (block_size, longest) = (self.manager.block_size(), self.config.max_model_len);
        if self.config.reserve_full_context {
            return if self.least_blocks(1) <= pool { longest } else { 0 };
        }
        if self.config.whole_prompts {
            return last_that_holds(longest, |num_tokens| self.least_blocks(num_tokens) <= pool);
        }
        if self.config.longest_span > 1 {
            return last_that_holds(longest, |num_tokens| self.least_blocks(num_tokens) <= pool);
        }
        self.manager.groups().servable_tokens(pool, block_size, longest)
    }

    /// Blocks without which `num_tokens` tokens can never be computed: those of the smallest steps.
    pub(super) fn least_blocks(&self, num_tokens: usize) -> usize {
        let block_size = self.manager.block_size();
        if self.config.reserve_full_context {
            return self.config.max_model_len.div_ceil(block_size).saturating_mul(self.num_groups());
        }
        let smallest = if self.config.whole_prompts { num_tokens } else { self.config.longest_span.min(num_tokens) };
        self.manager.groups().peak_blocks(num_tokens, smallest, block_size)
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

    /// Whether a request is admitted only with room to its end.
    pub(super) fn is_reserved(&self, request: &Request) -> bool {
        self.config.admission == AdmissionPolicy::Reserved || self.is_protected(request)
    }

    /// Blocks set aside for a request that must never lose any: the most it can hold until its last token, whatever it
    /// shares and however it is chunked, and one a group for a copy. The last token itself needs no KV.
    pub(super) fn reserved_blocks(&self, request: &Request) -> usize {
        let num_tokens = request.num_tokens().max(request.max_num_tokens - 1);
        let copies = if self.manager.prefix_caching() { self.num_groups() } else { 0 };
        (self.peak_blocks(num_tokens, num_tokens) + copies).min(self.manager.pool().num_blocks())
    }

    /// Of the pool, what is not set aside when all that run are reserved for.
    pub(super) fn unreserved_blocks(&self) -> usize {
        let reserved: usize = self.running.iter().map(|index| self.reserved_blocks(self.request(*index))).sum();
        self.manager.pool().num_blocks().saturating_sub(reserved)
    }

    /// Free blocks that admitting a request takes, now and until the tokens that its policy looks at are computed.
    pub(super) fn blocks_to_admit(&self, index: RequestIndex, hit: PrefixHit) -> usize {
        let request = self.request(index);
        let remaining = request.num_tokens() - hit.num_tokens;
        let end = match self.config.admission {
            AdmissionPolicy::Optimistic => hit.num_tokens + self.longest_chunk(remaining),
            _ => request.num_tokens(),
        };
        let peak = self.peak_blocks(end, remaining);
        peak.saturating_sub(hit.num_blocks) + hit.num_free_blocks + hit.num_copies
    }

    /// Free blocks that a running request will take, as far as the policies promise them to it.
    pub(super) fn blocks_promised_to(&self, request: &Request) -> usize {
        let held = request.blocks.num_held_blocks();
        if self.is_protected(request) {
            return self.reserved_blocks(request).saturating_sub(held);
        }
        if self.config.admission == AdmissionPolicy::Optimistic {
            return 0;
        }
        let copies = self.manager.num_copies_to_write(&request.blocks, request.num_computed_tokens);
        self.peak_blocks(request.num_tokens(), request.num_uncomputed_tokens()).saturating_sub(held) + copies
    }

    /// Free blocks that the running requests will take before one that waits may.
    pub(super) fn promised_blocks(&self) -> usize {
        self.running.iter().map(|index| self.blocks_promised_to(self.request(*index))).sum()
    }
}

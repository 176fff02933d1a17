//! How many blocks requests need: what the door and the admission gate go by.

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

    /// Most blocks a request will hold until its known tokens are computed, `remaining` of them to go.
    pub(super) fn peak_blocks(&self, request: &Request, remaining: usize) -> usize {
        let chunk = remaining.min(self.config.max_num_batched_tokens).min(self.config.max_chunk_len.unwrap_or(usize::MAX));
        let peak = self.manager.groups().peak_blocks(request.num_tokens(), chunk, self.manager.block_size());
        // Chunks shrink when blocks are short, so no request waits for more than there is.
        peak.max(self.least_blocks(request.num_tokens())).min(self.manager.pool().num_blocks())
    }

    /// Free blocks that admitting a request takes, now and until its known tokens are computed.
    pub(super) fn blocks_to_admit(&self, slot: Slot, hit: PrefixHit) -> usize {
        let request = self.request(slot);
        let peak = self.peak_blocks(request, request.num_tokens() - hit.num_tokens);
        peak.saturating_sub(hit.num_blocks) + hit.num_free_blocks + hit.num_copies
    }

    pub(super) fn blocks_still_needed(&self, request: &Request) -> usize {
        let copies = self.manager.num_copies_to_write(&request.blocks, request.num_computed_tokens);
        let peak = self.peak_blocks(request, request.num_uncomputed_tokens());
        peak.saturating_sub(request.blocks.num_held_blocks()) + copies
    }

    /// Free blocks that the running requests will take until all their known tokens are computed.
    pub(super) fn promised_blocks(&self) -> usize {
        self.running.iter().map(|slot| self.blocks_still_needed(self.request(*slot))).sum()
    }
}

//! The scheduler and the prefix cache: looking up, counting what was found, and leaving blocks findable.

use super::spans::cut_span;
use super::{RequestIndex, Scheduler};
use crate::kv_cache_manager::{KvCacheManager, MissReason, PrefixHit};
use crate::request::{Request, RequestStatus};

/// Tokens that lookups asked for and found. See [`crate::KvCacheStats`].
#[derive(Debug, Clone, Default)]
pub(super) struct LookupCounts {
    pub(super) queried: u64,
    pub(super) hit: u64,
    pub(super) missed: [u64; MissReason::COUNT],
    pub(super) resumed_queried: u64,
    pub(super) resumed_hit: u64,
}

impl LookupCounts {
    fn count(&mut self, num_tokens: usize, hit: PrefixHit) {
        let missed = (num_tokens - hit.num_tokens) as u64;
        if let Some(reason) = hit.miss {
            self.missed[reason as usize] += missed;
        }
        if !matches!(hit.miss, Some(MissReason::Disabled | MissReason::Skipped)) {
            self.queried += num_tokens as u64;
            self.hit += hit.num_tokens as u64;
        }
    }
}

impl LookupCounts {
    /// A request that was counted as beginning after `before` tokens begins after `now`.
    pub(super) fn correct(&mut self, before: usize, now: usize, miss: Option<MissReason>) {
        self.hit = (self.hit + now as u64).saturating_sub(before as u64);
        if let Some(reason) = miss {
            let missed = &mut self.missed[reason as usize];
            *missed = (*missed + before as u64).saturating_sub(now as u64);
        }
    }

    /// The same of one that was preempted.
    pub(super) fn correct_resumed(&mut self, before: usize, now: usize) {
        self.resumed_hit = (self.resumed_hit + now as u64).saturating_sub(before as u64);
    }
}

impl Scheduler {
    pub(super) fn look_up(&mut self, index: RequestIndex) -> PrefixHit {
        let block_size = self.manager.block_size();
        match &self.requests[index] {
            Some(request) if !request.skip_prefix_lookup || !self.manager.prefix_caching() => {
                let hit = self.manager.get_computed_blocks(&request.tokens, request.cache_key(block_size));
                match cut_span(&request.spans, hit.num_tokens) {
                    None => hit,
                    // One token is left to compute: the span's first.
                    Some(span) => self.manager.get_computed_blocks(&request.tokens[..=span.start], request.cache_key(block_size)),
                }
            }
            _ => PrefixHit { miss: Some(MissReason::Skipped), ..PrefixHit::default() },
        }
    }

    /// Lets a request run from where the lookup just before found it can begin.
    pub(super) fn take_hit(&mut self, index: RequestIndex, hit: PrefixHit) {
        let Some(request) = self.requests[index].as_mut() else { return };
        self.manager.take_hit(&mut request.blocks, hit);
        request.num_computed_tokens = hit.num_tokens;
        request.status = RequestStatus::Running;
        if request.num_cached_tokens.is_none() {
            request.num_cached_tokens = Some(hit.num_tokens);
            request.miss = hit.miss;
            self.lookups.count(request.num_tokens(), hit);
        } else if self.manager.prefix_caching() && !request.skip_prefix_lookup {
            self.lookups.resumed_queried += request.num_tokens() as u64;
            self.lookups.resumed_hit += hit.num_tokens as u64;
        }
    }

    /// What left the windows of the running requests is given back before anyone looks for a block.
    pub(super) fn drop_unseen_blocks(&mut self) {
        for &index in &self.running {
            if let Some(request) = self.requests[index].as_mut() {
                self.manager.drop_unseen_blocks(&mut request.blocks, request.num_computed_tokens);
            }
        }
    }
}

/// The KV of the request's computed tokens is written.
pub(super) fn commit_request(manager: &mut KvCacheManager, request: &mut Request) {
    let mut blocks = std::mem::take(&mut request.blocks);
    let key = request.cache_key(manager.block_size());
    manager.commit(&mut blocks, &request.tokens, key, request.num_computed_tokens);
    request.blocks = blocks;
}

/// Takes a request's blocks; what they hold stays findable, its last partial block included.
pub(super) fn free_request(manager: &mut KvCacheManager, request: &mut Request) {
    cache_tail(manager, request);
    manager.free(&mut request.blocks);
    request.num_computed_tokens = 0;
}

pub(super) fn cache_tail(manager: &mut KvCacheManager, request: &mut Request) {
    let mut blocks = std::mem::take(&mut request.blocks);
    let key = request.cache_key(manager.block_size());
    manager.cache_tail(&mut blocks, &request.tokens, key, request.num_computed_tokens);
    request.blocks = blocks;
}

//! The scheduler and a tier: what is offered to it, and what is fetched from it.

use std::sync::Arc;

use super::prefix::commit_request;
use super::{RequestIndex, Scheduler};
use crate::ids::BlockId;
use crate::output::{SchedulerOutput, SwapIn};
use crate::tier::{TierBlock, TierConfig, TierIndex, TierRates, TierRecordId, TierStats, first_fetched};

/// A request that waits for its blocks to be fetched.
#[derive(Debug, Clone)]
pub(super) struct Fetching {
    index: RequestIndex,
    /// Blocks it will begin with.
    num_blocks: usize,
    /// Tokens it would have begun with otherwise.
    num_hit_tokens: usize,
    /// It has never run before.
    is_first: bool,
}

impl Scheduler {
    /// Begins to offer blocks to a tier and to look for them there. What the tier has is told by [`Self::tier_has`].
    /// Without a prefix cache nothing is offered or fetched, nor of models with states: a tier keeps none.
    pub fn attach_tier(&mut self, config: TierConfig) {
        // Keys are those of the tier before.
        self.requests.iter_mut().flatten().for_each(|request| request.tier_keys.clear());
        let is_of_use = self.manager.prefix_caching() && !self.manager.has_states();
        self.tier = is_of_use.then(|| TierIndex::new(config));
    }

    /// Offers and looks up no more: the tier has failed. What is being fetched is still to be answered with [`Self::swapped_in`].
    pub fn detach_tier(&mut self) {
        self.tier = None;
    }

    /// The tier has a record: it was found there, or has been written.
    pub fn tier_has(&mut self, id: TierRecordId) {
        if let Some(tier) = &mut self.tier {
            tier.has(id);
        }
    }

    /// The tier has a record no more, or did not take it.
    pub fn tier_lost(&mut self, id: TierRecordId) {
        if let Some(tier) = &mut self.tier {
            tier.lost(id);
        }
    }

    /// How fast the tier and the device were found to be.
    pub fn set_tier_rates(&mut self, rates: TierRates) {
        if let Some(tier) = &mut self.tier {
            tier.set_rates(rates);
        }
    }

    /// Figures of the tier.
    pub fn tier_stats(&self) -> TierStats {
        self.tier.as_ref().map(TierIndex::stats).unwrap_or_default()
    }

    /// Blocks to copy out to the tier, added to `out`. They hold their bytes until the next step, copy or swap-in writes to the
    /// pool; each is answered with [`Self::tier_has`] or [`Self::tier_lost`].
    pub fn take_swap_outs(&mut self, out: &mut Vec<TierBlock>) {
        if let Some(tier) = &mut self.tier {
            tier.take_offers(out);
        }
    }

    /// Offers the first `num_blocks` blocks of a request, all of them computed, but not those that left their windows.
    pub(super) fn offer_blocks(&mut self, index: RequestIndex, blocks: std::ops::Range<usize>) {
        let (Some(tier), Some(request)) = (&mut self.tier, self.requests[index].as_mut()) else { return };
        if blocks.is_empty() || !self.manager.publishes(&request.blocks) {
            return;
        }
        let block_size = self.manager.block_size();
        let mut keys = std::mem::take(&mut request.tier_keys);
        tier.extend_keys(
            &mut keys,
            request.tokens[..blocks.end * block_size].chunks_exact(block_size),
            request.cache_key(block_size),
        );
        for nth in blocks {
            let tokens: Arc<[u32]> = request.tokens[nth * block_size..][..block_size].into();
            for group in 0..self.manager.groups().groups.len() {
                let block = request.blocks.table(group)[nth];
                if block != BlockId::NULL {
                    let id = TierRecordId { key: keys[nth + 1], group: group as u32 };
                    tier.offer(TierBlock { id, parent: keys[nth], index: nth as u32, tokens: Arc::clone(&tokens), block });
                }
            }
        }
        request.tier_keys = keys;
    }

    /// Offers what a request holds before it loses it: what the tier dropped, or did not keep.
    pub(super) fn offer_held_blocks(&mut self, index: RequestIndex) {
        let num_published = self.requests[index].as_ref().map_or(0, |request| request.blocks.num_published_blocks());
        self.offer_blocks(index, 0..num_published);
    }

    /// Lets a request that was just admitted begin further on if the tier has what follows its prefix hit and fetching that is
    /// cheaper than computing it. It then waits for [`Self::swapped_in`].
    pub(super) fn begin_swap_in(&mut self, index: RequestIndex, is_first: bool, output: &mut SchedulerOutput) -> bool {
        let (Some(tier), Some(request)) = (&mut self.tier, self.requests[index].as_mut()) else { return false };
        let (block_size, groups) = (self.manager.block_size(), self.manager.groups());
        let num_hit_tokens = request.num_computed_tokens;
        let num_hit_blocks = num_hit_tokens / block_size;
        let most_blocks = (request.num_tokens() - 1) / block_size;
        if request.skip_prefix_lookup || most_blocks <= num_hit_blocks {
            return false;
        }
        let mut keys = std::mem::take(&mut request.tier_keys);
        tier.extend_keys(
            &mut keys,
            request.tokens[..most_blocks * block_size].chunks_exact(block_size),
            request.cache_key(block_size),
        );
        let num_blocks = tier.reach(&keys[..=most_blocks], num_hit_blocks, groups, block_size);
        let firsts: Vec<usize> =
            (0..groups.groups.len()).map(|group| first_fetched(groups, group, num_hit_blocks, num_blocks, block_size)).collect();
        let begins =
            num_blocks > num_hit_blocks && self.manager.allocate_fetched(&mut request.blocks, num_hit_blocks, num_blocks);
        if begins {
            request.num_computed_tokens = num_hit_blocks * block_size;
            let mut blocks = Vec::new();
            for nth in num_hit_blocks..num_blocks {
                let tokens: Arc<[u32]> = request.tokens[nth * block_size..][..block_size].into();
                for (group, _) in firsts.iter().enumerate().filter(|(_, first)| nth >= **first) {
                    blocks.push(TierBlock {
                        id: TierRecordId { key: keys[nth + 1], group: group as u32 },
                        parent: keys[nth],
                        index: nth as u32,
                        tokens: Arc::clone(&tokens),
                        block: request.blocks.table(group)[nth],
                    });
                }
            }
            output.swap_in = Some(SwapIn { request_id: request.id, blocks });
            self.fetching = Some(Fetching { index, num_blocks, num_hit_tokens, is_first });
        }
        request.tier_keys = keys;
        begins
    }

    /// Takes the result of [`SchedulerOutput::swap_in`], before the step that it came with runs: its blocks hold what they
    /// should, but for those that `failed`. Then the request goes on from as far as it can begin without them.
    pub fn swapped_in(&mut self, swap_in: &SwapIn, failed: &[TierRecordId]) {
        let Some(fetching) = self.fetching.take() else { return };
        self.blocked = None;
        for id in failed {
            self.tier.iter_mut().for_each(|tier| tier.failed(*id));
        }
        let block_size = self.manager.block_size();
        let Some(request) = self.requests[fetching.index].as_mut().filter(|request| request.id == swap_in.request_id) else {
            return;
        };
        let first_failed =
            swap_in.blocks.iter().filter(|block| failed.contains(&block.id)).map(|block| block.index as usize).min();
        if let Some(first_failed) = first_failed {
            let mut blocks = std::mem::take(&mut request.blocks);
            let key = request.cache_key(block_size);
            self.manager.give_up_fetched(&mut blocks, &request.tokens[..first_failed * block_size], key);
            let hit = self.manager.get_computed_blocks(&request.tokens, key);
            self.manager.take_hit(&mut blocks, hit);
            request.blocks = blocks;
            request.num_computed_tokens = hit.num_tokens;
        } else {
            request.num_computed_tokens = fetching.num_blocks * block_size;
            commit_request(&mut self.manager, request);
        }
        let (before, now) = (fetching.num_hit_tokens, request.num_computed_tokens);
        if let Some(tier) = &mut self.tier {
            tier.count_fetched(swap_in.blocks.len() - failed.len(), now.saturating_sub(before));
        }
        if fetching.is_first {
            request.num_cached_tokens = Some(now);
            self.lookups.correct(before, now, request.miss);
        } else {
            self.lookups.correct_resumed(before, now);
        }
    }

    /// The request that waits for its blocks, if `index` is its index, waits no more.
    pub(super) fn forget_fetching(&mut self, index: RequestIndex) {
        self.fetching.take_if(|fetching| fetching.index == index);
    }
}

//! A tier whose records are pieces of the shadow.

use std::collections::HashMap;

use super::{Content, Sim};
use paged::*;

/// Records and what is to go wrong with them.
pub struct FakeTier {
    records: HashMap<TierRecordId, (TierBlock, Vec<Content>)>,
    /// One in so many loads fails; 0: none.
    pub fails_one_in: u64,
    /// One in so many offers is not kept; 0: none.
    pub drops_one_in: u64,
    num_loads: u64,
    num_offers: u64,
    pub num_failed: u64,
}

pub fn tier_config(space: u8) -> TierConfig {
    let rates = TierRates { bytes_per_second: 1e9, tokens_per_second: 1.0 };
    TierConfig { space: [space; 32], bytes_per_block: 1, rates }
}

impl Sim {
    pub fn attach_tier(&mut self, fails_one_in: u64, drops_one_in: u64) {
        let records = HashMap::new();
        self.tier = Some(FakeTier { records, fails_one_in, drops_one_in, num_loads: 0, num_offers: 0, num_failed: 0 });
        self.tell_of_tier();
    }

    /// Hands the tier of an ended simulation over, as to the next process.
    pub fn adopt_tier(&mut self, other: &mut Self) {
        // Prefixes keep their numbers.
        std::mem::swap(&mut self.prefixes, &mut other.prefixes);
        self.tier = other.tier.take();
        self.tell_of_tier();
    }

    /// Also of records of weights that are gone: their keys can match no request.
    pub(super) fn tell_of_tier(&mut self) {
        let Some(tier) = &self.tier else { return };
        self.scheduler.attach_tier(tier_config(self.generation as u8));
        tier.records.keys().for_each(|id| self.scheduler.tier_has(*id));
    }

    pub(super) fn swap_out(&mut self) {
        let Some(tier) = &mut self.tier else { return };
        let mut blocks = Vec::new();
        self.scheduler.take_swap_outs(&mut blocks);
        for block in blocks {
            let slots = self.shadow[block.block.0 as usize].iter();
            let content: Vec<_> = slots.map(|content| content.expect("an offered block has an unwritten slot")).collect();
            for content in &content {
                assert!(content.committed, "an offered block of a step that is not committed");
                assert_eq!((content.group, content.generation), (block.id.group as usize, self.generation));
            }
            let id = block.id;
            tier.num_offers += 1;
            if tier.drops_one_in > 0 && tier.num_offers.is_multiple_of(tier.drops_one_in) {
                self.scheduler.tier_lost(id);
                continue;
            }
            if let Some((_, kept)) = tier.records.insert(id, (block, content.clone())) {
                assert_eq!(kept, content, "one key for two contents");
            }
            self.scheduler.tier_has(id);
        }
    }

    pub(super) fn swap_in(&mut self, output: &SchedulerOutput) {
        let Some(swap_in) = &output.swap_in else { return };
        let tier = self.tier.as_mut().expect("a swap-in without a tier");
        assert!(!swap_in.blocks.is_empty() && output.rows.iter().all(|row| row.request_id != swap_in.request_id));
        let tokens = self.scheduler.token_ids(swap_in.request_id);
        let mut failed = Vec::new();
        for block in &swap_in.blocks {
            let first = block.index as usize * self.kv.block_size;
            assert_eq!(tokens[first..first + self.kv.block_size], *block.tokens);
            let pool = self.scheduler.pool();
            assert_eq!((pool.ref_cnt(block.block), pool.is_published(block.block)), (1, false));
            let (stored, content) = &tier.records[&block.id];
            assert_eq!((stored.parent, stored.index, &stored.tokens), (block.parent, block.index, &block.tokens));
            tier.num_loads += 1;
            if tier.fails_one_in > 0 && tier.num_loads.is_multiple_of(tier.fails_one_in) {
                // What a load that was given up has left behind.
                self.shadow[block.block.0 as usize].fill(None);
                failed.push(block.id);
                tier.records.remove(&block.id);
                tier.num_failed += 1;
            } else {
                self.shadow[block.block.0 as usize] = content.iter().copied().map(Some).collect();
            }
        }
        assert!(self.scheduler.schedule().rows.is_empty(), "a step while blocks are being fetched");
        self.scheduler.swapped_in(swap_in, &failed);
    }
}

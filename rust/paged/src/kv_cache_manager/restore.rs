//! Blocks whose KV is fetched from a tier rather than computed.

use super::{KvCacheManager, RequestBlocks};
use crate::block_hash::CacheKey;
use crate::ids::BlockId;
use crate::tier::first_fetched;

impl KvCacheManager {
    /// Gives a request that begins with `num_hit_blocks` full blocks of a prefix hit those to fetch up to `num_blocks`, in
    /// place of a partial block behind the hit; `false` and no change if they, and room to compute one more token, are not
    /// free.
    pub(crate) fn allocate_fetched(&mut self, blocks: &mut RequestBlocks, num_hit_blocks: usize, num_blocks: usize) -> bool {
        let num_groups = self.groups.groups.len();
        let first = |group| first_fetched(&self.groups, group, num_hit_blocks, num_blocks, self.block_size);
        let firsts: Vec<usize> = (0..num_groups).map(first).collect();
        let needed: usize = firsts.iter().map(|first| num_blocks - first).sum();
        if needed + num_groups > self.pool.num_free_blocks() {
            return false;
        }
        self.to_free.clear();
        for (group, table) in blocks.tables.iter_mut().enumerate() {
            self.to_free.extend(table.drain(num_hit_blocks..));
            let members = &self.groups.groups[group];
            let first_seen = members.first_visible_block(num_blocks * self.block_size, self.block_size).min(num_blocks);
            let num_dropped = blocks.num_dropped[group];
            let unseen = num_dropped..first_seen.min(num_hit_blocks).max(num_dropped);
            self.to_free.extend_from_slice(&table[unseen.clone()]);
            table[unseen].fill(BlockId::NULL);
            table.resize(firsts[group], BlockId::NULL);
            blocks.num_dropped[group] = first_seen.max(num_dropped);
        }
        self.release();
        for (table, first) in blocks.tables.iter_mut().zip(firsts) {
            self.pool.get_new_blocks(num_blocks - first, table).expect("they are free");
        }
        true
    }

    /// Makes findable what was fetched of the prefix `good`, whole blocks before the first that failed, and takes every block of
    /// the request back: a lookup will find how far it can begin now.
    pub(crate) fn give_up_fetched(&mut self, blocks: &mut RequestBlocks, good: &[u32], key: CacheKey<'_>) {
        self.to_free.clear();
        for table in &mut blocks.tables {
            self.to_free.extend(table.drain(good.len() / self.block_size..).filter(|block| *block != BlockId::NULL));
        }
        self.release();
        if self.publishes(blocks) {
            self.cache_full_blocks(blocks, good, key);
        }
        self.free(blocks);
    }
}

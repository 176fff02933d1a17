//! How much of the blocks that requests hold has KV in it.

use super::{KvCacheManager, RequestBlocks};

impl KvCacheManager {
    /// Slots of a request's blocks that have no KV yet, over all groups. A partial block that others hold too counts as
    /// written: they may have gone further in it.
    pub(crate) fn num_empty_slots(&self, blocks: &RequestBlocks, num_computed_tokens: usize) -> usize {
        let first_empty = num_computed_tokens.div_ceil(self.block_size);
        let whole = blocks.num_blocks().saturating_sub(first_empty) * self.block_size * blocks.tables.len();
        let Some(index) = self.partial_block(blocks, num_computed_tokens) else { return whole };
        let own = blocks.tables.iter().filter(|table| self.pool.ref_cnt(table[index]) == 1).count();
        whole + own * (first_empty * self.block_size - num_computed_tokens)
    }
}

//! Blocks that several requests hold, and the copies that keep one's writes from the others.

use super::{KvCacheManager, RequestBlocks};
use crate::error::PoolError;
use crate::ids::BlockId;

impl KvCacheManager {
    /// Gives the empty `child` the blocks of the first `num_tokens` tokens of `parent`, all of them computed; the last
    /// one may be shared in part. `false`, and no blocks, if some group of `parent` has already given back what a
    /// query behind those tokens sees.
    pub fn share_blocks(&mut self, parent: &RequestBlocks, child: &mut RequestBlocks, num_tokens: usize) -> bool {
        debug_assert!(child.num_blocks() == 0 && child.tail.is_none());
        let num_full = num_tokens / self.block_size;
        let first_kept = |group: usize| {
            self.groups.groups[group].first_visible_block(num_full * self.block_size, self.block_size).min(num_full)
        };
        if (0..self.groups.groups.len()).any(|group| parent.num_dropped[group] > first_kept(group)) {
            return false;
        }
        for (group, table) in child.tables.iter_mut().enumerate() {
            let first = first_kept(group);
            child.num_dropped[group] = first;
            table.resize(first, BlockId::NULL);
            for &block in &parent.tables[group][first..num_tokens.div_ceil(self.block_size)] {
                self.pool.touch(block);
                table.push(block);
            }
        }
        child.generation = parent.generation;
        child.num_published = parent.num_published.min(num_full);
        if parent.generation == self.generation
            && child.num_published > 0
            && let Some(tail) = parent.tail
        {
            let node = self.pool.index().ancestor(tail, parent.num_published - child.num_published);
            self.pool.index_mut().pin(node);
            child.tail = Some(node);
        }
        true
    }

    /// Blocks without which the KV of position `num_computed_tokens` cannot be written: one for each group whose block
    /// of that position is another's as well.
    pub(crate) fn num_copies_to_write(&self, blocks: &RequestBlocks, num_computed_tokens: usize) -> usize {
        let Some(index) = self.partial_block(blocks, num_computed_tokens) else { return 0 };
        blocks.tables.iter().filter(|table| self.num_holders(table[index]) > 1).count()
    }

    /// Makes the block of position `num_computed_tokens` the request's own in every group, or changes nothing. One that
    /// others hold is replaced by a new block, and `(old, new)` added to `copies`. So is one that the request alone holds
    /// but that can be found by its content, unless fewer than `spare` blocks would stay free: then it is written in
    /// place, and found no more.
    pub(super) fn copy_on_write(
        &mut self,
        blocks: &mut RequestBlocks,
        num_computed_tokens: usize,
        spare: usize,
        copies: &mut Vec<(BlockId, BlockId)>,
    ) -> Result<(), PoolError> {
        let Some(index) = self.partial_block(blocks, num_computed_tokens) else { return Ok(()) };
        let is_cached = |block| self.pool.is_published(block) && self.num_holders(block) == 1;
        let cached = blocks.tables.iter().filter(|table| is_cached(table[index])).count();
        let (needed, free) = (self.num_copies_to_write(blocks, num_computed_tokens), self.pool.num_free_blocks());
        if needed > free {
            return Err(PoolError::OutOfBlocks { needed, free });
        }
        let keep_cached = free >= needed + cached + spare;
        for table in &mut blocks.tables {
            let block = table[index];
            let is_shared = self.num_holders(block) > 1;
            if is_shared || (keep_cached && self.pool.is_published(block)) {
                table[index] = self.pool.get_new_block()?;
                copies.push((block, table[index]));
                // Held on until the step is put together, so that no copy of the step has it as its destination.
                self.copy_sources.push(block);
            } else {
                self.pool.forget(block);
            }
        }
        Ok(())
    }

    /// Blocks that are held for the copies of the step being put together.
    pub(crate) fn num_copy_sources(&self) -> usize {
        self.copy_sources.len()
    }

    /// The step is put together: the blocks it copies from are let go.
    pub(crate) fn release_copy_sources(&mut self) {
        for index in 0..self.copy_sources.len() {
            let source = self.copy_sources[index];
            self.pool.free_blocks(&[source]).expect("a copy's source is held");
        }
        self.copy_sources.clear();
    }

    /// The copies were not made: nobody holds their destinations any more, and nobody may find them.
    pub(crate) fn forget_copies(&mut self, copies: &[(BlockId, BlockId)]) {
        for (_, destination) in copies {
            self.pool.forget_free(*destination);
        }
    }

    /// The block that is written next, if some of its tokens are computed already.
    pub(super) fn partial_block(&self, blocks: &RequestBlocks, num_computed_tokens: usize) -> Option<usize> {
        let index = num_computed_tokens / self.block_size;
        (!num_computed_tokens.is_multiple_of(self.block_size) && index < blocks.num_blocks()).then_some(index)
    }

    /// Tables that hold a block. Those that have copied it in this step do not any more.
    fn num_holders(&self, block: BlockId) -> u32 {
        let ref_cnt = self.pool.ref_cnt(block);
        if ref_cnt < 2 {
            return ref_cnt;
        }
        ref_cnt - self.copy_sources.iter().filter(|source| **source == block).count() as u32
    }
}

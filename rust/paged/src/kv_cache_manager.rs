//! Requests to blocks: prefix lookup, allocation, commit, release. The scheduler's only view of the pool.

mod sharing;
mod usage;

use crate::block_hash::BlockHasher;
use crate::block_pool::{BlockId, BlockPool};
use crate::error::{IntegrityError, PoolError};
use crate::kv_groups::KvGroups;
use crate::prefix_index::NodeId;

/// The blocks of one request: a block table for each KV group, all of one length.
///
/// Entry `i` holds tokens `[i * block_size, (i + 1) * block_size)`; entries that left a group's window are
/// [`BlockId::NULL`].
#[derive(Debug)]
pub struct RequestBlocks {
    tables: Vec<Vec<BlockId>>,
    /// Leading null entries of each group's table.
    num_dropped: Vec<usize>,
    /// Leading blocks that are committed and offered to the prefix cache.
    num_published: usize,
    /// The prefix those blocks end, pinned.
    tail: Option<NodeId>,
    /// Generation of the prefix cache under which the KV was begun.
    generation: u64,
}

impl RequestBlocks {
    /// No blocks yet.
    pub fn new(num_groups: usize) -> Self {
        Self {
            tables: vec![Vec::new(); num_groups],
            num_dropped: vec![0; num_groups],
            num_published: 0,
            tail: None,
            generation: 0,
        }
    }

    /// The block table of a group.
    pub fn table(&self, group: usize) -> &[BlockId] {
        self.tables.get(group).map_or(&[], Vec::as_slice)
    }

    /// Logical blocks, null entries included.
    pub fn num_blocks(&self) -> usize {
        self.tables.first().map_or(0, Vec::len)
    }

    /// Physical blocks held, over all groups.
    pub fn num_held_blocks(&self) -> usize {
        self.tables.iter().zip(&self.num_dropped).map(|(table, dropped)| table.len() - dropped).sum()
    }

    /// Leading blocks whose KV is committed and was offered to the prefix cache.
    pub fn num_published_blocks(&self) -> usize {
        self.num_published
    }

    pub(crate) fn is_pinning(&self, generation: u64) -> bool {
        self.tail.is_some() && self.generation == generation
    }
}

/// What a prefix lookup found; valid until the pool changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrefixHit {
    /// Tokens whose KV is already there: a multiple of the block size, less than the request's tokens.
    pub num_tokens: usize,
    /// Blocks the request would hold by it.
    pub num_blocks: usize,
    /// Of those, how many are free now and would leave the free list.
    pub num_free_blocks: usize,
}

/// Gives requests their blocks.
#[derive(Debug)]
pub struct KvCacheManager {
    pool: BlockPool,
    groups: KvGroups,
    block_size: usize,
    enable_prefix_caching: bool,
    generation: u64,
    /// The prefixes walked by the last lookup, one a block.
    walked: Vec<NodeId>,
    /// For each group, how many blocks up to the one being looked at are there without a gap.
    runs: Vec<usize>,
    to_free: Vec<BlockId>,
    /// Sources of the copies of the step being put together, each held once for each copy.
    copy_sources: Vec<BlockId>,
}

impl KvCacheManager {
    /// `num_blocks` usable blocks of `block_size` tokens, shared by the groups.
    pub fn new(num_blocks: u32, block_size: usize, groups: KvGroups, hasher: BlockHasher, prefix_caching: bool) -> Self {
        let num_groups = groups.groups.len();
        Self {
            pool: BlockPool::new(num_blocks, num_groups, hasher),
            groups,
            block_size,
            enable_prefix_caching: prefix_caching,
            generation: 0,
            walked: Vec::new(),
            runs: vec![0; num_groups],
            to_free: Vec::new(),
            copy_sources: Vec::new(),
        }
    }

    /// The pool, to be read.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// The groups.
    pub fn groups(&self) -> &KvGroups {
        &self.groups
    }

    /// Tokens a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Whether prefixes are looked up and published.
    pub fn prefix_caching(&self) -> bool {
        self.enable_prefix_caching
    }

    /// The longest prefix of `tokens` that every group still has, one token at least being left to compute.
    /// Changes nothing but what [`Self::take_hit`] reads.
    pub fn get_computed_blocks(&mut self, tokens: &[u32], identity: &[u8]) -> PrefixHit {
        self.walked.clear();
        if !self.enable_prefix_caching {
            return PrefixHit::default();
        }
        let Some(mut node) = self.pool.index().find_root(identity) else { return PrefixHit::default() };
        let mut hit_blocks = 0;
        self.runs.fill(0);
        let max_blocks = tokens.len().saturating_sub(1) / self.block_size;
        for block_tokens in tokens.chunks_exact(self.block_size).take(max_blocks) {
            let Some(child) = self.pool.index().find_child(node, block_tokens) else { break };
            node = child;
            self.walked.push(node);
            let mut every_group_accepts = true;
            let mut hopeless = false;
            for (group, run) in self.runs.iter_mut().enumerate() {
                *run = if self.pool.index().block(node, group).is_some() { *run + 1 } else { 0 };
                let needed = self.walked.len() - first_kept_by_hit(&self.groups, group, self.walked.len(), self.block_size);
                every_group_accepts &= *run >= needed;
                hopeless |= *run == 0 && self.groups.groups[group].window.is_none();
            }
            if hopeless {
                break;
            }
            if every_group_accepts {
                hit_blocks = self.walked.len();
            }
        }
        self.walked.truncate(hit_blocks);
        let mut hit = PrefixHit { num_tokens: hit_blocks * self.block_size, ..PrefixHit::default() };
        for group in 0..self.runs.len() {
            for &node in &self.walked[first_kept_by_hit(&self.groups, group, hit_blocks, self.block_size)..] {
                hit.num_blocks += 1;
                let block = self.pool.index().block(node, group);
                hit.num_free_blocks += usize::from(block.is_some_and(|block| self.pool.is_free(block)));
            }
        }
        hit
    }

    /// Gives an empty request the blocks of `hit`, which the lookup just before found; with the default hit, none.
    pub fn take_hit(&mut self, blocks: &mut RequestBlocks, hit: PrefixHit) {
        debug_assert!(blocks.num_blocks() == 0 && blocks.tail.is_none());
        self.walked.truncate(hit.num_tokens / self.block_size);
        blocks.generation = self.generation;
        for (group, table) in blocks.tables.iter_mut().enumerate() {
            let first = first_kept_by_hit(&self.groups, group, self.walked.len(), self.block_size);
            blocks.num_dropped[group] = first;
            table.resize(first, BlockId::NULL);
            for &node in &self.walked[first..] {
                let block = self.pool.index().block(node, group).unwrap_or(BlockId::NULL);
                self.pool.touch(block);
                table.push(block);
            }
        }
        blocks.num_published = self.walked.len();
        blocks.tail = self.walked.last().copied();
        if let Some(node) = blocks.tail {
            self.pool.index_mut().pin(node);
        }
        self.walked.clear();
    }

    /// How many of the `wanted` tokens after `num_computed_tokens` the request can be given slots for now.
    pub fn num_tokens_that_fit(&self, blocks: &RequestBlocks, num_computed_tokens: usize, wanted: usize) -> usize {
        let copies = self.num_copies_to_write(blocks, num_computed_tokens);
        let Some(free) = self.pool.num_free_blocks().checked_sub(copies) else { return 0 };
        let new_blocks = free / self.groups.groups.len();
        let end = (blocks.num_blocks().saturating_add(new_blocks)).saturating_mul(self.block_size);
        wanted.min(end.saturating_sub(num_computed_tokens))
    }

    /// Extends every group's table to hold `num_tokens` tokens of which `num_computed_tokens` are computed, and makes
    /// the block of the first position to be written the request's own, or changes nothing. What must be copied for it
    /// is added to `copies`, as `(source, destination)`.
    pub fn allocate_slots(
        &mut self,
        blocks: &mut RequestBlocks,
        num_computed_tokens: usize,
        num_tokens: usize,
        copies: &mut Vec<(BlockId, BlockId)>,
    ) -> Result<(), PoolError> {
        let count = num_tokens.div_ceil(self.block_size).saturating_sub(blocks.num_blocks());
        let extension = count * self.groups.groups.len();
        let needed = extension + self.num_copies_to_write(blocks, num_computed_tokens);
        let free = self.pool.num_free_blocks();
        if needed > free {
            return Err(PoolError::OutOfBlocks { needed, free });
        }
        self.copy_on_write(blocks, num_computed_tokens, extension, copies)?;
        for table in &mut blocks.tables {
            self.pool.get_new_blocks(count, table)?;
        }
        Ok(())
    }

    /// Takes note that the KV of the first `num_computed_tokens` of `tokens` is written: publishes the blocks that
    /// are full by it and, if `drop_unseen`, gives back those that no later query of their group can see.
    pub fn commit(
        &mut self,
        blocks: &mut RequestBlocks,
        tokens: &[u32],
        identity: &[u8],
        num_computed_tokens: usize,
        drop_unseen: bool,
    ) {
        if self.enable_prefix_caching && blocks.generation == self.generation {
            self.cache_full_blocks(blocks, &tokens[..num_computed_tokens], identity);
        }
        if drop_unseen {
            self.drop_unseen_blocks(blocks, num_computed_tokens);
        }
    }

    /// Where another request has published the same block first, its block takes the place of ours: requests that
    /// began one prefix together come to share it, and a prefix is held for as long as anything that extends it.
    fn cache_full_blocks(&mut self, blocks: &mut RequestBlocks, computed: &[u32], identity: &[u8]) {
        self.to_free.clear();
        for block_tokens in computed.chunks_exact(self.block_size).skip(blocks.num_published) {
            let parent = match blocks.tail {
                Some(tail) => tail,
                None => self.pool.index_mut().pin_root(identity),
            };
            let node = self.pool.index_mut().pin_child(parent, block_tokens);
            for (group, table) in blocks.tables.iter_mut().enumerate() {
                let block = &mut table[blocks.num_published];
                if *block == BlockId::NULL {
                    continue;
                }
                if let Some(published) = self.pool.index().block(node, group) {
                    self.pool.touch(published);
                    self.to_free.push(std::mem::replace(block, published));
                } else {
                    self.pool.publish(*block, node, group);
                }
            }
            blocks.tail = Some(node);
            blocks.num_published += 1;
        }
        self.release();
    }

    /// Up to the last block boundary, not the last token: the boundary is where the next turn of a conversation can
    /// hit, and its window must still be there.
    fn drop_unseen_blocks(&mut self, blocks: &mut RequestBlocks, num_computed_tokens: usize) {
        let boundary = num_computed_tokens / self.block_size * self.block_size;
        self.to_free.clear();
        for (group, table) in blocks.tables.iter_mut().enumerate() {
            let first = self.groups.groups[group].first_visible_block(boundary, self.block_size).min(table.len());
            let dropped = &mut blocks.num_dropped[group];
            if *dropped < first {
                self.to_free.extend_from_slice(&table[*dropped..first]);
                table[*dropped..first].fill(BlockId::NULL);
                *dropped = first;
            }
        }
        self.release();
    }

    /// Takes every block back; the request may start again from nothing.
    ///
    /// Order of reuse: full groups first and from the tail, so that a prefix outlives what extends it; then the
    /// window groups, whose last window is just what a next turn needs.
    pub fn free(&mut self, blocks: &mut RequestBlocks) {
        self.to_free.clear();
        for windowed in [false, true] {
            for index in (0..blocks.num_blocks()).rev() {
                for (group, table) in blocks.tables.iter().enumerate() {
                    let is_windowed = self.groups.groups[group].window.is_some();
                    if is_windowed == windowed && table[index] != BlockId::NULL {
                        self.to_free.push(table[index]);
                    }
                }
            }
        }
        self.release();
        if let Some(tail) = blocks.tail.take()
            && blocks.generation == self.generation
        {
            self.pool.index_mut().unpin(tail);
        }
        blocks.tables.iter_mut().for_each(Vec::clear);
        blocks.num_dropped.fill(0);
        blocks.num_published = 0;
        blocks.generation = self.generation;
    }

    fn release(&mut self) {
        self.pool.free_blocks(&self.to_free).expect("the entries of block tables are held, each once");
        self.to_free.clear();
    }

    /// Forgets every cached prefix, as after a change of weights. Requests that are running publish nothing more
    /// until they are computed anew.
    pub fn reset_prefix_cache(&mut self) {
        self.pool.clear_index();
        self.generation += 1;
    }

    /// Checks the pool against the requests that hold its blocks.
    pub fn check_integrity<'a>(&self, requests: impl Iterator<Item = &'a RequestBlocks>) -> Result<(), IntegrityError> {
        let mut ref_cnt = vec![0u32; self.pool.num_blocks() + 1];
        let mut num_pins = 0;
        for blocks in requests {
            num_pins += usize::from(blocks.is_pinning(self.generation));
            for (table, &dropped) in blocks.tables.iter().zip(&blocks.num_dropped) {
                if table.len() != blocks.num_blocks() {
                    return Err(IntegrityError("the block tables of a request differ in length".into()));
                }
                for (index, block) in table.iter().enumerate() {
                    if (index < dropped) != (*block == BlockId::NULL) {
                        return Err(IntegrityError(format!("entry {index} of a table with {dropped} dropped is {block:?}")));
                    }
                    ref_cnt[block.0 as usize] += u32::from(*block != BlockId::NULL);
                }
            }
        }
        for (id, count) in ref_cnt.iter().enumerate() {
            let block = BlockId(id as u32);
            if self.pool.ref_cnt(block) != *count {
                let held = self.pool.ref_cnt(block);
                return Err(IntegrityError(format!("block {id} counts {held} holders and stands in {count} tables")));
            }
        }
        self.pool.check_integrity(num_pins)
    }
}

/// First block that a hit of `num_blocks` blocks must have in a group.
fn first_kept_by_hit(groups: &KvGroups, group: usize, num_blocks: usize, block_size: usize) -> usize {
    groups.groups[group].first_visible_block(num_blocks * block_size, block_size).min(num_blocks)
}

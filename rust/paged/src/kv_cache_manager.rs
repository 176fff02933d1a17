//! Requests to blocks: prefix lookup, allocation, commit, release. The scheduler's only view of the pool.

mod lookup;
mod publish;
mod request_blocks;
mod restore;
mod sharing;
mod states;
mod usage;

pub use lookup::{MissReason, PrefixHit};
pub use request_blocks::RequestBlocks;

use crate::block_hash::{BlockHasher, CacheKey};
use crate::block_pool::{BlockPool, Reuse};
use crate::error::{IntegrityError, PoolError};
use crate::ids::BlockId;
use crate::kv_groups::KvGroups;
use crate::prefix_index::{NodeId, PrefixIndex};

/// Gives requests their blocks.
#[derive(Debug, Clone)]
pub struct KvCacheManager {
    pool: BlockPool,
    groups: KvGroups,
    block_size: usize,
    enable_prefix_caching: bool,
    generation: u64,
    /// Blocks that no query sees are kept: contexts are reserved in full.
    keep_unseen: bool,
    /// Requests have states beside their blocks: a hit ends where there is a snapshot of them.
    has_states: bool,
    /// The prefixes that the last lookup found, one a full block.
    walked: Vec<NodeId>,
    /// The one behind them that is used in part.
    walked_tail: Option<NodeId>,
    /// For each group, how many blocks up to the one being looked at are there without a gap.
    runs: Vec<usize>,
    to_free: Vec<BlockId>,
    to_free_early: Vec<BlockId>,
    /// Sources of the copies of the step being put together, each held once for each copy.
    copy_sources: Vec<BlockId>,
}

impl KvCacheManager {
    /// `num_blocks` usable blocks of `block_size` tokens, shared by the groups.
    pub fn new(num_blocks: u32, block_size: usize, groups: KvGroups, hasher: BlockHasher, prefix_caching: bool) -> Self {
        let num_groups = groups.groups.len();
        let is_full = groups.groups.iter().map(|group| group.retention.window().is_none()).collect();
        Self {
            pool: BlockPool::new(num_blocks, block_size, is_full, hasher),
            groups,
            block_size,
            enable_prefix_caching: prefix_caching,
            generation: 0,
            keep_unseen: false,
            has_states: false,
            walked: Vec::new(),
            walked_tail: None,
            runs: vec![0; num_groups],
            to_free: Vec::new(),
            to_free_early: Vec::new(),
            copy_sources: Vec::new(),
        }
    }

    /// Leaves blocks that left a window in their tables: for contexts that are reserved in full.
    pub(crate) fn keep_unseen_blocks(&mut self) {
        self.keep_unseen = true;
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
    /// are full by it, and gives back those that no later query of their group can see, nor one that computes the last
    /// token again.
    pub fn commit(&mut self, blocks: &mut RequestBlocks, tokens: &[u32], key: CacheKey<'_>, num_computed_tokens: usize) {
        if self.enable_prefix_caching && blocks.generation == self.generation {
            self.cache_full_blocks(blocks, &tokens[..num_computed_tokens], key);
        }
        self.let_go_of_snapshot(blocks);
        self.drop_unseen_blocks(blocks, num_computed_tokens.saturating_sub(1));
    }

    /// Gives back the blocks of windows that no query from position `num_tokens` on sees; more exactly, from the last
    /// block boundary on, where the next turn of a conversation can hit.
    ///
    /// They are evicted before others: it is windows at the end of a prompt or of a hit that someone may want.
    pub(crate) fn drop_unseen_blocks(&mut self, blocks: &mut RequestBlocks, num_tokens: usize) {
        if self.keep_unseen {
            return;
        }
        let boundary = num_tokens / self.block_size * self.block_size;
        let prompt_end = blocks.num_prompt_tokens.saturating_sub(1) / self.block_size;
        let mut to_free_early = std::mem::take(&mut self.to_free_early);
        for (group, table) in blocks.tables.iter_mut().enumerate() {
            let members = &self.groups.groups[group];
            let first = members.first_visible_block(boundary, self.block_size).min(table.len());
            let dropped = &mut blocks.num_dropped[group];
            if *dropped >= first {
                continue;
            }
            let end_of_prompt = members.first_visible_block(prompt_end * self.block_size, self.block_size)..=prompt_end;
            for (index, block) in table.iter_mut().enumerate().take(first).skip(*dropped) {
                let is_wanted = end_of_prompt.contains(&index) || self.pool.was_shared(*block);
                (if is_wanted { &mut self.to_free } else { &mut to_free_early }).push(*block);
                *block = BlockId::NULL;
            }
            *dropped = first;
        }
        self.pool.free_blocks_to(&to_free_early, Reuse::Early).expect("the entries of block tables are held, each once");
        to_free_early.clear();
        self.to_free_early = to_free_early;
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
                    let is_windowed = self.groups.groups[group].retention.window().is_some();
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
        self.let_go_of_snapshot(blocks);
        blocks.tables.iter_mut().for_each(Vec::clear);
        blocks.num_dropped.fill(0);
        blocks.num_published = 0;
        blocks.generation = self.generation;
    }

    /// Gives back the blocks behind the first `num_tokens` tokens: those of drafts that were not accepted. Contexts that are
    /// reserved in full stay as they are.
    pub(crate) fn truncate(&mut self, blocks: &mut RequestBlocks, num_tokens: usize) {
        let num_blocks = num_tokens.div_ceil(self.block_size);
        if self.keep_unseen || num_blocks >= blocks.num_blocks() {
            return;
        }
        self.to_free.clear();
        for table in &mut blocks.tables {
            self.to_free.extend(table.drain(num_blocks..));
        }
        self.release();
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

    /// The pool's index of what can be found, to take events from.
    pub(crate) fn index_mut(&mut self) -> &mut PrefixIndex {
        self.pool.index_mut()
    }

    /// The pool, whose snapshots may be forgotten.
    pub(crate) fn pool_mut(&mut self) -> &mut BlockPool {
        &mut self.pool
    }

    /// Checks the pool against the requests that hold its blocks.
    pub fn check_integrity<'a>(&self, requests: impl Iterator<Item = &'a RequestBlocks>) -> Result<(), IntegrityError> {
        let mut ref_cnt = vec![0u32; self.pool.num_blocks() + 1];
        let mut num_pins = 0;
        let mut snapshots = Vec::new();
        for blocks in requests {
            snapshots.extend(blocks.snapshot);
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
        self.pool.snapshots().check_integrity(&snapshots, |node| self.is_whole(node)).map_err(IntegrityError)?;
        self.pool.check_integrity(num_pins)
    }
}

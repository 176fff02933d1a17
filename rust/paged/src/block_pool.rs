//! The physical blocks: who holds them, which are free, and in what order free ones are reused.

use crate::block_hash::{BlockHash, BlockHasher};
use crate::error::{IntegrityError, PoolError};
use crate::ids::BlockId;
use crate::prefix_index::{NodeId, PrefixIndex};
use crate::state_snapshots::StateSnapshots;

/// Links of a block that is not in the free list point here.
const UNLINKED: u32 = u32::MAX;

#[derive(Debug, Clone)]
struct Block {
    ref_cnt: u32,
    prev: u32,
    next: u32,
    /// What it is found by, or [`NodeId::NONE`].
    node: NodeId,
    group: u16,
    /// Someone held it whom it was not written for.
    was_shared: bool,
    /// Set only inside `free_blocks`, to see a block that is named twice.
    named: bool,
}

/// The free lists, in the order in which they are used up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reuse {
    /// Blocks that cannot be found.
    Uncached,
    /// Cached blocks that are of less use than the others.
    Early,
    /// Cached blocks, the least recently used first.
    Late,
}

const NUM_LISTS: usize = 3;

/// A flat pool of blocks with reference counts, free lists in eviction order, and the index of cached prefixes.
///
/// `num_blocks` are usable, with ids from 1; id 0 is the null block on top of them. Every operation on a block is
/// O(1). A free block may still be *cached*: findable by its content until it is handed out again.
#[derive(Debug, Clone)]
pub struct BlockPool {
    /// By id; behind them, for each free list, one whose links are its ends: `next` the head, `prev` the tail.
    blocks: Vec<Block>,
    num_free: usize,
    num_cached: usize,
    num_shared: usize,
    num_saved: usize,
    /// For each KV group, whether its layers see all tokens.
    is_full: Vec<bool>,
    index: PrefixIndex,
    snapshots: StateSnapshots,
}

impl BlockPool {
    /// A pool of `num_blocks` usable blocks (at most `u32::MAX - 1`) of `block_size` tokens, all free. For each KV group
    /// that shares them, `is_full` tells whether its layers see all tokens.
    pub fn new(num_blocks: u32, block_size: usize, is_full: Vec<bool>, hasher: BlockHasher) -> Self {
        let vacant =
            Block { ref_cnt: 0, prev: UNLINKED, next: UNLINKED, node: NodeId::NONE, group: 0, was_shared: false, named: false };
        let num_ids = num_blocks as usize + 1;
        let mut blocks = vec![vacant; num_ids + NUM_LISTS];
        for (end, block) in blocks.iter_mut().enumerate().skip(num_ids) {
            (block.prev, block.next) = (end as u32, end as u32);
        }
        let index = PrefixIndex::new(hasher, is_full.len(), block_size, num_blocks as usize);
        let snapshots = StateSnapshots::default();
        let mut pool = Self { blocks, num_free: 0, num_cached: 0, num_shared: 0, num_saved: 0, is_full, index, snapshots };
        for id in 1..=num_blocks {
            pool.link_last(id, Reuse::Uncached);
        }
        pool
    }

    /// Where the ends of a free list are kept.
    fn ends(&self, list: Reuse) -> u32 {
        (self.blocks.len() - NUM_LISTS + list as usize) as u32
    }

    /// The free block to be used next.
    fn first_free(&self) -> Option<u32> {
        let heads = [Reuse::Uncached, Reuse::Early, Reuse::Late]
            .map(|list| (self.ends(list), self.blocks[self.ends(list) as usize].next));
        heads.into_iter().find(|(ends, head)| ends != head).map(|(_, head)| head)
    }

    /// Usable blocks; the null block is not one.
    pub fn num_blocks(&self) -> usize {
        self.blocks.len() - 1 - NUM_LISTS
    }

    /// Blocks that can be handed out, cached ones included.
    pub fn num_free_blocks(&self) -> usize {
        self.num_free
    }

    /// Free blocks that can still be found by their content.
    pub fn num_cached_blocks(&self) -> usize {
        self.num_cached
    }

    /// Blocks that someone holds.
    pub fn num_used_blocks(&self) -> usize {
        self.num_blocks() - self.num_free
    }

    /// Blocks that more than one holds.
    pub fn num_shared_blocks(&self) -> usize {
        self.num_shared
    }

    /// Blocks that would be needed on top of those used if nothing were shared.
    pub fn num_saved_blocks(&self) -> usize {
        self.num_saved
    }

    /// Whether a block can be found by its content.
    pub fn is_cached(&self, block: BlockId) -> bool {
        self.blocks.get(block.0 as usize).is_some_and(|block| block.node != NodeId::NONE)
    }

    /// How many hold a block.
    pub fn ref_cnt(&self, block: BlockId) -> u32 {
        self.blocks.get(block.0 as usize).map_or(0, |block| block.ref_cnt)
    }

    /// Appends `count` blocks to `out`, each held once, or changes nothing. The blocks that come first are those
    /// that were never cached, then the least recently used; what they cached is forgotten now.
    pub fn get_new_blocks(&mut self, count: usize, out: &mut Vec<BlockId>) -> Result<(), PoolError> {
        if count > self.num_free {
            return Err(PoolError::OutOfBlocks { needed: count, free: self.num_free });
        }
        for _ in 0..count {
            out.push(self.get_new_block()?);
        }
        Ok(())
    }

    /// As [`Self::get_new_blocks`], one block.
    pub(crate) fn get_new_block(&mut self) -> Result<BlockId, PoolError> {
        let id = self.first_free().ok_or(PoolError::OutOfBlocks { needed: 1, free: 0 })?;
        self.unlink(id);
        let node = self.blocks[id as usize].node;
        if node != NodeId::NONE {
            self.num_cached -= 1;
            self.index.note_eviction(node);
            if self.is_full[self.blocks[id as usize].group as usize] {
                self.give_up_windows(node);
            }
            self.forget(BlockId(id));
        }
        let entry = &mut self.blocks[id as usize];
        entry.ref_cnt = 1;
        entry.was_shared = false;
        Ok(BlockId(id))
    }

    /// The windows that end with a block are of no use once the full groups have lost it.
    fn give_up_windows(&mut self, node: NodeId) {
        for group in 0..self.is_full.len() {
            if let Some(block) = self.index.block(node, group)
                && !self.is_full[group]
                && self.is_free(block)
            {
                self.unlink(block.0);
                self.link_first(block.0, Reuse::Early);
            }
        }
    }

    /// Holds blocks once more, taking free ones out of the free list: what a prefix hit does.
    pub(crate) fn touch(&mut self, block: BlockId) {
        debug_assert_ne!(block, BlockId::NULL);
        if self.blocks[block.0 as usize].ref_cnt == 0 {
            self.unlink(block.0);
            self.num_cached -= usize::from(self.is_published(block));
        }
        let entry = &mut self.blocks[block.0 as usize];
        entry.ref_cnt += 1;
        entry.was_shared = true;
        self.num_shared += usize::from(entry.ref_cnt == 2);
        self.num_saved += usize::from(entry.ref_cnt > 1);
    }

    /// Lets go of blocks, the first to be reused first. One that nobody holds any more becomes free: at the end of
    /// the eviction order if it is cached, else at its start.
    ///
    /// A list that names a block twice, a free block, the null block or an id outside the pool is refused whole.
    pub fn free_blocks(&mut self, blocks: &[BlockId]) -> Result<(), PoolError> {
        self.free_blocks_to(blocks, Reuse::Late)
    }

    /// As [`Self::free_blocks`], the cached ones to the end of a list.
    pub(crate) fn free_blocks_to(&mut self, blocks: &[BlockId], reuse: Reuse) -> Result<(), PoolError> {
        let num_blocks = self.num_blocks();
        let ids = self.blocks.len() - NUM_LISTS;
        let mut problem = None;
        let mut num_named = 0;
        for &block in blocks {
            problem = match self.blocks[..ids].get_mut(block.0 as usize) {
                _ if block == BlockId::NULL => Some(PoolError::NullBlock),
                None => Some(PoolError::UnknownBlock { block, num_blocks }),
                Some(entry) if entry.named => Some(PoolError::DuplicateBlock { block }),
                Some(entry) if entry.ref_cnt == 0 => Some(PoolError::NotAllocated { block }),
                Some(entry) => {
                    entry.named = true;
                    None
                }
            };
            if problem.is_some() {
                break;
            }
            num_named += 1;
        }
        for block in &blocks[..num_named] {
            self.blocks[block.0 as usize].named = false;
        }
        if let Some(problem) = problem {
            return Err(problem);
        }
        for block in blocks {
            let entry = &mut self.blocks[block.0 as usize];
            self.num_shared -= usize::from(entry.ref_cnt == 2);
            self.num_saved -= usize::from(entry.ref_cnt > 1);
            entry.ref_cnt -= 1;
            if entry.ref_cnt == 0 {
                if entry.node == NodeId::NONE {
                    self.link_first(block.0, Reuse::Uncached);
                } else {
                    self.num_cached += 1;
                    self.link_last(block.0, reuse);
                }
            }
        }
        Ok(())
    }

    /// Makes a held block findable as the last block of `node`'s prefix, which has none yet in this group.
    pub(crate) fn publish(&mut self, block: BlockId, node: NodeId, group: usize) {
        let entry = &mut self.blocks[block.0 as usize];
        debug_assert!(block != BlockId::NULL && entry.ref_cnt > 0 && entry.node == NodeId::NONE);
        entry.node = node;
        entry.group = group as u16;
        self.index.attach(node, group, block);
    }

    /// Whether a block was ever held by someone whom it was not written for.
    pub(crate) fn was_shared(&self, block: BlockId) -> bool {
        self.blocks[block.0 as usize].was_shared
    }

    pub(crate) fn is_free(&self, block: BlockId) -> bool {
        self.blocks[block.0 as usize].ref_cnt == 0
    }

    pub(crate) fn index(&self) -> &PrefixIndex {
        &self.index
    }

    pub(crate) fn index_mut(&mut self) -> &mut PrefixIndex {
        &mut self.index
    }

    pub(crate) fn snapshots(&self) -> &StateSnapshots {
        &self.snapshots
    }

    pub(crate) fn snapshots_mut(&mut self) -> &mut StateSnapshots {
        &mut self.snapshots
    }

    /// Makes every block unfindable. Pins on nodes are void afterwards.
    pub(crate) fn clear_index(&mut self) {
        for id in 1..=self.num_blocks() as u32 {
            let was_cached = std::mem::replace(&mut self.blocks[id as usize].node, NodeId::NONE) != NodeId::NONE;
            if was_cached && self.is_free(BlockId(id)) {
                self.unlink(id);
                self.link_last(id, Reuse::Uncached);
            }
        }
        self.num_cached = 0;
        self.snapshots.clear();
        self.index.clear();
    }

    /// Makes a block that is in no free list unfindable, if it is not so already.
    pub(crate) fn forget(&mut self, block: BlockId) {
        let entry = &mut self.blocks[block.0 as usize];
        let group = entry.group as usize;
        let node = std::mem::replace(&mut entry.node, NodeId::NONE);
        if node != NodeId::NONE {
            self.snapshots.forget(node);
            self.index.detach(node, group);
        }
    }

    /// Makes a free block unfindable.
    pub(crate) fn forget_free(&mut self, block: BlockId) {
        debug_assert!(self.is_free(block));
        if self.is_published(block) {
            self.unlink(block.0);
            self.num_cached -= 1;
            self.forget(block);
            self.link_first(block.0, Reuse::Uncached);
        }
    }

    fn unlink(&mut self, id: u32) {
        let Block { prev, next, .. } = self.blocks[id as usize];
        self.blocks[prev as usize].next = next;
        self.blocks[next as usize].prev = prev;
        let entry = &mut self.blocks[id as usize];
        (entry.prev, entry.next) = (UNLINKED, UNLINKED);
        self.num_free -= 1;
    }

    fn link_first(&mut self, id: u32, list: Reuse) {
        let ends = self.ends(list);
        self.link_between(id, ends, self.blocks[ends as usize].next);
    }

    fn link_last(&mut self, id: u32, list: Reuse) {
        let ends = self.ends(list);
        self.link_between(id, self.blocks[ends as usize].prev, ends);
    }

    fn link_between(&mut self, id: u32, prev: u32, next: u32) {
        (self.blocks[id as usize].prev, self.blocks[id as usize].next) = (prev, next);
        self.blocks[prev as usize].next = id;
        self.blocks[next as usize].prev = id;
        self.num_free += 1;
    }

    /// Free blocks in the order in which they will be handed out.
    pub fn free_block_ids(&self) -> impl Iterator<Item = BlockId> + '_ {
        [Reuse::Uncached, Reuse::Early, Reuse::Late].into_iter().flat_map(move |list| {
            let ends = self.ends(list);
            let follow = move |at: &u32| Some(self.blocks[*at as usize].next);
            std::iter::successors(follow(&ends), follow).take_while(move |at| *at != ends).map(BlockId)
        })
    }

    /// What a block can be found by, and what its place among the free ones goes by.
    pub(crate) fn content(&self, block: BlockId) -> Option<(BlockHash, u16, bool)> {
        let entry = self.blocks.get(block.0 as usize).filter(|_| self.is_published(block))?;
        Some((self.index.hash(entry.node), entry.group, entry.was_shared))
    }

    /// The full blocks that can be found, in the order of their ids, as events name them: digest and group. Empty where events
    /// are not recorded.
    pub fn kv_event_blocks(&self) -> impl Iterator<Item = (u64, u32)> + '_ {
        let found = self.blocks.iter().filter(|block| block.node != NodeId::NONE);
        found.filter_map(|block| self.index.event_block(block.node, block.group as usize))
    }

    /// Whether a block can be found by its content.
    pub fn is_published(&self, block: BlockId) -> bool {
        self.blocks.get(block.0 as usize).is_some_and(|block| block.node != NodeId::NONE)
    }

    /// By how many tokens a block can be found: all that it holds, fewer for the end of a sequence, 0 if it cannot.
    pub fn num_published_tokens(&self, block: BlockId) -> usize {
        if self.is_published(block) { self.index.num_tokens(self.blocks[block.0 as usize].node) } else { 0 }
    }

    /// Walks everything: the free list both ways, the counters, and the index. `num_pins` is how many pins on nodes
    /// the requests hold.
    pub(crate) fn check_integrity(&self, num_pins: usize) -> Result<(), IntegrityError> {
        let check = |holds: bool, what: &str| if holds { Ok(()) } else { Err(IntegrityError(what.to_owned())) };
        let ids = self.blocks.len() - NUM_LISTS;
        let mut listed = Vec::new();
        for list in [Reuse::Uncached, Reuse::Early, Reuse::Late] {
            let ends = self.ends(list);
            let walk = |forward: bool| {
                let mut seen = Vec::new();
                let mut at = ends;
                loop {
                    let block = &self.blocks[at as usize];
                    at = if forward { block.next } else { block.prev };
                    if at == ends || at as usize >= ids || seen.len() > ids {
                        return seen;
                    }
                    seen.push(at);
                }
            };
            let (forward, mut backward) = (walk(true), walk(false));
            backward.reverse();
            check(forward == backward, "a free list reads differently in its two directions")?;
            let fits = |id: &u32| self.is_published(BlockId(*id)) == (list != Reuse::Uncached);
            check(forward.iter().all(fits), "a free block is in a list of the wrong kind")?;
            listed.extend(forward);
        }
        check(listed.len() == self.num_free, "the free counter differs from the free lists' length")?;
        let mut in_list = vec![false; ids];
        for &id in &listed {
            check(!in_list[id as usize], "a block stands twice in the free lists")?;
            in_list[id as usize] = true;
        }
        let null = &self.blocks[0];
        check(null.ref_cnt == 0 && null.node == NodeId::NONE, "the null block is held or published")?;
        let mut num_published = 0;
        let mut num_cached = 0;
        for (id, block) in self.blocks[..ids].iter().enumerate().skip(1) {
            check(in_list[id] == (block.ref_cnt == 0), "a block is free and held, or neither")?;
            check(!block.named, "a block is still marked by a release")?;
            if block.node != NodeId::NONE {
                num_published += 1;
                num_cached += usize::from(block.ref_cnt == 0);
                let found = self.index.block(block.node, block.group as usize);
                check(found == Some(BlockId(id as u32)), "a published block is not the one its prefix names")?;
            }
        }
        check(num_cached == self.num_cached, "the cached counter differs from the cached blocks")?;
        let num_shared = self.blocks.iter().filter(|block| block.ref_cnt > 1).count();
        let num_saved = self.blocks.iter().map(|block| block.ref_cnt.saturating_sub(1) as usize).sum::<usize>();
        check((num_shared, num_saved) == (self.num_shared, self.num_saved), "the counters of sharing are wrong")?;
        let num_told = self.kv_event_blocks().count();
        check(num_told == self.index.num_event_blocks(), "the counter of blocks that events tell of is wrong")?;
        let num_attached = self.index.check_integrity(num_pins).map_err(IntegrityError)?;
        check(num_attached == num_published, "a prefix names a block that is not published")
    }
}

#[cfg(test)]
mod tests;

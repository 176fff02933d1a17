//! The physical blocks: who holds them, which are free, and in what order free ones are reused.

use crate::block_hash::BlockHasher;
use crate::error::{IntegrityError, PoolError};
use crate::prefix_index::{NodeId, PrefixIndex};

/// Index of a physical block. Token `t` of a block lies in slot `block_id * block_size + t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct BlockId(pub u32);

impl BlockId {
    /// The null block: a place in a block table whose KV is never read. It is never held, freed or published.
    pub const NULL: Self = Self(0);
}

/// Links of a block that is not in the free list point here.
const UNLINKED: u32 = u32::MAX;
/// The null block's links are the ends of the free list: `next` its head, `prev` its tail.
const ENDS: u32 = 0;

#[derive(Debug, Clone)]
struct Block {
    ref_cnt: u32,
    prev: u32,
    next: u32,
    group: u32,
    node: Option<NodeId>,
    /// Set only inside `free_blocks`, to see a block that is named twice.
    named: bool,
}

/// A flat pool of blocks with reference counts, a free list in eviction order, and the index of cached prefixes.
///
/// `num_blocks` are usable, with ids from 1; id 0 is the null block on top of them. Every operation on a block is
/// O(1). A free block may still be *cached*: findable by its content until it is handed out again.
#[derive(Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    num_free: usize,
    num_cached: usize,
    num_shared: usize,
    num_saved: usize,
    index: PrefixIndex,
}

impl BlockPool {
    /// A pool of `num_blocks` usable blocks (at most `u32::MAX - 1`), all free, shared by `num_groups` KV groups.
    pub fn new(num_blocks: u32, num_groups: usize, hasher: BlockHasher) -> Self {
        let num_ids = num_blocks + 1;
        let blocks = (0..num_ids)
            .map(|id| Block {
                ref_cnt: 0,
                prev: if id == 0 { num_blocks } else { id - 1 },
                next: if id == num_blocks { ENDS } else { id + 1 },
                group: 0,
                node: None,
                named: false,
            })
            .collect();
        let index = PrefixIndex::new(hasher, num_groups);
        Self { blocks, num_free: num_blocks as usize, num_cached: 0, num_shared: 0, num_saved: 0, index }
    }

    /// Usable blocks; the null block is not one.
    pub fn num_blocks(&self) -> usize {
        self.blocks.len() - 1
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
        if self.num_free == 0 {
            return Err(PoolError::OutOfBlocks { needed: 1, free: 0 });
        }
        let id = self.blocks[ENDS as usize].next;
        self.unlink(id);
        if self.is_published(BlockId(id)) {
            self.num_cached -= 1;
            self.forget(BlockId(id));
        }
        self.blocks[id as usize].ref_cnt = 1;
        Ok(BlockId(id))
    }

    /// Holds blocks once more, taking free ones out of the free list: what a prefix hit does.
    pub(crate) fn touch(&mut self, block: BlockId) {
        debug_assert_ne!(block, BlockId::NULL);
        if self.blocks[block.0 as usize].ref_cnt == 0 {
            self.unlink(block.0);
            self.num_cached -= usize::from(self.blocks[block.0 as usize].node.is_some());
        }
        let entry = &mut self.blocks[block.0 as usize];
        entry.ref_cnt += 1;
        self.num_shared += usize::from(entry.ref_cnt == 2);
        self.num_saved += usize::from(entry.ref_cnt > 1);
    }

    /// Lets go of blocks, the first to be reused first. One that nobody holds any more becomes free: at the end of
    /// the eviction order if it is cached, else at its start.
    ///
    /// A list that names a block twice, a free block, the null block or an id outside the pool is refused whole.
    pub fn free_blocks(&mut self, blocks: &[BlockId]) -> Result<(), PoolError> {
        let num_blocks = self.num_blocks();
        let mut problem = None;
        let mut num_named = 0;
        for &block in blocks {
            problem = match self.blocks.get_mut(block.0 as usize) {
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
                if entry.node.is_some() {
                    self.num_cached += 1;
                    let tail = self.blocks[ENDS as usize].prev;
                    self.link_between(block.0, tail, ENDS);
                } else {
                    let head = self.blocks[ENDS as usize].next;
                    self.link_between(block.0, ENDS, head);
                }
            }
        }
        Ok(())
    }

    /// Makes a held block findable as the last block of `node`'s prefix, which has none yet in this group.
    pub(crate) fn publish(&mut self, block: BlockId, node: NodeId, group: usize) {
        let entry = &mut self.blocks[block.0 as usize];
        debug_assert!(block != BlockId::NULL && entry.ref_cnt > 0 && entry.node.is_none());
        entry.node = Some(node);
        entry.group = group as u32;
        self.index.attach(node, group, block);
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

    /// Makes every block unfindable. Pins on nodes are void afterwards.
    pub(crate) fn clear_index(&mut self) {
        for block in &mut self.blocks {
            block.node = None;
        }
        self.num_cached = 0;
        self.index.clear();
    }

    /// Makes a block that is in no free list unfindable, if it is not so already.
    pub(crate) fn forget(&mut self, block: BlockId) {
        let entry = &mut self.blocks[block.0 as usize];
        let group = entry.group as usize;
        if let Some(node) = entry.node.take() {
            self.index.detach(node, group);
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

    fn link_between(&mut self, id: u32, prev: u32, next: u32) {
        (self.blocks[id as usize].prev, self.blocks[id as usize].next) = (prev, next);
        self.blocks[prev as usize].next = id;
        self.blocks[next as usize].prev = id;
        self.num_free += 1;
    }

    /// Free blocks in the order in which they will be handed out.
    pub fn free_block_ids(&self) -> impl Iterator<Item = BlockId> + '_ {
        let mut at = ENDS;
        (0..self.num_free).map(move |_| {
            at = self.blocks[at as usize].next;
            BlockId(at)
        })
    }

    /// Whether a block can be found by its content.
    pub fn is_published(&self, block: BlockId) -> bool {
        self.blocks.get(block.0 as usize).is_some_and(|block| block.node.is_some())
    }

    /// Walks everything: the free list both ways, the counters, and the index. `num_pins` is how many pins on nodes
    /// the requests hold.
    pub(crate) fn check_integrity(&self, num_pins: usize) -> Result<(), IntegrityError> {
        let check = |holds: bool, what: &str| if holds { Ok(()) } else { Err(IntegrityError(what.to_owned())) };
        let ids = self.blocks.len();
        let walk = |forward: bool| {
            let mut seen = Vec::new();
            let mut at = ENDS;
            loop {
                let block = &self.blocks[at as usize];
                at = if forward { block.next } else { block.prev };
                if at == ENDS || at as usize >= ids || seen.len() > ids {
                    return seen;
                }
                seen.push(at);
            }
        };
        let forward = walk(true);
        let mut backward = walk(false);
        backward.reverse();
        check(forward == backward, "the free list reads differently in its two directions")?;
        check(forward.len() == self.num_free, "the free counter differs from the free list's length")?;
        let mut in_list = vec![false; ids];
        for &id in &forward {
            check(!in_list[id as usize], "a block stands twice in the free list")?;
            in_list[id as usize] = true;
        }
        let null = &self.blocks[0];
        check(null.ref_cnt == 0 && null.node.is_none(), "the null block is held or published")?;
        let mut num_published = 0;
        let mut num_cached = 0;
        for (id, block) in self.blocks.iter().enumerate().skip(1) {
            check(in_list[id] == (block.ref_cnt == 0), "a block is free and held, or neither")?;
            check(!block.named, "a block is still marked by a release")?;
            if let Some(node) = block.node {
                num_published += 1;
                num_cached += usize::from(block.ref_cnt == 0);
                let found = self.index.block(node, block.group as usize);
                check(found == Some(BlockId(id as u32)), "a published block is not the one its prefix names")?;
            }
        }
        check(num_cached == self.num_cached, "the cached counter differs from the cached blocks")?;
        let num_shared = self.blocks.iter().filter(|block| block.ref_cnt > 1).count();
        let num_saved = self.blocks.iter().map(|block| block.ref_cnt.saturating_sub(1) as usize).sum::<usize>();
        check((num_shared, num_saved) == (self.num_shared, self.num_saved), "the counters of sharing are wrong")?;
        let num_attached = self.index.check_integrity(num_pins).map_err(IntegrityError)?;
        check(num_attached == num_published, "a prefix names a block that is not published")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(num_blocks: u32) -> BlockPool {
        BlockPool::new(num_blocks, 1, BlockHasher::new([0; 32]))
    }

    fn take(pool: &mut BlockPool, count: usize) -> Vec<BlockId> {
        let mut out = Vec::new();
        pool.get_new_blocks(count, &mut out).unwrap();
        out
    }

    /// Publishes each block as the next of one chain.
    fn publish_chain(pool: &mut BlockPool, blocks: &[BlockId]) {
        let mut node = pool.index_mut().pin_root(b"");
        for (&block, token) in blocks.iter().zip(0u32..) {
            node = pool.index_mut().pin_child(node, &[token]);
            pool.publish(block, node, 0);
        }
        pool.index_mut().unpin(node);
    }

    #[test]
    fn all_advertised_blocks_are_usable_and_the_null_block_is_never_one() {
        let mut pool = pool(3);
        let mut ids = take(&mut pool, 3);
        ids.sort();
        assert_eq!(ids, [BlockId(1), BlockId(2), BlockId(3)]);
        let mut out = Vec::new();
        assert_eq!(pool.get_new_blocks(1, &mut out), Err(PoolError::OutOfBlocks { needed: 1, free: 0 }));
        assert!(out.is_empty());
        assert_eq!(pool.free_blocks(&[BlockId::NULL]), Err(PoolError::NullBlock));
        pool.check_integrity(0).unwrap();
    }

    /// Defect 6: in a release build the second free appended the block again and the list was corrupt.
    #[test]
    fn defect_06_double_free_is_refused_and_leaves_the_list_unharmed() {
        let mut pool = pool(4);
        let ids = take(&mut pool, 3);
        pool.free_blocks(&ids[..1]).unwrap();
        let order: Vec<_> = pool.free_block_ids().collect();
        let refused = [
            (vec![ids[1], ids[0]], PoolError::NotAllocated { block: ids[0] }),
            (vec![ids[1], ids[2], ids[1]], PoolError::DuplicateBlock { block: ids[1] }),
            (vec![ids[1], BlockId(9)], PoolError::UnknownBlock { block: BlockId(9), num_blocks: 4 }),
            (vec![ids[2], BlockId::NULL], PoolError::NullBlock),
        ];
        for (list, error) in refused {
            assert_eq!(pool.free_blocks(&list), Err(error));
            assert_eq!(pool.free_block_ids().collect::<Vec<_>>(), order);
            pool.check_integrity(0).unwrap();
        }
        pool.free_blocks(&ids[1..]).unwrap();
        assert_eq!(pool.num_free_blocks(), 4);
        pool.check_integrity(0).unwrap();
    }

    #[test]
    fn a_duplicate_is_refused_even_when_the_block_is_held_twice() {
        let mut pool = pool(2);
        let ids = take(&mut pool, 1);
        pool.touch(ids[0]);
        assert_eq!(pool.free_blocks(&[ids[0], ids[0]]), Err(PoolError::DuplicateBlock { block: ids[0] }));
        assert_eq!(pool.ref_cnt(ids[0]), 2);
    }

    #[test]
    fn uncached_blocks_are_reused_before_cached_ones_and_those_from_the_oldest() {
        let mut pool = pool(5);
        let ids = take(&mut pool, 5);
        publish_chain(&mut pool, &ids[..3]);
        // Tail first, as a request frees them.
        pool.free_blocks(&[ids[2], ids[1], ids[0]]).unwrap();
        pool.free_blocks(&[ids[4], ids[3]]).unwrap();
        assert_eq!(pool.num_cached_blocks(), 3);
        let order: Vec<_> = pool.free_block_ids().collect();
        assert_eq!(order, [ids[3], ids[4], ids[2], ids[1], ids[0]]);
        // A hit takes the root out and puts it last again.
        pool.touch(ids[0]);
        assert_eq!((pool.num_cached_blocks(), pool.num_used_blocks()), (2, 1));
        pool.check_integrity(0).unwrap();
        take(&mut pool, 3);
        assert!(!pool.is_published(ids[2]) && pool.is_published(ids[1]));
        pool.check_integrity(0).unwrap();
    }

    #[test]
    fn a_prefix_is_forgotten_with_its_last_block() {
        let mut pool = pool(3);
        let ids = take(&mut pool, 3);
        publish_chain(&mut pool, &ids);
        pool.free_blocks(&[ids[2], ids[1], ids[0]]).unwrap();
        assert_eq!(pool.index().num_nodes(), 4);
        take(&mut pool, 3);
        assert_eq!(pool.index().num_nodes(), 0);
        pool.check_integrity(0).unwrap();
    }
}

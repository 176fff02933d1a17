//! Making blocks findable.

use super::{KvCacheManager, RequestBlocks};
use crate::block_hash::CacheKey;
use crate::ids::BlockId;
use crate::prefix_index::NodeId;

impl KvCacheManager {
    /// Where another request has published the same block first, its block takes the place of ours: requests that
    /// began one prefix together come to share it, and a prefix is held for as long as anything that extends it.
    pub(super) fn cache_full_blocks(&mut self, blocks: &mut RequestBlocks, computed: &[u32], key: CacheKey<'_>) {
        self.to_free.clear();
        for block_tokens in computed.chunks_exact(self.block_size).skip(blocks.num_published) {
            let parent = self.pin_parent(blocks, key);
            let node = self.pool.index_mut().pin_child(parent, block_tokens);
            self.publish_block(blocks, blocks.num_published, node);
            blocks.tail = Some(node);
            blocks.num_published += 1;
        }
        self.release();
    }

    /// Makes the last, partial block of a request that is about to let go of its blocks findable by the computed tokens
    /// in it, unless what is cached already begins with them. Without states behind it nobody could begin there.
    pub fn cache_tail(&mut self, blocks: &mut RequestBlocks, tokens: &[u32], key: CacheKey<'_>, num_computed_tokens: usize) {
        let first = blocks.num_published * self.block_size;
        let is_tail = (1..self.block_size).contains(&(num_computed_tokens.saturating_sub(first)));
        if !is_tail || self.has_states || !self.publishes(blocks) {
            return;
        }
        let tail = &tokens[first..num_computed_tokens];
        let parent = match blocks.tail {
            Some(tail) => Some(tail),
            None => self.pool.index().find_root(key.identity),
        };
        let parent = parent.and_then(|parent| self.behind_salt(parent, blocks.num_published, key));
        let is_whole = |node| self.is_whole(node);
        let longest = parent.and_then(|parent| self.pool.index().find_longest(parent, tail, is_whole));
        if longest.is_none_or(|(_, common)| common < tail.len()) {
            let node = self.publish_tail(blocks, tail, key);
            self.pool.index_mut().unpin(node);
        }
    }

    /// Makes the block behind the full ones findable by `tail`, the computed tokens in it; returns its node, pinned.
    pub(super) fn publish_tail(&mut self, blocks: &mut RequestBlocks, tail: &[u32], key: CacheKey<'_>) -> NodeId {
        if let Some(end) = blocks.tail {
            self.pool.index_mut().pin(end);
        }
        let parent = self.pin_parent(blocks, key);
        let node = self.pool.index_mut().pin_child(parent, tail);
        self.to_free.clear();
        self.publish_block(blocks, blocks.num_published, node);
        self.release();
        node
    }

    /// Whether what a request computes will be findable.
    pub(crate) fn publishes(&self, blocks: &RequestBlocks) -> bool {
        self.enable_prefix_caching && blocks.generation == self.generation
    }

    /// Whether every group has its block of a prefix.
    pub(super) fn is_whole(&self, node: NodeId) -> bool {
        (0..self.groups.groups.len()).all(|group| self.pool.index().block(node, group).is_some())
    }

    /// What the next block of a request stands behind, with the pin of the block before it.
    fn pin_parent(&mut self, blocks: &RequestBlocks, key: CacheKey<'_>) -> NodeId {
        let parent = match blocks.tail {
            Some(tail) => tail,
            None => self.pool.index_mut().pin_root(key.identity),
        };
        if key.is_salted_at(blocks.num_published) { self.pool.index_mut().pin_salt(parent, key.salt) } else { parent }
    }

    fn publish_block(&mut self, blocks: &mut RequestBlocks, index: usize, node: NodeId) {
        for (group, table) in blocks.tables.iter_mut().enumerate() {
            let block = &mut table[index];
            if *block == BlockId::NULL || self.pool.is_published(*block) {
                continue;
            }
            if let Some(published) = self.pool.index().block(node, group) {
                self.pool.touch(published);
                self.to_free.push(std::mem::replace(block, published));
            } else {
                self.pool.publish(*block, node, group);
            }
        }
    }
}

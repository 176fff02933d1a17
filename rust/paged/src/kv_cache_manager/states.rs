//! Snapshots of the states of recurrent layers, and the blocks that they stand behind.

use super::{KvCacheManager, RequestBlocks};
use crate::block_hash::CacheKey;
use crate::prefix_index::NodeId;
use crate::state_snapshots::{SnapshotSlot, StateSnapshots};

impl KvCacheManager {
    /// From now on a hit ends where there is a snapshot of the states, of which so many are kept.
    pub(crate) fn keep_states(&mut self, num_snapshots: usize) {
        self.has_states = true;
        *self.pool.snapshots_mut() = StateSnapshots::new(num_snapshots);
    }

    /// Whether hits end at snapshots.
    pub(crate) fn has_states(&self) -> bool {
        self.has_states
    }

    /// A slot for the states of a request whose `num_computed_tokens` tokens end with a block, if they are to be kept.
    pub(crate) fn snapshot_at_boundary(&mut self, blocks: &RequestBlocks, num_computed_tokens: usize) -> Option<SnapshotSlot> {
        let is_boundary = blocks.num_published * self.block_size == num_computed_tokens;
        let node = blocks.tail.filter(|_| is_boundary && self.publishes(blocks))?;
        self.snapshot_of(node)
    }

    /// The same of a request that is about to end, or to be kept: the last block may be cut short, and is then made findable by
    /// all of the computed tokens in it.
    pub(crate) fn snapshot_at_end(
        &mut self,
        blocks: &mut RequestBlocks,
        tokens: &[u32],
        key: CacheKey<'_>,
        num_computed_tokens: usize,
    ) -> Option<SnapshotSlot> {
        let first = blocks.num_published * self.block_size;
        let num_tail_tokens = num_computed_tokens.checked_sub(first)?;
        if num_tail_tokens == 0 {
            return self.snapshot_at_boundary(blocks, num_computed_tokens);
        }
        if num_tail_tokens >= self.block_size || !self.publishes(blocks) {
            return None;
        }
        let node = self.publish_tail(blocks, &tokens[first..num_computed_tokens], key);
        let slot = self.snapshot_of(node);
        self.pool.index_mut().unpin(node);
        slot
    }

    /// Gives back the snapshot that a request has begun with.
    pub(super) fn let_go_of_snapshot(&mut self, blocks: &mut RequestBlocks) {
        if let Some(slot) = blocks.snapshot.take() {
            self.pool.snapshots_mut().release(slot);
        }
    }

    fn snapshot_of(&mut self, node: NodeId) -> Option<SnapshotSlot> {
        if self.is_whole(node) { self.pool.snapshots_mut().take(node) } else { None }
    }
}

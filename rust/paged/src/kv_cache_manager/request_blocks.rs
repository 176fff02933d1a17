//! The blocks of one request.

use crate::ids::BlockId;
use crate::prefix_index::NodeId;
use crate::state_snapshots::SnapshotSlot;

/// The blocks of one request: a block table for each KV group, all of one length.
///
/// Entry `i` holds tokens `[i * block_size, (i + 1) * block_size)`; entries that left a group's window are
/// [`BlockId::NULL`].
#[derive(Debug, Clone, Default)]
pub struct RequestBlocks {
    pub(crate) tables: Vec<Vec<BlockId>>,
    /// Leading null entries of each group's table.
    pub(super) num_dropped: Vec<usize>,
    /// Leading blocks that are committed and offered to the prefix cache.
    pub(super) num_published: usize,
    /// The prefix those blocks end, pinned.
    pub(super) tail: Option<NodeId>,
    /// Generation of the prefix cache under which the KV was begun.
    pub(super) generation: u64,
    /// Where others may begin to differ: the windows that end there are worth keeping.
    pub(super) num_prompt_tokens: usize,
    /// Where its states lie until its first row has run.
    pub(crate) snapshot: Option<SnapshotSlot>,
}

impl RequestBlocks {
    /// No blocks yet, for a prompt of so many tokens.
    pub fn new(num_groups: usize, num_prompt_tokens: usize) -> Self {
        Self {
            tables: vec![Vec::new(); num_groups],
            num_dropped: vec![0; num_groups],
            num_published: 0,
            tail: None,
            generation: 0,
            num_prompt_tokens,
            snapshot: None,
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

//! Finding what is there already, and saying why no more of it is.

use super::{KvCacheManager, RequestBlocks};
use crate::block_hash::CacheKey;
use crate::ids::BlockId;
use crate::prefix_index::NodeId;
use crate::state_snapshots::SnapshotSlot;

/// Why a prefix lookup ended where it did. Each speaks of the first block that was not found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MissReason {
    /// Nothing tells that it was ever there; or it had to go so long ago that this is forgotten.
    Cold,
    /// It was there, and its memory was needed for something else.
    Evicted,
    /// It is there for others: under another salt, or without one. Only told of the first block behind the public prefix.
    Salt,
    /// It is there under another identity (another adapter, other weights). Only told of a prompt's first block.
    Identity,
    /// It is the incomplete last block of the prompt, and nothing in the cache begins with all of it.
    PartialTail,
    /// The layers that see all tokens have it, but a sliding window that ends there is gone.
    WindowEvicted,
    /// The blocks are there, but no snapshot of the recurrent layers' states is, and nobody can begin without.
    NoSnapshot,
    /// The prefix cache is off.
    Disabled,
    /// The request asked not to look: it needs the logits of every position.
    Skipped,
}

impl MissReason {
    /// How many there are.
    pub const COUNT: usize = 9;

    /// All of them, in the order of [`crate::KvCacheStats::prefix_missed_tokens`].
    pub const ALL: [Self; Self::COUNT] = [
        Self::Cold,
        Self::Evicted,
        Self::Salt,
        Self::Identity,
        Self::PartialTail,
        Self::WindowEvicted,
        Self::NoSnapshot,
        Self::Disabled,
        Self::Skipped,
    ];

    /// The word for it in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cold => "cold",
            Self::Evicted => "evicted",
            Self::Salt => "salt",
            Self::Identity => "identity",
            Self::PartialTail => "partial_tail",
            Self::WindowEvicted => "window_evicted",
            Self::NoSnapshot => "no_snapshot",
            Self::Disabled => "disabled",
            Self::Skipped => "skipped",
        }
    }
}

/// What a prefix lookup found; valid until the pool changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrefixHit {
    /// Tokens whose KV is already there: fewer than the request's tokens, and not always whole blocks.
    pub num_tokens: usize,
    /// Blocks the request would hold by it.
    pub num_blocks: usize,
    /// Of those, how many are free now and would leave the free list.
    pub num_free_blocks: usize,
    /// Blocks of them that are used in part and must be copied before the request writes.
    pub num_copies: usize,
    /// Why it is not all tokens but one; `None` if it is.
    pub miss: Option<MissReason>,
    /// Tokens whose whole blocks are there, though perhaps no states behind them.
    pub num_block_tokens: usize,
    /// Of models with states, where those behind the hit lie.
    pub snapshot: Option<SnapshotSlot>,
}

/// How many full blocks of a prompt are there.
#[derive(Debug, Clone, Copy, Default)]
struct Reach {
    /// In every group, as far as a query behind them sees.
    num_blocks: usize,
    /// The same up to where states are there as well, of models that have any.
    num_with_states: usize,
}

impl KvCacheManager {
    /// The longest prefix of `tokens` that every group still has, one token at least being left to compute. The last
    /// block may match in part: its beginning is used, and the request will write behind it in a copy.
    /// Changes nothing but what [`Self::take_hit`] reads.
    pub fn get_computed_blocks(&mut self, tokens: &[u32], key: CacheKey<'_>) -> PrefixHit {
        self.walked.clear();
        self.walked_tail = None;
        if !self.enable_prefix_caching {
            return PrefixHit { miss: Some(MissReason::Disabled), ..PrefixHit::default() };
        }
        let max_tokens = tokens.len().saturating_sub(1);
        let reach = self.walk_full_blocks(&tokens[..max_tokens], key);
        let tail = self.find_tail(reach.num_blocks, tokens, key);
        let num_full = if tail.is_some() { reach.num_blocks } else { reach.num_with_states };
        let found_further = self.walked.get(num_full).copied();
        self.walked.truncate(num_full);
        let first = num_full * self.block_size;
        let rest = &tokens[first..tokens.len().min(first + self.block_size)];
        let num_block_tokens = reach.num_blocks * self.block_size;
        let mut hit = PrefixHit { num_tokens: first, num_block_tokens, ..PrefixHit::default() };
        if let Some((node, num_tail_tokens)) = tail {
            self.walked_tail = Some(node);
            hit.num_tokens += num_tail_tokens;
            hit.num_copies = self.runs.len();
        }
        hit.snapshot = self.walked_tail.or(self.walked.last().copied()).and_then(|node| self.pool.snapshots().get(node));
        if hit.num_tokens < max_tokens {
            let has_blocks = hit.num_tokens < hit.num_block_tokens;
            hit.miss = Some(if has_blocks { MissReason::NoSnapshot } else { self.miss_reason(found_further, rest, key) });
        }
        for group in 0..self.runs.len() {
            let first = self.first_kept_by_hit(group, num_full);
            for &node in self.walked[first..].iter().chain(&self.walked_tail) {
                hit.num_blocks += 1;
                let block = self.pool.index().block(node, group);
                hit.num_free_blocks += usize::from(block.is_some_and(|block| self.pool.is_free(block)));
            }
        }
        hit
    }

    /// What begins like the tokens behind `num_full` walked blocks, and how many tokens of it are of use: of models with states,
    /// all that it has, for its states are behind these.
    fn find_tail(&self, num_full: usize, tokens: &[u32], key: CacheKey<'_>) -> Option<(NodeId, usize)> {
        let first = num_full * self.block_size;
        let most = tokens.len().saturating_sub(first + 1).min(self.block_size - 1);
        let parent = self.parent_of_block(num_full, key).filter(|_| most > 0)?;
        let index = self.pool.index();
        if self.has_states {
            let rest = &tokens[first..first + most];
            let is_there = |node| self.pool.snapshots().get(node).is_some() && index.begins(node, rest) && self.is_whole(node);
            return index.find_longest(parent, rest, is_there);
        }
        let rest = &tokens[first..tokens.len().min(first + self.block_size)];
        let (node, common) = index.find_longest(parent, rest, |node| self.is_whole(node))?;
        Some((node, common.min(most)))
    }

    /// Walks as many full blocks of `tokens` as there are; returns how many of them make a hit.
    fn walk_full_blocks(&mut self, tokens: &[u32], key: CacheKey<'_>) -> Reach {
        let mut reach = Reach::default();
        self.runs.fill(0);
        for block_tokens in tokens.chunks_exact(self.block_size) {
            let Some(parent) = self.parent_of_block(self.walked.len(), key) else { break };
            let Some(node) = self.pool.index().find_child(parent, block_tokens) else { break };
            self.walked.push(node);
            let mut every_group_accepts = true;
            let mut hopeless = false;
            for group in 0..self.runs.len() {
                let has_block = self.pool.index().block(node, group).is_some();
                self.runs[group] = if has_block { self.runs[group] + 1 } else { 0 };
                let needed = self.walked.len() - self.first_kept_by_hit(group, self.walked.len());
                every_group_accepts &= self.runs[group] >= needed;
                hopeless |= !has_block && self.groups.groups[group].retention.window().is_none();
            }
            if hopeless {
                break;
            }
            if every_group_accepts {
                reach.num_blocks = self.walked.len();
                if !self.has_states || self.pool.snapshots().get(node).is_some() {
                    reach.num_with_states = self.walked.len();
                }
            }
        }
        reach
    }

    /// What block `index` stands behind; the blocks before it have been walked.
    fn parent_of_block(&self, index: usize, key: CacheKey<'_>) -> Option<NodeId> {
        self.behind_salt(self.node_before_block(index, key)?, index, key)
    }

    /// What block `index` stands behind if it is behind `node`.
    pub(super) fn behind_salt(&self, node: NodeId, index: usize, key: CacheKey<'_>) -> Option<NodeId> {
        if key.is_salted_at(index) { self.pool.index().find_salt(node, key.salt) } else { Some(node) }
    }

    fn node_before_block(&self, index: usize, key: CacheKey<'_>) -> Option<NodeId> {
        match index.checked_sub(1) {
            Some(last) => self.walked.get(last).copied(),
            None => self.pool.index().find_root(key.identity),
        }
    }

    /// Why the block that begins `rest` is not part of the hit. `found_further` is its node if it has one.
    fn miss_reason(&self, found_further: Option<NodeId>, rest: &[u32], key: CacheKey<'_>) -> MissReason {
        let index = self.walked.len();
        let pool_index = self.pool.index();
        if let Some(node) = found_further {
            let is_full = |group: &usize| self.groups.groups[*group].retention.window().is_none();
            let has_all_full = (0..self.runs.len()).filter(is_full).all(|group| pool_index.block(node, group).is_some());
            return if has_all_full { MissReason::WindowEvicted } else { MissReason::Evicted };
        }
        let before = self.node_before_block(index, key);
        let salt = if key.is_salted_at(index) { key.salt } else { b"" };
        if pool_index.was_evicted(before, key.identity, salt, rest) {
            return MissReason::Evicted;
        }
        let may_be_salted = key.salt.is_empty() || key.is_salted_at(index);
        if self.walked_tail.is_none() {
            if may_be_salted && before.is_some_and(|node| pool_index.is_under_other_salt(node, salt, rest)) {
                return MissReason::Salt;
            }
            if index == 0 && pool_index.is_under_other_identity(key.identity, salt, rest) {
                return MissReason::Identity;
            }
        }
        if rest.len() < self.block_size && (index > 0 || self.walked_tail.is_some()) {
            return MissReason::PartialTail;
        }
        MissReason::Cold
    }

    /// Gives an empty request the blocks of `hit`, which the lookup just before found; with the default hit, none.
    pub fn take_hit(&mut self, blocks: &mut RequestBlocks, hit: PrefixHit) {
        debug_assert!(blocks.num_blocks() == 0 && blocks.tail.is_none());
        self.walked.truncate(hit.num_tokens / self.block_size);
        if hit.num_tokens.is_multiple_of(self.block_size) {
            self.walked_tail = None;
        }
        blocks.generation = self.generation;
        for (group, table) in blocks.tables.iter_mut().enumerate() {
            let first = self.first_kept_by_hit(group, self.walked.len());
            blocks.num_dropped[group] = first;
            table.resize(first, BlockId::NULL);
            for &node in self.walked[first..].iter().chain(&self.walked_tail) {
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
        blocks.snapshot = hit.snapshot;
        if let Some(slot) = hit.snapshot {
            self.pool.snapshots_mut().hold(slot);
        }
        self.walked.clear();
        self.walked_tail = None;
    }

    /// First block that a hit of `num_blocks` blocks must have in a group.
    fn first_kept_by_hit(&self, group: usize, num_blocks: usize) -> usize {
        self.groups.groups[group].first_visible_block(num_blocks * self.block_size, self.block_size).min(num_blocks)
    }
}

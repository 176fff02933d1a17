//! What a tier has: which committed blocks lie outside the pool, and when fetching them beats computing them.
//!
//! A tier keeps copies of full, published, immutable blocks. It is addressed by content: a block's key is a digest of
//! everything its KV depends on, without the pool's random key, so that another process finds it again. The scheduler
//! offers each block once its step is committed ([`crate::Scheduler::take_swap_outs`]), and looks there when the pool's own
//! prefix hit ends ([`crate::SchedulerOutput::swap_in`]). Bytes, files and clocks are the engine's: it injects what it
//! measured as [`TierRates`].

use std::collections::HashMap;
use std::sync::Arc;

use crate::block_hash::CacheKey;
use crate::ids::BlockId;
use crate::kv_groups::KvGroups;

/// 256-bit digest of a prefix of whole blocks: model, layout, identity, salt and tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TierKey(pub [u8; 32]);

/// Names what a physical block holds: the last block of a prefix, for the layers of one KV group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TierRecordId {
    /// The prefix.
    pub key: TierKey,
    /// The KV group.
    pub group: u32,
}

/// A block to be copied out to the tier, or in from it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierBlock {
    /// What it holds.
    pub id: TierRecordId,
    /// The prefix without its last block; for the first block, a digest of what the prefix begins with.
    pub parent: TierKey,
    /// Which block of the prefix it is, from 0.
    pub index: u32,
    /// Its tokens, `[block_size]`.
    pub tokens: Arc<[u32]>,
    /// Where it lies in the pool.
    pub block: BlockId,
}

/// What the engine measured, for the choice between fetching and computing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TierRates {
    /// Bytes a second that come in from the tier.
    pub bytes_per_second: f64,
    /// Tokens a second that a step computes when it computes many.
    pub tokens_per_second: f64,
}

impl TierRates {
    /// Whether fetching `num_bytes` takes less time than computing `num_tokens`.
    pub fn fetching_is_cheaper(&self, num_bytes: u64, num_tokens: usize) -> bool {
        num_bytes as f64 * self.tokens_per_second < num_tokens as f64 * self.bytes_per_second
    }
}

/// A tier as the scheduler is told of it.
#[derive(Debug, Clone, PartialEq)]
pub struct TierConfig {
    /// Digest of all that KV depends on besides the request: weights, precision, element type, layout, format.
    pub space: [u8; 32],
    /// Bytes of a physical block.
    pub bytes_per_block: u64,
    /// What is known of speeds at first.
    pub rates: TierRates,
}

/// Figures of the tier; all 0 without one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TierStats {
    /// Blocks that were copied out and kept.
    pub swapped_out_blocks: u64,
    /// Blocks that were copied in, verified.
    pub swapped_in_blocks: u64,
    /// Bytes of a block.
    pub bytes_per_block: u64,
    /// Tokens that were not computed because the tier had their KV.
    pub hit_tokens: u64,
    /// Tokens that the tier had and that were computed all the same, because that was cheaper.
    pub declined_tokens: u64,
    /// Blocks that could not be copied in: damaged, foreign, gone.
    pub failed_blocks: u64,
    /// Blocks that were offered and not kept: the tier lagged behind, or could not be written.
    pub dropped_blocks: u64,
    /// Blocks that the tier is known to have.
    pub blocks: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Offered, not there yet.
    Underway,
    There,
}

/// Which records a tier has, and what is on its way there.
#[derive(Debug, Clone)]
pub(crate) struct TierIndex {
    config: TierConfig,
    places: HashMap<TierRecordId, Place>,
    offers: Vec<TierBlock>,
    stats: TierStats,
}

const TAG_ROOT: u8 = 1;
const TAG_BLOCK: u8 = 2;
const CONTEXT: &str = "mistral_paged 2026 KV tier, chain of blocks";

impl TierIndex {
    pub(crate) fn new(config: TierConfig) -> Self {
        let stats = TierStats { bytes_per_block: config.bytes_per_block, ..TierStats::default() };
        Self { config, places: HashMap::new(), offers: Vec::new(), stats }
    }

    pub(crate) fn stats(&self) -> TierStats {
        self.stats
    }

    pub(crate) fn set_rates(&mut self, rates: TierRates) {
        self.config.rates = rates;
    }

    /// A record is there, whether it was found or just written.
    pub(crate) fn has(&mut self, id: TierRecordId) {
        let before = self.places.insert(id, Place::There);
        self.stats.swapped_out_blocks += u64::from(before == Some(Place::Underway));
        self.stats.blocks += usize::from(before != Some(Place::There));
    }

    /// A record is not there any more, or never came.
    pub(crate) fn lost(&mut self, id: TierRecordId) {
        let before = self.places.remove(&id);
        self.stats.dropped_blocks += u64::from(before == Some(Place::Underway));
        self.stats.blocks -= usize::from(before == Some(Place::There));
    }

    /// A record could not be fetched: it is not looked for again.
    pub(crate) fn failed(&mut self, id: TierRecordId) {
        self.lost(id);
        self.stats.failed_blocks += 1;
    }

    pub(crate) fn count_fetched(&mut self, num_blocks: usize, num_tokens: usize) {
        self.stats.swapped_in_blocks += num_blocks as u64;
        self.stats.hit_tokens += num_tokens as u64;
    }

    /// Notes a block to be copied out unless the tier has it, or it is on its way.
    pub(crate) fn offer(&mut self, block: TierBlock) {
        self.places.entry(block.id).or_insert_with(|| {
            self.offers.push(block);
            Place::Underway
        });
    }

    pub(crate) fn take_offers(&mut self, out: &mut Vec<TierBlock>) {
        out.append(&mut self.offers);
    }

    /// Extends `keys` by those of the blocks of a prefix. The first key is the root's, so block `i` has
    /// key `i + 1`.
    pub(crate) fn extend_keys(&self, keys: &mut Vec<TierKey>, blocks: std::slice::ChunksExact<'_, u32>, key: CacheKey<'_>) {
        let mut hasher = blake3::Hasher::new_derive_key(CONTEXT);
        if keys.is_empty() {
            hasher.update(&[TAG_ROOT]).update(&self.config.space);
            framed(&mut hasher, key.identity);
            keys.push(TierKey(*hasher.finalize().as_bytes()));
        }
        for (index, tokens) in blocks.enumerate().skip(keys.len() - 1) {
            hasher.reset();
            hasher.update(&[TAG_BLOCK]).update(&keys[index].0);
            framed(&mut hasher, if index < key.num_public_blocks { b"" } else { key.salt });
            for token in tokens {
                hasher.update(&token.to_le_bytes());
            }
            keys.push(TierKey(*hasher.finalize().as_bytes()));
        }
    }

    /// How many blocks a request that has `num_hit_blocks` could begin with if the tier's were fetched: every group must
    /// then have what its later queries see. `num_hit_blocks` if the tier adds nothing, or computing is cheaper.
    pub(crate) fn reach(&mut self, keys: &[TierKey], num_hit_blocks: usize, groups: &KvGroups, block_size: usize) -> usize {
        let mut reached = num_hit_blocks;
        // Per group, blocks up to the one being looked at that are there without a gap, the pool's included.
        let mut runs = vec![num_hit_blocks; groups.groups.len()];
        for (index, key) in keys.iter().skip(1).enumerate().skip(num_hit_blocks) {
            let num_blocks = index + 1;
            let (mut accepted, mut hopeless) = (true, false);
            for (group, (members, run)) in groups.groups.iter().zip(&mut runs).enumerate() {
                let id = TierRecordId { key: *key, group: group as u32 };
                *run = if self.places.get(&id) == Some(&Place::There) { *run + 1 } else { 0 };
                accepted &= *run >= num_blocks - members.first_visible_block(num_blocks * block_size, block_size).min(num_blocks);
                hopeless |= *run == 0 && members.retention.window().is_none();
            }
            if hopeless {
                break;
            }
            if accepted {
                reached = num_blocks;
            }
        }
        let num_tokens = (reached - num_hit_blocks) * block_size;
        let num_fetched: usize =
            (0..runs.len()).map(|group| reached - first_fetched(groups, group, num_hit_blocks, reached, block_size)).sum();
        if num_fetched == 0 {
            // Nothing is known, and with a window of one token nothing is needed.
            return num_hit_blocks;
        }
        if self.config.rates.fetching_is_cheaper(num_fetched as u64 * self.config.bytes_per_block, num_tokens) {
            return reached;
        }
        self.stats.declined_tokens += num_tokens as u64;
        num_hit_blocks
    }
}

/// The first block that a group needs from the tier when a request with `num_hit_blocks` is to begin with `num_blocks`.
pub(crate) fn first_fetched(
    groups: &KvGroups,
    group: usize,
    num_hit_blocks: usize,
    num_blocks: usize,
    block_size: usize,
) -> usize {
    let first_seen = groups.groups[group].first_visible_block(num_blocks * block_size, block_size);
    first_seen.clamp(num_hit_blocks, num_blocks)
}

fn framed(hasher: &mut blake3::Hasher, bytes: &[u8]) {
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    hasher.update(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK_SIZE: usize = 4;

    fn config() -> TierConfig {
        // A block takes 10 ms to fetch, a token 10 ms to compute.
        TierConfig {
            space: [5; 32],
            bytes_per_block: 1000,
            rates: TierRates { bytes_per_second: 100_000.0, tokens_per_second: 100.0 },
        }
    }

    fn input<'a>(identity: &'a [u8], salt: &'a [u8], num_public_blocks: usize) -> CacheKey<'a> {
        CacheKey { identity, salt, num_public_blocks }
    }

    fn keys_in(index: &TierIndex, tokens: &[u32], key: CacheKey<'_>) -> Vec<TierKey> {
        let mut keys = Vec::new();
        index.extend_keys(&mut keys, tokens.chunks_exact(BLOCK_SIZE), key);
        keys
    }

    fn keys(tokens: &[u32], key: CacheKey<'_>) -> Vec<TierKey> {
        keys_in(&TierIndex::new(config()), tokens, key)
    }

    fn put(tier: &mut TierIndex, keys: &[TierKey], indices: std::ops::Range<usize>, group: u32) {
        for index in indices {
            tier.has(TierRecordId { key: keys[index + 1], group });
        }
    }

    #[test]
    fn a_key_depends_on_all_that_its_kv_depends_on() {
        let tokens: Vec<u32> = (0..12).collect();
        let plain = keys(&tokens, input(b"", b"", 0));
        assert_eq!(plain.len(), 4);
        assert_eq!(plain, keys(&tokens, input(b"", b"", 2)));
        let mut other = tokens.clone();
        other[5] = 99;
        let changed = keys(&other, input(b"", b"", 0));
        assert_eq!(changed[..2], plain[..2]);
        assert!(changed[2] != plain[2] && changed[3] != plain[3]);
        for other in [keys(&tokens, input(b"x", b"", 0)), keys(&tokens, input(b"", b"x", 0))] {
            assert!((1..4).all(|i| other[i] != plain[i]));
        }
        let space = TierIndex::new(TierConfig { space: [6; 32], ..config() });
        assert!(keys_in(&space, &tokens, input(b"", b"", 0)).iter().all(|key| !plain.contains(key)));
    }

    #[test]
    fn what_lies_wholly_in_the_public_prefix_is_keyed_without_the_salt() {
        let tokens: Vec<u32> = (0..12).collect();
        let plain = keys(&tokens, input(b"", b"", 0));
        let salted = keys(&tokens, input(b"", b"tenant", 1));
        assert_eq!(salted[..2], plain[..2]);
        assert_ne!(salted[2], plain[2]);
    }

    #[test]
    fn keys_that_are_made_bit_by_bit_are_the_same() {
        let index = TierIndex::new(config());
        let tokens: Vec<u32> = (0..12).collect();
        let mut grown = Vec::new();
        for num_blocks in 0..=3 {
            index.extend_keys(&mut grown, tokens[..num_blocks * BLOCK_SIZE].chunks_exact(BLOCK_SIZE), input(b"", b"s", 1));
            assert_eq!(grown.len(), num_blocks + 1);
        }
        assert_eq!(grown, keys(&tokens, input(b"", b"s", 1)));
    }

    #[test]
    fn the_walk_goes_on_where_the_hit_ends_and_stops_at_a_gap() {
        let mut index = TierIndex::new(config());
        let groups = KvGroups::from_layers(&[None]);
        let keys = keys(&[1; 24], input(b"", b"", 0));
        put(&mut index, &keys, 1..3, 0);
        put(&mut index, &keys, 4..6, 0);
        let mut reach = |hit| index.reach(&keys, hit, &groups, BLOCK_SIZE);
        assert_eq!([reach(0), reach(1), reach(3), reach(4), reach(6)], [0, 3, 3, 6, 6]);
    }

    #[test]
    fn a_windowed_group_needs_only_its_window() {
        let groups = KvGroups::from_layers(&[Some(5), None]);
        let (windowed, full) = if groups.groups[0].retention.window().is_some() { (0, 1) } else { (1, 0) };
        let keys = keys(&[1; 24], input(b"", b"", 0));
        let mut index = TierIndex::new(config());
        put(&mut index, &keys, 0..6, full);
        assert_eq!(index.reach(&keys, 0, &groups, BLOCK_SIZE), 0);
        // A query behind 20 tokens sees from position 16 on.
        put(&mut index, &keys, 4..5, windowed);
        assert_eq!(index.reach(&keys, 0, &groups, BLOCK_SIZE), 5);
        assert_eq!(first_fetched(&groups, windowed as usize, 0, 5, BLOCK_SIZE), 4);
        assert_eq!(first_fetched(&groups, full as usize, 0, 5, BLOCK_SIZE), 0);
    }

    #[test]
    fn what_is_on_its_way_is_not_there_and_not_offered_twice() {
        let mut index = TierIndex::new(config());
        let groups = KvGroups::from_layers(&[None]);
        let keys = keys(&[1; 4], input(b"", b"", 0));
        let id = TierRecordId { key: keys[1], group: 0 };
        let offer = || TierBlock { id, parent: keys[0], index: 0, tokens: [1; 4].into(), block: BlockId(3) };
        index.offer(offer());
        index.offer(offer());
        let mut taken = Vec::new();
        index.take_offers(&mut taken);
        assert_eq!(taken, [offer()]);
        assert_eq!(index.reach(&keys, 0, &groups, BLOCK_SIZE), 0);
        index.has(id);
        assert_eq!(index.reach(&keys, 0, &groups, BLOCK_SIZE), 1);
        index.failed(id);
        assert_eq!(index.reach(&keys, 0, &groups, BLOCK_SIZE), 0);
        index.offer(offer());
        index.lost(id);
        let stats = index.stats();
        assert_eq!((stats.swapped_out_blocks, stats.failed_blocks, stats.dropped_blocks, stats.blocks), (1, 1, 1, 0));
    }

    #[test]
    fn blocks_are_fetched_only_when_that_is_faster() {
        let groups = KvGroups::from_layers(&[None]);
        let keys = keys(&[1; 8], input(b"", b"", 0));
        let reach = |bytes_per_second, tokens_per_second| {
            let rates = TierRates { bytes_per_second, tokens_per_second };
            let mut index = TierIndex::new(TierConfig { rates, ..config() });
            put(&mut index, &keys, 0..2, 0);
            (index.reach(&keys, 0, &groups, BLOCK_SIZE), index.stats().declined_tokens)
        };
        // 8 tokens, 2000 bytes.
        assert_eq!(reach(2001.0, 8.0), (2, 0));
        assert_eq!(reach(1999.0, 8.0), (0, 8));
        assert_eq!(reach(2000.0, 8.0), (0, 8));
        assert_eq!(reach(f64::INFINITY, 1e9), (2, 0));
        assert_eq!(reach(0.0, 1.0), (0, 8));
    }
}

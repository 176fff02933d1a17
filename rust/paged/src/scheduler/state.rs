//! The scheduler's state without its names, for tests that visit all states.

use std::collections::HashMap;
use std::hash::{Hash, Hasher};

use super::Scheduler;
use crate::ids::BlockId;

impl Scheduler {
    /// Hashes all that later decisions depend on, so that states which differ only in the names of requests and blocks,
    /// or in what was counted, have one hash. Walks everything.
    #[doc(hidden)]
    pub fn hash_state(&self, state: &mut impl Hasher) {
        let mut indices: Vec<_> = self.indices.values().copied().collect();
        indices.sort_by_key(|index| self.request(*index).standing.rank);
        let mut names: HashMap<BlockId, usize> = HashMap::new();
        for &index in &indices {
            let request = self.request(index);
            let standing = &request.standing;
            (request.status as u8, &request.tokens, &request.drafts, request.max_num_tokens, request.num_computed_tokens)
                .hash(state);
            (&request.identity, &request.cache_salt, request.public_prefix_len, request.skip_prefix_lookup).hash(state);
            (standing.rank.priority, standing.deadline, standing.tenant).hash(state);
            standing.cost.preemptions.min(self.config.max_preemptions).hash(state);
            (request.blocks.num_published_blocks(), &request.snapshot_places, request.num_found_tokens).hash(state);
            for group in 0..self.num_groups() {
                for block in request.blocks.table(group) {
                    self.hash_block(*block, &mut names, state);
                }
            }
        }
        let free: Vec<_> = self.manager.pool().free_block_ids().collect();
        for block in free {
            self.hash_block(block, &mut names, state);
        }
        let pool = self.manager.pool();
        pool.snapshots().nodes().for_each(|node| pool.index().hash(node).hash(state));
        let place = |index: &usize| indices.iter().position(|other| other == index);
        self.kept.holding().map(place).for_each(|place| place.hash(state));
        self.blocked.map(|blocked| (place(&blocked.index), blocked.needed)).hash(state);
        (&self.shares, self.waiting.turn(), self.admission_closed_below, self.in_flight.is_some()).hash(state);
        (self.now, self.paused, self.draining).hash(state);
    }

    fn hash_block(&self, block: BlockId, names: &mut HashMap<BlockId, usize>, state: &mut impl Hasher) {
        let next = names.len();
        let name = *names.entry(block).or_insert(next);
        (name, block == BlockId::NULL).hash(state);
        if name == next {
            (self.manager.pool().ref_cnt(block), self.manager.pool().content(block)).hash(state);
        }
    }
}

//! Where the states of recurrent layers are kept for others to begin with.
//!
//! A request's states are kept where its prompt ends, at the last block boundary before its last token, and where another
//! prompt leaves it: one whose blocks it found without states behind them, or one that waits. A chunk ends there, which makes a
//! step more, so these places are at least [`SchedulerConfig::min_snapshot_tokens`] apart. Where a request ends its states are
//! kept as they are, wherever its last block ends: the next turn of a conversation begins there.
//!
//! [`SchedulerConfig::min_snapshot_tokens`]: super::SchedulerConfig::min_snapshot_tokens

use super::spans::cut_span;
use super::{MAX_CANDIDATES, RequestIndex, Scheduler};
use crate::kv_cache_manager::PrefixHit;
use crate::request::{Request, RequestStatus};
use crate::state_snapshots::{SnapshotSlot, StateSave};

/// The first place for a snapshot behind token `from`, if it is before `end`; else `end`.
pub(super) fn before_snapshot(places: &[usize], from: usize, end: usize) -> usize {
    places.iter().find(|place| **place > from).map_or(end, |place| end.min(*place))
}

impl Scheduler {
    /// Moves what states are to be kept behind `out`, in the order in which they are to be copied. Each request's are still in
    /// its own place, whether it runs or has ended, and are to be copied before the next step writes there.
    pub fn take_state_saves(&mut self, out: &mut Vec<StateSave>) {
        out.append(&mut self.state_saves);
    }

    /// States were not kept: nobody will begin with what is in the slot.
    pub fn forget_snapshot(&mut self, slot: SnapshotSlot) {
        self.manager.pool_mut().snapshots_mut().forget_slot(slot);
    }

    /// Plans where the states of a request that is about to run are kept.
    pub(super) fn plan_snapshots(&mut self, index: RequestIndex, hit: PrefixHit) {
        if !self.manager.has_states() {
            return;
        }
        let others = self.waiting.iter().take(MAX_CANDIDATES).filter(|waiting| *waiting != index);
        let parted = others.map(|waiting| self.common_tokens(index, waiting));
        let mut places: Vec<_> = parted.chain([hit.num_block_tokens]).collect();
        let last = self.last_boundary(self.request(index));
        places.push(last);
        self.keep_states_at(index, hit.num_tokens, places);
    }

    /// Has those that run keep their states where a request that comes to wait will leave them.
    pub(super) fn ask_for_snapshots(&mut self, index: RequestIndex) {
        if !self.manager.has_states() || self.request(index).skip_prefix_lookup {
            return;
        }
        let found = self.look_up(index).num_tokens;
        if let Some(request) = self.requests[index].as_mut() {
            request.num_found_tokens = found;
        }
        for position in 0..self.running.len() {
            let running = self.running[position];
            let place = self.common_tokens(index, running);
            if place > found {
                let request = self.request(running);
                let computed = request.num_computed_tokens;
                let places = request.snapshot_places.iter().copied().chain([place]).collect();
                self.keep_states_at(running, computed, places);
            }
        }
    }

    /// The running request that a waiting one waits for because its states will be kept where it can begin, further on than it
    /// could now.
    pub(super) fn leader_with_states(&self, index: RequestIndex) -> Option<RequestIndex> {
        let follower = self.request(index);
        self.running.iter().copied().find(|running| {
            let leader = self.request(*running);
            let least = leader.num_computed_tokens.max(follower.num_found_tokens);
            leader.standing.rank.urgency() <= follower.standing.rank.urgency()
                && self.manager.publishes(&leader.blocks)
                && leader.snapshot_places.iter().any(|place| *place > least)
                && {
                    let common = self.common_tokens(index, *running);
                    leader.snapshot_places.iter().any(|place| *place > least && *place <= common)
                }
        })
    }

    /// A row has been committed: where it ends at a place for a snapshot, the states are kept.
    pub(super) fn keep_states_behind(&mut self, index: RequestIndex) {
        let Some(request) = self.requests[index].as_mut() else { return };
        let computed = request.num_computed_tokens;
        let is_place = request.snapshot_places.contains(&computed);
        request.snapshot_places.retain(|place| *place > computed);
        if is_place && let Some(slot) = self.manager.snapshot_at_boundary(&request.blocks, computed) {
            self.save_states(index, computed, slot);
        }
    }

    /// Keeps the states of a running request that ends or is kept. Those of one in flight are ahead of its books, and those of
    /// one that has not begun are not its own yet.
    pub(super) fn keep_states_at_end(&mut self, index: RequestIndex) {
        if !self.manager.has_states() || self.in_flight.is_some() {
            return;
        }
        let block_size = self.manager.block_size();
        let Some(request) = self.requests[index].as_mut() else { return };
        let computed = request.num_computed_tokens;
        if request.status != RequestStatus::Running || computed == 0 || request.blocks.snapshot.is_some() {
            return;
        }
        let mut blocks = std::mem::take(&mut request.blocks);
        let slot = self.manager.snapshot_at_end(&mut blocks, &request.tokens, request.cache_key(block_size), computed);
        request.blocks = blocks;
        if let Some(slot) = slot {
            self.save_states(index, computed, slot);
        }
    }

    fn save_states(&mut self, index: RequestIndex, num_tokens: usize, slot: SnapshotSlot) {
        let request_id = self.request(index).id;
        self.state_saves.push(StateSave { request_id, num_tokens, slot });
        // Others may find more than they did.
        self.blocked = None;
    }

    /// Of some places, in any order, those that a request which has computed so many tokens keeps its states at: each worth a
    /// step of its own, and none within a span.
    fn keep_states_at(&mut self, index: RequestIndex, num_computed_tokens: usize, mut places: Vec<usize>) {
        let least = self.config.min_snapshot_tokens.max(1);
        let last = self.last_boundary(self.request(index));
        places.sort_unstable();
        let mut before = num_computed_tokens;
        let Some(request) = self.requests[index].as_mut() else { return };
        places.retain(|place| {
            let is_worth_it = *place >= before + least && *place <= last && cut_span(&request.spans, *place).is_none();
            before = if is_worth_it { *place } else { before };
            is_worth_it
        });
        request.snapshot_places = places;
    }

    /// The last block boundary that leaves one of the known tokens to compute.
    fn last_boundary(&self, request: &Request) -> usize {
        let block_size = self.manager.block_size();
        (request.num_tokens() - 1) / block_size * block_size
    }

    /// Tokens in whole blocks that two requests begin with alike, each having one more at least.
    fn common_tokens(&self, one: RequestIndex, other: RequestIndex) -> usize {
        let block_size = self.manager.block_size();
        let (one, other) = (self.request(one), self.request(other));
        let (a, b) = (one.cache_key(block_size), other.cache_key(block_size));
        let most = self.last_boundary(one).min(self.last_boundary(other));
        let alike = one.tokens[..most].iter().zip(&other.tokens[..most]).take_while(|(a, b)| a == b).count();
        let is_same = |num_blocks: &usize| a.is_same_at(b, num_blocks - 1);
        (1..=alike / block_size).rev().find(is_same).unwrap_or(0) * block_size
    }
}

//! What others may see of the scheduler, and its check of itself.

use super::Scheduler;
use crate::block_pool::BlockPool;
use crate::error::IntegrityError;
use crate::ids::{BlockId, RequestId};
use crate::output::{BlockUse, KvCacheStats, PoolSnapshot, RequestView};
use crate::request::{PreemptionCost, Request, RequestStatus};
use crate::scheduler::SchedulerConfig;

impl Scheduler {
    /// Prompt and output of a request; empty if there is no such request.
    pub fn token_ids(&self, request_id: RequestId) -> &[u32] {
        self.find(request_id).map_or(&[], |request| &request.tokens)
    }

    /// How many of them are the prompt; 0 if there is no such request.
    pub fn num_prompt_tokens(&self, request_id: RequestId) -> usize {
        self.find(request_id).map_or(0, |request| request.num_prompt_tokens)
    }

    /// The block table of a request in a KV group: entry `i` is the block of tokens from `i * block_size` on, or
    /// [`BlockId::NULL`] once they left the group's window. Empty if there is no such request or group. Any entry may
    /// change in an update: become null, or another block with the same KV.
    pub fn block_table(&self, request_id: RequestId, group: usize) -> &[BlockId] {
        self.find(request_id).map_or(&[], |request| request.blocks.table(group))
    }

    /// Where a request is in its life; `None` if it is over, or never began.
    pub fn status(&self, request_id: RequestId) -> Option<RequestStatus> {
        self.find(request_id).map(|request| request.status)
    }

    /// What preemptions have cost a request so far; `None` if there is no such request.
    pub fn preemption_cost(&self, request_id: RequestId) -> Option<PreemptionCost> {
        self.find(request_id).map(|request| request.standing.cost)
    }

    /// Tokens of a request whose KV is written, and how many of its blocks have been offered to the prefix cache.
    pub fn num_computed_tokens(&self, request_id: RequestId) -> Option<(usize, usize)> {
        self.find(request_id).map(|request| (request.num_computed_tokens, request.blocks.num_published_blocks()))
    }

    /// Tokens that the next one of a request's answer takes: one, and those that are computed again behind a wrong draft; 0 while
    /// its prompt is computed, or is again.
    pub fn num_answer_tokens(&self, request_id: RequestId) -> Option<usize> {
        self.find(request_id).map(Request::num_answer_tokens)
    }

    /// The requests in the batch.
    pub fn running_requests(&self) -> impl Iterator<Item = RequestId> + '_ {
        self.running.iter().map(|index| self.request(*index).id)
    }

    /// How many they are.
    pub fn num_running(&self) -> usize {
        self.running.len()
    }

    /// Requests that wait, preempted ones included.
    pub fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Whether there is anything to do.
    pub fn has_requests(&self) -> bool {
        !self.running.is_empty() || self.waiting.len() > 0
    }

    /// The pool, to be read.
    pub fn pool(&self) -> &BlockPool {
        self.manager.pool()
    }

    /// The limits it was built with.
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// Figures for people and monitors.
    pub fn stats(&self) -> KvCacheStats {
        let pool = self.manager.pool();
        let block_size = self.manager.block_size();
        let (slots_held, slots_live) = self.slots_held_and_live();
        let snapshots = pool.snapshots().counts();
        KvCacheStats {
            blocks_total: pool.num_blocks(),
            blocks_used: pool.num_used_blocks(),
            blocks_cached: pool.num_cached_blocks(),
            blocks_free: pool.num_free_blocks(),
            blocks_shared: pool.num_shared_blocks(),
            blocks_saved: pool.num_saved_blocks(),
            block_size,
            tokens_total: pool.num_blocks() / self.num_groups() * block_size,
            prefix_queried_tokens: self.lookups.queried,
            prefix_hit_tokens: self.lookups.hit,
            prefix_missed_tokens: self.lookups.missed,
            resumed_queried_tokens: self.lookups.resumed_queried,
            resumed_hit_tokens: self.lookups.resumed_hit,
            state_snapshots_total: snapshots.total,
            state_snapshots_used: snapshots.used,
            state_snapshots_taken: snapshots.taken,
            state_snapshots_evicted: snapshots.evicted,
            preemptions: self.totals.preemptions,
            recomputed_tokens: self.totals.recomputed_tokens,
            deadlines_missed: self.totals.deadlines_missed,
            paused: self.paused,
            draining: self.draining,
            requests_running: self.running.len(),
            requests_waiting: self.waiting.len(),
            requests_kept: self.kept.len(),
            blocks_kept: self.num_kept_blocks(),
            slots_held,
            slots_live,
            steps: self.usage.steps,
            slots_held_sum: self.usage.slots_held,
            slots_live_sum: self.usage.slots_live,
            peak_blocks_used: self.usage.peak_blocks_used,
            peak_running: self.usage.peak_running,
            peak_running_before_preemption: self.usage.peak_before_preemption,
            tier: self.tier_stats(),
            drafts: self.totals.drafts,
            kv_event_blocks: pool.index().num_event_blocks(),
        }
    }

    /// What every block is used for, and every request; walks the whole pool.
    pub fn snapshot(&self) -> PoolSnapshot {
        let pool = self.manager.pool();
        let state = |id: u32| match pool.ref_cnt(BlockId(id)) {
            0 if pool.is_cached(BlockId(id)) => BlockUse::Cached,
            0 => BlockUse::Free,
            1 => BlockUse::Held(0),
            _ => BlockUse::Shared,
        };
        let mut blocks: Vec<BlockUse> = (1..=pool.num_blocks() as u32).map(state).collect();
        let queued = self.running.iter().copied().chain(self.waiting.iter());
        let mut requests = Vec::new();
        for (number, index) in queued.chain(self.kept.holding().copied()).enumerate() {
            let request = self.request(index);
            for table in &request.blocks.tables {
                for block in table {
                    if let Some(state @ BlockUse::Held(_)) = (block.0 as usize).checked_sub(1).and_then(|i| blocks.get_mut(i)) {
                        *state = BlockUse::Held(number as u32);
                    }
                }
            }
            requests.push(RequestView {
                id: request.id,
                status: request.status,
                num_tokens: request.num_tokens(),
                num_prompt_tokens: request.num_prompt_tokens,
                num_cached_tokens: request.num_cached_tokens.unwrap_or(0),
                num_computed_tokens: request.num_computed_tokens,
                num_blocks: request.blocks.num_held_blocks(),
                preemptions: request.standing.cost.preemptions,
            });
        }
        PoolSnapshot { stats: self.stats(), blocks, requests }
    }

    /// Forgets every cached prefix. What running requests computed so far is not shared any more. A tier is let go of: it is
    /// keyed by the weights that were; attach it anew.
    pub fn reset_prefix_cache(&mut self) {
        self.reclaim_all();
        self.manager.reset_prefix_cache();
        self.tier = None;
    }

    /// Checks every invariant that can be seen from inside. Walks the whole pool: for tests and debugging.
    pub fn check_integrity(&self) -> Result<(), IntegrityError> {
        let requests = || self.requests.iter().flatten();
        self.manager.check_integrity(requests().map(|request| &request.blocks))?;
        let fail = |what: String| Err(IntegrityError(what));
        let num_queued = self.running.len() + self.waiting.len() + self.kept.len();
        if num_queued != self.indices.len() || requests().count() != self.indices.len() {
            return fail("a request is lost, or queued twice".into());
        }
        if !self.running.is_sorted_by_key(|index| self.request(*index).standing.rank) {
            return fail("the running requests are out of order".into());
        }
        if requests().filter(|request| request.standing.deadline.is_some()).count() != self.deadlines.len() {
            return fail("a deadline is lost, or kept for nobody".into());
        }
        for (indices, running) in [(self.running.clone(), true), (self.waiting.iter().collect(), false)] {
            for index in indices {
                let request = self.request(index);
                let id = request.id.0;
                if (request.status == RequestStatus::Running) != running {
                    return fail(format!("request {id} is queued as what it is not"));
                }
                let (published, allocated) = (request.blocks.num_published_blocks(), request.blocks.num_blocks());
                let (computed, block_size) = (request.num_computed_tokens, self.manager.block_size());
                if published * block_size > computed
                    || computed > request.num_tokens()
                    || computed > allocated * block_size
                    || (!running && allocated > 0)
                {
                    return fail(format!(
                        "request {id}: {published} blocks published, {computed} tokens computed, {} known, {allocated} blocks",
                        request.num_tokens()
                    ));
                }
            }
        }
        Ok(())
    }
}

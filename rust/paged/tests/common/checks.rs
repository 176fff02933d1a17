//! What must hold of a step, and between any two calls.

use std::collections::{HashMap, HashSet};

use paged::*;

use super::Sim;

impl Sim {
    pub(super) fn check_output(&mut self, output: &SchedulerOutput) {
        let total: usize = output.rows.iter().map(|row| row.num_scheduled_tokens).sum();
        assert_eq!(output.drafts.len(), output.rows.iter().map(|row| row.num_drafts).sum::<usize>());
        assert_eq!(total, output.total_num_scheduled_tokens);
        assert!(total <= self.config.max_num_batched_tokens && output.rows.len() <= self.config.max_num_seqs);
        for row in &output.rows {
            assert!(row.num_scheduled_tokens > 0);
            assert!(row.num_scheduled_tokens <= self.config.max_chunk_len.unwrap_or(usize::MAX));
            let tokens = self.scheduler.token_ids(row.request_id).len();
            let end = row.num_computed_tokens + row.num_known_tokens();
            assert!(row.num_known_tokens() > 0 && end <= tokens);
            assert_eq!(row.num_outputs, if end == tokens { 1 + row.num_drafts } else { 0 });
            assert!(end + row.num_drafts < self.config.max_model_len, "a draft beyond the context");
            let (computed, _) = self.scheduler.num_computed_tokens(row.request_id).unwrap();
            assert_eq!(computed, row.num_computed_tokens, "a row that starts elsewhere than where the last one ended");
            self.cached_tokens.entry(row.request_id).or_insert(row.num_cached_tokens);
            assert_eq!(self.cached_tokens[&row.request_id], row.num_cached_tokens);
        }
        let hits: usize = self.cached_tokens.values().sum();
        let counted = self.scheduler.stats().prefix_hit_tokens;
        // Who waits for the tier has no row yet.
        assert!(hits as u64 == counted || (self.tier.is_some() && hits as u64 <= counted), "{hits} tokens, counted {counted}");
    }

    /// Rows and preemptions follow the order of rank.
    pub(super) fn check_order(&self, output: &SchedulerOutput, was_running: &[RequestId]) {
        let was_running_before = |row: &&ScheduledRequest| was_running.contains(&row.request_id);
        let old: Vec<_> = output.rows.iter().filter(was_running_before).collect();
        let admitted: Vec<_> = output.rows.iter().filter(|row| !was_running_before(row)).collect();
        assert!(old.is_sorted_by_key(|row| self.rank(row.request_id)));
        for (place, row) in output.rows.iter().enumerate() {
            // Only who is more urgent goes before one that ran already, or comes in while blocks are short.
            let priority = self.rank(row.request_id).0;
            let is_urgent = was_running.iter().any(|id| priority < self.rank(*id).0);
            let mut later = output.rows[place..].iter().filter(was_running_before);
            assert!(was_running_before(&row) || later.all(|old| priority < self.rank(old.request_id).0));
            assert!(was_running_before(&row) || is_urgent || output.preempted.is_empty(), "admitted while blocks were short");
        }
        if self.config.fairness != FairnessPolicy::Drr {
            assert!(admitted.is_sorted_by_key(|row| self.rank(row.request_id)));
            let can_go = |id: &RequestId| self.scheduler.waits_for(*id).is_none();
            let first = self.waiting().filter(can_go).map(|id| self.rank(id)).min();
            let last = admitted.last().map(|row| self.rank(row.request_id));
            assert!(first.is_none() || last < first, "admitted past one that waits");
        }
        let num_let_in = admitted.len() + usize::from(output.swap_in.is_some());
        let seats_were_taken = was_running.len() + num_let_in > self.config.max_num_seqs;
        if !output.preempted.is_empty() && !seats_were_taken {
            assert_eq!(self.scheduler.stats().blocks_kept, 0, "preempted though kept requests held blocks");
        }
        for preemption in &output.preempted {
            let (victim, in_need) = (self.rank(preemption.request_id), self.rank(preemption.in_need));
            assert!(victim >= in_need, "a request behind took the blocks");
            let cost = self.scheduler.preemption_cost(preemption.request_id).unwrap();
            assert!(
                cost.preemptions <= self.config.max_preemptions || victim.0 > in_need.0 || victim == in_need,
                "a protected request lost its blocks to an equal"
            );
            assert!(output.rows.iter().all(|row| row.request_id != preemption.request_id), "in the batch without blocks");
            let behind = |row: &&ScheduledRequest| self.rank(row.request_id) > victim;
            if self.config.victim == VictimPolicy::Newest {
                let newer = output.rows.iter().filter(behind).map(|row| row.request_id);
                for id in newer {
                    let cost = self.scheduler.preemption_cost(id).unwrap();
                    assert!(cost.preemptions >= self.config.max_preemptions, "not the newest was the victim");
                }
            }
        }
        if self.config.admission == AdmissionPolicy::Reserved {
            assert!(output.preempted.is_empty(), "a reserved request was preempted");
        }
    }

    fn waiting(&self) -> impl Iterator<Item = RequestId> + '_ {
        self.live
            .keys()
            .copied()
            .filter(|id| matches!(self.scheduler.status(*id), Some(RequestStatus::Waiting | RequestStatus::Preempted)))
    }

    /// Everything that must hold between any two calls.
    pub fn check(&mut self) {
        self.check_events();
        self.scheduler.check_integrity().unwrap();
        let pool = self.scheduler.pool();
        let stats = self.scheduler.stats();
        assert_eq!(stats.blocks_used + stats.blocks_free, stats.blocks_total);
        assert!(stats.blocks_cached <= stats.blocks_free);
        self.most_used = self.most_used.max(stats.blocks_used);
        assert_eq!(stats.requests_running + stats.requests_waiting, self.live.len());
        assert_eq!(stats.requests_kept, self.kept.len());
        for id in 1..=self.kv.num_blocks {
            if pool.is_published(BlockId(id as u32)) {
                let num_tokens = pool.num_published_tokens(BlockId(id as u32));
                assert!((1..=self.kv.block_size).contains(&num_tokens));
                for content in &self.shadow[id][..num_tokens] {
                    let content = content.expect("a published block has an unwritten slot");
                    assert!(content.committed, "a published block of a step that is not committed");
                    assert_eq!(content.generation, self.generation, "a published block of weights that are gone");
                }
            }
        }
        self.check_sharing(&stats);
        self.check_slots(&stats);
        self.check_windows();
        self.check_eviction_order();
    }

    fn check_sharing(&self, stats: &KvCacheStats) {
        let mut holders: HashMap<BlockId, usize> = HashMap::new();
        for &id in self.live.keys().chain(self.kept.keys()) {
            for group in 0..self.num_groups() {
                for block in self.scheduler.block_table(id, group).iter().filter(|block| **block != BlockId::NULL) {
                    *holders.entry(*block).or_default() += 1;
                }
            }
        }
        assert_eq!(stats.blocks_used, holders.len());
        assert_eq!(stats.blocks_shared, holders.values().filter(|count| **count > 1).count());
        assert_eq!(stats.blocks_saved, holders.values().sum::<usize>() - holders.len());
    }

    /// Live slots are those that a table and a computed position lead to; but a partial block of several holders counts
    /// as written.
    fn check_slots(&self, stats: &KvCacheStats) {
        let block_size = self.kv.block_size;
        let (mut live, mut partial) = (HashSet::new(), HashSet::new());
        for &id in self.live.keys().chain(self.kept.keys()) {
            let (computed, _) = self.scheduler.num_computed_tokens(id).unwrap();
            for group in 0..self.num_groups() {
                let table = self.scheduler.block_table(id, group);
                live.extend((0..computed).map(|key| (table[key / block_size], key % block_size)));
                if !computed.is_multiple_of(block_size) {
                    partial.insert(table[computed / block_size]);
                }
            }
        }
        live.retain(|(block, _)| *block != BlockId::NULL);
        partial.retain(|block| self.scheduler.pool().ref_cnt(*block) > 1);
        assert_eq!(stats.slots_held, stats.blocks_used * block_size);
        let guessed = (0..block_size).flat_map(|offset| partial.iter().map(move |block| (*block, offset)));
        let expected = live.len() + guessed.filter(|slot| !live.contains(slot)).count();
        assert_eq!(stats.slots_live, expected);
    }

    /// Window groups hold every block that a query from the last block boundary on can see, and none that one which
    /// computes the last token again cannot.
    fn check_windows(&self) {
        if self.config.reserve_full_context {
            return;
        }
        for &id in self.live.keys() {
            let (computed, _) = self.scheduler.num_computed_tokens(id).unwrap();
            let block_size = self.kv.block_size;
            for (group, members) in self.kv.groups.groups.iter().enumerate() {
                let Some(window) = members.retention.window() else { continue };
                for (index, block) in self.scheduler.block_table(id, group).iter().enumerate() {
                    let is_seen_from = |boundary| (index + 1) * block_size - 1 + window > boundary;
                    let (last, next) = (computed.saturating_sub(1) / block_size * block_size, computed / block_size * block_size);
                    assert!(*block != BlockId::NULL || !is_seen_from(next), "block {index} is gone at {computed}");
                    assert!(*block == BlockId::NULL || is_seen_from(last), "block {index} is held at {computed}");
                }
            }
        }
    }

    /// Of blocks freed together, a prefix outlives what extends it.
    fn check_eviction_order(&mut self) {
        self.clock += 1;
        let pool = self.scheduler.pool();
        let free: Vec<_> = pool.free_block_ids().collect();
        let mut is_free = vec![false; self.was_free.len()];
        let mut place_of_prefix = HashMap::new();
        for (place, block) in free.iter().enumerate() {
            let id = block.0 as usize;
            is_free[id] = true;
            if !self.was_free[id] {
                self.freed_at[id] = self.clock;
            }
            let num_tokens = pool.num_published_tokens(*block);
            if num_tokens > 0
                && let Some(content) = self.shadow[id][num_tokens - 1]
            {
                place_of_prefix.insert((content.group, content.prefix), (place, id, num_tokens));
            }
        }
        self.was_free = is_free;
        for (&(group, prefix), &(place, id, num_tokens)) in &place_of_prefix {
            if self.kv.groups.groups[group].retention.window().is_some() {
                continue;
            }
            let mut ancestor = prefix;
            for _ in 0..num_tokens {
                ancestor = self.prefixes.parents[ancestor];
            }
            if let Some(&(ancestor_place, ancestor_id, _)) = place_of_prefix.get(&(group, ancestor)) {
                assert!(
                    place < ancestor_place || self.freed_at[id] > self.freed_at[ancestor_id],
                    "a prefix goes before what extends it"
                );
            }
        }
    }
}

//! What a step does to the slots: copies, writes, reads.

use std::collections::HashMap;

use paged::*;

use super::drafts::next_token;
use super::{Content, Sim};

impl Sim {
    /// Prefixes that end at each token of each row's request, its drafts included.
    fn chains(&mut self, output: &SchedulerOutput) -> HashMap<RequestId, Vec<usize>> {
        let mut drafts = output.drafts.as_slice();
        let mut chains = HashMap::new();
        for row in &output.rows {
            let (own, others) = drafts.split_at(row.num_drafts);
            drafts = others;
            let tokens = [self.scheduler.token_ids(row.request_id), own].concat();
            chains.insert(row.request_id, self.prefixes.chain(&self.live[&row.request_id], &tokens));
        }
        chains
    }

    pub(super) fn num_groups(&self) -> usize {
        self.kv.groups.groups.len()
    }

    fn for_each_written(&mut self, output: &SchedulerOutput, mut visit: impl FnMut(&mut Self, BlockId, usize, usize, RequestId)) {
        for row in &output.rows {
            for position in row.num_computed_tokens..row.num_computed_tokens + row.num_scheduled_tokens {
                for group in 0..self.num_groups() {
                    let Some(&block) = self.scheduler.block_table(row.request_id, group).get(position / self.kv.block_size)
                    else {
                        continue;
                    };
                    visit(self, block, position, group, row.request_id);
                }
            }
        }
    }

    pub(super) fn copy(&mut self, output: &SchedulerOutput) {
        for (source, destination) in &output.copies {
            let pool = self.scheduler.pool();
            assert!(output.copies.iter().all(|copy| copy.0 != *destination), "a copy of a copy");
            assert_eq!((pool.ref_cnt(*destination), pool.is_published(*destination)), (1, false));
            self.shadow[destination.0 as usize] = self.shadow[source.0 as usize].clone();
        }
    }

    pub(super) fn write(&mut self, output: &SchedulerOutput) {
        let chains = self.chains(output);
        self.written.clear();
        self.for_each_written(output, |sim, block, position, group, id| {
            assert_ne!(block, BlockId::NULL, "a write to the null block");
            assert_eq!(sim.scheduler.pool().ref_cnt(block), 1, "a write to a shared block");
            assert!(!sim.scheduler.pool().is_published(block), "a write to a published block");
            let offset = position % sim.kv.block_size;
            sim.written.push((id, position, block.0 as usize, offset));
            let block = &mut sim.shadow[block.0 as usize];
            if offset == 0 {
                block.fill(None);
            }
            let generation = sim.generation;
            block[offset] = Some(Content { group, prefix: chains[&id][position], committed: false, generation });
        });
        assert_eq!(self.written.len(), output.total_num_scheduled_tokens * self.num_groups(), "a token without a slot");
    }

    /// Reads all that attention would, and samples: the next token is a function of what was read. Drafts are accepted as far as
    /// they are what is sampled, or less far, as by a caller that stops there.
    pub(super) fn read(&mut self, output: &SchedulerOutput) -> Vec<(RequestId, Vec<u32>)> {
        let mut sampled = Vec::new();
        let chains = self.chains(output);
        let mut drafts = output.drafts.as_slice();
        for row in &output.rows {
            let chain = &chains[&row.request_id];
            let (own, others) = drafts.split_at(row.num_drafts);
            drafts = others;
            let end = row.num_computed_tokens + row.num_scheduled_tokens;
            for query in row.num_computed_tokens..end {
                for (group, members) in self.kv.groups.groups.iter().enumerate() {
                    let table = self.scheduler.block_table(row.request_id, group);
                    let first = members.retention.window().map_or(0, |window| (query + 1).saturating_sub(window));
                    for key in first..=query {
                        let block = table[key / self.kv.block_size];
                        assert_ne!(block, BlockId::NULL, "query {query} reads key {key} from the null block");
                        let content = self.shadow[block.0 as usize][key % self.kv.block_size];
                        let content = content.unwrap_or_else(|| panic!("query {query} reads unwritten key {key}"));
                        assert_eq!((content.group, content.prefix), (group, chain[key]), "wrong KV at key {key}");
                    }
                }
            }
            if row.num_outputs > 0 {
                let next = |prefix: &usize| next_token(*prefix);
                let outputs: Vec<_> = chain[end - row.num_outputs..end].iter().map(next).collect();
                let num_right = own.iter().zip(&outputs).take_while(|(draft, output)| draft == output).count();
                let most = self.draw(1 + num_right as u64, 8).map_or(usize::MAX, |taken| 1 + taken as usize);
                sampled.push((row.request_id, outputs[..(1 + num_right).min(most)].to_vec()));
            }
        }
        sampled
    }

    /// What was written is committed, but for the drafts that were not accepted: nothing may read those.
    pub(super) fn commit(&mut self, output: &SchedulerOutput, sampled: &[(RequestId, &[u32])]) {
        let rows: HashMap<_, _> = output.rows.iter().map(|row| (row.request_id, row)).collect();
        let num_accepted: HashMap<_, _> = sampled.iter().map(|(id, tokens)| (*id, tokens.len() - 1)).collect();
        self.count_drafts(num_accepted.values().sum(), output.drafts.len());
        // By slot, not by table: a table may have let go of a block already.
        for &(id, position, block, offset) in &self.written {
            let num_accepted = num_accepted.get(&id).copied().unwrap_or(0);
            let end = rows[&id].num_computed_tokens + rows[&id].num_known_tokens() + num_accepted;
            let slot = &mut self.shadow[block][offset];
            *slot = slot.filter(|_| position < end).map(|content| Content { committed: true, ..content });
        }
        self.check_no_lookahead(output);
    }

    /// Nobody holds more than its computed tokens need.
    fn check_no_lookahead(&self, output: &SchedulerOutput) {
        let running = |row: &&ScheduledRequest| self.scheduler.status(row.request_id) == Some(RequestStatus::Running);
        for row in output.rows.iter().filter(running).filter(|_| !self.config.reserve_full_context) {
            let (computed, _) = self.scheduler.num_computed_tokens(row.request_id).unwrap();
            let num_blocks = self.scheduler.block_table(row.request_id, 0).len();
            assert_eq!(num_blocks, computed.div_ceil(self.kv.block_size), "blocks behind {computed} computed tokens");
        }
    }

    pub(super) fn fail(&mut self, output: &SchedulerOutput) {
        for content in self.shadow.iter_mut().flatten() {
            if content.is_some_and(|content| !content.committed) {
                *content = None;
            }
        }
        for (_, destination) in &output.copies {
            self.shadow[destination.0 as usize].fill(None);
        }
        let tokens: HashMap<_, _> =
            output.rows.iter().map(|row| (row.request_id, self.scheduler.token_ids(row.request_id).to_vec())).collect();
        let left = self.scheduler.step_failed(output);
        assert!(self.scheduler.step_failed(output).is_empty());
        for row in &output.rows {
            assert_eq!(left.contains(&row.request_id), self.live.contains_key(&row.request_id));
            let status = self.scheduler.status(row.request_id);
            assert_eq!(status, self.kept.contains_key(&row.request_id).then_some(RequestStatus::Kept));
        }
        for request_id in left {
            self.end(request_id, tokens[&request_id].clone());
        }
    }
}

//! What a step does to the slots: copies, writes, reads.

use std::collections::HashMap;

use paged::*;

use super::{Content, Sim};

impl Sim {
    pub(super) fn chain(&mut self, request_id: RequestId) -> Vec<usize> {
        let tokens = self.scheduler.token_ids(request_id).to_vec();
        let owner = &self.live[&request_id];
        self.prefixes.chain(owner, &tokens)
    }

    pub(super) fn num_groups(&self) -> usize {
        self.kv.groups.groups.len()
    }

    fn for_each_written(&mut self, output: &SchedulerOutput, mut visit: impl FnMut(&mut Self, BlockId, usize, usize, usize)) {
        for row in &output.rows {
            for position in row.num_computed_tokens..row.num_computed_tokens + row.num_scheduled_tokens {
                for group in 0..self.num_groups() {
                    let Some(&block) = self.scheduler.block_table(row.request_id, group).get(position / self.kv.block_size)
                    else {
                        continue;
                    };
                    visit(self, block, position, group, row.request_id.0 as usize);
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
        let chains: HashMap<_, _> =
            output.rows.iter().map(|row| (row.request_id.0 as usize, self.chain(row.request_id))).collect();
        let mut num_written = 0;
        self.for_each_written(output, |sim, block, position, group, id| {
            assert_ne!(block, BlockId::NULL, "a write to the null block");
            assert_eq!(sim.scheduler.pool().ref_cnt(block), 1, "a write to a shared block");
            assert!(!sim.scheduler.pool().is_published(block), "a write to a published block");
            let offset = position % sim.kv.block_size;
            let block = &mut sim.shadow[block.0 as usize];
            if offset == 0 {
                block.fill(None);
            }
            let generation = sim.generation;
            block[offset] = Some(Content { group, prefix: chains[&id][position], committed: false, generation });
            num_written += 1;
        });
        assert_eq!(num_written, output.total_num_scheduled_tokens * self.num_groups(), "a token without a slot");
    }

    /// Reads all that attention would, and samples: the next token is a function of what was read.
    pub(super) fn read(&mut self, output: &SchedulerOutput) -> Vec<(RequestId, u32)> {
        let mut sampled = Vec::new();
        for row in &output.rows {
            let chain = self.chain(row.request_id);
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
            if row.sample {
                sampled.push((row.request_id, (chain[end - 1] % 3) as u32));
            }
        }
        sampled
    }

    pub(super) fn commit(&mut self, output: &SchedulerOutput) {
        // By prefix, not by table: a table may have let go of a block already.
        let written: Vec<_> = self.shadow.iter_mut().flatten().flatten().filter(|content| !content.committed).collect();
        assert!(written.len() <= output.total_num_scheduled_tokens * self.kv.groups.groups.len());
        for content in written {
            content.committed = true;
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

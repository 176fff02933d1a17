//! A simulated engine around the real scheduler, with a shadow of every slot of the KV cache.
//!
//! The shadow knows what each slot really holds: which prefix (identity and tokens, exactly) the KV in it was
//! computed from, and whether the step that wrote it was committed. Every attention read of every step is made
//! against it. KV that is not there, not yet written, or of another prefix fails the test at once.

#![allow(dead_code)]

mod tier;

use std::collections::{HashMap, HashSet};

use paged::*;
#[allow(unused_imports)]
pub use tier::{FakeTier, tier_config};

/// Numbers prefixes: equal numbers are equal prefixes, without any hashing that could collide.
#[derive(Default)]
pub struct Prefixes {
    ids: HashMap<(usize, u32), usize>,
    texts: HashMap<(usize, Vec<u8>), usize>,
    parents: Vec<usize>,
}

impl Prefixes {
    fn push(&mut self, parent: usize) -> usize {
        self.parents.push(parent);
        self.parents.len() - 1
    }

    fn text(&mut self, parent: usize, text: &[u8]) -> usize {
        if let Some(&id) = self.texts.get(&(parent, text.to_vec())) {
            return id;
        }
        let id = self.push(parent);
        self.texts.insert((parent, text.to_vec()), id);
        id
    }

    /// Numbers of the prefixes that end at each token.
    pub fn chain(&mut self, owner: &Owner, tokens: &[u32]) -> Vec<usize> {
        let mut at = self.text(usize::MAX, &owner.identity);
        let mut chain = Vec::new();
        for (position, &token) in tokens.iter().enumerate() {
            if position == owner.num_public_tokens && !owner.salt.is_empty() {
                at = self.text(at, &owner.salt);
            }
            at = if let Some(&id) = self.ids.get(&(at, token)) {
                id
            } else {
                let id = self.push(at);
                self.ids.insert((at, token), id);
                id
            };
            chain.push(at);
        }
        chain
    }
}

/// Whose KV is whose.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Owner {
    pub identity: Vec<u8>,
    pub salt: Vec<u8>,
    /// As asked for; those in whole blocks are public.
    pub public_prefix_len: usize,
    pub num_public_tokens: usize,
    pub skip_prefix_lookup: bool,
}

impl Owner {
    pub fn new(identity: &[u8]) -> Self {
        Self { identity: identity.to_vec(), ..Self::default() }
    }

    /// The owner of a request with a prompt of so many tokens, none behind which is public.
    fn with_prompt(&self, num_prompt_tokens: usize, block_size: usize) -> Self {
        let public_prefix_len = self.public_prefix_len.min(num_prompt_tokens);
        Self { public_prefix_len, num_public_tokens: public_prefix_len / block_size * block_size, ..self.clone() }
    }

    pub fn salted(salt: &[u8], public_prefix_len: usize) -> Self {
        Self { salt: salt.to_vec(), public_prefix_len, ..Self::default() }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Content {
    group: usize,
    prefix: usize,
    committed: bool,
    generation: u64,
}

pub struct Sim {
    pub scheduler: Scheduler,
    pub kv: KvCacheConfig,
    config: SchedulerConfig,
    prefixes: Prefixes,
    /// `[num_blocks + 1][block_size]`
    shadow: Vec<Vec<Option<Content>>>,
    pub live: HashMap<RequestId, Owner>,
    pub kept: HashMap<RequestId, Owner>,
    /// Generation of the weights, moved on by a reset of the prefix cache.
    generation: u64,
    next_id: u64,
    /// What each request that ended had: prompt and output.
    pub ended: Vec<(RequestId, Owner, Vec<u32>)>,
    pub finished: Vec<(RequestId, FinishReason)>,
    pub preempted: Vec<Preemption>,
    deadlines: HashMap<RequestId, Option<u64>>,
    now: u64,
    /// When a block was last seen to become free, for the eviction order.
    freed_at: Vec<u64>,
    was_free: Vec<bool>,
    clock: u64,
    /// Most blocks in use at any time, with a step in flight or not.
    pub most_used: usize,
    pub cached_tokens: HashMap<RequestId, usize>,
    /// Priority, deadline, arrival and branch of every request there was: the order in which they rank.
    ranking: HashMap<RequestId, (i32, u64, u64, u64)>,
    output: SchedulerOutput,
    pub tier: Option<FakeTier>,
}

pub fn same_hash(_key: &[u8; 32], _input: HashInput<'_>) -> BlockHash {
    BlockHash([0; 16])
}

pub fn kv_config(num_blocks: usize, block_size: usize, windows: &[Option<usize>]) -> KvCacheConfig {
    let groups = KvGroups::from_layers(windows);
    KvCacheConfig { num_blocks, block_size, groups, enable_prefix_caching: true, hash_key: [3; 32] }
}

pub fn scheduler_config(max_num_seqs: usize, max_num_batched_tokens: usize, max_model_len: usize) -> SchedulerConfig {
    SchedulerConfig::new(max_num_seqs, max_num_batched_tokens, max_model_len)
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StepResult {
    Idle,
    Done,
    Failed,
}

/// What may happen while a step is in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Meanwhile {
    Abort(usize),
    Keep(usize),
    Reset,
}

impl Sim {
    pub fn new(config: SchedulerConfig, kv: KvCacheConfig) -> Self {
        let hasher = BlockHasher::new(kv.hash_key);
        Self::with_hasher(config, kv, hasher)
    }

    pub fn with_hasher(config: SchedulerConfig, kv: KvCacheConfig, hasher: BlockHasher) -> Self {
        let num_ids = kv.num_blocks + 1;
        Self {
            scheduler: Scheduler::with_hasher(config.clone(), kv.clone(), hasher).unwrap(),
            prefixes: Prefixes::default(),
            shadow: vec![vec![None; kv.block_size]; num_ids],
            live: HashMap::new(),
            kept: HashMap::new(),
            generation: 0,
            next_id: 0,
            ended: Vec::new(),
            finished: Vec::new(),
            preempted: Vec::new(),
            deadlines: HashMap::new(),
            now: 0,
            freed_at: vec![0; num_ids],
            was_free: vec![true; num_ids],
            clock: 0,
            most_used: 0,
            cached_tokens: HashMap::new(),
            ranking: HashMap::new(),
            output: SchedulerOutput::default(),
            tier: None,
            config,
            kv,
        }
    }

    pub fn add(&mut self, tokens: &[u32], max_tokens: usize) -> Result<RequestId, AdmissionError> {
        self.add_with(tokens, max_tokens, &Owner::default())
    }

    pub fn add_with(&mut self, tokens: &[u32], max_tokens: usize, owner: &Owner) -> Result<RequestId, AdmissionError> {
        self.add_request(NewRequest::new(RequestId(0), tokens.to_vec(), max_tokens), owner)
    }

    /// Adds a request of `owner` under the next free id.
    pub fn add_request(&mut self, new: NewRequest, owner: &Owner) -> Result<RequestId, AdmissionError> {
        let request_id = RequestId(self.next_id);
        let deadline = self.deadline_in_rank(new.deadline);
        let rank = (new.priority, deadline, self.next_id, self.next_id);
        let num_prompt_tokens = new.prompt_token_ids.len();
        self.deadlines.insert(request_id, new.deadline);
        self.scheduler.add_request(NewRequest {
            request_id,
            identity: owner.identity.clone(),
            cache_salt: owner.salt.clone(),
            public_prefix_len: owner.public_prefix_len,
            skip_prefix_lookup: owner.skip_prefix_lookup,
            ..new
        })?;
        self.next_id += 1;
        self.live.insert(request_id, owner.with_prompt(num_prompt_tokens, self.kv.block_size));
        self.ranking.insert(request_id, rank);
        Ok(request_id)
    }

    fn deadline_in_rank(&self, deadline: Option<u64>) -> u64 {
        deadline.filter(|_| self.config.fairness != FairnessPolicy::Fcfs).unwrap_or(u64::MAX)
    }

    /// A child of `source` with its first `cut` tokens, `more` behind them, and at most 4 of its own.
    pub fn fork(&mut self, source: RequestId, cut: Option<usize>, more: &[u32]) -> Result<RequestId, ForkError> {
        let mut expected = self.scheduler.token_ids(source).to_vec();
        let request_id = RequestId(self.next_id);
        let child = ForkRequest { num_source_tokens: cut, token_ids: more.to_vec(), ..ForkRequest::new(request_id, 4) };
        let stats = self.scheduler.stats();
        if let Err(error) = self.scheduler.fork(source, child) {
            assert_eq!(self.scheduler.stats(), stats);
            self.check();
            return Err(error);
        }
        self.next_id += 1;
        expected.truncate(cut.unwrap_or(expected.len()));
        expected.extend(more);
        assert_eq!(self.scheduler.token_ids(request_id), expected);
        assert_eq!(self.scheduler.stats().blocks_used, stats.blocks_used, "a fork takes no block");
        let (owner, arrival) = match self.live.get(&source) {
            Some(owner) => (owner, self.rank(source).2),
            None => (&self.kept[&source], request_id.0),
        };
        self.live.insert(request_id, owner.with_prompt(expected.len() - more.len(), self.kv.block_size));
        self.deadlines.insert(request_id, None);
        self.ranking.insert(request_id, (0, u64::MAX, arrival, request_id.0));
        self.check();
        Ok(request_id)
    }

    pub fn rank(&self, request_id: RequestId) -> (i32, u64, u64, u64) {
        self.ranking[&request_id]
    }

    fn end(&mut self, request_id: RequestId, tokens: Vec<u32>) {
        if let Some(owner) = self.live.remove(&request_id) {
            self.ended.push((request_id, owner, tokens));
        }
    }

    /// The `k`th live request, in order of id.
    pub fn pick(&self, k: usize) -> Option<RequestId> {
        let mut ids: Vec<_> = self.live.keys().copied().collect();
        ids.sort();
        (!ids.is_empty()).then(|| ids[k % ids.len()])
    }

    pub fn keep(&mut self, request_id: RequestId) {
        let tokens = self.scheduler.token_ids(request_id).to_vec();
        assert!(self.scheduler.keep_request(request_id));
        assert!(!self.scheduler.keep_request(request_id));
        assert_eq!(self.scheduler.token_ids(request_id), tokens);
        self.kept.insert(request_id, self.live[&request_id].clone());
        self.end(request_id, tokens);
        self.check();
    }

    pub fn release(&mut self, request_id: RequestId) {
        assert!(self.scheduler.release(request_id));
        assert!(!self.scheduler.release(request_id));
        self.kept.remove(&request_id);
        self.check();
    }

    /// The `k`th kept request, in order of id.
    pub fn pick_kept(&self, k: usize) -> Option<RequestId> {
        let mut ids: Vec<_> = self.kept.keys().copied().collect();
        ids.sort();
        (!ids.is_empty()).then(|| ids[k % ids.len()])
    }

    pub fn abort(&mut self, request_id: RequestId) {
        let tokens = self.scheduler.token_ids(request_id).to_vec();
        assert!(self.scheduler.abort_request(request_id));
        assert!(!self.scheduler.abort_request(request_id));
        self.end(request_id, tokens);
        self.check();
    }

    pub fn reset(&mut self) {
        self.scheduler.reset_prefix_cache();
        self.generation += 1;
        self.tell_of_tier();
        assert_eq!(self.scheduler.stats().blocks_cached, 0);
        self.check();
    }

    pub fn tick(&mut self, ticks: u64) {
        self.now += ticks;
        self.scheduler.set_now(self.now);
    }

    /// Rows of the last step.
    pub fn last_rows(&self) -> &[ScheduledRequest] {
        &self.output.rows
    }

    /// One step. With `fail` the device fails, and what it has written or copied is not to be trusted; `meanwhile` befalls a
    /// request while the step runs.
    pub fn step(&mut self, fail: bool, meanwhile: Option<Meanwhile>) -> StepResult {
        let before: HashMap<_, _> = self.live.keys().map(|&id| (id, self.scheduler.token_ids(id).to_vec())).collect();
        let had_requests = self.scheduler.has_requests();
        let is_running = |id: &&RequestId| self.scheduler.status(**id) == Some(RequestStatus::Running);
        let was_running: Vec<_> = self.live.keys().filter(is_running).copied().collect();
        let mut output = std::mem::take(&mut self.output);
        self.scheduler.schedule_into(&mut output);
        self.check_output(&output);
        self.check_order(&output, &was_running);
        self.preempted.extend(&output.preempted);
        let progress = !output.rows.is_empty() || !output.finished.is_empty() || output.swap_in.is_some();
        let paused = self.scheduler.is_paused();
        assert!(!had_requests || progress || paused, "no progress with {:?}", self.scheduler.stats());
        assert!(output.rows.is_empty() || !paused, "a step during a pause");
        assert_eq!(output.stuck, None);
        for &(request_id, reason) in &output.finished {
            assert!(reason != FinishReason::Deadline || self.deadlines[&request_id].is_some_and(|at| at <= self.now));
            self.finished.push((request_id, reason));
            self.end(request_id, before[&request_id].clone());
        }
        assert!(self.live.keys().all(|id| self.deadlines[id].is_none_or(|at| at > self.now)), "served past its deadline");
        self.swap_out();
        self.swap_in(&output);
        self.copy(&output);
        self.write(&output);
        self.check();
        let sampled = self.read(&output);
        let mut result = StepResult::Done;
        if output.rows.is_empty() {
            result = StepResult::Idle;
        } else {
            assert!(self.scheduler.schedule().rows.is_empty(), "a second step while one is in flight");
            match meanwhile {
                Some(Meanwhile::Abort(k)) => self.pick(k).into_iter().for_each(|request_id| self.abort(request_id)),
                Some(Meanwhile::Keep(k)) => self.pick(k).into_iter().for_each(|request_id| self.keep(request_id)),
                Some(Meanwhile::Reset) => self.reset(),
                None => {}
            }
            if fail {
                self.fail(&output);
                result = StepResult::Failed;
            } else {
                self.scheduler.update(&output, &sampled).unwrap();
                assert!(self.scheduler.update(&output, &sampled).is_err(), "a step was taken twice");
                self.commit(&output);
            }
        }
        self.output = output;
        self.check();
        result
    }

    /// Steps until every request has ended; then lets go of the kept ones as well.
    pub fn drain(&mut self) {
        self.run();
        while let Some(request_id) = self.pick_kept(0) {
            self.release(request_id);
        }
        self.check_idle();
    }

    /// Steps until every request has ended.
    pub fn run(&mut self) {
        self.scheduler.resume();
        // The first request advances in every step; without its KV it starts over for each token.
        let mut most = self.live.len() * (self.config.max_model_len + 1) + 1;
        if !self.config.retain_kv {
            most *= self.config.max_model_len;
        }
        if self.tier.is_some() {
            // An admission may take a step of its own, to fetch.
            most *= 2;
        }
        for _ in 0..most {
            if !self.scheduler.has_requests() {
                break;
            }
            self.step(false, None);
        }
        assert!(!self.scheduler.has_requests(), "still {:?} after {most} steps", self.scheduler.stats());
    }

    pub fn check_idle(&mut self) {
        let stats = self.scheduler.stats();
        assert_eq!((stats.blocks_used, stats.blocks_free), (0, stats.blocks_total));
        assert_eq!((stats.requests_running, stats.requests_waiting), (0, 0));
        assert_eq!((stats.requests_kept, stats.blocks_kept), (0, 0));
        assert!(self.live.is_empty());
        self.check();
    }

    fn check_output(&mut self, output: &SchedulerOutput) {
        let total: usize = output.rows.iter().map(|row| row.num_scheduled_tokens).sum();
        assert_eq!(total, output.total_num_scheduled_tokens);
        assert!(total <= self.config.max_num_batched_tokens && output.rows.len() <= self.config.max_num_seqs);
        for row in &output.rows {
            assert!(row.num_scheduled_tokens > 0);
            assert!(row.num_scheduled_tokens <= self.config.max_chunk_len.unwrap_or(usize::MAX));
            let tokens = self.scheduler.token_ids(row.request_id).len();
            let end = row.num_computed_tokens + row.num_scheduled_tokens;
            assert!(end <= tokens && row.sample == (end == tokens));
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
    fn check_order(&self, output: &SchedulerOutput, was_running: &[RequestId]) {
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

    fn chain(&mut self, request_id: RequestId) -> Vec<usize> {
        let tokens = self.scheduler.token_ids(request_id).to_vec();
        let owner = &self.live[&request_id];
        self.prefixes.chain(owner, &tokens)
    }

    fn num_groups(&self) -> usize {
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

    fn copy(&mut self, output: &SchedulerOutput) {
        for (source, destination) in &output.copies {
            let pool = self.scheduler.pool();
            assert!(output.copies.iter().all(|copy| copy.0 != *destination), "a copy of a copy");
            assert_eq!((pool.ref_cnt(*destination), pool.is_published(*destination)), (1, false));
            self.shadow[destination.0 as usize] = self.shadow[source.0 as usize].clone();
        }
    }

    fn write(&mut self, output: &SchedulerOutput) {
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
    fn read(&mut self, output: &SchedulerOutput) -> Vec<(RequestId, u32)> {
        let mut sampled = Vec::new();
        for row in &output.rows {
            let chain = self.chain(row.request_id);
            let end = row.num_computed_tokens + row.num_scheduled_tokens;
            for query in row.num_computed_tokens..end {
                for (group, members) in self.kv.groups.groups.iter().enumerate() {
                    let table = self.scheduler.block_table(row.request_id, group);
                    let first = members.window.map_or(0, |window| (query + 1).saturating_sub(window));
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

    fn commit(&mut self, output: &SchedulerOutput) {
        // By prefix, not by table: a table may have let go of a block already.
        let written: Vec<_> = self.shadow.iter_mut().flatten().flatten().filter(|content| !content.committed).collect();
        assert!(written.len() <= output.total_num_scheduled_tokens * self.kv.groups.groups.len());
        for content in written {
            content.committed = true;
        }
    }

    fn fail(&mut self, output: &SchedulerOutput) {
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

    /// Everything that must hold between any two calls.
    pub fn check(&mut self) {
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
                let Some(window) = members.window else { continue };
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
            if self.kv.groups.groups[group].window.is_some() {
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

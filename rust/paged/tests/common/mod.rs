//! A simulated engine around the real scheduler, with a shadow of every slot of the KV cache.
//!
//! The shadow knows what each slot really holds: which prefix (identity and tokens, exactly) the KV in it was
//! computed from, and whether the step that wrote it was committed. Every attention read of every step is made
//! against it. KV that is not there, not yet written, or of another prefix fails the test at once.

#![allow(dead_code)]

mod checks;
mod drafts;
mod events;
mod prefixes;
mod shadow;
mod tier;

use std::collections::HashMap;

pub use events::Consumer;
use paged::*;
pub use prefixes::{Owner, Prefixes};
#[allow(unused_imports)]
pub use tier::{FakeTier, tier_config};

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
    drafts: Option<drafts::Drafts>,
    pub consumer: Option<Consumer>,
    /// Slots that the step in flight writes: request, position, block and offset.
    written: Vec<(RequestId, usize, usize, usize)>,
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
            drafts: None,
            consumer: None,
            written: Vec::new(),
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
        let without_drafts = self.propose();
        self.scheduler.schedule_into(&mut output);
        if let Some(expected) = &without_drafts {
            drafts::check_only_drafts_are_added(&output, expected);
        }
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
                let tokens: Vec<_> = sampled.iter().map(|(id, tokens)| (*id, &tokens[..])).collect();
                self.scheduler.update(&output, &tokens).unwrap();
                assert!(self.scheduler.update(&output, &tokens).is_err(), "a step was taken twice");
                self.commit(&output, &tokens);
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
}

//! Who runs next.
//!
//! There is no prefill and no decode: in each step every running request's `num_computed_tokens` catches up with its
//! `num_tokens`, within one budget of tokens. Requests are totally ordered by arrival. That order rules admission
//! and preemption alike, so every running request is ahead of every waiting one, and the victim of a preemption is
//! always the last to have arrived: nobody loses blocks to a request behind it.
//!
//! Progress: a `schedule` that finds a request and no step in flight computes at least one token or finishes at
//! least one request. The first running request gets a token because all behind it can be preempted; if it is alone
//! and still finds no block, the pool is too small for it and it ends with `Length`. If nobody runs, all blocks are
//! free, and the first waiting request gets at least one token's: its prompt was checked when it was added, and what it
//! generated since it held beside others.

mod demand;
mod inspect;
mod prefix;
mod sharing;
mod usage;

use std::collections::{HashMap, VecDeque};

use crate::block_hash::BlockHasher;
use crate::error::{AdmissionError, InvalidSchedulerConfig, UpdateError};
use crate::kv_cache_manager::{KvCacheManager, PrefixHit, RequestBlocks};
use crate::kv_groups::KvGroups;
use crate::output::{ScheduledRequest, SchedulerOutput};
use crate::request::{FinishReason, NewRequest, Request, RequestId, RequestStatus};

use prefix::{LookupCounts, commit_request, free_request};

/// Limits of a step and of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Most requests in a step.
    pub max_num_seqs: usize,
    /// Most tokens in a step.
    pub max_num_batched_tokens: usize,
    /// Most tokens of a request, prompt and answer together.
    pub max_model_len: usize,
    /// Most tokens of one request in a step; `None`: as many as the step has room for.
    pub max_chunk_len: Option<usize>,
    /// `false` drops a request's blocks after each token it generates and computes them anew: slow, exact, and
    /// without a prefix cache.
    pub retain_kv: bool,
    /// Gives each request the blocks of `max_model_len` tokens when it is admitted, and keeps them: the baseline
    /// that paging improves on.
    pub reserve_full_context: bool,
}

/// The KV memory that the scheduler hands out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvCacheConfig {
    /// Usable blocks. The cache engine allocates one more, for the null block with id 0.
    pub num_blocks: usize,
    /// Tokens a block.
    pub block_size: usize,
    /// How the layers share the blocks.
    pub groups: KvGroups,
    /// Whether prefixes are looked up and kept.
    pub enable_prefix_caching: bool,
    /// Key of the block hash; random for each process.
    pub hash_key: [u8; 32],
}

/// Of a pool's blocks, the part that admissions leave free so that running requests can grow: one in so many.
const WATERMARK_DIVISOR: usize = 100;

type Slot = usize;

/// Decides the batch of every step and keeps the KV books. Owned by one thread; no clock, no randomness.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    manager: KvCacheManager,
    requests: Vec<Option<Request>>,
    vacant: Vec<Slot>,
    slots: HashMap<RequestId, Slot>,
    /// In order of arrival, all ahead of `waiting`.
    running: Vec<Slot>,
    /// In order of arrival.
    waiting: VecDeque<Slot>,
    last_step_id: u64,
    in_flight: Option<u64>,
    /// After a preemption nobody is admitted until so many blocks are free.
    admission_closed_below: usize,
    lookups: LookupCounts,
    preemptions: u64,
    totals: usage::StepTotals,
}

impl Scheduler {
    /// A scheduler over an empty pool.
    pub fn new(config: SchedulerConfig, kv: KvCacheConfig) -> Result<Self, InvalidSchedulerConfig> {
        let hasher = BlockHasher::new(kv.hash_key);
        Self::with_hasher(config, kv, hasher)
    }

    /// As [`Self::new`], with another block hash; `kv.hash_key` is not used.
    pub fn with_hasher(config: SchedulerConfig, kv: KvCacheConfig, hasher: BlockHasher) -> Result<Self, InvalidSchedulerConfig> {
        let at_least = |field, value, least, requirement| {
            if value < least { Err(InvalidSchedulerConfig { field, value, requirement }) } else { Ok(()) }
        };
        at_least("max_num_seqs", config.max_num_seqs, 1, "at least 1 is needed")?;
        at_least("max_num_batched_tokens", config.max_num_batched_tokens, 1, "at least 1 is needed")?;
        at_least("max_model_len", config.max_model_len, 2, "at least 2 are needed, a prompt token and an answer")?;
        at_least("max_chunk_len", config.max_chunk_len.unwrap_or(1), 1, "at least 1 is needed")?;
        at_least("block_size", kv.block_size, 1, "at least 1 is needed")?;
        let num_groups = kv.groups.groups.len();
        at_least("number of KV groups", num_groups, 1, "at least 1 is needed")?;
        at_least("num_blocks", kv.num_blocks, num_groups, "at least 1 for each KV group is needed")?;
        let num_blocks = match u32::try_from(kv.num_blocks) {
            Ok(num_blocks) if num_blocks < u32::MAX - 1 => num_blocks,
            _ => {
                let requirement = "block ids are 32 bits wide, at most 4294967293 work";
                return Err(InvalidSchedulerConfig { field: "num_blocks", value: kv.num_blocks, requirement });
            }
        };
        let prefix_caching = kv.enable_prefix_caching && config.retain_kv;
        let mut manager = KvCacheManager::new(num_blocks, kv.block_size, kv.groups, hasher, prefix_caching);
        if config.reserve_full_context {
            manager.keep_unseen_blocks();
        }
        Ok(Self {
            manager,
            config,
            requests: Vec::new(),
            vacant: Vec::new(),
            slots: HashMap::new(),
            running: Vec::new(),
            waiting: VecDeque::new(),
            last_step_id: 0,
            in_flight: None,
            admission_closed_below: 0,
            lookups: LookupCounts::default(),
            preemptions: 0,
            totals: usage::StepTotals::default(),
        })
    }

    /// Queues a request behind all others, or turns it away if it could never be served.
    pub fn add_request(&mut self, new: NewRequest) -> Result<(), AdmissionError> {
        self.check_admissible(&new)?;
        let slot = self.insert(new);
        self.waiting.push_back(slot);
        Ok(())
    }

    /// Whether a request could ever be served.
    fn check_admissible(&self, new: &NewRequest) -> Result<(), AdmissionError> {
        let request_id = new.request_id;
        let num_prompt_tokens = new.prompt_token_ids.len();
        let max_model_len = self.config.max_model_len;
        if self.slots.contains_key(&request_id) {
            return Err(AdmissionError::DuplicateRequest { request_id });
        }
        if num_prompt_tokens == 0 {
            return Err(AdmissionError::EmptyPrompt { request_id });
        }
        if new.max_tokens == 0 {
            return Err(AdmissionError::ZeroMaxTokens { request_id });
        }
        if num_prompt_tokens >= max_model_len {
            return Err(AdmissionError::TooLongForModel { request_id, num_prompt_tokens, max_model_len });
        }
        let needed_blocks = self.least_blocks(num_prompt_tokens);
        let usable_blocks = self.manager.pool().num_blocks();
        if needed_blocks > usable_blocks {
            let num_tokens = if self.config.reserve_full_context { max_model_len } else { num_prompt_tokens };
            return Err(AdmissionError::TooLongForPool {
                request_id,
                num_tokens,
                needed_blocks,
                usable_blocks,
                usable_tokens: self.servable_tokens(),
            });
        }
        Ok(())
    }

    /// Makes a request known; its slot is in no queue yet.
    fn insert(&mut self, new: NewRequest) -> Slot {
        let num_prompt_tokens = new.prompt_token_ids.len();
        let request = Request {
            id: new.request_id,
            status: RequestStatus::Waiting,
            tokens: new.prompt_token_ids,
            num_prompt_tokens,
            max_num_tokens: num_prompt_tokens.saturating_add(new.max_tokens).min(self.config.max_model_len),
            identity: new.identity,
            skip_prefix_lookup: new.skip_prefix_lookup,
            cache_salt: new.cache_salt,
            public_prefix_len: new.public_prefix_len,
            num_computed_tokens: 0,
            num_cached_tokens: None,
            miss: None,
            blocks: RequestBlocks::new(self.manager.groups().groups.len(), num_prompt_tokens),
        };
        let slot = if let Some(slot) = self.vacant.pop() {
            self.requests[slot] = Some(request);
            slot
        } else {
            self.requests.push(Some(request));
            self.requests.len() - 1
        };
        self.slots.insert(new.request_id, slot);
        slot
    }

    /// Ends a request in whatever state it is and frees its blocks; what they cache stays findable. `false` if there
    /// is no such request. Its row of a step in flight, if any, is ignored by the update.
    pub fn abort_request(&mut self, request_id: RequestId) -> bool {
        let Some(&slot) = self.slots.get(&request_id) else { return false };
        if self.waiting.front() == Some(&slot) {
            // Admission may have been closed for its sake.
            self.admission_closed_below = 0;
        }
        self.running.retain(|running| *running != slot);
        self.waiting.retain(|waiting| *waiting != slot);
        self.remove(slot);
        true
    }

    /// Ends a request that the engine found to be complete. The same as [`Self::abort_request`] for the books.
    pub fn finish_request(&mut self, request_id: RequestId) -> bool {
        self.abort_request(request_id)
    }

    /// As [`Self::schedule_into`], into a new output.
    pub fn schedule(&mut self) -> SchedulerOutput {
        let mut output = SchedulerOutput::default();
        self.schedule_into(&mut output);
        output
    }

    /// Decides the next step. `output` is overwritten; handing the same one in each time saves its allocations.
    ///
    /// A step with rows is in flight until [`Self::update`] or [`Self::step_failed`] takes it; until then nothing more
    /// is scheduled, for its KV is not written yet.
    pub fn schedule_into(&mut self, output: &mut SchedulerOutput) {
        output.clear();
        if self.in_flight.is_some() {
            return;
        }
        let mut budget = self.config.max_num_batched_tokens;
        self.finish_those_at_their_limit(output);
        self.drop_unseen_blocks();
        self.schedule_running(output, &mut budget);
        if output.preempted.is_empty() {
            self.admit_waiting(output, &mut budget);
        }
        self.manager.release_copy_sources();
        output.total_num_scheduled_tokens = self.config.max_num_batched_tokens - budget;
        if !output.rows.is_empty() {
            self.last_step_id += 1;
            output.step_id = self.last_step_id;
            self.in_flight = Some(self.last_step_id);
        }
    }

    /// The engine ends most requests itself; this is for those it left.
    fn finish_those_at_their_limit(&mut self, output: &mut SchedulerOutput) {
        let mut index = 0;
        while let Some(&slot) = self.running.get(index) {
            if self.request(slot).has_reached_its_limit() {
                self.running.remove(index);
                self.finish(slot, output);
            } else {
                index += 1;
            }
        }
    }

    fn schedule_running(&mut self, output: &mut SchedulerOutput, budget: &mut usize) {
        let mut index = 0;
        while index < self.running.len() && *budget > 0 {
            let slot = self.running[index];
            if self.schedule_row(slot, output, budget) {
                index += 1;
            } else if self.running.len() == 1 {
                // Alone and without a block: it has outgrown the pool.
                self.running.clear();
                self.finish(slot, output);
            } else {
                // Everyone from `index` on is not in the batch yet, so the last one can leave; it may be this one.
                self.preempt_last(output);
            }
        }
    }

    fn admit_waiting(&mut self, output: &mut SchedulerOutput, budget: &mut usize) {
        let mut promised = None;
        while *budget > 0 && self.running.len() < self.config.max_num_seqs {
            let Some(&slot) = self.waiting.front() else { return };
            let hit = self.look_up(slot);
            if !self.running.is_empty() {
                let promised = promised.get_or_insert_with(|| self.promised_blocks());
                let free = self.manager.pool().num_free_blocks().saturating_sub(*promised);
                let watermark = self.manager.pool().num_blocks() / WATERMARK_DIVISOR;
                let needed = self.blocks_to_admit(slot, hit);
                if free < (needed + watermark).max(self.admission_closed_below) {
                    return;
                }
            }
            self.admission_closed_below = 0;
            self.admit(slot, hit);
            // The gate left room for the whole prompt; alone, what `add_request` checked.
            let has_row = self.schedule_row(slot, output, budget);
            debug_assert!(has_row, "an admitted request gets at least one token");
            if let Some(promised) = &mut promised {
                *promised += self.blocks_still_needed(self.request(slot));
            }
        }
    }

    /// Puts as many of a request's tokens in the batch as the budget and the free blocks allow; `false` if none.
    fn schedule_row(&mut self, slot: Slot, output: &mut SchedulerOutput, budget: &mut usize) -> bool {
        let Some(request) = self.requests[slot].as_mut() else { return false };
        let computed = request.num_computed_tokens;
        let wanted = request.num_uncomputed_tokens().min(*budget).min(self.config.max_chunk_len.unwrap_or(usize::MAX));
        let num_scheduled_tokens = if self.config.reserve_full_context {
            wanted
        } else {
            self.manager.num_tokens_that_fit(&request.blocks, computed, wanted)
        };
        let end = computed + num_scheduled_tokens;
        let capacity = if self.config.reserve_full_context { self.config.max_model_len } else { end };
        if num_scheduled_tokens == 0
            || self.manager.allocate_slots(&mut request.blocks, computed, capacity, &mut output.copies).is_err()
        {
            return false;
        }
        *budget -= num_scheduled_tokens;
        output.rows.push(ScheduledRequest {
            request_id: request.id,
            num_computed_tokens: computed,
            num_scheduled_tokens,
            num_cached_tokens: request.num_cached_tokens.unwrap_or(0),
            miss: request.miss,
            sample: end == request.num_tokens(),
        });
        true
    }

    fn preempt_last(&mut self, output: &mut SchedulerOutput) {
        let Some(slot) = self.running.pop() else { return };
        let Some(request) = self.requests[slot].as_mut() else { return };
        free_request(&mut self.manager, request);
        request.status = RequestStatus::Preempted;
        output.preempted.push(request.id);
        self.preemptions += 1;
        self.waiting.push_front(slot);
        // Room for the victim and one more block of each that stays, else it would be back only to leave again.
        let request = self.request(slot);
        let room = self.peak_blocks(request, request.num_tokens()) + self.running.len() * self.num_groups();
        self.admission_closed_below = self.admission_closed_below.max(room).min(self.manager.pool().num_blocks());
    }

    fn admit(&mut self, slot: Slot, hit: PrefixHit) {
        self.take_hit(slot, hit);
        self.waiting.pop_front();
        self.running.push(slot);
    }

    /// Takes the result of a step: its KV is written, and `sampled` has the next token of each row that samples, in
    /// the order of the rows. Only now may its full blocks be found by others. A request that was ended while the
    /// step was in flight may be left out of `sampled`. On an error nothing has changed.
    pub fn update(&mut self, output: &SchedulerOutput, sampled: &[(RequestId, u32)]) -> Result<(), UpdateError> {
        if !output.rows.is_empty() {
            self.check_in_flight(output)?;
        }
        let mut tokens = sampled.iter().map(|(request_id, _)| *request_id).peekable();
        for row in output.rows.iter().filter(|row| row.sample) {
            let request_id = row.request_id;
            if tokens.next_if_eq(&request_id).is_none() && self.is_running(request_id) {
                return Err(UpdateError::MissingSample { request_id });
            }
        }
        if let Some(request_id) = tokens.next() {
            return Err(UpdateError::UnexpectedSample { request_id });
        }
        if output.rows.is_empty() {
            return Ok(());
        }
        self.in_flight = None;
        let mut tokens = sampled.iter().peekable();
        for row in &output.rows {
            let token = if row.sample { tokens.next_if(|(request_id, _)| *request_id == row.request_id) } else { None };
            // A request that took an ended one's id while the step was in flight is not in the step.
            if self.is_running(row.request_id) {
                self.commit_row(self.slots[&row.request_id], row, token.map(|(_, token)| *token));
            }
        }
        self.record_step(output.rows.len());
        Ok(())
    }

    fn commit_row(&mut self, slot: Slot, row: &ScheduledRequest, token: Option<u32>) {
        let Some(request) = self.requests[slot].as_mut() else { return };
        request.num_computed_tokens += row.num_scheduled_tokens;
        commit_request(&mut self.manager, request);
        if let Some(token) = token {
            request.tokens.push(token);
            if !self.config.retain_kv {
                free_request(&mut self.manager, request);
            }
        }
    }

    /// The step could not be computed: every request in it leaves, and nothing of it is published. Returns those
    /// that left.
    pub fn step_failed(&mut self, output: &SchedulerOutput) -> Vec<RequestId> {
        if self.check_in_flight(output).is_err() {
            return Vec::new();
        }
        self.in_flight = None;
        let rows = output.rows.iter().map(|row| row.request_id);
        rows.filter(|id| self.is_running(*id) && self.abort_request(*id)).collect()
    }

    fn check_in_flight(&self, output: &SchedulerOutput) -> Result<(), UpdateError> {
        if self.in_flight == Some(output.step_id) {
            Ok(())
        } else {
            Err(UpdateError::StaleStep { got: output.step_id, expected: self.in_flight })
        }
    }

    fn is_running(&self, request_id: RequestId) -> bool {
        self.status(request_id) == Some(RequestStatus::Running)
    }

    fn find(&self, request_id: RequestId) -> Option<&Request> {
        self.requests[*self.slots.get(&request_id)?].as_ref()
    }

    fn request(&self, slot: Slot) -> &Request {
        self.requests[slot].as_ref().expect("a queued slot holds a request")
    }

    fn num_groups(&self) -> usize {
        self.manager.groups().groups.len()
    }

    fn finish(&mut self, slot: Slot, output: &mut SchedulerOutput) {
        output.finished.push((self.request(slot).id, FinishReason::Length));
        self.remove(slot);
    }

    /// Frees a request that is in no queue any more.
    fn remove(&mut self, slot: Slot) {
        if let Some(mut request) = self.requests[slot].take() {
            free_request(&mut self.manager, &mut request);
            self.slots.remove(&request.id);
            self.vacant.push(slot);
        }
    }
}

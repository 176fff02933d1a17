//! Who runs next.
//!
//! There is no prefill and no decode: in each step every running request's `num_computed_tokens` catches up with its
//! `num_tokens`, within one budget of tokens. Requests are totally ordered by rank: priority, then deadline, then arrival
//! (by arrival alone under [`FairnessPolicy::Fcfs`]). A rank is fixed when the request is added. Running requests are
//! served in that order and lose blocks in that order: nobody loses blocks to a request behind it. Who waits is admitted
//! in that order too, or tenant after tenant under [`FairnessPolicy::Drr`]; and before running requests of a less urgent
//! priority get anything, who then lose their seats and blocks to it if that is enough (not under
//! [`AdmissionPolicy::Reserved`], which promises that nobody does).
//!
//! Progress: a `schedule` that finds a request, no step in flight and no pause computes at least one token or finishes
//! at least one request, whatever the policies.
//! - Somebody runs. Each running request, in turn, gets a token, or leaves the step to those who have one, or someone not
//!   yet in the batch loses its blocks for it: one behind it, or, when all of those are protected, it itself. Each such loss
//!   shortens the list, so it ends; and
//!   who is alone and still finds no block has outgrown the pool and ends with `Length`. A victim policy only chooses
//!   among those behind, an admission policy only says who gets that far, and a tenant's share of a step is never less
//!   than one token. Who is admitted before some of those that run takes what it needs from them only, and gets a token
//!   in the same step; they come back after it.
//! - Nobody runs. Then all blocks are free or held by kept requests, which give them up first of all, nobody waits for a
//!   leader or a tenant's other prompt, and the next waiting request is admitted without a check. It gets at least one
//!   token's block, or has generated more than the pool holds and ends with `Length`.
//!
//! Everything ends: the first of those that run advances in every step, or gives way to a protected request, which
//! counts towards its own protection. Deadlines do not change that: a request with a deadline is passed only
//! by those with earlier ones, which arrive before that time or never, and after it the request itself has ended. A
//! request without one waits behind those of its priority that have one, as it waits behind a more urgent priority: as
//! long as such requests keep coming.
//!
//! What bounds how long a prompt holds up others: [`PromptLimits`] and [`SchedulerConfig::max_chunk_len`] within a step.
//! Across steps, a quarter of each step's prompt tokens goes to the prompts that have least left to compute, so that a short
//! one is through within a few steps whoever came before it. The one that goes first keeps three quarters, so that no prompt
//! is later than in order of rank by more than a third of that time, however many short ones come. Among tenants the turns of
//! [`FairnessPolicy::Drr`] do both, under which a tenant computes one prompt at a time. More prompts in part would only hold
//! blocks earlier, so there is no other limit on them.
//!
//! Waste is bounded: after a preemption nobody is admitted until there is room for the victim, and after
//! [`SchedulerConfig::max_preemptions`] of them a request comes back only with room to its end beside the same for all
//! that run, and keeps its blocks before its equals.

mod admission;
mod budget;
mod config;
mod demand;
mod drafts;
mod events;
mod inspect;
mod kept;
mod policy;
mod preemption;
mod prefix;
mod queue;
mod service;
mod shares;
mod sharing;
mod snapshots;
mod spans;
mod state;
mod tier;
mod urgent;
mod usage;
mod watchdog;

pub use budget::PromptLimits;
pub use config::SchedulerConfig;
pub use drafts::MOST_KNOWN;
pub use policy::{AdmissionPolicy, FairnessPolicy, Policies, Policy, VictimPolicy};

use admission::{Blocked, MAX_CANDIDATES};
use budget::Allowances;
use kept::KeptRequests;
use prefix::{LookupCounts, commit_request, free_request};
use queue::WaitingQueue;
use shares::Shares;
use snapshots::before_snapshot;
use spans::before_span;
use tier::Fetching;
use usage::StepTotals;

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;

use crate::block_hash::BlockHasher;
use crate::error::{InvalidSchedulerConfig, UpdateError};
use crate::ids::RequestId;
use crate::kv_cache_config::KvCacheConfig;
use crate::kv_cache_manager::KvCacheManager;
use crate::output::{DraftStats, ScheduledRequest, SchedulerOutput};
use crate::request::{FinishReason, Request, RequestStatus};
use crate::state_snapshots::StateSave;
use crate::tier::TierIndex;

/// The place of a request in [`Scheduler::requests`].
type RequestIndex = usize;

/// Decides the batch of every step and keeps the KV books. Owned by one thread; no clock, no randomness.
#[derive(Debug, Clone)]
pub struct Scheduler {
    config: SchedulerConfig,
    manager: KvCacheManager,
    requests: Vec<Option<Request>>,
    vacant: Vec<RequestIndex>,
    indices: FxHashMap<RequestId, RequestIndex>,
    /// In order of rank.
    running: Vec<RequestIndex>,
    waiting: WaitingQueue,
    shares: Shares,
    /// Requests with a deadline, the earliest first.
    deadlines: BTreeSet<(u64, RequestIndex)>,
    now: u64,
    paused: bool,
    draining: bool,
    last_branch: u64,
    last_step_id: u64,
    in_flight: Option<u64>,
    /// After a preemption nobody is admitted until so many blocks are free.
    admission_closed_below: usize,
    blocked: Option<Blocked>,
    tier: Option<TierIndex>,
    fetching: Option<Fetching>,
    kept: KeptRequests,
    /// States that are to be kept and have not been taken yet.
    state_saves: Vec<StateSave>,
    lookups: LookupCounts,
    totals: Totals,
    usage: StepTotals,
    prompt_limits: PromptLimits,
    allowances: Allowances,
    /// Requests that are being answered and have no row in this step yet.
    unserved_answers: usize,
    /// Tokens of the step being put together at most, but for what completes spans.
    step_budget: usize,
    /// Tokens that it has for the sake of spans, above that.
    beyond_budget: usize,
    /// Rows of the step being put together whose requests have drafts.
    drafted: Vec<(usize, RequestIndex)>,
}

/// What is counted since the scheduler was built.
#[derive(Debug, Clone, Copy, Default)]
struct Totals {
    preemptions: u64,
    recomputed_tokens: u64,
    deadlines_missed: u64,
    drafts: DraftStats,
}

impl Scheduler {
    /// A scheduler over an empty pool.
    pub fn new(config: SchedulerConfig, kv: KvCacheConfig) -> Result<Self, InvalidSchedulerConfig> {
        let hasher = BlockHasher::new(kv.hash_key);
        Self::with_hasher(config, kv, hasher)
    }

    /// As [`Self::new`], with another block hash; `kv.hash_key` is not used.
    pub fn with_hasher(config: SchedulerConfig, kv: KvCacheConfig, hasher: BlockHasher) -> Result<Self, InvalidSchedulerConfig> {
        config.check()?;
        let num_blocks = kv.check()?;
        // A block of keys and values is of no use without the states behind it.
        let keeps_states = !config.has_states || config.num_state_snapshots > 0;
        let prefix_caching = kv.enable_prefix_caching && config.retain_kv && keeps_states;
        let mut manager = KvCacheManager::new(num_blocks, kv.block_size, kv.groups, hasher, prefix_caching);
        if config.reserve_full_context {
            manager.keep_unseen_blocks();
        }
        if config.has_states && prefix_caching {
            manager.keep_states(config.num_state_snapshots);
        }
        Ok(Self {
            manager,
            waiting: WaitingQueue::new(config.fairness),
            config,
            requests: Vec::new(),
            vacant: Vec::new(),
            indices: FxHashMap::default(),
            running: Vec::new(),
            shares: Shares::default(),
            deadlines: BTreeSet::new(),
            now: 0,
            paused: false,
            draining: false,
            last_branch: 0,
            last_step_id: 0,
            in_flight: None,
            admission_closed_below: 0,
            blocked: None,
            tier: None,
            fetching: None,
            kept: KeptRequests::default(),
            state_saves: Vec::new(),
            lookups: LookupCounts::default(),
            totals: Totals::default(),
            usage: StepTotals::default(),
            prompt_limits: PromptLimits::default(),
            allowances: Allowances::default(),
            unserved_answers: 0,
            step_budget: 0,
            beyond_budget: 0,
            drafted: Vec::new(),
        })
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
        if self.in_flight.is_some() || self.fetching.is_some() {
            return;
        }
        self.finish_those_too_late(output);
        if self.paused {
            return;
        }
        self.finish_those_at_their_limit(output);
        self.step_budget = self.most_of_step();
        self.beyond_budget = 0;
        let mut budget = self.step_budget;
        self.drop_unseen_blocks();
        self.share_out(budget);
        self.share_among_prompts(budget);
        self.schedule_running(output, &mut budget);
        self.unserved_answers = 0;
        if output.preempted.is_empty() && self.fetching.is_none() {
            self.admit_waiting(output, &mut budget);
        }
        self.hand_out_the_rest(output, &mut budget);
        // Drafts are a part of answers, which no limit on prompts shortens.
        let mut left = self.config.max_num_batched_tokens - (self.step_budget - budget + self.beyond_budget);
        self.add_drafts(output, &mut left);
        self.manager.release_copy_sources();
        output.total_num_scheduled_tokens = self.config.max_num_batched_tokens - left;
        if !output.rows.is_empty() {
            self.last_step_id += 1;
            output.step_id = self.last_step_id;
            self.in_flight = Some(self.last_step_id);
            self.record_blocks();
        }
        self.watch(output);
    }

    /// The engine ends most requests itself; this is for those it left.
    fn finish_those_at_their_limit(&mut self, output: &mut SchedulerOutput) {
        let mut position = 0;
        while let Some(&index) = self.running.get(position) {
            if self.request(index).has_reached_its_limit() {
                self.finish(index, FinishReason::Length, output);
            } else {
                position += 1;
            }
        }
    }

    fn schedule_running(&mut self, output: &mut SchedulerOutput, budget: &mut usize) {
        let mut urgent = self.next_urgent(&output.preempted);
        let mut position = 0;
        while position < self.running.len() && *budget > 0 {
            let index = self.running[position];
            if let Some(waiting) = urgent
                && self.request(waiting).standing.rank.priority < self.request(index).standing.rank.priority
            {
                let is_admitted = self.admit_before(position, waiting, output, budget);
                position += usize::from(is_admitted);
                urgent = if is_admitted { self.next_urgent(&output.preempted) } else { None };
            } else if (self.leaves_the_step(index) && !output.rows.is_empty())
                || !self.fits_the_step(index, *budget)
                || self.schedule_row(index, output, budget)
            {
                position += 1;
            } else if self.running.len() == 1 {
                // Alone and without a block: it has outgrown the pool.
                self.finish(index, FinishReason::Length, output);
            } else {
                self.preempt_for(position, output);
                urgent = self.next_urgent(&output.preempted);
            }
        }
    }

    /// Puts as many of a request's tokens in the batch as the budget and the free blocks allow; `false` if none.
    fn schedule_row(&mut self, index: RequestIndex, output: &mut SchedulerOutput, budget: &mut usize) -> bool {
        let (tenant, uncomputed) = (self.request(index).standing.tenant, self.request(index).num_uncomputed_tokens());
        let (computed, of_answer) = (self.request(index).num_computed_tokens, self.request(index).num_answer_tokens());
        let wanted = if self.config.whole_prompts {
            uncomputed
        } else {
            let wanted = if of_answer > 0 {
                of_answer.min(*budget)
            } else {
                self.most_of_budget(uncomputed, *budget).min(self.share_of(tenant)).min(self.allowances.of(index).max(1))
            };
            let wanted = wanted.min(self.config.max_chunk_len.unwrap_or(usize::MAX));
            let end = computed + self.with_whole_spans(index, wanted);
            before_snapshot(&self.request(index).snapshot_places, computed, end) - computed
        };
        let reserved = self.config.reserve_full_context.then(|| self.config.max_model_len - computed);
        self.make_room(index, reserved.unwrap_or(wanted));
        let Some(request) = self.requests[index].as_mut() else { return false };
        let has_drafts = !request.drafts.is_empty();
        let num_scheduled_tokens = match reserved {
            Some(_) => wanted,
            None => self.manager.num_tokens_that_fit(&request.blocks, computed, wanted),
        };
        let num_scheduled_tokens = before_span(&request.spans, computed + num_scheduled_tokens).saturating_sub(computed);
        let end = computed + num_scheduled_tokens;
        let capacity = if self.config.reserve_full_context { self.config.max_model_len } else { end };
        if num_scheduled_tokens == 0
            || (self.config.whole_prompts && num_scheduled_tokens < uncomputed)
            || self.manager.allocate_slots(&mut request.blocks, computed, capacity, &mut output.copies).is_err()
        {
            return false;
        }
        self.beyond_budget += num_scheduled_tokens.saturating_sub(*budget);
        *budget = budget.saturating_sub(num_scheduled_tokens);
        self.unserved_answers = self.unserved_answers.saturating_sub(of_answer);
        output.rows.push(ScheduledRequest {
            request_id: request.id,
            num_computed_tokens: computed,
            num_scheduled_tokens,
            num_drafts: 0,
            num_again: if of_answer > 0 { request.num_again } else { 0 },
            num_outputs: usize::from(end == request.num_tokens()),
            num_cached_tokens: request.num_cached_tokens.unwrap_or(0),
            miss: request.miss,
            snapshot: request.blocks.snapshot,
        });
        if has_drafts {
            self.drafted.push((output.rows.len() - 1, index));
        }
        if of_answer == 0 {
            self.use_share(tenant, num_scheduled_tokens, num_scheduled_tokens == uncomputed);
        }
        true
    }

    /// Takes the result of a step: its KV is written, and `sampled` has, in the order of the rows, what follows the known
    /// tokens of each row with outputs: of its drafts the first so many that turned out right, and the next token; from 1 to
    /// `num_outputs` tokens in all. The KV of the other drafts counts as not written. No token at all ends the request: all
    /// that it wanted was to be computed.
    ///
    /// Only now may the step's full blocks be found by others. A request that was ended while the step was in flight may be
    /// left out of `sampled`.
    ///
    /// # Errors
    /// [`UpdateError`], which names the request at fault: another step than the one in flight, a row without its tokens, tokens
    /// without their row, more tokens than outputs, or a token that is neither the draft nor the last. Then nothing has
    /// changed.
    pub fn update(&mut self, output: &SchedulerOutput, sampled: &[(RequestId, &[u32])]) -> Result<(), UpdateError> {
        if !output.rows.is_empty() {
            self.check_in_flight(output)?;
        }
        self.check_tokens(output, sampled)?;
        if output.rows.is_empty() {
            return Ok(());
        }
        self.in_flight = None;
        let mut sampled = sampled.iter().peekable();
        for row in &output.rows {
            let tokens = if row.num_outputs > 0 { sampled.next_if(|(id, _)| *id == row.request_id) } else { None };
            // A request that took an ended one's id while the step was in flight is not in the step.
            if self.is_running(row.request_id) {
                self.commit_row(self.indices[&row.request_id], row, tokens.map(|(_, tokens)| *tokens));
            }
        }
        self.record_step(output.rows.len());
        Ok(())
    }

    fn commit_row(&mut self, index: RequestIndex, row: &ScheduledRequest, tokens: Option<&[u32]>) {
        let num_accepted = tokens.map_or(0, |tokens| tokens.len().saturating_sub(1));
        let is_wrong = num_accepted < row.num_drafts;
        let num_right = row.num_known_tokens() + num_accepted;
        let num_again = if is_wrong && self.config.has_states { num_right } else { 0 };
        let computed = row.num_computed_tokens + num_right - num_again;
        self.count_recomputed(index, row.num_computed_tokens, computed);
        self.totals.drafts.count(row.num_drafts, num_accepted);
        let Some(request) = self.requests[index].as_mut() else { return };
        (request.num_computed_tokens, request.num_again) = (computed, num_again);
        if is_wrong {
            self.manager.truncate(&mut request.blocks, computed);
        }
        // The accepted drafts are known before their blocks are published; the token behind them has no KV yet.
        request.tokens.extend_from_slice(tokens.unwrap_or_default());
        request.drafts.clear();
        let full = request.blocks.num_published_blocks()..computed / self.manager.block_size();
        self.offer_blocks(index, full);
        let Some(request) = self.requests[index].as_mut() else { return };
        if row.is_chunk() {
            // Prompts are what others may be waiting to find.
            self.blocked = None;
        }
        commit_request(&mut self.manager, request);
        self.keep_states_behind(index);
        match tokens {
            Some([]) => self.remove(index),
            Some(_) if !self.config.retain_kv => self.drop_kv(index),
            _ => {}
        }
    }

    /// The step could not be computed, or not even its copies made: every request in it leaves, and nothing that the
    /// step wrote can be found. Returns those that left.
    pub fn step_failed(&mut self, output: &SchedulerOutput) -> Vec<RequestId> {
        if self.check_in_flight(output).is_err() {
            return Vec::new();
        }
        let rows = || output.rows.iter().map(|row| row.request_id);
        // Still in flight: their states are not what the books say.
        let left = rows().filter(|id| self.is_running(*id) && self.abort_request(*id)).collect();
        self.in_flight = None;
        if !output.copies.is_empty() {
            // Those that were kept while the step was in flight may hold one.
            for id in rows() {
                self.reclaim(id);
            }
            self.manager.forget_copies(&output.copies);
        }
        left
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
        self.requests[*self.indices.get(&request_id)?].as_ref()
    }

    fn request(&self, index: RequestIndex) -> &Request {
        self.requests[index].as_ref().expect("a queued index is a request's")
    }

    fn num_groups(&self) -> usize {
        self.manager.groups().groups.len()
    }

    fn finish(&mut self, index: RequestIndex, reason: FinishReason, output: &mut SchedulerOutput) {
        output.finished.push((self.request(index).id, reason));
        self.remove(index);
    }

    /// Takes a request's blocks, all of which it will compute again.
    fn drop_kv(&mut self, index: RequestIndex) {
        if let Some(request) = self.requests[index].as_mut() {
            free_request(&mut self.manager, request);
        }
    }

    /// Takes a request out of its queue and frees its blocks.
    fn remove(&mut self, index: RequestIndex) {
        self.keep_states_at_end(index);
        self.offer_held_blocks(index);
        self.leave_queue(index);
        let Some(mut request) = self.requests[index].take() else { return };
        free_request(&mut self.manager, &mut request);
        self.indices.remove(&request.id);
        self.vacant.push(index);
    }

    fn leave_queue(&mut self, index: RequestIndex) {
        self.forget_fetching(index);
        let request = self.request(index);
        let (standing, status) = (request.standing, request.status);
        match status {
            RequestStatus::Running => {
                let rank_of = |running: &RequestIndex| self.request(*running).standing.rank;
                if let Ok(place) = self.running.binary_search_by_key(&standing.rank, rank_of) {
                    self.running.remove(place);
                }
            }
            RequestStatus::Waiting => self.waiting.remove(&standing),
            RequestStatus::Preempted => {
                self.waiting.remove(&standing);
                // Admission may have been closed for its sake.
                self.admission_closed_below = 0;
            }
            RequestStatus::Kept => self.kept.remove(index),
        }
        if let Some(deadline) = standing.deadline {
            self.deadlines.remove(&(deadline, index));
        }
        self.blocked = None;
    }
}

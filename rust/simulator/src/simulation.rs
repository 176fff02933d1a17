//! The loop of an engine, in virtual time.

use std::time::Duration;

use paged::{
    FinishReason, KvCacheConfig, KvGroups, Policies, PoolLimits, RequestId, Scheduler, SchedulerConfig, SchedulerOutput,
    StepPacer,
};

use crate::contiguous::ContiguousServer;
use crate::cost::CostModel;
use crate::error::SimulationError;
use crate::paged_server::{PagedServer, token};
use crate::result::{Ending, RequestRecord, SimulationResult, Totals, normalized_latency};
use crate::server::{Allocator, Server};
use crate::timeline::{Interval, Sum, Timeline};
use crate::trace::{Trace, TraceRequest};

/// Most blocks of a simulated pool.
const MAX_BLOCKS: usize = 1 << 24;

/// The engine to be simulated.
#[derive(Debug, Clone, PartialEq)]
pub struct SimulationConfig {
    /// How requests get their memory.
    pub allocator: Allocator,
    /// What the scheduler of the paged allocator goes by.
    pub policies: Policies,
    /// Usable blocks; contiguous allocators have as many slots.
    pub num_blocks: usize,
    /// Tokens a block.
    pub block_size: usize,
    /// Most requests in a step.
    pub max_num_seqs: usize,
    /// Most tokens in a step.
    pub max_num_batched_tokens: usize,
    /// About how many seconds a step may take; `None`: as long as its tokens do. Only the paged allocator has such a limit.
    pub max_step_latency: Option<f64>,
    /// Most tokens of a request; `None`: as many as the longest of the trace has.
    pub max_model_len: Option<usize>,
    /// Whether prefixes are looked up and kept.
    pub enable_prefix_caching: bool,
    /// Attention window of each layer, `None` for full attention; empty: full attention throughout.
    pub windows: Vec<Option<usize>>,
    /// How long a step lasts.
    pub cost: CostModel,
    /// Most intervals of the timeline, at least 2.
    pub max_intervals: usize,
}

impl SimulationConfig {
    /// A paged pool with the defaults of everything else.
    pub fn new(num_blocks: usize, block_size: usize, cost: CostModel) -> Self {
        Self {
            allocator: Allocator::Paged,
            policies: Policies::default(),
            num_blocks,
            block_size,
            max_num_seqs: 256,
            max_num_batched_tokens: 2048,
            max_step_latency: None,
            max_model_len: None,
            enable_prefix_caching: true,
            windows: Vec::new(),
            cost,
            max_intervals: 1024,
        }
    }

    fn validate(&self) -> Result<(), SimulationError> {
        let within = |field, value: usize, least: usize, most: usize| {
            let requirement = format!("from {least} to {most} work");
            if (least..=most).contains(&value) { Ok(()) } else { Err(SimulationError::setting(field, &value, requirement)) }
        };
        within("blocks", self.num_blocks, 1, MAX_BLOCKS)?;
        within("block_size", self.block_size, 1, 1 << 16)?;
        within("max_num_seqs", self.max_num_seqs, 1, 1 << 20)?;
        within("max_num_batched_tokens", self.max_num_batched_tokens, 1, 1 << 30)?;
        within("max_model_len", self.max_model_len.unwrap_or(2), 2, 1 << 30)?;
        within("num_intervals", self.max_intervals, 2, 1 << 24)?;
        if let Some(seconds) =
            self.max_step_latency.filter(|seconds| !(*seconds > 0.0 && Duration::try_from_secs_f64(*seconds).is_ok()))
        {
            return Err(SimulationError::setting("max_step_latency", &seconds, "seconds above 0, or None, work"));
        }
        if self.allocator == Allocator::Max && self.max_model_len.is_none() {
            let requirement = "the allocator \"max\" reserves the model's context length: give it";
            return Err(SimulationError::setting("max_model_len", &"not given", requirement));
        }
        if self.allocator != Allocator::Paged && self.policies != Policies::default() {
            let requirement = "only the paged allocator has policies";
            return Err(SimulationError::setting("policy", &format!("{:?}", self.policies), requirement));
        }
        if let Some(seconds) = self.max_step_latency.filter(|_| self.allocator != Allocator::Paged) {
            return Err(SimulationError::setting("max_step_latency", &seconds, "only the paged allocator limits its steps"));
        }
        if self.allocator != Allocator::Paged && !self.windows.is_empty() {
            return Err(SimulationError::setting(
                "windows",
                &format!("{:?}", self.windows),
                "only the paged allocator has windows",
            ));
        }
        self.cost.validate()
    }
}

/// A simulation under way.
pub struct Simulation {
    trace: Vec<TraceRequest>,
    /// Rows by arrival.
    order: Vec<usize>,
    num_arrived: usize,
    num_slots: f64,
    cost: CostModel,
    groups: KvGroups,
    server: Box<dyn Server + Send>,
    start: f64,
    now: f64,
    step: SchedulerOutput,
    sampled: Vec<(RequestId, u32)>,
    records: Vec<RequestRecord>,
    timeline: Timeline,
    overall: Sum,
    saturated: Sum,
    num_steps: u64,
    computed_tokens: u64,
    recomputed_tokens: u64,
}

impl Simulation {
    /// An idle engine before the first arrival.
    pub fn new(trace: Trace, config: &SimulationConfig) -> Result<Self, SimulationError> {
        let trace = trace.into_requests();
        let mut simulation = Self::idle(config, longest(&trace), first_arrival(&trace))?;
        simulation.order = by_arrival(&trace);
        simulation.records = vec![RequestRecord::default(); trace.len()];
        simulation.trace = trace;
        Ok(simulation)
    }

    /// An engine at the time `start`, to which nobody comes yet; `longest` is the default of
    /// [`SimulationConfig::max_model_len`].
    pub(crate) fn idle(config: &SimulationConfig, longest: usize, start: f64) -> Result<Self, SimulationError> {
        config.validate()?;
        let max_model_len = config.max_model_len.unwrap_or(longest);
        let groups = KvGroups::from_layers(if config.windows.is_empty() { &[None] } else { &config.windows });
        let num_slots = config.num_blocks * config.block_size;
        let server: Box<dyn Server + Send> = if config.allocator == Allocator::Paged {
            let kv = KvCacheConfig {
                num_blocks: config.num_blocks,
                block_size: config.block_size,
                groups: groups.clone(),
                enable_prefix_caching: config.enable_prefix_caching,
                hash_key: [0; 32],
            };
            let scheduler = Scheduler::new(scheduler_config(config, max_model_len), kv)?;
            let pacer = StepPacer::new(config.max_step_latency.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()));
            Box::new(PagedServer::new(scheduler, pacer, groups.groups.len(), config.block_size))
        } else {
            let SimulationConfig { max_num_seqs, max_num_batched_tokens, .. } = *config;
            let limits = PoolLimits { max_num_seqs, max_num_batched_tokens, max_model_len };
            Box::new(ContiguousServer::new(config.allocator, limits, num_slots))
        };
        Ok(Self {
            trace: Vec::new(),
            order: Vec::new(),
            num_arrived: 0,
            num_slots: num_slots as f64,
            cost: config.cost,
            groups,
            server,
            start,
            now: start,
            step: SchedulerOutput::default(),
            sampled: Vec::new(),
            records: Vec::new(),
            timeline: Timeline::new(config.max_intervals),
            overall: Sum::default(),
            saturated: Sum::default(),
            num_steps: 0,
            computed_tokens: 0,
            recomputed_tokens: 0,
        })
    }

    /// Has one more request come, no earlier than those before it.
    pub(crate) fn push(&mut self, request: TraceRequest) {
        self.order.push(self.trace.len());
        self.trace.push(request);
        self.records.push(RequestRecord::default());
    }

    /// Goes on to a time: until the step under way ends no earlier, or nothing is left to do.
    pub(crate) fn run_until(&mut self, time: f64) -> Result<(), SimulationError> {
        while self.now < time && self.advance()? {}
        Ok(())
    }

    /// Requests that came and have not ended.
    pub(crate) fn num_requests(&self) -> usize {
        let (num_running, num_waiting) = self.server.queue_lengths();
        num_running + num_waiting + self.order.len() - self.num_arrived
    }

    /// Runs to the end.
    pub fn run(mut self) -> Result<SimulationResult, SimulationError> {
        while self.advance()? {}
        Ok(self.into_result())
    }

    /// Goes on by one step, or to the next arrival; `false` when all is over.
    pub fn advance(&mut self) -> Result<bool, SimulationError> {
        self.take_arrivals();
        if self.server.queue_lengths() == (0, 0) {
            return Ok(self.wait_for_an_arrival());
        }
        self.server.schedule(&mut self.step, self.now);
        for preemption in &self.step.preempted {
            self.records[preemption.request_id.0 as usize].preemptions += 1;
        }
        for (id, reason) in &self.step.finished {
            let ending = match reason {
                FinishReason::Deadline => Ending::Deadline,
                FinishReason::Length => Ending::Length,
                FinishReason::Stop | FinishReason::Abort | FinishReason::Stuck => return Err(self.stuck()),
            };
            end(&mut self.records[id.0 as usize], ending, self.now);
        }
        if !self.step.rows.is_empty() {
            self.run_step()?;
            return Ok(true);
        }
        if self.step.finished.is_empty() && self.step.preempted.is_empty() && !self.wait_for_an_arrival() {
            return Err(self.stuck());
        }
        Ok(true)
    }

    fn stuck(&self) -> SimulationError {
        let (num_running, num_waiting) = self.server.queue_lengths();
        SimulationError::Stuck { num_running, num_waiting }
    }

    fn take_arrivals(&mut self) {
        while let Some(&row) = self.order.get(self.num_arrived) {
            let request = &self.trace[row];
            if request.arrival > self.now {
                return;
            }
            self.num_arrived += 1;
            if let Err(refusal) = self.server.add(RequestId(row as u64), request) {
                end(&mut self.records[row], Ending::Rejected, self.now);
                self.records[row].rejection = Some(refusal.0);
            }
        }
    }

    /// `false` if nobody comes any more.
    fn wait_for_an_arrival(&mut self) -> bool {
        let Some(&row) = self.order.get(self.num_arrived) else { return false };
        let arrival = self.trace[row].arrival;
        self.pass(arrival - self.now);
        self.now = arrival;
        true
    }

    fn run_step(&mut self) -> Result<(), SimulationError> {
        let seconds = self.cost.seconds(&self.step.rows, &self.groups);
        self.sampled.clear();
        for row in &self.step.rows {
            let record = &mut self.records[row.request_id.0 as usize];
            let end = row.num_computed_tokens + row.num_scheduled_tokens;
            self.computed_tokens += row.num_scheduled_tokens as u64;
            self.recomputed_tokens += record.furthest.min(end).saturating_sub(row.num_computed_tokens) as u64;
            record.furthest = record.furthest.max(end);
            record.cached_tokens = row.num_cached_tokens;
            if row.num_outputs > 0 {
                let request = &self.trace[row.request_id.0 as usize];
                let position = request.prompt_tokens + record.output_tokens;
                self.sampled.push((row.request_id, token(row.request_id, request, position)));
            }
        }
        self.server.update(&self.step, &self.sampled)?;
        self.server.measure(&self.step, seconds);
        self.pass(seconds);
        self.now += seconds;
        self.num_steps += 1;
        for (id, _) in &self.sampled {
            let row = id.0 as usize;
            let record = &mut self.records[row];
            record.add_token(self.now);
            if record.output_tokens == self.trace[row].output_tokens {
                end(record, Ending::Stop, self.now);
                self.server.finish(*id);
            }
        }
        Ok(())
    }

    /// Books the state of things for so long.
    fn pass(&mut self, seconds: f64) {
        let (running, waiting) = self.server.queue_lengths();
        let memory = self.server.memory(&self.trace);
        debug_assert_eq!(memory.total(), self.num_slots, "{memory:?}");
        let state = Interval { start: self.now, seconds, running: running as f64, waiting: waiting as f64, memory };
        self.timeline.push(&state);
        self.overall.add(&state);
        if waiting > 0 {
            self.saturated.add(&state);
        }
    }

    /// What has been found so far.
    pub fn into_result(self) -> SimulationResult {
        let (prefix_queried_tokens, prefix_hit_tokens) = self.server.prefix_tokens();
        let totals = Totals {
            steps: self.num_steps,
            seconds: self.now - self.start,
            output_tokens: self.records.iter().map(|record| record.output_tokens as u64).sum(),
            computed_tokens: self.computed_tokens,
            recomputed_tokens: self.recomputed_tokens,
            preemptions: self.records.iter().map(|record| record.preemptions as u64).sum(),
            prefix_queried_tokens,
            prefix_hit_tokens,
            normalized_latency: normalized_latency(&self.trace, &self.records),
            overall: self.overall.mean(),
            saturated: self.saturated.mean(),
        };
        SimulationResult { timeline: self.timeline.intervals(), requests: self.records, totals }
    }
}

/// Tokens of the longest request, at least 2.
pub(crate) fn longest(trace: &[TraceRequest]) -> usize {
    trace.iter().map(TraceRequest::num_tokens).max().unwrap_or(0).max(2)
}

/// When the first request comes; 0 if none does.
pub(crate) fn first_arrival(trace: &[TraceRequest]) -> f64 {
    trace.iter().map(|request| request.arrival).min_by(f64::total_cmp).unwrap_or(0.0)
}

/// Rows by arrival.
pub(crate) fn by_arrival(trace: &[TraceRequest]) -> Vec<usize> {
    let mut order: Vec<_> = (0..trace.len()).collect();
    order.sort_by(|a, b| trace[*a].arrival.total_cmp(&trace[*b].arrival));
    order
}

fn end(record: &mut RequestRecord, ending: Ending, now: f64) {
    record.ending = ending;
    record.end = now;
}

fn scheduler_config(config: &SimulationConfig, max_model_len: usize) -> SchedulerConfig {
    let Policies { admission, victim, fairness } = config.policies;
    let defaults = SchedulerConfig::new(config.max_num_seqs, config.max_num_batched_tokens, max_model_len);
    SchedulerConfig { admission, victim, fairness, ..defaults }
}

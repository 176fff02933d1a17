//! The one thread that owns scheduler, pool and device.

mod constrained;
mod drafting;
mod events;
mod heads;
mod media;
mod prompt_logprobs;
mod re_isq;
mod requests;
mod sampling;
mod sequences;
mod step;
mod swap;

use std::{
    sync::{
        Arc, OnceLock,
        mpsc::{Receiver, Sender, TryRecvError},
    },
    time::{Duration, Instant},
};

use device::host::trim_heap;
use paged::{KvCacheConfig, PoolSnapshot, RequestId, Scheduler, SchedulerOutput, StateSave, StepPacer};
use rustc_hash::FxHashMap;

pub use drafting::Drafter;
use media::{HeldOutputs, Senses};
pub use re_isq::NewWeights;
use sampling::StepOutputs;

use super::{
    Heartbeat, KvCacheStats, Sequence,
    events::Teller,
    output::{ActiveRequest, SubmittedRequest},
};
use crate::{
    EngineError, OutputKind, Speculation,
    error::caught,
    input_batch::InputBatch,
    kv_tier::Swapper,
    model::RopeRows,
    model_runner::ModelRunner,
    speculation::{DraftHistory, Speculator},
    state_slots::StateSlots,
    tokenizer::Tokenizer,
};

/// What callers ask of the engine thread.
pub enum Command {
    /// A validated request.
    Submit(Box<SubmittedRequest>),
    /// What a choice of a request has come to so far.
    Snapshot {
        /// The number of the request.
        number: u64,
        /// Which choice.
        choice: usize,
        /// Where to release it.
        inbox: Sender<Command>,
        /// Where to send it.
        reply: Sender<Result<Sequence, EngineError>>,
    },
    /// Schedule nothing until a resume.
    Pause,
    /// Go on after a pause, and accept requests after a drain.
    Resume,
    /// Accept no more requests, and tell when none is left.
    Drain(Sender<()>),
    /// A kept request's blocks are not needed any more.
    Release(RequestId),
    /// The figures of the pool, after cancelled requests are gone.
    Stats(Sender<KvCacheStats>),
    /// What every block is used for, and every request.
    PoolSnapshot(Sender<PoolSnapshot>),
    /// Compute with other weights once those who are answered now have their answers.
    ReIsq(Box<NewWeights>),
    /// End every request, give all memory back, and tell.
    Unload(Sender<()>),
}

/// How often a paused engine looks for what has ended meanwhile.
const PAUSED_TURN: Duration = Duration::from_millis(20);

/// One choice of an active request, which is a request of its own to the scheduler.
struct ActiveChoice {
    request_number: u64,
    choice: usize,
    rope: RopeRows,
    prompt_logprobs_done: usize,
    /// Tokens that were computed, those in blocks that were lost included.
    num_computed_tokens: usize,
    /// The request's other choices begin with this one's first token.
    leads: bool,
    output: OutputKind,
    drafts: DraftHistory,
    /// Until the prompt is computed, or to the end.
    held: HeldOutputs,
}

/// The scheduler's clock: microseconds since the engine started.
fn ticks(started: Instant, at: Instant) -> u64 {
    u64::try_from(at.saturating_duration_since(started).as_micros()).unwrap_or(u64::MAX)
}

/// State of the engine thread.
pub struct EngineThread {
    inbox: Receiver<Command>,
    scheduler: Scheduler,
    /// What the scheduler is made from.
    kv: KvCacheConfig,
    runner: ModelRunner,
    swapper: Option<Swapper>,
    teller: Option<Teller>,
    pacer: StepPacer,
    tokenizer: Arc<Tokenizer>,
    requests: FxHashMap<u64, ActiveRequest>,
    active: FxHashMap<RequestId, ActiveChoice>,
    next_request: u64,
    output: SchedulerOutput,
    batch: InputBatch,
    states: StateSlots,
    /// States that are to be kept; empty but while they are.
    state_saves: Vec<StateSave>,
    outputs: StepOutputs,
    /// Of models that see.
    senses: Option<Senses>,
    /// Who proposes drafts, if anybody does.
    speculator: Option<Speculator>,
    /// The model that does, if it is one.
    drafter: Option<Drafter>,
    /// Zero of the scheduler's clock.
    started: Instant,
    step_began: Instant,
    /// What is computed with once nobody is answered by the weights there are.
    new_weights: Option<Box<NewWeights>>,
    /// Requests that came since, in order: new weights are to answer them.
    held: Vec<SubmittedRequest>,
    /// Who waits until no request is left.
    drains: Vec<Sender<()>>,
    /// Why the device computes no more, once it does not.
    lost: Arc<OnceLock<String>>,
    disconnected: bool,
    /// Requests that have ended in this step.
    ended: Vec<ActiveRequest>,
    /// Who waits until the thread has ended.
    unloads: Vec<Sender<()>>,
    heartbeat: Arc<Heartbeat>,
}

impl EngineThread {
    /// A thread state that has not started, with a scheduler made from `kv`.
    pub fn new(
        inbox: Receiver<Command>,
        scheduler: Scheduler,
        kv: KvCacheConfig,
        runner: ModelRunner,
        tokenizer: Arc<Tokenizer>,
    ) -> Self {
        Self {
            inbox,
            scheduler,
            kv,
            runner,
            swapper: None,
            teller: None,
            pacer: StepPacer::new(None),
            tokenizer,
            requests: FxHashMap::default(),
            active: FxHashMap::default(),
            next_request: 0,
            output: SchedulerOutput::default(),
            batch: InputBatch::default(),
            states: StateSlots::default(),
            state_saves: Vec::new(),
            outputs: StepOutputs::default(),
            senses: None,
            speculator: None,
            drafter: None,
            started: Instant::now(),
            step_began: Instant::now(),
            new_weights: None,
            held: Vec::new(),
            drains: Vec::new(),
            lost: Arc::default(),
            disconnected: false,
            ended: Vec::new(),
            unloads: Vec::new(),
            heartbeat: Arc::default(),
        }
    }

    /// Keeps blocks in a tier from now on.
    pub fn attach(&mut self, swapper: Swapper) {
        swapper.attach(&mut self.scheduler);
        self.swapper = Some(swapper);
    }

    /// Keeps steps in which a request is being answered to about this length.
    pub fn pace(&mut self, max_step_latency: Option<Duration>) {
        self.pacer = StepPacer::new(max_step_latency);
    }

    /// Computes drafts from now on: of a proposer, and of what grammars force.
    pub fn speculate(&mut self, speculation: Option<&Speculation>, drafts_forced: bool) {
        let (vocab_size, most) = (self.runner.config().vocab_size, self.runner.max_logit_rows());
        self.speculator = Speculator::new(speculation, drafts_forced, vocab_size, most);
    }

    /// Has a second model make the drafts that are asked for.
    pub fn draft_by(&mut self, drafter: Option<Drafter>) {
        self.drafter = drafter;
    }

    /// Keeps outputs of the encoder within so many bytes.
    pub fn take_media(&mut self, cache_bytes: u64) {
        self.senses = Some(Senses::new(cache_bytes));
    }

    /// Where it will be written why the device computes no more.
    pub fn lost(&self) -> Arc<OnceLock<String>> {
        Arc::clone(&self.lost)
    }

    /// Where it is told how the thread does.
    pub fn heartbeat(&self) -> Arc<Heartbeat> {
        Arc::clone(&self.heartbeat)
    }

    /// After something failed: a device that is lost ends every request, for none can be computed any more.
    pub(super) fn check_device(&mut self) {
        if let Err(error) = self.runner.backend().check() {
            let why = error.to_string();
            self.start_over(&why);
            self.lost.set(why).unwrap_or_default();
        }
    }

    #[cfg(test)]
    pub(super) fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// Serves until every handle is gone and every request has ended, or until it is unloaded.
    pub fn run(mut self) {
        while self.turn() {}
        let unloads = std::mem::take(&mut self.unloads);
        drop(self);
        trim_heap();
        for waiting in unloads {
            waiting.send(()).unwrap_or_default();
        }
    }

    /// Takes what is in the inbox and runs a step, if there is anything to do; false when there never will be again.
    pub(super) fn turn(&mut self) -> bool {
        self.receive();
        self.heartbeat.begin();
        let _ = self.guarded(Self::drop_cancelled);
        let is_unloading = !self.unloads.is_empty();
        if is_unloading {
            self.new_weights = None;
            self.begin_held();
            self.cancel_waiting();
            let _ = self.guarded(Self::cancel_all);
        } else {
            if !self.scheduler.is_paused() {
                let _ = self.guarded(Self::see);
            }
            if !self.active.is_empty() {
                let _ = self.guarded(Self::step);
            }
        }
        self.publish_events();
        self.deliver_events();
        self.heartbeat.end(!self.is_idle() && !self.scheduler.is_paused());
        if self.is_idle() && self.change_weights() {
            return true;
        }
        if self.is_idle() {
            // Whoever has stopped to wait is not there to be told.
            self.drains.drain(..).for_each(|waiting| waiting.send(()).unwrap_or_default());
            return !self.disconnected && !is_unloading;
        }
        true
    }

    /// Whether no request is left.
    fn is_idle(&self) -> bool {
        self.active.is_empty() && self.num_waiting_for_media() == 0
    }

    /// Hands over what the requests have come to since the last time; only when all have done so are their sinks flushed.
    pub(super) fn deliver_events(&mut self) {
        self.requests.values_mut().chain(&mut self.ended).for_each(ActiveRequest::hand_over);
        self.requests.values_mut().chain(&mut self.ended).for_each(ActiveRequest::flush);
        self.ended.clear();
    }

    /// Takes what is in the inbox; waits for something when there is nothing else to do.
    fn receive(&mut self) {
        if self.disconnected {
            return;
        }
        if self.is_idle() {
            match self.wait_for_command() {
                Some(command) => self.handle(command),
                None => self.disconnected = true,
            }
        } else if self.scheduler.is_paused() {
            // Deadlines pass and streams are dropped meanwhile.
            if let Ok(command) = self.inbox.recv_timeout(PAUSED_TURN) {
                self.handle(command);
            }
        }
        loop {
            match self.inbox.try_recv() {
                Ok(command) => self.handle(command),
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => {
                    self.disconnected = true;
                    return;
                }
            }
        }
    }

    fn handle(&mut self, command: Command) {
        match command {
            Command::Submit(submitted) if self.new_weights.is_some() => self.held.push(*submitted),
            Command::Submit(submitted) => {
                let _ = self.guarded(|thread| thread.receive_request(*submitted));
            }
            Command::Snapshot { number, choice, inbox, reply } => {
                let _ = self.guarded(|thread| {
                    let _ = reply.send(thread.snapshot(number, choice, inbox));
                });
            }
            Command::Pause => self.scheduler.pause(),
            Command::Resume => self.scheduler.resume(),
            Command::Drain(waiting) => {
                let _ = self.guarded(Self::begin_waiting);
                self.scheduler.drain();
                if self.is_idle() && self.held.is_empty() {
                    waiting.send(()).unwrap_or_default();
                } else {
                    self.drains.push(waiting);
                }
            }
            Command::Release(id) => {
                let _ = self.guarded(|thread| thread.scheduler.release(id));
            }
            Command::Stats(reply) => {
                let _ = self.guarded(Self::drop_cancelled);
                self.poll_tier();
                let mut stats = self.scheduler.stats();
                stats.requests_waiting += self.num_waiting_for_media() + self.held.len();
                let _ = reply.send(stats);
            }
            Command::PoolSnapshot(reply) => {
                let _ = reply.send(self.scheduler.snapshot());
            }
            Command::ReIsq(new) => self.new_weights = Some(new),
            Command::Unload(waiting) => self.unloads.push(waiting),
        }
    }

    /// Does what a panic may interrupt. Then the books may be half written: every request ends, and the thread goes on with an
    /// empty pool.
    pub(super) fn guarded<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> Result<T, String> {
        let result = caught(|| work(self));
        if let Err(why) = &result {
            self.start_over(why);
        }
        result
    }

    fn start_over(&mut self, why: &str) {
        tracing::error!("every request ends: {why}");
        for request in self.requests.values_mut() {
            if caught(|| request.fail(why)).is_err() {
                request.abandon(EngineError::Internal(why.to_owned()));
            }
        }
        self.deliver_events();
        self.requests.clear();
        self.active.clear();
        self.outputs = StepOutputs::default();
        self.renew_scheduler();
    }

    /// An empty pool, whose every key is forgotten.
    fn renew_scheduler(&mut self) {
        self.states = StateSlots::default();
        let (paused, draining) = (self.scheduler.is_paused(), self.scheduler.is_draining());
        match Scheduler::new(self.scheduler.config().clone(), self.kv.clone()) {
            Ok(scheduler) => {
                self.scheduler = scheduler;
                if let Some(swapper) = &self.swapper {
                    swapper.attach(&mut self.scheduler);
                }
                self.record_events();
                if draining {
                    self.scheduler.drain();
                }
                if paused {
                    self.scheduler.pause();
                }
            }
            Err(error) => tracing::error!("the scheduler cannot be made again: {error}"),
        }
    }
}

//! The one thread that owns scheduler, pool and device.

mod prompt_logprobs;

use std::{
    collections::HashMap,
    ops::Range,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, TryRecvError},
    },
};

use paged::{CacheIdentity, IdentityField, KvCacheConfig, NewRequest, RequestId, Scheduler, SchedulerOutput};

use super::{
    KvCacheStats,
    output::{Job, Submission},
};
use crate::{
    EngineError, FinishReason,
    error::caught,
    input_batch::{BlockLayout, InputBatch},
    model::config::RopeRows,
    model_runner::ModelRunner,
    sampler::Sampled,
    tokenizer::Tokenizer,
};

/// What callers ask of the engine thread.
pub enum Command {
    /// A validated request.
    Submit(Box<Submission>),
    /// The figures of the pool, after cancelled requests are gone.
    Stats(Sender<KvCacheStats>),
}

/// A request of the scheduler: one choice of a job.
struct Live {
    job: u64,
    choice: usize,
    rope: RopeRows,
    prompt_logprobs_done: usize,
    /// The job's other choices wait until this one's prompt is computed, to find its blocks.
    holds_others: bool,
}

/// State of the engine thread.
pub struct EngineThread {
    inbox: Receiver<Command>,
    scheduler: Scheduler,
    /// What the scheduler is made from.
    kv: KvCacheConfig,
    runner: ModelRunner,
    tokenizer: Arc<Tokenizer>,
    jobs: HashMap<u64, Job>,
    live: HashMap<RequestId, Live>,
    next_job: u64,
    next_request: u64,
    output: SchedulerOutput,
    batch: InputBatch,
    results: StepResults,
    disconnected: bool,
}

/// What a step gave; reused from step to step.
#[derive(Default)]
struct StepResults {
    /// Requests that sample, with the last of their rows.
    sampling: Vec<(RequestId, u32)>,
    /// Rows whose logits are computed together.
    rows: Vec<u32>,
    /// The token of each request that sampled, in the order of the rows.
    sampled: Vec<(RequestId, Sampled)>,
    /// The same without log probabilities.
    tokens: Vec<(RequestId, u32)>,
    /// Requests that cannot go on, and why.
    failed: Vec<(RequestId, String)>,
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
            tokenizer,
            jobs: HashMap::new(),
            live: HashMap::new(),
            next_job: 0,
            next_request: 0,
            output: SchedulerOutput::default(),
            batch: InputBatch::default(),
            results: StepResults::default(),
            disconnected: false,
        }
    }

    /// Serves until every handle is gone and every request has ended.
    pub fn run(mut self) {
        while self.turn() {}
    }

    /// Takes what is in the inbox and runs a step, if there is anything to do; false when there never will be again.
    pub(super) fn turn(&mut self) -> bool {
        self.receive();
        let _ = self.guarded(Self::drop_cancelled);
        if self.live.is_empty() {
            return !self.disconnected;
        }
        let _ = self.guarded(Self::step);
        true
    }

    /// Takes what is in the inbox; waits for something when there is nothing else to do.
    fn receive(&mut self) {
        if self.live.is_empty() && !self.disconnected {
            match self.inbox.recv() {
                Ok(command) => self.handle(command),
                Err(_) => self.disconnected = true,
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
            Command::Submit(submission) => {
                let events = submission.events.clone();
                if let Err(why) = self.guarded(|thread| thread.submit(*submission)) {
                    let _ = events.send(Err(EngineError::Internal(why)));
                }
            }
            Command::Stats(reply) => {
                let _ = self.guarded(Self::drop_cancelled);
                let _ = reply.send(self.scheduler.stats());
            }
        }
    }

    /// Does what a panic may interrupt. Then the books may be half written: every request ends, and the thread goes on with an
    /// empty pool.
    pub(super) fn guarded(&mut self, work: impl FnOnce(&mut Self)) -> Result<(), String> {
        let result = caught(|| work(self));
        if let Err(why) = &result {
            self.start_over(why);
        }
        result
    }

    fn start_over(&mut self, why: &str) {
        tracing::error!("every request ends: {why}");
        for job in self.jobs.values_mut() {
            if caught(|| job.fail(why)).is_err() {
                job.abandon(EngineError::Internal(why.to_owned()));
            }
        }
        self.jobs.clear();
        self.live.clear();
        self.results = StepResults::default();
        match Scheduler::new(self.scheduler.config().clone(), self.kv.clone()) {
            Ok(scheduler) => self.scheduler = scheduler,
            Err(error) => tracing::error!("the scheduler cannot be made again: {error}"),
        }
    }

    fn submit(&mut self, submission: Submission) {
        let job_id = self.next_job;
        self.next_job += 1;
        let num_choices = submission.choices.len();
        let num_prompt_tokens = submission.prompt_token_ids.len();
        // Choices find each other's blocks only once these are computed.
        let caches = self.kv.enable_prefix_caching && self.scheduler.config().retain_kv && !submission.prompt_logprobs;
        let holds_others = num_choices > 1 && caches && num_prompt_tokens > self.kv.block_size;
        self.jobs.insert(job_id, Job::new(submission));
        let now = if holds_others { 1 } else { num_choices };
        if let Err(error) = self.add_choices(job_id, 0..now, holds_others) {
            return self.abandon(job_id, error);
        }
        if let Some(job) = self.jobs.get_mut(&job_id) {
            job.begin();
        }
    }

    fn add_choices(&mut self, job_id: u64, choices: Range<usize>, holds_others: bool) -> Result<(), EngineError> {
        let Some(job) = self.jobs.get(&job_id) else { return Ok(()) };
        let submission = job.submission();
        let rope = self.runner.config().rope_rows(submission.prompt_token_ids.len());
        for choice in choices {
            let request_id = RequestId(self.next_request);
            self.next_request += 1;
            self.scheduler
                .add_request(NewRequest {
                    // Requests that use different rope tables have different keys for the same tokens.
                    identity: CacheIdentity::new().with(IdentityField::Rope, &rope.first.to_le_bytes()).into_bytes(),
                    skip_prefix_lookup: submission.prompt_logprobs,
                    ..NewRequest::new(request_id, submission.prompt_token_ids.to_vec(), submission.max_tokens)
                })
                .map_err(|e| EngineError::InvalidArgument(e.to_string()))?;
            self.live.insert(request_id, Live { job: job_id, choice, rope, prompt_logprobs_done: 0, holds_others });
        }
        Ok(())
    }

    /// Lets the choices go that waited for a request's prompt.
    fn release_others(&mut self, job_id: u64) {
        let Some(num_choices) = self.jobs.get(&job_id).map(Job::num_choices) else { return };
        if let Err(error) = self.add_choices(job_id, 1..num_choices, false) {
            self.abandon(job_id, error);
        }
    }

    /// Ends the requests whose caller has dropped its stream.
    fn drop_cancelled(&mut self) {
        let jobs = &self.jobs;
        let scheduler = &mut self.scheduler;
        self.live.retain(|&id, live| {
            let cancelled = jobs.get(&live.job).is_none_or(Job::is_cancelled);
            if cancelled {
                scheduler.abort_request(id);
            }
            !cancelled
        });
        self.jobs.retain(|_, job| !job.is_cancelled());
    }

    fn step(&mut self) {
        let mut output = std::mem::take(&mut self.output);
        self.scheduler.schedule_into(&mut output);
        for &(id, _) in &output.finished {
            // The scheduler ends a request only when the pool, or the model's length, holds no more of it.
            self.end(id, FinishReason::Length, None);
        }
        if output.rows.is_empty() && output.finished.is_empty() {
            self.end_all_stuck();
        }
        if !output.rows.is_empty() {
            match caught(|| self.execute(&output)) {
                Ok(Ok(())) => self.commit(&output),
                Ok(Err(error)) => self.fail_step(&output, &error.to_string()),
                Err(why) => self.fail_step(&output, &why),
            }
        }
        self.output = output;
    }

    /// Runs the model on the scheduled rows and samples where a row reaches the end of what is known, into `self.results`.
    fn execute(&mut self, output: &SchedulerOutput) -> Result<(), EngineError> {
        let results = &mut self.results;
        results.sampled.clear();
        results.failed.clear();
        let live = &self.live;
        let layout = BlockLayout { block_size: self.kv.block_size, num_groups: self.kv.groups.groups.len() };
        let rope_of = |id| live.get(&id).map_or_else(RopeRows::default, |l| l.rope);
        self.batch.build(&self.scheduler, output, layout, rope_of);
        self.runner.copy_blocks(&output.copies)?;
        self.runner.execute(&self.batch.token_ids, &self.batch.step)?;
        self.report_prompt_logprobs(output)?;

        let StepResults { sampling, rows, sampled, failed, .. } = &mut self.results;
        sampling.clear();
        let ends = output.rows.iter().zip(&self.batch.step.query_start_loc[1..]);
        let samples = ends.filter(|(row, _)| row.sample && failed.iter().all(|(id, _)| *id != row.request_id));
        sampling.extend(samples.map(|(row, end)| (row.request_id, end - 1)));
        for chunk in sampling.chunks(self.runner.max_logit_rows()) {
            rows.clear();
            rows.extend(chunk.iter().map(|&(_, row)| row));
            let logits = self.runner.logits(rows)?;
            let vocab_size = logits.cols();
            for (&(id, _), row) in chunk.iter().zip(logits.as_mut_slice().chunks_exact_mut(vocab_size)) {
                let Some(live) = self.live.get(&id) else { continue };
                let Some(job) = self.jobs.get_mut(&live.job) else { continue };
                match caught(|| job.sample(live.choice, row)) {
                    Ok(Ok(token)) => sampled.push((id, token)),
                    Ok(Err(error)) => failed.push((id, error.to_string())),
                    Err(why) => failed.push((id, why)),
                }
            }
        }
        Ok(())
    }

    /// Commits the step, then hands the new tokens to their jobs.
    fn commit(&mut self, output: &SchedulerOutput) {
        for row in output.rows.iter().filter(|r| r.num_cached_tokens > 0) {
            // Other choices of a job find what its first one computed.
            if let Some(live) = self.live.get(&row.request_id).filter(|live| live.choice == 0)
                && let Some(job) = self.jobs.get_mut(&live.job)
            {
                job.set_cached_tokens(row.num_cached_tokens);
            }
        }
        let mut results = std::mem::take(&mut self.results);
        for (id, why) in results.failed.drain(..) {
            tracing::error!("request {} ends: {why}", id.0);
            self.scheduler.abort_request(id);
            self.end(id, FinishReason::Error, Some(&why));
        }
        results.tokens.clear();
        results.tokens.extend(results.sampled.iter().map(|(id, sampled)| (*id, sampled.token_id)));
        match self.scheduler.update(output, &results.tokens) {
            Ok(()) => self.deliver(output, &results.sampled),
            Err(error) => self.fail_step(output, &error.to_string()),
        }
        self.results = results;
    }

    /// Hands the new tokens to their jobs.
    fn deliver(&mut self, output: &SchedulerOutput, sampled: &[(RequestId, Sampled)]) {
        for (id, sampled) in sampled {
            let Some(live) = self.live.get(id) else { continue };
            let Some(job) = self.jobs.get_mut(&live.job) else { continue };
            match caught(|| job.push_token(live.choice, sampled, &self.tokenizer)) {
                Ok(false) => {}
                Ok(true) => {
                    self.scheduler.finish_request(*id);
                    self.forget(*id);
                }
                Err(why) => self.abandon(live.job, EngineError::Internal(why)),
            }
        }
        for row in output.rows.iter().filter(|row| row.sample) {
            let live = self.live.get_mut(&row.request_id).filter(|live| live.holds_others);
            if let Some(live) = live {
                live.holds_others = false;
                let job = live.job;
                self.release_others(job);
            }
        }
    }

    /// A step that fails ends the requests of that step, with the text they have, and no others.
    fn fail_step(&mut self, output: &SchedulerOutput, why: &str) {
        tracing::error!("a step failed: {why}");
        for id in self.scheduler.step_failed(output) {
            self.end(id, FinishReason::Error, Some(why));
        }
    }

    /// The scheduler promises progress; should it ever fail to make any, requests end instead of hanging.
    fn end_all_stuck(&mut self) {
        let why = format!("no request can be scheduled, though {} wait: {:?}", self.live.len(), self.scheduler.stats());
        tracing::error!("{why}");
        let stuck: Vec<RequestId> = self.live.keys().copied().collect();
        for id in stuck {
            self.scheduler.abort_request(id);
            self.end(id, FinishReason::Error, Some(&why));
        }
    }

    /// Ends a request that the scheduler no longer knows; `error` is the cause of [`FinishReason::Error`].
    fn end(&mut self, id: RequestId, reason: FinishReason, error: Option<&str>) {
        if let Some(live) = self.live.get(&id)
            && let Some(job) = self.jobs.get_mut(&live.job)
        {
            job.finish(live.choice, reason, error);
        }
        self.forget(id);
    }

    fn forget(&mut self, id: RequestId) {
        let Some(live) = self.live.remove(&id) else { return };
        if live.holds_others {
            self.release_others(live.job);
        }
        if self.jobs.get(&live.job).is_some_and(Job::is_done) {
            self.jobs.remove(&live.job);
        }
    }

    /// Ends a job whose state nothing can be made of any more.
    fn abandon(&mut self, job_id: u64, error: EngineError) {
        let scheduler = &mut self.scheduler;
        self.live.retain(|&id, live| {
            let keep = live.job != job_id;
            if !keep {
                scheduler.abort_request(id);
            }
            keep
        });
        if let Some(mut job) = self.jobs.remove(&job_id) {
            job.abandon(error);
        }
    }
}

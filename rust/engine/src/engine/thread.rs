//! The one thread that owns scheduler, pool and device.

use std::{
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        mpsc::{Receiver, Sender, TryRecvError},
    },
};

use paged::{CacheIdentity, IdentityField, NewRequest, RequestId, Scheduler, SchedulerOutput};

use super::{
    KvCacheStats,
    output::{Job, Submission, token_logprobs},
};
use crate::{
    EngineError, FinishReason,
    input_batch::{BlockLayout, InputBatch},
    model_runner::ModelRunner,
    sampler::{Sampled, token_logprob},
    tokenizer::Tokenizer,
};

/// What callers ask of the engine thread.
pub enum Command {
    /// A validated request.
    Submit(Box<Submission>),
    /// The figures of the pool, after cancelled requests are gone.
    Stats(Sender<KvCacheStats>),
}

/// A request and the token that a step gave it, or why there is none.
type SampledRow = (RequestId, Result<Sampled, EngineError>);

/// A request of the scheduler: one choice of a job.
struct Live {
    job: u64,
    choice: usize,
    rope_offset: u32,
    prompt_logprobs_done: usize,
}

/// State of the engine thread.
pub struct EngineThread {
    inbox: Receiver<Command>,
    scheduler: Scheduler,
    runner: ModelRunner,
    tokenizer: Arc<Tokenizer>,
    layout: BlockLayout,
    jobs: HashMap<u64, Job>,
    live: HashMap<RequestId, Live>,
    next_job: u64,
    next_request: u64,
    output: SchedulerOutput,
    batch: InputBatch,
    disconnected: bool,
}

impl EngineThread {
    /// A thread state that has not started.
    pub fn new(
        inbox: Receiver<Command>,
        scheduler: Scheduler,
        runner: ModelRunner,
        tokenizer: Arc<Tokenizer>,
        layout: BlockLayout,
    ) -> Self {
        Self {
            inbox,
            scheduler,
            runner,
            tokenizer,
            layout,
            jobs: HashMap::new(),
            live: HashMap::new(),
            next_job: 0,
            next_request: 0,
            output: SchedulerOutput::default(),
            batch: InputBatch::default(),
            disconnected: false,
        }
    }

    /// Serves until every handle is gone and every request has ended.
    pub fn run(mut self) {
        loop {
            self.receive();
            self.drop_cancelled();
            if self.live.is_empty() {
                if self.disconnected {
                    return;
                }
                continue;
            }
            self.step();
        }
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
            Command::Submit(submission) => self.submit(*submission),
            Command::Stats(reply) => {
                self.drop_cancelled();
                let _ = reply.send(self.scheduler.stats());
            }
        }
    }

    fn submit(&mut self, submission: Submission) {
        let num_choices = submission.choices.len();
        let job_id = self.next_job;
        self.next_job += 1;
        let mut ids = Vec::with_capacity(num_choices);
        for choice in 0..num_choices {
            let request_id = RequestId(self.next_request);
            self.next_request += 1;
            // Requests that use different rope tables have different keys for the same tokens.
            let rope_offset = self.runner.config().rope_offset(submission.prompt_token_ids.len());
            let added = self.scheduler.add_request(NewRequest {
                request_id,
                prompt_token_ids: submission.prompt_token_ids.clone(),
                max_tokens: submission.max_tokens,
                identity: CacheIdentity::new().with(IdentityField::Rope, &rope_offset.to_le_bytes()).into_bytes(),
                skip_prefix_lookup: submission.prompt_logprobs,
            });
            if let Err(error) = added {
                for id in ids {
                    self.scheduler.abort_request(id);
                }
                let _ = submission.events.send(Err(EngineError::InvalidArgument(error.to_string())));
                return;
            }
            ids.push(request_id);
            self.live.insert(request_id, Live { job: job_id, choice, rope_offset, prompt_logprobs_done: 0 });
        }
        self.jobs.insert(job_id, Job::new(submission));
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
            self.end(id, FinishReason::Length);
        }
        if output.rows.is_empty() && output.finished.is_empty() {
            self.end_all_stuck();
        }
        if !output.rows.is_empty() {
            let result = catch_unwind(AssertUnwindSafe(|| self.execute(&output)));
            match result {
                Ok(Ok(sampled)) => self.commit(&output, sampled),
                Ok(Err(error)) => self.fail_step(&output, &error.to_string()),
                Err(panic) => self.fail_step(&output, &panic_message(panic.as_ref())),
            }
        }
        self.output = output;
    }

    /// Runs the model on the scheduled rows and samples where a row reaches the end of what is known.
    fn execute(&mut self, output: &SchedulerOutput) -> Result<Vec<SampledRow>, EngineError> {
        let live = &self.live;
        self.batch.build(&self.scheduler, output, self.layout, |id| live.get(&id).map_or(0, |l| l.rope_offset));
        self.runner.execute(&self.batch.token_ids, &self.batch.step)?;
        self.report_prompt_logprobs(output)?;

        let sampling: Vec<(RequestId, u32)> = output
            .rows
            .iter()
            .zip(&self.batch.step.query_start_loc[1..])
            .filter(|(row, _)| row.sample)
            .map(|(row, end)| (row.request_id, end - 1))
            .collect();
        let mut sampled = Vec::with_capacity(sampling.len());
        for chunk in sampling.chunks(self.runner.max_logit_rows()) {
            let rows: Vec<u32> = chunk.iter().map(|&(_, row)| row).collect();
            let logits = self.runner.logits(&rows)?;
            let vocab_size = logits.cols();
            for (&(id, _), row) in chunk.iter().zip(logits.as_mut_slice().chunks_exact_mut(vocab_size)) {
                let live = &self.live[&id];
                if let Some(job) = self.jobs.get_mut(&live.job) {
                    sampled.push((id, job.sample(live.choice, row)));
                }
            }
        }
        Ok(sampled)
    }

    /// Log probabilities of the prompt tokens that follow the rows of this step, for requests that want them.
    fn report_prompt_logprobs(&mut self, output: &SchedulerOutput) -> Result<(), EngineError> {
        for (r, scheduled) in output.rows.iter().enumerate() {
            let id = scheduled.request_id;
            let Some(live) = self.live.get_mut(&id) else { continue };
            let Some(job) = self.jobs.get_mut(&live.job) else { continue };
            if !job.submission().prompt_logprobs {
                continue;
            }
            let top_k = job.submission().logprobs.unwrap_or(0);
            let prompt = job.submission().prompt_token_ids.clone();
            if live.prompt_logprobs_done == 0 {
                job.push_prompt_logprobs(live.choice, vec![token_logprobs(&self.tokenizer, prompt[0], None, &[])]);
                live.prompt_logprobs_done = 1;
            }
            let start = scheduled.num_computed_tokens;
            let first = start.max(live.prompt_logprobs_done - 1);
            let last = (start + scheduled.num_scheduled_tokens).min(prompt.len() - 1);
            let base = self.batch.step.query_start_loc[r];
            let positions: Vec<usize> = (first..last).collect();
            for chunk in positions.chunks(self.runner.max_logit_rows()) {
                let rows: Vec<u32> = chunk.iter().map(|p| base + (p - start) as u32).collect();
                let logits = self.runner.logits(&rows)?;
                let entries = chunk
                    .iter()
                    .enumerate()
                    .map(|(i, p)| {
                        let token = prompt[p + 1];
                        let row = token_logprob(logits.row(i), token, top_k)?;
                        Ok(token_logprobs(&self.tokenizer, token, Some(row.logprob), &row.top))
                    })
                    .collect::<Result<_, EngineError>>()?;
                job.push_prompt_logprobs(live.choice, entries);
                live.prompt_logprobs_done += chunk.len();
            }
        }
        Ok(())
    }

    /// Commits the step, then hands the new tokens to their jobs.
    fn commit(&mut self, output: &SchedulerOutput, sampled: Vec<SampledRow>) {
        for row in output.rows.iter().filter(|r| r.num_cached_tokens > 0) {
            if let Some(job) = self.live.get(&row.request_id).and_then(|l| self.jobs.get_mut(&l.job)) {
                job.set_cached_tokens(row.num_cached_tokens);
            }
        }
        let mut tokens = Vec::with_capacity(sampled.len());
        for (id, result) in &sampled {
            match result {
                Ok(s) => tokens.push((*id, s.token_id)),
                Err(error) => {
                    tracing::error!("request {} ends: {error}", id.0);
                    self.scheduler.abort_request(*id);
                    self.end(*id, FinishReason::Error);
                }
            }
        }
        if let Err(error) = self.scheduler.update(output, &tokens) {
            return self.fail_step(output, &error.to_string());
        }
        for (id, result) in sampled {
            let (Ok(sampled), Some(live)) = (result, self.live.get(&id)) else { continue };
            let Some(job) = self.jobs.get_mut(&live.job) else { continue };
            if job.push_token(live.choice, &sampled, &self.tokenizer) {
                self.scheduler.finish_request(id);
                self.forget(id);
            }
        }
    }

    /// A step that fails ends the requests of that step, with the text they have, and no others.
    fn fail_step(&mut self, output: &SchedulerOutput, why: &str) {
        tracing::error!("a step failed: {why}");
        for id in self.scheduler.step_failed(output) {
            self.end(id, FinishReason::Error);
        }
    }

    /// The scheduler promises progress; should it ever fail to make any, requests end instead of hanging.
    fn end_all_stuck(&mut self) {
        tracing::error!("no request can be scheduled, though {} wait: {:?}", self.live.len(), self.scheduler.stats());
        let stuck: Vec<RequestId> = self.live.keys().copied().collect();
        for id in stuck {
            self.scheduler.abort_request(id);
            self.end(id, FinishReason::Error);
        }
    }

    /// Ends a request that the scheduler no longer knows.
    fn end(&mut self, id: RequestId, reason: FinishReason) {
        if let Some(live) = self.live.get(&id)
            && let Some(job) = self.jobs.get_mut(&live.job)
        {
            job.finish(live.choice, reason);
        }
        self.forget(id);
    }

    fn forget(&mut self, id: RequestId) {
        if let Some(live) = self.live.remove(&id)
            && self.jobs.get(&live.job).is_some_and(Job::is_done)
        {
            self.jobs.remove(&live.job);
        }
    }
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "unknown panic".into())
}

//! One step: schedule, run the model, sample, commit, hand the tokens out.

use std::time::Instant;

use paged::{RequestId, SchedulerOutput, StuckReport};

use super::{EngineThread, ticks};
use crate::{
    EngineError, FinishReason, engine::output::End, error::caught, input_batch::BlockLayout, model::config::RopeRows,
    sampler::Sampled,
};

/// What a step gave; reused from step to step.
#[derive(Default)]
pub(super) struct StepResults {
    /// Requests that sample, with the last of their rows.
    pub(super) sampling: Vec<(RequestId, u32)>,
    /// Rows whose logits are computed together, and the tokens of the largest where only these count.
    pub(super) rows: Vec<u32>,
    pub(super) greedy_tokens: Vec<u32>,
    /// Tokens of the other requests.
    pub(super) sampled: Vec<(RequestId, Sampled)>,
    /// The first tokens of all choices of a job, by the request that computed their prompt.
    pub(super) branches: Vec<(RequestId, Vec<Result<Sampled, String>>)>,
    /// What the scheduler is told: the token of each request that sampled, in the order of the rows.
    pub(super) tokens: Vec<(RequestId, u32)>,
    /// Requests that cannot go on, and why.
    pub(super) failed: Vec<(RequestId, String)>,
}

impl EngineThread {
    pub(super) fn step(&mut self) {
        let mut output = std::mem::take(&mut self.output);
        self.scheduler.set_now(ticks(self.started, Instant::now()));
        self.hear_tier();
        self.scheduler.limit_mixed_steps(self.pacer.max_prompt_tokens());
        self.scheduler.schedule_into(&mut output);
        for &(id, reason) in &output.finished {
            match reason {
                paged::FinishReason::Deadline => self.end(id, &End::new(FinishReason::Timeout)),
                paged::FinishReason::Stuck => self.end_stuck(id, output.stuck.as_ref()),
                // The pool, or the model's length, holds no more of it.
                _ => self.end(id, &End::new(FinishReason::Length)),
            }
        }
        for preemption in &output.preempted {
            let live = self.live.get(&preemption.request_id);
            if let Some(job) = live.and_then(|live| self.jobs.get_mut(&live.job)) {
                job.count_preemption();
            }
        }
        // First out: what comes in may take the place of what was freed.
        self.swap_out();
        self.swap_in(&output);
        if !output.rows.is_empty() {
            let began = Instant::now();
            match caught(|| self.execute(&output)) {
                Ok(Ok(())) => {
                    let chunks = output.rows.iter().map(|row| row.num_scheduled_tokens).filter(|num_tokens| *num_tokens > 1);
                    self.pacer.measure(chunks.sum(), began.elapsed());
                    self.commit(&output);
                }
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
        results.branches.clear();
        results.tokens.clear();
        results.failed.clear();
        let live = &self.live;
        let layout = BlockLayout { block_size: self.kv.block_size, num_groups: self.kv.groups.groups.len() };
        let rope_of = |id| live.get(&id).map_or_else(RopeRows::default, |l| l.rope);
        self.batch.build(&self.scheduler, output, layout, rope_of);
        self.runner.copy_blocks(&output.copies)?;
        self.runner.execute(&self.batch.token_ids, &self.batch.step)?;
        self.report_prompt_logprobs(output)?;
        self.sample(output)
    }

    /// Commits the step, then hands the new tokens to their jobs.
    fn commit(&mut self, output: &SchedulerOutput) {
        self.count(output);
        let mut results = std::mem::take(&mut self.results);
        for (id, why) in results.failed.drain(..) {
            tracing::error!("request {} ends: {why}", id.0);
            self.scheduler.abort_request(id);
            self.end(id, &End::error(&why));
        }
        match self.scheduler.update(output, &results.tokens) {
            Ok(()) => {
                // Before anyone hears of it: who has the answer may end the process.
                self.swap_out();
                results.sampled.drain(..).for_each(|(id, token)| self.deliver(id, &token));
                results.branches.drain(..).for_each(|(lead, tokens)| self.branch_out(lead, tokens));
            }
            Err(error) => self.fail_step(output, &error.to_string()),
        }
        self.results = results;
    }

    /// Keeps the figures of each request's usage.
    fn count(&mut self, output: &SchedulerOutput) {
        for row in &output.rows {
            let Some(live) = self.live.get_mut(&row.request_id) else { continue };
            let Some(job) = self.jobs.get_mut(&live.job) else { continue };
            let (start, end) = (row.num_computed_tokens, row.num_computed_tokens + row.num_scheduled_tokens);
            if live.num_computed_tokens == 0 {
                job.set_cached_tokens(start, row.miss);
            }
            job.count_recomputed(live.num_computed_tokens.min(end).saturating_sub(start));
            live.num_computed_tokens = live.num_computed_tokens.max(end);
        }
    }

    /// Hands a request's new token to its job.
    pub(super) fn deliver(&mut self, id: RequestId, token: &Sampled) {
        let Some(live) = self.live.get(&id) else { return };
        let Some(job) = self.jobs.get_mut(&live.job) else { return };
        match caught(|| job.push_token(live.choice, token, &self.tokenizer)) {
            Ok(None) => {}
            Ok(Some(reason)) => self.complete(id, reason),
            Err(why) => self.abandon(live.job, EngineError::Internal(why)),
        }
    }

    /// A step that fails ends the requests of that step, with the text they have, and no others.
    fn fail_step(&mut self, output: &SchedulerOutput, why: &str) {
        tracing::error!("a step failed: {why}");
        for id in self.scheduler.step_failed(output) {
            self.end(id, &End::error(why));
        }
        self.check_device();
    }

    /// The scheduler promises progress; should it ever fail to make any, it ends the request in the way.
    fn end_stuck(&mut self, id: RequestId, report: Option<&StuckReport>) {
        let why = report.map_or_else(|| "the request cannot be scheduled".to_owned(), ToString::to_string);
        tracing::error!("{why}");
        self.end(id, &End::error(&why));
    }
}

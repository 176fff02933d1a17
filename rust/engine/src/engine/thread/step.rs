//! One step: schedule, run the model, sample, commit, hand the tokens out.

use paged::{RequestId, SchedulerOutput};

use super::EngineThread;
use crate::{EngineError, FinishReason, error::caught, input_batch::BlockLayout, model::config::RopeRows, sampler::Sampled};

/// What a step gave; reused from step to step.
#[derive(Default)]
pub(super) struct StepResults {
    /// Requests that sample, with the last of their rows.
    pub(super) sampling: Vec<(RequestId, u32)>,
    /// Rows whose logits are computed together.
    pub(super) rows: Vec<u32>,
    /// The token of each request that sampled, in the order of the rows.
    pub(super) sampled: Vec<(RequestId, Sampled)>,
    /// The same without log probabilities.
    pub(super) tokens: Vec<(RequestId, u32)>,
    /// Requests that cannot go on, and why.
    pub(super) failed: Vec<(RequestId, String)>,
}

impl EngineThread {
    pub(super) fn step(&mut self) {
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
}

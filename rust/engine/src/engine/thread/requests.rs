//! How requests begin and end.

use std::{ops::Range, time::Instant};

use paged::{CacheIdentity, IdentityField, NewRequest, RequestId};

use super::{EngineThread, Live};
use crate::{
    EngineError, FinishReason,
    engine::output::{Job, Submission},
};

/// The scheduler's clock: microseconds since the engine started.
pub(super) fn ticks(started: Instant, at: Instant) -> u64 {
    u64::try_from(at.saturating_duration_since(started).as_micros()).unwrap_or(u64::MAX)
}

impl EngineThread {
    pub(super) fn submit(&mut self, submission: Submission) {
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
        let service = &submission.service;
        let rope = self.runner.config().rope_rows(submission.prompt_token_ids.len());
        for choice in choices {
            let request_id = RequestId(self.next_request);
            self.next_request += 1;
            self.scheduler
                .add_request(NewRequest {
                    // Requests that use different rope tables have different keys for the same tokens.
                    identity: CacheIdentity::new().with(IdentityField::Rope, &rope.first.to_le_bytes()).into_bytes(),
                    skip_prefix_lookup: submission.prompt_logprobs,
                    cache_salt: service.cache_salt.clone(),
                    public_prefix_len: service.public_prefix_len,
                    priority: service.priority,
                    deadline: service.deadline.map(|deadline| ticks(self.started, deadline)),
                    tenant: service.tenant,
                    ..NewRequest::new(request_id, submission.prompt_token_ids.to_vec(), submission.max_tokens)
                })
                .map_err(|e| EngineError::InvalidArgument(e.to_string()))?;
            self.live.insert(request_id, Live { job: job_id, choice, rope, prompt_logprobs_done: 0, holds_others });
        }
        Ok(())
    }

    /// Lets the choices go that waited for a request's prompt.
    pub(super) fn release_others(&mut self, job_id: u64) {
        let Some(num_choices) = self.jobs.get(&job_id).map(Job::num_choices) else { return };
        if let Err(error) = self.add_choices(job_id, 1..num_choices, false) {
            self.abandon(job_id, error);
        }
    }

    /// Ends the requests whose caller has dropped its stream.
    pub(super) fn drop_cancelled(&mut self) {
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

    /// Ends a request that the scheduler no longer knows; `error` is the cause of [`FinishReason::Error`].
    pub(super) fn end(&mut self, id: RequestId, reason: FinishReason, error: Option<&str>) {
        if let Some(live) = self.live.get(&id)
            && let Some(job) = self.jobs.get_mut(&live.job)
        {
            job.finish(live.choice, reason, error);
        }
        self.forget(id);
    }

    pub(super) fn forget(&mut self, id: RequestId) {
        let Some(live) = self.live.remove(&id) else { return };
        if live.holds_others {
            self.release_others(live.job);
        }
        if self.jobs.get(&live.job).is_some_and(Job::is_done) {
            self.jobs.remove(&live.job);
        }
    }

    /// Ends a job whose state nothing can be made of any more.
    pub(super) fn abandon(&mut self, job_id: u64, error: EngineError) {
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

//! How requests begin and end.

use paged::{AdmissionError, CacheIdentity, IdentityField, NewRequest, RequestId};

use super::{EngineThread, Live, ticks};
use crate::{
    EngineError, FinishReason,
    engine::{
        draining,
        output::{End, Job, Submission},
    },
    model::RopeRows,
};

impl EngineThread {
    pub(super) fn submit(&mut self, submission: Submission) {
        if let Some(why) = self.lost.get() {
            return Job::new(submission).abandon(EngineError::DeviceLost(why.clone()));
        }
        let job_id = submission.job;
        let live = Live {
            job: job_id,
            choice: 0,
            rope: self.runner.config().rope_rows(submission.prompt_token_ids.len()),
            prompt_logprobs_done: 0,
            num_computed_tokens: 0,
            leads: submission.choices.len() > 1,
            output: submission.output,
        };
        let id = self.new_request_id();
        let mut added = Ok(());
        if self.scheduler.is_draining() || !self.fork_source(id, &submission, live.rope) {
            let new = self.new_request(id, &submission, live.rope);
            added = self.scheduler.add_request(new);
        }
        let mut job = Job::new(submission);
        match added {
            Ok(()) => {}
            Err(AdmissionError::Draining { .. }) => return job.abandon(draining()),
            Err(error) => return job.abandon(EngineError::InvalidArgument(error.to_string())),
        }
        job.begin();
        self.jobs.insert(job_id, job);
        self.live.insert(id, live);
    }

    pub(super) fn new_request_id(&mut self) -> RequestId {
        let id = RequestId(self.next_request);
        self.next_request += 1;
        id
    }

    fn new_request(&self, id: RequestId, submission: &Submission, rope: RopeRows) -> NewRequest {
        let service = &submission.service;
        NewRequest {
            // Requests that use different rope tables have different keys for the same tokens.
            identity: CacheIdentity::new().with(IdentityField::Rope, &rope.first.to_le_bytes()).into_bytes(),
            skip_prefix_lookup: submission.prompt_logprobs,
            cache_salt: submission.origin.cache_salt.clone(),
            public_prefix_len: submission.origin.public_prefix_len,
            priority: service.priority,
            deadline: service.deadline.map(|deadline| ticks(self.started, deadline)),
            tenant: service.tenant,
            ..NewRequest::new(id, submission.prompt_token_ids.to_vec(), submission.max_tokens)
        }
    }

    /// Ends the requests whose caller has dropped its stream.
    pub(super) fn drop_cancelled(&mut self) {
        // Each is asked once: one that is dropped meanwhile must not lose its job and keep its place in the next step.
        self.jobs.retain(|_, job| !job.is_cancelled());
        self.drop_without_job();
    }

    /// Takes requests whose job has gone from the scheduler.
    fn drop_without_job(&mut self) {
        let (jobs, scheduler) = (&self.jobs, &mut self.scheduler);
        self.live.retain(|&id, live| {
            let keep = jobs.contains_key(&live.job);
            if !keep {
                scheduler.abort_request(id);
            }
            keep
        });
    }

    /// Ends a request that the scheduler no longer knows.
    pub(super) fn end(&mut self, id: RequestId, end: &End<'_>) {
        if let Some(live) = self.live.get(&id)
            && let Some(job) = self.jobs.get_mut(&live.job)
        {
            // Choices that have not begun end with the one that was to begin them.
            let choices = if live.leads { 0..job.num_choices() } else { live.choice..live.choice + 1 };
            choices.for_each(|choice| job.finish(choice, end.clone()));
        }
        self.forget(id);
    }

    pub(super) fn forget(&mut self, id: RequestId) {
        let Some(live) = self.live.remove(&id) else { return };
        if self.jobs.get(&live.job).is_some_and(Job::is_done) {
            self.ended.extend(self.jobs.remove(&live.job));
        }
    }

    /// Ends every request with the text it has.
    pub(super) fn cancel_all(&mut self) {
        let ids: Vec<_> = self.live.keys().copied().collect();
        for id in ids {
            self.scheduler.finish_request(id);
            self.end(id, &End::new(FinishReason::Canceled));
        }
        self.swap_out();
    }

    /// Ends a job whose state nothing can be made of any more.
    pub(super) fn abandon(&mut self, job_id: u64, error: EngineError) {
        let job = self.jobs.remove(&job_id);
        self.drop_without_job();
        if let Some(mut job) = job {
            job.abandon(error);
        }
    }
}

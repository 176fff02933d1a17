//! Requests that share what is computed: the choices of a job, and what goes on from a sequence.

use std::{
    sync::{Arc, mpsc::Sender},
    time::Instant,
};

use paged::{AdmissionError, ForkError, ForkRequest, RequestId};

use super::{Command, EngineThread, Live, ticks};
use crate::{
    EngineError, FinishReason, OutputKind, Sequence,
    engine::{
        output::{End, Submission},
        sequence::Kept,
    },
    error::caught,
    model::RopeRows,
    sampler::Sampled,
};

impl EngineThread {
    /// The other choices begin where the first one's prompt ends, each with a first token of its own; `tokens` has those of all
    /// choices. They share the blocks of what is computed.
    pub(in crate::engine) fn branch_out(&mut self, lead: RequestId, tokens: Vec<Result<Sampled, String>>) {
        let Some(live) = self.live.get_mut(&lead) else { return };
        live.leads = false;
        let Live { job, rope, num_computed_tokens, .. } = *live;
        // The first choice goes last: the others begin from its blocks.
        for (choice, token) in tokens.into_iter().enumerate().rev() {
            match token {
                Ok(token) if choice == 0 => self.deliver(lead, &token),
                Ok(token) => {
                    let (prompt_logprobs_done, leads, output) = (0, false, OutputKind::Tokens);
                    let live = Live { job, choice, rope, prompt_logprobs_done, num_computed_tokens, leads, output };
                    self.begin_choice(lead, live, &token);
                }
                Err(why) => {
                    tracing::error!("choice {choice} of request {} ends: {why}", lead.0);
                    if choice == 0 {
                        self.scheduler.abort_request(lead);
                        self.end(lead, &End::error(&why));
                    } else if let Some(job) = self.jobs.get_mut(&job) {
                        job.finish(choice, End::error(&why));
                    }
                }
            }
        }
    }

    /// Gives a choice its first token, and forks the request that computed the prompt if it has a use for the blocks.
    fn begin_choice(&mut self, lead: RequestId, live: Live, token: &Sampled) {
        let id = self.new_request_id();
        let Live { job: job_id, choice, .. } = live;
        let Some(job) = self.jobs.get_mut(&job_id) else { return };
        let ended = match caught(|| job.push_token(choice, token, &self.tokenizer)) {
            Ok(ended) => ended,
            Err(why) => return self.abandon(job_id, EngineError::Internal(why)),
        };
        let submission = job.submission();
        if let (Some(reason), None) = (ended, &submission.keep) {
            return job.finish(choice, End::new(reason));
        }
        let child = ForkRequest {
            num_source_tokens: Some(submission.prompt_token_ids.len()),
            token_ids: vec![token.token_id],
            ..fork_request(id, submission, self.started)
        };
        match self.scheduler.fork(lead, child) {
            Ok(()) => {
                self.live.insert(id, live);
                if let Some(reason) = ended {
                    self.complete(id, reason);
                }
            }
            // The prompt fills the context or the pool, so its first token is all that it comes to.
            Err(ForkError::Child(AdmissionError::TooLongForModel { .. } | AdmissionError::TooLongForPool { .. })) => {
                job.finish(choice, End::new(ended.unwrap_or(FinishReason::Length)));
            }
            Err(error) => job.finish(choice, End::error(&error.to_string())),
        }
    }

    /// Ends a request whose last token has been delivered, and keeps its blocks if they are asked for.
    pub(super) fn complete(&mut self, id: RequestId, reason: FinishReason) {
        let Some(live) = self.live.get(&id) else { return };
        let inbox = self.jobs.get(&live.job).and_then(|job| job.submission().keep.clone());
        let kept = inbox.filter(|_| self.scheduler.keep_request(id)).map(|inbox| Arc::new(Kept { id, rope: live.rope, inbox }));
        if kept.is_none() {
            self.scheduler.finish_request(id);
        }
        self.end(id, &End { kept, ..End::new(reason) });
    }

    /// Starts a request from the blocks of the sequence that it goes on from; false if these are not there.
    pub(super) fn fork_source(&mut self, id: RequestId, submission: &Submission, rope: RopeRows) -> bool {
        // Log probabilities of the prompt need every position to be computed.
        let Some(source) = submission.source.as_ref().filter(|_| !submission.prompt_logprobs) else { return false };
        let Some(kept) = source.sequence.kept.as_ref().filter(|kept| kept.rope == rope && source.num_tokens > 0) else {
            return false;
        };
        let child = ForkRequest {
            num_source_tokens: Some(source.num_tokens),
            token_ids: submission.prompt_token_ids[source.num_tokens..].to_vec(),
            ..fork_request(id, submission, self.started)
        };
        // What cannot be served as a fork is told by the attempt to serve it by itself.
        self.scheduler.fork(kept.id, child).is_ok()
    }

    /// What a choice has come to so far; `inbox` is where it is to be released.
    pub(super) fn snapshot(&mut self, job_id: u64, choice: usize, inbox: Sender<Command>) -> Result<Sequence, EngineError> {
        let runs = |live: &Live| live.job == job_id && (live.choice == choice || live.leads);
        let found = self.live.iter().find(|(_, live)| runs(live)).map(|(id, live)| (*id, live.rope));
        let id = self.new_request_id();
        let (Some((source, rope)), Some(job)) = (found, self.jobs.get(&job_id).filter(|job| choice < job.num_choices())) else {
            return Err(EngineError::InvalidArgument(format!(
                "choice {choice} does not run: ask while it does, or for its sequence at the end, with keep"
            )));
        };
        let copied = self.scheduler.fork(source, ForkRequest::new(id, 1)).is_ok() && self.scheduler.keep_request(id);
        Ok(job.sequence(choice, copied.then(|| Arc::new(Kept { id, rope, inbox }))))
    }
}

/// A fork of some request that is served as a submission asks.
fn fork_request(id: RequestId, submission: &Submission, started: Instant) -> ForkRequest {
    let service = &submission.service;
    ForkRequest {
        priority: service.priority,
        deadline: service.deadline.map(|deadline| ticks(started, deadline)),
        tenant: service.tenant,
        // The engine counts tokens itself; the scheduler's limit is no less.
        ..ForkRequest::new(id, submission.max_tokens)
    }
}

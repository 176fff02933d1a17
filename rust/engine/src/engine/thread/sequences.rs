//! Requests that share what is computed: the choices of one request, and what goes on from a sequence.

use std::{
    sync::{Arc, mpsc::Sender},
    time::Instant,
};

use paged::{AdmissionError, ForkError, ForkRequest, RequestId};

use super::{ActiveChoice, Command, EngineThread, requests::spans, ticks};
use crate::{
    EngineError, FinishReason, OutputKind, Sequence,
    engine::{
        output::{End, SubmittedRequest},
        sequence::Kept,
    },
    error::caught,
    model::RopeRows,
    sampler::Sampled,
    speculation::DraftHistory,
};

impl EngineThread {
    /// The other choices begin where the first one's prompt ends, each with a first token of its own; `tokens` has those of all
    /// choices. They share the blocks of what is computed.
    pub(in crate::engine) fn branch_out(&mut self, lead: RequestId, tokens: Vec<Result<Sampled, String>>) {
        let Some(active) = self.active.get_mut(&lead) else { return };
        active.leads = false;
        let held = active.held.clone();
        let ActiveChoice { request_number, rope, num_computed_tokens, .. } = *active;
        // Where all have failed, it was said of their request.
        let failed: Vec<_> = tokens.iter().filter_map(|token| token.as_ref().err()).collect();
        if let Some(why) = failed.first().filter(|_| failed.len() < tokens.len()) {
            tracing::error!("{} of {} choices of a request end: {why}", failed.len(), tokens.len());
        }
        // The first choice goes last: the others begin from its blocks.
        for (choice, token) in tokens.into_iter().enumerate().rev() {
            match token {
                Ok(token) if choice == 0 => self.deliver(lead, &token, false),
                Ok(token) => {
                    let active = ActiveChoice {
                        request_number,
                        choice,
                        rope,
                        prompt_logprobs_done: 0,
                        num_computed_tokens,
                        leads: false,
                        output: OutputKind::Tokens,
                        drafts: DraftHistory::default(),
                        held: held.clone(),
                    };
                    self.begin_choice(lead, active, &token);
                }
                Err(why) => {
                    if choice == 0 {
                        self.scheduler.abort_request(lead);
                        self.end(lead, &End::error(&why));
                    } else if let Some(request) = self.requests.get_mut(&request_number) {
                        request.finish(choice, End::error(&why));
                    }
                }
            }
        }
    }

    /// Gives a choice its first token, and forks the request that computed the prompt if it has a use for the blocks.
    fn begin_choice(&mut self, lead: RequestId, active: ActiveChoice, token: &Sampled) {
        let id = self.new_request_id();
        let ActiveChoice { request_number, choice, .. } = active;
        let Some(request) = self.requests.get_mut(&request_number) else { return };
        let ended = match caught(|| request.push_token(choice, token, &self.tokenizer)) {
            Ok(ended) => ended,
            Err(why) => return self.abandon(request_number, EngineError::Internal(why)),
        };
        let submitted = request.submitted();
        if let (Some(reason), None) = (ended, &submitted.keep) {
            return request.finish(choice, End::new(reason));
        }
        let child = ForkRequest {
            num_source_tokens: Some(submitted.prompt_token_ids.len()),
            token_ids: vec![token.token_id],
            ..fork_request(id, submitted, self.started)
        };
        match self.scheduler.fork(lead, child) {
            Ok(()) => {
                self.active.insert(id, active);
                self.fork_states(lead, id);
                if let Some(reason) = ended {
                    self.complete(id, reason);
                }
            }
            // The prompt fills the context or the pool, so its first token is all that it comes to.
            Err(ForkError::Child(AdmissionError::TooLongForModel { .. } | AdmissionError::TooLongForPool { .. })) => {
                request.finish(choice, End::new(ended.unwrap_or(FinishReason::Length)));
            }
            Err(error) => request.finish(choice, End::error(&error.to_string())),
        }
    }

    /// Copies the states that a fork goes on from.
    fn fork_states(&mut self, source: RequestId, child: RequestId) {
        if let Some(states) = self.drafter.as_mut().and_then(|drafter| drafter.states.as_mut()) {
            states.fork(source, child);
        }
        if !self.runner.config().is_recurrent() {
            return;
        }
        // Those who have ended may lose their places.
        self.save_states();
        let forked = self.states.fork(&self.scheduler, [source, child], self.num_state_slots());
        let copied = forked.and_then(|copy| copy.map_or(Ok(()), |(from, to)| self.runner.copy_states(from, to)));
        if let Err(error) = copied {
            self.scheduler.abort_request(child);
            self.end(child, &End::error(&error.to_string()));
        }
    }

    /// Slots for the states of requests; those of snapshots are behind them.
    pub(super) fn num_state_slots(&self) -> usize {
        let config = self.scheduler.config();
        config.max_num_seqs + config.num_spare_states
    }

    /// Keeps the states that others may begin with.
    pub(super) fn save_states(&mut self) {
        let mut saves = std::mem::take(&mut self.state_saves);
        self.scheduler.take_state_saves(&mut saves);
        for save in saves.drain(..) {
            let copied = match self.states.save(&save, self.num_state_slots()) {
                Some((from, to)) => self.runner.copy_states(from, to).map_err(|error| error.to_string()),
                None => Err("they are not there".to_owned()),
            };
            if let Err(why) = copied {
                tracing::error!("the states behind {} tokens of a request are not kept: {why}", save.num_tokens);
                self.scheduler.forget_snapshot(save.slot);
            }
        }
        self.state_saves = saves;
    }

    /// Ends a request whose last token has been delivered, and keeps its blocks if they are asked for.
    pub(super) fn complete(&mut self, id: RequestId, reason: FinishReason) {
        let Some(active) = self.active.get(&id) else { return };
        let inbox = self.requests.get(&active.request_number).and_then(|request| request.submitted().keep.clone());
        let kept = inbox.filter(|_| self.scheduler.keep_request(id)).map(|inbox| Arc::new(Kept { id, rope: active.rope, inbox }));
        if kept.is_none() {
            self.scheduler.finish_request(id);
        }
        self.end(id, &End { kept, ..End::new(reason) });
    }

    /// Starts a request from the blocks of the sequence that it goes on from; false if these are not there.
    pub(super) fn fork_source(&mut self, id: RequestId, submitted: &SubmittedRequest, rope: RopeRows) -> bool {
        // Log probabilities of the prompt need every position to be computed.
        let Some(source) = submitted.source.as_ref().filter(|_| !submitted.prompt_logprobs.are_wanted()) else { return false };
        let Some(kept) = source.sequence.kept.as_ref().filter(|kept| kept.rope == rope && source.num_tokens > 0) else {
            return false;
        };
        let child = ForkRequest {
            num_source_tokens: Some(source.num_tokens),
            token_ids: submitted.scheduled_token_ids[source.num_tokens..].to_vec(),
            spans: spans(submitted, source.num_tokens),
            ..fork_request(id, submitted, self.started)
        };
        // What cannot be served as a fork is told by the attempt to serve it by itself.
        self.scheduler.fork(kept.id, child).is_ok()
    }

    /// What a choice has come to so far; `inbox` is where it is to be released.
    pub(super) fn snapshot(&mut self, number: u64, choice: usize, inbox: Sender<Command>) -> Result<Sequence, EngineError> {
        let runs = |active: &ActiveChoice| active.request_number == number && (active.choice == choice || active.leads);
        let found = self.active.iter().find(|(_, active)| runs(active)).map(|(id, active)| (*id, active.rope));
        let id = self.new_request_id();
        let is_choice = self.requests.get(&number).is_some_and(|request| choice < request.num_choices());
        let Some((source, rope)) = found.filter(|_| is_choice) else {
            return Err(EngineError::InvalidArgument(format!(
                "choice {choice} does not run: ask while it does, or for its sequence at the end, with keep"
            )));
        };
        let forked = self.scheduler.fork(source, ForkRequest::new(id, 1)).is_ok();
        if forked {
            self.fork_states(source, id);
        }
        let copied = forked && self.scheduler.keep_request(id);
        let Some(request) = self.requests.get(&number) else {
            return Err(EngineError::InvalidArgument(format!("the request of choice {choice} has just ended")));
        };
        Ok(request.sequence(choice, copied.then(|| Arc::new(Kept { id, rope, inbox }))))
    }
}

/// A fork of some request that is served as a submitted request asks.
fn fork_request(id: RequestId, submitted: &SubmittedRequest, started: Instant) -> ForkRequest {
    let service = &submitted.service;
    ForkRequest {
        priority: service.priority,
        deadline: service.deadline.map(|deadline| ticks(started, deadline)),
        tenant: service.tenant,
        // The engine counts tokens itself; the scheduler's limit is no less.
        ..ForkRequest::new(id, submitted.max_tokens)
    }
}

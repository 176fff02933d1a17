//! How requests begin and end.

use std::ops::Range;

use paged::{AdmissionError, CacheIdentity, IdentityField, NewRequest, RequestId};

use super::{ActiveChoice, EngineThread, HeldOutputs, ticks};
use crate::{
    EngineError, FinishReason,
    engine::{
        draining,
        output::{ActiveRequest, End, SubmittedRequest},
    },
    lora::Generation,
    model::RopeRows,
    speculation::DraftHistory,
};

/// What parts the blocks of requests with the same tokens: those that use different rope tables, or other weights.
fn identity(rope: RopeRows, adapter: Option<&Generation>) -> Vec<u8> {
    let identity = CacheIdentity::new().with(IdentityField::Rope, &rope.first.to_le_bytes());
    match adapter {
        Some(adapter) => identity.with(IdentityField::Adapter, adapter.id.as_bytes()).into_bytes(),
        None => identity.into_bytes(),
    }
}

/// The spans of a request's items from `first` on.
pub(super) fn spans(submitted: &SubmittedRequest, first: usize) -> Vec<Range<usize>> {
    let items = submitted.origin.items.iter();
    let spans = items.flat_map(|items| &items.spans).map(|(start, end)| *start as usize..*end as usize);
    spans.filter(|span| span.start >= first).collect()
}

impl EngineThread {
    pub(super) fn submit(&mut self, submitted: SubmittedRequest, held: HeldOutputs) {
        if let Some(why) = self.lost.get() {
            return ActiveRequest::new(submitted).abandon(EngineError::DeviceLost(why.clone()));
        }
        let number = submitted.number;
        let active = ActiveChoice {
            request_number: number,
            choice: 0,
            rope: self.runner.config().rope_rows(submitted.prompt_token_ids.len()),
            prompt_logprobs_done: 0,
            num_computed_tokens: 0,
            leads: submitted.choices.len() > 1,
            output: submitted.output,
            drafts: DraftHistory::default(),
            held,
        };
        let id = self.new_request_id();
        let mut added = Ok(());
        if self.scheduler.is_draining() || !self.fork_source(id, &submitted, active.rope) {
            let new = self.new_request(id, &submitted, active.rope);
            added = self.scheduler.add_request(new);
        }
        let mut request = ActiveRequest::new(submitted);
        match added {
            Ok(()) => {}
            Err(AdmissionError::Draining { .. }) => return request.abandon(draining()),
            Err(error) => return request.abandon(EngineError::InvalidArgument(error.to_string())),
        }
        request.begin();
        active.held.encoded.iter().for_each(|kind| request.count_encoded(*kind));
        self.requests.insert(number, request);
        self.active.insert(id, active);
    }

    pub(super) fn new_request_id(&mut self) -> RequestId {
        let id = RequestId(self.next_request);
        self.next_request += 1;
        id
    }

    fn new_request(&self, id: RequestId, submitted: &SubmittedRequest, rope: RopeRows) -> NewRequest {
        let (service, origin) = (&submitted.service, &submitted.origin);
        let (mut cache_salt, mut public_prefix_len) = (origin.cache_salt.clone(), origin.public_prefix_len);
        if let Some((salt, first)) = origin.items.as_ref().and_then(|items| items.salt()) {
            public_prefix_len = if cache_salt.is_empty() { first } else { public_prefix_len.min(first) };
            cache_salt.extend(salt);
        }
        NewRequest {
            identity: identity(rope, submitted.origin.adapter.as_deref()),
            skip_prefix_lookup: submitted.prompt_logprobs.are_wanted(),
            cache_salt,
            public_prefix_len,
            priority: service.priority,
            deadline: service.deadline.map(|deadline| ticks(self.started, deadline)),
            tenant: service.tenant,
            spans: spans(submitted, 0),
            ..NewRequest::new(id, submitted.scheduled_token_ids.to_vec(), submitted.max_tokens)
        }
    }

    /// Ends the requests whose caller has dropped its stream.
    pub(super) fn drop_cancelled(&mut self) {
        // Each is asked once: one that is dropped meanwhile must not lose its entry here and keep its place in the next step.
        self.requests.retain(|_, request| !request.is_cancelled());
        self.drop_choices_without_request();
    }

    /// Takes choices whose request has gone from the scheduler.
    fn drop_choices_without_request(&mut self) {
        let (requests, scheduler) = (&self.requests, &mut self.scheduler);
        self.active.retain(|&id, active| {
            let keep = requests.contains_key(&active.request_number);
            if !keep {
                scheduler.abort_request(id);
            }
            keep
        });
    }

    /// Ends a request that the scheduler no longer knows.
    pub(super) fn end(&mut self, id: RequestId, end: &End<'_>) {
        if let Some(active) = self.active.get(&id)
            && let Some(request) = self.requests.get_mut(&active.request_number)
        {
            // Choices that have not begun end with the one that was to begin them.
            let choices = if active.leads { 0..request.num_choices() } else { active.choice..active.choice + 1 };
            choices.for_each(|choice| request.finish(choice, end.clone()));
        }
        self.forget(id);
    }

    pub(super) fn forget(&mut self, id: RequestId) {
        let Some(active) = self.active.remove(&id) else { return };
        if self.requests.get(&active.request_number).is_some_and(ActiveRequest::is_done) {
            self.ended.extend(self.requests.remove(&active.request_number));
        }
    }

    /// Ends every request with the text it has.
    pub(super) fn cancel_all(&mut self) {
        let ids: Vec<_> = self.active.keys().copied().collect();
        for id in ids {
            self.scheduler.finish_request(id);
            self.end(id, &End::new(FinishReason::Canceled));
        }
        self.swap_out();
    }

    /// Ends a request whose state nothing can be made of any more.
    pub(super) fn abandon(&mut self, number: u64, error: EngineError) {
        let request = self.requests.remove(&number);
        self.drop_choices_without_request();
        if let Some(mut request) = request {
            request.abandon(error);
        }
    }
}

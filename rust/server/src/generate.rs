//! From a request to the engine and back.

use std::{
    future::{Future, poll_fn},
    time::Duration,
};

use engine::{Completion, CompletionCollector, EngineError, GenerationRequest, OutputEvent, RequestHandle};
use openai::{ApiError, Delivery, Generation};

use crate::{
    app::{Admission, App, too_late},
    auth::Caller,
    cancels::Cancelled,
    errors::internal,
    mailbox::Mailbox,
    metrics::Observed,
    models::Target,
    seeing,
    traces::RequestSpan,
};

/// The requests of one answer, while they run. Dropping it cancels them and frees their blocks.
pub struct Running {
    /// Their events.
    pub mailbox: Mailbox,
    handles: Vec<RequestHandle>,
    /// How the answer is sent.
    pub delivery: Delivery,
    /// Choices of each request.
    pub n_choices: usize,
    /// Log probabilities were asked for.
    pub wants_logprobs: bool,
    /// Log probabilities of the prompts were asked for.
    pub wants_prompt_logprobs: bool,
    /// What the metrics and the log are told.
    pub observed: Observed,
    cancelled: Cancelled,
    _admission: Admission,
}

impl Running {
    /// Becomes ready, with the reason, when the answer must end before its time.
    pub fn ended(&self, app: &App) -> impl Future<Output = ApiError> + Send + use<> {
        app.ended(&self.cancelled)
    }

    /// Tokens of the prompts.
    pub fn num_prompt_tokens(&self) -> usize {
        self.handles.iter().map(|handle| handle.prompt_token_ids().len()).sum()
    }

    /// The tokens of each prompt, if the answer is to have them.
    pub fn prompt_token_ids(&self) -> Vec<Option<Vec<u32>>> {
        let ids = |handle: &RequestHandle| self.delivery.token_ids.then(|| handle.prompt_token_ids().to_vec());
        self.handles.iter().map(ids).collect()
    }

    /// How many requests there are.
    pub fn num_requests(&self) -> usize {
        self.handles.len()
    }
}

/// Checks, tokenizes and submits. All that can be refused is refused here, before the first byte of an answer.
pub async fn start(app: &App, caller: &Caller, target: &Target, generation: Generation) -> Result<Running, ApiError> {
    let num_choices = generation.requests.iter().map(|request| request.best_of.unwrap_or(request.n_choices)).sum();
    let admission = app.admit(caller, &target.model, num_choices)?;
    start_admitted(app, caller, target, generation, admission).await
}

/// The same of a request that is admitted.
pub async fn start_admitted(
    app: &App,
    caller: &Caller,
    target: &Target,
    generation: Generation,
    admission: Admission,
) -> Result<Running, ApiError> {
    let Target { model, adapter, .. } = target;
    let Generation { mut requests, delivery, user, grammar_param, .. } = generation;
    let first = requests.first().ok_or_else(|| internal("a request without a prompt".into()))?;
    let (n_choices, wants_logprobs) = (first.n_choices, first.sampling.logprobs.is_some());
    let wants_prompt_logprobs = first.prompt_logprobs.is_some();
    let cancelled = app.cancels.register(&caller.request_id);
    let mut observed = model.metrics.observe(&requests);
    let span = app.traces.as_ref().map(|traces| traces.begin(caller, model.id(), &requests[0], requests.len()));
    let own = deadline(&requests);
    let ready = async {
        // Before anything is decoded: what waits for a model takes no memory.
        app.models.ready(model).await?;
        let turn = seeing::place_all(app, model, &mut requests).await?;
        // An operator may have unloaded it meanwhile.
        Ok((app.models.ready(model).await?, turn))
    };
    let (engine, turn) = app.in_time(&cancelled, app.time_left(target, own), ready).await?;
    for request in &mut requests {
        if request.adapter.is_none() {
            request.adapter.clone_from(adapter);
        }
        let service = &mut request.service;
        service.deadline = app.time_left(target, service.deadline);
        if service.deadline.is_some_and(|left| left.is_zero()) {
            return Err(too_late());
        }
        service.cache_salt = app.keys.salt(caller, service.cache_salt.as_deref());
        service.tenant = tenant(caller, user.as_deref());
        service.tenant_weight = caller.weight;
        if service.cache_salt.is_none() {
            service.public_prefix = 0;
        }
    }
    let mailbox = Mailbox::new(&app.bell);
    let sinks: Vec<_> = (0..requests.len()).map(|number| mailbox.sink(number)).collect();
    // Dropped with the task's result when the client goes meanwhile.
    let handles = tokio::task::spawn_blocking(move || {
        let _turn = turn;
        requests.into_iter().zip(sinks).map(|(request, sink)| engine.submit_to(request, sink)).collect::<Result<Vec<_>, _>>()
    });
    let handles = handles.await.map_err(|panic| internal(format!("a defect ended the request: {panic}")))?;
    let handles = handles.map_err(|error| match error {
        EngineError::Grammar { .. } => ApiError { param: grammar_param.map(str::to_owned), ..ApiError::from(error) },
        EngineError::Internal(_) if model.loaded().is_none() => model.gone(),
        error => openai::of_request(error),
    })?;
    model.check_waiting_tokens(&app.config, handles.iter().map(|handle| handle.prompt_token_ids().len()).sum())?;
    observed.span = span.map(RequestSpan::submitted);
    Ok(Running {
        mailbox,
        handles,
        delivery,
        n_choices,
        wants_logprobs,
        wants_prompt_logprobs,
        observed,
        cancelled,
        _admission: admission,
    })
}

/// The limit of time that requests of one answer have of their own.
pub fn deadline(requests: &[GenerationRequest]) -> Option<Duration> {
    requests.iter().filter_map(|request| request.service.deadline).min()
}

/// Whose turn a request takes: the tenant's, and within it the user's.
fn tenant(caller: &Caller, user: Option<&str>) -> Option<String> {
    match (&caller.tenant, user) {
        (None, None) => None,
        (tenant, user) => Some(format!("{}/{}", tenant.as_deref().unwrap_or_default(), user.unwrap_or_default())),
    }
}

/// The complete answers, one a request.
pub async fn collect(app: &App, mut running: Running) -> Result<Vec<Completion>, ApiError> {
    let mut ended = std::pin::pin!(running.ended(app));
    let mut collectors: Vec<CompletionCollector> = running.handles.iter().map(RequestHandle::collector).collect();
    let mut completions: Vec<Option<Completion>> = collectors.iter().map(|_| None).collect();
    while completions.iter().any(Option::is_none) {
        let events = tokio::select! {
            events = poll_fn(|context| running.mailbox.poll(context)) => events,
            error = &mut ended => return Err(error),
        };
        for (number, event) in events {
            let event = event?;
            running.observed.event(number, &event);
            if let Some(completion) = collectors[number].push(event) {
                completions[number] = Some(completion);
            }
        }
    }
    let completions: Vec<Completion> = completions.into_iter().flatten().collect();
    match completions.iter().find_map(Completion::failure) {
        Some(why) => Err(why.into()),
        None => Ok(completions),
    }
}

/// The complete answer of a single request.
pub async fn collect_one(app: &App, running: Running) -> Result<Completion, ApiError> {
    collect(app, running).await?.into_iter().next().ok_or_else(|| internal("no answer came".into()))
}

/// The cause when an event ends a choice because a step failed.
pub fn failure(event: &OutputEvent) -> Option<ApiError> {
    event.failure().map(ApiError::from)
}

//! `POST /v1/completions`.

use std::sync::Arc;

use axum::{
    Extension,
    body::Body,
    extract::State,
    http::HeaderMap,
    response::{IntoResponse, Response},
};
use engine::OutputEvent;
use openai::{
    Delivery,
    completions::CompletionRequest,
    response::{Envelope, TextChoice, TextLogprobs, TextOffset, Usage, prompt_logprobs},
};

use super::body;
use crate::{
    app::App,
    auth::Caller,
    errors::Failure,
    generate::{collect, deadline, start},
    streaming::{Frames, UsageSoFar, data, respond},
};

/// Continues texts.
pub async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    bytes: Body,
) -> Result<Response, Failure> {
    let bytes = body(&app, &headers, bytes).await?;
    let generation = CompletionRequest::parse(&bytes)?.into_generation()?;
    let target = app.target(&caller, generation.model.as_deref(), deadline(&generation.requests)).await?;
    let envelope = app.envelope("cmpl-", &target.model)?;
    let running = start(&app, &caller, &target, generation).await?;
    let (delivery, n_choices) = (running.delivery.clone(), running.n_choices);
    if delivery.stream {
        let frames = TextFrames {
            envelope,
            wants_logprobs: running.wants_logprobs,
            n_choices,
            offsets: vec![TextOffset::default(); running.num_requests() * n_choices],
            num_running: running.num_requests(),
            prompt_token_ids: running.prompt_token_ids().into_iter().flat_map(|ids| vec![ids; n_choices]).collect(),
            usage: Usage::default(),
            usage_so_far: UsageSoFar::new(&running),
            delivery,
        };
        return Ok(respond(&app, running, frames));
    }
    let (prompt_token_ids, wants_prompt_logprobs) = (running.prompt_token_ids(), running.wants_prompt_logprobs);
    let mut usage = Usage::default();
    let mut choices = Vec::new();
    let completions = collect(&app, running).await?;
    for (number, (completion, prompt_token_ids)) in completions.into_iter().zip(prompt_token_ids).enumerate() {
        usage.add(&completion.usage);
        let logprobs = wants_prompt_logprobs.then(|| prompt_logprobs(completion.prompt_logprobs));
        let of = |choice: engine::CompletionChoice| TextChoice {
            prompt_token_ids: prompt_token_ids.clone(),
            prompt_logprobs: logprobs.clone(),
            ..TextChoice::new(number * n_choices + choice.index, choice, &delivery)
        };
        choices.extend(completion.choices.into_iter().map(of));
    }
    Ok(axum::Json(envelope.answer("text_completion", choices, Some(Some(usage)))).into_response())
}

struct TextFrames {
    envelope: Envelope,
    wants_logprobs: bool,
    n_choices: usize,
    delivery: Delivery,
    /// By choice of all prompts, where its next token begins.
    offsets: Vec<TextOffset>,
    /// By choice of all prompts, its prompt's tokens until its first part has them.
    prompt_token_ids: Vec<Option<Vec<u32>>>,
    /// Requests that have not ended.
    num_running: usize,
    usage: Usage,
    usage_so_far: UsageSoFar,
}

impl TextFrames {
    fn part(&mut self, out: &mut Vec<u8>, mut choice: TextChoice, num_tokens: usize) {
        choice.prompt_token_ids = self.prompt_token_ids[choice.index].take();
        self.usage_so_far.set(choice.index, num_tokens);
        self.write(out, vec![choice], self.usage_so_far.of_part());
    }

    #[allow(clippy::option_option, reason = "left out, null, or there")]
    fn write(&self, out: &mut Vec<u8>, choices: Vec<TextChoice>, usage: Option<Option<Usage>>) {
        data(out, &self.envelope.answer("text_completion", choices, usage));
    }
}

impl Frames for TextFrames {
    fn push(&mut self, number: usize, event: OutputEvent, out: &mut Vec<u8>) -> bool {
        match event {
            OutputEvent::Delta { index, text, logprobs, token_ids, num_tokens, .. } => {
                if text.is_empty() && logprobs.is_empty() && token_ids.is_empty() {
                    return false;
                }
                let index = number * self.n_choices + index;
                let offset = &mut self.offsets[index];
                let as_ids = self.delivery.tokens_as_ids;
                let logprobs = self.wants_logprobs.then(|| TextLogprobs::new(logprobs, offset, as_ids));
                let token_ids = self.delivery.token_ids.then_some(token_ids);
                self.part(out, TextChoice { text, logprobs, token_ids, ..TextChoice::empty(index) }, num_tokens);
            }
            OutputEvent::Finished { index, reason, stop_sequence, num_tokens, .. } => {
                let text = stop_sequence.clone().filter(|_| self.delivery.include_stop).unwrap_or_default();
                let choice = TextChoice {
                    text,
                    finish_reason: Some(reason.as_str()),
                    stop_reason: stop_sequence,
                    ..TextChoice::empty(number * self.n_choices + index)
                };
                self.part(out, choice, num_tokens);
            }
            OutputEvent::PromptLogprobs(_) | OutputEvent::Vector { .. } => {}
            OutputEvent::Done(usage) => {
                self.usage.add(&usage);
                self.num_running -= 1;
                if self.num_running == 0 {
                    if self.delivery.include_usage {
                        self.write(out, Vec::new(), Some(Some(self.usage)));
                    }
                    out.extend_from_slice(b"data: [DONE]\n\n");
                    return true;
                }
            }
        }
        false
    }
}

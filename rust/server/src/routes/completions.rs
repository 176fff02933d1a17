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
    response::{Envelope, TextChoice, TextLogprobs, TextOffset, Usage},
};

use super::body;
use crate::{
    app::App,
    auth::Caller,
    errors::Failure,
    generate::{collect, start},
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
    let envelope = app.envelope("cmpl-");
    let running = start(&app, &caller, generation).await?;
    let (delivery, n_choices) = (running.delivery.clone(), running.n_choices);
    if delivery.stream {
        let frames = TextFrames {
            envelope,
            wants_logprobs: running.wants_logprobs,
            n_choices,
            offsets: vec![TextOffset::default(); running.num_requests() * n_choices],
            num_running: running.num_requests(),
            usage: Usage::default(),
            usage_so_far: UsageSoFar::new(&running),
            delivery,
        };
        return Ok(respond(&app, running, frames));
    }
    let mut usage = Usage::default();
    let mut choices = Vec::new();
    for (number, completion) in collect(&app, running).await?.into_iter().enumerate() {
        usage.add(&completion.usage);
        let of =
            |choice: engine::CompletionChoice| TextChoice::new(number * n_choices + choice.index, choice, delivery.include_stop);
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
    /// Requests that have not ended.
    num_running: usize,
    usage: Usage,
    usage_so_far: UsageSoFar,
}

impl TextFrames {
    fn part(&mut self, out: &mut Vec<u8>, choice: TextChoice, num_tokens: usize) {
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
            OutputEvent::Delta { index, text, logprobs, num_tokens } => {
                if text.is_empty() && logprobs.is_empty() {
                    return false;
                }
                let index = number * self.n_choices + index;
                let offset = &mut self.offsets[index];
                let logprobs = self.wants_logprobs.then(|| TextLogprobs::new(logprobs, offset));
                self.part(out, TextChoice { index, text, logprobs, finish_reason: None, stop_reason: None }, num_tokens);
            }
            OutputEvent::Finished { index, reason, stop_sequence, num_tokens, .. } => {
                let text = stop_sequence.clone().filter(|_| self.delivery.include_stop).unwrap_or_default();
                let choice = TextChoice {
                    index: number * self.n_choices + index,
                    text,
                    logprobs: None,
                    finish_reason: Some(reason.as_str()),
                    stop_reason: stop_sequence,
                };
                self.part(out, choice, num_tokens);
            }
            OutputEvent::Vector { .. } => {}
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

//! `POST /v1/chat/completions`.

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
    chat::ChatRequest,
    response::{CallDelta, ChatChoice, ChatLogprobs, ChunkChoice, Delta, Envelope, Usage, prompt_logprobs},
};

use super::body;
use crate::{
    app::App,
    auth::Caller,
    errors::Failure,
    generate::{collect, start},
    streaming::{Frames, UsageSoFar, data, respond},
};

/// Answers a chat.
pub async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    bytes: Body,
) -> Result<Response, Failure> {
    let bytes = body(&app, &headers, bytes).await?;
    let request = ChatRequest::parse(&bytes)?;
    let own = request.sampling.service()?.deadline;
    let target = app.target(&caller, request.chat.model.as_deref(), own).await?;
    let generation = request.into_generation(&target.model.known()?.context)?;
    let envelope = app.envelope("chatcmpl-", &target.model)?;
    let running = start(&app, &caller, &target, generation).await?;
    let delivery = running.delivery.clone();
    if delivery.stream {
        let frames = ChatFrames {
            envelope,
            wants_logprobs: running.wants_logprobs,
            has_begun: vec![false; running.n_choices],
            prompt_token_ids: running.prompt_token_ids().pop().flatten(),
            usage: UsageSoFar::new(&running),
            delivery,
        };
        return Ok(respond(&app, running, frames));
    }
    let (prompt_token_ids, wants_prompt_logprobs) = (running.prompt_token_ids().pop().flatten(), running.wants_prompt_logprobs);
    let mut usage = Usage::default();
    let mut choices = Vec::new();
    let mut logprobs = None;
    for completion in collect(&app, running).await? {
        usage.add(&completion.usage);
        choices.extend(completion.choices.into_iter().map(|choice| ChatChoice::new(choice, &delivery)));
        logprobs = wants_prompt_logprobs.then(|| prompt_logprobs(completion.prompt_logprobs));
    }
    let mut answer = envelope.answer("chat.completion", choices, Some(Some(usage)));
    (answer.prompt_token_ids, answer.prompt_logprobs) = (prompt_token_ids, logprobs);
    Ok(axum::Json(answer).into_response())
}

struct ChatFrames {
    envelope: Envelope,
    wants_logprobs: bool,
    delivery: Delivery,
    /// By choice, whether the role was sent.
    has_begun: Vec<bool>,
    /// Sent with the role.
    prompt_token_ids: Option<Vec<u32>>,
    usage: UsageSoFar,
}

impl ChatFrames {
    fn chunk(&mut self, out: &mut Vec<u8>, choice: ChunkChoice, num_tokens: usize) {
        if let Some(has_begun) = self.has_begun.get_mut(choice.index)
            && !std::mem::replace(has_begun, true)
        {
            // Together with the first token: clients take the first chunk's time as the first token's.
            let delta = Delta { role: Some("assistant"), content: Some(String::new()), ..Delta::default() };
            let choices = vec![ChunkChoice { delta, ..empty(choice.index) }];
            let mut head = self.envelope.answer("chat.completion.chunk", choices, self.usage.of_part());
            head.prompt_token_ids.clone_from(&self.prompt_token_ids);
            data(out, &head);
        }
        self.usage.set(choice.index, num_tokens);
        self.write(out, vec![choice], self.usage.of_part());
    }

    #[allow(clippy::option_option, reason = "left out, null, or there")]
    fn write(&self, out: &mut Vec<u8>, choices: Vec<ChunkChoice>, usage: Option<Option<Usage>>) {
        data(out, &self.envelope.answer("chat.completion.chunk", choices, usage));
    }
}

fn empty(index: usize) -> ChunkChoice {
    ChunkChoice { index, delta: Delta::default(), logprobs: None, finish_reason: None, stop_reason: None, token_ids: None }
}

impl Frames for ChatFrames {
    fn push(&mut self, _number: usize, event: OutputEvent, out: &mut Vec<u8>) -> bool {
        match event {
            OutputEvent::Delta { index, reasoning, text, calls, logprobs, token_ids, num_tokens } => {
                let says = !(reasoning.is_empty() && text.is_empty() && calls.is_empty());
                if !says && logprobs.is_empty() && token_ids.is_empty() {
                    return false;
                }
                let reasoning = Some(reasoning).filter(|reasoning| !reasoning.is_empty());
                let delta = Delta {
                    role: None,
                    content: Some(text).filter(|text| !text.is_empty() || !says),
                    reasoning_content: reasoning.clone(),
                    reasoning,
                    tool_calls: calls.into_iter().map(CallDelta::from).collect(),
                };
                let logprobs = self.wants_logprobs.then(|| ChatLogprobs::new(logprobs, self.delivery.tokens_as_ids));
                let token_ids = self.delivery.token_ids.then_some(token_ids);
                self.chunk(out, ChunkChoice { delta, logprobs, token_ids, ..empty(index) }, num_tokens);
                false
            }
            OutputEvent::Finished { index, reason, stop_sequence, num_tokens, .. } => {
                if let Some(stop) = stop_sequence.as_ref().filter(|_| self.delivery.include_stop) {
                    let delta = Delta { content: Some(stop.clone()), ..Delta::default() };
                    self.chunk(out, ChunkChoice { delta, ..empty(index) }, num_tokens);
                }
                let end = ChunkChoice { finish_reason: Some(reason.as_str()), stop_reason: stop_sequence, ..empty(index) };
                self.chunk(out, end, num_tokens);
                false
            }
            OutputEvent::PromptLogprobs(_) | OutputEvent::Vector { .. } => false,
            OutputEvent::Done(usage) => {
                if self.delivery.include_usage {
                    let mut total = Usage::default();
                    total.add(&usage);
                    self.write(out, Vec::new(), Some(Some(total)));
                }
                out.extend_from_slice(b"data: [DONE]\n\n");
                true
            }
        }
    }
}

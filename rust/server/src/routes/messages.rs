//! `POST /v1/messages` and `/v1/messages/count_tokens`.

use std::sync::Arc;

use axum::{
    Extension, Json,
    body::Body,
    extract::State,
    http::HeaderMap,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use engine::{OutputEvent, ToolCallDelta};
use openai::{
    ApiError,
    anthropic::{MessageUsage, MessagesRequest, complete, message, stop_reason},
    response::Envelope,
};
use serde_json::{Value, json};

use super::{body, text::render};
use crate::{
    app::App,
    auth::Caller,
    errors::{Failure, anthropic_body, internal},
    generate::{collect_one, start},
    models::Target,
    streaming::{Frames, named, respond},
};

/// Answers with a message.
pub async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    bytes: Body,
) -> Result<Response, Failure> {
    let request = MessagesRequest::parse(&body(&app, &headers, bytes).await?)?;
    let max_tokens = request.max_tokens().unwrap_or(usize::MAX);
    let target = app.target(&caller, request.model(), None).await?;
    let generation = request.into_generation(&target.model.known()?.context)?;
    let envelope = app.envelope("msg_", &target.model)?;
    let running = start(&app, &caller, &target, generation).await?;
    if running.delivery.stream {
        let num_prompt_tokens = running.num_prompt_tokens();
        let request_id = caller.request_id.clone();
        let frames = MessageFrames {
            envelope,
            request_id,
            num_prompt_tokens,
            max_tokens,
            has_begun: false,
            block: None,
            num_blocks: 0,
            ended: None,
        };
        return Ok(respond(&app, running, frames));
    }
    let completion = collect_one(&app, running).await?;
    let choice = completion.choices.first().ok_or_else(|| internal("no answer came".into()))?;
    Ok(Json(complete(&envelope.id, &envelope.model, choice, &completion.usage, max_tokens)).into_response())
}

/// How many tokens a message's prompt would have.
pub async fn count_tokens(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    bytes: Body,
) -> Result<Json<Value>, Failure> {
    let request = MessagesRequest::parse(&body(&app, &headers, bytes).await?)?;
    let Target { model, .. } = app.target(&caller, request.model(), None).await?;
    let (_, ids) = render(&app, &model, request.into_count(&model.known()?.context)?).await?;
    Ok(Json(json!({ "input_tokens": ids.len() })))
}

/// What a block of a message has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Block {
    Thinking,
    Text,
    /// This call.
    ToolUse(usize),
}

struct MessageFrames {
    envelope: Envelope,
    request_id: String,
    num_prompt_tokens: usize,
    max_tokens: usize,
    has_begun: bool,
    /// The block that is open.
    block: Option<Block>,
    num_blocks: usize,
    ended: Option<(engine::FinishReason, Option<String>)>,
}

impl MessageFrames {
    /// The head, with the first token.
    fn begin(&mut self, out: &mut Vec<u8>) {
        if std::mem::replace(&mut self.has_begun, true) {
            return;
        }
        let usage = MessageUsage { input_tokens: self.num_prompt_tokens, ..MessageUsage::default() };
        let head = message(&self.envelope.id, &self.envelope.model, &[], None, usage);
        named(out, "message_start", &json!({ "type": "message_start", "message": head }));
    }

    /// Opens a block, unless it is open already.
    fn open(&mut self, block: Block, content: &Value, out: &mut Vec<u8>) {
        self.begin(out);
        if self.block == Some(block) {
            return;
        }
        self.close(out);
        self.block = Some(block);
        self.num_blocks += 1;
        let start = json!({ "type": "content_block_start", "index": self.num_blocks - 1, "content_block": content });
        named(out, "content_block_start", &start);
    }

    fn close(&mut self, out: &mut Vec<u8>) {
        if self.block.take().is_some() {
            named(out, "content_block_stop", &json!({ "type": "content_block_stop", "index": self.num_blocks - 1 }));
        }
    }

    fn delta(&self, delta: &Value, out: &mut Vec<u8>) {
        let event = json!({ "type": "content_block_delta", "index": self.num_blocks - 1, "delta": delta });
        named(out, "content_block_delta", &event);
    }

    fn text(&mut self, text: &str, out: &mut Vec<u8>) {
        self.open(Block::Text, &json!({ "type": "text", "text": "" }), out);
        self.delta(&json!({ "type": "text_delta", "text": text }), out);
    }

    fn call(&mut self, call: &ToolCallDelta, out: &mut Vec<u8>) {
        let content = json!({ "type": "tool_use", "id": call.id, "name": call.name, "input": {} });
        self.open(Block::ToolUse(call.index), &content, out);
        if !call.arguments.is_empty() {
            self.delta(&json!({ "type": "input_json_delta", "partial_json": call.arguments }), out);
        }
    }
}

impl Frames for MessageFrames {
    fn push(&mut self, _number: usize, event: OutputEvent, out: &mut Vec<u8>) -> bool {
        match event {
            OutputEvent::Delta { reasoning, text, calls, .. } => {
                if !reasoning.is_empty() {
                    self.open(Block::Thinking, &json!({ "type": "thinking", "thinking": "", "signature": "" }), out);
                    self.delta(&json!({ "type": "thinking_delta", "thinking": reasoning }), out);
                }
                if !text.is_empty() {
                    self.text(&text, out);
                }
                for call in &calls {
                    self.call(call, out);
                }
                false
            }
            OutputEvent::Finished { reason, stop_sequence, .. } => {
                self.ended = Some((reason, stop_sequence));
                false
            }
            OutputEvent::PromptLogprobs(_) | OutputEvent::Vector { .. } => false,
            OutputEvent::Done(usage) => {
                if self.num_blocks == 0 {
                    self.open(Block::Text, &json!({ "type": "text", "text": "" }), out);
                }
                self.close(out);
                let (reason, stop) = self.ended.take().unwrap_or((engine::FinishReason::Canceled, None));
                let reason = stop_reason(reason, stop.as_deref(), usage.completion_tokens, self.max_tokens);
                let delta = json!({
                    "type": "message_delta",
                    "delta": { "stop_reason": reason, "stop_sequence": stop },
                    "usage": MessageUsage::new(&usage),
                });
                named(out, "message_delta", &delta);
                named(out, "message_stop", &json!({ "type": "message_stop" }));
                true
            }
        }
    }

    fn keep_alive(&self) -> Bytes {
        Bytes::from_static(b"event: ping\ndata: {\"type\":\"ping\"}\n\n")
    }

    fn fail(&mut self, error: &ApiError, out: &mut Vec<u8>) {
        named(out, "error", &anthropic_body(error, &self.request_id));
    }
}

//! `/v1/responses`.

use std::{mem, sync::Arc};

use axum::{
    Extension, Json,
    body::Body,
    extract::{Path, State},
    http::HeaderMap,
    response::{IntoResponse, Response},
};
use engine::{FinishReason, Message, MessageContent, OutputEvent, TokenLogprobs};
use openai::{
    ApiError,
    response::{ChatLogprobs, Envelope},
    responses::{Ended, ResponsesRequest, State as Progress, item_status, message_item, text_part},
};
use serde_json::{Map, Value, json};

use super::{body, text::render};
use crate::{
    app::App,
    auth::Caller,
    errors::{Failure, internal},
    generate::{collect, start},
    streaming::{Frames, named, respond},
};

/// A response while it is made, and where it is kept afterwards.
struct Making {
    app: Arc<App>,
    caller: Caller,
    request: ResponsesRequest,
    envelope: Envelope,
    item_id: String,
    /// The conversation up to it.
    chat: Vec<Message>,
}

impl Making {
    fn begin(app: &Arc<App>, caller: Caller, request: ResponsesRequest) -> Result<(Self, openai::Generation), ApiError> {
        let chat = conversation(app, &caller, &request)?;
        let generation = request.generation(chat.clone())?;
        app.check_model(generation.model.as_deref())?;
        let (envelope, item_id) = (app.envelope("resp_"), app.id("msg_"));
        Ok((Self { app: Arc::clone(app), caller, request, envelope, item_id, chat }, generation))
    }

    /// The complete response, kept if it is to be.
    fn end(&mut self, text: String, logprobs: Option<Vec<TokenLogprobs>>, reason: FinishReason, usage: engine::Usage) -> Value {
        let part = text_part(&text, logprobs.map(|tokens| ChatLogprobs::new(tokens, false)));
        let item = message_item(&self.item_id, item_status(reason), &[part]);
        let progress = Progress { item: Some(item), ended: Some(Ended::Finished(reason)), usage: Some(usage) };
        let response = self.request.response(&self.envelope, &progress);
        if self.request.store() {
            let mut chat = mem::take(&mut self.chat);
            chat.push(Message { role: "assistant".into(), content: MessageContent::Text(text), extra: Map::new() });
            self.app.responses.keep(&self.envelope.id, self.caller.tenant.clone(), response.clone(), chat);
        }
        response
    }
}

/// What was said before, and this input.
fn conversation(app: &App, caller: &Caller, request: &ResponsesRequest) -> Result<Vec<Message>, ApiError> {
    let mut chat = match &request.fields.previous_response_id {
        None => Vec::new(),
        Some(id) => match app.responses.get(id, caller.tenant.as_ref()) {
            Some(kept) => kept.chat.clone(),
            None => return Err(lost(id, Some("previous_response_id".into()))),
        },
    };
    chat.extend(request.input(&app.context)?);
    Ok(chat)
}

fn lost(id: &str, param: Option<String>) -> ApiError {
    let shown: String = id.chars().take(64).collect();
    let code = if param.is_some() { "previous_response_not_found" } else { "response_not_found" };
    let message = format!("Response with id '{shown}' not found: it was not stored, is deleted, or had to make room");
    ApiError::new(404, "not_found_error", code, param, message)
}

/// Makes a response.
pub async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    bytes: Body,
) -> Result<Response, Failure> {
    let request = ResponsesRequest::parse(&body(&app, &headers, bytes).await?)?;
    let (mut making, generation) = Making::begin(&app, caller.clone(), request)?;
    let running = start(&app, &caller, generation).await?;
    if running.delivery.stream {
        let wants_logprobs = running.wants_logprobs;
        let frames = ResponseFrames {
            making,
            wants_logprobs,
            sequence: 0,
            has_begun: false,
            text: String::new(),
            logprobs: Vec::new(),
            reason: FinishReason::Canceled,
        };
        return Ok(respond(&app, running, frames));
    }
    let completion = collect(&app, running).await?.into_iter().next().ok_or_else(|| internal("no answer came".into()))?;
    let choice = completion.choices.into_iter().next().ok_or_else(|| internal("no answer came".into()))?;
    Ok(Json(making.end(choice.text, choice.logprobs, choice.finish_reason, completion.usage)).into_response())
}

/// How many tokens a response's prompt would have.
pub async fn input_tokens(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    bytes: Body,
) -> Result<Json<Value>, Failure> {
    let request = ResponsesRequest::parse(&body(&app, &headers, bytes).await?)?;
    let (_, generation) = Making::begin(&app, caller, request)?;
    let (_, ids) = render(&app, generation).await?;
    Ok(Json(json!({ "object": "response.input_tokens", "input_tokens": ids.len() })))
}

/// A response that was kept.
pub async fn one(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<Value>, Failure> {
    let kept = app.responses.get(&id, caller.tenant.as_ref()).ok_or_else(|| lost(&id, None))?;
    Ok(Json(kept.response.clone()))
}

/// Forgets it.
pub async fn delete(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<Value>, Failure> {
    if !app.responses.delete(&id, caller.tenant.as_ref()) {
        return Err(lost(&id, None).into());
    }
    Ok(Json(json!({ "id": id, "object": "response", "deleted": true })))
}

/// Nothing runs in the background, so nothing can be cancelled by its id.
pub async fn cancel(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<Value>, Failure> {
    if app.responses.get(&id, caller.tenant.as_ref()).is_none() {
        return Err(lost(&id, None).into());
    }
    let message = "only responses that run in the background can be cancelled, and none do: close the stream instead";
    Err(ApiError::invalid("invalid_value", "id".to_owned(), message).into())
}

struct ResponseFrames {
    making: Making,
    wants_logprobs: bool,
    sequence: u64,
    has_begun: bool,
    text: String,
    logprobs: Vec<TokenLogprobs>,
    reason: FinishReason,
}

impl ResponseFrames {
    fn event(&mut self, out: &mut Vec<u8>, name: &str, mut body: Value) {
        body["type"] = name.into();
        body["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        named(out, name, &body);
    }

    fn text_event(&mut self, out: &mut Vec<u8>, name: &str, body: Value) {
        let mut body = body;
        body["item_id"] = self.making.item_id.as_str().into();
        body["output_index"] = 0.into();
        body["content_index"] = 0.into();
        self.event(out, name, body);
    }

    /// The head, with the first token.
    fn begin(&mut self, out: &mut Vec<u8>) {
        if mem::replace(&mut self.has_begun, true) {
            return;
        }
        let head = self.making.request.response(&self.making.envelope, &Progress::default());
        self.event(out, "response.created", json!({ "response": head }));
        self.event(out, "response.in_progress", json!({ "response": head }));
        let item = message_item(&self.making.item_id, "in_progress", &[]);
        self.event(out, "response.output_item.added", json!({ "output_index": 0, "item": item }));
        self.text_event(out, "response.content_part.added", json!({ "part": text_part("", None) }));
    }
}

impl Frames for ResponseFrames {
    fn push(&mut self, _number: usize, event: OutputEvent, out: &mut Vec<u8>) -> bool {
        match event {
            OutputEvent::Delta { text, logprobs, .. } => {
                if !text.is_empty() {
                    self.begin(out);
                    self.text.push_str(&text);
                    let new = ChatLogprobs::new(logprobs.clone(), false).content;
                    self.text_event(out, "response.output_text.delta", json!({ "delta": text, "logprobs": new }));
                }
                self.logprobs.extend(logprobs);
                false
            }
            OutputEvent::Finished { reason, .. } => {
                self.reason = reason;
                false
            }
            OutputEvent::PromptLogprobs(_) | OutputEvent::Vector { .. } => false,
            OutputEvent::Done(usage) => {
                self.begin(out);
                let (text, logprobs) = (mem::take(&mut self.text), mem::take(&mut self.logprobs));
                let logprobs = self.wants_logprobs.then_some(logprobs);
                let response = self.making.end(text, logprobs, self.reason, usage);
                let item = response["output"][0].clone();
                let part = item["content"][0].clone();
                let done = json!({ "text": part["text"], "logprobs": part["logprobs"] });
                self.text_event(out, "response.output_text.done", done);
                self.text_event(out, "response.content_part.done", json!({ "part": part }));
                self.event(out, "response.output_item.done", json!({ "output_index": 0, "item": item }));
                let name = if response["status"] == "completed" { "response.completed" } else { "response.incomplete" };
                self.event(out, name, json!({ "response": response }));
                true
            }
        }
    }

    fn fail(&mut self, error: &ApiError, out: &mut Vec<u8>) {
        self.begin(out);
        let progress = Progress { ended: Some(Ended::Failed(error.message.clone())), ..Progress::default() };
        let response = self.making.request.response(&self.making.envelope, &progress);
        self.event(out, "response.failed", json!({ "response": response }));
    }
}

//! `/v1/responses`.

use std::{mem, sync::Arc};

use axum::{
    Extension, Json,
    body::Body,
    extract::{Path, State},
    http::HeaderMap,
    response::{IntoResponse, Response},
};
use engine::{FinishReason, Message, MessageContent, OutputEvent, TokenLogprobs, ToolCall};
use openai::{
    ApiError,
    response::{ChatLogprobs, Envelope},
    responses::{
        Ended, ResponsesRequest, State as Progress, call_item, item_status, message_item, of_input, reasoning_item, text_part,
    },
};
use serde_json::{Map, Value, json};

use super::{body, text::render};
use crate::{
    app::App,
    auth::Caller,
    errors::{Failure, internal},
    generate::{collect_one, start},
    models::{Model, Target},
    seeing,
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
    async fn begin(
        app: &Arc<App>,
        caller: Caller,
        target: &Target,
        request: ResponsesRequest,
    ) -> Result<(Self, openai::Generation), ApiError> {
        let chat = conversation(app, &caller, &target.model, &request).await?;
        let generation = request.generation(chat.clone())?;
        let (envelope, item_id) = (app.envelope("resp_", &target.model)?, app.id("msg_"));
        Ok((Self { app: Arc::clone(app), caller, request, envelope, item_id, chat }, generation))
    }

    /// The items of an answer: reasoning, message and calls.
    fn items(&self, answer: &Answer, reason: FinishReason) -> Vec<Value> {
        let mut items = Vec::new();
        if !answer.reasoning.is_empty() {
            items.push(reasoning_item(&format!("rs_{}", self.suffix()), &answer.reasoning));
        }
        if !answer.text.is_empty() || answer.calls.is_empty() {
            let logprobs = answer.logprobs.clone().map(|tokens| ChatLogprobs::new(tokens, false));
            items.push(message_item(&self.item_id, item_status(reason), &[text_part(&answer.text, logprobs)]));
        }
        let calls = answer.calls.iter().enumerate();
        items.extend(calls.map(|(i, call)| call_item(&self.call_item_id(i), item_status(reason), call)));
        items
    }

    fn suffix(&self) -> &str {
        self.item_id.trim_start_matches("msg_")
    }

    /// The id of the item of a call.
    fn call_item_id(&self, index: usize) -> String {
        format!("fc_{}{index}", self.suffix())
    }

    /// The complete response, kept if it is to be.
    fn end(&mut self, answer: Answer, reason: FinishReason, usage: engine::Usage) -> Value {
        let items = self.items(&answer, reason);
        let progress = Progress { items, ended: Some(Ended::Finished(reason)), usage: Some(usage) };
        let response = self.request.response(&self.envelope, &progress);
        if self.request.store() {
            let mut chat = mem::take(&mut self.chat);
            let mut extra = Map::new();
            let calls = answer.calls.iter().map(|call| {
                json!({ "id": call.id, "type": "function", "function": { "name": call.name, "arguments": call.arguments } })
            });
            if !answer.calls.is_empty() {
                extra.insert("tool_calls".into(), calls.collect());
            }
            chat.push(Message { role: "assistant".into(), content: MessageContent::Text(answer.text), media: Vec::new(), extra });
            self.app.responses.keep(&self.envelope.id, self.caller.tenant.clone(), response.clone(), chat);
        }
        response
    }
}

/// What a model answered.
#[derive(Clone, Debug, Default)]
struct Answer {
    reasoning: String,
    text: String,
    calls: Vec<ToolCall>,
    /// When asked for.
    logprobs: Option<Vec<TokenLogprobs>>,
}

/// What was said before, and this input.
async fn conversation(app: &App, caller: &Caller, model: &Model, request: &ResponsesRequest) -> Result<Vec<Message>, ApiError> {
    let mut chat = match &request.fields.previous_response_id {
        None => Vec::new(),
        Some(id) => match app.responses.get(id, caller.tenant.as_ref()) {
            Some(kept) => kept.chat.clone(),
            None => return Err(lost(id, Some("previous_response_id".into()))),
        },
    };
    chat.extend(request.input(&model.known()?.context)?);
    Ok(seeing::place(app, model, chat).await.map_err(of_input)?.0)
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
    let target = app.target(&caller, request.fields.model.as_deref(), None).await?;
    let (mut making, generation) = Making::begin(&app, caller.clone(), &target, request).await?;
    let running = start(&app, &caller, &target, generation).await?;
    if running.delivery.stream {
        let answer = Answer { logprobs: running.wants_logprobs.then(Vec::new), ..Answer::default() };
        let (sequence, has_begun, num_items, open) = (0, false, 0, None);
        let frames = ResponseFrames { making, sequence, has_begun, answer, num_items, open, reason: FinishReason::Canceled };
        return Ok(respond(&app, running, frames));
    }
    let completion = collect_one(&app, running).await?;
    let choice = completion.choices.into_iter().next().ok_or_else(|| internal("no answer came".into()))?;
    let answer = Answer {
        reasoning: choice.reasoning.unwrap_or_default(),
        text: choice.text,
        calls: choice.tool_calls,
        logprobs: choice.logprobs,
    };
    Ok(Json(making.end(answer, choice.finish_reason, completion.usage)).into_response())
}

/// How many tokens a response's prompt would have.
pub async fn input_tokens(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    bytes: Body,
) -> Result<Json<Value>, Failure> {
    let request = ResponsesRequest::parse(&body(&app, &headers, bytes).await?)?;
    let target = app.target(&caller, request.fields.model.as_deref(), None).await?;
    let (_, generation) = Making::begin(&app, caller, &target, request).await?;
    let (_, ids) = render(&app, &target.model, generation).await?;
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

/// An item that is being made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Open {
    Reasoning,
    Message,
    /// This call.
    Call(usize),
}

struct ResponseFrames {
    making: Making,
    sequence: u64,
    has_begun: bool,
    /// What has come.
    answer: Answer,
    num_items: usize,
    open: Option<Open>,
    reason: FinishReason,
}

impl ResponseFrames {
    fn event(&mut self, out: &mut Vec<u8>, name: &str, mut body: Value) {
        body["type"] = name.into();
        body["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        named(out, name, &body);
    }

    /// An event of the item that is open.
    fn item_event(&mut self, out: &mut Vec<u8>, name: &str, mut body: Value) {
        let id = match self.open {
            Some(Open::Reasoning) => format!("rs_{}", self.making.suffix()),
            Some(Open::Call(index)) => self.making.call_item_id(index),
            Some(Open::Message) | None => self.making.item_id.clone(),
        };
        body["item_id"] = id.into();
        body["output_index"] = self.num_items.saturating_sub(1).into();
        if !matches!(self.open, Some(Open::Call(_))) {
            body["content_index"] = 0.into();
        }
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
    }

    /// Opens an item, unless it is open already.
    fn open(&mut self, open: Open, out: &mut Vec<u8>) {
        self.begin(out);
        if self.open == Some(open) {
            return;
        }
        self.close(FinishReason::Stop, out);
        self.open = Some(open);
        self.num_items += 1;
        let mut item = match open {
            Open::Reasoning => reasoning_item(&format!("rs_{}", self.making.suffix()), ""),
            Open::Message => message_item(&self.making.item_id, "in_progress", &[]),
            Open::Call(index) => {
                let call = ToolCall { arguments: String::new(), ..self.answer.calls[index].clone() };
                call_item(&self.making.call_item_id(index), "in_progress", &call)
            }
        };
        item["status"] = "in_progress".into();
        if open == Open::Reasoning {
            item["content"] = json!([]);
        }
        self.event(out, "response.output_item.added", json!({ "output_index": self.num_items - 1, "item": item }));
        match open {
            Open::Reasoning => {
                self.item_event(out, "response.content_part.added", json!({ "part": { "type": "reasoning_text", "text": "" } }));
            }
            Open::Message => self.item_event(out, "response.content_part.added", json!({ "part": text_part("", None) })),
            Open::Call(_) => {}
        }
    }

    /// Completes the item that is open; `reason` is the answer's, of the last one.
    fn close(&mut self, reason: FinishReason, out: &mut Vec<u8>) {
        let Some(open) = self.open else { return };
        let item = match open {
            Open::Reasoning => {
                let text = self.answer.reasoning.clone();
                self.item_event(out, "response.reasoning_text.done", json!({ "text": text }));
                let part = json!({ "type": "reasoning_text", "text": text });
                self.item_event(out, "response.content_part.done", json!({ "part": part }));
                reasoning_item(&format!("rs_{}", self.making.suffix()), &text)
            }
            Open::Message => {
                let logprobs = self.answer.logprobs.clone().map(|tokens| ChatLogprobs::new(tokens, false));
                let part = json!(text_part(&self.answer.text, logprobs));
                let done = json!({ "text": part["text"], "logprobs": part["logprobs"] });
                self.item_event(out, "response.output_text.done", done);
                self.item_event(out, "response.content_part.done", json!({ "part": part }));
                message_item(&self.making.item_id, item_status(reason), &[part])
            }
            Open::Call(index) => {
                let call = self.answer.calls[index].clone();
                let done = json!({ "arguments": call.arguments, "name": call.name });
                self.item_event(out, "response.function_call_arguments.done", done);
                call_item(&self.making.call_item_id(index), item_status(reason), &call)
            }
        };
        self.event(out, "response.output_item.done", json!({ "output_index": self.num_items - 1, "item": item }));
        self.open = None;
    }
}

impl Frames for ResponseFrames {
    fn push(&mut self, _number: usize, event: OutputEvent, out: &mut Vec<u8>) -> bool {
        match event {
            OutputEvent::Delta { reasoning, text, calls, logprobs, .. } => {
                if !reasoning.is_empty() {
                    self.open(Open::Reasoning, out);
                    self.answer.reasoning.push_str(&reasoning);
                    self.item_event(out, "response.reasoning_text.delta", json!({ "delta": reasoning }));
                }
                if !text.is_empty() {
                    self.open(Open::Message, out);
                    self.answer.text.push_str(&text);
                    let new = ChatLogprobs::new(logprobs.clone(), false).content;
                    self.item_event(out, "response.output_text.delta", json!({ "delta": text, "logprobs": new }));
                }
                if let Some(all) = &mut self.answer.logprobs {
                    all.extend(logprobs);
                }
                for call in calls {
                    let (index, arguments) = (call.index, call.arguments.clone());
                    call.collect(&mut self.answer.calls);
                    self.open(Open::Call(index), out);
                    if !arguments.is_empty() {
                        self.item_event(out, "response.function_call_arguments.delta", json!({ "delta": arguments }));
                    }
                }
                false
            }
            OutputEvent::Finished { reason, .. } => {
                self.reason = reason;
                false
            }
            OutputEvent::PromptLogprobs(_) | OutputEvent::Vector { .. } => false,
            OutputEvent::Done(usage) => {
                if self.answer.text.is_empty() && self.answer.calls.is_empty() {
                    self.open(Open::Message, out);
                }
                self.close(self.reason, out);
                let response = self.making.end(mem::take(&mut self.answer), self.reason, usage);
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

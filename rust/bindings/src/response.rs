//! Answers: frozen classes, built once from the engine's own structs.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{SystemTime, UNIX_EPOCH},
};

use engine::{Completion, Engine, EngineError, TokenLogprobs, ToolCallDelta};
use pyo3::{
    IntoPyObjectExt,
    prelude::*,
    types::{PyBytes, PyTuple, PyType},
};

use crate::{
    answer_json,
    exceptions::{InternalError, raise},
    fields::record,
    sequence::Sequence,
};

record! {
    /// A complete chat answer. `adapter_generation` is that of the adapter it ran with, None where it ran with none.
    pub struct ChatCompletionResponse(id, choices, created, model, system_fingerprint, object, usage, adapter_generation=None) {
        id: String,
        choices: Vec<Py<Choice>>,
        created: u64,
        model: String,
        system_fingerprint: String,
        object: String,
        usage: Py<Usage>,
        adapter_generation: Option<String>,
    }
}

record! {
    /// One answer of a chat. `finish_reason` is "stop" (end of sequence or a stop string), "length" (`max_tokens`, the model's
    /// length or the whole KV pool) or "error", of which the request's exception tells more. `stop_sequence` is the stop string
    /// that ended it; `sequence`, with `keep=True`, what can be gone on from.
    pub struct Choice {
        finish_reason: String,
        index: usize,
        message: Py<ResponseMessage>,
        logprobs: Option<Py<Logprobs>>,
        stop_sequence: Option<String>,
        sequence: Option<Py<Sequence>>,
    }
}

record! {
    /// What the model said: `content`, None beside `tool_calls`, and before it `reasoning_content`, where the model's reasoning
    /// is marked.
    pub struct ResponseMessage {
        content: Option<String>,
        role: String,
        tool_calls: Option<Vec<Py<ToolCallResponse>>>,
        reasoning_content: Option<String>,
    }
}

record! {
    /// A call of a function that the model makes; `index` is its place among those of the answer. A message with the role "tool",
    /// the `id` as `tool_call_id` and the result as content answers it.
    pub struct ToolCallResponse {
        pub index: usize,
        pub id: Option<String>,
        pub r#type: String,
        pub function: Py<CalledFunction>,
    }
}

record! {
    /// A function's name and its arguments: the text of a JSON object.
    pub struct CalledFunction {
        pub name: Option<String>,
        pub arguments: String,
    }
}

record! {
    /// What a request used: tokens, seconds from submission, tokens a second; `preemptions`, how often a choice lost its blocks
    /// to another request, and `recomputed_tokens`, how many tokens were computed again; `draft_tokens`, how many later tokens
    /// were guessed (speculative decoding), and `accepted_draft_tokens`, how many of these are part of the answer;
    /// `encoded_images`, how many images of the prompt had to be encoded, because no cache had them,
    /// `encoded_sounds`, the same of chunks of sounds, and `encoded_videos`, of pairs of frames of videos.
    pub struct Usage {
        completion_tokens: usize,
        prompt_tokens: usize,
        total_tokens: usize,
        avg_tok_per_sec: f64,
        avg_prompt_tok_per_sec: f64,
        avg_compl_tok_per_sec: f64,
        total_time_sec: f64,
        total_prompt_time_sec: f64,
        total_completion_time_sec: f64,
        prompt_tokens_details: Option<Py<PromptTokensDetails>>,
        preemptions: usize,
        recomputed_tokens: usize,
        draft_tokens: usize,
        accepted_draft_tokens: usize,
        encoded_images: usize,
        encoded_sounds: usize,
        encoded_videos: usize,
    }
}

record! {
    /// Of the prompt, the tokens that were not computed, because the prefix cache or the sequence that was gone on from had their
    /// keys and values. `miss_reason` tells why there were no more, of the first block that was missing; None when all but the
    /// last token were there.
    ///
    /// - "cold": nothing like it was computed before, or too long ago. "evicted": its memory was needed for something else.
    /// - "salt": it is there for another `cache_salt`. "identity": it is there for another model state.
    /// - "partial_tail": it is the incomplete last block of the prompt. "window_evicted": a sliding window that ends there is
    ///   gone.
    /// - "no_snapshot": it is there, but no snapshot of the recurrent layers' states is; where this prompt leaves it one is made.
    /// - "disabled": the prefix cache is off. "skipped": log probabilities of the prompt were asked for, which need every
    ///   position.
    pub struct PromptTokensDetails {
        cached_tokens: usize,
        miss_reason: Option<String>,
    }
}

record! {
    /// Log probabilities of the tokens of one answer, in order.
    pub struct Logprobs {
        content: Vec<Py<ResponseLogprob>>,
    }
}

record! {
    /// Natural logarithm of one token's probability; None for the first token of an echoed prompt. `token` is its text, `bytes`
    /// its own bytes, which need not be a character by themselves.
    pub struct ResponseLogprob {
        token: String,
        token_id: u32,
        logprob: Option<f32>,
        bytes: Py<PyBytes>,
        top_logprobs: Vec<Py<TopLogprob>>,
    }
}

record! {
    /// One of the likeliest tokens at a position, with the fields of a `ResponseLogprob`.
    pub struct TopLogprob {
        token: String,
        token_id: u32,
        logprob: f32,
        bytes: Py<PyBytes>,
    }
}

record! {
    /// A complete text answer.
    pub struct CompletionResponse {
        id: String,
        choices: Vec<Py<CompletionChoice>>,
        created: u64,
        model: String,
        system_fingerprint: String,
        object: String,
        usage: Py<Usage>,
    }
}

record! {
    /// One continuation of a text.
    pub struct CompletionChoice {
        finish_reason: String,
        index: usize,
        text: String,
        logprobs: Option<Py<Logprobs>>,
        stop_sequence: Option<String>,
        sequence: Option<Py<Sequence>>,
    }
}

record! {
    /// A part of a chat answer. `usage` is there on the last one.
    pub struct ChatCompletionChunkResponse {
        pub id: String,
        pub choices: Vec<Py<ChunkChoice>>,
        pub created: u64,
        pub model: String,
        pub system_fingerprint: String,
        pub object: String,
        pub usage: Option<Py<Usage>>,
    }
}

record! {
    /// A part of one answer; `finish_reason` is there on its last part.
    pub struct ChunkChoice {
        pub finish_reason: Option<String>,
        pub index: usize,
        pub delta: Py<Delta>,
        pub logprobs: Option<Py<Logprobs>>,
        pub stop_sequence: Option<String>,
        pub sequence: Option<Py<Sequence>>,
    }
}

record! {
    /// What is new since the last part. Of a call the first part has id and name, and its arguments come bit by bit.
    pub struct Delta {
        pub content: Option<String>,
        pub role: String,
        pub tool_calls: Option<Vec<Py<ToolCallResponse>>>,
        pub reasoning_content: Option<String>,
    }
}

impl Logprobs {
    fn tokens<'a>(&'a self, py: Python<'a>) -> Vec<answer_json::Token<'a>> {
        let top = |top: &'a Py<TopLogprob>| {
            let TopLogprob { token, logprob, bytes, .. } = top.get();
            answer_json::Token { text: token, bytes: bytes.as_bytes(py), logprob: Some(*logprob), top: Vec::new() }
        };
        let token = |entry: &'a Py<ResponseLogprob>| {
            let ResponseLogprob { token, logprob, bytes, top_logprobs, .. } = entry.get();
            let top = top_logprobs.iter().map(top).collect();
            answer_json::Token { text: token, bytes: bytes.as_bytes(py), logprob: *logprob, top }
        };
        self.content.iter().map(token).collect()
    }
}

impl Usage {
    fn as_openai(&self) -> answer_json::Usage<'_> {
        let details = self.prompt_tokens_details.as_ref().map(Py::get);
        answer_json::Usage {
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.completion_tokens,
            total_tokens: self.total_tokens,
            prompt_tokens_details: details.map(|details| answer_json::PromptTokensDetails {
                cached_tokens: details.cached_tokens,
                miss_reason: details.miss_reason.as_deref(),
            }),
            avg_tok_per_sec: self.avg_tok_per_sec,
            avg_prompt_tok_per_sec: self.avg_prompt_tok_per_sec,
            avg_compl_tok_per_sec: self.avg_compl_tok_per_sec,
            total_time_sec: self.total_time_sec,
            total_prompt_time_sec: self.total_prompt_time_sec,
            total_completion_time_sec: self.total_completion_time_sec,
            preemptions: self.preemptions,
            recomputed_tokens: self.recomputed_tokens,
            draft_tokens: self.draft_tokens,
            accepted_draft_tokens: self.accepted_draft_tokens,
            encoded_images: self.encoded_images,
            encoded_sounds: self.encoded_sounds,
            encoded_videos: self.encoded_videos,
        }
    }
}

/// What the JSON of a choice has of calls; those of a part have their index.
fn calls_json(calls: Option<&[Py<ToolCallResponse>]>, has_index: bool) -> Vec<answer_json::Call<'_>> {
    let call = |call| {
        let ToolCallResponse { index, id, r#type, function } = Py::get(call);
        let CalledFunction { name, arguments } = function.get();
        answer_json::Call {
            index: has_index.then_some(*index),
            id: id.as_deref(),
            r#type: id.as_ref().map(|_| r#type.as_str()),
            function: answer_json::Function { name: name.as_deref(), arguments },
        }
    };
    calls.unwrap_or_default().iter().map(call).collect()
}

/// What the JSON of a choice has of log probabilities.
fn logprobs_json(
    py: Python<'_>,
    logprobs: Option<&Py<Logprobs>>,
    shape: impl Fn(&[answer_json::Token<'_>]) -> serde_json::Value,
) -> Option<serde_json::Value> {
    logprobs.map(|logprobs| shape(&logprobs.get().tokens(py)))
}

impl Choice {
    fn as_openai<'a>(&'a self, py: Python<'_>) -> answer_json::Choice<'a> {
        let ResponseMessage { role, content, tool_calls, reasoning_content } = self.message.get();
        answer_json::Choice {
            index: self.index,
            said: answer_json::Said::Message {
                role,
                content: content.as_deref(),
                reasoning_content: reasoning_content.as_deref(),
                tool_calls: calls_json(tool_calls.as_deref(), false),
                refusal: None,
            },
            logprobs: logprobs_json(py, self.logprobs.as_ref(), answer_json::chat_logprobs),
            finish_reason: Some(&self.finish_reason),
            stop_sequence: self.stop_sequence.as_deref(),
        }
    }
}

impl ChunkChoice {
    fn as_openai<'a>(&'a self, py: Python<'_>) -> answer_json::Choice<'a> {
        let Delta { role, content, tool_calls, reasoning_content } = self.delta.get();
        answer_json::Choice {
            index: self.index,
            said: answer_json::Said::Delta {
                role,
                content: content.as_deref(),
                reasoning_content: reasoning_content.as_deref(),
                tool_calls: calls_json(tool_calls.as_deref(), true),
            },
            logprobs: logprobs_json(py, self.logprobs.as_ref(), answer_json::chat_logprobs),
            finish_reason: self.finish_reason.as_deref(),
            stop_sequence: self.stop_sequence.as_deref(),
        }
    }
}

impl CompletionChoice {
    fn as_openai<'a>(&'a self, py: Python<'_>) -> answer_json::Choice<'a> {
        answer_json::Choice {
            index: self.index,
            said: answer_json::Said::Text(&self.text),
            logprobs: logprobs_json(py, self.logprobs.as_ref(), answer_json::text_logprobs),
            finish_reason: Some(&self.finish_reason),
            stop_sequence: self.stop_sequence.as_deref(),
        }
    }
}

/// What an answer shows in a notebook.
trait Shown {
    /// The texts of its choices, each with why it ended.
    fn texts(&self) -> Vec<(&str, Option<&str>)>;
    /// What it used, once that is known.
    fn used(&self) -> Option<&Usage>;
}

impl Shown for ChatCompletionResponse {
    fn texts(&self) -> Vec<(&str, Option<&str>)> {
        let choices = self.choices.iter().map(Py::get);
        choices.map(|choice| (choice.message.get().content.as_deref().unwrap_or(""), Some(&*choice.finish_reason))).collect()
    }

    fn used(&self) -> Option<&Usage> {
        Some(self.usage.get())
    }
}

impl Shown for CompletionResponse {
    fn texts(&self) -> Vec<(&str, Option<&str>)> {
        self.choices.iter().map(Py::get).map(|choice| (&*choice.text, Some(&*choice.finish_reason))).collect()
    }

    fn used(&self) -> Option<&Usage> {
        Some(self.usage.get())
    }
}

impl Shown for ChatCompletionChunkResponse {
    fn texts(&self) -> Vec<(&str, Option<&str>)> {
        let choices = self.choices.iter().map(Py::get);
        choices.map(|choice| (choice.delta.get().content.as_deref().unwrap_or(""), choice.finish_reason.as_deref())).collect()
    }

    fn used(&self) -> Option<&Usage> {
        self.usage.as_ref().map(Py::get)
    }
}

/// As text of HTML.
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Texts as they are, and a line about each and about what was used.
fn html(answer: &impl Shown) -> String {
    let texts = answer.texts().into_iter().map(|(text, reason)| {
        let reason = reason.map(|reason| format!("<small>{}</small>", escaped(reason)));
        format!("<pre style=\"white-space: pre-wrap\">{}</pre>{}", escaped(text), reason.unwrap_or_default())
    });
    let used = answer.used().map(|usage| {
        let cached = usage.prompt_tokens_details.as_ref().map_or(0, |details| details.get().cached_tokens);
        format!(
            "<p><small>{} prompt tokens ({cached} cached), {} generated at {:.1}/s, {:.2} s in all</small></p>",
            usage.prompt_tokens, usage.completion_tokens, usage.avg_compl_tok_per_sec, usage.total_time_sec
        )
    });
    texts.chain(used).collect()
}

/// What answers and parts of them have beyond their fields.
macro_rules! answer {
    ($class:ident) => {
        #[pymethods]
        impl $class {
            /// JSON in the shape of OpenAI's API, with what this package knows beyond it. A kept `sequence` is left out.
            fn to_json(&self, py: Python<'_>) -> PyResult<String> {
                let answer = answer_json::Answer {
                    id: &self.id,
                    object: &self.object,
                    created: self.created,
                    model: &self.model,
                    system_fingerprint: &self.system_fingerprint,
                    choices: self.choices.iter().map(|choice| choice.get().as_openai(py)).collect(),
                    usage: self.used().map(Usage::as_openai),
                };
                serde_json::to_string(&answer).map_err(|error| InternalError::new_err(error.to_string()))
            }

            /// What `to_json` writes, as a dict.
            fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
                py.import("json")?.call_method1("loads", (self.to_json(py)?,))
            }

            fn _repr_html_(&self) -> String {
                html(self)
            }
        }
    };
}

answer!(ChatCompletionResponse);
answer!(CompletionResponse);
answer!(ChatCompletionChunkResponse);

/// What all parts of one answer share.
#[derive(Clone)]
pub struct Envelope {
    pub id: String,
    pub created: u64,
    pub model: String,
    pub system_fingerprint: String,
}

impl Envelope {
    /// A new id and the time of now.
    pub fn new(model: &str) -> Self {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        Self {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed).to_string(),
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            model: model.to_owned(),
            system_fingerprint: "local".to_owned(),
        }
    }
}

fn per_second(tokens: usize, seconds: f64) -> f64 {
    if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 }
}

/// Usage with its rates.
pub fn usage(py: Python<'_>, usage: &engine::Usage) -> PyResult<Py<Usage>> {
    let details = PromptTokensDetails {
        cached_tokens: usage.cached_tokens,
        miss_reason: usage.cache_miss.map(|reason| reason.name().to_owned()),
    };
    let total_tokens = usage.prompt_tokens + usage.completion_tokens;
    Py::new(
        py,
        Usage {
            completion_tokens: usage.completion_tokens,
            prompt_tokens: usage.prompt_tokens,
            total_tokens,
            avg_tok_per_sec: per_second(total_tokens, usage.total_time_sec),
            avg_prompt_tok_per_sec: per_second(usage.prompt_tokens, usage.total_prompt_time_sec),
            avg_compl_tok_per_sec: per_second(usage.completion_tokens, usage.total_completion_time_sec),
            total_time_sec: usage.total_time_sec,
            total_prompt_time_sec: usage.total_prompt_time_sec,
            total_completion_time_sec: usage.total_completion_time_sec,
            prompt_tokens_details: Some(Py::new(py, details)?),
            preemptions: usage.preemptions,
            recomputed_tokens: usage.recomputed_tokens,
            draft_tokens: usage.draft_tokens,
            accepted_draft_tokens: usage.accepted_draft_tokens,
            encoded_images: usage.encoded_images,
            encoded_sounds: usage.encoded_sounds,
            encoded_videos: usage.encoded_videos,
        },
    )
}

/// Log probabilities of some tokens.
pub fn logprobs(py: Python<'_>, tokens: Vec<TokenLogprobs>) -> PyResult<Py<Logprobs>> {
    let content = tokens.into_iter().map(|token| {
        let top_logprobs = token
            .top_logprobs
            .into_iter()
            .map(|top| {
                let bytes = PyBytes::new(py, &top.bytes).unbind();
                Py::new(py, TopLogprob { token: top.text().into_owned(), token_id: top.token_id, logprob: top.logprob, bytes })
            })
            .collect::<PyResult<_>>()?;
        let bytes = PyBytes::new(py, &token.bytes).unbind();
        Py::new(py, ResponseLogprob { token: token.text, token_id: token.token_id, logprob: token.logprob, bytes, top_logprobs })
    });
    Py::new(py, Logprobs { content: content.collect::<PyResult<_>>()? })
}

/// Calls, or parts of them; None for none.
pub fn tool_calls(py: Python<'_>, calls: Vec<ToolCallDelta>) -> PyResult<Option<Vec<Py<ToolCallResponse>>>> {
    if calls.is_empty() {
        return Ok(None);
    }
    let call = |ToolCallDelta { index, id, name, arguments }| {
        let function = Py::new(py, CalledFunction { name, arguments })?;
        Py::new(py, ToolCallResponse { index, id, r#type: "function".to_owned(), function })
    };
    calls.into_iter().map(call).collect::<PyResult<_>>().map(Some)
}

/// What a choice came to, to be gone on from.
pub fn kept(py: Python<'_>, engine: &Engine, model: &str, sequence: engine::Sequence) -> PyResult<Py<Sequence>> {
    Py::new(py, Sequence::new(engine, model, sequence))
}

/// The response, or an error that has it as `response`: a choice may have text.
fn unless_failed<T: pyo3::PyClass>(py: Python<'_>, response: Py<T>, failure: Option<EngineError>) -> PyResult<Py<T>> {
    let Some(why) = failure else { return Ok(response) };
    let error = raise(why);
    error.value(py).setattr("response", response)?;
    Err(error)
}

/// A complete chat answer; the error of a choice that failed, if one did.
pub fn chat(py: Python<'_>, envelope: Envelope, completion: Completion, engine: &Engine) -> PyResult<Py<ChatCompletionResponse>> {
    let failure = completion.failure();
    let adapter_generation = completion.adapter_generation;
    let choices = completion.choices.into_iter().map(|choice| {
        let calls = choice.tool_calls.into_iter().enumerate().map(|(index, call)| ToolCallDelta {
            index,
            id: Some(call.id),
            name: Some(call.name),
            arguments: call.arguments,
        });
        let tool_calls = tool_calls(py, calls.collect())?;
        let message = ResponseMessage {
            content: Some(choice.text).filter(|text| !text.is_empty() || tool_calls.is_none()),
            role: "assistant".to_owned(),
            tool_calls,
            reasoning_content: choice.reasoning,
        };
        Py::new(
            py,
            Choice {
                finish_reason: choice.finish_reason.as_str().to_owned(),
                index: choice.index,
                message: Py::new(py, message)?,
                logprobs: choice.logprobs.map(|tokens| logprobs(py, tokens)).transpose()?,
                stop_sequence: choice.stop_sequence,
                sequence: choice.sequence.map(|sequence| kept(py, engine, &envelope.model, sequence)).transpose()?,
            },
        )
    });
    let choices = choices.collect::<PyResult<_>>()?;
    let Envelope { id, created, model, system_fingerprint } = envelope;
    let object = "chat.completion".to_owned();
    let usage = usage(py, &completion.usage)?;
    let response = Py::new(
        py,
        ChatCompletionResponse { id, choices, created, model, system_fingerprint, object, usage, adapter_generation },
    )?;
    unless_failed(py, response, failure)
}

/// A complete text answer; the error of a choice that failed, if one did.
pub fn completion(
    py: Python<'_>,
    envelope: Envelope,
    completion: Completion,
    engine: &Engine,
) -> PyResult<Py<CompletionResponse>> {
    let failure = completion.failure();
    let choices = completion.choices.into_iter().map(|choice| {
        Py::new(
            py,
            CompletionChoice {
                finish_reason: choice.finish_reason.as_str().to_owned(),
                index: choice.index,
                text: choice.text,
                logprobs: choice.logprobs.map(|tokens| logprobs(py, tokens)).transpose()?,
                stop_sequence: choice.stop_sequence,
                sequence: choice.sequence.map(|sequence| kept(py, engine, &envelope.model, sequence)).transpose()?,
            },
        )
    });
    let choices = choices.collect::<PyResult<_>>()?;
    let Envelope { id, created, model, system_fingerprint } = envelope;
    let object = "text_completion".to_owned();
    let usage = usage(py, &completion.usage)?;
    let response = Py::new(py, CompletionResponse { id, choices, created, model, system_fingerprint, object, usage })?;
    unless_failed(py, response, failure)
}

//! Answers: frozen classes, built once from the engine's own structs.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{SystemTime, UNIX_EPOCH},
};

use engine::{Completion, Engine, TokenLogprobs};
use pyo3::{prelude::*, types::PyBytes};

use crate::{logger::log_failure, sequence::Sequence};

/// `Name(field=value, ...)`, each value as Python writes it.
macro_rules! repr {
    ($py:expr, $name:literal, $self:expr, $($field:ident),+) => {{
        let mut fields = Vec::new();
        $(fields.push(format!("{}={}", stringify!($field), (&$self.$field).into_pyobject($py)?.repr()?));)+
        Ok(format!("{}({})", $name, fields.join(", ")))
    }};
}

/// A complete chat answer.
#[pyclass(frozen, get_all, module = "mistral_paged")]
pub struct ChatCompletionResponse {
    id: String,
    choices: Vec<Py<Choice>>,
    created: u64,
    model: String,
    system_fingerprint: String,
    object: String,
    usage: Py<Usage>,
}

/// One answer of a chat. `finish_reason` is "stop" (end of sequence or a stop string), "length" (`max_tokens`, the model's length
/// or the whole KV pool) or "error", whose cause is logged. `stop_sequence` is the stop string that ended it; `sequence`, with
/// `keep=True`, what can be gone on from.
#[pyclass(frozen, get_all, module = "mistral_paged")]
pub struct Choice {
    finish_reason: String,
    index: usize,
    message: Py<ResponseMessage>,
    logprobs: Option<Py<Logprobs>>,
    stop_sequence: Option<String>,
    sequence: Option<Py<Sequence>>,
}

/// What the model said. `tool_calls` and `reasoning_content` are None in this version.
#[pyclass(frozen, get_all, module = "mistral_paged")]
pub struct ResponseMessage {
    content: Option<String>,
    role: String,
    tool_calls: Option<Vec<String>>,
    reasoning_content: Option<String>,
}

/// What a request used: tokens, seconds from submission, tokens a second; `preemptions`, how often a choice lost its blocks to
/// another request, and `recomputed_tokens`, how many tokens were computed again.
#[pyclass(frozen, get_all, module = "mistral_paged")]
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
}

/// Of the prompt, the tokens that were not computed, because the prefix cache or the sequence that was gone on from had their
/// keys and values. `miss_reason` tells why there were no more, of the first block that was missing; None when all but the last
/// token were there.
///
/// - "cold": nothing like it was computed before, or too long ago. "evicted": its memory was needed for something else.
/// - "salt": it is there for another `cache_salt`. "identity": it is there for another model state.
/// - "partial_tail": it is the incomplete last block of the prompt. "window_evicted": a sliding window that ends there is gone.
/// - "disabled": the prefix cache is off. "skipped": log probabilities of the prompt were asked for, which need every position.
#[pyclass(frozen, get_all, module = "mistral_paged")]
pub struct PromptTokensDetails {
    cached_tokens: usize,
    miss_reason: Option<&'static str>,
}

/// Log probabilities of the tokens of one answer, in order.
#[pyclass(frozen, get_all, module = "mistral_paged")]
pub struct Logprobs {
    content: Vec<Py<ResponseLogprob>>,
}

/// Natural logarithm of one token's probability; None for the first token of an echoed prompt. `token` is its text, `bytes` its
/// own bytes, which need not be a character by themselves.
#[pyclass(frozen, get_all, module = "mistral_paged")]
pub struct ResponseLogprob {
    token: String,
    token_id: u32,
    logprob: Option<f32>,
    bytes: Py<PyBytes>,
    top_logprobs: Vec<Py<TopLogprob>>,
}

/// One of the likeliest tokens at a position: `token` is its id, `bytes` its text.
#[pyclass(frozen, get_all, module = "mistral_paged")]
pub struct TopLogprob {
    token: u32,
    logprob: f32,
    bytes: String,
}

/// A complete text answer.
#[pyclass(frozen, get_all, module = "mistral_paged")]
pub struct CompletionResponse {
    id: String,
    choices: Vec<Py<CompletionChoice>>,
    created: u64,
    model: String,
    system_fingerprint: String,
    object: String,
    usage: Py<Usage>,
}

/// One continuation of a text.
#[pyclass(frozen, get_all, module = "mistral_paged")]
pub struct CompletionChoice {
    finish_reason: String,
    index: usize,
    text: String,
    logprobs: Option<Py<Logprobs>>,
    stop_sequence: Option<String>,
    sequence: Option<Py<Sequence>>,
}

/// A part of a chat answer. `usage` is there on the last one.
#[pyclass(frozen, get_all, module = "mistral_paged")]
pub struct ChatCompletionChunkResponse {
    pub id: String,
    pub choices: Vec<Py<ChunkChoice>>,
    pub created: u64,
    pub model: String,
    pub system_fingerprint: String,
    pub object: String,
    pub usage: Option<Py<Usage>>,
}

/// A part of one answer; `finish_reason` is there on its last part.
#[pyclass(frozen, get_all, module = "mistral_paged")]
pub struct ChunkChoice {
    pub finish_reason: Option<String>,
    pub index: usize,
    pub delta: Py<Delta>,
    pub logprobs: Option<Py<Logprobs>>,
    pub stop_sequence: Option<String>,
    pub sequence: Option<Py<Sequence>>,
}

/// The text since the last part.
#[pyclass(frozen, get_all, module = "mistral_paged")]
pub struct Delta {
    pub content: Option<String>,
    pub role: String,
    pub tool_calls: Option<Vec<String>>,
    pub reasoning_content: Option<String>,
}

#[pymethods]
impl ChatCompletionResponse {
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        repr!(py, "ChatCompletionResponse", self, id, choices, created, model, system_fingerprint, object, usage)
    }
}

#[pymethods]
impl Choice {
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        repr!(py, "Choice", self, finish_reason, index, message, logprobs, stop_sequence, sequence)
    }
}

#[pymethods]
impl ResponseMessage {
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        repr!(py, "ResponseMessage", self, content, role, tool_calls, reasoning_content)
    }
}

#[pymethods]
impl Usage {
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        repr!(
            py,
            "Usage",
            self,
            completion_tokens,
            prompt_tokens,
            total_tokens,
            avg_tok_per_sec,
            avg_prompt_tok_per_sec,
            avg_compl_tok_per_sec,
            total_time_sec,
            total_prompt_time_sec,
            total_completion_time_sec,
            prompt_tokens_details,
            preemptions,
            recomputed_tokens
        )
    }
}

#[pymethods]
impl PromptTokensDetails {
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        repr!(py, "PromptTokensDetails", self, cached_tokens, miss_reason)
    }
}

#[pymethods]
impl Logprobs {
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        repr!(py, "Logprobs", self, content)
    }
}

#[pymethods]
impl ResponseLogprob {
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        repr!(py, "ResponseLogprob", self, token, token_id, logprob, bytes, top_logprobs)
    }
}

#[pymethods]
impl TopLogprob {
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        repr!(py, "TopLogprob", self, token, logprob, bytes)
    }
}

#[pymethods]
impl CompletionResponse {
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        repr!(py, "CompletionResponse", self, id, choices, created, model, system_fingerprint, object, usage)
    }
}

#[pymethods]
impl CompletionChoice {
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        repr!(py, "CompletionChoice", self, finish_reason, index, text, logprobs, stop_sequence, sequence)
    }
}

#[pymethods]
impl ChatCompletionChunkResponse {
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        repr!(py, "ChatCompletionChunkResponse", self, id, choices, created, model, system_fingerprint, object, usage)
    }
}

#[pymethods]
impl ChunkChoice {
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        repr!(py, "ChunkChoice", self, finish_reason, index, delta, logprobs, stop_sequence, sequence)
    }
}

#[pymethods]
impl Delta {
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        repr!(py, "Delta", self, content, role, tool_calls, reasoning_content)
    }
}

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
    let details =
        PromptTokensDetails { cached_tokens: usage.cached_tokens, miss_reason: usage.cache_miss.map(engine::MissReason::name) };
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
        },
    )
}

/// Log probabilities of some tokens.
pub fn logprobs(py: Python<'_>, tokens: Vec<TokenLogprobs>) -> PyResult<Py<Logprobs>> {
    let content = tokens.into_iter().map(|token| {
        let top_logprobs = token
            .top_logprobs
            .into_iter()
            .map(|top| Py::new(py, TopLogprob { token: top.token_id, logprob: top.logprob, bytes: top.text }))
            .collect::<PyResult<_>>()?;
        let bytes = PyBytes::new(py, &token.bytes).unbind();
        Py::new(py, ResponseLogprob { token: token.text, token_id: token.token_id, logprob: token.logprob, bytes, top_logprobs })
    });
    Py::new(py, Logprobs { content: content.collect::<PyResult<_>>()? })
}

/// What a choice came to, to be gone on from.
pub fn kept(py: Python<'_>, engine: &Engine, model: &str, sequence: engine::Sequence) -> PyResult<Py<Sequence>> {
    Py::new(py, Sequence::new(engine, model, sequence))
}

/// A complete chat answer.
pub fn chat(py: Python<'_>, envelope: Envelope, completion: Completion, engine: &Engine) -> PyResult<Py<ChatCompletionResponse>> {
    let choices = completion.choices.into_iter().map(|choice| {
        log_failure(py, &envelope.id, choice.index, choice.error.as_deref())?;
        let message = ResponseMessage {
            content: Some(choice.text),
            role: "assistant".to_owned(),
            tool_calls: None,
            reasoning_content: None,
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
    Py::new(py, ChatCompletionResponse { id, choices, created, model, system_fingerprint, object, usage })
}

/// A complete text answer.
pub fn completion(
    py: Python<'_>,
    envelope: Envelope,
    completion: Completion,
    engine: &Engine,
) -> PyResult<Py<CompletionResponse>> {
    let choices = completion.choices.into_iter().map(|choice| {
        log_failure(py, &envelope.id, choice.index, choice.error.as_deref())?;
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
    Py::new(py, CompletionResponse { id, choices, created, model, system_fingerprint, object, usage })
}

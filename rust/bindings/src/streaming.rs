//! The iterator over a chat answer that is still being generated.

use std::{
    sync::{Mutex, PoisonError},
    task::Poll,
};

use engine::{Engine, EngineError, OutputEvent, RequestStream, TokenLogprobs, ToolCallDelta};
use pyo3::prelude::*;

use crate::{
    arguments::at_least,
    detach::{POLL, enter, wait},
    process::OwnProcess,
    response::{self, ChatCompletionChunkResponse, ChunkChoice, Delta, Envelope, kept},
    sequence::{Generating, Sequence},
};

/// Iterates over the parts of a chat answer: one for each token's text, and one with the `finish_reason` for each choice; the
/// last has the usage. Dropping it, or `close()`, cancels the request and frees its blocks. An error of the engine is raised from
/// `next()`, behind the text that there is.
#[pyclass(frozen, module = "mistral_paged")]
pub struct ChatCompletionStreamer {
    envelope: Envelope,
    wants_logprobs: bool,
    state: OwnProcess<Mutex<State>>,
}

struct State {
    /// `None` once the answer is complete, has failed or was closed: what is over keeps no model in memory.
    stream: Option<(RequestStream, Engine)>,
    parts: Parts,
}

/// What one chunk tells.
#[derive(Default)]
pub struct Part {
    index: usize,
    reasoning: String,
    text: String,
    calls: Vec<ToolCallDelta>,
    logprobs: Vec<TokenLogprobs>,
    finish_reason: Option<String>,
    stop_sequence: Option<String>,
    /// With the engine that it goes on in.
    sequence: Option<(Engine, engine::Sequence)>,
    usage: Option<engine::Usage>,
}

impl Part {
    /// Whether nothing comes after it.
    pub fn is_last(&self) -> bool {
        self.usage.is_some()
    }
}

/// Makes parts of the events of a request.
pub struct Parts {
    unfinished: usize,
    /// The last choice's end, held back until the usage is known.
    ending: Option<Part>,
    /// The sequence that becomes what the answer comes to.
    generating: Option<Generating>,
    /// Why a choice ended with the reason "error"; raised behind the last part.
    failure: Option<EngineError>,
}

impl Parts {
    /// Of so many choices.
    pub fn of(n_choices: usize) -> Self {
        Self { unfinished: n_choices, ending: None, generating: None, failure: None }
    }

    /// The part that an event makes, if it makes one by itself.
    pub fn push(&mut self, event: OutputEvent, engine: &Engine) -> Option<Part> {
        self.failure = self.failure.take().or_else(|| event.failure());
        match event {
            OutputEvent::Delta { index, reasoning, text, calls, logprobs, .. } => {
                Some(Part { index, reasoning, text, calls, logprobs, ..Part::default() })
            }
            // No request of these classes asks for them.
            OutputEvent::PromptLogprobs(_) | OutputEvent::Vector { .. } => None,
            OutputEvent::Finished { index, reason, stop_sequence, mut sequence, .. } => {
                if let (Some(generating), Some(sequence)) = (&self.generating, sequence.take_if(|_| self.generating.is_some())) {
                    generating.set(sequence);
                }
                let sequence = sequence.map(|sequence| (engine.clone(), sequence));
                let finish_reason = Some(reason.as_str().to_owned());
                let part = Part { index, finish_reason, stop_sequence, sequence, ..Part::default() };
                self.unfinished = self.unfinished.saturating_sub(1);
                if self.unfinished > 0 {
                    return Some(part);
                }
                self.ending = Some(part);
                None
            }
            OutputEvent::Done(usage) => {
                let ending = self.ending.take().unwrap_or_default();
                Some(Part { usage: Some(usage), ..ending })
            }
        }
    }
}

impl Parts {
    /// Behind the last part: once the error of a choice that failed.
    pub fn end(&mut self) -> Result<(), EngineError> {
        self.failure.take().map_or(Ok(()), Err)
    }
}

fn check_choice(choice: &Bound<'_, PyAny>) -> PyResult<usize> {
    at_least("choice", &choice.extract()?, 0)
}

impl State {
    fn end(&mut self) {
        (self.stream, self.parts.generating) = (None, None);
    }

    /// The next part; `None` at the end.
    fn poll(&mut self) -> Result<Poll<Option<Part>>, EngineError> {
        let Some((stream, engine)) = &self.stream else {
            return self.parts.end().map(|()| Poll::Ready(None));
        };
        let event = match stream.next_timeout(POLL) {
            Ok(event) => event,
            Err(error) => {
                self.end();
                return Err(error);
            }
        };
        let Some(part) = event.and_then(|event| self.parts.push(event, engine)) else {
            return Ok(Poll::Pending);
        };
        if part.is_last() {
            self.end();
        }
        Ok(Poll::Ready(Some(part)))
    }
}

impl ChatCompletionStreamer {
    /// An iterator over a request that was just submitted.
    pub fn new(stream: RequestStream, n_choices: usize, wants_logprobs: bool, envelope: Envelope, engine: Engine) -> Self {
        let state = State { stream: Some((stream, engine)), parts: Parts::of(n_choices) };
        Self { envelope, wants_logprobs, state: OwnProcess::new(Mutex::new(state)) }
    }

    /// The sequence that becomes what the answer comes to.
    pub fn generating(self, generating: Generating) -> Self {
        if let Ok(state) = self.state.get() {
            state.lock().unwrap_or_else(PoisonError::into_inner).parts.generating = Some(generating);
        }
        self
    }
}

/// The chunk that tells a part.
pub fn chunk(py: Python<'_>, envelope: &Envelope, wants_logprobs: bool, part: Part) -> PyResult<ChatCompletionChunkResponse> {
    let is_text = !part.text.is_empty() || part.calls.is_empty() && part.reasoning.is_empty();
    let delta = Delta {
        content: Some(part.text).filter(|_| is_text),
        role: "assistant".to_owned(),
        tool_calls: response::tool_calls(py, part.calls)?,
        reasoning_content: Some(part.reasoning).filter(|reasoning| !reasoning.is_empty()),
    };
    let choice = ChunkChoice {
        finish_reason: part.finish_reason,
        index: part.index,
        delta: Py::new(py, delta)?,
        logprobs: wants_logprobs.then(|| response::logprobs(py, part.logprobs)).transpose()?,
        stop_sequence: part.stop_sequence,
        sequence: part.sequence.map(|(engine, sequence)| kept(py, &engine, &envelope.model, sequence)).transpose()?,
    };
    let Envelope { id, created, model, system_fingerprint } = envelope.clone();
    Ok(ChatCompletionChunkResponse {
        id,
        choices: vec![Py::new(py, choice)?],
        created,
        model,
        system_fingerprint,
        object: "chat.completion.chunk".to_owned(),
        usage: part.usage.map(|usage| response::usage(py, &usage)).transpose()?,
    })
}

#[pymethods]
impl ChatCompletionStreamer {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<ChatCompletionChunkResponse>> {
        let state = self.state.get()?;
        let part = wait(py, || state.lock().unwrap_or_else(PoisonError::into_inner).poll())?;
        part.map(|part| chunk(py, &self.envelope, self.wants_logprobs, part)).transpose()
    }

    /// What a choice has come to so far, to be gone on from, while it runs on itself.
    #[pyo3(signature = (choice=0))]
    fn sequence(&self, py: Python<'_>, #[pyo3(from_py_with = check_choice)] choice: usize) -> PyResult<Sequence> {
        let state = self.state.get()?;
        let (engine, sequence) = enter(py, || match &state.lock().unwrap_or_else(PoisonError::into_inner).stream {
            Some((stream, engine)) => Ok((engine.clone(), stream.sequence(choice)?)),
            None => Err(EngineError::InvalidArgument("the answer is complete: ask while it is made, or with keep=True".into())),
        })?;
        Ok(Sequence::new(&engine, &self.envelope.model, sequence))
    }

    /// Cancels the request, if it still runs, and frees its blocks.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let state = self.state.get()?;
        enter(py, || {
            state.lock().unwrap_or_else(PoisonError::into_inner).end();
            Ok(())
        })
    }
}

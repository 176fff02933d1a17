//! Requests that an event loop waits for. No thread waits, and the engine never waits for the interpreter: it leaves events in a
//! mailbox and writes a byte to a socket that the loop watches, once a step for all requests of the loop.

use std::{
    collections::VecDeque,
    io::{Read, Write},
    mem,
    ops::ControlFlow,
    os::{fd::AsRawFd, unix::net::UnixStream},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use engine::{
    Completion, CompletionCollector, EmbeddingInput, Engine, EngineError, Event, EventSink, GenerationRequest, RequestHandle,
};
use pyo3::{IntoPyObjectExt, exceptions::PyStopAsyncIteration, prelude::*};

use crate::{
    completing::vector,
    detach::{enter, enter_long},
    embedding::EmbeddingRequest,
    process::OwnProcess,
    request::{ChatCompletionRequest, CompletionRequest},
    rerank::RerankRequest,
    response::{self, Envelope},
    runner::Runner,
    streaming::{Part, Parts, chunk},
};

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tells an event loop which of its requests have events: `fileno()` becomes readable, and `take()` gives the requests' keys.
#[pyclass(frozen, module = "mistral_paged._core")]
pub struct EventSignal {
    signal: Arc<Signal>,
}

struct Signal {
    /// Keys of requests whose mailbox was empty and is not any more.
    keys: Mutex<Vec<u64>>,
    /// Keys were added for which no byte was written.
    is_new: AtomicBool,
    reader: UnixStream,
    writer: UnixStream,
}

#[pymethods]
impl EventSignal {
    #[new]
    fn new() -> PyResult<Self> {
        let (reader, writer) = UnixStream::pair()?;
        reader.set_nonblocking(true)?;
        writer.set_nonblocking(true)?;
        let signal = Signal { keys: Mutex::default(), is_new: AtomicBool::new(false), reader, writer };
        Ok(Self { signal: Arc::new(signal) })
    }

    /// The file descriptor that becomes readable.
    fn fileno(&self) -> i32 {
        self.signal.reader.as_raw_fd()
    }

    /// Keys of the requests with events since the last call.
    fn take(&self) -> Vec<u64> {
        // A byte a step; whatever is left makes the loop come again.
        let _ = (&self.signal.reader).read(&mut [0; 256]);
        mem::take(&mut *lock(&self.signal.keys))
    }
}

type Mailbox = Arc<Mutex<VecDeque<Event>>>;

/// The engine's end of a request.
struct SignalSink {
    key: u64,
    mailbox: Mailbox,
    signal: Arc<Signal>,
}

impl EventSink for SignalSink {
    fn take(&mut self, events: &mut Vec<Event>) -> ControlFlow<()> {
        let mut mailbox = lock(&self.mailbox);
        if mailbox.is_empty() {
            lock(&self.signal.keys).push(self.key);
            self.signal.is_new.store(true, Ordering::Release);
        }
        mailbox.extend(events.drain(..));
        ControlFlow::Continue(())
    }

    fn flush(&mut self) {
        if self.signal.is_new.swap(false, Ordering::AcqRel) {
            // Where there is no room, there are bytes that wake the loop.
            let _ = (&self.signal.writer).write(&[0]);
        }
    }
}

/// A request that runs, or its answer. Dropping it, or `close()`, cancels the request and frees its blocks.
#[pyclass(frozen, module = "mistral_paged._core")]
pub struct PendingRequest {
    key: u64,
    envelope: Envelope,
    wants_logprobs: bool,
    state: OwnProcess<Mutex<State>>,
}

struct State {
    mailbox: Mailbox,
    answer: Answer,
    /// `None` once the answer is complete, has failed or was closed.
    running: Option<(RequestHandle, Engine)>,
}

enum Answer {
    Chat(CompletionCollector),
    Completion(CompletionCollector),
    /// So many values of a vector, or all.
    Vector(CompletionCollector, Option<usize>),
    Stream(Box<Parts>),
}

/// What there is to tell.
enum News {
    Nothing,
    Chat(Completion, Engine),
    Completion(Completion, Engine),
    Vector(Completion, Option<usize>),
    Part(Box<Part>),
    End,
}

impl State {
    fn advance(&mut self) -> Result<News, engine::EngineError> {
        loop {
            let Some((_, engine)) = &self.running else {
                if let Answer::Stream(parts) = &mut self.answer {
                    parts.end()?;
                }
                return Ok(News::End);
            };
            let Some(event) = lock(&self.mailbox).pop_front() else { return Ok(News::Nothing) };
            let event = match event {
                Ok(event) => event,
                Err(error) => {
                    self.running = None;
                    return Err(error);
                }
            };
            let news = match &mut self.answer {
                Answer::Chat(collector) => collector.push(event).map(|completion| News::Chat(completion, engine.clone())),
                Answer::Completion(collector) => {
                    collector.push(event).map(|completion| News::Completion(completion, engine.clone()))
                }
                Answer::Vector(collector, dimensions) => {
                    collector.push(event).map(|completion| News::Vector(completion, *dimensions))
                }
                Answer::Stream(parts) => parts.push(event, engine).map(|part| News::Part(Box::new(part))),
            };
            let Some(news) = news else { continue };
            if !matches!(&news, News::Part(part) if !part.is_last()) {
                self.running = None;
            }
            return Ok(news);
        }
    }
}

#[pymethods]
impl PendingRequest {
    /// By which the signal tells of it.
    #[getter]
    fn key(&self) -> u64 {
        self.key
    }

    /// The response, or of a stream the next chunk; None when it has not come. `StopAsyncIteration` at the end of a stream.
    fn poll(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        let state = self.state.get()?;
        Ok(Some(match enter(py, || lock(state).advance())? {
            News::Nothing => return Ok(None),
            News::Chat(completion, engine) => response::chat(py, self.envelope.clone(), completion, &engine)?.into_any(),
            News::Completion(completion, engine) => {
                response::completion(py, self.envelope.clone(), completion, &engine)?.into_any()
            }
            News::Vector(completion, dimensions) => vector(completion, dimensions)?.into_py_any(py)?,
            News::Part(part) => Py::new(py, chunk(py, &self.envelope, self.wants_logprobs, *part)?)?.into_any(),
            News::End => return Err(PyStopAsyncIteration::new_err(())),
        }))
    }

    /// Cancels the request, if it still runs.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let state = self.state.get()?;
        enter(py, || {
            lock(state).running = None;
            Ok(())
        })
    }
}

/// A request of either kind.
#[derive(FromPyObject)]
pub enum AnyRequest<'py> {
    /// A chat.
    Chat(Bound<'py, ChatCompletionRequest>),
    /// A completion.
    Completion(Bound<'py, CompletionRequest>),
}

static NEXT_KEY: AtomicU64 = AtomicU64::new(0);

/// Submits a request for each input of one for embeddings; `signal` tells of their events. The model must be loaded.
#[pyfunction]
#[pyo3(signature = (runner, request, signal, model_id=None))]
pub fn submit_embeddings(
    py: Python<'_>,
    runner: &Runner,
    request: &EmbeddingRequest,
    signal: &EventSignal,
    model_id: Option<&str>,
) -> PyResult<Vec<PendingRequest>> {
    let request = request.request.clone();
    let (dimensions, num_bytes) = (request.dimensions, request.inputs.iter().map(EmbeddingInput::text_bytes).sum());
    let made = move |engine: &Engine| engine.embedding_requests(request);
    submit_vectors(py, (runner, signal, model_id), (num_bytes, dimensions), made)
}

/// The same of one for scores: of each document a vector of one value.
#[pyfunction]
#[pyo3(signature = (runner, request, signal, model_id=None))]
pub fn submit_scores(
    py: Python<'_>,
    runner: &Runner,
    request: &RerankRequest,
    signal: &EventSignal,
    model_id: Option<&str>,
) -> PyResult<Vec<PendingRequest>> {
    let request = request.request.clone();
    let num_bytes = request.text_bytes();
    submit_vectors(py, (runner, signal, model_id), (num_bytes, None), move |engine: &Engine| engine.rerank_requests(request))
}

/// Submits all that `made` makes of so many bytes of text; each vector is cut to the dimensions.
fn submit_vectors(
    py: Python<'_>,
    (runner, signal, model_id): (&Runner, &EventSignal, Option<&str>),
    (num_bytes, dimensions): (usize, Option<usize>),
    made: impl FnOnce(&Engine) -> Result<Vec<GenerationRequest>, EngineError> + Send + 'static,
) -> PyResult<Vec<PendingRequest>> {
    let engine = runner.engine_of(model_id)?;
    let (submitter, signal) = (engine.clone(), Arc::clone(&signal.signal));
    let submitted = enter_long(py, num_bytes, move || {
        let submit = |request| {
            let (key, mailbox) = (NEXT_KEY.fetch_add(1, Ordering::Relaxed), Mailbox::default());
            let sink = SignalSink { key, mailbox: Arc::clone(&mailbox), signal: Arc::clone(&signal) };
            Ok((key, mailbox, submitter.submit_to(request, Box::new(sink))?))
        };
        made(&submitter)?.into_iter().map(submit).collect::<Result<Vec<_>, EngineError>>()
    })?;
    let pending = |(key, mailbox, handle): (u64, Mailbox, RequestHandle)| {
        let answer = Answer::Vector(handle.collector(), dimensions);
        let state = State { mailbox, answer, running: Some((handle, engine.clone())) };
        PendingRequest { key, envelope: runner.envelope(), wants_logprobs: false, state: OwnProcess::new(Mutex::new(state)) }
    };
    Ok(submitted.into_iter().map(pending).collect())
}

/// Whether submitting the request takes long enough for another thread: its images must become tiles, and its sounds features.
#[pyfunction]
#[allow(clippy::needless_pass_by_value, reason = "an argument")]
pub fn takes_long(request: AnyRequest<'_>) -> bool {
    matches!(&request, AnyRequest::Chat(request) if request.get().request.prompt.has_media())
}

/// Submits a request whose events `signal` tells of. The model must be loaded.
#[pyfunction]
#[pyo3(signature = (runner, request, signal, model_id=None))]
#[allow(clippy::needless_pass_by_value, reason = "an argument")]
pub fn submit(
    py: Python<'_>,
    runner: &Runner,
    request: AnyRequest<'_>,
    signal: &EventSignal,
    model_id: Option<&str>,
) -> PyResult<PendingRequest> {
    let engine = runner.engine_of(model_id)?;
    let (is_chat, request) = match &request {
        AnyRequest::Chat(request) => (true, request.get().request.clone()),
        AnyRequest::Completion(request) => (false, request.get().request.clone()),
    };
    let (wants_logprobs, streams, n_choices) =
        (request.sampling.logprobs.is_some(), is_chat && request.stream, request.n_choices);
    let (key, mailbox) = (NEXT_KEY.fetch_add(1, Ordering::Relaxed), Mailbox::default());
    let sink = SignalSink { key, mailbox: Arc::clone(&mailbox), signal: Arc::clone(&signal.signal) };
    let submitter = engine.clone();
    let handle = enter_long(py, request.prompt.text_bytes(), move || submitter.submit_to(request, Box::new(sink)))?;
    let answer = match (is_chat, streams) {
        (true, true) => Answer::Stream(Box::new(Parts::of(n_choices))),
        (true, false) => Answer::Chat(handle.collector()),
        (false, _) => Answer::Completion(handle.collector()),
    };
    let state = State { mailbox, answer, running: Some((handle, engine)) };
    Ok(PendingRequest { key, envelope: runner.envelope(), wants_logprobs, state: OwnProcess::new(Mutex::new(state)) })
}

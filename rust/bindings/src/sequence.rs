//! Sequences that are gone on from: the branches of a search.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use engine::{Continuation, Engine, GenerationRequest, Prompt};
use pyo3::{
    exceptions::PyTypeError,
    prelude::*,
    types::{PyBytes, PyDict, PyList, PyString, PyTuple},
};

use crate::{
    arguments::{Integer, Real, Text, at_least_if_given, named, text, token_ids, within},
    completing::complete,
    detach::{enter, enter_long},
    exceptions::invalid,
    messages,
    process::OwnProcess,
    response::{self, Envelope},
    sampling::{DryFields, SamplingFields},
    service::{ServiceFields, check_priority},
    streaming::ChatCompletionStreamer,
    which::OneOrMany,
};

/// What a request with `keep=True` came to, or one that still runs: tokens, and in the KV pool their keys and values.
///
/// Search over texts with it: `fork` gives branches that share all blocks so far, each `generate` goes on with a sampling of its
/// own and writes to blocks of its own from there. When the pool needs the blocks of a sequence at rest, it takes them, and the
/// next `generate` computes them again: the tokens are the same.
///
/// A copy (`copy.copy`) is the same sequence; `fork` makes another.
///
/// `release()`, the end of a `with` block or dropping it gives the blocks back. Any number of threads may use a sequence, but one
/// at a time goes on from it. In a forked process every use raises `InternalError`.
#[pyclass(frozen, module = "mistral_paged")]
pub struct Sequence {
    inner: OwnProcess<Inner>,
}

struct Inner {
    engine: Engine,
    model: String,
    state: Arc<Mutex<State>>,
}

struct State {
    sequence: engine::Sequence,
    is_generating: bool,
    is_released: bool,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps others from going on from a sequence until the one that does has ended.
pub struct Generating {
    state: Arc<Mutex<State>>,
}

impl Generating {
    /// What the sequence has come to.
    pub fn set(&self, sequence: engine::Sequence) {
        let mut state = lock(&self.state);
        if !state.is_released {
            state.sequence = sequence;
        }
    }
}

impl Drop for Generating {
    fn drop(&mut self) {
        lock(&self.state).is_generating = false;
    }
}

impl Sequence {
    /// Of a model's engine.
    pub fn new(engine: &Engine, model: &str, sequence: engine::Sequence) -> Self {
        let state = State { sequence, is_generating: false, is_released: false };
        Self {
            inner: OwnProcess::new(Inner { engine: engine.clone(), model: model.to_owned(), state: Arc::new(Mutex::new(state)) }),
        }
    }

    /// The sequence as it is, unless it was released.
    fn current(&self) -> PyResult<engine::Sequence> {
        let state = lock(&self.inner.get()?.state);
        if state.is_released { Err(released()) } else { Ok(state.sequence.clone()) }
    }
}

fn released() -> PyErr {
    invalid("the sequence was released; fork or keep it before, or send its `tokens` as the prompt of a completion")
}

fn check_n(n: &Bound<'_, PyAny>) -> PyResult<usize> {
    within("n", &n.extract()?, 1, engine::MAX_CHOICES)
}

/// What comes behind a sequence: text, token ids, messages, or nothing.
fn continuation(then: Option<&Bound<'_, PyAny>>) -> PyResult<Continuation> {
    let Some(then) = then else { return Ok(Continuation::TokenIds(Vec::new())) };
    if then.is_instance_of::<PyString>() {
        return named("then", then).map(|Text(text)| Continuation::Text(text));
    }
    let refused = || PyTypeError::new_err("`then` must be a str, token ids (integers) or messages (dicts)");
    if then.is_instance_of::<PyBytes>() || then.is_instance_of::<PyDict>() {
        return Err(refused());
    }
    // What is iterated over once may not be there a second time.
    let items = then.try_iter().map_err(|_| refused())?.collect::<PyResult<Vec<_>>>()?;
    let items = PyList::new(then.py(), items)?.into_any();
    if items.get_item(0).is_ok_and(|first| first.hasattr("keys").unwrap_or(false)) {
        return messages::parse(&items).map(Continuation::Messages);
    }
    let ids = token_ids("then", &items);
    ids.map(Continuation::TokenIds)
        .map_err(|error| if error.is_instance_of::<PyTypeError>(then.py()) { refused() } else { error })
}

#[pymethods]
impl Sequence {
    /// Ids of prompt and answer, the token that ended it included.
    #[getter]
    fn tokens(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        let inner = self.inner.get()?;
        enter(py, || Ok(lock(&inner.state).sequence.token_ids().to_vec()))
    }

    /// How many of the tokens are the prompt.
    #[getter]
    fn num_prompt_tokens(&self) -> PyResult<usize> {
        Ok(lock(&self.inner.get()?.state).sequence.num_prompt_tokens())
    }

    /// Text of all that came behind the prompt, without special tokens.
    #[getter]
    fn text(&self, py: Python<'_>) -> PyResult<String> {
        let inner = self.inner.get()?;
        enter(py, || Ok(lock(&inner.state).sequence.text()))
    }

    /// `n` sequences that go on from here, each for itself; they share all blocks.
    #[pyo3(signature = (n=1))]
    fn fork(&self, #[pyo3(from_py_with = check_n)] n: usize) -> PyResult<Vec<Self>> {
        let sequence = self.current()?;
        let Inner { engine, model, .. } = self.inner.get()?;
        Ok((0..n).map(|_| Self::new(engine, model, sequence.clone())).collect())
    }

    /// Goes on from here: a `CompletionResponse`, or with `stream=True` an iterator of chunks. `then` comes first: text
    /// (tokenized without special tokens), token ids, or messages, if the sequence began as a chat; what it came to so far is
    /// then the assistant's. The other arguments are those of a `CompletionRequest`. The sequence becomes what the answer came
    /// to: at the end, or, streamed, with the last chunk; not at all if the stream is closed before.
    #[pyo3(signature = (
        then=None, *, max_tokens=None, temperature=None, top_p=None, top_k=None, min_p=None, presence_penalty=None,
        frequency_penalty=None, repetition_penalty=None, logit_bias=None, logprobs=None, stop_seqs=None, ignore_eos=false, seed=None,
        stream=false, priority=0, deadline=None, tenant=None
    ))]
    #[allow(clippy::too_many_arguments, clippy::needless_pass_by_value, reason = "the arguments of a request")]
    fn generate<'py>(
        &self,
        py: Python<'py>,
        then: Option<&Bound<'py, PyAny>>,
        max_tokens: Option<Integer>,
        temperature: Option<Real>,
        top_p: Option<Real>,
        top_k: Option<Integer>,
        min_p: Option<Real>,
        presence_penalty: Option<Real>,
        frequency_penalty: Option<Real>,
        repetition_penalty: Option<Real>,
        logit_bias: Option<BTreeMap<Integer, Real>>,
        logprobs: Option<Integer>,
        #[pyo3(from_py_with = text::stop_seqs)] stop_seqs: Option<OneOrMany>,
        ignore_eos: bool,
        seed: Option<Integer>,
        stream: bool,
        #[pyo3(from_py_with = check_priority)] priority: i32,
        deadline: Option<Real>,
        tenant: Option<Bound<'py, PyString>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let sampling = SamplingFields {
            temperature,
            top_p,
            top_k,
            min_p,
            presence_penalty,
            frequency_penalty,
            repetition_penalty,
            dry: DryFields { multiplier: None, base: None, allowed_length: None, sequence_breakers: None },
            logit_bias,
            logprobs: at_least_if_given("logprobs", logprobs.as_ref(), 0)?,
            stop_seqs,
            max_tokens,
            grammar: None,
            grammar_type: None,
            ignore_eos,
            seed,
        };
        // Its salt, and what of it is everybody's, a sequence has from its beginning.
        let service = ServiceFields { priority, deadline, tenant, cache_salt: None, public_prefix: 0, keep: true };
        let (sampling, service, then) = (sampling.check()?, service.check()?, continuation(then)?);
        let (sequence, generating) = self.begin()?;
        let wants_logprobs = sampling.logprobs.is_some();
        let mut request = GenerationRequest::new(Prompt::Sequence { sequence, then }, sampling);
        request.service = service;
        request.stream = stream;
        let Inner { engine, model, .. } = self.inner.get()?;
        let envelope = Envelope::new(model);
        if stream {
            let submitter = engine.clone();
            let stream = enter_long(py, request.prompt.text_bytes(), move || submitter.submit(request))?;
            let streamer =
                ChatCompletionStreamer::new(stream, 1, wants_logprobs, envelope, engine.clone()).generating(generating);
            return Ok(Bound::new(py, streamer)?.into_any());
        }
        let mut completion = complete(py, engine, request)?;
        for choice in &mut completion.choices {
            choice.sequence.take().into_iter().for_each(|sequence| generating.set(sequence));
        }
        Ok(response::completion(py, envelope, completion, engine)?.into_bound(py).into_any())
    }

    /// Gives the blocks back. `tokens` and `text` can still be read; nothing can go on from here any more.
    fn release(&self) -> PyResult<()> {
        let mut state = lock(&self.inner.get()?.state);
        state.is_released = true;
        state.sequence.release();
        Ok(())
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.release()
    }

    fn __copy__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __deepcopy__(slf: Py<Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        slf
    }

    #[allow(clippy::unused_self, reason = "a method of the class")]
    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err(
            "a Sequence lives in its runner and cannot be pickled; send its `tokens`, as the prompt of a completion",
        ))
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(lock(&self.inner.get()?.state).sequence.token_ids().len())
    }

    fn __repr__(&self) -> PyResult<String> {
        let state = lock(&self.inner.get()?.state);
        Ok(format!(
            "Sequence(tokens={}, released={})",
            state.sequence.token_ids().len(),
            if state.is_released { "True" } else { "False" }
        ))
    }
}

impl Sequence {
    /// The sequence to go on from, and the right to do so.
    fn begin(&self) -> PyResult<(engine::Sequence, Generating)> {
        let inner = self.inner.get()?;
        let mut state = lock(&inner.state);
        if state.is_released {
            return Err(released());
        }
        if state.is_generating {
            return Err(invalid(
                "the sequence is being gone on from already; wait for that, close its stream, or go on from a fork",
            ));
        }
        state.is_generating = true;
        Ok((state.sequence.clone(), Generating { state: Arc::clone(&inner.state) }))
    }
}

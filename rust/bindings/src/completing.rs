//! Waits for complete answers.

use std::{task::Poll, time::Instant};

use engine::{
    Completion, EmbeddingInput, EmbeddingRequest, Engine, EngineError, GenerationRequest, RequestStream, RerankRequest,
    embedding::shorten,
};
use pyo3::prelude::*;

use crate::{
    detach::{POLL, enter_long, wait},
    exceptions::raise,
};

/// Submits a request for each input and waits for the vectors. Leaving early cancels.
pub fn embed(py: Python<'_>, engine: &Engine, request: EmbeddingRequest) -> PyResult<Vec<Vec<f32>>> {
    let dimensions = request.dimensions;
    let num_bytes = request.inputs.iter().map(EmbeddingInput::text_bytes).sum();
    vectors(py, engine, (num_bytes, dimensions), move |engine| engine.embedding_requests(request))
}

/// Submits a request for each document and waits for the scores. Leaving early cancels.
pub fn rerank(py: Python<'_>, engine: &Engine, request: RerankRequest) -> PyResult<Vec<f32>> {
    let num_bytes = request.text_bytes();
    let scores = vectors(py, engine, (num_bytes, None), move |engine| engine.rerank_requests(request))?;
    Ok(scores.into_iter().flatten().collect())
}

/// Submits all that `made` makes of so many bytes of text; each vector is cut to the dimensions.
fn vectors(
    py: Python<'_>,
    engine: &Engine,
    (num_bytes, dimensions): (usize, Option<usize>),
    made: impl FnOnce(&Engine) -> Result<Vec<GenerationRequest>, EngineError> + Send + 'static,
) -> PyResult<Vec<Vec<f32>>> {
    let engine = engine.clone();
    let streams = enter_long(py, num_bytes, move || {
        made(&engine)?.into_iter().map(|request| engine.submit(request)).collect::<Result<Vec<_>, _>>()
    })?;
    streams.into_iter().map(|stream| vector(finish(py, stream)?, dimensions)).collect()
}

/// The vector that a request has ended with.
pub fn vector(mut completion: Completion, dimensions: Option<usize>) -> PyResult<Vec<f32>> {
    let ended = |why: String| Err(raise(EngineError::Internal(why)));
    let Some(choice) = completion.choices.first_mut() else { return ended("a request ended without an answer".into()) };
    let Some(mut vector) = choice.vector.take() else {
        let why = choice.error.take().unwrap_or_else(|| choice.finish_reason.as_str().to_owned());
        return ended(format!("the request ended before its embedding was made: {why}"));
    };
    shorten(&mut vector, dimensions);
    Ok(vector)
}

/// Submits and waits for the complete answer. Leaving early, for instance on Ctrl-C, drops the stream, which cancels.
pub fn complete(py: Python<'_>, engine: &Engine, request: GenerationRequest) -> PyResult<Completion> {
    let engine = engine.clone();
    let stream = enter_long(py, request.prompt.text_bytes(), move || engine.submit(request))?;
    finish(py, stream)
}

fn finish(py: Python<'_>, stream: RequestStream) -> PyResult<Completion> {
    let mut collector = stream.collector();
    wait(py, move || {
        let deadline = Instant::now() + POLL;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(Poll::Pending);
            }
            if let Some(event) = stream.next_timeout(left)?
                && let Some(completion) = collector.push(event)
            {
                return Ok(Poll::Ready(completion));
            }
        }
    })
}

//! Waits for complete answers.

use std::{task::Poll, time::Instant};

use engine::{Completion, Engine, GenerationRequest};
use pyo3::prelude::*;

use crate::detach::{POLL, enter_long, wait};

/// Submits and waits for the complete answer. Leaving early, for instance on Ctrl-C, drops the stream, which cancels.
pub fn complete(py: Python<'_>, engine: &Engine, request: GenerationRequest) -> PyResult<Completion> {
    let engine = engine.clone();
    let stream = enter_long(py, request.prompt.text_bytes(), move || engine.submit(request))?;
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

//! Waits for complete answers.

use std::{task::Poll, time::Instant};

use engine::{Completion, Engine, GenerationRequest};
use pyo3::prelude::*;

use crate::detach::{POLL, enter, wait};

/// Submits and waits for the complete answer. Leaving early, for instance on Ctrl-C, drops the stream, which cancels.
pub fn complete(py: Python<'_>, engine: &Engine, request: GenerationRequest) -> PyResult<Completion> {
    let stream = enter(py, || engine.submit(request))?;
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

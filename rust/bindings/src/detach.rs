//! The one way from a Python thread into the engine: detaches from the interpreter, lets Ctrl-C through, maps errors and panics,
//! and logs what the engine warns of.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    task::Poll,
    time::Duration,
};

use engine::EngineError;
use pyo3::prelude::*;

use crate::{
    exceptions::{InternalError, raise},
    warnings,
};

/// How long a waiting thread stays away from the interpreter: the delay of Ctrl-C.
pub const POLL: Duration = Duration::from_millis(50);

/// Runs `work` without holding the interpreter. A panic becomes an `InternalError`.
pub fn enter<T: Send>(py: Python<'_>, work: impl FnOnce() -> Result<T, EngineError> + Send) -> PyResult<T> {
    let result = py.detach(|| catch_unwind(AssertUnwindSafe(work)));
    warnings::flush(py);
    match result {
        Ok(result) => result.map_err(raise),
        Err(panic) => Err(panic_error(panic.as_ref())),
    }
}

/// Polls until it is ready. Each `poll` waits [`POLL`] at most; between them signals are handled, so that Ctrl-C interrupts.
pub fn wait<T: Send>(py: Python<'_>, mut poll: impl FnMut() -> Result<Poll<T>, EngineError> + Send) -> PyResult<T> {
    loop {
        if let Poll::Ready(value) = enter(py, &mut poll)? {
            return Ok(value);
        }
        py.check_signals()?;
    }
}

fn panic_error(panic: &(dyn Any + Send)) -> PyErr {
    let message = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned());
    InternalError::new_err(format!("the engine panicked, which is a defect; please report it: {message}"))
}

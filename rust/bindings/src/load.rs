//! Loads a model, or quantizes one, on a thread of its own, so that Ctrl-C and a progress callback work meanwhile.

use std::{
    sync::{Mutex, PoisonError, mpsc},
    task::Poll,
    thread,
};

use engine::{Engine, EngineConfig, EngineError, LoadProgress, ModelSource};
use pyo3::prelude::*;

use crate::detach::{Inside, POLL, enter, wait};

/// Loads the model; `progress` is called with the bytes of weights done and in all.
pub fn load(py: Python<'_>, source: ModelSource, config: EngineConfig, progress: Option<&Bound<'_, PyAny>>) -> PyResult<Engine> {
    with_progress(py, "mistral_paged-load", progress, move |step| Engine::load(&source, &config, step))
}

/// Work on a thread of its own; `progress` is called with the bytes done and in all.
pub fn with_progress<T: Send + 'static>(
    py: Python<'_>,
    thread_name: &str,
    progress: Option<&Bound<'_, PyAny>>,
    work: impl FnOnce(&dyn Fn(LoadProgress)) -> Result<T, EngineError> + Send + 'static,
) -> PyResult<T> {
    // While `progress` runs as well.
    let _inside = Inside::new()?;
    let (sender, receiver) = mpsc::channel();
    let worker =
        thread::Builder::new().name(thread_name.to_owned()).spawn(move || work(&|step| sender.send(step).unwrap_or_default()))?;
    let receiver = Mutex::new(receiver);
    while let Some(step) = wait(py, || Ok(poll(&receiver)))? {
        if let Some(progress) = progress {
            progress.call1((step.done_bytes, step.total_bytes))?;
        }
    }
    enter(py, || worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
}

/// The next step; `None` when loading has ended.
fn poll(steps: &Mutex<mpsc::Receiver<LoadProgress>>) -> Poll<Option<LoadProgress>> {
    match steps.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(POLL) {
        Ok(step) => Poll::Ready(Some(step)),
        Err(mpsc::RecvTimeoutError::Timeout) => Poll::Pending,
        Err(mpsc::RecvTimeoutError::Disconnected) => Poll::Ready(None),
    }
}

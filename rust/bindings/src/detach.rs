//! The one way from a Python thread into the engine: detaches from the interpreter, lets Ctrl-C through, maps errors and panics,
//! and logs what the engine warns of.
//!
//! When the interpreter ends, it kills daemon threads as they come back to it, and a thread that is killed within Rust aborts the
//! process. So nobody is let in from then on, and the interpreter's end waits for those who are inside.

use std::{
    any::Any,
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    task::Poll,
    thread,
    time::{Duration, Instant},
};

use engine::EngineError;
use pyo3::{exceptions::PySystemExit, prelude::*, types::IntoPyDict};

use crate::{
    exceptions::{InternalError, raise},
    warnings,
};

/// How long a waiting thread stays away from the interpreter: the delay of Ctrl-C.
pub const POLL: Duration = Duration::from_millis(50);

/// Bytes of text from which tokenizing may take longer than a user waits for Ctrl-C.
const LONG_TEXT: usize = 1 << 18;
/// The interpreter's end waits so long for threads that are inside. Whoever waits leaves within [`POLL`].
const LAST_WAIT: Duration = Duration::from_secs(10);

/// Threads inside.
static INSIDE: AtomicUsize = AtomicUsize::new(0);
/// The interpreter is ending.
static IS_ENDING: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// The thread that ends the interpreter, which does not kill it.
    static ENDS_IT: Cell<bool> = const { Cell::new(false) };
}

/// A thread is inside, and must come out before the interpreter ends.
pub struct Inside(());

impl Inside {
    /// `None` when the interpreter is ending.
    pub fn try_new() -> Option<Self> {
        INSIDE.fetch_add(1, Ordering::SeqCst);
        let inside = Self(());
        (!IS_ENDING.load(Ordering::SeqCst) || ENDS_IT.get()).then_some(inside)
    }

    /// A `SystemExit`, which ends a thread without a word, when the interpreter is ending.
    pub fn new() -> PyResult<Self> {
        Self::try_new().ok_or_else(|| PySystemExit::new_err("the interpreter is ending"))
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Sends every thread away, and returns when none is inside. The interpreter calls it as it ends, before it kills any.
#[pyfunction]
fn close(py: Python<'_>) {
    ENDS_IT.set(true);
    IS_ENDING.store(true, Ordering::SeqCst);
    let started = Instant::now();
    py.detach(|| {
        while INSIDE.load(Ordering::SeqCst) > 0 && started.elapsed() < LAST_WAIT {
            thread::sleep(Duration::from_millis(1));
        }
    });
}

/// In a forked child: the threads that were inside are not here.
#[pyfunction]
fn forget_threads() {
    INSIDE.store(0, Ordering::SeqCst);
}

/// Has the interpreter call [`close`] as it ends.
pub fn close_at_exit(py: Python<'_>) -> PyResult<()> {
    py.import("atexit")?.call_method1("register", (wrap_pyfunction!(close, py)?,))?;
    let after_fork = [("after_in_child", wrap_pyfunction!(forget_threads, py)?)].into_py_dict(py)?;
    py.import("os")?.call_method("register_at_fork", (), Some(&after_fork))?;
    Ok(())
}

/// As [`enter`], for work on so many bytes of text. With many it is on a thread of its own, and Ctrl-C leaves it there: it ends
/// by itself, and what it gives is dropped.
pub fn enter_long<T: Send + 'static>(
    py: Python<'_>,
    num_bytes: usize,
    work: impl FnOnce() -> Result<T, EngineError> + Send + 'static,
) -> PyResult<T> {
    if num_bytes < LONG_TEXT {
        return enter(py, work);
    }
    let (sender, receiver) = mpsc::channel();
    thread::Builder::new()
        .name("mistral_paged-text".to_owned())
        .spawn(move || sender.send(catch_unwind(AssertUnwindSafe(work))).unwrap_or_default())?;
    let receiver = Mutex::new(receiver);
    let result = wait(py, || match receiver.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(POLL) {
        Ok(result) => Ok(Poll::Ready(result)),
        Err(mpsc::RecvTimeoutError::Timeout) => Ok(Poll::Pending),
        Err(mpsc::RecvTimeoutError::Disconnected) => Err(EngineError::Internal("the thread that tokenized has ended".into())),
    })?;
    result.map_or_else(|panic| Err(panic_error(panic.as_ref())), |result| result.map_err(raise))
}

/// Runs `work` without holding the interpreter. A panic becomes an `InternalError`.
pub fn enter<T: Send>(py: Python<'_>, work: impl FnOnce() -> Result<T, EngineError> + Send) -> PyResult<T> {
    let _inside = Inside::new()?;
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

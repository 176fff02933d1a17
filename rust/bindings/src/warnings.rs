//! Warnings and errors of the engine's threads, for the Python logger.
//!
//! Those threads must not wait for the interpreter, which a thread that waits for them may hold: they leave their warnings in a
//! channel, and whichever Python thread comes out of the engine next logs them.

use std::{
    fmt::Debug,
    sync::{
        Mutex, TryLockError,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
};

use pyo3::prelude::*;
use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
    span,
};

use crate::logger::log;

/// Warnings that nobody has logged yet; more are dropped.
const MAX_PENDING: usize = 1024;

/// The logger's method, and the line.
type Line = (&'static str, String);

static PENDING: Mutex<Option<Receiver<Line>>> = Mutex::new(None);

/// Collects the warnings of this module from now on.
pub fn collect() {
    let (sender, receiver) = sync_channel(MAX_PENDING);
    if tracing::subscriber::set_global_default(Collector(sender)).is_ok() {
        *PENDING.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(receiver);
    }
}

/// Logs what was collected.
pub fn flush(py: Python<'_>) {
    for (level, line) in take() {
        if let Err(error) = log(py, level, &line) {
            error.write_unraisable(py, None);
        }
    }
}

/// What was collected; nothing while another thread takes it.
fn take() -> Vec<Line> {
    let pending = match PENDING.try_lock() {
        Ok(pending) => pending,
        Err(TryLockError::Poisoned(pending)) => pending.into_inner(),
        Err(TryLockError::WouldBlock) => return Vec::new(),
    };
    pending.as_ref().map_or_else(Vec::new, |receiver| receiver.try_iter().collect())
}

struct Collector(SyncSender<Line>);

impl Subscriber for Collector {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= Level::WARN
    }

    fn event(&self, event: &Event<'_>) {
        let mut message = Message(String::new());
        event.record(&mut message);
        // A full channel is not worth waiting for.
        let level = if *event.metadata().level() == Level::ERROR { "error" } else { "warning" };
        let _ = self.0.try_send((level, message.0));
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// The text of an event.
struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}

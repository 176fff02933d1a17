//! Where the events of a request go.

use std::{
    ops::ControlFlow,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::Sender,
    },
    thread,
};

use crate::{EngineError, OutputEvent, error::caught};

/// A part of an answer, or why no more of it will come.
pub type Event = Result<OutputEvent, EngineError>;

/// Takes the events of one request. The last one is [`OutputEvent::Done`] or an error, unless the request was cancelled.
///
/// Once a step, each request that has something new hands it over ([`Self::take`]); when all have, each of them flushes. Sinks
/// that share a reader thus wake it once a step: the first flush does, and the reader finds the events of all.
///
/// Both are called on the engine's thread, which computes nothing meanwhile: they must not wait, for a reader or for an
/// interpreter. A sink that panics ends its own request and no other.
pub trait EventSink: Send {
    /// Takes the events since the last call, in their order; what is left in `events` is dropped. [`ControlFlow::Break`] cancels
    /// the request: nobody reads its events any more.
    fn take(&mut self, events: &mut Vec<Event>) -> ControlFlow<()>;

    /// Every request has handed over what it came to in this step.
    fn flush(&mut self) {}
}

/// Sends each event to a thread of its own; that thread sees for itself when to wait.
impl EventSink for Sender<Event> {
    fn take(&mut self, events: &mut Vec<Event>) -> ControlFlow<()> {
        for event in events.drain(..) {
            if self.send(event).is_err() {
                return ControlFlow::Break(());
            }
        }
        ControlFlow::Continue(())
    }
}

/// The engine's end of a sink: keeps the events of a step until they are handed over, and the sink's panics to itself.
pub(crate) struct Outbox {
    /// There until the drop. Never locked: threads that sample share the request, and none of them calls its sink.
    sink: Option<Mutex<Box<dyn EventSink>>>,
    events: Vec<Event>,
    /// Set by the caller, or here when nobody reads.
    cancel: Arc<AtomicBool>,
    state: State,
    /// The last event was pushed.
    is_complete: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing new since the last flush.
    Idle,
    /// Handed over, not flushed.
    HandedOver,
    /// The sink failed, and is not called again.
    Failed,
}

impl Outbox {
    /// In front of a sink; `cancel` is set by whoever submitted the request.
    pub fn new(sink: Box<dyn EventSink>, cancel: Arc<AtomicBool>) -> Self {
        Self { sink: Some(Mutex::new(sink)), events: Vec::new(), cancel, state: State::Idle, is_complete: false }
    }

    /// Whether the request is to end because nobody reads its events.
    pub fn is_cancelled(&self) -> bool {
        self.cancel.load(Ordering::Relaxed)
    }

    /// Keeps an event until [`Self::hand_over`].
    pub fn push(&mut self, event: Event) {
        self.is_complete |= matches!(event, Ok(OutputEvent::Done(_)) | Err(_));
        self.events.push(event);
    }

    /// Hands over what is new.
    pub fn hand_over(&mut self) {
        if self.events.is_empty() {
            return;
        }
        let mut events = std::mem::take(&mut self.events);
        match self.call(|sink| sink.take(&mut events)) {
            Some(ControlFlow::Continue(())) => self.state = State::HandedOver,
            Some(ControlFlow::Break(())) => self.fail(),
            None => {}
        }
        events.clear();
        self.events = events;
    }

    /// Flushes the sink if something was handed over.
    pub fn flush(&mut self) {
        if self.state != State::HandedOver {
            return;
        }
        self.state = State::Idle;
        self.call(|sink| sink.flush());
    }

    /// Calls the sink, unless it has failed; one that panics has.
    fn call<T>(&mut self, work: impl FnOnce(&mut dyn EventSink) -> T) -> Option<T> {
        if self.state == State::Failed {
            return None;
        }
        let sink = self.sink.as_mut()?.get_mut().unwrap_or_else(PoisonError::into_inner);
        match caught(|| work(&mut **sink)) {
            Ok(value) => Some(value),
            Err(why) => {
                tracing::error!("a request is cancelled, for its reader panicked: {why}");
                self.fail();
                None
            }
        }
    }

    fn fail(&mut self) {
        self.state = State::Failed;
        self.cancel.store(true, Ordering::Relaxed);
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        if !self.is_complete && !self.is_cancelled() {
            let what =
                if thread::panicking() { "a defect ended the request" } else { "the engine stopped before the request ended" };
            self.push(Err(EngineError::Internal(what.into())));
            self.hand_over();
            self.flush();
        }
        let sink = self.sink.take();
        let _ = caught(|| drop(sink));
    }
}

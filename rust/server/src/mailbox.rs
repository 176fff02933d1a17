//! Events from the engine's thread to tokio's: one wake-up a step, however many requests have something new.

use std::{
    mem,
    ops::ControlFlow,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use engine::{Event, EventSink};
use tokio::sync::Notify;

/// A reader that has not come for so long is gone, and its request is cancelled.
const STUCK: Duration = Duration::from_secs(30);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Wakes the readers of all mailboxes that have news, once a step.
#[derive(Debug, Default)]
pub struct Bell {
    wakers: Mutex<Vec<Waker>>,
    is_new: AtomicBool,
    rung: Notify,
}

impl Bell {
    /// Wakes readers for ever; runs on their own thread, where that is cheap.
    pub async fn run(self: Arc<Self>) {
        loop {
            self.rung.notified().await;
            mem::take(&mut *lock(&self.wakers)).into_iter().for_each(Waker::wake);
        }
    }
}

#[derive(Default)]
struct Letters {
    events: Vec<(usize, Event)>,
    reader: Option<Waker>,
    /// When the oldest of them came.
    since: Option<Instant>,
}

/// Events of one answer, which may be of several requests.
pub struct Mailbox {
    letters: Arc<Mutex<Letters>>,
    bell: Arc<Bell>,
}

impl Mailbox {
    /// An empty one.
    pub fn new(bell: &Arc<Bell>) -> Self {
        Self { letters: Arc::default(), bell: Arc::clone(bell) }
    }

    /// Where the engine puts the events of a request; they come with its number.
    pub fn sink(&self, number: usize) -> Box<dyn EventSink> {
        Box::new(Sink { number, letters: Arc::clone(&self.letters), bell: Arc::clone(&self.bell) })
    }

    /// The events since the last call, in order, each with the number of its request; at least one.
    pub fn poll(&self, context: &mut Context<'_>) -> Poll<Vec<(usize, Event)>> {
        let mut letters = lock(&self.letters);
        if letters.events.is_empty() {
            letters.reader = Some(context.waker().clone());
            return Poll::Pending;
        }
        letters.since = None;
        Poll::Ready(mem::take(&mut letters.events))
    }
}

/// The engine's end of a mailbox.
struct Sink {
    number: usize,
    letters: Arc<Mutex<Letters>>,
    bell: Arc<Bell>,
}

impl EventSink for Sink {
    fn take(&mut self, events: &mut Vec<Event>) -> ControlFlow<()> {
        let mut letters = lock(&self.letters);
        let since = *letters.since.get_or_insert_with(Instant::now);
        if letters.reader.is_none() && since.elapsed() > STUCK {
            return ControlFlow::Break(());
        }
        letters.events.extend(events.drain(..).map(|event| (self.number, event)));
        if let Some(reader) = letters.reader.take() {
            lock(&self.bell.wakers).push(reader);
            self.bell.is_new.store(true, Ordering::Release);
        }
        ControlFlow::Continue(())
    }

    fn flush(&mut self) {
        if self.bell.is_new.swap(false, Ordering::AcqRel) {
            self.bell.rung.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use engine::OutputEvent;

    use super::*;

    struct Count(AtomicUsize);

    impl std::task::Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn delta(index: usize) -> OutputEvent {
        OutputEvent::empty_delta(index, 0)
    }

    #[test]
    fn events_come_in_order_and_a_waiting_reader_is_woken_once_a_step() {
        let bell = Arc::new(Bell::default());
        let mailbox = Mailbox::new(&bell);
        let (mut first, mut second) = (mailbox.sink(0), mailbox.sink(1));
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let waker = Waker::from(Arc::clone(&count));
        let mut context = Context::from_waker(&waker);
        assert!(mailbox.poll(&mut context).is_pending());
        assert!(first.take(&mut vec![Ok(delta(3))]).is_continue());
        assert!(second.take(&mut vec![Ok(delta(4)), Ok(delta(5))]).is_continue());
        assert_eq!(lock(&bell.wakers).len(), 1);
        let Poll::Ready(events) = mailbox.poll(&mut context) else { panic!("no events") };
        let indices = events.into_iter().map(|(number, event)| match event {
            Ok(OutputEvent::Delta { index, .. }) => (number, index),
            _ => panic!("another event"),
        });
        assert_eq!(indices.collect::<Vec<_>>(), [(0, 3), (1, 4), (1, 5)]);
        assert!(mailbox.poll(&mut context).is_pending());
    }

    #[test]
    fn a_reader_that_does_not_come_ends_its_request() {
        let mailbox = Mailbox::new(&Arc::default());
        let mut sink = mailbox.sink(0);
        assert!(sink.take(&mut vec![Ok(delta(0))]).is_continue());
        lock(&mailbox.letters).since = Instant::now().checked_sub(STUCK * 2);
        assert!(sink.take(&mut vec![Ok(delta(0))]).is_break());
    }
}

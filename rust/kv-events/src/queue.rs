//! A bounded queue between two threads, of which neither waits for room.

use std::{
    collections::VecDeque,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

struct State<T> {
    items: VecDeque<(T, usize)>,
    bytes: usize,
    /// The last item that was taken is being worked on.
    is_busy: bool,
    closed: bool,
}

/// First in, first out.
pub struct Queue<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
    max_items: usize,
    max_bytes: usize,
}

impl<T> Queue<T> {
    /// Takes `max_items` at most, of `max_bytes` in all; one that is larger than that is taken when there is no other.
    pub fn new(max_items: usize, max_bytes: usize) -> Self {
        let state = Mutex::new(State { items: VecDeque::new(), bytes: 0, is_busy: false, closed: false });
        Self { state, changed: Condvar::new(), max_items, max_bytes }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether at most half of what fits is there.
    pub fn is_half_empty(&self) -> bool {
        let state = self.lock();
        state.items.len() <= self.max_items / 2 && state.bytes <= self.max_bytes / 2
    }

    /// Adds an item of so many bytes, at once; false, and it is gone, where there is no room, or nobody to take it.
    pub fn push(&self, item: T, bytes: usize) -> bool {
        let mut state = self.lock();
        let has_room = state.items.len() < self.max_items && state.bytes.saturating_add(bytes) <= self.max_bytes;
        if state.closed || !(has_room || state.items.is_empty()) {
            return false;
        }
        state.items.push_back((item, bytes));
        state.bytes += bytes;
        drop(state);
        self.changed.notify_all();
        true
    }

    /// The next item; waits for it. `None` once the queue is closed and empty. Who asks is done with the one before.
    pub fn pop(&self) -> Option<T> {
        let waiting = |state: &mut State<T>| state.items.is_empty() && !state.closed;
        let mut state = self.lock();
        state.is_busy = false;
        self.changed.notify_all();
        let mut state = self.changed.wait_while(state, waiting).unwrap_or_else(PoisonError::into_inner);
        let (item, bytes) = state.items.pop_front()?;
        state.bytes -= bytes;
        state.is_busy = true;
        drop(state);
        self.changed.notify_all();
        Some(item)
    }

    /// Takes no more items.
    pub fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// Waits until it is empty and whoever takes items is done with the last of them, or nobody takes any, or this long.
    pub fn wait_until_done(&self, at_most: Duration) {
        let is_on = |state: &mut State<T>| !state.closed && (state.is_busy || !state.items.is_empty());
        let waited = self.changed.wait_timeout_while(self.lock(), at_most, is_on);
        drop(waited);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_done_when_the_last_item_was_worked_on() {
        let queue = Queue::new(2, 10);
        let wait = |millis| {
            let began = std::time::Instant::now();
            queue.wait_until_done(Duration::from_millis(millis));
            began.elapsed() >= Duration::from_millis(millis)
        };
        assert!(!wait(10_000), "nothing is there");
        queue.push('a', 1);
        assert!(wait(1));
        assert_eq!(queue.pop(), Some('a'));
        assert!(wait(1), "taken, and not done");
        std::thread::scope(|scope| {
            scope.spawn(|| queue.pop());
            assert!(!wait(10_000));
            queue.close();
        });
        assert!(!wait(10_000), "nobody takes any");
    }

    #[test]
    fn what_does_not_fit_is_refused_at_once_and_what_is_too_large_goes_alone() {
        let queue = Queue::new(2, 10);
        assert!(queue.push('a', 100), "larger than all, and alone");
        assert!(!queue.push('b', 1));
        assert_eq!(queue.pop(), Some('a'));
        assert!(queue.push('c', 4) && queue.is_half_empty() && queue.push('d', 4) && !queue.is_half_empty());
        assert!(!queue.push('e', 0), "two are there");
        queue.close();
        assert!(!queue.push('f', 0));
        assert_eq!([queue.pop(), queue.pop(), queue.pop()], [Some('c'), Some('d'), None]);
    }
}

//! Who may ask something of the stream of the steps. What is asked of it while a step is being recorded becomes part of the
//! recording, so other threads, which load adapters or give their memory back, wait meanwhile.

use std::{
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, ThreadId},
};

/// One records, or any number ask.
#[derive(Default)]
pub struct Turns {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    recorder: Option<ThreadId>,
    num_asking: usize,
    num_waiting: usize,
}

/// No other thread begins to record as long as this lives.
pub struct Asking<'a>(&'a Turns);

impl Turns {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_while(&self, is_busy: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        while is_busy(&state) {
            state.num_waiting += 1;
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.num_waiting -= 1;
        }
        state
    }

    /// Changes what others wait for. To wake nobody would be a system call too, and every launch would make it.
    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        change(&mut state);
        if state.num_waiting > 0 {
            self.changed.notify_all();
        }
    }

    /// Waits until no other thread records.
    pub fn ask(&self) -> Asking<'_> {
        let own = thread::current().id();
        self.wait_while(|state| state.recorder.is_some_and(|recorder| recorder != own)).num_asking += 1;
        Asking(self)
    }

    /// Waits until nobody asks, and has other threads wait until [`Self::end_recording`].
    pub fn begin_recording(&self) {
        let mut state = self.wait_while(|state| state.recorder.is_some() || state.num_asking > 0);
        state.recorder = Some(thread::current().id());
    }

    /// See [`Self::begin_recording`].
    pub fn end_recording(&self) {
        self.change(|state| state.recorder = None);
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.change(|state| state.num_asking -= 1);
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicBool, Ordering},
        thread,
        time::Duration,
    };

    use super::Turns;

    #[test]
    fn others_wait_while_a_thread_records_and_it_waits_for_them() {
        let (turns, is_recording, asked) = (Turns::default(), AtomicBool::new(false), AtomicBool::new(false));
        let asking = turns.ask();
        thread::scope(|scope| {
            scope.spawn(|| {
                turns.begin_recording();
                is_recording.store(true, Ordering::SeqCst);
                // The one who records may ask.
                drop(turns.ask());
                thread::sleep(Duration::from_millis(20));
                assert!(!asked.load(Ordering::SeqCst), "another one asked meanwhile");
                is_recording.store(false, Ordering::SeqCst);
                turns.end_recording();
            });
            thread::sleep(Duration::from_millis(20));
            assert!(!is_recording.load(Ordering::SeqCst), "a recording began while somebody asked");
            drop(asking);
            while !is_recording.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            let _asking = turns.ask();
            assert!(!is_recording.load(Ordering::SeqCst), "somebody asked while another one recorded");
            asked.store(true, Ordering::SeqCst);
        });
    }
}

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
}

/// No other thread begins to record as long as this lives.
pub struct Asking<'a>(&'a Turns);

impl Turns {
    fn wait_while(&self, is_busy: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.changed.wait_while(state, |state| is_busy(state)).unwrap_or_else(PoisonError::into_inner)
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
        self.wait_while(|_| false).recorder = None;
        self.changed.notify_all();
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.wait_while(|_| false).num_asking -= 1;
        self.0.changed.notify_all();
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

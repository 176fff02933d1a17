//! What can be told of the engine's thread without asking it, which waits for a step.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// Written by the engine's thread, after each of its turns.
#[derive(Debug)]
pub struct Heartbeat {
    started: Instant,
    /// Microseconds from `started` to the last turn's end.
    last: AtomicU64,
    /// Mean microseconds of a turn, the last ones counting most.
    mean: AtomicU64,
    is_busy: AtomicBool,
}

/// How an engine's thread does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vitals {
    /// Requests run or wait.
    pub is_busy: bool,
    /// Since the last step ended; while it is busy, how long the current one takes so far.
    pub since_last_step: Duration,
    /// About how long a step takes.
    pub mean_step: Duration,
}

impl Vitals {
    /// Whether steps go on: nothing is to be done, or the last step is younger than 10 s and 20 usual steps.
    pub fn is_alive(&self) -> bool {
        !self.is_busy || self.since_last_step < Duration::from_secs(10).max(20 * self.mean_step)
    }
}

impl Default for Heartbeat {
    fn default() -> Self {
        Self { started: Instant::now(), last: AtomicU64::new(0), mean: AtomicU64::new(0), is_busy: AtomicBool::new(false) }
    }
}

impl Heartbeat {
    fn now(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// A turn begins; after a wait, steps are counted from here.
    pub fn begin(&self) {
        if !self.is_busy.swap(true, Ordering::Relaxed) {
            self.last.store(self.now(), Ordering::Relaxed);
        }
    }

    /// A turn has ended; `is_busy` tells whether another follows at once.
    pub fn end(&self, is_busy: bool) {
        let now = self.now();
        let took = now.saturating_sub(self.last.swap(now, Ordering::Relaxed));
        let mean = self.mean.load(Ordering::Relaxed);
        let next = if mean == 0 { took } else { mean - mean / 8 + took / 8 };
        self.mean.store(next, Ordering::Relaxed);
        self.is_busy.store(is_busy, Ordering::Relaxed);
    }

    /// What it tells now.
    pub fn vitals(&self) -> Vitals {
        let micros = |value: &AtomicU64| value.load(Ordering::Relaxed);
        Vitals {
            is_busy: self.is_busy.load(Ordering::Relaxed),
            since_last_step: Duration::from_micros(self.now().saturating_sub(micros(&self.last))),
            mean_step: Duration::from_micros(micros(&self.mean)),
        }
    }
}

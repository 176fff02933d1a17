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
    /// Steps by their tokens: up to each of [`STEP_TOKENS`], and more.
    steps: [AtomicU64; STEP_TOKENS.len() + 1],
    /// Tokens of all steps.
    step_tokens: AtomicU64,
}

/// Upper ends of the buckets that steps are counted in by their tokens: vLLM's.
pub const STEP_TOKENS: [usize; 13] = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384];

/// How many tokens the steps had so far, of prompts and answers together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTokens {
    /// Steps with so many tokens at most, for each of [`STEP_TOKENS`].
    pub cumulative: [u64; STEP_TOKENS.len()],
    /// All steps.
    pub steps: u64,
    /// Their tokens.
    pub tokens: u64,
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
        Self {
            started: Instant::now(),
            last: AtomicU64::new(0),
            mean: AtomicU64::new(0),
            is_busy: AtomicBool::new(false),
            steps: Default::default(),
            step_tokens: AtomicU64::new(0),
        }
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

    /// A step had so many tokens.
    pub fn count_step(&self, num_tokens: usize) {
        let bucket = STEP_TOKENS.partition_point(|end| *end < num_tokens);
        self.steps[bucket].fetch_add(1, Ordering::Relaxed);
        self.step_tokens.fetch_add(num_tokens as u64, Ordering::Relaxed);
    }

    /// What the steps had so far.
    pub fn step_tokens(&self) -> StepTokens {
        let mut all = StepTokens { tokens: self.step_tokens.load(Ordering::Relaxed), ..StepTokens::default() };
        for (index, count) in self.steps.iter().enumerate() {
            all.steps += count.load(Ordering::Relaxed);
            if let Some(cumulative) = all.cumulative.get_mut(index) {
                *cumulative = all.steps;
            }
        }
        all
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_counted_by_their_tokens() {
        let heartbeat = Heartbeat::default();
        for num_tokens in [1, 8, 9, 16_384, 16_385] {
            heartbeat.count_step(num_tokens);
        }
        let all = heartbeat.step_tokens();
        assert_eq!((all.cumulative[..3].to_vec(), all.cumulative[12]), (vec![1, 2, 3], 4));
        assert_eq!((all.steps, all.tokens), (5, 32_787));
    }
}

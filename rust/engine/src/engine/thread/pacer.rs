//! Prompt chunks small enough that those who are being answered do not wait long.

use std::time::Duration;

/// Fits the tokens of a step to the time that it may take.
#[derive(Debug)]
pub(in crate::engine) struct StepPacer {
    target: Option<Duration>,
    /// Seconds a token of the prompts computed so far.
    estimate: Option<f64>,
}

/// Until a prompt has been timed.
const FIRST_TOKENS: usize = 128;
/// Of an estimate that turns out too high, the part that is kept.
const KEPT: f64 = 0.75;

impl StepPacer {
    /// Aims at steps no longer than `target`; with none, steps are not limited.
    pub(in crate::engine) fn new(target: Option<Duration>) -> Self {
        Self { target, estimate: None }
    }

    /// Most tokens of a step in which a request is being answered.
    pub(super) fn max_tokens(&self) -> Option<usize> {
        let target = self.target?.as_secs_f64();
        Some(self.estimate.map_or(FIRST_TOKENS, |estimate| (target / estimate) as usize))
    }

    /// Takes note of a step. Steps that are mostly answers say little about prompts: they wait for the weights.
    pub(super) fn measure(&mut self, num_tokens: usize, num_rows: usize, took: Duration) {
        if num_tokens < 4 * num_rows || took.is_zero() {
            return;
        }
        let measured = took.as_secs_f64() / num_tokens as f64;
        // Prompts slow down as they get longer, so the slowest token is the one to go by.
        self.estimate =
            Some(self.estimate.map_or(measured, |estimate| {
                if measured > estimate { measured } else { estimate * KEPT + measured * (1.0 - KEPT) }
            }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine on which a token costs 1 ms more for each 1000 tokens before it.
    fn seconds(position: usize, num_tokens: usize) -> Duration {
        Duration::from_secs_f64(num_tokens as f64 * (0.001 + position as f64 * 1e-6))
    }

    #[test]
    fn chunks_of_a_long_prompt_stay_close_to_the_target() {
        let target = Duration::from_millis(200);
        let mut pacer = StepPacer::new(Some(target));
        let mut position = 0;
        while position < 20_000 {
            let chunk = pacer.max_tokens().unwrap();
            assert!(chunk > 0);
            let took = seconds(position, chunk);
            assert!(took < target.mul_f64(1.2), "{took:?} for {chunk} tokens at {position}");
            pacer.measure(chunk, 1, took);
            position += chunk;
        }
        assert!(pacer.max_tokens().unwrap() < 20);
        // The next prompt begins with short steps and comes to longer ones.
        (0..40).for_each(|_| pacer.measure(100, 1, seconds(0, 100)));
        assert!((190..=200).contains(&pacer.max_tokens().unwrap()));
    }

    #[test]
    fn steps_of_answers_do_not_count() {
        let mut pacer = StepPacer::new(Some(Duration::from_millis(100)));
        pacer.measure(64, 64, Duration::from_secs(1));
        assert_eq!(pacer.max_tokens(), Some(FIRST_TOKENS));
    }

    #[test]
    fn without_a_target_there_is_no_limit() {
        let mut pacer = StepPacer::new(None);
        pacer.measure(100, 1, Duration::from_secs(1));
        assert_eq!(pacer.max_tokens(), None);
    }
}

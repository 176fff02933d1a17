//! How fast prompts are computed, and chunks of them small enough that those who are being answered do not wait long.

use std::time::Duration;

/// Fits the prompt tokens of a step to the time that it may take.
#[derive(Debug)]
pub(in crate::engine) struct StepPacer {
    target: Option<Duration>,
    /// Seconds a prompt token of the steps so far, what these spent on answers included.
    estimate: Option<f64>,
}

/// Of the target, what steps are aimed at: they vary by a third where others use the machine too, and what follows them takes its part.
const AIM: f64 = 0.65;
/// Until a prompt has been timed.
const FIRST_TOKENS: usize = 128;
/// How much slower than the last step the next one is expected to be at most.
const MAX_GROWTH: f64 = 1.25;
/// Of an estimate that turns out too high, the part that is kept.
const KEPT: f64 = 0.5;

impl StepPacer {
    /// Aims at steps no longer than `target`; with none, steps are not limited.
    pub(in crate::engine) fn new(target: Option<Duration>) -> Self {
        Self { target, estimate: None }
    }

    /// Most prompt tokens of a step in which a request is being answered.
    pub(super) fn max_prompt_tokens(&self) -> Option<usize> {
        let aim = self.target?.as_secs_f64() * AIM;
        Some(self.estimate.map_or(FIRST_TOKENS, |estimate| (aim / estimate) as usize))
    }

    /// Prompt tokens a second, once a prompt has been timed.
    pub(super) fn prompt_rate(&self) -> Option<f64> {
        self.estimate.map(f64::recip)
    }

    /// Takes note of a step. One whose chunks are much smaller than they might be, such as the last of a prompt, says little unless it was
    /// slow: most of its time is not theirs.
    pub(super) fn measure(&mut self, num_prompt_tokens: usize, took: Duration) {
        let most = self.max_prompt_tokens().unwrap_or(FIRST_TOKENS);
        let is_slow = self.target.is_some_and(|target| took > target.mul_f64(AIM));
        if num_prompt_tokens == 0 || took.is_zero() || (num_prompt_tokens < most / 2 && !is_slow) {
            return;
        }
        let measured = took.as_secs_f64() / num_prompt_tokens as f64;
        // Prompts slow down as they get longer, so the slowest token is the one to go by, and the next one will be slower still.
        self.estimate = Some(self.estimate.map_or(measured, |estimate| {
            if measured > estimate {
                measured * (measured / estimate).min(MAX_GROWTH)
            } else {
                estimate * KEPT + measured * (1.0 - KEPT)
            }
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: usize = 32;
    const TARGET: Duration = Duration::from_millis(200);

    /// A machine on which the answers of a step take 20 ms, and a token 1 ms more for each 1000 tokens before it.
    fn seconds(position: usize, num_tokens: usize) -> Duration {
        Duration::from_secs_f64(0.02 + num_tokens as f64 * (0.001 + position as f64 * 1e-6))
    }

    /// The next chunk as the scheduler cuts it.
    fn chunk(pacer: &StepPacer, left: usize) -> usize {
        pacer.max_prompt_tokens().unwrap().max(BLOCK).min(left)
    }

    #[test]
    fn chunks_of_a_long_prompt_stay_below_the_target() {
        let mut pacer = StepPacer::new(Some(TARGET));
        let mut chunks = Vec::new();
        let mut position = 0;
        while position < 4096 {
            let chunk = chunk(&pacer, 4096 - position);
            let took = seconds(position, chunk);
            assert!(took < TARGET, "{took:?} for {chunk} tokens at {position}");
            pacer.measure(chunk, took);
            position += chunk;
            chunks.push(chunk);
        }
        // They are as long as they may be, less and less as the prompt gets slower.
        assert!(chunks[2] > 80 && chunks[chunks.len() - 2] < 36, "{chunks:?}");
        // The next prompt begins with short steps and comes to longer ones.
        (0..40).for_each(|_| pacer.measure(chunk(&pacer, 4096), seconds(0, chunk(&pacer, 4096))));
        assert!((105..=115).contains(&pacer.max_prompt_tokens().unwrap()), "{pacer:?}");
    }

    #[test]
    fn a_machine_that_stood_still_for_a_moment_is_believed_for_a_moment() {
        let mut pacer = StepPacer::new(Some(TARGET));
        (0..20).for_each(|_| pacer.measure(chunk(&pacer, 4096), seconds(0, chunk(&pacer, 4096))));
        pacer.measure(chunk(&pacer, 4096), Duration::from_secs(30));
        assert_eq!(chunk(&pacer, 4096), BLOCK);
        (0..20).for_each(|_| pacer.measure(chunk(&pacer, 4096), seconds(0, chunk(&pacer, 4096))));
        assert!(chunk(&pacer, 4096) > 100, "{pacer:?}");
    }

    #[test]
    fn answers_and_the_ends_of_prompts_do_not_count() {
        let mut pacer = StepPacer::new(Some(TARGET));
        pacer.measure(0, Duration::from_secs(1));
        pacer.measure(5, Duration::from_millis(100));
        assert_eq!((pacer.max_prompt_tokens(), pacer.prompt_rate()), (Some(FIRST_TOKENS), None));
        pacer.measure(100, Duration::from_millis(100));
        assert_eq!((pacer.max_prompt_tokens(), pacer.prompt_rate()), (Some(130), Some(1000.0)));
    }

    #[test]
    fn without_a_target_there_is_no_limit_and_still_a_rate() {
        let mut pacer = StepPacer::new(None);
        pacer.measure(100, Duration::from_secs(1));
        assert_eq!((pacer.max_prompt_tokens(), pacer.prompt_rate()), (None, Some(100.0)));
    }
}

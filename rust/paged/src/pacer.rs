//! How fast prompts are computed, and chunks of them small enough that nobody waits long for a step to end.

use std::time::Duration;

use crate::output::{ScheduledRequest, SchedulerOutput};
use crate::scheduler::PromptLimits;

/// Fits the prompt tokens of a step to the time that it may take. Whoever has a clock tells it how long steps took.
#[derive(Debug, Clone)]
pub struct StepPacer {
    target: Option<Duration>,
    /// Seconds that a step of answers takes, alone or beside hardly any prompt.
    answers: Option<f64>,
    /// Seconds that a prompt token adds to a step.
    token: Option<f64>,
    /// Steps since answers were timed.
    age: usize,
}

/// Of the target, what steps are aimed at: they vary by a third where others use the machine too, and what follows them takes its
/// part.
const AIM: f64 = 0.65;
/// So many times as long as answers alone may chunks make a step whatever the target is, so that half of the time goes into
/// prompts: a large model reads its weights, and a long prompt the keys and values that it has, for one token as for many.
const STRETCH: f64 = 2.0;
/// Until a prompt has been timed.
const FIRST_TOKENS: usize = 128;
/// Where nobody is being answered, steps have so many prompt tokens whatever the target is. Measured on CPUs, prefill has nine
/// tenths of its rate with chunks of 32.
const MIN_TOKENS_ALONE: usize = 64;
/// The fewest tokens that are told from an answer.
const MIN_TOKENS: usize = 2;
/// Where prompts are always waiting, one of so many steps has hardly any of them, to see how long answers take now.
const MAX_AGE: usize = 32;
/// How much slower than the last step the next one is expected to be at most.
const MAX_GROWTH: f64 = 1.25;
/// Of an estimate that turns out too high, the part that is kept.
const KEPT: f64 = 0.5;

impl StepPacer {
    /// Aims at steps no longer than `target`; with none, steps are not limited.
    pub fn new(target: Option<Duration>) -> Self {
        Self { target, answers: None, token: None, age: 0 }
    }

    /// Most prompt tokens of the next step.
    pub fn limits(&self) -> PromptLimits {
        let Some(target) = self.target else { return PromptLimits::default() };
        let aim = target.as_secs_f64() * AIM;
        let beside_answers =
            if self.age < MAX_AGE { self.fitting(self.aim_beside_answers(aim), self.answers) } else { MIN_TOKENS };
        let alone = self.fitting(aim, None).max(MIN_TOKENS_ALONE);
        PromptLimits { beside_answers: Some(beside_answers), alone: Some(alone) }
    }

    /// Seconds that a step may take in which a request is being answered.
    fn aim_beside_answers(&self, aim: f64) -> f64 {
        aim.max(self.answers.unwrap_or(0.0) * STRETCH)
    }

    /// Prompt tokens that fit a step of so many seconds beside what takes others.
    fn fitting(&self, seconds: f64, others: Option<f64>) -> usize {
        let left = seconds - others.unwrap_or(0.0);
        self.token.map_or(FIRST_TOKENS, |token| ((left / token) as usize).max(MIN_TOKENS))
    }

    /// Prompt tokens that a second more has room for, once a prompt has been timed.
    pub fn prompt_rate(&self) -> Option<f64> {
        self.token.map(f64::recip)
    }

    /// Takes note of a step and of how long it took.
    pub fn measure(&mut self, step: &SchedulerOutput, took: Duration) {
        let chunks = step.rows.iter().filter(|row| row.is_chunk()).map(ScheduledRequest::num_known_tokens);
        let num_chunks = chunks.clone().count();
        self.note(chunks.sum(), num_chunks < step.rows.len(), took.as_secs_f64());
    }

    /// A step whose chunks are much smaller than they might be, such as the last of a prompt, says little of prompts unless it
    /// was slow.
    fn note(&mut self, num_prompt_tokens: usize, has_answers: bool, took: f64) {
        let aim = self.target.map(|target| target.as_secs_f64() * AIM);
        let aim = aim.map(|aim| if has_answers { self.aim_beside_answers(aim) } else { aim });
        let answers = self.answers.filter(|_| has_answers);
        let fitting = aim.map_or(FIRST_TOKENS, |aim| self.fitting(aim, answers));
        let is_slow = aim.is_some_and(|aim| took > aim);
        if has_answers {
            self.age += 1;
        }
        if has_answers && num_prompt_tokens <= MIN_TOKENS {
            self.age = 0;
            self.answers = Some(match self.answers {
                // A machine that stands still for a moment must not make room for long steps.
                Some(answers) if took > answers => took.min(answers * MAX_GROWTH),
                Some(answers) => smoothed(answers, took),
                // Nor must the first step of all, which may be a slow one.
                None => self.target.map_or(took, |target| took.min(target.as_secs_f64())),
            });
        }
        if num_prompt_tokens > 0 && took > 0.0 && (num_prompt_tokens >= fitting / 2 || is_slow) {
            // What answers took of it is not known so well that tokens could be said to cost nothing.
            let measured = (took - answers.unwrap_or(0.0)).max(took / STRETCH) / num_prompt_tokens as f64;
            // Prompts slow down as they get longer, so the slowest token is the one to go by, and the next one will be slower
            // still.
            self.token = Some(match self.token {
                Some(token) if measured > token => measured * (measured / token).min(MAX_GROWTH),
                Some(token) => smoothed(token, measured),
                None => measured,
            });
        }
    }
}

fn smoothed(estimate: f64, measured: f64) -> f64 {
    estimate * KEPT + measured * (1.0 - KEPT)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TARGET: Duration = Duration::from_millis(200);

    /// A machine on which the answers of a step take 20 ms, and a token 1 ms more for each 1000 tokens before it.
    fn seconds(position: usize, num_tokens: usize) -> f64 {
        0.02 + num_tokens as f64 * (0.001 + position as f64 * 1e-6)
    }

    /// Computes a prompt of 4096 tokens, and returns the chunks.
    fn prompt(pacer: &mut StepPacer, seconds: fn(usize, usize) -> f64) -> Vec<usize> {
        let mut chunks = Vec::new();
        let mut position = 0;
        while position < 4096 {
            let chunk = pacer.limits().beside_answers.unwrap().min(4096 - position);
            pacer.note(chunk, true, seconds(position, chunk));
            position += chunk;
            chunks.push(chunk);
        }
        chunks
    }

    #[test]
    fn chunks_of_a_long_prompt_stay_below_the_target() {
        // Answers have been timed, or not.
        for alone in [0, 5] {
            let mut pacer = StepPacer::new(Some(TARGET));
            (0..alone).for_each(|_| pacer.note(0, true, seconds(0, 0)));
            let chunks = prompt(&mut pacer, |position, chunk| {
                let took = seconds(position, chunk);
                assert!(took < TARGET.as_secs_f64(), "{took} s for {chunk} tokens at {position}");
                took
            });
            // They are as long as they may be, less and less as the prompt gets slower.
            assert!(chunks[2] > 80 && (18..36).contains(&chunks[chunks.len() - 2]), "{chunks:?}");
            // The next prompt begins with short steps and comes to longer ones.
            for _ in 0..40 {
                let chunk = pacer.limits().beside_answers.unwrap();
                pacer.note(chunk, true, seconds(0, chunk));
            }
            assert!((105..=115).contains(&pacer.limits().beside_answers.unwrap()), "{pacer:?}");
        }
    }

    #[test]
    fn where_answers_take_the_target_up_prompts_make_steps_twice_as_long() {
        // A large model: a step reads all weights in 0.4 s, and a token adds 5 ms.
        let seconds = |_, num_tokens: usize| 0.4 + 0.005 * num_tokens as f64;
        for alone in [0, 5] {
            let mut pacer = StepPacer::new(Some(TARGET));
            (0..alone).for_each(|_| pacer.note(0, true, seconds(0, 0)));
            let chunks = prompt(&mut pacer, seconds);
            let late = &chunks[20..chunks.len() - 1];
            assert!(late.iter().all(|chunk| *chunk <= 90), "{chunks:?}");
            assert!(late.iter().filter(|chunk| **chunk >= 60).count() * 10 > late.len() * 8, "{chunks:?}");
        }
    }

    /// Steps of a server with prompts in each, where answers alone take so many seconds; returns those of the last 40 with full
    /// chunks.
    fn saturated(pacer: &mut StepPacer, answers: f64) -> Vec<f64> {
        let mut steps = Vec::new();
        for number in 0..400 {
            let chunk = pacer.limits().beside_answers.unwrap();
            // One in five is slower than the others.
            let noise = if number % 5 == 0 { 1.2 } else { 1.0 };
            let took = noise * (answers + chunk as f64 * 0.001);
            pacer.note(chunk, true, took);
            if chunk > MIN_TOKENS {
                steps.push(took);
            }
        }
        steps.split_off(steps.len() - 40)
    }

    #[test]
    fn answers_are_timed_where_prompts_are_always_waiting() {
        let mut pacer = StepPacer::new(Some(TARGET));
        // The first step of all may be slow.
        pacer.note(0, true, 5.0);
        for answers in [0.02, 0.3, 0.02, 0.06] {
            let steps = saturated(&mut pacer, answers);
            // Of a slow step when a slow one told what answers take.
            let most = TARGET.as_secs_f64().max(answers * STRETCH * 1.2 * 1.2);
            assert!(steps.iter().all(|took| *took < most), "answers of {answers} s: {steps:?}");
            let mean = steps.iter().sum::<f64>() / steps.len() as f64;
            assert!(mean > 0.5 * most, "answers of {answers} s: {steps:?}");
        }
    }

    #[test]
    fn a_machine_that_stood_still_for_a_moment_is_believed_for_a_moment() {
        let mut pacer = StepPacer::new(Some(TARGET));
        let step = |pacer: &mut StepPacer| {
            pacer.note(0, true, seconds(0, 0));
            let chunk = pacer.limits().beside_answers.unwrap();
            pacer.note(chunk, true, seconds(0, chunk));
            chunk
        };
        (0..20).for_each(|_| _ = step(&mut pacer));
        pacer.note(100, true, 30.0);
        assert_eq!(pacer.limits().beside_answers, Some(MIN_TOKENS));
        (0..20).for_each(|_| _ = step(&mut pacer));
        assert!(step(&mut pacer) > 100, "{pacer:?}");
        pacer.note(0, true, 30.0);
        assert!(seconds(0, step(&mut pacer)) < TARGET.as_secs_f64(), "{pacer:?}");
    }

    #[test]
    fn the_ends_of_prompts_do_not_count() {
        let mut pacer = StepPacer::new(Some(TARGET));
        pacer.note(5, true, 0.1);
        assert_eq!((pacer.limits().beside_answers, pacer.prompt_rate()), (Some(FIRST_TOKENS), None));
        pacer.note(100, true, 0.1);
        assert_eq!((pacer.limits().beside_answers, pacer.prompt_rate()), (Some(130), Some(1000.0)));
        pacer.note(5, true, 0.1);
        assert_eq!((pacer.limits().beside_answers, pacer.prompt_rate()), (Some(130), Some(1000.0)));
    }

    #[test]
    fn prompts_alone_stay_below_the_target_and_keep_most_of_their_rate() {
        let mut pacer = StepPacer::new(Some(TARGET));
        for _ in 0..10 {
            let chunk = pacer.limits().alone.unwrap();
            pacer.note(chunk, false, seconds(0, chunk));
        }
        let chunk = pacer.limits().alone.unwrap();
        assert!((90..=110).contains(&chunk), "{chunk} tokens in {} s", seconds(0, chunk));
        // However slow the machine is.
        (0..10).for_each(|_| pacer.note(64, false, 20.0));
        assert_eq!(pacer.limits().alone, Some(MIN_TOKENS_ALONE));
        assert_eq!(pacer.limits().beside_answers, Some(MIN_TOKENS));
    }

    #[test]
    fn without_a_target_there_is_no_limit_and_still_a_rate() {
        let mut pacer = StepPacer::new(None);
        pacer.note(100, true, 1.0);
        assert_eq!((pacer.limits().beside_answers.or(pacer.limits().alone), pacer.prompt_rate()), (None, Some(100.0)));
    }
}

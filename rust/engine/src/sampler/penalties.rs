//! Penalties on what the context already has, kept up with it token by token.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use super::ResolvedSampling;
use crate::DryParams;

/// Logits that are other than the model's for a while.
#[derive(Clone, Debug, Default)]
pub(super) struct Changes {
    /// What they were, in the order of the changes.
    before: Vec<(u32, f32)>,
}

impl Changes {
    pub fn is_empty(&self) -> bool {
        self.before.is_empty()
    }

    /// Changes the logit of a token, if it has one.
    pub fn set(&mut self, logits: &mut [f32], token: u32, change: impl FnOnce(f32) -> f32) {
        if let Some(logit) = logits.get_mut(token as usize) {
            self.before.push((token, *logit));
            *logit = change(*logit);
        }
    }

    /// Makes the logits what they were.
    pub fn undo(&mut self, logits: &mut [f32]) {
        for (token, logit) in self.before.drain(..).rev() {
            logits[token as usize] = logit;
        }
    }
}

/// How often each token stands in the context (prompt and output).
#[derive(Clone, Debug)]
pub(super) struct Counts {
    by_token: HashMap<u32, u32>,
    presence: f32,
    frequency: f32,
    repetition: f32,
}

impl Counts {
    /// `None` when no penalty is on.
    #[allow(clippy::float_cmp)] // The exact values that mean off.
    pub fn new(sampling: &ResolvedSampling) -> Option<Self> {
        let (presence, frequency) = (sampling.presence_penalty, sampling.frequency_penalty);
        let repetition = sampling.repetition_penalty;
        let on = presence != 0.0 || frequency != 0.0 || repetition != 1.0;
        on.then(|| Self { by_token: HashMap::new(), presence, frequency, repetition })
    }

    pub fn observe(&mut self, token: u32) {
        *self.by_token.entry(token).or_default() += 1;
    }

    pub fn apply(&self, logits: &mut [f32], changes: &mut Changes) {
        for (&token, &count) in &self.by_token {
            changes.set(logits, token, |logit| {
                let logit = logit - (count as f32 * self.frequency + self.presence);
                let penalised = if logit > 0.0 { logit / self.repetition } else { logit * self.repetition };
                // The row stays finite whatever the penalty.
                penalised.clamp(-1e30, 1e30)
            });
        }
    }
}

/// Repetitions longer than this, or than the allowed length when that is more, are punished like this (the bound of the first
/// implementation).
const MAX_MATCH: usize = 50;

/// The DRY penalty ("Don't Repeat Yourself", text-generation-webui #5677): a token that would extend a repetition of n tokens, n
/// at least the allowed length, loses `multiplier * base ^ (n - allowed_length)`. Work is linear in the context for each sampled
/// token, and nothing for those that are only taken in.
#[derive(Clone, Debug)]
pub(super) struct Dry {
    params: DryParams,
    breakers: Arc<HashSet<u32>>,
    context: Vec<u32>,
    /// For each number of tokens that the context's end is cut by, how many tokens of the two ends agree.
    matches: Vec<u32>,
    /// Of this step: the longest repetition that each token would extend.
    longest: HashMap<u32, usize>,
}

impl Dry {
    pub fn new(params: DryParams, breakers: Arc<HashSet<u32>>) -> Self {
        Self { params, breakers, context: Vec::new(), matches: Vec::new(), longest: HashMap::new() }
    }

    pub fn observe(&mut self, token: u32) {
        self.context.push(token);
    }

    pub fn apply(&mut self, logits: &mut [f32], changes: &mut Changes) {
        let allowed = self.params.allowed_length.max(1);
        // A breaker is part of no repetition.
        let unbroken = self.context.iter().rev().take_while(|token| !self.breakers.contains(token)).count();
        if unbroken < allowed {
            return;
        }
        let limit = unbroken.min(MAX_MATCH.max(allowed));
        self.match_ends();
        self.longest.clear();
        for (cut, &length) in self.matches.iter().enumerate().skip(1) {
            let length = (length as usize).min(limit);
            if length >= allowed {
                let next = self.context[self.context.len() - cut];
                if !self.breakers.contains(&next) {
                    let longest = self.longest.entry(next).or_default();
                    *longest = length.max(*longest);
                }
            }
        }
        for (&token, &length) in &self.longest {
            let extra = length as i32 - self.params.allowed_length as i32;
            // Bounded, so that the row stays finite whatever the base.
            changes.set(logits, token, |logit| logit - (self.params.multiplier * self.params.base.powi(extra)).min(1e30));
        }
    }

    /// The Z function (Gusfield 1997, section 1.3) of the context read backwards.
    fn match_ends(&mut self) {
        let n = self.context.len();
        let token = |i: usize| self.context[n - 1 - i];
        self.matches.clear();
        self.matches.push(n as u32);
        // What begins at `start` agrees with the beginning up to `end`.
        let (mut start, mut end) = (0, 0);
        for i in 1..n {
            let mut length = if i < end { (self.matches[i - start] as usize).min(end - i) } else { 0 };
            if i + length >= end {
                while i + length < n && token(length) == token(i + length) {
                    length += 1;
                }
                (start, end) = (i, i + length);
            }
            self.matches.push(length as u32);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The definition: for every earlier occurrence of the last token, walk back while the tokens agree.
    fn oracle(context: &[u32], breakers: &HashSet<u32>, params: &DryParams) -> HashMap<u32, f32> {
        let mut longest: HashMap<u32, usize> = HashMap::new();
        let Some((&last, earlier)) = context.split_last() else { return HashMap::new() };
        if breakers.contains(&last) {
            return HashMap::new();
        }
        for i in (0..earlier.len()).filter(|&i| earlier[i] == last) {
            let next = context[i + 1];
            if breakers.contains(&next) {
                continue;
            }
            let mut length = 1;
            while length < params.allowed_length.max(50) && length <= i {
                let token = context[context.len() - 1 - length];
                if context[i - length] != token || breakers.contains(&token) {
                    break;
                }
                length += 1;
            }
            let entry = longest.entry(next).or_default();
            *entry = length.max(*entry);
        }
        longest.retain(|_, length| *length >= params.allowed_length);
        longest
            .into_iter()
            .map(|(t, n)| (t, params.multiplier * params.base.powi(n as i32 - params.allowed_length as i32)))
            .collect()
    }

    proptest! {
        #[test]
        fn dry_follows_its_definition(
            context in proptest::collection::vec(0_u32..4, 0..150),
            allowed_length in 1_usize..5,
            breakers in proptest::collection::hash_set(0_u32..4, 0..2),
        ) {
            let params = DryParams { multiplier: 0.8, base: 1.2, allowed_length, sequence_breakers: Vec::new() };
            let mut dry = Dry::new(params.clone(), Arc::new(breakers.clone()));
            for (i, &token) in context.iter().enumerate() {
                dry.observe(token);
                let mut logits = vec![0.0; 4];
                dry.apply(&mut logits, &mut Changes::default());
                let expected = oracle(&context[..=i], &breakers, &params);
                for (token, logit) in (0..).zip(logits) {
                    prop_assert_eq!(-logit, expected.get(&token).copied().unwrap_or(0.0), "after {:?}", &context[..=i]);
                }
            }
        }

        #[test]
        fn long_repetitions_follow_the_definition_too(
            piece in proptest::collection::vec(0_u32..3, 1..70),
            repeats in 2_usize..5,
            allowed_length in 45_usize..75,
        ) {
            let params = DryParams { multiplier: 0.8, base: 1.2, allowed_length, sequence_breakers: Vec::new() };
            let context = piece.repeat(repeats);
            let mut dry = Dry::new(params.clone(), Arc::default());
            for &token in &context {
                dry.observe(token);
            }
            let mut logits = vec![0.0; 4];
            dry.apply(&mut logits, &mut Changes::default());
            let expected = oracle(&context, &HashSet::new(), &params);
            for (token, logit) in (0..).zip(logits) {
                prop_assert_eq!(-logit, expected.get(&token).copied().unwrap_or(0.0));
            }
        }

        #[test]
        fn penalties_follow_their_formulas(
            context in proptest::collection::vec(0_u32..6, 0..40),
            presence_penalty in -2.0_f32..2.0,
            frequency_penalty in -2.0_f32..2.0,
            repetition_penalty in 0.5_f32..2.0,
        ) {
            let sampling = ResolvedSampling {
                temperature: None, top_k: None, top_p: 1.0, min_p: 0.0, presence_penalty, frequency_penalty, repetition_penalty,
                dry: None, logit_bias: Vec::new(), allowed: None, logprobs: None,
            };
            let mut counts = Counts::new(&sampling).unwrap();
            for &token in &context {
                counts.observe(token);
            }
            let before = [1.5, -0.5, 0.0, 3.0];
            let mut after = before;
            // Tokens 4 and 5 have no logits.
            counts.apply(&mut after, &mut Changes::default());
            for token in 0..4 {
                let count = context.iter().filter(|t| **t == token as u32).count() as f32;
                let mut expected = before[token];
                if count > 0.0 {
                    expected -= count * frequency_penalty + presence_penalty;
                    expected = if expected > 0.0 { expected / repetition_penalty } else { expected * repetition_penalty };
                }
                prop_assert_eq!(after[token], expected);
            }
        }
    }

    #[test]
    fn an_allowed_length_beyond_the_usual_bound_still_punishes() {
        let params = DryParams { multiplier: 0.5, base: 2.0, allowed_length: 60, sequence_breakers: Vec::new() };
        let mut dry = Dry::new(params, Arc::default());
        (0..160).for_each(|i| dry.observe(i % 80));
        let mut logits = vec![0.0; 80];
        dry.apply(&mut logits, &mut Changes::default());
        assert_eq!((logits[0], logits[1]), (-0.5, 0.0));
    }

    #[test]
    fn a_prompt_is_taken_in_without_comparing_its_tokens() {
        let params = DryParams { multiplier: 0.5, base: 2.0, allowed_length: 2, sequence_breakers: Vec::new() };
        let mut dry = Dry::new(params, Arc::default());
        // Compared with each other, these would be 10^12 steps.
        (0..1_000_000).for_each(|_| dry.observe(7));
        let mut logits = vec![0.0; 8];
        dry.apply(&mut logits, &mut Changes::default());
        assert_eq!(logits[7], -(0.5 * 2.0_f32.powi(48)));
    }
}

//! From a row of logits to a token: DRY, frequency, presence and repetition penalties, logit bias, temperature, softmax, top-k,
//! top-p, min-p, and a draw.

mod math;
mod penalties;
mod resolve;

use std::{collections::HashSet, sync::Arc};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

pub use resolve::{ResolvedSampling, dry_breaker_ids};

use crate::EngineError;
use math::{FEW, exponentials, few_largest, finite_max, largest, likelier, log_sum_exp, position_of};
use penalties::{Counts, Dry};

/// A chosen token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// Its id.
    pub token_id: u32,
    /// When asked for, its log probability and the likeliest tokens.
    pub logprobs: Option<RowLogprobs>,
}

/// Log probabilities at one position: the log-softmax of the model's own logits, before penalties, bias, temperature and truncation.
#[derive(Clone, Debug, PartialEq)]
pub struct RowLogprobs {
    /// Of the token in question.
    pub logprob: f32,
    /// Of the likeliest tokens, likeliest first; of equal ones the lowest id first.
    pub top: Vec<(u32, f32)>,
}

/// Log probability of a token and of the `num_top` likeliest ones, from the model's logits `[vocab_size]`.
pub fn token_logprob(logits: &[f32], token_id: u32, num_top: usize) -> Result<RowLogprobs, EngineError> {
    let max = checked_max(logits)?;
    let logit = logits.get(token_id as usize).ok_or_else(|| {
        EngineError::InvalidArgument(format!("token {token_id} has no logit; the model's ids are below {}", logits.len()))
    })?;
    let normaliser = log_sum_exp(logits, max);
    let mut top = largest(logits, num_top);
    for entry in &mut top {
        entry.1 -= normaliser;
    }
    Ok(RowLogprobs { logprob: logit - normaliser, top })
}

fn checked_max(logits: &[f32]) -> Result<f32, EngineError> {
    finite_max(logits).ok_or_else(|| {
        let bad = logits.iter().position(|x| !x.is_finite());
        EngineError::Internal(match bad {
            Some(id) => format!("the model's logit of token {id} is {}; its weights or its input are damaged", logits[id]),
            None => "the model gave no logits".into(),
        })
    })
}

/// Chooses the tokens of one continuation. Its random numbers depend on the seed and the choice alone, so a request gives the same
/// tokens whatever runs beside it.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Arc<ResolvedSampling>,
    rng: ChaCha8Rng,
    counts: Option<Counts>,
    dry: Option<Dry>,
    candidates: Vec<(u32, f32)>,
    model_logits: Vec<f32>,
}

impl Sampler {
    /// For the first choice of a request; see [`Self::for_choice`]. `dry_breakers` are [`dry_breaker_ids`], empty when DRY is off; the
    /// prompt counts for penalties.
    pub fn new(sampling: Arc<ResolvedSampling>, seed: u64, prompt_token_ids: &[u32], dry_breakers: Arc<HashSet<u32>>) -> Self {
        let rng = ChaCha8Rng::seed_from_u64(seed);
        let counts = Counts::new(&sampling);
        let dry = sampling.dry.clone().map(|params| Dry::new(params, dry_breakers));
        let mut sampler = Self { sampling, rng, counts, dry, candidates: Vec::new(), model_logits: Vec::new() };
        for &token in prompt_token_ids {
            sampler.observe(token);
        }
        sampler
    }

    /// The same for another choice: with random numbers of its own.
    #[must_use]
    pub fn for_choice(&self, choice: usize) -> Self {
        let mut sampler = self.clone();
        sampler.rng.set_stream(choice as u64);
        sampler
    }

    /// Chooses the next token from the model's logits `[vocab_size]` and counts it as part of the context. The row is overwritten.
    ///
    /// A NaN or an infinity among the logits is an [`EngineError::Internal`] that names it.
    pub fn sample(&mut self, logits: &mut [f32]) -> Result<Sampled, EngineError> {
        let mut max = checked_max(logits)?;
        if self.sampling.logprobs.is_some() {
            self.model_logits.clear();
            self.model_logits.extend_from_slice(logits);
        }
        if self.change(logits) {
            max = checked_max(logits)?;
        }
        let token_id = match self.sampling.temperature {
            None => position_of(logits, max),
            Some(temperature) => self.draw(logits, max, temperature),
        };
        let num_top = self.sampling.logprobs;
        let logprobs = num_top.map(|n| token_logprob(&self.model_logits, token_id, n)).transpose()?;
        self.observe(token_id);
        Ok(Sampled { token_id, logprobs })
    }

    /// Penalties and bias; whether there were any.
    fn change(&mut self, logits: &mut [f32]) -> bool {
        if let Some(dry) = &mut self.dry {
            dry.apply(logits);
        }
        if let Some(counts) = &self.counts {
            counts.apply(logits);
        }
        for &(id, bias) in &self.sampling.logit_bias {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit += bias;
            }
        }
        self.dry.is_some() || self.counts.is_some() || !self.sampling.logit_bias.is_empty()
    }

    /// Draws from the softmax of logits / temperature. Top-k, top-p and min-p all keep the likeliest tokens down to some rank;
    /// top-p and min-p measure by the whole softmax, as in the mirrored code.
    fn draw(&mut self, logits: &mut [f32], max: f32, temperature: f32) -> u32 {
        let ResolvedSampling { top_k, top_p, min_p, .. } = *self.sampling;
        let total = exponentials(logits, max, 1.0 / temperature);
        let uniform: f64 = self.rng.random();
        if top_k.is_none() && top_p >= 1.0 && min_p <= 0.0 {
            return pick((0..).zip(logits.iter().copied()), uniform * total);
        }
        let top_p_mass = f64::from(top_p) * total;
        // The likeliest token has e^0 = 1. Tokens below this floor are not needed for top-p either: together they have less than 1 - top_p.
        let floor = min_p.max(((total - top_p_mass) / logits.len() as f64) as f32 * 0.5);
        let candidates = &mut self.candidates;
        if let Some(k) = top_k.filter(|k| *k <= FEW) {
            few_largest(logits, k, candidates);
            candidates.retain(|(_, p)| *p >= floor);
        } else {
            candidates.clear();
            candidates.extend((0..).zip(logits.iter().copied()).filter(|(_, p)| *p >= floor));
        }
        let limit = top_k.unwrap_or(candidates.len()).min(candidates.len());
        if top_p < 1.0 {
            keep_top_p(candidates, limit, top_p_mass);
        } else if limit < candidates.len() {
            // Which tokens these are is all that matters.
            candidates.select_nth_unstable_by(limit - 1, likelier);
            candidates.truncate(limit);
            candidates.sort_unstable_by_key(|(id, _)| *id);
        }
        let kept: f64 = candidates.iter().map(|(_, p)| f64::from(*p)).sum();
        pick(candidates.iter().copied(), uniform * kept)
    }

    fn observe(&mut self, token: u32) {
        if let Some(counts) = &mut self.counts {
            counts.observe(token);
        }
        if let Some(dry) = &mut self.dry {
            dry.observe(token);
        }
    }
}

/// Keeps the likeliest candidates, `limit` at most, until their sum reaches `mass`.
fn keep_top_p(candidates: &mut Vec<(u32, f32)>, limit: usize, mass: f64) {
    // Few candidates hold the mass as a rule, so only a growing front is brought to order.
    let mut front = 64.min(limit);
    loop {
        if front < candidates.len() {
            candidates.select_nth_unstable_by(front - 1, likelier);
        }
        let sum: f64 = candidates[..front].iter().map(|(_, p)| f64::from(*p)).sum();
        if sum >= mass || front == limit {
            break;
        }
        front = (front * 4).min(limit);
    }
    candidates.truncate(front);
    candidates.sort_unstable_by(likelier);
    let mut sum = 0.0;
    let kept = candidates.iter().take_while(|(_, p)| {
        let needed = sum < mass;
        sum += f64::from(*p);
        needed
    });
    let kept = kept.count();
    candidates.truncate(kept);
}

/// The entry at which the running sum passes `target`; the last one with any weight when rounding keeps it from that.
fn pick(entries: impl Iterator<Item = (u32, f32)>, target: f64) -> u32 {
    let mut sum = 0.0;
    let mut chosen = 0;
    for (id, weight) in entries.filter(|(_, weight)| *weight > 0.0) {
        chosen = id;
        sum += f64::from(weight);
        if sum > target {
            break;
        }
    }
    chosen
}

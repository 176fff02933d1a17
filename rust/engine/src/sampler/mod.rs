//! From a row of logits to a token: DRY, frequency, presence and repetition penalties, logit bias, temperature, softmax, top-k,
//! top-p, min-p, and a draw.

mod bad_words;
mod math;
mod penalties;
mod resolve;
#[cfg(test)]
mod tests;
mod truncate;

use std::{collections::HashSet, sync::Arc};

use device::{
    RowSampling, SampledRow, TokenMask,
    cpu::softmax::{Softmax, few_largest, finite_max},
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

pub use bad_words::bad_word_ids;
pub use resolve::{ResolvedSampling, check_num_logprobs, dry_breaker_ids};

use crate::EngineError;
use bad_words::BadWords;
pub(crate) use math::largest;
use math::{BlockSums, FEW, log_sum_exp, position_of};
use penalties::{Changes, Counts, Dry};
use truncate::{Truncation, keep_likeliest, keep_of_row};

/// Entries of a choice's lists whose memory is kept from token to token: more are rare.
const KEPT_ENTRIES: usize = 1024;

/// Behind all positions of outputs: where random numbers for another draw at a position begin.
const REDRAWS: usize = 1 << 40;

/// A chosen token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// Its id.
    pub token_id: u32,
    /// When asked for, its log probability and the likeliest tokens.
    pub logprobs: Option<RowLogprobs>,
}

/// Log probabilities at one position: the log-softmax of the model's own logits, before penalties, bias, temperature and
/// truncation.
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

/// How many tokens are likelier than this one, and 1.
pub fn rank(logits: &[f32], token_id: u32) -> usize {
    let own = logits.get(token_id as usize).copied().unwrap_or(f32::NEG_INFINITY);
    1 + logits.iter().filter(|logit| **logit > own).count()
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

/// Chooses the tokens of one continuation. A random number is that of a seed, a choice and a position of the output, in whatever
/// order they are drawn, so a request gives the same tokens whatever runs beside it, and a draw that is not taken leaves nothing
/// behind.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Arc<ResolvedSampling>,
    rng: ChaCha8Rng,
    counts: Option<Counts>,
    dry: Option<Dry>,
    bad_words: Option<BadWords>,
    changes: Changes,
    candidates: Vec<(u32, f32)>,
    /// Logits of the tokens that a mask allows.
    allowed: Vec<f32>,
    sums: BlockSums,
}

impl Sampler {
    /// For the first choice of a request; see [`Self::for_choice`]. `dry_breakers` are [`dry_breaker_ids`], empty when DRY is
    /// off; the prompt counts for penalties.
    pub fn new(sampling: Arc<ResolvedSampling>, seed: u64, prompt_token_ids: &[u32], dry_breakers: Arc<HashSet<u32>>) -> Self {
        let rng = ChaCha8Rng::seed_from_u64(seed);
        let counts = Counts::new(&sampling);
        let dry = sampling.dry.clone().map(|params| Dry::new(params, dry_breakers));
        let (candidates, allowed) = (Vec::new(), Vec::new());
        let (changes, sums) = (Changes::default(), BlockSums::default());
        let mut sampler = Self { sampling, rng, counts, dry, bad_words: None, changes, candidates, allowed, sums };
        for &token in prompt_token_ids {
            sampler.observe(token);
        }
        sampler
    }

    /// The same, of whose output none of these sequences of tokens is a part; see [`bad_word_ids`].
    #[must_use]
    pub fn without(mut self, bad_words: Vec<Vec<u32>>) -> Self {
        self.bad_words = BadWords::new(bad_words);
        self
    }

    /// The same for another choice: with random numbers of its own.
    #[must_use]
    pub fn for_choice(&self, choice: usize) -> Self {
        let mut sampler = self.clone();
        sampler.rng.set_stream(choice as u64);
        sampler
    }

    /// Chooses the token at `position` of the output (0 is the first that is generated) from the model's logits `[vocab_size]`;
    /// those before it were observed. The row is written to meanwhile, and at the end is what it was.
    ///
    /// Tokens that `mask` forbids have the probability 0: top-k, top-p and min-p count and measure the others alone. Log
    /// probabilities are those of the model all the same.
    ///
    /// # Errors
    /// [`EngineError::Internal`] names a logit that is NaN or infinite. [`EngineError::InvalidArgument`]: `mask` allows no token.
    pub fn sample(&mut self, logits: &mut [f32], position: usize, mask: Option<TokenMask<'_>>) -> Result<Sampled, EngineError> {
        let max = checked_max(logits)?;
        let changed_max = if self.change(logits) { checked_max(logits) } else { Ok(max) };
        let chosen = changed_max.and_then(|max| match mask {
            None => Ok(self.choose(logits, max, position)),
            Some(mask) => self.choose_allowed(logits, mask, position),
        });
        self.changes.undo(logits);
        let token_id = chosen?;
        let logprobs = self.sampling.logprobs.map(|n| token_logprob(logits, token_id, n)).transpose()?;
        Ok(Sampled { token_id, logprobs })
    }

    /// Chooses again at a position whose token was refused, among those that `mask` allows and with a random number of its own.
    ///
    /// A token that is drawn from all, and drawn again when it is refused, has the probability that it has among those allowed:
    /// p + P(refused) p / P(allowed) = p / P(allowed).
    pub fn sample_again(&mut self, logits: &mut [f32], position: usize, mask: TokenMask<'_>) -> Result<Sampled, EngineError> {
        self.sample(logits, REDRAWS + position, Some(mask))
    }

    /// Whether a draw from all tokens says nothing of one from some: top-k, top-p and min-p would have kept others.
    pub fn truncates(&self) -> bool {
        let ResolvedSampling { temperature, top_k, top_p, min_p, .. } = *self.sampling;
        temperature.is_some() && (top_k.is_some() || top_p < 1.0 || min_p > 0.0)
    }

    /// Counts a token as part of the context.
    pub fn observe(&mut self, token: u32) {
        if let Some(counts) = &mut self.counts {
            counts.observe(token);
        }
        if let Some(dry) = &mut self.dry {
            dry.observe(token);
        }
        if let Some(bad_words) = &mut self.bad_words {
            bad_words.observe(token);
        }
    }

    /// Whether it takes the largest logit that is allowed, as it is, and reports no other.
    pub fn is_greedy(&self) -> bool {
        let ResolvedSampling { temperature, logprobs, logit_bias, .. } = &*self.sampling;
        temperature.is_none() && logprobs.is_none() && logit_bias.is_empty() && !self.looks_back()
    }

    /// How the token at `position` is to be drawn where the logits lie, and how many of the likeliest tokens are wanted beside
    /// it. `None` when penalties or bias change the logits first: then [`Self::sample`] draws it.
    pub fn row_sampling<'a>(&mut self, position: usize, mask: Option<TokenMask<'a>>) -> Option<(RowSampling<'a>, usize)> {
        if self.looks_back() || !self.sampling.logit_bias.is_empty() {
            return None;
        }
        let ResolvedSampling { temperature, top_k, top_p, min_p, logprobs, .. } = *self.sampling;
        let uniform = if temperature.is_some() { self.uniform(position) } else { 0.0 };
        Some((RowSampling { temperature, top_k, top_p, min_p, uniform, mask }, logprobs.unwrap_or(0)))
    }

    /// Whether the context decides what the logits become.
    fn looks_back(&self) -> bool {
        self.dry.is_some() || self.counts.is_some() || self.bad_words.is_some()
    }

    /// A token that was drawn so.
    pub fn accept(&self, row: SampledRow) -> Sampled {
        let SampledRow { token_id, logprob, mut top } = row;
        let logprobs = self.sampling.logprobs.map(|num_top| {
            top.truncate(num_top);
            RowLogprobs { logprob, top }
        });
        Sampled { token_id, logprobs }
    }

    /// Penalties and bias; whether there were any.
    fn change(&mut self, logits: &mut [f32]) -> bool {
        let changes = &mut self.changes;
        if let Some(dry) = &mut self.dry {
            dry.apply(logits, changes);
        }
        if let Some(counts) = &self.counts {
            counts.apply(logits, changes);
        }
        for &(id, bias) in &self.sampling.logit_bias {
            changes.set(logits, id, |logit| logit + bias);
        }
        if let Some(bad_words) = &self.bad_words {
            bad_words.apply(logits, changes);
        }
        !changes.is_empty()
    }

    /// The token by the changed logits, whose largest is `max`.
    fn choose(&mut self, logits: &[f32], max: f32, position: usize) -> u32 {
        match self.sampling.temperature {
            None => position_of(logits, max),
            Some(temperature) => {
                let uniform = self.uniform(position);
                let token_id = self.draw(logits, Softmax::new(max, 1.0 / temperature), uniform);
                self.candidates.shrink_to(KEPT_ENTRIES);
                token_id
            }
        }
    }

    /// [`Self::choose`], to which the logits that `mask` allows are the whole row.
    fn choose_allowed(&mut self, logits: &[f32], mask: TokenMask<'_>, position: usize) -> Result<u32, EngineError> {
        if mask.vocab_size() != logits.len() {
            let (bits, len) = (mask.vocab_size(), logits.len());
            return Err(EngineError::Internal(format!("a mask of {bits} tokens came with {len} logits")));
        }
        let mut allowed = std::mem::take(&mut self.allowed);
        mask.gather(logits, &mut allowed);
        let rank = finite_max(&allowed).map(|max| self.choose(&allowed, max, position) as usize);
        allowed.clear();
        allowed.shrink_to(KEPT_ENTRIES);
        self.allowed = allowed;
        rank.and_then(|rank| mask.nth_allowed(rank))
            .ok_or_else(|| EngineError::InvalidArgument("no token is allowed to come next".into()))
    }

    /// In 0..1: what the words `2 * position` and the next one of the choice's stream come to.
    fn uniform(&mut self, position: usize) -> f64 {
        let word = 2 * position as u128;
        // As a rule it is there already, and the stream's words have been computed.
        if self.rng.get_word_pos() != word {
            self.rng.set_word_pos(word);
        }
        self.rng.random()
    }

    /// Draws from the softmax of the logits. Top-k, top-p and min-p all keep the likeliest tokens down to some rank;
    /// top-p measures by the whole softmax, as in the mirrored code, min-p by the likeliest token, whose weight is e^0 = 1.
    fn draw(&mut self, logits: &[f32], softmax: Softmax, uniform: f64) -> u32 {
        let ResolvedSampling { top_k, top_p, min_p, .. } = *self.sampling;
        let few = top_k.filter(|k| *k <= FEW);
        let total = if few.is_none() || top_p < 1.0 { self.sums.fill(logits, softmax) } else { 0.0 };
        if top_k.is_none() && top_p >= 1.0 && min_p <= 0.0 {
            let (block, target) = self.sums.find(uniform * total);
            let entries = (block.start as u32..).zip(&logits[block]);
            return pick(entries.map(|(id, logit)| (id, softmax.weight(*logit))), target);
        }
        let mass = if top_p < 1.0 { f64::from(top_p) * total } else { f64::INFINITY };
        // Tokens below this floor are not needed for top-p either: together they have less than 1 - top_p, rounding of sums
        // included.
        let floor = min_p.max(((total * (1.0 - 3e-6) - mass).max(0.0) / logits.len() as f64) as f32 * 0.5);
        let candidates = &mut self.candidates;
        if let Some(k) = few {
            few_largest(logits, k, candidates);
            for (_, logit) in candidates.iter_mut() {
                *logit = softmax.weight(*logit);
            }
            candidates.retain(|(_, weight)| *weight >= floor);
            keep_likeliest(candidates, k, mass);
            // In the order of ids, as a GPU draws.
            candidates.sort_unstable_by_key(|(id, _)| *id);
        } else {
            let limit = top_k.unwrap_or(usize::MAX);
            keep_of_row(&self.sums, logits, Truncation { limit, mass, floor }, candidates);
        }
        let kept: f64 = candidates.iter().map(|(_, weight)| f64::from(*weight)).sum();
        pick(candidates.iter().copied(), uniform * kept)
    }
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

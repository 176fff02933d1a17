//! What is asked of a backend that samples, and what it answers.

use crate::TokenMask;

/// How a token is drawn from a row of logits. What top-k, top-p and min-p keep is drawn from in the order of ids: the first token
/// at which the running sum of weights passes `uniform` of the whole.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowSampling<'a> {
    /// Divides the logits, above 0; `None`: the likeliest token, of equal ones the lowest id.
    pub temperature: Option<f32>,
    /// The k likeliest tokens.
    pub top_k: Option<usize>,
    /// The likeliest tokens that have this share of the whole softmax together; 1 is off.
    pub top_p: f32,
    /// Tokens at least so likely, measured by the likeliest; 0 is off.
    pub min_p: f32,
    /// In 0..1, the row's random number.
    pub uniform: f64,
    /// Tokens that it forbids have the probability 0: all of the above counts and measures the others alone.
    pub mask: Option<TokenMask<'a>>,
}

/// A token, with log probabilities by the softmax of the logits as they are.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledRow {
    /// Its id.
    pub token_id: u32,
    /// Its log probability.
    pub logprob: f32,
    /// The likeliest tokens, likeliest first, of equal ones the lowest id first.
    pub top: Vec<(u32, f32)>,
}

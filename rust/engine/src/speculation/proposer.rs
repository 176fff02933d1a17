//! Who says what may come next, before the model has said it.

use std::fmt;

/// Proposes drafts: tokens that a step computes beside the next one of a request, and that count if the model chooses them too
/// (Leviathan, Kalman and Matias 2023, "Fast Inference from Transformers via Speculative Decoding", with the target's own sample
/// in place of the rejection rule). A row is sampled as it would be without drafts and compared, so these change the speed of an
/// answer and nothing else of it where a row's logits do not depend on what is computed beside it: see
/// [`crate::EngineConfig::deterministic`].
///
/// The engine thread asks before each step, for every request that is being answered.
pub trait Proposer: fmt::Debug + Send + Sync {
    /// Adds to `drafts`, which is empty, what may follow `token_ids`, prompt and answer so far; the first goes first, and more
    /// than `most` are of no use. Fewer are computed where a step, the pool or the request has no room for more; ids outside of
    /// the vocabulary, and what stands behind them, are not.
    ///
    /// Returns how many of the last tokens speak for the first draft, 0 where that is not known. Drafts that as much speaks for
    /// are expected to turn out right as often.
    fn propose(&self, token_ids: &[u32], most: usize, drafts: &mut Vec<u32>) -> usize;
}

/// Keeps the places of drafts that a draft model fills in, once it is known how many are computed.
#[derive(Debug)]
pub(super) struct ByModel;

impl Proposer for ByModel {
    fn propose(&self, _: &[u32], most: usize, drafts: &mut Vec<u32>) -> usize {
        drafts.resize(most, 0);
        0
    }
}

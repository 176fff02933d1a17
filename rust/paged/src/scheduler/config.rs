//! What a scheduler is built from.

use super::policy::{AdmissionPolicy, FairnessPolicy, VictimPolicy};
use crate::error::{InvalidSchedulerConfig, at_least};

/// Limits of a step and of a request, and the policies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Most requests in a step.
    pub max_num_seqs: usize,
    /// Most tokens in a step.
    pub max_num_batched_tokens: usize,
    /// Most tokens of a request, prompt and answer together.
    pub max_model_len: usize,
    /// Most tokens of one request in a step; `None`: as many as the step has room for. It bounds how long a long
    /// prompt holds up those behind it: with half of `max_num_batched_tokens`, the next prompt is computed beside it.
    pub max_chunk_len: Option<usize>,
    /// A prompt is computed in one step or not at all: each has at most `max_num_batched_tokens`, and no [`PromptLimits`] or
    /// shares divide it.
    ///
    /// [`PromptLimits`]: super::PromptLimits
    pub whole_prompts: bool,
    /// Most tokens of a request that a step must compute together ([`crate::NewRequest::spans`]); 1: there are none.
    pub longest_span: usize,
    /// `false` drops a request's blocks after each token it generates and computes them anew: slow, exact, and
    /// without a prefix cache.
    pub retain_kv: bool,
    /// Requests have states beside their blocks, and only of their last computed token: a fork shares what is computed only if
    /// it goes on from there.
    pub has_states: bool,
    /// Of those, snapshots that are kept for prefix hits, which end at one; without any there is no prefix cache.
    pub num_state_snapshots: usize,
    /// Of those, rows of a step that may have drafts: each needs a place for its states as they were before the step. A wrong
    /// draft takes the request back there, and the next step computes what is known by then again.
    pub num_spare_states: usize,
    /// Tokens that a snapshot must save whoever begins with it, where it takes a step of its own to make.
    pub min_snapshot_tokens: usize,
    /// Gives each request the blocks of `max_model_len` tokens when it is admitted, and keeps them: the baseline
    /// that paging improves on.
    pub reserve_full_context: bool,
    /// When a waiting request may run beside others.
    pub admission: AdmissionPolicy,
    /// Who loses its blocks to a request that ranks above it and finds none.
    pub victim: VictimPolicy,
    /// Who goes first.
    pub fairness: FairnessPolicy,
    /// Prompt tokens that a tenant of weight 1 computes in its turn, under [`FairnessPolicy::Drr`].
    pub drr_quantum: usize,
    /// After so many preemptions a request is admitted only with room to its end, and keeps its blocks before all of
    /// its own priority. At least 1.
    pub max_preemptions: u32,
}

/// A turn is about as long as a step of the default budgets.
const DEFAULT_DRR_QUANTUM: usize = 256;
/// A second preemption may be bad luck; a third would be a pattern.
const DEFAULT_MAX_PREEMPTIONS: u32 = 2;
/// A processor computes so many tokens of a prompt in the time of about six steps of one token.
const DEFAULT_MIN_SNAPSHOT_TOKENS: usize = 64;

impl SchedulerConfig {
    /// These limits, and the defaults of everything else: whole chunks, KV retained, contexts paged, admission
    /// `watermark`, victim `least_cost`, fairness `priority`.
    pub fn new(max_num_seqs: usize, max_num_batched_tokens: usize, max_model_len: usize) -> Self {
        Self {
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len,
            max_chunk_len: None,
            whole_prompts: false,
            longest_span: 1,
            retain_kv: true,
            has_states: false,
            num_state_snapshots: 0,
            num_spare_states: 0,
            min_snapshot_tokens: DEFAULT_MIN_SNAPSHOT_TOKENS,
            reserve_full_context: false,
            admission: AdmissionPolicy::default(),
            victim: VictimPolicy::default(),
            fairness: FairnessPolicy::default(),
            drr_quantum: DEFAULT_DRR_QUANTUM,
            max_preemptions: DEFAULT_MAX_PREEMPTIONS,
        }
    }

    pub(super) fn check(&self) -> Result<(), InvalidSchedulerConfig> {
        at_least("max_num_seqs", self.max_num_seqs, 1, "at least 1 is needed")?;
        at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1, "at least 1 is needed")?;
        at_least("max_model_len", self.max_model_len, 2, "at least 2 are needed, a prompt token and an answer")?;
        at_least("max_chunk_len", self.max_chunk_len.unwrap_or(1), 1, "at least 1 is needed")?;
        let span = self.longest_span;
        at_least("longest_span", span, 1, "at least 1 is needed")?;
        let why = "the rows of an image are computed in one step";
        at_least("max_num_batched_tokens", self.max_num_batched_tokens, span, why)?;
        at_least("max_chunk_len", self.max_chunk_len.unwrap_or(span), span, why)?;
        if self.whole_prompts {
            let longest = self.max_model_len - 1;
            at_least("max_num_batched_tokens", self.max_num_batched_tokens, longest, "a whole prompt is computed in one step")?;
            at_least("max_chunk_len", self.max_chunk_len.unwrap_or(longest), longest, "a whole prompt is computed in one step")?;
        }
        let of_states = [("num_state_snapshots", self.num_state_snapshots), ("num_spare_states", self.num_spare_states)];
        if let Some((field, value)) = of_states.into_iter().find(|(_, value)| *value > 0 && !self.has_states) {
            return Err(InvalidSchedulerConfig { field, value, requirement: "without states 0 is all there is" });
        }
        at_least("drr_quantum", self.drr_quantum, 1, "at least 1 is needed")?;
        at_least("max_preemptions", self.max_preemptions as usize, 1, "at least 1 is needed")
    }
}

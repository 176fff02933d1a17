//! A request as the scheduler knows it.

use std::num::NonZeroU32;
use std::ops::Range;

use crate::block_hash::CacheKey;
use crate::ids::RequestId;
use crate::kv_cache_manager::{MissReason, RequestBlocks};
use crate::tier::TierKey;

/// Whom a request belongs to, for fairness among tenants ([`crate::FairnessPolicy::Drr`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tenant {
    /// Its name.
    pub id: u64,
    /// How much longer its turns are than those of weight 1.
    pub weight: NonZeroU32,
}

impl From<u64> for Tenant {
    /// Of weight 1.
    fn from(id: u64) -> Self {
        Self { id, weight: NonZeroU32::MIN }
    }
}

/// A request to be served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewRequest {
    /// Its name.
    pub request_id: RequestId,
    /// At least one token.
    pub prompt_token_ids: Vec<u32>,
    /// Most tokens to generate, at least 1.
    pub max_tokens: usize,
    /// What its KV depends on besides its tokens; requests with other bytes never share blocks with it.
    /// See [`crate::CacheIdentity`].
    pub identity: Vec<u8>,
    /// Compute every position even if its KV is cached: prompt log probabilities need the logits.
    pub skip_prefix_lookup: bool,
    /// Tokens that a step computes together, in order, each at most [`crate::SchedulerConfig::longest_span`] of them: the rows of
    /// an image that see each other. A prefix hit ends within none.
    pub spans: Vec<Range<usize>>,
    /// Who may share blocks: those with the same bytes. Empty is a tenant of its own kind, shared by all who give none.
    pub cache_salt: Vec<u8>,
    /// So many leading tokens of the prompt are everybody's, whatever the salt: blocks that lie wholly within are shared.
    pub public_prefix_len: usize,
    /// Lower goes first; requests of one priority go in order of arrival.
    pub priority: i32,
    /// Time by which the request should have ended, in the ticks given to the scheduler.
    pub deadline: Option<u64>,
    /// Whom the request belongs to.
    pub tenant: Tenant,
}

impl NewRequest {
    /// A request with the defaults of everything else: no salt, priority 0, no deadline, tenant 0.
    pub fn new(request_id: RequestId, prompt_token_ids: Vec<u32>, max_tokens: usize) -> Self {
        Self {
            request_id,
            prompt_token_ids,
            max_tokens,
            identity: Vec::new(),
            skip_prefix_lookup: false,
            spans: Vec::new(),
            cache_salt: Vec::new(),
            public_prefix_len: 0,
            priority: 0,
            deadline: None,
            tenant: 0.into(),
        }
    }
}

/// A request that goes on from where another one is. See [`crate::Scheduler::fork`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForkRequest {
    /// The child's name.
    pub request_id: RequestId,
    /// How many of the source's tokens the child begins with, at least 1; `None`: all that are known.
    pub num_source_tokens: Option<usize>,
    /// What follows them: its own first token, or a new turn.
    pub token_ids: Vec<u32>,
    /// Of these, tokens that a step computes together, by their places among all; see [`NewRequest::spans`].
    pub spans: Vec<Range<usize>>,
    /// Most tokens to generate behind those, at least 1.
    pub max_tokens: usize,
    /// Lower goes first; requests of one priority go in order of arrival.
    pub priority: i32,
    /// Time by which the request should have ended, in the ticks given to the scheduler.
    pub deadline: Option<u64>,
    /// Whom the request belongs to.
    pub tenant: Tenant,
}

impl ForkRequest {
    /// A child with all tokens of its source and nothing behind them, priority 0, no deadline, tenant 0.
    pub fn new(request_id: RequestId, max_tokens: usize) -> Self {
        Self {
            request_id,
            num_source_tokens: None,
            token_ids: Vec::new(),
            spans: Vec::new(),
            max_tokens,
            priority: 0,
            deadline: None,
            tenant: 0.into(),
        }
    }
}

/// Where a request is in its life. A finished one is no longer known to the scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestStatus {
    /// Not begun.
    Waiting,
    /// In the batch.
    Running,
    /// Its blocks were taken for a request ahead of it; it waits to be computed anew and keeps its tokens.
    Preempted,
    /// Over, but there to be forked. See [`crate::Scheduler::keep_request`].
    Kept,
}

/// Why a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token or string.
    Stop,
    /// `max_tokens`, the context length, or the whole pool is used up.
    Length,
    /// Cancelled.
    Abort,
    /// Its deadline has passed.
    Deadline,
    /// The scheduler could not go on with it, which never happens: see [`crate::StuckReport`].
    Stuck,
}

/// Place of a request in the order that rules admission and preemption; the smaller goes first. Fixed when the request
/// is added, and no two are equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Rank {
    pub(crate) priority: i32,
    /// `u64::MAX` without one.
    pub(crate) deadline: u64,
    /// Counts requests; a fork has its source's.
    pub(crate) arrival: u64,
    /// Counts forks and requests alike.
    pub(crate) branch: u64,
}

impl Rank {
    /// What makes one request go before another that came first; the smaller is the more urgent.
    pub(crate) fn urgency(&self) -> (i32, u64) {
        (self.priority, self.deadline)
    }

    /// Before any other of its priority.
    pub(crate) const FIRST: Self = Self { priority: i32::MIN, deadline: 0, arrival: 0, branch: 0 };
}

/// What a request's turn goes by, and what preemptions have cost it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Standing {
    pub(crate) rank: Rank,
    pub(crate) tenant: Tenant,
    pub(crate) deadline: Option<u64>,
    pub(crate) cost: PreemptionCost,
    /// Most tokens it had computed when its blocks were taken: what it computes below is computed again.
    pub(crate) lost_below: usize,
}

/// What preemptions have cost a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PreemptionCost {
    /// Times that its blocks were taken.
    pub preemptions: u32,
    /// Tokens computed again for it, those apart that came from the prefix cache.
    pub recomputed_tokens: u64,
}

#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) id: RequestId,
    pub(crate) status: RequestStatus,
    /// Prompt, then output.
    pub(crate) tokens: Vec<u32>,
    /// What may follow them. See [`crate::Scheduler::set_drafts`].
    pub(crate) drafts: Vec<u32>,
    pub(crate) num_prompt_tokens: usize,
    /// Prompt and output may not grow beyond this.
    pub(crate) max_num_tokens: usize,
    pub(crate) identity: Vec<u8>,
    pub(crate) skip_prefix_lookup: bool,
    pub(crate) spans: Vec<Range<usize>>,
    pub(crate) cache_salt: Vec<u8>,
    pub(crate) public_prefix_len: usize,
    pub(crate) standing: Standing,
    /// Tokens whose KV is written by a committed step.
    pub(crate) num_computed_tokens: usize,
    /// Tokens behind them whose KV a wrong draft has taken back.
    pub(crate) num_again: usize,
    /// Prompt tokens that came from a prefix hit when the request first ran.
    pub(crate) num_cached_tokens: Option<usize>,
    /// Why it was not more.
    pub(crate) miss: Option<MissReason>,
    /// Where its states are to be kept, in order.
    pub(crate) snapshot_places: Vec<usize>,
    /// Tokens that it could have begun behind when it came to wait.
    pub(crate) num_found_tokens: usize,
    pub(crate) blocks: RequestBlocks,
    /// Keys of its blocks in a tier, as far as they were needed.
    pub(crate) tier_keys: Vec<TierKey>,
}

impl Request {
    pub(crate) fn cache_key(&self, block_size: usize) -> CacheKey<'_> {
        let num_public_blocks = self.public_prefix_len / block_size;
        CacheKey { identity: &self.identity, salt: &self.cache_salt, num_public_blocks }
    }

    pub(crate) fn num_tokens(&self) -> usize {
        self.tokens.len()
    }

    pub(crate) fn num_uncomputed_tokens(&self) -> usize {
        self.tokens.len() - self.num_computed_tokens
    }

    /// Tokens that the next one of its answer takes: one, and those that are computed again behind a wrong draft. 0 of a prompt.
    pub(crate) fn num_answer_tokens(&self) -> usize {
        let left = self.num_uncomputed_tokens();
        if left == 1 + self.num_again { left } else { 0 }
    }

    pub(crate) fn has_reached_its_limit(&self) -> bool {
        self.tokens.len() >= self.max_num_tokens
    }
}

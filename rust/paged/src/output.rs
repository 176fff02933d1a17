//! What the scheduler decided for one step.

use std::fmt;

use crate::ids::{BlockId, RequestId};
use crate::kv_cache_manager::MissReason;
use crate::request::{FinishReason, RequestStatus};
use crate::state_snapshots::SnapshotSlot;
use crate::tier::{TierBlock, TierStats};

/// One row of a step: some tokens of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScheduledRequest {
    /// The request.
    pub request_id: RequestId,
    /// Tokens whose KV is there already; the row's first position.
    pub num_computed_tokens: usize,
    /// Tokens to compute in this step, at least 1, drafts included.
    pub num_scheduled_tokens: usize,
    /// The last so many of them are drafts: proposed tokens behind the last known one, to be verified by the row's outputs.
    pub num_drafts: usize,
    /// Tokens that were computed before and are again, behind a wrong draft of a request with states.
    pub num_again: usize,
    /// Rows, at the end of this one's tokens, whose outputs are wanted: 0 while a prompt is being computed, and from its last
    /// token on `1 + num_drafts`, what follows the last known token and what follows each draft.
    pub num_outputs: usize,
    /// Prompt tokens that came from the prefix cache when the request first ran.
    pub num_cached_tokens: usize,
    /// Why no more came from it; `None` if all tokens but one did, or if the request began as a fork of a running one.
    pub miss: Option<MissReason>,
    /// Where the states that it begins with lie, to be copied to its own before the step runs; `None` if it goes on with its own,
    /// or begins at position 0.
    pub snapshot: Option<SnapshotSlot>,
}

impl ScheduledRequest {
    /// Tokens of the row that are known: all but the drafts.
    pub fn num_known_tokens(&self) -> usize {
        self.num_scheduled_tokens - self.num_drafts
    }

    /// Whether they are a part of a prompt, or of what a preempted request computes again.
    pub fn is_chunk(&self) -> bool {
        self.num_known_tokens() > 1 + self.num_again
    }
}

/// One request's blocks were taken for another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preemption {
    /// The victim.
    pub request_id: RequestId,
    /// Who found no block, or no seat: a request ahead of the victim, or the victim itself, giving way to the others.
    pub in_need: RequestId,
    /// Computed tokens of the victim in blocks that nobody else holds: what it costs unless the prefix cache still has
    /// some of them when the victim is back.
    pub num_lost_tokens: usize,
}

/// The batch of one step, and what else happened while it was put together. Reusable: see
/// [`crate::Scheduler::schedule_into`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SchedulerOutput {
    /// Counts steps with rows, from 1; 0 when there are no rows.
    pub step_id: u64,
    /// The batch: those that ran already, in order of rank, each behind those admitted before it, then others admitted, in
    /// the order of their admission.
    pub rows: Vec<ScheduledRequest>,
    /// Sum of the rows' `num_scheduled_tokens`.
    pub total_num_scheduled_tokens: usize,
    /// The drafts of all rows, one row's behind the other's.
    pub drafts: Vec<u32>,
    /// Blocks to copy, `(source, destination)`, all before the step writes anything. No destination is a source, so
    /// their order does not matter.
    pub copies: Vec<(BlockId, BlockId)>,
    /// Blocks to fetch from the tier before anything else of the step, and before it is reported by
    /// [`crate::Scheduler::swapped_in`]. The request is in no row of this step.
    pub swap_in: Option<SwapIn>,
    /// Requests whose blocks were taken; they wait to be computed anew.
    pub preempted: Vec<Preemption>,
    /// Requests that can go no further. They have left the scheduler; what they generated stands.
    pub finished: Vec<(RequestId, FinishReason)>,
    /// The request that stood in the way of all, if ever one does: it is among `finished`.
    pub stuck: Option<StuckReport>,
}

/// Blocks with which a request begins once they are fetched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SwapIn {
    /// The request.
    pub request_id: RequestId,
    /// In order of their place in the prefix.
    pub blocks: Vec<TierBlock>,
}

impl SchedulerOutput {
    pub(crate) fn clear(&mut self) {
        self.step_id = 0;
        self.rows.clear();
        self.total_num_scheduled_tokens = 0;
        self.drafts.clear();
        self.copies.clear();
        self.swap_in = None;
        self.preempted.clear();
        self.finished.clear();
        self.stuck = None;
    }
}

/// Figures of the pool and the queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KvCacheStats {
    /// Usable blocks.
    pub blocks_total: usize,
    /// Held by a live request, or by a kept one.
    pub blocks_used: usize,
    /// Free but findable by the prefix cache.
    pub blocks_cached: usize,
    /// Free, cached ones included.
    pub blocks_free: usize,
    /// Held by more than one.
    pub blocks_shared: usize,
    /// Blocks that sharing saves: for each shared one, its holders but one.
    pub blocks_saved: usize,
    /// Tokens a block.
    pub block_size: usize,
    /// Tokens the pool holds when each has KV in every layer.
    pub tokens_total: usize,
    /// Prompt tokens looked up in the prefix cache, each request once.
    pub prefix_queried_tokens: u64,
    /// Of those, how many were not computed again.
    pub prefix_hit_tokens: u64,
    /// Prompt tokens that were computed though another request might have, by [`MissReason`] as a number. Those whose
    /// reason is `Disabled` or `Skipped` were not looked up. The last token of a prompt that is all in the cache is a
    /// query and neither hit nor miss: its logits are wanted.
    pub prefix_missed_tokens: [u64; MissReason::COUNT],
    /// Tokens looked up again when preempted requests came back.
    pub resumed_queried_tokens: u64,
    /// Of those, how many were not computed again.
    pub resumed_hit_tokens: u64,
    /// Snapshots of states that can be kept; 0 for models without.
    pub state_snapshots_total: usize,
    /// Those that can be found.
    pub state_snapshots_used: usize,
    /// Snapshots that were made.
    pub state_snapshots_taken: u64,
    /// Those that had to go for others; the rest went with their blocks, or is there.
    pub state_snapshots_evicted: u64,
    /// Times that a request's blocks were taken.
    pub preemptions: u64,
    /// Tokens computed again because of that, those apart that came from the prefix cache: the waste.
    pub recomputed_tokens: u64,
    /// Requests that ended because their deadline had passed.
    pub deadlines_missed: u64,
    /// Nothing is scheduled until a resume.
    pub paused: bool,
    /// No requests are accepted until a resume.
    pub draining: bool,
    /// Requests in the batch.
    pub requests_running: usize,
    /// Requests that wait, preempted ones included.
    pub requests_waiting: usize,
    /// Requests that are over but kept to be forked.
    pub requests_kept: usize,
    /// Blocks that those hold as long as nobody needs them; a block that several hold counts for each.
    pub blocks_kept: usize,
    /// Slots of the blocks that requests hold: a token takes one in each KV group.
    pub slots_held: usize,
    /// Of those, how many have KV.
    pub slots_live: usize,
    /// Steps that were committed.
    pub steps: u64,
    /// Most blocks held while a step was computed.
    pub peak_blocks_used: usize,
    /// Sum over these steps of the slots held at their ends, before any request ended.
    pub slots_held_sum: u64,
    /// The same of the slots that had KV.
    pub slots_live_sum: u64,
    /// Most requests in one of these steps.
    pub peak_running: usize,
    /// The same up to the first preemption.
    pub peak_running_before_preemption: usize,
    /// The tier outside the pool.
    pub tier: TierStats,
    /// Tokens that were computed before they were known.
    pub drafts: DraftStats,
    /// Full blocks that can be found, as [`crate::KvEvent`] tells of them; 0 where nobody is told.
    pub kv_event_blocks: usize,
}

/// Drafts of all steps so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DraftStats {
    /// Rows with drafts.
    pub rows: u64,
    /// Their drafts.
    pub tokens: u64,
    /// Of these, the right ones.
    pub accepted: u64,
    /// The right ones by their place behind the last known token; those further behind count with the last.
    pub accepted_at: [u64; DraftStats::PLACES],
}

impl DraftStats {
    /// Places that are told apart.
    pub const PLACES: usize = 16;

    pub(crate) fn count(&mut self, num_drafts: usize, num_accepted: usize) {
        self.rows += u64::from(num_drafts > 0);
        self.tokens += num_drafts as u64;
        self.accepted += num_accepted as u64;
        for place in 0..num_accepted {
            self.accepted_at[place.min(Self::PLACES - 1)] += 1;
        }
    }
}

/// What a block is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockUse {
    /// Nothing, and nothing is to be found in it.
    Free,
    /// Free, and findable by the prefix cache.
    Cached,
    /// Held by the request with this index in [`PoolSnapshot::requests`], and by no other.
    Held(u32),
    /// Held by several.
    Shared,
}

/// A request, as [`PoolSnapshot`] shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestView {
    /// The request.
    pub id: RequestId,
    /// Where it is in its life.
    pub status: RequestStatus,
    /// Prompt and output.
    pub num_tokens: usize,
    /// Of these, the prompt.
    pub num_prompt_tokens: usize,
    /// Of the prompt, tokens that came from the prefix cache.
    pub num_cached_tokens: usize,
    /// Tokens whose KV is written.
    pub num_computed_tokens: usize,
    /// Blocks that it holds, over all groups.
    pub num_blocks: usize,
    /// Times that its blocks were taken.
    pub preemptions: u32,
}

/// The pool and the requests at one moment.
#[derive(Debug, Clone)]
pub struct PoolSnapshot {
    /// The figures of the same moment.
    pub stats: KvCacheStats,
    /// By block, the null block left out.
    pub blocks: Vec<BlockUse>,
    /// Those that run, in order of rank, then those that wait, then those that are kept.
    pub requests: Vec<RequestView>,
}

/// A request that stood in the way of all, and why it could not go on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StuckReport {
    /// The blocker: the first that runs, else the first that waits. It has been ended.
    pub request_id: RequestId,
    /// What it was doing.
    pub status: RequestStatus,
    /// Its tokens, and how many of them were computed.
    pub num_tokens: usize,
    /// See `num_tokens`.
    pub num_computed_tokens: usize,
    /// Blocks it still needed for its known tokens.
    pub needed_blocks: usize,
    /// Blocks that were free.
    pub free_blocks: usize,
    /// Blocks that would have had to be free before anyone is admitted, after a preemption.
    pub admission_closed_below: usize,
    /// Who held blocks, and how many.
    pub holders: Vec<(RequestId, usize)>,
}

impl fmt::Display for StuckReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { request_id, status, num_tokens, num_computed_tokens, needed_blocks, free_blocks, .. } = self;
        write!(
            f,
            "request {} ({status:?}, {num_computed_tokens} of {num_tokens} tokens computed) cannot be scheduled: it needs \
             {needed_blocks} blocks and {free_blocks} are free, {} are asked for before anyone is admitted; held:",
            request_id.0, self.admission_closed_below
        )?;
        if self.holders.is_empty() {
            return f.write_str(" none");
        }
        self.holders.iter().try_for_each(|(id, blocks)| write!(f, " {blocks} by request {}", id.0))
    }
}

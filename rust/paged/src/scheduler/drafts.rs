//! Tokens that are computed before they are known: drafts, verified by the step that computes them.
//!
//! A draft takes only what a step leaves: of its tokens, its chunk and its free blocks, once everybody has been served. Nobody
//! is preempted or kept waiting for one, and no kept request gives up blocks. When the step is committed the request holds no
//! more than its accepted tokens need, so that later steps find things as if the others had never been proposed.
//!
//! States of recurrent layers are of the last computed token only. Where a draft is wrong, a request with states goes back to
//! where the step began, and computes the tokens that it got once more, with the drafts behind them.

use super::{RequestIndex, Scheduler};
use crate::error::UpdateError;
use crate::ids::RequestId;
use crate::output::SchedulerOutput;

/// Known tokens of a request with states, at most, behind which drafts are computed: all of them may be computed again.
pub const MOST_KNOWN: usize = 8;

impl Scheduler {
    /// Proposes what may follow the known tokens of a request, in place of what was proposed before; `false` if there is no such
    /// request.
    ///
    /// The step that computes its last known token computes as many of the drafts as there is room for, beside everything that
    /// the step computes anyway, within the request's `max_tokens`, the context length and
    /// [`super::SchedulerConfig::max_chunk_len`]. They are forgotten when the request gets its next token.
    pub fn set_drafts(&mut self, request_id: RequestId, drafts: &[u32]) -> bool {
        let Some(&index) = self.indices.get(&request_id) else { return false };
        let Some(request) = self.requests[index].as_mut() else { return false };
        request.drafts.clear();
        request.drafts.extend_from_slice(drafts);
        true
    }

    /// Adds drafts to the rows of the step being put together that reach the end of what is known.
    pub(super) fn add_drafts(&mut self, output: &mut SchedulerOutput, budget: &mut usize) {
        let mut places = if self.config.has_states { self.config.num_spare_states } else { usize::MAX };
        for at in 0..self.drafted.len() {
            let (row, index) = self.drafted[at];
            if places > 0 && self.add_drafts_to(row, index, output, budget) {
                places -= 1;
            }
        }
        self.drafted.clear();
    }

    /// `false` if there is room for none.
    fn add_drafts_to(&mut self, row: usize, index: RequestIndex, output: &mut SchedulerOutput, budget: &mut usize) -> bool {
        let (Some(request), row) = (self.requests[index].as_mut(), &mut output.rows[row]) else { return false };
        let goes_back = row.num_computed_tokens > 0 && row.num_scheduled_tokens <= MOST_KNOWN;
        if row.num_outputs == 0 || (self.config.has_states && !goes_back) {
            return false;
        }
        let from = request.num_tokens();
        let chunk_left = self.config.max_chunk_len.map_or(usize::MAX, |most| most - row.num_scheduled_tokens);
        // The token behind the last draft is one more.
        let tokens_left = (request.max_num_tokens - from).saturating_sub(1);
        let wanted = request.drafts.len().min(*budget).min(chunk_left).min(tokens_left);
        let num_drafts = if self.config.reserve_full_context {
            wanted
        } else {
            self.manager.num_tokens_that_fit(&request.blocks, from, wanted)
        };
        if num_drafts == 0
            || self.manager.allocate_slots(&mut request.blocks, from, from + num_drafts, &mut output.copies).is_err()
        {
            return false;
        }
        *budget -= num_drafts;
        row.num_scheduled_tokens += num_drafts;
        row.num_drafts = num_drafts;
        row.num_outputs += num_drafts;
        output.drafts.extend_from_slice(&request.drafts[..num_drafts]);
        true
    }

    /// Whether `sampled` is what a step can have come to.
    pub(super) fn check_tokens(&self, output: &SchedulerOutput, sampled: &[(RequestId, &[u32])]) -> Result<(), UpdateError> {
        let mut sampled = sampled.iter().peekable();
        let mut drafts = output.drafts.as_slice();
        for row in output.rows.iter().filter(|row| row.num_outputs > 0) {
            let (request_id, num_outputs) = (row.request_id, row.num_outputs);
            let (own, others) = drafts.split_at(row.num_drafts);
            drafts = others;
            let Some((_, tokens)) = sampled.next_if(|(id, _)| *id == request_id) else {
                if self.is_running(request_id) {
                    return Err(UpdateError::MissingSample { request_id });
                }
                continue;
            };
            if tokens.len() > num_outputs {
                return Err(UpdateError::TooManyTokens { request_id, given: tokens.len(), num_outputs });
            }
            let accepted = &tokens[..tokens.len().saturating_sub(1)];
            if let Some((&token, &draft)) = accepted.iter().zip(own).find(|(token, draft)| token != draft) {
                return Err(UpdateError::NotTheDraft { request_id, token, draft });
            }
        }
        sampled.next().map_or(Ok(()), |&(request_id, _)| Err(UpdateError::UnexpectedSample { request_id }))
    }
}

//! Tokens that a step computes together: the rows of an image that see each other.

use std::ops::Range;

use super::{RequestIndex, Scheduler};
use crate::request::RequestStatus;

/// The span that `position` is within, behind its first token.
pub(super) fn cut_span(spans: &[Range<usize>], position: usize) -> Option<&Range<usize>> {
    let at = spans.partition_point(|span| span.end <= position);
    spans.get(at).filter(|span| span.start < position)
}

/// The last place up to `end` that is within no span.
pub(super) fn before_span(spans: &[Range<usize>], end: usize) -> usize {
    cut_span(spans, end).map_or(end, |span| span.start)
}

impl Scheduler {
    /// Tokens that the step being put together has room for, whatever its limits on prompts: all but those that answers still
    /// need.
    fn room_for_spans(&self, budget: usize) -> usize {
        let used = self.step_budget - budget + self.beyond_budget;
        self.config.max_num_batched_tokens.saturating_sub(used + self.unserved_answers)
    }

    /// Whether the step has room for the span that a request's next token begins, if it does; for any of one that waits, which
    /// may find what is before it in the prefix cache.
    pub(super) fn has_room_for_span(&self, index: RequestIndex, budget: usize) -> bool {
        let request = self.request(index);
        let is_next =
            |span: &&Range<usize>| request.status != RequestStatus::Running || span.start == request.num_computed_tokens;
        let longest = request.spans.iter().filter(is_next).map(Range::len).max();
        longest.is_none_or(|longest| longest <= self.room_for_spans(budget))
    }

    /// How many of `wanted` tokens a request's row gets, so that it ends within no span: up to the one that it would cut, or,
    /// where it begins with that, as many more as complete it.
    pub(super) fn with_whole_spans(&self, index: RequestIndex, wanted: usize) -> usize {
        let request = self.request(index);
        let first = request.num_computed_tokens;
        match cut_span(&request.spans, first + wanted) {
            None => wanted,
            Some(span) if span.start > first => span.start - first,
            Some(span) => span.end - first,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_within_a_span_behind_its_first_token_and_before_its_end() {
        let spans = [3..7, 7..9];
        let within = |position| cut_span(&spans, position).cloned();
        assert_eq!([2, 3, 4, 6, 7, 8, 9].map(within), [None, None, Some(3..7), Some(3..7), None, Some(7..9), None]);
        assert_eq!([3, 5, 7, 8, 9].map(|end| before_span(&spans, end)), [3, 3, 7, 7, 9]);
    }
}

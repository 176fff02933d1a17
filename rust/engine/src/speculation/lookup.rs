//! Drafts out of what was said before.

use super::Proposer;

/// Proposes what followed when the last tokens were said before, in the prompt or in the answer (Saxena 2023, "Prompt Lookup
/// Decoding"). It pays where answers repeat their prompts: edits of code, quotes, JSON made of JSON.
///
/// Of all places in the last 16,384 tokens that end as the request does, the one with the longest end in common counts, and of
/// these the last.
#[derive(Clone, Copy, Debug, Default)]
pub struct PromptLookup;

/// A single token is in common with too many places.
const MIN_MATCH: usize = 2;
/// What is longer is no surer, and takes longer to compare.
const MAX_MATCH: usize = 24;
/// So many of the last tokens are searched, which takes some microseconds.
const WINDOW: usize = 1 << 14;

impl Proposer for PromptLookup {
    fn propose(&self, token_ids: &[u32], most: usize, drafts: &mut Vec<u32>) -> usize {
        let token_ids = &token_ids[token_ids.len().saturating_sub(WINDOW)..];
        let Some((&last, before)) = token_ids.split_last() else { return 0 };
        let (mut longest, mut source) = (MIN_MATCH - 1, None);
        // `end` is behind the place.
        for end in (1..=before.len()).rev().filter(|end| before[end - 1] == last) {
            let common = token_ids[..end].iter().rev().zip(token_ids.iter().rev()).take(MAX_MATCH);
            let length = common.take_while(|(there, here)| there == here).count();
            if length > longest {
                (longest, source) = (length, Some(end));
                if length == MAX_MATCH {
                    break;
                }
            }
        }
        let Some(source) = source else { return 0 };
        for at in source..source + most {
            // What repeats itself goes on with its own drafts.
            let token = token_ids.get(at).or_else(|| drafts.get(at - token_ids.len())).copied();
            drafts.extend(token);
        }
        longest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drafts(token_ids: &[u32], most: usize) -> (usize, Vec<u32>) {
        let mut drafts = Vec::new();
        (PromptLookup.propose(token_ids, most, &mut drafts), drafts)
    }

    #[test]
    fn the_longest_end_in_common_goes_before_the_last_one() {
        // 7 8 9 was followed by 1, and then 8 9 by 2.
        assert_eq!(drafts(&[7, 8, 9, 1, 5, 8, 9, 2, 7, 8, 9], 2), (3, vec![1, 5]));
        assert_eq!(drafts(&[6, 8, 9, 1, 5, 8, 9, 2, 7, 8, 9], 2), (2, vec![2, 7]));
    }

    #[test]
    fn nothing_follows_from_one_token_or_from_none() {
        assert_eq!(drafts(&[], 4), (0, vec![]));
        assert_eq!(drafts(&[3, 3], 4), (0, vec![]));
        assert_eq!(drafts(&[1, 3, 5, 2, 3], 4), (0, vec![]));
        assert_eq!(drafts(&[1, 2, 3, 1, 2], 0), (2, vec![]));
    }

    #[test]
    fn what_repeats_itself_goes_on() {
        assert_eq!(drafts(&[4, 5, 4, 5, 4, 5], 5), (4, vec![4, 5, 4, 5, 4]));
        assert_eq!(drafts(&[9, 9, 9], 3), (2, vec![9, 9, 9]));
    }

    #[test]
    fn drafts_are_as_a_plain_search_finds_them() {
        let mut state = 1u64;
        let mut draw = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        for _ in 0..3000 {
            let (len, vocabulary) = (draw(40) as usize, 1 + draw(4));
            let token_ids: Vec<u32> = (0..len).map(|_| draw(vocabulary) as u32).collect();
            let mut expected = (0, vec![]);
            for n in (2..=24.min(len.saturating_sub(1))).rev() {
                let end = &token_ids[len - n..];
                if let Some(at) = (0..len - n).rev().find(|at| &token_ids[*at..at + n] == end) {
                    let cycle = &token_ids[at + n..];
                    expected = (n, (0..6).map(|i| cycle[i % cycle.len()]).collect());
                    break;
                }
            }
            assert_eq!(drafts(&token_ids, 6), expected, "{token_ids:?}");
        }
    }
}

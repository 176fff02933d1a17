//! Texts that must not come.

use std::sync::Arc;

use super::penalties::Changes;
use crate::{EngineError, Tokenizer};

/// What a logit becomes so that its token has the probability 0; the row stays finite.
const NEVER: f32 = -1e30;

/// Sequences of tokens that are no part of the output.
#[derive(Clone, Debug)]
pub(super) struct BadWords {
    /// Each with its tokens.
    words: Arc<[Vec<u32>]>,
    /// The output's last tokens, as many as matter.
    tail: Vec<u32>,
    longest: usize,
}

impl BadWords {
    /// `None` when there are none.
    pub fn new(words: Vec<Vec<u32>>) -> Option<Self> {
        let longest = words.iter().map(Vec::len).max()?;
        Some(Self { words: words.into(), tail: Vec::new(), longest })
    }

    pub fn observe(&mut self, token: u32) {
        if self.tail.len() + 1 >= self.longest && !self.tail.is_empty() {
            self.tail.remove(0);
        }
        self.tail.push(token);
    }

    /// Forbids the last token of each word whose others have just come.
    pub fn apply(&self, logits: &mut [f32], changes: &mut Changes) {
        for (last, before) in self.words.iter().filter_map(|word| word.split_last()) {
            if self.tail.ends_with(before) {
                changes.set(logits, *last, |_| NEVER);
            }
        }
    }
}

/// The tokens of each word, as a text may spell it: as it is, and behind a space.
///
/// # Errors
/// [`EngineError::InvalidArgument`] for a word that is empty.
pub fn bad_word_ids(tokenizer: &Tokenizer, words: &[String]) -> Result<Vec<Vec<u32>>, EngineError> {
    let mut all = Vec::new();
    for (index, word) in words.iter().enumerate() {
        if word.trim_start().is_empty() {
            return Err(EngineError::InvalidArgument(format!("bad_words[{index}] is blank; give a text of a character or more")));
        }
        for spelled in [word.clone(), format!(" {}", word.trim_start())] {
            let ids = tokenizer.encode(&spelled, false)?;
            if !ids.is_empty() && !all.contains(&ids) {
                all.push(ids);
            }
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_token_of_a_word_is_forbidden_behind_the_others() {
        let mut words = BadWords::new(vec![vec![1, 2, 3], vec![5]]).unwrap();
        let mut forbidden = |token: Option<u32>| {
            if let Some(token) = token {
                words.observe(token);
            }
            let mut logits = [0.0_f32; 8];
            words.apply(&mut logits, &mut Changes::default());
            (0..8).filter(|id| logits[*id] < 0.0).collect::<Vec<_>>()
        };
        assert_eq!(forbidden(None), [5]);
        assert_eq!(forbidden(Some(1)), [5]);
        assert_eq!(forbidden(Some(2)), [3, 5]);
        assert_eq!(forbidden(Some(2)), [5]);
        for token in [7, 1] {
            assert_eq!(forbidden(Some(token)), [5]);
        }
        assert_eq!(forbidden(Some(2)), [3, 5]);
        assert!(BadWords::new(Vec::new()).is_none());
    }
}

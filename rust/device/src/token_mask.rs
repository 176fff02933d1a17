//! Which tokens may be sampled.

use crate::DeviceError;

/// Bits of a word.
const BITS: usize = u32::BITS as usize;

/// The tokens that may be sampled, as a bitset: bit `t % 32` of word `t / 32` is 1 where token `t` may be, the layout of
/// llguidance and of xgrammar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenMask<'a> {
    /// Just as many as there are tokens for.
    words: &'a [u32],
    vocab_size: usize,
}

impl<'a> TokenMask<'a> {
    /// For logits of `vocab_size` tokens. Bits beyond them mean nothing.
    ///
    /// # Errors
    /// [`DeviceError::Shape`] when there are fewer bits than tokens.
    pub fn new(words: &'a [u32], vocab_size: usize) -> Result<Self, DeviceError> {
        let num_words = Self::num_words(vocab_size);
        let words = words.get(..num_words).ok_or_else(|| {
            let len = words.len();
            DeviceError::Shape(format!("a mask of {len} words; {vocab_size} tokens need {num_words} of 32 bits"))
        })?;
        Ok(Self { words, vocab_size })
    }

    /// Words of a mask for so many tokens.
    pub const fn num_words(vocab_size: usize) -> usize {
        vocab_size.div_ceil(BITS)
    }

    /// Tokens that it tells about.
    pub fn vocab_size(self) -> usize {
        self.vocab_size
    }

    /// As they were given, `[num_words(vocab_size)]`.
    pub fn words(self) -> &'a [u32] {
        self.words
    }

    /// Word `index`, with zeros beyond the last token.
    pub fn word(self, index: usize) -> u32 {
        let num_tokens = self.vocab_size - index * BITS;
        self.words[index] & if num_tokens < BITS { (1 << num_tokens) - 1 } else { u32::MAX }
    }

    /// Whether the token may be sampled.
    pub fn allows(self, token: u32) -> bool {
        let token = token as usize;
        token < self.vocab_size && self.words[token / BITS] >> (token % BITS) & 1 == 1
    }

    /// The same tokens, as a set of its own.
    pub fn to_set(self) -> TokenSet {
        TokenSet { words: self.words.to_vec(), vocab_size: self.vocab_size }
    }

    /// Whether any token may be.
    pub fn allows_any(self) -> bool {
        (0..self.words.len()).any(|index| self.word(index) != 0)
    }

    /// Replaces `allowed` by the logits of the tokens that may be sampled, by id; `logits` is `[vocab_size]`.
    ///
    /// # Panics
    /// When `logits` has another length.
    pub fn gather(self, logits: &[f32], allowed: &mut Vec<f32>) {
        assert_eq!(logits.len(), self.vocab_size, "logits of a mask");
        allowed.clear();
        for (index, logits) in logits.chunks(BITS).enumerate() {
            match self.word(index) {
                u32::MAX => allowed.extend_from_slice(logits),
                word => allowed.extend(ones(word).map(|bit| logits[bit as usize])),
            }
        }
    }

    /// The token that has the place `rank` among those that may be sampled: [`Self::gather`] puts its logit there. `None` behind
    /// the last.
    pub fn nth_allowed(self, rank: usize) -> Option<u32> {
        let mut left = rank as u32;
        for index in 0..self.words.len() {
            let word = self.word(index);
            if left < word.count_ones() {
                return ones(word).nth(left as usize).map(|bit| (index * BITS) as u32 + bit);
            }
            left -= word.count_ones();
        }
        None
    }
}

/// Tokens of a vocabulary; see [`TokenMask`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenSet {
    words: Vec<u32>,
    vocab_size: usize,
}

impl TokenSet {
    /// Those of `tokens` that are below `vocab_size`.
    pub fn new(tokens: impl IntoIterator<Item = u32>, vocab_size: usize) -> Self {
        let mut words = vec![0; TokenMask::num_words(vocab_size)];
        for token in tokens.into_iter().map(|token| token as usize).filter(|token| *token < vocab_size) {
            words[token / BITS] |= 1 << (token % BITS);
        }
        Self { words, vocab_size }
    }

    /// The mask that allows these tokens alone.
    pub fn mask(&self) -> TokenMask<'_> {
        TokenMask { words: &self.words, vocab_size: self.vocab_size }
    }
}

/// The positions of ones.
fn ones(mut word: u32) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let first = (word != 0).then(|| word.trailing_zeros());
        word &= word.wrapping_sub(1);
        first
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_mask_allows_the_tokens_of_its_ones(
            words in proptest::collection::vec(prop_oneof![Just(0), Just(u32::MAX), any::<u32>()], 1..9),
            missing in 0_usize..32,
        ) {
            let vocab_size = words.len() * BITS - missing;
            let mask = TokenMask::new(&words, vocab_size).unwrap();
            let bits = words.iter().flat_map(|word| (0..BITS).map(move |bit| word >> bit & 1 == 1)).take(vocab_size);
            let tokens: Vec<u32> = (0..).zip(bits).filter_map(|(token, is_one)| is_one.then_some(token)).collect();
            let ids = 0..words.len() as u32 * 32 + 40;
            prop_assert_eq!(ids.filter(|token| mask.allows(*token)).collect::<Vec<_>>(), &tokens[..]);
            prop_assert_eq!(mask.allows_any(), !tokens.is_empty());
            let logits: Vec<f32> = (0..vocab_size).map(|token| token as f32).collect();
            let mut allowed = vec![7.0];
            mask.gather(&logits, &mut allowed);
            prop_assert_eq!(allowed, tokens.iter().map(|token| *token as f32).collect::<Vec<_>>());
            let in_order: Vec<u32> = (0..=tokens.len()).map_while(|rank| mask.nth_allowed(rank)).collect();
            prop_assert_eq!(&in_order, &tokens);
            let set = TokenSet::new(tokens.into_iter().chain([vocab_size as u32]), vocab_size);
            prop_assert!((0..words.len()).all(|index| set.mask().word(index) == mask.word(index)));
        }
    }

    #[test]
    fn words_beyond_the_vocabulary_are_ignored_and_missing_ones_refused() {
        assert_eq!(TokenMask::new(&[1, 2, 3], 33).unwrap().words(), [1, 2]);
        let error = TokenMask::new(&[1, 2, 3], 97).unwrap_err().to_string();
        assert!(error.contains("3 words") && error.contains("97 tokens") && error.contains("need 4"), "{error}");
    }
}

//! The tokens of a model, as llguidance knows them.

use llguidance::toktrie::{INVALID_TOKEN, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use std::sync::Arc;

use crate::Tokenizer;

/// A trie has no room for longer tokens; those that there are are runs of one character.
const MAX_TOKEN_BYTES: usize = 1000;

struct Vocabulary(TokTrie);

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.0
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.0.greedy_tokenize(bytes)
    }

    /// Any tokens that spell what the grammar allows may come: their probabilities are the model's.
    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}

/// Of a model with logits for `vocab_size` tokens. Special tokens are apart from the text that spells them; ids without a token
/// never come.
pub(super) fn token_env(tokenizer: &Tokenizer, vocab_size: usize) -> TokEnv {
    let marker = TokTrie::SPECIAL_TOKEN_MARKER;
    let word = |id: u32| {
        let bytes = tokenizer.token_bytes(id);
        if tokenizer.is_special(id) {
            return [&[marker], bytes].concat();
        }
        if bytes.len() > MAX_TOKEN_BYTES || bytes.first() == Some(&marker) { Vec::new() } else { bytes.to_vec() }
    };
    let words: Vec<Vec<u8>> = (0..vocab_size as u32).map(word).collect();
    let eos: Vec<u32> = tokenizer.eos_ids().iter().copied().filter(|id| (*id as usize) < vocab_size).collect();
    let trie = TokTrie::from(&TokRxInfo::new(vocab_size as u32, eos.first().copied().unwrap_or(INVALID_TOKEN)), &words);
    Arc::new(Vocabulary(if eos.is_empty() { trie } else { trie.with_eos_tokens(&eos) }))
}

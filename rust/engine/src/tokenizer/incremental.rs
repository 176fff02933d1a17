//! Text from tokens, one at a time.

use std::sync::Arc;

use super::Tokenizer;

/// Turns token ids into text as they come. What it gives out is final: bytes of a character whose rest may still come are kept
/// back, so the parts put together are the same as [`Tokenizer::decode`] of all tokens. Memory and work a token are constant.
#[derive(Clone, Debug)]
pub struct IncrementalDecoder {
    /// The start of a character, at most 3 bytes once a token is done.
    pending: Vec<u8>,
    at_start: bool,
    skip_special_tokens: bool,
    /// Special tokens that are text all the same, with that text.
    shown: Arc<[(u32, String)]>,
}

impl IncrementalDecoder {
    /// For a text that stands alone: the leading space that `SentencePiece` models put before it is dropped.
    pub fn new(skip_special_tokens: bool) -> Self {
        Self { pending: Vec::new(), at_start: true, skip_special_tokens, shown: Arc::default() }
    }

    /// For a text that continues another: nothing is dropped.
    pub fn continuing(skip_special_tokens: bool) -> Self {
        Self { at_start: false, ..Self::new(skip_special_tokens) }
    }

    /// The same, for which these special tokens are text.
    #[must_use]
    pub(crate) fn showing(mut self, shown: Arc<[(u32, String)]>) -> Self {
        self.shown = shown;
        self
    }

    /// Appends to `text` what this token makes final. Ids without a token add nothing.
    pub fn push(&mut self, tokenizer: &Tokenizer, token_id: u32, text: &mut String) {
        if let Some(at) = self.shown.iter().position(|(id, _)| *id == token_id) {
            self.finish(text);
            return text.push_str(&self.shown[at].1);
        }
        if self.skip_special_tokens && tokenizer.is_special(token_id) {
            return;
        }
        let mut bytes = tokenizer.token_bytes(token_id);
        if self.at_start && !bytes.is_empty() {
            self.at_start = false;
            if tokenizer.strips_leading_space() {
                bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
            }
        }
        if self.pending.is_empty() {
            self.take(bytes, text);
        } else {
            let mut joined = std::mem::take(&mut self.pending);
            joined.extend_from_slice(bytes);
            self.take(&joined, text);
        }
    }

    /// Appends what is left: a character that stays incomplete becomes U+FFFD.
    pub fn finish(&mut self, text: &mut String) {
        if !self.pending.is_empty() {
            self.pending.clear();
            text.push(char::REPLACEMENT_CHARACTER);
        }
    }

    fn take(&mut self, mut bytes: &[u8], text: &mut String) {
        loop {
            let error = match std::str::from_utf8(bytes) {
                Ok(valid) => return text.push_str(valid),
                Err(error) => error,
            };
            let (valid, rest) = bytes.split_at(error.valid_up_to());
            text.push_str(std::str::from_utf8(valid).expect("checked just now"));
            match error.error_len() {
                Some(len) => {
                    text.push(char::REPLACEMENT_CHARACTER);
                    bytes = &rest[len..];
                }
                None => return self.pending.extend_from_slice(rest),
            }
        }
    }
}

//! Two texts as one list of token ids, as models that compare texts take them.

use serde_json::Value;
use tokenizers::{
    Encoding, PostProcessor, TruncationDirection, TruncationParams, TruncationStrategy, utils::truncation::truncate_encodings,
};

use super::{Encoder, Tokenizer};
use crate::{EngineError, error::caught_quietly};

/// What tokenizer_config.json says of texts that are too long, and of pairs.
#[derive(Debug)]
pub(super) struct PairRules {
    /// Models are given kinds of tokens.
    has_token_types: bool,
    /// Which end of a text is cut.
    direction: TruncationDirection,
}

impl Default for PairRules {
    fn default() -> Self {
        Self { has_token_types: true, direction: TruncationDirection::Right }
    }
}

impl PairRules {
    /// Of the file's keys `model_input_names` and `truncation_side`.
    pub fn of(config: &Value) -> Self {
        let names = config["model_input_names"].as_array();
        let is_left = config["truncation_side"] == "left";
        Self {
            has_token_types: names.is_none_or(|names| names.iter().any(|name| name == "token_type_ids")),
            direction: if is_left { TruncationDirection::Left } else { TruncationDirection::Right },
        }
    }
}

/// The first text of pairs, tokenized once for all of them.
pub(crate) struct FirstOfPair {
    encoding: Encoding,
    /// Its tokens, those that are not kept included.
    pub num_tokens: usize,
}

fn failed(why: impl std::fmt::Display) -> EngineError {
    EngineError::Tokenizer(format!("a pair of texts cannot be tokenized: {why}"))
}

impl Tokenizer {
    /// Whether texts that are too long lose their beginning.
    pub(crate) fn cuts_left(&self) -> bool {
        self.pairs.direction == TruncationDirection::Left
    }

    /// Whether tokens of a second text are of another kind than those of the first.
    pub(crate) fn tells_pairs_apart(&self) -> bool {
        let pair = self.encode_first("a", 1).and_then(|first| self.encode_pair(&first, "a", None));
        pair.is_ok_and(|(ids, second)| second < ids.len())
    }

    fn pipeline(&self) -> Result<&tokenizers::Tokenizer, EngineError> {
        match &self.encoder {
            Encoder::Pipeline { inner, bos: None, eos: None } => Ok(inner),
            _ => Err(failed("a tokenizer.json says how two texts become one, and this model has none")),
        }
    }

    fn encode_part(&self, text: &str) -> Result<Encoding, EngineError> {
        let inner = self.pipeline()?;
        let encode = || inner.encode_fast(text, false).map_err(|e| e.to_string());
        caught_quietly(encode).and_then(|encoding| encoding).map_err(failed)
    }

    /// The first text of pairs. No more than `most` of its tokens are kept.
    pub(crate) fn encode_first(&self, text: &str, most: usize) -> Result<FirstOfPair, EngineError> {
        let mut encoding = self.encode_part(text)?;
        let num_tokens = encoding.len();
        encoding.truncate(most, 0, self.pairs.direction);
        encoding.take_overflowing();
        Ok(FirstOfPair { encoding, num_tokens })
    }

    /// Token ids of two texts, with special tokens as the tokenizer has them for a pair, and where those of the second kind begin
    /// (`token_type_ids`), the end if none are. With a limit the longer text is cut, token by token, until both fit.
    pub(crate) fn encode_pair(
        &self,
        first: &FirstOfPair,
        second: &str,
        limit: Option<usize>,
    ) -> Result<(Vec<u32>, usize), EngineError> {
        let inner = self.pipeline()?;
        let (mut first, mut second) = (first.encoding.clone(), self.encode_part(second)?);
        if let Some(limit) = limit {
            let num_added = inner.get_post_processor().map_or(0, |processor| processor.added_tokens(true));
            let max_length = limit.checked_sub(num_added).filter(|room| *room > 1).ok_or_else(|| {
                EngineError::InvalidArgument(format!(
                    "two texts are to be cut to {limit} tokens, and the tokenizer adds {num_added} to them: leave room for more"
                ))
            })?;
            let (strategy, direction) = (TruncationStrategy::LongestFirst, self.pairs.direction);
            let params = TruncationParams { max_length, strategy, direction, ..TruncationParams::default() };
            let (cut, other) = truncate_encodings(first, Some(second), &params).map_err(failed)?;
            (first, second) = (cut, other.unwrap_or_default());
        }
        let both = caught_quietly(|| inner.post_process(first, Some(second), true).map_err(|e| e.to_string()));
        let both = both.and_then(|both| both).map_err(failed)?;
        let types = both.get_type_ids();
        let second = types.iter().position(|kind| *kind != 0).filter(|_| self.pairs.has_token_types);
        Ok((both.get_ids().to_vec(), second.unwrap_or(types.len())))
    }
}

//! Tokens of a text that a grammar leaves no choice about.

use std::sync::{Arc, Mutex, PoisonError};

use llguidance::toktrie::TokTrie;
use rustc_hash::FxHashMap;

use super::Constraint;
use crate::{EngineError, Tokenizer, error::caught_quietly};

/// A forced text is looked at up to here.
const MAX_BYTES: usize = 1 << 10;
/// Texts whose tokens are kept.
const MAX_SPELLINGS: usize = 4096;
/// Characters that may come behind a forced text, in whose company it may have other tokens: one of each kind.
const BEHIND: &str = "ae1\" \n',:-.[]{}<>()/";

impl Constraint {
    /// What has to come next, in the tokens that the tokenizer writes it with, into `tokens`; `last` is the token before.
    ///
    /// Any tokens that spell the text may come, so these are likely and not certain, but where only one spells it. The tokens
    /// at its end that what follows may change are left out.
    pub fn forced(&mut self, last: Option<u32>, tokens: &mut Vec<u32>) -> Result<(), EngineError> {
        if self.has_ended() {
            return Ok(());
        }
        // What is forced is fixed then, and a mask does not know special tokens that are.
        let mut copy = self.may_have_specials.then(|| self.matcher.clone());
        let matcher = copy.as_mut().unwrap_or(&mut self.matcher);
        let mut bytes = caught_quietly(|| matcher.compute_ff_bytes()).map_err(EngineError::Internal)?;
        bytes.truncate(MAX_BYTES);
        let mut rest = &bytes[..];
        let mut last = last;
        while !rest.is_empty() {
            let marker = rest.iter().position(|byte| *byte == TokTrie::SPECIAL_TOKEN_MARKER).unwrap_or(rest.len());
            let (text, special) = rest.split_at(marker);
            // A character that is cut is not forced in whole.
            let text = text.utf8_chunks().next().map_or("", |chunk| chunk.valid());
            let known = tokens.len();
            self.spellings.spell(last, text, tokens);
            if special.is_empty() {
                self.leave_out_what_may_change(last, text, known, tokens)?;
                break;
            }
            let Some((id, behind)) = special_token(special) else { break };
            tokens.push(id);
            (last, rest) = (Some(id), behind);
        }
        Ok(())
    }

    /// Leaves out the last of the tokens behind `known`, which spell `text`, as far as they are others with something behind.
    fn leave_out_what_may_change(
        &mut self,
        last: Option<u32>,
        text: &str,
        known: usize,
        tokens: &mut Vec<u32>,
    ) -> Result<(), EngineError> {
        let (mut longer, mut spelled) = (String::with_capacity(text.len() + 1), Vec::new());
        for character in BEHIND.chars() {
            if tokens.len() == known {
                return Ok(());
            }
            spelled.clear();
            longer.clear();
            longer.push_str(text);
            longer.push(character);
            self.spellings.spell(last, &longer, &mut spelled);
            let num_same = tokens[known..].iter().zip(&spelled).take_while(|(own, other)| own == other).count();
            if known + num_same == tokens.len() {
                continue;
            }
            let matcher = &mut self.matcher;
            let whole = [&tokens[..known], &spelled].concat();
            let num_valid = caught_quietly(|| matcher.validate_tokens(&whole).map_err(|error| error.to_string()))
                .and_then(|result| result)
                .map_err(EngineError::Internal)?;
            if num_valid == whole.len() {
                tokens.truncate(known + num_same);
            }
        }
        Ok(())
    }
}

/// A text, and the token before it.
type Written = (Option<u32>, String);

/// How a tokenizer writes texts, those that were asked for before kept.
pub(super) struct Spellings {
    tokenizer: Arc<Tokenizer>,
    known: Mutex<FxHashMap<Written, Vec<u32>>>,
}

impl Spellings {
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Self { tokenizer, known: Mutex::default() }
    }

    /// Appends the tokens of a text behind a token; none where the tokenizer would write another text.
    fn spell(&self, last: Option<u32>, text: &str, tokens: &mut Vec<u32>) {
        if text.is_empty() {
            return;
        }
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= MAX_SPELLINGS {
            known.clear();
        }
        tokens.extend(known.entry((last, text.to_owned())).or_insert_with(|| self.encode(last, text)).iter());
    }

    fn encode(&self, last: Option<u32>, text: &str) -> Vec<u32> {
        let tokenizer = &self.tokenizer;
        let before = last.filter(|last| !tokenizer.is_special(*last)).map(|last| (last, tokenizer.token_bytes(last)));
        let is_spelled_by =
            |ids: &[u32]| ids.iter().flat_map(|id| tokenizer.token_bytes(*id)).eq(text.as_bytes()) && !ids.is_empty();
        if let Some((last, Ok(before))) = before.map(|(last, bytes)| (last, std::str::from_utf8(bytes)))
            && let Ok(ids) = tokenizer.encode_plain(&format!("{before}{text}"))
            && let [first, rest @ ..] = &ids[..]
            && *first == last
            && is_spelled_by(rest)
        {
            return rest.to_vec();
        }
        tokenizer.encode_plain(text).ok().filter(|ids| is_spelled_by(ids)).unwrap_or_default()
    }
}

/// The token that stands for itself at the beginning, and what is behind it.
fn special_token(bytes: &[u8]) -> Option<(u32, &[u8])> {
    let inner = bytes.strip_prefix(&[TokTrie::SPECIAL_TOKEN_MARKER, b'['])?;
    let end = inner.iter().position(|byte| *byte == b']')?;
    let id = std::str::from_utf8(&inner[..end]).ok()?.parse().ok()?;
    Some((id, &inner[end + 1..]))
}

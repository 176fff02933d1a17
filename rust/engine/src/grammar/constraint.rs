//! How far an answer has come in its grammar.

use std::sync::Arc;

use device::{TokenMask, TokenSet};
use llguidance::Matcher;

use super::{GrammarFault, forced::Spellings};
use crate::{EngineError, error::caught_quietly};

/// One choice's place in the grammar of its request.
pub struct Constraint {
    pub(super) matcher: Matcher,
    pub(super) spellings: Arc<Spellings>,
    /// Whether the grammar may ask for special tokens.
    pub(super) may_have_specials: bool,
    vocab_size: usize,
    /// The tokens that may come next; reused from token to token.
    mask: Vec<u32>,
    num_tokens: usize,
    /// Tokens after which nothing may come any more.
    ended_after: Option<usize>,
    fault: Option<GrammarFault>,
}

impl Constraint {
    pub(super) fn new(matcher: Matcher, spellings: &Arc<Spellings>, may_have_specials: bool, vocab_size: usize) -> Self {
        let spellings = Arc::clone(spellings);
        Self {
            matcher,
            spellings,
            may_have_specials,
            vocab_size,
            mask: Vec::new(),
            num_tokens: 0,
            ended_after: None,
            fault: None,
        }
    }

    /// Takes the token if it may come next, else false. Behind the end any may.
    pub fn take(&mut self, token_id: u32) -> Result<bool, EngineError> {
        if self.ended_after.is_some() {
            return Ok(true);
        }
        let is_taken = self.ask(|matcher| matcher.try_consume_tokens(&[token_id]).map_err(|error| error.to_string()))? == 1;
        if is_taken {
            self.count();
        }
        Ok(is_taken)
    }

    /// Takes a token that the mask allows.
    pub fn take_allowed(&mut self, token_id: u32) -> Result<(), EngineError> {
        if self.ended_after.is_some() {
            return Ok(());
        }
        self.ask(|matcher| matcher.consume_token(token_id).map_err(|error| error.to_string()))?;
        self.count();
        Ok(())
    }

    /// What the matcher says; its errors and panics are faults of the grammar.
    fn ask<T>(&mut self, question: impl FnOnce(&mut Matcher) -> Result<T, String>) -> Result<T, EngineError> {
        let matcher = &mut self.matcher;
        caught_quietly(|| question(matcher)).and_then(|answer| answer).map_err(|why| {
            let (fault, message) = fault(&why);
            self.fault = Some(fault);
            fault.error(message)
        })
    }

    /// What the grammar could not go on for.
    pub fn fault(&self) -> Option<GrammarFault> {
        self.fault
    }

    fn count(&mut self) {
        self.num_tokens += 1;
        if self.matcher.is_stopped() {
            self.ended_after = Some(self.num_tokens);
        }
    }

    /// The tokens that may come next, at least one; not behind the end.
    ///
    /// An [`EngineError::Grammar`] when there are none: no token of the model spells what the grammar wants, or it is too
    /// complex.
    pub fn mask(&mut self) -> Result<TokenMask<'_>, EngineError> {
        self.mask = self.ask(|matcher| matcher.compute_mask().map_err(|error| error.to_string()))?.into();
        Ok(TokenMask::new(&self.mask, self.vocab_size)?)
    }

    /// How many of `drafts` may come, one behind the other; none behind the end.
    pub fn num_allowed(&mut self, drafts: &[u32]) -> Result<usize, EngineError> {
        if self.ended_after.is_some() {
            return Ok(0);
        }
        self.ask(|matcher| matcher.validate_tokens(drafts).map_err(|error| error.to_string()))
    }

    /// The tokens that may come next, and behind each of `drafts` as far as these may come: at least one set, and one more than
    /// there are drafts at most. Not behind the end.
    ///
    /// The errors of [`Self::mask`], of the first.
    pub fn masks(&mut self, drafts: &[u32]) -> Result<Vec<TokenSet>, EngineError> {
        let first = self.mask()?.to_set();
        if drafts.first().is_none_or(|draft| !first.mask().allows(*draft)) {
            return Ok(vec![first]);
        }
        let mut masks = vec![first];
        let mut ahead = Self::new(self.matcher.clone(), &self.spellings, self.may_have_specials, self.vocab_size);
        for draft in drafts {
            // Where a mask fails, so does the draw of its token, should the drafts before it be right.
            match ahead.take(*draft) {
                Ok(true) if !ahead.has_ended() => match ahead.mask() {
                    Ok(mask) => masks.push(mask.to_set()),
                    Err(_) => break,
                },
                _ => break,
            }
        }
        Ok(masks)
    }

    /// Whether nothing may come behind so many tokens.
    pub fn has_ended_after(&self, num_tokens: usize) -> bool {
        self.ended_after.is_some_and(|end| num_tokens >= end)
    }

    /// Whether nothing may come any more.
    pub fn has_ended(&self) -> bool {
        self.ended_after.is_some()
    }
}

fn fault(why: &str) -> (GrammarFault, String) {
    match why.lines().next().unwrap_or_default() {
        "NoExtensionBias" => (GrammarFault::Syntax, "the grammar wants what no token of the model spells".into()),
        why => (GrammarFault::TooComplex, format!("the grammar is too complex to go on with: {why}")),
    }
}

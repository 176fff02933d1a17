//! Greedy tokens that the backend has found without logits, held to the grammars of their requests.

use std::ops::Range;

use device::{TokenMask, TokenSet};
use rustc_hash::FxHashMap;

use super::sampling::Wanted;
use crate::{
    EngineError,
    engine::output::ActiveRequest,
    error::caught,
    model_runner::{Greedy, ModelRunner},
};

/// Appends what the grammar of a choice leaves no choice about, behind its last token. As drafts these are drawn and checked as
/// any token, so none changes.
pub(super) fn add_forced(request: &ActiveRequest, choice: usize, last: Option<u32>, forced: &mut Vec<u32>) {
    // Should the grammar have failed, the draw of the next token tells why.
    if !matches!(caught(|| request.forced_tokens(choice, last, forced)), Ok(Ok(()))) {
        forced.clear();
    }
}

/// How many of these drafts of a choice its grammar allows.
pub(super) fn allowed_drafts(request: &ActiveRequest, choice: usize, drafts: &[u32]) -> usize {
    // Likewise.
    caught(|| request.num_allowed(choice, drafts)).ok().and_then(Result::ok).unwrap_or_default()
}

/// How many tokens of a request go on to it, and why it ends behind them, if it does.
#[derive(Clone, Debug)]
pub(super) struct Held {
    pub num_tokens: usize,
    pub failure: Option<String>,
}

/// A request whose tokens a grammar checks, one behind the other.
struct Check<'a> {
    /// Its place among those that want tokens.
    place: usize,
    request: &'a ActiveRequest,
    choices: Range<usize>,
    /// Its first row, among the rows whose tokens were found.
    first: usize,
    num_rows: usize,
    drafts: &'a [u32],
    held: Held,
    is_done: bool,
    /// The tokens that its next row may have, since the one that was found may not be.
    allowed: Option<TokenSet>,
}

impl Check<'_> {
    /// Takes tokens as long as the grammar allows them, and each is the draft that the next row was computed for.
    fn advance(&mut self, tokens: &[u32]) {
        while !self.is_done {
            let token = tokens[self.first + self.held.num_tokens];
            match caught(|| self.take(token)).and_then(|taken| taken.map_err(|error| error.to_string())) {
                Ok(None) => self.count(token),
                Ok(allowed) => {
                    self.allowed = allowed;
                    return;
                }
                Err(why) => self.fail(why),
            }
        }
    }

    /// All choices of a prompt's last row are at the beginning of the grammar, and greedy: what one may have, all may.
    fn take(&mut self, token: u32) -> Result<Option<TokenSet>, EngineError> {
        let mut choices = self.choices.clone();
        if self.allowed.take().is_some() {
            return choices.try_for_each(|choice| self.request.take_allowed(choice, token)).map(|()| None);
        }
        let refused = |choice| self.request.take(choice, token).transpose();
        choices.find_map(refused).transpose()
    }

    fn count(&mut self, token: u32) {
        let ahead = self.held.num_tokens;
        self.held.num_tokens += 1;
        self.is_done = self.held.num_tokens == self.num_rows
            || self.drafts.get(ahead) != Some(&token)
            || self.request.has_ended(self.choices.start);
    }

    fn fail(&mut self, why: String) {
        self.held.failure = Some(why);
        self.is_done = true;
    }

    /// Draws from logits, where the backend found no token.
    fn draw(&mut self, logits: &mut [f32]) -> Option<u32> {
        let ahead = self.held.num_tokens;
        self.allowed = None;
        let mut token = None;
        for choice in self.choices.clone() {
            let drawn = caught(|| self.request.sample(choice, ahead, logits));
            match drawn.and_then(|drawn| drawn.map_err(|error| error.to_string())) {
                Ok(drawn) => token = Some(drawn.token_id),
                Err(why) => {
                    self.fail(why);
                    return None;
                }
            }
        }
        token.inspect(|token| self.count(*token))
    }
}

/// Replaces the tokens that a grammar refuses by the likeliest that it allows; `rows` and `tokens` are those of all of `chunk`
/// that want tokens, in order. For each of them what goes on, `None` for all of a request without a grammar.
pub(super) fn hold_to_grammars<'a>(
    runner: &mut ModelRunner,
    requests: &FxHashMap<u64, ActiveRequest>,
    chunk: impl Iterator<Item = &'a Wanted>,
    drafts: &[u32],
    rows: &[u32],
    tokens: &mut [u32],
) -> Result<Vec<Option<Held>>, EngineError> {
    let (mut held, mut checks, mut first) = (Vec::new(), Vec::new(), 0);
    for (place, wanted) in chunk.enumerate() {
        held.push(None);
        let num_rows = wanted.rows.len();
        if let Some(request) = requests.get(&wanted.request_number).filter(|request| request.is_constrained()) {
            let (choices, drafts) = (wanted.choices.clone(), &drafts[wanted.drafts.clone()]);
            let begun = Held { num_tokens: 0, failure: None };
            let (is_done, allowed) = (false, None);
            checks.push(Check { place, request, choices, first, num_rows, drafts, held: begun, is_done, allowed });
        }
        first += num_rows;
    }
    let mut found = Vec::new();
    loop {
        for check in &mut checks {
            check.advance(tokens);
        }
        let mut again: Vec<&mut Check<'_>> = checks.iter_mut().filter(|check| check.allowed.is_some()).collect();
        if again.is_empty() {
            break;
        }
        let places: Vec<usize> = again.iter().map(|check| check.first + check.held.num_tokens).collect();
        let again_rows: Vec<u32> = places.iter().map(|place| rows[*place]).collect();
        let masks: Vec<Option<TokenMask<'_>>> = again.iter().map(|check| check.allowed.as_ref().map(TokenSet::mask)).collect();
        match runner.greedy_tokens(&again_rows, &masks, &mut found)? {
            Greedy::Tokens => places.iter().zip(&found).for_each(|(place, token)| tokens[*place] = *token),
            Greedy::Logits(logits) => {
                for (row, check) in again.iter_mut().enumerate() {
                    if let Some(token) = check.draw(logits.row_mut(row)) {
                        tokens[places[row]] = token;
                    }
                }
            }
        }
    }
    for check in checks {
        held[check.place] = Some(check.held);
    }
    Ok(held)
}

//! Speculative decoding: who proposes drafts, and how many of them a step computes.

mod costs;
mod lookup;
mod policy;
mod proposer;

use std::{fmt, sync::Arc, time::Duration};

use paged::{RequestId, Scheduler};

pub use lookup::PromptLookup;
pub use policy::Acceptance;
use policy::{Candidate, Policy};
use proposer::ByModel;
pub use proposer::Proposer;

use crate::error::caught;

/// Whether, and how, drafts are computed.
#[derive(Clone, Debug)]
pub struct Speculation {
    /// Who proposes them.
    pub proposer: Arc<dyn Proposer>,
    /// Which of them are computed.
    pub choice: DraftChoice,
    /// Of a request in a step at most, at least 1. Unless given, as many as a request can have outputs in a step, and
    /// [`DEFAULT_DRAFTS`] where all are computed.
    pub max_drafts: Option<usize>,
}

/// Drafts of a request in a step, unless it is said how many: more are seldom right that nobody has chosen.
pub const DEFAULT_DRAFTS: usize = 8;

/// Which of the proposed drafts are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftChoice {
    /// Those that make for most tokens a second, by what steps took so far and by how often a request's drafts were right; none
    /// beside prompts.
    Auto,
    /// All that there is room for.
    All,
}

impl Speculation {
    /// Prompt lookup where it pays.
    pub fn auto() -> Self {
        Self { proposer: Arc::new(PromptLookup), choice: DraftChoice::Auto, max_drafts: None }
    }

    /// Drafts of the engine's draft model ([`crate::EngineConfig::draft`]).
    pub fn by_model(choice: DraftChoice) -> Self {
        Self { proposer: Arc::new(ByModel), choice, max_drafts: Some(DEFAULT_DRAFTS) }
    }

    /// All drafts of a proposer.
    pub fn always(proposer: Arc<dyn Proposer>) -> Self {
        Self { proposer, choice: DraftChoice::All, max_drafts: None }
    }
}

/// So much speaks for what a grammar forces: nothing else may come, though it may be spelled by other tokens.
const FORCED: usize = 1 << 16;

/// What an engine thread keeps of one choice.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DraftHistory {
    acceptance: Acceptance,
    /// Tokens that spoke for the drafts of the current step.
    evidence: usize,
}

/// A choice that is being answered.
pub(crate) struct Answered {
    pub(crate) id: RequestId,
    pub(crate) history: DraftHistory,
    /// What its grammar leaves no choice about: drafts that go before a proposer's.
    pub(crate) forced: Vec<u32>,
}

/// Proposes the drafts of steps.
pub(crate) struct Speculator {
    /// `None`: only forced text is drafted.
    proposer: Option<Arc<dyn Proposer>>,
    forces: bool,
    /// `None`: all drafts are computed.
    policy: Option<Policy>,
    max_drafts: usize,
    max_forced: usize,
    vocab_size: usize,
    /// The drafts of a step, one request's behind the other's, and how many are each one's.
    drafts: Vec<u32>,
    lengths: Vec<usize>,
    one: Vec<u32>,
    widths: Vec<usize>,
}

impl Speculator {
    /// For a model; a request has up to `max_outputs` outputs in a step, and a step up to so many rows with drafts. `forces`:
    /// what grammars leave no choice about is drafted. `None` where there is nobody to propose anything.
    pub(crate) fn new(speculation: Option<&Speculation>, forces: bool, vocab_size: usize, max_outputs: usize) -> Option<Self> {
        if speculation.is_none() && !forces {
            return None;
        }
        let choice = speculation.map(|speculation| speculation.choice);
        let max_drafts = match speculation {
            Some(Speculation { max_drafts: Some(most), .. }) => *most,
            Some(Speculation { choice: DraftChoice::All, .. }) => DEFAULT_DRAFTS,
            _ => usize::MAX,
        };
        Some(Self {
            proposer: speculation.map(|speculation| Arc::clone(&speculation.proposer)),
            forces,
            policy: (choice != Some(DraftChoice::All)).then(|| Policy::new(max_outputs)),
            max_drafts: max_drafts.min(max_outputs - 1),
            max_forced: max_outputs - 1,
            vocab_size,
            drafts: Vec::new(),
            lengths: Vec::new(),
            one: Vec::new(),
            widths: Vec::new(),
        })
    }

    /// Whether forced text is drafted.
    pub(crate) fn forces(&self) -> bool {
        self.forces
    }

    /// Whether grammars are worth asking for what they force; `num_rows` as in [`Self::propose`].
    pub(crate) fn may_ask(&self, num_rows: Option<usize>) -> bool {
        self.policy.as_ref().is_none_or(|policy| num_rows.is_some_and(|num_rows| policy.may_ask(num_rows)))
    }

    /// Takes note of how long grammars were asked before a step.
    pub(crate) fn note_asking(&mut self, num_rows: Option<usize>, took: Duration) {
        if let (Some(policy), Some(num_rows)) = (&mut self.policy, num_rows) {
            policy.note_asking(num_rows, took);
        }
    }

    /// Asks the proposer no more.
    pub(crate) fn stop(&mut self) {
        self.proposer = None;
    }

    /// Whether others than grammars propose something.
    pub(crate) fn proposes(&self) -> bool {
        self.proposer.is_some()
    }

    /// Tells the scheduler the drafts of the next step, of `answered`. `num_rows`: the step will have so many rows without
    /// drafts, all of answers; `None`: it has some of prompts. `num_allowed`: how many of these drafts
    /// may be computed.
    ///
    /// # Errors
    /// The proposer's panic; it is asked no more.
    pub(crate) fn propose(
        &mut self,
        scheduler: &mut Scheduler,
        answered: &mut [Answered],
        num_rows: Option<usize>,
        num_allowed: impl Fn(RequestId, &[u32]) -> usize,
    ) -> Result<(), String> {
        if self.policy.is_some() && num_rows.is_none() {
            for Answered { id, .. } in &*answered {
                scheduler.set_drafts(*id, &[]);
            }
            return Ok(());
        }
        self.drafts.clear();
        self.lengths.clear();
        for Answered { id, history, forced } in &mut *answered {
            let drafts = &mut self.one;
            drafts.clear();
            drafts.extend(forced.iter().take(self.max_forced));
            if !drafts.is_empty() {
                history.evidence = FORCED;
            } else if let Some(proposer) = &self.proposer {
                let (token_ids, most) = (scheduler.token_ids(*id), self.max_drafts);
                match caught(|| proposer.propose(token_ids, most, drafts)) {
                    Ok(evidence) => history.evidence = evidence,
                    Err(why) => {
                        self.proposer = None;
                        return Err(why);
                    }
                }
                drafts.truncate(most);
            }
            let is_token = |token: &&u32| (**token as usize) < self.vocab_size;
            drafts.truncate(drafts.iter().take_while(is_token).count());
            drafts.truncate(num_allowed(*id, drafts));
            self.drafts.extend_from_slice(drafts);
            self.lengths.push(drafts.len());
        }
        self.choose(answered, num_rows.unwrap_or(answered.len()));
        let mut start = 0;
        for ((Answered { id, .. }, length), width) in answered.iter().zip(&self.lengths).zip(&self.widths) {
            scheduler.set_drafts(*id, &self.drafts[start..start + width]);
            start += length;
        }
        Ok(())
    }

    fn choose(&mut self, answered: &[Answered], num_rows: usize) {
        match &mut self.policy {
            Some(policy) => {
                let candidates: Vec<_> = answered
                    .iter()
                    .zip(&self.lengths)
                    .map(|(answered, num_drafts)| Candidate {
                        acceptance: &answered.history.acceptance,
                        evidence: answered.history.evidence,
                        num_drafts: *num_drafts,
                    })
                    .collect();
                let gain = policy.choose(num_rows, &candidates, &mut self.widths);
                if answered.iter().zip(&self.widths).any(|(answered, width)| *width > 0 && !answered.forced.is_empty()) {
                    policy.note_forced(num_rows, gain);
                }
            }
            None => self.widths.clone_from(&self.lengths),
        }
    }

    /// Takes note of what became of a request's drafts.
    pub(crate) fn note_drafts(&mut self, history: &mut DraftHistory, computed: usize, accepted: usize) {
        if let Some(policy) = &mut self.policy {
            policy.note_drafts(&mut history.acceptance, history.evidence, computed, accepted);
        }
    }

    /// Takes note of how long a step of answers alone took.
    pub(crate) fn note_step(&mut self, num_rows: usize, took: Duration) {
        if let Some(policy) = &mut self.policy {
            policy.note_step(num_rows, took);
        }
    }
}

impl fmt::Debug for Speculator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Speculator").field("proposer", &self.proposer).finish_non_exhaustive()
    }
}

//! How many tokens a step takes, and which prompts get them.

use super::policy::FairnessPolicy;
use super::{MAX_CANDIDATES, RequestIndex, Scheduler};

/// Of a step's prompt tokens, one in so many goes to the prompts with the least left to compute, whoever's turn it is. The
/// prompt that goes first keeps the others, so that it takes at most a third longer.
const SHORTEST_DIVISOR: usize = 4;

/// Most prompt tokens of a step; `None`: as many as the step has room for. Every step has room for one, whatever is set.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PromptLimits {
    /// In a step in which a request is being answered, so that its next token does not wait for a long prompt.
    pub beside_answers: Option<usize>,
    /// In any other, so that a prompt that comes in does not wait for one that is being computed.
    pub alone: Option<usize>,
}

/// What the prompts of a step may have of it.
#[derive(Debug, Clone, Default)]
pub(super) struct Allowances {
    /// By index; empty where nobody has to leave anything to others.
    prompts: Vec<(RequestIndex, usize)>,
}

impl Allowances {
    /// Most tokens that a request may compute in this step for the sake of other prompts.
    pub(super) fn of(&self, index: RequestIndex) -> usize {
        let found = self.prompts.binary_search_by_key(&index, |(prompt, _)| *prompt);
        found.map_or(usize::MAX, |place| self.prompts[place].1)
    }

    /// Gives out `budget` tokens to prompts in the order in which they go, each with what it has left to compute.
    fn give_out(&mut self, mut budget: usize) {
        let mut shortest: Vec<_> = (0..self.prompts.len()).collect();
        shortest.sort_by_key(|place| self.prompts[*place].1);
        let mut given = vec![0; self.prompts.len()];
        let mut kept_for_the_shortest = budget / SHORTEST_DIVISOR;
        for place in shortest {
            given[place] = self.prompts[place].1.min(kept_for_the_shortest);
            kept_for_the_shortest -= given[place];
            budget -= given[place];
        }
        for ((_, left), given) in self.prompts.iter_mut().zip(given) {
            let more = (*left - given).min(budget);
            budget -= more;
            *left = given + more;
        }
        self.prompts.sort_unstable();
    }
}

impl Scheduler {
    /// Sets how many prompt tokens the next steps have at most.
    pub fn limit_prompt_tokens(&mut self, limits: PromptLimits) {
        self.prompt_limits = limits;
    }

    /// Most tokens of the next step. As many of them as requests that are being answered compute are kept for the answers.
    pub(super) fn most_of_step(&mut self) -> usize {
        let most = self.config.max_num_batched_tokens;
        self.unserved_answers = self.running.iter().map(|index| self.request(*index).num_answer_tokens()).sum();
        if self.config.whole_prompts {
            return most;
        }
        let limit = if self.unserved_answers > 0 { self.prompt_limits.beside_answers } else { self.prompt_limits.alone };
        limit.map_or(most, |limit| limit.max(1).saturating_add(self.unserved_answers).min(most))
    }

    /// What of the budget a prompt of so many tokens may take: it leaves what each answer that comes behind it computes, and gets
    /// one itself in any case.
    pub(super) fn most_of_budget(&self, num_uncomputed_tokens: usize, budget: usize) -> usize {
        num_uncomputed_tokens.min(budget.saturating_sub(self.unserved_answers).max(1))
    }

    /// Decides how the prompts of the most urgent priority share a step of `budget` tokens: those that run, and the next of
    /// those that wait. Tenants that take turns share by their turns, and who goes by arrival shares nothing.
    pub(super) fn share_among_prompts(&mut self, budget: usize) {
        self.allowances.prompts.clear();
        if self.config.fairness != FairnessPolicy::Priority || self.config.whole_prompts {
            return;
        }
        let mut prompts = std::mem::take(&mut self.allowances.prompts);
        let left = |index: RequestIndex| (index, self.request(index).num_uncomputed_tokens());
        let chunks = self.running.iter().filter(|index| self.request(**index).num_answer_tokens() == 0);
        prompts.extend(chunks.map(|index| left(*index)));
        let seats = self.config.max_num_seqs.saturating_sub(self.running.len());
        prompts.extend(self.waiting.iter().take(seats.min(MAX_CANDIDATES)).map(left));
        let rank = |index: RequestIndex| self.request(index).standing.rank;
        prompts.sort_by_key(|(index, _)| rank(*index));
        if let Some(first) = prompts.first().map(|(index, _)| rank(*index).priority) {
            prompts.retain(|(index, _)| rank(*index).priority == first);
        }
        let prompt_tokens = budget.saturating_sub(self.unserved_answers);
        if prompts.len() < 2 || prompts.iter().map(|(_, left)| left).sum::<usize>() <= prompt_tokens {
            prompts.clear();
        }
        self.allowances.prompts = prompts;
        self.allowances.give_out(prompt_tokens);
    }

    /// Whether a request has nothing of this step, for the sake of other prompts.
    pub(super) fn leaves_the_step(&self, index: RequestIndex) -> bool {
        self.request(index).num_answer_tokens() == 0 && self.allowances.of(index) == 0
    }

    /// Whether a request may have a row in a step with so much left of its budget.
    pub(super) fn fits_the_step(&self, index: RequestIndex, budget: usize) -> bool {
        if self.config.whole_prompts {
            return self.request(index).num_uncomputed_tokens() <= budget;
        }
        self.has_room_for_span(index, budget)
    }
}

//! How many tokens a step takes, and how many of them are a prompt's.

use super::Scheduler;

impl Scheduler {
    /// Sets the most prompt tokens of a step in which a request is being answered, so that its next token does not wait for a
    /// long prompt; `None`, the default: as many as any other step. Every such step has room for a token of a prompt, whatever is
    /// set.
    pub fn limit_mixed_steps(&mut self, max_prompt_tokens: Option<usize>) {
        self.max_mixed_tokens = max_prompt_tokens;
    }

    /// Most tokens of the next step. As many of them as requests are being answered are kept for the answers.
    pub(super) fn step_budget(&mut self) -> usize {
        let most = self.config.max_num_batched_tokens;
        self.unserved_answers = self.running.iter().filter(|index| self.request(**index).num_uncomputed_tokens() == 1).count();
        match self.max_mixed_tokens {
            Some(limit) if self.unserved_answers > 0 => limit.max(1).saturating_add(self.unserved_answers).min(most),
            _ => most,
        }
    }

    /// What of the budget a row of so many tokens may take: a prompt leaves one for each answer that comes behind it, and gets
    /// one itself in any case.
    pub(super) fn most_of_budget(&self, num_uncomputed_tokens: usize, budget: usize) -> usize {
        if num_uncomputed_tokens == 1 {
            1
        } else {
            num_uncomputed_tokens.min(budget.saturating_sub(self.unserved_answers).max(1))
        }
    }
}

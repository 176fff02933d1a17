//! How many tokens a step takes.

use super::Scheduler;

impl Scheduler {
    /// Sets the most tokens of a step in which a request is being answered, so that its next token does not wait for a long prompt; `None`,
    /// the default: as many as any other step. Every such step has room for all answers and a block of a prompt, whatever is set.
    pub fn limit_mixed_steps(&mut self, max_tokens: Option<usize>) {
        self.max_mixed_tokens = max_tokens;
    }

    /// Most tokens of the next step.
    pub(super) fn step_budget(&self) -> usize {
        let most = self.config.max_num_batched_tokens;
        let Some(limit) = self.max_mixed_tokens else { return most };
        let num_answering = self.running.iter().filter(|slot| self.request(**slot).num_uncomputed_tokens() == 1).count();
        if num_answering == 0 { most } else { limit.max(num_answering + self.manager.block_size()).min(most) }
    }
}

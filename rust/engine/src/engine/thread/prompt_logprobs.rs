//! Log probabilities of prompts, as their rows are computed.

use std::sync::Arc;

use paged::SchedulerOutput;

use super::{EngineThread, StepOutputs};
use crate::{
    EngineError, PromptLogprob,
    engine::output::token_logprobs,
    sampler::{rank, token_logprob},
};

impl EngineThread {
    /// Log probabilities of the prompt tokens that follow the rows of this step, for requests that want them.
    pub(super) fn report_prompt_logprobs(&mut self, output: &SchedulerOutput) -> Result<(), EngineError> {
        let StepOutputs { rows, failed, .. } = &mut self.outputs;
        for (r, scheduled) in output.rows.iter().enumerate() {
            let id = scheduled.request_id;
            let Some(active) = self.active.get_mut(&id) else { continue };
            let Some(request) = self.requests.get_mut(&active.request_number) else { continue };
            let prompt = Arc::clone(&request.submitted().prompt_token_ids);
            let wanted = request.submitted().prompt_logprobs;
            if !wanted.are_wanted() || active.choice > 0 || active.prompt_logprobs_done == prompt.len() {
                continue;
            }
            let top_k = wanted.echoed.max(wanted.apart).unwrap_or(0);
            if active.prompt_logprobs_done == 0 {
                let token = token_logprobs(&self.tokenizer, prompt[0], None, &[]);
                request.push_prompt_logprobs(vec![PromptLogprob { token, rank: None }]);
                active.prompt_logprobs_done = 1;
            }
            let start = scheduled.num_computed_tokens;
            let base = self.batch.step.query_start_loc[r] as usize;
            let last = (start + scheduled.num_scheduled_tokens).min(prompt.len() - 1);
            let mut first = start.max(active.prompt_logprobs_done - 1);
            while first < last {
                let end = last.min(first + self.runner.max_logit_rows());
                rows.clear();
                rows.extend((first..end).map(|p| (base + p - start) as u32));
                let logits = self.runner.logits(rows)?;
                let entries = prompt[first + 1..=end].iter().enumerate().map(|(i, &token)| {
                    // The token of an image may be none that a model answers with.
                    let has_logit = (token as usize) < logits.cols();
                    let row = token_logprob(logits.row(i), if has_logit { token } else { 0 }, top_k)?;
                    let rank = wanted.apart.filter(|_| has_logit).map(|_| rank(logits.row(i), token));
                    let logprob = has_logit.then_some(row.logprob);
                    Ok(PromptLogprob { token: token_logprobs(&self.tokenizer, token, logprob, &row.top), rank })
                });
                match entries.collect::<Result<Vec<_>, EngineError>>() {
                    Ok(entries) => request.push_prompt_logprobs(entries),
                    Err(error) => {
                        // One request's logits are bad; the others' are not.
                        failed.push((id, error.to_string()));
                        break;
                    }
                }
                active.prompt_logprobs_done = end + 1;
                first = end;
            }
        }
        Ok(())
    }
}

//! From the rows of a step to its tokens.

use std::{
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};

use paged::{RequestId, SchedulerOutput};

use super::{EngineThread, StepResults};
use crate::{EngineError, engine::output::Job, error::caught, model_runner::Greedy, sampler::Sampled};

/// Logits from which on the rows of a step are sampled on several threads.
const MIN_PARALLEL_LOGITS: usize = 1 << 16;

/// A row, and who samples from it.
struct Draw<'a> {
    id: RequestId,
    job: &'a Job,
    /// One, or all of a job whose prompt ends with this row.
    choices: Range<usize>,
    leads: bool,
    logits: &'a mut [f32],
    tokens: Vec<Result<Sampled, String>>,
}

impl Draw<'_> {
    /// Samples, unless the device has done so.
    fn run(&mut self) {
        if !self.tokens.is_empty() {
            return;
        }
        let (job, logits) = (self.job, &mut *self.logits);
        let sample = |choice| caught(|| job.sample(choice, logits)).and_then(|token| token.map_err(|error| error.to_string()));
        self.tokens.extend(self.choices.clone().map(sample));
    }
}

impl EngineThread {
    /// Samples where a row reaches the end of what is known, into `self.results`; logits are computed for those rows alone.
    pub(super) fn sample(&mut self, output: &SchedulerOutput) -> Result<(), EngineError> {
        let StepResults { sampling, rows, greedy_tokens, sampled, branches, tokens, failed } = &mut self.results;
        sampling.clear();
        let ends = output.rows.iter().zip(&self.batch.step.query_start_loc[1..]);
        let samples = ends.filter(|(row, _)| row.sample && failed.iter().all(|(id, _)| *id != row.request_id));
        sampling.extend(samples.map(|(row, end)| (row.request_id, end - 1)));
        let backend = Arc::clone(self.runner.backend());
        let mut keep = |id: RequestId, leads: bool, mut drawn: Vec<Result<Sampled, String>>| {
            // Should the first choice fail, its request takes another's token until they have begun.
            match drawn.iter().flatten().next() {
                Some(token) => tokens.push((id, token.token_id)),
                None => failed.extend(drawn.first().and_then(|first| first.clone().err()).map(|why| (id, why))),
            }
            if leads {
                branches.push((id, drawn));
            } else if let Some(Ok(token)) = drawn.pop() {
                sampled.push((id, token));
            }
        };
        for chunk in sampling.chunks(self.runner.max_logit_rows()) {
            rows.clear();
            rows.extend(chunk.iter().map(|&(_, row)| row));
            let who = |id: RequestId| {
                let live = self.live.get(&id)?;
                let job = self.jobs.get(&live.job)?;
                let choices = if live.leads { 0..job.num_choices() } else { live.choice..live.choice + 1 };
                Some((job, choices, live.leads))
            };
            let on_device = self.runner.samples();
            let asked = chunk.iter().map(|&(id, _)| {
                let (job, choices, _) = who(id).filter(|(_, choices, _)| on_device && choices.len() == 1)?;
                job.row_sampling(choices.start)
            });
            let (sampling, num_top): (Vec<_>, Vec<_>) = asked.map(Option::unzip).unzip();
            let num_top = num_top.into_iter().flatten().max().unwrap_or(0);
            let greedy = |&(id, _): &(RequestId, u32)| who(id).is_none_or(|(job, choices, _)| job.is_greedy(choices));
            let mask = |&(id, _): &(RequestId, u32)| who(id).and_then(|(job, ..)| job.mask());
            let (on_device, logits) = if !on_device && chunk.iter().all(greedy) {
                let has_masks = chunk.iter().any(|row| mask(row).is_some());
                let masks: Vec<_> = if has_masks { chunk.iter().map(mask).collect() } else { Vec::new() };
                match self.runner.greedy_tokens(rows, &masks, greedy_tokens)? {
                    Greedy::Logits(logits) => (vec![None; rows.len()], logits),
                    Greedy::Tokens => {
                        for (&(id, _), &token_id) in chunk.iter().zip(&*greedy_tokens) {
                            if let Some((_, choices, leads)) = who(id) {
                                keep(id, leads, choices.map(|_| Ok(Sampled { token_id, logprobs: None })).collect());
                            }
                        }
                        continue;
                    }
                }
            } else {
                self.runner.sample(rows, &sampling, num_top)?
            };
            let vocab_size = logits.cols();
            let drawn = chunk.iter().zip(on_device).zip(logits.as_mut_slice().chunks_exact_mut(vocab_size));
            let draws = drawn.filter_map(|((&(id, _), token), logits)| {
                let (job, choices, leads) = who(id)?;
                let tokens = token.map(|token| Ok(job.accept(choices.start, token))).into_iter().collect();
                Some(Mutex::new(Draw { id, job, choices, leads, logits, tokens }))
            });
            let draws: Vec<_> = draws.collect();
            let draw = |index: usize| draws[index].lock().unwrap_or_else(PoisonError::into_inner).run();
            if draws.len() * vocab_size < MIN_PARALLEL_LOGITS {
                (0..draws.len()).for_each(draw);
            } else {
                backend.for_each(draws.len(), &draw);
            }
            for draw in draws {
                let Draw { id, leads, tokens, .. } = draw.into_inner().unwrap_or_else(PoisonError::into_inner);
                keep(id, leads, tokens);
            }
        }
        Ok(())
    }
}

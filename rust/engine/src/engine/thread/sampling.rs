//! From the rows of a step to its outputs.

use std::{
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};

use device::{SampledRow, TokenSet};
use paged::{RequestId, SchedulerOutput};
use rustc_hash::FxHashMap;

use super::{
    EngineThread,
    constrained::{Held, hold_to_grammars},
};
use crate::{
    EngineError, OutputKind,
    engine::output::ActiveRequest,
    error::caught,
    model_runner::{Greedy, ModelRunner},
    sampler::Sampled,
};

/// Logits from which on the rows of a step are sampled on several threads.
const MIN_PARALLEL_LOGITS: usize = 1 << 16;

/// A request with outputs in a step, and the tokens that it got.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) id: RequestId,
    pub(super) request_number: u64,
    /// One, or all of a request whose prompt ends with this row.
    pub(super) choices: Range<usize>,
    leads: bool,
    kind: OutputKind,
    /// Rows of the step, one behind the other.
    pub(super) rows: Range<u32>,
    /// All of its rows, those without an output too.
    all_rows: Range<u32>,
    /// What all of its rows but the first were computed for, in the step's drafts.
    pub(super) drafts: Range<usize>,
    /// Its tokens in [`StepOutputs::token_ids`]; `None` without any output.
    tokens: Option<Range<usize>>,
}

impl Wanted {
    fn is_of(&self, kind: OutputKind) -> bool {
        self.kind == kind
    }

    /// Ends with a vector, unless it is damaged; so many tokens have been sampled in the step.
    fn take_vector(
        &mut self,
        vector: Vec<f32>,
        num_tokens: usize,
        vectors: &mut Vec<(RequestId, Vec<f32>)>,
        failed: &mut Vec<(RequestId, String)>,
    ) {
        if let Some(bad) = vector.iter().position(|value| !value.is_finite()) {
            let why = format!("the model's hidden state has {} at {bad}; its weights or its input are damaged", vector[bad]);
            failed.push((self.id, why));
        } else {
            self.tokens = Some(num_tokens..num_tokens);
            vectors.push((self.id, vector));
        }
    }

    /// Drafts that were accepted.
    pub(super) fn num_accepted(&self) -> usize {
        self.tokens.as_ref().map_or(0, |tokens| tokens.len().saturating_sub(1))
    }
}

/// What the rows of a step came to; reused from step to step.
#[derive(Default)]
pub(super) struct StepOutputs {
    /// In the order of the scheduler's rows.
    pub(super) wanted: Vec<Wanted>,
    /// Rows whose logits are computed together, and the tokens of the largest where only these count.
    pub(super) rows: Vec<u32>,
    greedy_tokens: Vec<u32>,
    token_ids: Vec<u32>,
    /// Tokens of the requests that do not lead others; those of one request in their order.
    pub(super) sampled: Vec<(RequestId, Sampled)>,
    /// The first tokens of all choices of a request, by the choice that computed their prompt.
    pub(super) branches: Vec<(RequestId, Vec<Result<Sampled, String>>)>,
    /// Hidden states behind the output norm.
    pub(super) vectors: Vec<(RequestId, Vec<f32>)>,
    /// Requests that cannot go on, and why; behind what they have in `sampled`.
    pub(super) failed: Vec<(RequestId, String)>,
}

impl StepOutputs {
    pub(super) fn clear(&mut self) {
        self.wanted.clear();
        self.token_ids.clear();
        self.sampled.clear();
        self.branches.clear();
        self.vectors.clear();
        self.failed.clear();
    }

    /// What the scheduler is told: the tokens of each request with outputs, none where these are a vector.
    pub(super) fn tokens(&self) -> Vec<(RequestId, &[u32])> {
        let tokens = |wanted: &Wanted| Some((wanted.id, &self.token_ids[wanted.tokens.clone()?]));
        self.wanted.iter().filter_map(tokens).collect()
    }

    /// Takes a request's next token.
    fn push(&mut self, index: usize, token: Sampled) {
        let wanted = &mut self.wanted[index];
        self.token_ids.push(token.token_id);
        let end = self.token_ids.len();
        wanted.tokens.get_or_insert(end - 1..end).end = end;
        self.sampled.push((wanted.id, token));
    }

    /// Takes the first tokens of a request's choices.
    fn push_branches(&mut self, index: usize, drawn: Vec<Result<Sampled, String>>) {
        let wanted = &mut self.wanted[index];
        let id = wanted.id;
        // Should the first choice fail, its request takes another's token until they have begun.
        if let Some(token) = drawn.iter().flatten().next() {
            self.token_ids.push(token.token_id);
            wanted.tokens = Some(self.token_ids.len() - 1..self.token_ids.len());
        } else if let Some(Err(why)) = drawn.first() {
            self.failed.push((id, why.clone()));
        }
        self.branches.push((id, drawn));
    }

    /// Takes the tokens that the backend has found, for those of `wanted[indices]` that want tokens; `held` is of these.
    fn push_greedy(&mut self, indices: Range<usize>, drafts: &[u32], held: Vec<Option<Held>>) {
        let (mut end, mut held) = (0, held.into_iter());
        for index in indices {
            let wanted = &self.wanted[index];
            if !wanted.is_of(OutputKind::Tokens) {
                continue;
            }
            let first = end;
            end += wanted.rows.len();
            let Held { num_tokens, failure } =
                held.next().flatten().unwrap_or(Held { num_tokens: wanted.rows.len(), failure: None });
            if wanted.leads {
                if let Some(why) = failure {
                    self.push_branches(index, wanted.choices.clone().map(|_| Err(why.clone())).collect());
                    continue;
                }
                let token = Sampled { token_id: self.greedy_tokens[first], logprobs: None };
                let drawn = wanted.choices.clone().map(|_| Ok(token.clone())).collect();
                self.push_branches(index, drawn);
                continue;
            }
            let (id, drafts) = (wanted.id, &drafts[wanted.drafts.clone()]);
            for ahead in 0..num_tokens {
                let token_id = self.greedy_tokens[first + ahead];
                self.push(index, Sampled { token_id, logprobs: None });
                if drafts.get(ahead) != Some(&token_id) {
                    break;
                }
            }
            self.failed.extend(failure.map(|why| (id, why)));
        }
    }

    fn push_drawn(&mut self, index: usize, drawn: Vec<Result<Sampled, String>>) {
        if self.wanted[index].leads {
            return self.push_branches(index, drawn);
        }
        for token in drawn {
            match token {
                Ok(token) => self.push(index, token),
                Err(why) => self.failed.push((self.wanted[index].id, why)),
            }
        }
    }
}

/// The rows of a request, and who samples from them.
struct Draw<'a> {
    /// Its place among those with outputs.
    index: usize,
    request: &'a ActiveRequest,
    choices: Range<usize>,
    drafts: &'a [u32],
    /// `[rows, vocab_size]`.
    logits: &'a mut [f32],
    /// What the device has sampled, a row each.
    on_device: &'a mut [Option<SampledRow>],
    tokens: Vec<Result<Sampled, String>>,
}

impl Draw<'_> {
    /// Samples each row whose drafts before it were all accepted: a draft is, if it is what is sampled in its place.
    fn run(&mut self) {
        let (request, first) = (self.request, self.choices.start);
        if self.choices.len() > 1 {
            let logits = &mut *self.logits;
            self.tokens.extend(self.choices.clone().map(|choice| sample(request, choice, 0, logits)));
            return;
        }
        let vocab_size = self.logits.len() / self.on_device.len();
        let rows = self.logits.chunks_exact_mut(vocab_size).zip(&mut *self.on_device);
        for (ahead, (logits, on_device)) in rows.enumerate() {
            let token = match on_device.take() {
                Some(row) => {
                    let token = request.accept(first, row);
                    caught(|| request.take_allowed(first, token.token_id))
                        .and_then(|taken| taken.map_err(|error| error.to_string()))
                        .map(|()| token)
                }
                None => sample(request, first, ahead, logits),
            };
            let is_draft = token.as_ref().is_ok_and(|token| self.drafts.get(ahead) == Some(&token.token_id));
            self.tokens.push(token);
            if !is_draft || request.has_ended(first) {
                return;
            }
        }
    }
}

/// Samples the token `ahead` places behind the next one of a choice.
fn sample(request: &ActiveRequest, choice: usize, ahead: usize, logits: &mut [f32]) -> Result<Sampled, String> {
    caught(|| request.sample(choice, ahead, logits)).and_then(|token| token.map_err(|error| error.to_string()))
}

impl EngineThread {
    /// Computes what the rows with outputs come to, into `self.outputs`; logits are computed for those rows alone.
    pub(super) fn compute_outputs(&mut self, output: &SchedulerOutput) -> Result<(), EngineError> {
        self.collect_wanted(output);
        let most = self.runner.max_logit_rows();
        let mut start = 0;
        while start < self.outputs.wanted.len() {
            // The rows of a request stay together.
            let mut num_rows = 0;
            let fitting = self.outputs.wanted[start..].iter().take_while(|wanted| {
                num_rows += wanted.rows.len();
                num_rows <= most
            });
            let end = start + fitting.count().max(1);
            let (runner, outputs) = (&mut self.runner, &mut self.outputs);
            Chunk { runner, requests: &self.requests, outputs, drafts: &output.drafts }.sample(start..end)?;
            start = end;
        }
        self.read_vectors()
    }

    /// Who has outputs in the step, those apart that have failed.
    fn collect_wanted(&mut self, output: &SchedulerOutput) {
        let outputs = &mut self.outputs;
        let mut num_drafts = 0;
        for (row, bounds) in output.rows.iter().zip(self.batch.step.query_start_loc.windows(2)) {
            let (start, end) = (bounds[0], bounds[1]);
            let drafts = num_drafts..num_drafts + row.num_drafts;
            num_drafts = drafts.end;
            let id = row.request_id;
            if row.num_outputs == 0 || outputs.failed.iter().any(|(failed, _)| *failed == id) {
                continue;
            }
            let Some(active) = self.active.get(&id) else { continue };
            let choices = if active.leads {
                let Some(request) = self.requests.get(&active.request_number) else { continue };
                0..request.num_choices()
            } else {
                active.choice..active.choice + 1
            };
            let rows = end - row.num_outputs as u32..end;
            let (request_number, leads, kind) = (active.request_number, active.leads, active.output);
            let all_rows = start..end;
            outputs.wanted.push(Wanted { id, request_number, choices, leads, kind, rows, all_rows, drafts, tokens: None });
        }
    }

    /// Hidden states of the requests that want these.
    fn read_vectors(&mut self) -> Result<(), EngineError> {
        let StepOutputs { wanted, rows, vectors, failed, token_ids, .. } = &mut self.outputs;
        let most = self.runner.max_logit_rows();
        let mut left = wanted.iter_mut().filter(|wanted| wanted.is_of(OutputKind::Vector)).peekable();
        while left.peek().is_some() {
            let chunk: Vec<_> = left.by_ref().take(most).collect();
            rows.clear();
            rows.extend(chunk.iter().map(|wanted| wanted.rows.end - 1));
            let hidden = self.runner.vectors(rows)?;
            for (row, wanted) in chunk.into_iter().enumerate() {
                wanted.take_vector(hidden.row(row).to_vec(), token_ids.len(), vectors, failed);
            }
        }
        let embedded = || wanted.iter().filter(|wanted| wanted.is_of(OutputKind::Embedding));
        if embedded().next().is_none() {
            return Ok(());
        }
        let requests: Vec<_> = embedded().map(|wanted| wanted.all_rows.clone()).collect();
        let embeddings = self.runner.embeddings(&requests)?;
        for (wanted, vector) in wanted.iter_mut().filter(|wanted| wanted.is_of(OutputKind::Embedding)).zip(embeddings) {
            wanted.take_vector(vector, token_ids.len(), vectors, failed);
        }
        Ok(())
    }
}

/// Requests whose logits are computed together.
struct Chunk<'a> {
    runner: &'a mut ModelRunner,
    requests: &'a FxHashMap<u64, ActiveRequest>,
    outputs: &'a mut StepOutputs,
    drafts: &'a [u32],
}

impl Chunk<'_> {
    /// Samples for those of `outputs.wanted[indices]` that want tokens.
    fn sample(self, indices: Range<usize>) -> Result<(), EngineError> {
        let Self { runner, requests, outputs, drafts } = self;
        let wants_tokens = |wanted: &&Wanted| wanted.is_of(OutputKind::Tokens);
        let chunk = &outputs.wanted[indices.clone()];
        let rows = &mut outputs.rows;
        rows.clear();
        rows.extend(chunk.iter().filter(wants_tokens).flat_map(|wanted| wanted.rows.clone()));
        if rows.is_empty() {
            return Ok(());
        }
        let (samples, backend) = (runner.samples(), Arc::clone(runner.backend()));
        let is_greedy = |wanted: &Wanted| {
            requests.get(&wanted.request_number).is_none_or(|request| request.is_greedy(wanted.choices.clone()))
        };
        let (mut on_device, logits) = if !samples && chunk.iter().filter(wants_tokens).all(is_greedy) {
            let masks_of = |wanted: &Wanted| {
                let (request, choice) = (requests.get(&wanted.request_number), wanted.choices.start);
                (0..wanted.rows.len()).map(move |ahead| request.and_then(|request| request.mask(choice, ahead)))
            };
            let masks = || chunk.iter().filter(wants_tokens).flat_map(masks_of);
            let masks: Vec<_> = if masks().any(|mask| mask.is_some()) { masks().collect() } else { Vec::new() };
            match runner.greedy_tokens(rows, &masks, &mut outputs.greedy_tokens)? {
                Greedy::Logits(logits) => (vec![None; rows.len()], logits),
                Greedy::Tokens => {
                    let StepOutputs { wanted, rows, greedy_tokens, .. } = &mut *outputs;
                    let chunk = wanted[indices.clone()].iter().filter(wants_tokens);
                    let held = hold_to_grammars(runner, requests, chunk, drafts, rows, greedy_tokens)?;
                    outputs.push_greedy(indices, drafts, held);
                    return Ok(());
                }
            }
        } else {
            // A device draws all rows at once: what a grammar allows in each must be known before.
            let masks_of = |wanted: &Wanted| {
                let request = requests.get(&wanted.request_number).filter(|request| samples && request.is_constrained());
                let drafts = &drafts[wanted.drafts.clone()];
                let masks = request.map(|request| caught(|| request.grammar_masks(wanted.choices.start, drafts)));
                masks.and_then(|masks| masks.ok()?.ok()).unwrap_or_default()
            };
            let grammar_masks: Vec<Vec<TokenSet>> = chunk.iter().filter(wants_tokens).map(masks_of).collect();
            let asked = chunk.iter().filter(wants_tokens).zip(&grammar_masks).flat_map(|(wanted, masks)| {
                let request = requests.get(&wanted.request_number).filter(|_| samples && wanted.choices.len() == 1);
                (0..wanted.rows.len()).map(move |ahead| {
                    let (request, mask) = (request?, masks.get(ahead));
                    // Should a mask have failed, the draw from logits tells why.
                    let is_known = mask.is_some() || !request.is_constrained();
                    is_known.then(|| request.row_sampling(wanted.choices.start, ahead, mask)).flatten()
                })
            });
            let (sampling, num_top): (Vec<_>, Vec<_>) = asked.map(Option::unzip).unzip();
            runner.sample(rows, &sampling, num_top.into_iter().flatten().max().unwrap_or(0))?
        };
        let vocab_size = logits.cols();
        let (mut logits, mut on_device) = (logits.as_mut_slice(), &mut on_device[..]);
        let mut draws = Vec::with_capacity(chunk.len());
        for (index, wanted) in indices.zip(chunk).filter(|(_, wanted)| wants_tokens(wanted)) {
            let num_rows = wanted.rows.len();
            let (own_logits, own_on_device);
            (own_logits, logits) = logits.split_at_mut(num_rows * vocab_size);
            (own_on_device, on_device) = on_device.split_at_mut(num_rows);
            let Some(request) = requests.get(&wanted.request_number) else { continue };
            let (choices, drafts) = (wanted.choices.clone(), &drafts[wanted.drafts.clone()]);
            let tokens = Vec::new();
            draws.push(Mutex::new(Draw {
                index,
                request,
                choices,
                drafts,
                logits: own_logits,
                on_device: own_on_device,
                tokens,
            }));
        }
        let draw = |index: usize| draws[index].lock().unwrap_or_else(PoisonError::into_inner).run();
        if outputs.rows.len() * vocab_size < MIN_PARALLEL_LOGITS {
            (0..draws.len()).for_each(draw);
        } else {
            backend.for_each(draws.len(), &draw);
        }
        for draw in draws {
            let Draw { index, tokens, .. } = draw.into_inner().unwrap_or_else(PoisonError::into_inner);
            outputs.push_drawn(index, tokens);
        }
        Ok(())
    }
}

//! From sampled tokens to events: text, stop conditions, log probabilities, usage.

use std::{
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc::Sender,
    },
    time::Instant,
};

use device::{RowSampling, SampledRow, TokenMask, TokenSet};
use paged::{MissReason, Tenant};

use super::{
    sequence::{Kept, Origin, Sequence, Source},
    thread::Command,
};
use crate::{
    EngineError, FinishReason, MediaKind, OutputEvent, OutputKind, PromptLogprob, TokenLogprobs, TopLogprob, Usage,
    event_sink::Outbox,
    grammar::Constraint,
    lora::Generation,
    output_text::OutputText,
    sampler::{Sampled, Sampler},
    tokenizer::Tokenizer,
    tools::{Parts, Reader, Reading},
};

/// What the engine thread needs to know of one request with all its choices; made on the caller's thread.
pub struct SubmittedRequest {
    /// Its number.
    pub number: u64,
    /// Shared by all choices.
    pub prompt_token_ids: Arc<[u32]>,
    /// The same with ids of their own for the rows of images.
    pub scheduled_token_ids: Arc<[u32]>,
    /// Generated tokens at most, the model's length considered.
    pub max_tokens: usize,
    /// Token ids that end the text.
    pub stop_token_ids: Vec<u32>,
    /// Alternatives to report beside each token, when log probabilities are wanted.
    pub logprobs: Option<usize>,
    /// Which log probabilities of the prompt's own tokens are reported.
    pub prompt_logprobs: PromptLogprobs,
    /// Report the ids of the tokens.
    pub return_token_ids: bool,
    /// Text that goes before every choice.
    pub echo: Option<String>,
    /// Text that goes after every choice.
    pub suffix: Option<String>,
    /// How many choices are returned; the best of `choices` by mean log probability when fewer.
    pub num_returned: usize,
    /// Tokens or a vector.
    pub output: OutputKind,
    /// Events come with the tokens, not all at the end.
    pub stream: bool,
    /// Where its sequences come from.
    pub origin: Origin,
    /// Where to release its sequences, if they are kept when they end.
    pub keep: Option<Sender<Command>>,
    /// What it goes on from.
    pub source: Option<Source>,
    /// Which tokens may come.
    pub allowed: AllowedTokens,
    /// How its text is to be taken apart, if it is.
    pub reading: Option<Reading>,
    /// Sampler, text state and place in the grammar of each choice.
    pub choices: Vec<(Sampler, OutputText, Option<Constraint>)>,
    /// How it is served beside others.
    pub service: Service,
    /// When the caller submitted it.
    pub submitted_at: Instant,
    /// Its prompt, until a step has tokens of it.
    pub waiting: Arc<WaitingTokens>,
    /// Where events go.
    pub outbox: Outbox,
}

/// Log probabilities of a prompt's tokens, each with that many likeliest ones.
#[derive(Clone, Copy, Debug, Default)]
pub struct PromptLogprobs {
    /// At the beginning of each choice, where the prompt is echoed.
    pub echoed: Option<usize>,
    /// By themselves.
    pub apart: Option<usize>,
}

impl PromptLogprobs {
    /// Whether any are wanted.
    pub fn are_wanted(&self) -> bool {
        self.echoed.is_some() || self.apart.is_some()
    }
}

/// Which tokens may come.
#[derive(Clone, Debug, Default)]
pub struct AllowedTokens {
    /// The only ones; `None`: all.
    pub only: Option<Arc<TokenSet>>,
    /// How long reasoning may be.
    pub thinking: Option<ThinkingBudget>,
    /// Before so many tokens nothing ends the text.
    pub min_tokens: usize,
    /// Those that may come until then; `None`: as later.
    pub before_min: Option<TokenSet>,
}

/// How long reasoning may be.
#[derive(Clone, Debug)]
pub struct ThinkingBudget {
    /// Tokens.
    pub limit: usize,
    /// What then comes, a token a set.
    pub close: Arc<[TokenSet]>,
}

impl AllowedTokens {
    fn mask(&self, position: usize) -> Option<TokenMask<'_>> {
        let early = self.before_min.as_ref().filter(|_| position < self.min_tokens);
        early.or(self.only.as_deref()).map(TokenSet::mask)
    }
}

/// Tokens of a prompt that count as waiting, until they end to or this is dropped.
pub struct WaitingTokens {
    total: Arc<AtomicUsize>,
    num_tokens: AtomicUsize,
    adapter: Option<Arc<Generation>>,
}

impl WaitingTokens {
    /// Adds to those that wait already, and to the requests that wait for this adapter.
    pub fn add(total: &Arc<AtomicUsize>, num_tokens: usize, adapter: Option<Arc<Generation>>) -> Self {
        total.fetch_add(num_tokens, Ordering::Relaxed);
        let adapter = adapter.filter(|_| num_tokens > 0);
        if let Some(adapter) = &adapter {
            adapter.num_waiting.fetch_add(1, Ordering::Relaxed);
        }
        Self { total: Arc::clone(total), num_tokens: AtomicUsize::new(num_tokens), adapter }
    }

    /// They are being computed, or nobody waits for them any more.
    pub fn end(&self) {
        let num_tokens = self.num_tokens.swap(0, Ordering::Relaxed);
        self.total.fetch_sub(num_tokens, Ordering::Relaxed);
        if let Some(adapter) = self.adapter.as_ref().filter(|_| num_tokens > 0) {
            adapter.num_waiting.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for WaitingTokens {
    fn drop(&mut self) {
        self.end();
    }
}

/// How a request is served beside others, in the scheduler's terms.
pub struct Service {
    /// Lower goes first.
    pub priority: i32,
    /// When the request must have ended.
    pub deadline: Option<Instant>,
    /// Whom the request belongs to.
    pub tenant: Tenant,
}

/// A submitted request that has not ended yet.
pub struct ActiveRequest {
    submitted: SubmittedRequest,
    choices: Vec<Choice>,
    usage: Usage,
    /// When the first step with tokens of it began.
    first_step: Option<Instant>,
    first_token: Option<Instant>,
}

/// How a choice ends.
#[derive(Clone)]
pub struct End<'a> {
    /// Why.
    pub reason: FinishReason,
    /// The cause of [`FinishReason::Error`].
    pub error: Option<&'a str>,
    /// The blocks of what it came to.
    pub kept: Option<Arc<Kept>>,
}

impl<'a> End<'a> {
    /// For a reason that is no error, without blocks.
    pub fn new(reason: FinishReason) -> Self {
        Self { reason, error: None, kept: None }
    }

    /// For an error, without blocks.
    pub fn error(why: &'a str) -> Self {
        Self { error: Some(why), ..Self::new(FinishReason::Error) }
    }
}

/// One continuation of a request.
pub struct Choice {
    /// Locked by the thread that samples the choice's row.
    sampler: Mutex<Sampler>,
    /// Locked likewise.
    constraint: Option<Mutex<Constraint>>,
    text: OutputText,
    /// Takes the text apart, where more than text may come.
    reader: Option<Reader>,
    output_token_ids: Vec<u32>,
    num_reasoning_tokens: usize,
    /// How many tokens have come of what ends reasoning that was too long.
    num_forced: Option<usize>,
    sum_logprob: f64,
    finished: bool,
    /// Events kept back until the end, or until the best choices are known.
    held: Vec<OutputEvent>,
}

impl Choice {
    /// Ends reasoning once it is too long.
    fn bound_reasoning(&mut self, budget: &ThinkingBudget) {
        let is_reasoning = self.reader.as_ref().is_some_and(Reader::is_reasoning);
        if self.num_forced.is_none() && is_reasoning && self.num_reasoning_tokens >= budget.limit {
            self.num_forced = Some(0);
        }
    }

    /// What a part of the text says.
    fn read(&mut self, text: String) -> Parts {
        let Some(reader) = &mut self.reader else { return Parts { text, ..Parts::default() } };
        let mut parts = Parts::default();
        reader.push(&text, &mut parts);
        parts
    }
}

impl ActiveRequest {
    pub fn new(mut submitted: SubmittedRequest) -> Self {
        let mut choices: Vec<Choice> = std::mem::take(&mut submitted.choices)
            .into_iter()
            .map(|(sampler, text, constraint)| Choice {
                sampler: Mutex::new(sampler),
                constraint: constraint.map(Mutex::new),
                text,
                reader: submitted.reading.clone().map(Reader::new),
                output_token_ids: Vec::new(),
                num_reasoning_tokens: 0,
                num_forced: None,
                sum_logprob: 0.0,
                finished: false,
                held: Vec::new(),
            })
            .collect();
        if let Some(budget) = &submitted.allowed.thinking {
            for choice in &mut choices {
                choice.bound_reasoning(budget);
            }
        }
        let usage = Usage { prompt_tokens: submitted.prompt_token_ids.len(), ..Usage::default() };
        Self { submitted, choices, usage, first_step: None, first_token: None }
    }

    /// Tells what goes before every choice.
    pub fn begin(&mut self) {
        if let Some(echo) = self.submitted.echo.take() {
            for index in 0..self.choices.len() {
                self.emit(index, text_alone(index, echo.clone(), 0));
            }
        }
    }

    /// Choices that run, those that are not returned included.
    pub fn num_choices(&self) -> usize {
        self.choices.len()
    }

    /// The request as it was submitted.
    pub fn submitted(&self) -> &SubmittedRequest {
        &self.submitted
    }

    /// True once nobody waits for the answer any more.
    pub fn is_cancelled(&self) -> bool {
        self.submitted.outbox.is_cancelled()
    }

    /// Hands over the events of this step.
    pub fn hand_over(&mut self) {
        self.submitted.outbox.hand_over();
    }

    /// Flushes the events that were handed over.
    pub fn flush(&mut self) {
        self.submitted.outbox.flush();
    }

    /// True when every choice has ended.
    pub fn is_done(&self) -> bool {
        self.choices.iter().all(|c| c.finished)
    }

    /// Records when the first step with tokens of it began, how much of the prompt was not computed, and why no more.
    pub fn set_first_step(&mut self, began: Instant, cached: usize, miss: Option<MissReason>) {
        self.first_step.get_or_insert(began);
        self.submitted.waiting.end();
        (self.usage.cached_tokens, self.usage.cache_miss) = (cached, miss);
    }

    /// Records that a choice lost its blocks.
    pub fn count_preemption(&mut self) {
        self.usage.preemptions += 1;
    }

    /// Records that tokens were computed again.
    pub fn count_recomputed(&mut self, num_tokens: usize) {
        self.usage.recomputed_tokens += num_tokens;
    }

    /// Records drafts of a step.
    pub fn count_drafts(&mut self, num_drafts: usize) {
        self.usage.draft_tokens += num_drafts;
    }

    /// Records that an image, or a part of a sound, of its prompt had to be encoded.
    pub fn count_encoded(&mut self, kind: MediaKind) {
        match kind {
            MediaKind::Image => self.usage.encoded_images += 1,
            MediaKind::Sound => self.usage.encoded_sounds += 1,
            MediaKind::Video => self.usage.encoded_videos += 1,
        }
    }

    /// Records that a draft has become part of the answer.
    pub fn count_accepted_draft(&mut self) {
        self.usage.accepted_draft_tokens += 1;
    }

    /// Samples the token of a choice that is `ahead` places behind its next one, which its sampler then has observed; those
    /// before it have been sampled.
    ///
    /// `logits` is the model's row `[vocab_size]`; at the end it is what it was.
    pub fn sample(&self, index: usize, ahead: usize, logits: &mut [f32]) -> Result<Sampled, EngineError> {
        let choice = &self.choices[index];
        let mut sampler = lock(&choice.sampler);
        let position = choice.output_token_ids.len() + ahead;
        let sampled = match &choice.constraint {
            None => sampler.sample(logits, position, self.mask(index, ahead))?,
            Some(constraint) => match self.forced(index, ahead) {
                None => constrained(&mut sampler, &mut lock(constraint), logits, position)?,
                forced => {
                    let sampled = sampler.sample(logits, position, forced)?;
                    lock(constraint).take_allowed(sampled.token_id)?;
                    sampled
                }
            },
        };
        sampler.observe(sampled.token_id);
        Ok(sampled)
    }

    /// Whether the tokens of its choices are checked against a grammar, with [`Self::take`], or drawn with [`Self::sample`].
    pub fn is_constrained(&self) -> bool {
        self.choices.iter().any(|choice| choice.constraint.is_some())
    }

    /// Takes a choice's token if its grammar allows that, else gives the tokens that may come.
    pub fn take(&self, index: usize, token_id: u32) -> Result<Option<TokenSet>, EngineError> {
        let choice = &self.choices[index];
        let Some(constraint) = &choice.constraint else { return Ok(None) };
        let mut constraint = lock(constraint);
        if constraint.take(token_id)? {
            return Ok(None);
        }
        constraint.mask().map(|mask| Some(mask.to_set()))
    }

    /// Takes a choice's token that was drawn from those that may come.
    pub fn take_allowed(&self, index: usize, token_id: u32) -> Result<(), EngineError> {
        self.choices[index].constraint.as_ref().map_or(Ok(()), |constraint| lock(constraint).take_allowed(token_id))
    }

    /// The tokens that a choice's grammar allows next and behind each of its drafts, see [`Constraint::masks`]; none without a
    /// grammar, or behind its end.
    pub fn grammar_masks(&self, index: usize, drafts: &[u32]) -> Result<Vec<TokenSet>, EngineError> {
        let Some(constraint) = &self.choices[index].constraint else { return Ok(Vec::new()) };
        let mut constraint = lock(constraint);
        if constraint.has_ended() { Ok(Vec::new()) } else { constraint.masks(drafts) }
    }

    /// Appends the tokens that a choice's grammar leaves no choice about, behind its last; see [`Constraint::forced`].
    pub fn forced_tokens(&self, index: usize, last: Option<u32>, tokens: &mut Vec<u32>) -> Result<(), EngineError> {
        self.choices[index].constraint.as_ref().map_or(Ok(()), |constraint| lock(constraint).forced(last, tokens))
    }

    /// How many of these drafts a choice's grammar allows; all without one.
    pub fn num_allowed(&self, index: usize, drafts: &[u32]) -> Result<usize, EngineError> {
        let constraint = self.choices[index].constraint.as_ref();
        constraint.map_or(Ok(drafts.len()), |constraint| lock(constraint).num_allowed(drafts))
    }

    /// Whether nothing may come any more, by a choice's grammar.
    pub fn has_ended(&self, index: usize) -> bool {
        self.choices[index].constraint.as_ref().is_some_and(|constraint| lock(constraint).has_ended())
    }

    /// Whether all of these choices only take the largest logit that is allowed; see [`Sampler::is_greedy`].
    pub fn is_greedy(&self, mut choices: Range<usize>) -> bool {
        choices.all(|index| lock(&self.choices[index].sampler).is_greedy())
    }

    /// See [`Sampler::row_sampling`]; `ahead` as in [`Self::sample`], and `grammar_mask` is its row's of [`Self::grammar_masks`].
    pub fn row_sampling<'a>(
        &'a self,
        index: usize,
        ahead: usize,
        grammar_mask: Option<&'a TokenSet>,
    ) -> Option<(RowSampling<'a>, usize)> {
        let choice = &self.choices[index];
        let mut sampler = lock(&choice.sampler);
        let grammar_mask = || grammar_mask.map(TokenSet::mask);
        let mask = self.forced(index, ahead).or_else(grammar_mask).or_else(|| self.mask(index, ahead));
        sampler.row_sampling(choice.output_token_ids.len() + ahead, mask)
    }

    /// How many drafts of a choice may be computed until its reasoning may have to be ended: which token then comes is not told
    /// before the reasoning is read.
    pub fn num_before_close(&self, index: usize) -> usize {
        let choice = &self.choices[index];
        let may_reason = choice.num_forced.is_none() && choice.reader.as_ref().is_some_and(Reader::may_reason);
        let budget = self.submitted.allowed.thinking.as_ref().filter(|_| may_reason);
        budget.map_or(usize::MAX, |budget| budget.limit.saturating_sub(choice.num_reasoning_tokens + 1))
    }

    /// Which tokens may come `ahead` places behind a choice's next one; `None`: all.
    pub fn mask(&self, index: usize, ahead: usize) -> Option<TokenMask<'_>> {
        let position = self.choices[index].output_token_ids.len() + ahead;
        self.forced(index, ahead).or_else(|| self.submitted.allowed.mask(position))
    }

    /// The one token that may come there, where reasoning is being ended.
    fn forced(&self, index: usize, ahead: usize) -> Option<TokenMask<'_>> {
        let budget = self.submitted.allowed.thinking.as_ref()?;
        budget.close.get(self.choices[index].num_forced? + ahead).map(TokenSet::mask)
    }

    /// See [`Sampler::accept`].
    pub fn accept(&self, index: usize, row: SampledRow) -> Sampled {
        lock(&self.choices[index].sampler).accept(row)
    }

    /// Takes the vector that a choice ends with.
    pub fn push_vector(&mut self, index: usize, values: Vec<f32>) {
        self.first_token.get_or_insert_with(Instant::now);
        self.emit(index, OutputEvent::Vector { index, values });
    }

    /// Reports log probabilities of prompt tokens, in order: to every choice, apart, or both.
    pub fn push_prompt_logprobs(&mut self, mut logprobs: Vec<PromptLogprob>) {
        let PromptLogprobs { echoed, apart } = self.submitted.prompt_logprobs;
        if let Some(num_top) = echoed {
            let own = |entry: &PromptLogprob| TokenLogprobs {
                top_logprobs: entry.token.top_logprobs.iter().take(num_top).cloned().collect(),
                ..entry.token.clone()
            };
            let echoed: Vec<_> = logprobs.iter().map(own).collect();
            for index in 0..self.choices.len() {
                let (text, token_ids) = (String::new(), Vec::new());
                let (reasoning, calls) = (String::new(), Vec::new());
                let logprobs = echoed.clone();
                self.emit(index, OutputEvent::Delta { index, reasoning, text, calls, logprobs, token_ids, num_tokens: 0 });
            }
        }
        if let Some(num_top) = apart {
            for entry in &mut logprobs {
                entry.token.top_logprobs.truncate(num_top);
            }
            self.submitted.outbox.push(Ok(OutputEvent::PromptLogprobs(logprobs)));
        }
    }

    /// Takes a sampled token; if it ends the choice, tells why, and [`Self::finish`] is to be called.
    pub fn push_token(&mut self, index: usize, sampled: &Sampled, tokenizer: &Tokenizer) -> Option<FinishReason> {
        self.first_token.get_or_insert_with(Instant::now);
        let choice = &mut self.choices[index];
        choice.output_token_ids.push(sampled.token_id);
        let num_tokens = choice.output_token_ids.len();
        self.usage.completion_tokens += 1;
        let may_end = num_tokens > self.submitted.allowed.min_tokens;
        let is_stop_token = self.submitted.stop_token_ids.contains(&sampled.token_id);
        let mut delta = String::new();
        let is_stopped = is_stop_token || choice.text.push(tokenizer, sampled.token_id, may_end, &mut delta);
        // Where the grammar is complete, no end-of-sequence token is waited for.
        let is_complete = choice.constraint.as_ref().is_some_and(|constraint| lock(constraint).has_ended_after(num_tokens));
        let mut logprobs = Vec::new();
        if let Some(row) = &sampled.logprobs {
            choice.sum_logprob += f64::from(row.logprob);
            if self.submitted.logprobs.is_some() {
                logprobs.push(token_logprobs(tokenizer, sampled.token_id, Some(row.logprob), &row.top));
            }
        }
        let token_ids = if self.submitted.return_token_ids { vec![sampled.token_id] } else { Vec::new() };
        let was_reasoning = choice.reader.as_ref().is_some_and(Reader::is_reasoning);
        self.usage.reasoning_tokens += usize::from(was_reasoning);
        choice.num_reasoning_tokens += usize::from(was_reasoning);
        choice.num_forced = choice.num_forced.map(|num_forced| num_forced + 1);
        let Parts { reasoning, text, calls } = choice.read(delta);
        if let Some(budget) = &self.submitted.allowed.thinking {
            choice.bound_reasoning(budget);
        }
        let is_new =
            !(reasoning.is_empty() && text.is_empty() && calls.is_empty() && logprobs.is_empty() && token_ids.is_empty());
        if is_new {
            self.emit(index, OutputEvent::Delta { index, reasoning, text, calls, logprobs, token_ids, num_tokens });
        }
        let is_full = num_tokens >= self.submitted.max_tokens;
        if is_stopped || is_complete { Some(FinishReason::Stop) } else { is_full.then_some(FinishReason::Length) }
    }

    /// What a choice has come to; `kept` has its blocks.
    pub fn sequence(&self, index: usize, kept: Option<Arc<Kept>>) -> Sequence {
        let token_ids = [&*self.submitted.prompt_token_ids, &self.choices[index].output_token_ids].concat();
        Sequence { origin: self.submitted.origin.clone(), token_ids: token_ids.into(), kept }
    }

    /// Ends a choice with the text it has.
    pub fn finish(&mut self, index: usize, end: End<'_>) {
        let sequence = self.submitted.keep.is_some().then(|| self.sequence(index, end.kept));
        let choice = &mut self.choices[index];
        if choice.finished {
            return;
        }
        choice.finished = true;
        let mut text = String::new();
        choice.text.finish(&mut text);
        let stop_sequence = choice.text.stop_sequence().map(str::to_owned);
        let num_tokens = choice.output_token_ids.len();
        let mut parts = choice.read(text);
        let mut reason = end.reason;
        if let Some(reader) = &mut choice.reader {
            reader.finish(&mut parts);
            if reason == FinishReason::Stop && reader.has_calls() {
                reason = FinishReason::ToolCalls;
            }
        }
        if let Some(suffix) = &self.submitted.suffix {
            parts.text.push_str(suffix);
        }
        if !parts.is_empty() {
            let Parts { reasoning, text, calls } = parts;
            let (logprobs, token_ids) = (Vec::new(), Vec::new());
            self.emit(index, OutputEvent::Delta { index, reasoning, text, calls, logprobs, token_ids, num_tokens });
        }
        let error = end.error.map(str::to_owned);
        let constraint = self.choices[index].constraint.as_ref().filter(|_| reason == FinishReason::Error);
        let grammar_fault = constraint.and_then(|constraint| lock(constraint).fault());
        let finished = OutputEvent::Finished { index, reason, stop_sequence, error, grammar_fault, num_tokens, sequence };
        self.emit(index, finished);
        if self.is_done() {
            self.close();
        }
    }

    /// Ends every choice that has not ended, with the text it has.
    pub fn fail(&mut self, why: &str) {
        for index in 0..self.choices.len() {
            self.finish(index, End::error(why));
        }
    }

    /// Ends the events with an error and nothing else, at once.
    pub fn abandon(&mut self, error: EngineError) {
        for choice in &mut self.choices {
            choice.finished = true;
        }
        self.submitted.outbox.push(Err(error));
        self.hand_over();
        self.flush();
    }

    fn close(&mut self) {
        self.release_held();
        let end = Instant::now();
        let first = self.first_token.unwrap_or(end);
        self.usage.total_time_sec = (end - self.submitted.submitted_at).as_secs_f64();
        let begun = self.first_step.unwrap_or(end);
        self.usage.total_queue_time_sec = begun.saturating_duration_since(self.submitted.submitted_at).as_secs_f64();
        self.usage.total_prompt_time_sec = (first - self.submitted.submitted_at).as_secs_f64();
        self.usage.total_completion_time_sec = (end - first).as_secs_f64();
        self.submitted.outbox.push(Ok(OutputEvent::Done(self.usage.clone())));
    }

    fn emit(&mut self, index: usize, event: OutputEvent) {
        if !self.submitted.stream || self.chooses_the_best() {
            hold(&mut self.choices[index].held, event);
        } else {
            self.submitted.outbox.push(Ok(event));
        }
    }

    fn chooses_the_best(&self) -> bool {
        self.submitted.num_returned < self.choices.len()
    }

    /// Gives out what was held back: of the best choices, renumbered from the best, when only they are wanted.
    fn release_held(&mut self) {
        let chooses = self.chooses_the_best();
        let mean = |c: &Choice| c.sum_logprob / c.output_token_ids.len().max(1) as f64;
        let mut ranked: Vec<&mut Choice> = self.choices.iter_mut().collect();
        if chooses {
            ranked.sort_by(|a, b| mean(b).total_cmp(&mean(a)));
        }
        for (rank, choice) in ranked.into_iter().take(self.submitted.num_returned).enumerate() {
            for mut event in choice.held.drain(..) {
                match &mut event {
                    OutputEvent::Delta { index, .. }
                    | OutputEvent::Vector { index, .. }
                    | OutputEvent::Finished { index, .. } => {
                        *index = rank;
                    }
                    OutputEvent::PromptLogprobs(_) | OutputEvent::Done(_) => {}
                }
                self.submitted.outbox.push(Ok(event));
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Draws a token that the grammar allows, and takes it: from all tokens first, as a mask costs more than a check. Behind the end
/// of the grammar, where nothing is delivered, any.
fn constrained(
    sampler: &mut Sampler,
    constraint: &mut Constraint,
    logits: &mut [f32],
    position: usize,
) -> Result<Sampled, EngineError> {
    if constraint.has_ended() {
        return sampler.sample(logits, position, None);
    }
    let sampled = if sampler.truncates() {
        sampler.sample(logits, position, Some(constraint.mask()?))?
    } else {
        let sampled = sampler.sample(logits, position, None)?;
        if constraint.take(sampled.token_id)? {
            return Ok(sampled);
        }
        sampler.sample_again(logits, position, constraint.mask()?)?
    };
    constraint.take_allowed(sampled.token_id)?;
    Ok(sampled)
}

/// New text of a choice, without a token.
fn text_alone(index: usize, text: String, num_tokens: usize) -> OutputEvent {
    let (reasoning, calls, logprobs, token_ids) = (String::new(), Vec::new(), Vec::new(), Vec::new());
    OutputEvent::Delta { index, reasoning, text, calls, logprobs, token_ids, num_tokens }
}

/// Keeps an event back, deltas as one.
fn hold(held: &mut Vec<OutputEvent>, event: OutputEvent) {
    let rest = match held.last_mut() {
        Some(last) => last.append(event).err().map(|event| *event),
        None => Some(event),
    };
    held.extend(rest);
}

/// Log probabilities of one token with the tokens' texts.
pub fn token_logprobs(tokenizer: &Tokenizer, token_id: u32, logprob: Option<f32>, top: &[(u32, f32)]) -> TokenLogprobs {
    TokenLogprobs {
        token_id,
        logprob,
        text: tokenizer.token_text(token_id),
        bytes: tokenizer.token_bytes(token_id).to_vec(),
        top_logprobs: top
            .iter()
            .map(|&(token_id, logprob)| TopLogprob { token_id, logprob, bytes: tokenizer.token_bytes(token_id).to_vec() })
            .collect(),
    }
}

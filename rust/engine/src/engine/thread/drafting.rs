//! Drafts of a second model. Its keys and values lie in the same blocks as the model's, those of each token side by side, so
//! that what is found, copied, kept and thrown away is both.
//!
//! In each step it computes the rows of the model, and the drafts one by one behind them: when a step is over, both models have
//! computed the same tokens. What follows the last draft nobody asks for, but its keys and values are there should it be right.

use std::ops::Range;

use device::{KvGroupMetadata, RowSampling, StepMetadata};
use paged::{RequestId, ScheduledRequest, SchedulerOutput};
use rustc_hash::FxHashSet;

use super::heads::HiddenStates;
use crate::{
    EngineError,
    input_batch::InputBatch,
    model_runner::{Greedy, ModelRunner},
    sampler::largest,
};

/// The draft model of an engine thread, or a head of the model itself (`heads.rs`).
pub struct Drafter {
    pub(super) runner: ModelRunner,
    /// Tokens of the model.
    vocab_size: usize,
    /// Requests whose drafts are what a grammar forces.
    pub(super) forced: FxHashSet<RequestId>,
    /// What a head goes on from; `None` for a model.
    pub(super) states: Option<HiddenStates>,
    /// One pass of its own.
    pub(super) token_ids: Vec<u32>,
    pub(super) step: StepMetadata,
    pub(super) tokens: Vec<u32>,
}

/// The likeliest token, where the device draws.
const LIKELIEST: RowSampling<'_> =
    RowSampling { temperature: None, top_k: None, top_p: 1.0, min_p: 0.0, uniform: 0.0, mask: None };

/// Rows of a request in a pass.
pub(super) struct PassRows {
    /// Its number among those of the step.
    pub(super) index: usize,
    /// Rows of the step.
    pub(super) rows: Range<usize>,
    /// What follows the last of them is a draft.
    pub(super) has_output: bool,
}

impl Drafter {
    /// With a runner that shares the KV storage of a model with so many tokens.
    pub fn new(runner: ModelRunner, vocab_size: usize) -> Self {
        Self {
            runner,
            vocab_size,
            forced: FxHashSet::default(),
            states: None,
            token_ids: Vec::new(),
            step: StepMetadata::default(),
            tokens: Vec::new(),
        }
    }

    /// The same with a head of the model itself.
    pub fn of_head(runner: ModelRunner) -> Self {
        let (vocab_size, hidden_size) = (runner.config().vocab_size, runner.config().hidden_size);
        Self { states: Some(HiddenStates::new(hidden_size)), ..Self::new(runner, vocab_size) }
    }

    /// Computes a step's rows, and puts the drafts in their places in the step. `prompt_len`: tokens of a request's prompt.
    pub(super) fn run(
        &mut self,
        batch: &mut InputBatch,
        output: &mut SchedulerOutput,
        prompt_len: impl Fn(RequestId) -> usize,
    ) -> Result<(), EngineError> {
        if self.states.is_some() {
            return self.guess(batch, output, prompt_len);
        }
        let most = output.rows.iter().map(|row| self.num_drafts(row)).max();
        for pass in 0..=most.unwrap_or(0) {
            let rows = self.rows(pass, batch, output);
            self.fill(&rows, batch, output, &prompt_len);
            if self.token_ids.is_empty() {
                continue;
            }
            self.runner.execute(&self.token_ids, &self.step)?;
            self.choose(&rows)?;
            self.put(pass, &rows, batch, output);
        }
        Ok(())
    }

    /// Puts the drafts of a pass in their places.
    pub(super) fn put(&self, pass: usize, rows: &[PassRows], batch: &mut InputBatch, output: &mut SchedulerOutput) {
        let mut tokens = self.tokens.iter();
        for of in rows.iter().filter(|of| of.has_output) {
            let (Some(token), place) = (tokens.next(), of.rows.end) else { break };
            // One that only the draft model has is as wrong as any.
            let token = if (*token as usize) < self.vocab_size { *token } else { 0 };
            batch.token_ids[place] = token;
            let before: usize = output.rows[..of.index].iter().map(|row| row.num_drafts).sum();
            output.drafts[before + pass] = token;
        }
    }

    /// Drafts of a row that it is to make.
    pub(super) fn num_drafts(&self, row: &ScheduledRequest) -> usize {
        if self.forced.contains(&row.request_id) { 0 } else { row.num_drafts }
    }

    /// The rows of a pass: first all that are known, then a draft of each request that has so many.
    fn rows(&self, pass: usize, batch: &InputBatch, output: &SchedulerOutput) -> Vec<PassRows> {
        let mut all = Vec::new();
        for (index, (row, range)) in output.rows.iter().zip(batch.step.query_start_loc.windows(2)).enumerate() {
            let (start, end) = (range[0] as usize, range[1] as usize);
            let num_drafts = self.num_drafts(row);
            if pass > num_drafts {
                continue;
            }
            let known = end - num_drafts;
            let mut rows = if pass == 0 { start..known } else { known + pass - 1..known + pass };
            // Beyond its context it says nothing.
            let context = self.runner.config().max_position_embeddings;
            let within = batch.step.positions[rows.clone()].partition_point(|position| (*position as usize) < context);
            let has_output = pass < num_drafts && within == rows.len();
            rows.end = rows.start + within;
            if !rows.is_empty() {
                all.push(PassRows { index, rows, has_output });
            }
        }
        all
    }

    /// The rows of a pass, flat.
    pub(super) fn fill(
        &mut self,
        rows: &[PassRows],
        batch: &InputBatch,
        output: &SchedulerOutput,
        prompt_len: &impl Fn(RequestId) -> usize,
    ) {
        let (step, of) = (&mut self.step, &batch.step);
        self.token_ids.clear();
        step.positions.clear();
        step.rope_positions.clear();
        step.seq_lens.clear();
        step.query_start_loc.clear();
        step.query_start_loc.push(0);
        step.groups.resize_with(of.groups.len(), KvGroupMetadata::default);
        for (group, whole) in step.groups.iter_mut().zip(&of.groups) {
            group.max_blocks = whole.max_blocks;
            group.block_tables.clear();
            group.slot_mapping.clear();
        }
        for PassRows { index, rows, .. } in rows {
            let positions = &of.positions[rows.clone()];
            let own = self.runner.config().vocab_size as u32;
            self.token_ids.extend(batch.token_ids[rows.clone()].iter().map(|id| if *id < own { *id } else { 0 }));
            step.positions.extend_from_slice(positions);
            let rope = self.runner.config().rope_rows(prompt_len(output.rows[*index].request_id));
            step.rope_positions.extend(positions.iter().map(|position| rope.row(*position as usize)));
            step.query_start_loc.push(self.token_ids.len() as u32);
            step.seq_lens.push(positions.last().map_or(0, |position| position + 1));
            for (group, whole) in step.groups.iter_mut().zip(&of.groups) {
                group.block_tables.extend_from_slice(&whole.block_tables[index * whole.max_blocks..][..whole.max_blocks]);
                group.slot_mapping.extend_from_slice(&whole.slot_mapping[rows.clone()]);
            }
        }
    }

    /// The likeliest tokens behind the rows of the pass that have an output.
    pub(super) fn choose(&mut self, rows: &[PassRows]) -> Result<(), EngineError> {
        self.tokens.clear();
        let ends = rows.iter().zip(&self.step.query_start_loc[1..]);
        let wanted: Vec<_> = ends.filter(|(of, _)| of.has_output).map(|(_, end)| end - 1).collect();
        if wanted.is_empty() {
            return Ok(());
        }
        if self.runner.samples() {
            let sampling = vec![Some(LIKELIEST); wanted.len()];
            let (sampled, _) = self.runner.sample(&wanted, &sampling, 0)?;
            // Without a finite number there is none; a guess may be anything.
            self.tokens.extend(sampled.iter().map(|row| row.as_ref().map_or(0, |row| row.token_id)));
        } else if let Greedy::Logits(logits) = self.runner.greedy_tokens(&wanted, &[], &mut self.tokens)? {
            self.tokens.clear();
            self.tokens.extend((0..wanted.len()).filter_map(|row| largest(logits.row(row), 1).first().map(|(token, _)| *token)));
        }
        Ok(())
    }
}

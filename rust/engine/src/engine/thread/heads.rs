//! Drafts of a head of the model itself, which predicts further tokens (`model/mtp.rs`). Its keys and values lie in the same
//! blocks as the model's.
//!
//! A head goes on from hidden states: its input at position p is made of token p and of the model's hidden state at p - 1. So
//! what it keeps for a position depends on no token behind it, and a cached block serves it as it serves the model. In each step
//! it works twice. Before the model runs it guesses, each token from its own output for the one before. Once the model has run it
//! computes the step's rows again from what the model made of them. Of each request the last hidden states are kept, for the next
//! step goes on from the one of them that is behind the last right draft.
//!
//! Nobody keeps hidden states of cached blocks. At the first position of a prompt, and at the first behind a hit, the head gets
//! zeros instead: what it guesses may be worse for that, never what is answered.

#[cfg(test)]
mod tests;

use paged::{RequestId, SchedulerOutput};
use rustc_hash::FxHashMap;

use super::drafting::{Drafter, PassRows};
use crate::{EngineError, input_batch::InputBatch, model_runner::ModelRunner};

/// The last hidden states of requests.
pub(super) struct HiddenStates {
    /// Columns of a state.
    cols: usize,
    /// The position of the first state, and `[num_positions, cols]`.
    last: FxHashMap<RequestId, (usize, Vec<f32>)>,
}

impl HiddenStates {
    pub(super) fn new(cols: usize) -> Self {
        Self { cols, last: FxHashMap::default() }
    }

    /// The state of a request before this position, if it is kept.
    fn before(&self, request: RequestId, position: usize) -> Option<&[f32]> {
        let (first, states) = self.last.get(&request)?;
        states.chunks_exact(self.cols).nth(position.checked_sub(first + 1)?)
    }

    /// Writes it, or zeros.
    fn write_before(&self, request: RequestId, position: usize, out: &mut [f32]) {
        match self.before(request, position) {
            Some(state) => out.copy_from_slice(state),
            None => out.fill(0.0),
        }
    }

    /// A request begins where another one is.
    pub(super) fn fork(&mut self, source: RequestId, child: RequestId) {
        if let Some(states) = self.last.get(&source).cloned() {
            self.last.insert(child, states);
        }
    }
}

impl Drafter {
    /// Whether it can draft only behind the one token that a request has not computed yet.
    pub(super) fn is_head(&self) -> bool {
        self.states.is_some()
    }

    /// Puts the drafts in their places in the step.
    pub(super) fn guess(
        &mut self,
        batch: &mut InputBatch,
        output: &mut SchedulerOutput,
        prompt_len: impl Fn(RequestId) -> usize,
    ) -> Result<(), EngineError> {
        let Some(states) = self.states.take() else { return Ok(()) };
        let guessed = self.guess_from(&states, batch, output, &prompt_len);
        self.states = Some(states);
        guessed
    }

    fn guess_from(
        &mut self,
        states: &HiddenStates,
        batch: &mut InputBatch,
        output: &mut SchedulerOutput,
        prompt_len: &impl Fn(RequestId) -> usize,
    ) -> Result<(), EngineError> {
        let cols = states.cols;
        // By the number of the request, what the head made of the token before.
        let mut own: FxHashMap<usize, Vec<f32>> = FxHashMap::default();
        for pass in 0.. {
            let starts = batch.step.query_start_loc.iter().zip(&output.rows).enumerate();
            let drafted = starts.filter(|(_, (_, row))| row.num_known_tokens() == 1 && self.num_drafts(row) > pass);
            let rows: Vec<_> = drafted
                .map(|(index, (start, _))| {
                    let row = *start as usize + pass;
                    PassRows { index, rows: row..row + 1, has_output: true }
                })
                .collect();
            if rows.is_empty() {
                break;
            }
            self.fill(&rows, batch, output, prompt_len);
            let mut before = |row: usize, out: &mut [f32]| {
                let of: &PassRows = &rows[row];
                if let Some(state) = own.get(&of.index) {
                    out.copy_from_slice(state);
                } else {
                    let position = batch.step.positions[of.rows.start] as usize;
                    states.write_before(output.rows[of.index].request_id, position, out);
                }
            };
            self.runner.execute_head(&self.token_ids, &mut before, &self.step)?;
            self.choose(&rows)?;
            self.put(pass, &rows, batch, output);
            self.runner.fetch_hidden_states();
            for (row, of) in rows.iter().enumerate() {
                self.runner.hidden_state(row, own.entry(of.index).or_insert_with(|| vec![0.0; cols]));
            }
        }
        Ok(())
    }

    /// Computes a step's rows from what the model, which has just run them, made of them. `is_there`: whether a request has not
    /// ended.
    pub(super) fn catch_up(
        &mut self,
        model: &mut ModelRunner,
        batch: &InputBatch,
        output: &SchedulerOutput,
        (prompt_len, is_there): (impl Fn(RequestId) -> usize, impl Fn(RequestId) -> bool),
    ) -> Result<(), EngineError> {
        let Some(mut states) = self.states.take() else { return Ok(()) };
        states.last.retain(|id, _| is_there(*id));
        model.fetch_hidden_states();
        let caught_up = self.catch_up_with(&states, model, batch, output, &prompt_len);
        for (row, range) in output.rows.iter().zip(batch.step.query_start_loc.windows(2)) {
            // Any of these may be the last that is right, and a request with states of layers goes back to the first row.
            let (first, end) = (range[1] as usize - row.num_drafts - 1, range[1] as usize);
            let position = batch.step.positions[first] as usize;
            let mut kept =
                states.before(row.request_id, position).filter(|_| row.num_drafts > 0).map_or_else(Vec::new, Vec::from);
            let num_before = kept.len() / states.cols;
            kept.resize((num_before + end - first) * states.cols, 0.0);
            for (row, state) in (first..end).zip(kept.chunks_exact_mut(states.cols).skip(num_before)) {
                model.hidden_state(row, state);
            }
            states.last.insert(row.request_id, (position - num_before, kept));
        }
        self.states = Some(states);
        caught_up
    }

    fn catch_up_with(
        &mut self,
        states: &HiddenStates,
        model: &ModelRunner,
        batch: &InputBatch,
        output: &SchedulerOutput,
        prompt_len: &impl Fn(RequestId) -> usize,
    ) -> Result<(), EngineError> {
        let ranges = batch.step.query_start_loc.windows(2).enumerate();
        let rows: Vec<_> = ranges
            .map(|(index, range)| PassRows { index, rows: range[0] as usize..range[1] as usize, has_output: false })
            .collect();
        self.fill(&rows, batch, output, prompt_len);
        let starts: FxHashMap<_, _> = rows.iter().map(|of| (of.rows.start, output.rows[of.index].request_id)).collect();
        let mut before = |row: usize, out: &mut [f32]| match starts.get(&row) {
            Some(request) => states.write_before(*request, batch.step.positions[row] as usize, out),
            None => model.hidden_state(row - 1, out),
        };
        self.runner.execute_head(&self.token_ids, &mut before, &self.step)
    }
}

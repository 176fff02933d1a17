//! One step: propose, schedule, run the model, compute the outputs, commit, hand them out.

use std::{sync::Arc, time::Instant};

use device::AdapterRows;
use paged::{RequestId, ScheduledRequest, SchedulerOutput, StuckReport};
use rustc_hash::FxHashMap;

use super::{
    ActiveChoice, Drafter, EngineThread, HeldOutputs,
    constrained::{add_forced, allowed_drafts},
    media::StepMedia,
    sampling::Wanted,
    ticks,
};
use crate::{
    EngineError, FinishReason, OutputKind,
    engine::output::{ActiveRequest, End},
    error::caught,
    input_batch::{BlockLayout, InputBatch, RequestRows},
    model::decoder::MediaRows,
    sampler::Sampled,
    speculation::Answered,
};

/// Tokens of a request's prompt.
fn prompt_len(active: &FxHashMap<RequestId, ActiveChoice>, requests: &FxHashMap<u64, ActiveRequest>, id: RequestId) -> usize {
    let request = active.get(&id).and_then(|active| requests.get(&active.request_number));
    request.map_or(0, |request| request.submitted().prompt_token_ids.len())
}

impl EngineThread {
    pub(super) fn step(&mut self) {
        let mut output = std::mem::take(&mut self.output);
        self.scheduler.set_now(ticks(self.started, Instant::now()));
        self.poll_tier();
        self.scheduler.limit_prompt_tokens(self.pacer.limits());
        self.propose();
        self.scheduler.schedule_into(&mut output);
        for &(id, reason) in &output.finished {
            match reason {
                paged::FinishReason::Deadline => self.end(id, &End::new(FinishReason::Timeout)),
                paged::FinishReason::Stuck => self.end_stuck(id, output.stuck.as_ref()),
                // The pool, or the model's length, holds no more of it.
                _ => self.end(id, &End::new(FinishReason::Length)),
            }
        }
        for preemption in &output.preempted {
            let active = self.active.get(&preemption.request_id);
            if let Some(request) = active.and_then(|active| self.requests.get_mut(&active.request_number)) {
                request.count_preemption();
            }
        }
        self.save_states();
        // First out: what comes in may take the place of what was freed.
        self.swap_out();
        self.swap_in(&output);
        if !output.rows.is_empty() {
            let began = Instant::now();
            self.step_began = began;
            let executed = caught(|| self.execute(&mut output));
            // What was unloaded meanwhile is not kept until the next step.
            self.batch.step.adapters.clear();
            self.runner.forget_adapters();
            match executed {
                Ok(Ok(())) => {
                    self.pacer.measure(&output, began.elapsed());
                    let num_tokens = output.rows.iter().map(|row| row.num_scheduled_tokens).sum();
                    self.heartbeat.count_step(num_tokens);
                    if let Some(speculator) = &mut self.speculator
                        && !output.rows.iter().any(ScheduledRequest::is_chunk)
                    {
                        speculator.note_step(num_tokens, began.elapsed());
                    }
                    self.commit(&output);
                }
                Ok(Err(error)) => self.fail_step(&output, &error.to_string()),
                Err(why) => self.fail_step(&output, &why),
            }
        }
        self.output = output;
    }

    /// Asks for drafts for the requests that are being answered: what a grammar forces, else what the proposer says.
    fn propose(&mut self) {
        let Some(speculator) = &mut self.speculator else { return };
        // Whether forced text pays where a device samples was not measured.
        let may_force = speculator.forces() && !self.runner.samples();
        let forces = may_force && self.requests.values().any(ActiveRequest::is_constrained);
        if !forces && !speculator.proposes() {
            return;
        }
        let (scheduler, active, requests) = (&self.scheduler, &mut self.active, &self.requests);
        let (mut has_prompts, mut num_rows) = (scheduler.num_waiting() > 0, 0);
        let needs_next = self.drafter.as_ref().is_some_and(Drafter::is_head);
        let answered = scheduler.running_requests().filter_map(|id| {
            let num_tokens = scheduler.token_ids(id).len();
            let of_answer = scheduler.num_answer_tokens(id).unwrap_or(0);
            let is_next = of_answer == 1;
            has_prompts |= of_answer == 0;
            num_rows += of_answer;
            // The first tokens of several choices come from one row.
            let active = active.get(&id).filter(|active| !active.leads && active.output == OutputKind::Tokens)?;
            let is_answered = is_next || (!needs_next && num_tokens > scheduler.num_prompt_tokens(id));
            is_answered.then_some(Answered { id, history: active.drafts, forced: Vec::new() })
        });
        let mut answered: Vec<_> = answered.collect();
        let num_rows = (!has_prompts).then_some(num_rows);
        if forces && speculator.may_ask(num_rows) {
            let began = Instant::now();
            for Answered { id, forced, .. } in &mut answered {
                let Some(active) = active.get(id) else { continue };
                let Some(request) = requests.get(&active.request_number) else { continue };
                add_forced(request, active.choice, scheduler.token_ids(*id).last().copied(), forced);
            }
            speculator.note_asking(num_rows, began.elapsed());
        }
        if let Some(drafter) = &mut self.drafter {
            drafter.forced.clear();
            drafter.forced.extend(answered.iter().filter(|answered| !answered.forced.is_empty()).map(|answered| answered.id));
        }
        // Those of a draft model are not known yet.
        let are_known = self.drafter.is_none();
        let num_allowed = |id, drafts: &[u32]| {
            let active = active.get(&id);
            let request = active.and_then(|active| Some((requests.get(&active.request_number)?, active.choice)));
            let Some((request, choice)) = request else { return drafts.len() };
            let drafts = &drafts[..drafts.len().min(request.num_before_close(choice))];
            if are_known { allowed_drafts(request, choice, drafts) } else { drafts.len() }
        };
        if let Err(why) = speculator.propose(&mut self.scheduler, &mut answered, num_rows, num_allowed) {
            tracing::error!("no more drafts are proposed: {why}");
        }
        for Answered { id, history, .. } in answered {
            if let Some(active) = active.get_mut(&id) {
                active.drafts = history;
            }
        }
    }

    /// Runs the model on the scheduled rows and computes what those with outputs come to, into `self.outputs`.
    fn execute(&mut self, output: &mut SchedulerOutput) -> Result<(), EngineError> {
        self.outputs.clear();
        let (active, requests) = (&self.active, &self.requests);
        let layout = BlockLayout { block_size: self.kv.block_size, num_groups: self.kv.groups.groups.len() };
        let has_token_types = self.runner.config().positions.is_some_and(|positions| positions.rows_of_position() > 1);
        let of_request = |id| {
            let Some(active) = active.get(&id) else { return RequestRows::default() };
            let origin = requests.get(&active.request_number).map(|request| &request.submitted().origin);
            let items = origin.and_then(|origin| origin.items.as_deref());
            let second = origin.and_then(|origin| origin.second).filter(|_| has_token_types);
            RequestRows { rope: active.rope, items, second }
        };
        self.batch.build(&self.scheduler, output, layout, of_request);
        if self.runner.config().is_recurrent() {
            let num_slots = self.num_state_slots();
            let restored = self.states.assign(&self.scheduler, output, num_slots, &mut self.batch.step.state_slots)?;
            for (from, to) in restored {
                self.runner.copy_states(from, to)?;
            }
        }
        self.set_adapters(output);
        self.runner.copy_blocks(&output.copies)?;
        self.make_drafts(output);
        let InputBatch { token_ids, step, items, coordinates } = &self.batch;
        let StepMedia { own, seen, num_encoded } = match &mut self.senses {
            Some(senses) if !items.is_empty() => senses.encoded(&mut self.runner, items)?,
            _ => StepMedia::default(),
        };
        self.runner.execute_with((token_ids, MediaRows { own: &own, seen: &seen, ..MediaRows::default() }), coordinates, step)?;
        self.count_encoded(&num_encoded);
        self.states.advance(output);
        self.report_prompt_logprobs(output)?;
        self.compute_outputs(output)?;
        self.catch_up(output);
        Ok(())
    }

    /// Has the draft model fill in the drafts of a step. Should it fail, there are no more; those of this step are wrong.
    fn make_drafts(&mut self, output: &mut SchedulerOutput) {
        let Some(drafter) = &mut self.drafter else { return };
        let (batch, active, requests) = (&mut self.batch, &self.active, &self.requests);
        let prompt_len = |id| prompt_len(active, requests, id);
        let made = caught(|| drafter.run(batch, output, prompt_len));
        self.check_drafts(made);
    }

    /// Has a head that makes drafts compute what the model has computed. Should it fail, there are no more drafts.
    fn catch_up(&mut self, output: &SchedulerOutput) {
        let Some(drafter) = &mut self.drafter else { return };
        let (runner, batch, active, requests) = (&mut self.runner, &self.batch, &self.active, &self.requests);
        let of_requests = (|id| prompt_len(active, requests, id), |id| active.contains_key(&id));
        let caught_up = caught(|| drafter.catch_up(runner, batch, output, of_requests));
        self.check_drafts(caught_up);
    }

    fn check_drafts(&mut self, made: Result<Result<(), EngineError>, String>) {
        let failed = match made {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(why) => why,
        };
        tracing::error!("the draft model makes no more drafts: {failed}");
        self.drafter = None;
        if let Some(speculator) = &mut self.speculator {
            speculator.stop();
        }
    }

    /// Keeps in a request's usage which of its images and sounds had to be encoded.
    fn count_encoded(&mut self, num_encoded: &[usize]) {
        for (rows, num_encoded) in self.batch.items.iter().zip(num_encoded) {
            let request = self.active.get(&rows.request).and_then(|active| self.requests.get_mut(&active.request_number));
            if let Some(request) = request {
                (0..*num_encoded).for_each(|_| request.count_encoded(rows.item.kind));
            }
        }
    }

    /// Tells the step which of its rows have which adapter.
    fn set_adapters(&mut self, output: &SchedulerOutput) {
        let step = &mut self.batch.step;
        step.adapters.clear();
        for (row, range) in output.rows.iter().zip(step.query_start_loc.windows(2)) {
            let request = self.active.get(&row.request_id).and_then(|active| self.requests.get(&active.request_number));
            let Some(generation) = request.and_then(|request| request.submitted().origin.adapter.as_ref()) else { continue };
            let adapter = &generation.adapter;
            let rows = range[0]..range[1];
            match step.adapters.iter_mut().find(|of| Arc::ptr_eq(&of.adapter, adapter)) {
                Some(of) => of.rows.extend(rows),
                None => step.adapters.push(AdapterRows { adapter: Arc::clone(adapter), rows: rows.collect() }),
            }
        }
    }

    /// Commits the step, then hands the outputs to their requests.
    fn commit(&mut self, output: &SchedulerOutput) {
        let mut outputs = std::mem::take(&mut self.outputs);
        self.count(output, &outputs.wanted);
        // Whoever has the answer tells why.
        for (id, _) in &outputs.failed {
            self.scheduler.abort_request(*id);
        }
        match self.scheduler.update(output, &outputs.tokens()) {
            Ok(()) => {
                self.states.go_back(&self.scheduler);
                self.save_states();
                // Before anyone hears of it: who has the answer may end the process.
                self.swap_out();
                let mut last = None;
                for (id, token) in outputs.sampled.drain(..) {
                    // All but a request's first token were drafts, or stand behind one.
                    let is_behind_draft = last.replace(id) == Some(id);
                    self.deliver(id, &token, is_behind_draft);
                }
                outputs.branches.drain(..).for_each(|(lead, tokens)| self.branch_out(lead, tokens));
                outputs.vectors.drain(..).for_each(|(id, vector)| self.deliver_vector(id, vector));
            }
            Err(error) => self.fail_step(output, &error.to_string()),
        }
        // Whatever ails one may ail all: a line for them together.
        if let Some((_, why)) = outputs.failed.first() {
            tracing::error!("{} of {} requests in a step end: {why}", outputs.failed.len(), output.rows.len());
        }
        // Behind the tokens that they still have.
        outputs.failed.drain(..).for_each(|(id, why)| self.end(id, &End::error(&why)));
        self.outputs = outputs;
    }

    /// Keeps the figures of each request's usage. Drafts count as computed once they are accepted.
    fn count(&mut self, output: &SchedulerOutput, wanted: &[Wanted]) {
        let mut wanted = wanted.iter().peekable();
        for row in &output.rows {
            let num_accepted = wanted.next_if(|wanted| wanted.id == row.request_id).map_or(0, Wanted::num_accepted);
            let Some(active) = self.active.get_mut(&row.request_id) else { continue };
            let Some(request) = self.requests.get_mut(&active.request_number) else { continue };
            if let (Some(speculator), 1..) = (&mut self.speculator, row.num_drafts) {
                speculator.note_drafts(&mut active.drafts, row.num_drafts, num_accepted);
                request.count_drafts(row.num_drafts);
            }
            let goes_back = self.runner.config().is_recurrent() && num_accepted < row.num_drafts;
            let num_kept = if goes_back { 0 } else { row.num_known_tokens() + num_accepted };
            let (start, end) = (row.num_computed_tokens, row.num_computed_tokens + num_kept);
            if active.num_computed_tokens == 0 {
                request.set_first_step(self.step_began, start, row.miss);
            }
            request.count_recomputed(active.num_computed_tokens.min(end).saturating_sub(start));
            active.num_computed_tokens = active.num_computed_tokens.max(end);
            // Layers that look at images do so up to the last token.
            if end >= request.submitted().prompt_token_ids.len() && !self.runner.config().is_crossed() {
                active.held = HeldOutputs::default();
            }
        }
    }

    /// Hands a choice's new token to its request; `is_behind_draft`: the step had others before it, which were drafts.
    pub(super) fn deliver(&mut self, id: RequestId, token: &Sampled, is_behind_draft: bool) {
        let Some(active) = self.active.get(&id) else { return };
        let Some(request) = self.requests.get_mut(&active.request_number) else { return };
        if is_behind_draft {
            request.count_accepted_draft();
        }
        match caught(|| request.push_token(active.choice, token, &self.tokenizer)) {
            Ok(None) => {}
            Ok(Some(reason)) => self.complete(id, reason),
            Err(why) => self.abandon(active.request_number, EngineError::Internal(why)),
        }
    }

    /// Hands a request the vector that it ends with.
    fn deliver_vector(&mut self, id: RequestId, vector: Vec<f32>) {
        let Some(active) = self.active.get(&id) else { return };
        let Some(request) = self.requests.get_mut(&active.request_number) else { return };
        request.push_vector(active.choice, vector);
        self.end(id, &End::new(FinishReason::Stop));
    }

    /// A step that fails ends the requests of that step, with the text they have, and no others.
    fn fail_step(&mut self, output: &SchedulerOutput, why: &str) {
        tracing::error!("a step failed: {why}");
        for id in self.scheduler.step_failed(output) {
            self.end(id, &End::error(why));
        }
        self.check_device();
    }

    /// The scheduler promises progress; should it ever fail to make any, it ends the request in the way.
    fn end_stuck(&mut self, id: RequestId, report: Option<&StuckReport>) {
        let why = report.map_or_else(|| "the request cannot be scheduled".to_owned(), ToString::to_string);
        tracing::error!("{why}");
        self.end(id, &End::error(&why));
    }
}

//! Deficit round-robin: how tenants share the prompt tokens of a step.

use super::Scheduler;
use super::policy::FairnessPolicy;
use super::snapshots::before_snapshot;
use super::spans::before_span;
use crate::output::SchedulerOutput;
use crate::request::{Request, Tenant};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Share {
    tenant: Tenant,
    /// Prompt tokens it could compute in this step.
    wanted: usize,
    /// What is left of its turn.
    credit: usize,
    /// What it has been given of this step, and not used yet.
    allowance: usize,
    /// One of its prompts is begun and will not be finished by this step.
    is_computing: bool,
}

/// The tenants with prompts to compute. Turns and credit outlive a step, the rest is of one step.
#[derive(Debug, Clone, Default, Hash)]
pub(super) struct Shares {
    /// In order of tenants' ids.
    shares: Vec<Share>,
    turn: u64,
}

impl Shares {
    /// Its weight is that of the request which was asked about last.
    fn of(&mut self, tenant: Tenant) -> &mut Share {
        let place = match self.find(tenant) {
            Ok(place) => place,
            Err(place) => {
                self.shares.insert(place, Share { tenant, wanted: 0, credit: 0, allowance: 0, is_computing: false });
                place
            }
        };
        let share = &mut self.shares[place];
        share.tenant = tenant;
        share
    }

    fn find(&self, tenant: Tenant) -> Result<usize, usize> {
        self.shares.binary_search_by_key(&tenant.id, |share| share.tenant.id)
    }

    fn begin_step(&mut self) {
        for share in &mut self.shares {
            (share.wanted, share.allowance, share.is_computing) = (0, 0, false);
        }
    }

    /// Gives out `budget` tokens, a quantum times the tenant's weight a turn. A turn that the budget cuts short goes on in the
    /// next step, so each tenant gets its turn within as many quanta of prompt tokens as all weights together.
    fn give_out(&mut self, mut budget: usize, quantum: usize) {
        self.shares.retain(|share| share.wanted > 0);
        let mut num_wanting = self.shares.len();
        let mut at = self.shares.partition_point(|share| share.tenant.id < self.turn);
        while budget > 0 && num_wanting > 0 {
            at %= self.shares.len();
            let share = &mut self.shares[at];
            self.turn = share.tenant.id;
            if share.wanted > 0 {
                if share.credit == 0 {
                    share.credit = quantum.saturating_mul(share.tenant.weight.get() as usize);
                }
                let taken = share.credit.min(share.wanted).min(budget);
                share.wanted -= taken;
                share.credit -= taken;
                share.allowance += taken;
                budget -= taken;
                if share.wanted == 0 {
                    share.credit = 0;
                    num_wanting -= 1;
                }
                if share.credit > 0 {
                    return;
                }
            }
            at += 1;
            self.turn = self.turn.saturating_add(1);
        }
    }

    pub(super) fn is_computing(&self, tenant: Tenant) -> bool {
        self.find(tenant).is_ok_and(|place| self.shares[place].is_computing)
    }
}

impl Scheduler {
    pub(super) fn share_out(&mut self, budget: usize) {
        if self.config.fairness != FairnessPolicy::Drr {
            return;
        }
        let mut shares = std::mem::take(&mut self.shares);
        shares.begin_step();
        let mut num_decodes = 0;
        for &index in &self.running {
            let request = self.request(index);
            match request.num_answer_tokens() {
                0 => shares.of(request.standing.tenant).wanted += request.num_uncomputed_tokens(),
                of_answer => num_decodes += of_answer,
            }
        }
        if self.running.len() < self.config.max_num_seqs || self.next_urgent(&[]).is_some() {
            for index in self.waiting.heads() {
                let request = self.request(index);
                shares.of(request.standing.tenant).wanted += request.num_tokens();
            }
        }
        shares.give_out(budget.saturating_sub(num_decodes), self.config.drr_quantum);
        self.shares = shares;
    }

    /// Most tokens of a prompt that a request may compute in this step for the sake of other tenants; at least 1, so that nothing
    /// else about progress changes.
    pub(super) fn share_of(&mut self, tenant: Tenant) -> usize {
        if self.config.fairness != FairnessPolicy::Drr {
            return usize::MAX;
        }
        self.shares.of(tenant).allowance.max(1)
    }

    /// Takes note of a row of a tenant.
    pub(super) fn use_share(&mut self, tenant: Tenant, num_tokens: usize, finishes: bool) {
        if self.config.fairness == FairnessPolicy::Drr {
            let share = self.shares.of(tenant);
            share.allowance = share.allowance.saturating_sub(num_tokens);
            share.is_computing |= !finishes;
        }
    }

    /// Gives what tenants and prompts left of their shares to the rows that can use it, in their order and as far as blocks
    /// are free.
    pub(super) fn hand_out_the_rest(&mut self, output: &mut SchedulerOutput, budget: &mut usize) {
        let SchedulerOutput { rows, copies, .. } = output;
        for row in rows.iter_mut().filter(|row| row.num_outputs == 0) {
            if *budget == 0 {
                return;
            }
            let Some(Request { tokens, blocks, spans, snapshot_places, .. }) =
                self.requests[self.indices[&row.request_id]].as_mut()
            else {
                continue;
            };
            let from = row.num_computed_tokens + row.num_scheduled_tokens;
            let chunk_left = self.config.max_chunk_len.map_or(usize::MAX, |most| most - row.num_scheduled_tokens);
            let wanted = (tokens.len() - from).min(*budget).min(chunk_left);
            let more =
                if self.config.reserve_full_context { wanted } else { self.manager.num_tokens_that_fit(blocks, from, wanted) };
            let end = before_snapshot(snapshot_places, row.num_computed_tokens, from + more);
            let more = before_span(spans, end).saturating_sub(from);
            if more > 0 && self.manager.allocate_slots(blocks, from, from + more, copies).is_ok() {
                *budget -= more;
                row.num_scheduled_tokens += more;
                row.num_outputs = usize::from(from + more == tokens.len());
            }
        }
    }
}

//! Requests that wait, in the order in which they go.

use std::collections::BTreeMap;

use super::RequestIndex;
use super::policy::FairnessPolicy;
use crate::request::{Rank, Standing};

/// A priority's requests stand together, of those a tenant's, of those each in its rank.
type Place = (i32, u64, Rank);

/// The waiting requests. Adding and removing one costs the logarithm of their number.
#[derive(Debug, Clone)]
pub(super) struct WaitingQueue {
    fairness: FairnessPolicy,
    places: BTreeMap<Place, RequestIndex>,
    /// The tenant whose turn it is, or the next one, and how many of its requests have been admitted in it.
    turn: (u64, u32),
}

impl WaitingQueue {
    pub(super) fn new(fairness: FairnessPolicy) -> Self {
        Self { fairness, places: BTreeMap::new(), turn: (0, 0) }
    }

    fn place(&self, standing: &Standing) -> Place {
        let tenant = if self.fairness == FairnessPolicy::Drr { standing.tenant.id } else { 0 };
        (standing.rank.priority, tenant, standing.rank)
    }

    pub(super) fn insert(&mut self, standing: &Standing, index: RequestIndex) {
        self.places.insert(self.place(standing), index);
    }

    pub(super) fn remove(&mut self, standing: &Standing) {
        self.places.remove(&self.place(standing));
    }

    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    pub(super) fn most_urgent_priority(&self) -> Option<i32> {
        self.places.first_key_value().map(|((priority, ..), _)| *priority)
    }

    /// By priority, and within it tenant after tenant.
    pub(super) fn iter(&self) -> impl Iterator<Item = RequestIndex> + '_ {
        self.places.values().copied()
    }

    /// First request of each tenant of the most urgent priority, from the tenant on whose turn it is.
    pub(super) fn heads(&self) -> Heads<'_> {
        let priority = self.most_urgent_priority().unwrap_or(0);
        Heads { queue: self, priority, next: self.turn.0, wrapped: false }
    }

    pub(super) fn turn(&self) -> (u64, u32) {
        self.turn
    }

    /// Ends the turn of a tenant when, with this one, as many of its requests have been admitted as it has weight.
    pub(super) fn pass_turn(&mut self, standing: &Standing) {
        if self.fairness == FairnessPolicy::Drr {
            let tenant = standing.tenant;
            let admitted = if self.turn.0 == tenant.id { self.turn.1 } else { 0 } + 1;
            self.turn = if admitted < tenant.weight.get() { (tenant.id, admitted) } else { (tenant.id.wrapping_add(1), 0) };
        }
    }
}

pub(super) struct Heads<'a> {
    queue: &'a WaitingQueue,
    priority: i32,
    next: u64,
    wrapped: bool,
}

impl Iterator for Heads<'_> {
    type Item = RequestIndex;

    fn next(&mut self) -> Option<RequestIndex> {
        loop {
            let from = (self.priority, self.next, Rank::FIRST);
            let found = self.queue.places.range(from..).next().filter(|((priority, ..), _)| *priority == self.priority);
            match found {
                Some(((_, tenant, _), _)) if self.wrapped && *tenant >= self.queue.turn.0 => return None,
                Some(((_, tenant, _), index)) => {
                    (self.next, self.wrapped) = tenant.checked_add(1).map_or((0, true), |next| (next, self.wrapped));
                    return Some(*index);
                }
                None if self.wrapped => return None,
                None => (self.next, self.wrapped) = (0, true),
            }
        }
    }
}

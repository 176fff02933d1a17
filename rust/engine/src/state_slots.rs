//! Which request's states of recurrent layers lie in which slot, and which snapshots of them in those behind.

use paged::{RequestId, Scheduler, SchedulerOutput, SnapshotSlot, StateSave};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::EngineError;

/// The slots of the requests that have run.
#[derive(Default)]
pub struct StateSlots {
    /// Each request's slot, and the tokens that its states are behind.
    held: FxHashMap<RequestId, (u32, usize)>,
    /// The tokens that the snapshot in each of the slots behind is behind; 0 where there is none.
    kept: Vec<usize>,
    /// Of each request with drafts in a step, where its states from before it are, and the tokens that they are behind.
    spare: FxHashMap<RequestId, (u32, usize)>,
}

impl StateSlots {
    /// Replaces `slots` by those of a step's requests; a request that runs no more gives its own to one that begins. Returns what
    /// is to be copied first, from one slot to another: for those that begin with a snapshot, and to go back behind wrong drafts.
    ///
    /// Errors: [`EngineError::Internal`] for a request that goes on where its states are not.
    pub fn assign(
        &mut self,
        scheduler: &Scheduler,
        output: &SchedulerOutput,
        num_slots: usize,
        slots: &mut Vec<u32>,
    ) -> Result<Vec<(u32, u32)>, EngineError> {
        let mut copies = Vec::new();
        let num_new = output.rows.iter().filter(|row| !self.held.contains_key(&row.request_id)).count();
        let num_drafting = output.rows.iter().filter(|row| row.num_drafts > 0).count();
        let mut free = self.free(scheduler, num_slots, num_new + num_drafting);
        let mut next_free =
            || free.next().ok_or_else(|| EngineError::Internal("no slot is left for the states of a request".into()));
        slots.clear();
        self.spare.clear();
        for row in &output.rows {
            let start = row.num_computed_tokens;
            let (slot, behind) = match self.held.get(&row.request_id) {
                Some(held) => *held,
                None => (next_free()?, 0),
            };
            let behind = match row.snapshot {
                Some(SnapshotSlot(kept)) => {
                    copies.push((num_slots as u32 + kept, slot));
                    self.kept.get(kept as usize).copied().unwrap_or(0)
                }
                None => behind,
            };
            // One that begins again begins without any.
            if start != 0 && start != behind {
                return Err(EngineError::Internal(format!("a request goes on at token {start}, and its states are at {behind}")));
            }
            self.held.insert(row.request_id, (slot, start));
            slots.push(slot);
            if row.num_drafts > 0 {
                let spare = next_free()?;
                copies.push((slot, spare));
                self.spare.insert(row.request_id, (spare, start));
            }
        }
        Ok(copies)
    }

    /// What is to be copied to keep a request's states, from its slot of `num_slots` to one behind them; `None`, and nothing is
    /// there any more, if its states are not what they should be.
    pub fn save(&mut self, save: &StateSave, num_slots: usize) -> Option<(u32, u32)> {
        let StateSave { request_id, num_tokens, slot: SnapshotSlot(to) } = *save;
        let from = self.held.get(&request_id).filter(|(_, behind)| *behind == num_tokens).map(|(slot, _)| *slot);
        let place = to as usize;
        self.kept.resize(self.kept.len().max(place + 1), 0);
        self.kept[place] = if from.is_some() { num_tokens } else { 0 };
        from.map(|from| (from, num_slots as u32 + to))
    }

    /// A slot for a fork that goes on where its source is: that of the source, and its own, to be copied. `None` for one that
    /// begins anew.
    ///
    /// Errors: [`EngineError::Internal`] when there is no slot left.
    pub fn fork(
        &mut self,
        scheduler: &Scheduler,
        [source, child]: [RequestId; 2],
        num_slots: usize,
    ) -> Result<Option<(u32, u32)>, EngineError> {
        let shared = scheduler.num_computed_tokens(child).map_or(0, |(computed, _)| computed);
        let Some((from, behind)) = self.held.get(&source).copied().filter(|(_, behind)| shared > 0 && *behind == shared) else {
            return Ok(None);
        };
        let to = self.free(scheduler, num_slots, 1).next();
        let to = to.ok_or_else(|| EngineError::Internal("no slot is left for the states of a fork".into()))?;
        self.held.insert(child, (to, behind));
        Ok(Some((from, to)))
    }

    /// Slots that nobody has; requests that run no more lose theirs when so many are not free.
    fn free(&mut self, scheduler: &Scheduler, num_slots: usize, wanted: usize) -> impl Iterator<Item = u32> + use<> {
        if self.held.len() + wanted > num_slots {
            let running: FxHashSet<_> = scheduler.running_requests().collect();
            self.held.retain(|id, _| running.contains(id));
        }
        let taken: FxHashSet<_> = self.held.values().map(|(slot, _)| *slot).collect();
        (0..num_slots as u32).filter(move |slot| !taken.contains(slot))
    }

    /// The step is committed: requests whose drafts were wrong are where they were before it.
    pub fn go_back(&mut self, scheduler: &Scheduler) {
        for (id, (slot, start)) in self.spare.drain() {
            if scheduler.num_computed_tokens(id).is_some_and(|(computed, _)| computed == start) {
                self.held.insert(id, (slot, start));
            }
        }
    }

    /// The step has run: its requests' states are behind their last rows.
    pub fn advance(&mut self, output: &SchedulerOutput) {
        for row in &output.rows {
            if let Some((_, behind)) = self.held.get_mut(&row.request_id) {
                *behind = row.num_computed_tokens + row.num_scheduled_tokens;
            }
        }
    }
}

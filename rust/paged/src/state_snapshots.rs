//! Snapshots of the states of recurrent layers: which prefixes have one, and which may go.
//!
//! A recurrent layer keeps one state a request, whatever its length, so a prefix hit can only end where the state behind just
//! those tokens was kept. This module keeps the books of a fixed number of slots for such states; it has no tensors. The owner of
//! the memory follows [`StateSave`] and [`crate::ScheduledRequest::snapshot`].
//!
//! A snapshot belongs to a node of the prefix index, and goes when the node loses a block. One whose blocks are there but not
//! those before them is found no more until they are back; it ages like any other. When every slot is taken, the least recently
//! used snapshot goes, unless a request is about to begin with it.

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;

use crate::ids::RequestId;
use crate::prefix_index::NodeId;

/// Where a snapshot lies: an index into the owner's slots for snapshots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SnapshotSlot(pub u32);

/// The states of a request that are to be kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateSave {
    /// Whose states.
    pub request_id: RequestId,
    /// Tokens that they are behind.
    pub num_tokens: usize,
    /// Where to keep them, in place of what is there.
    pub slot: SnapshotSlot,
}

/// What is counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct SnapshotCounts {
    pub(crate) total: usize,
    pub(crate) used: usize,
    pub(crate) taken: u64,
    pub(crate) evicted: u64,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    /// What its snapshot is found by; [`NodeId::NONE`] if it is not.
    node: NodeId,
    used_at: u64,
    /// Requests that will begin with it and have not yet.
    num_holders: u32,
}

/// The books of the slots.
#[derive(Debug, Clone, Default)]
pub(crate) struct StateSnapshots {
    slots: Vec<Slot>,
    by_node: FxHashMap<NodeId, u32>,
    /// Slots that nothing is found in and nobody holds, the next one last.
    vacant: Vec<u32>,
    /// Slots whose snapshot can be found, the least recently used first.
    order: BTreeSet<(u64, u32)>,
    clock: u64,
    taken: u64,
    evicted: u64,
}

impl StateSnapshots {
    /// So many empty slots.
    pub(crate) fn new(num_slots: usize) -> Self {
        let empty = Slot { node: NodeId::NONE, used_at: 0, num_holders: 0 };
        Self { slots: vec![empty; num_slots], vacant: (0..num_slots as u32).rev().collect(), ..Self::default() }
    }

    pub(crate) fn get(&self, node: NodeId) -> Option<SnapshotSlot> {
        self.by_node.get(&node).copied().map(SnapshotSlot)
    }

    /// A slot for the states behind a node, to be written; `None` if they are kept already, which is a use of them, or if every
    /// slot is about to be read. The caller sees to [`Self::forget`] when the node loses a block.
    pub(crate) fn take(&mut self, node: NodeId) -> Option<SnapshotSlot> {
        if let Some(slot) = self.get(node) {
            self.touch(slot);
            return None;
        }
        let slot = self.vacant.pop().or_else(|| self.evict())?;
        self.taken += 1;
        self.clock += 1;
        self.slots[slot as usize] = Slot { node, used_at: self.clock, num_holders: 0 };
        self.order.insert((self.clock, slot));
        self.by_node.insert(node, slot);
        Some(SnapshotSlot(slot))
    }

    /// Takes the slot of the least recently used snapshot that nobody is about to read.
    fn evict(&mut self) -> Option<u32> {
        let slot = self.order.iter().map(|(_, slot)| *slot).find(|slot| self.slots[*slot as usize].num_holders == 0)?;
        self.unlink(slot);
        self.evicted += 1;
        Some(slot)
    }

    /// A request will begin with a snapshot: it stays where it is until the request lets go.
    pub(crate) fn hold(&mut self, slot: SnapshotSlot) {
        self.slots[slot.0 as usize].num_holders += 1;
        self.touch(slot);
    }

    pub(crate) fn release(&mut self, slot: SnapshotSlot) {
        self.slots[slot.0 as usize].num_holders -= 1;
        self.vacate(slot.0);
    }

    /// The snapshot of a node, if it has one, is not to be found any more.
    pub(crate) fn forget(&mut self, node: NodeId) {
        if let Some(slot) = self.by_node.get(&node).copied() {
            self.forget_slot(SnapshotSlot(slot));
        }
    }

    /// What is in a slot is not to be found any more.
    pub(crate) fn forget_slot(&mut self, slot: SnapshotSlot) {
        if self.slots.get(slot.0 as usize).is_some_and(|slot| slot.node != NodeId::NONE) {
            self.unlink(slot.0);
            self.vacate(slot.0);
        }
    }

    /// As [`Self::forget`] of every node.
    pub(crate) fn clear(&mut self) {
        for slot in 0..self.slots.len() as u32 {
            self.forget_slot(SnapshotSlot(slot));
        }
    }

    pub(crate) fn counts(&self) -> SnapshotCounts {
        SnapshotCounts { total: self.slots.len(), used: self.by_node.len(), taken: self.taken, evicted: self.evicted }
    }

    /// The nodes with a snapshot, that of the least recently used first.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.order.iter().map(|(_, slot)| self.slots[*slot as usize].node)
    }

    fn touch(&mut self, slot: SnapshotSlot) {
        let entry = &mut self.slots[slot.0 as usize];
        if entry.node != NodeId::NONE {
            self.order.remove(&(entry.used_at, slot.0));
            self.clock += 1;
            entry.used_at = self.clock;
            self.order.insert((self.clock, slot.0));
        }
    }

    fn unlink(&mut self, slot: u32) {
        let entry = &mut self.slots[slot as usize];
        self.order.remove(&(entry.used_at, slot));
        self.by_node.remove(&entry.node);
        entry.node = NodeId::NONE;
    }

    /// Gives a slot back if it is of no use.
    fn vacate(&mut self, slot: u32) {
        let entry = self.slots[slot as usize];
        if entry.node == NodeId::NONE && entry.num_holders == 0 {
            self.vacant.push(slot);
        }
    }

    /// Checks the books against the slots that requests hold, and that each node with a snapshot `is_whole`.
    pub(crate) fn check_integrity(&self, held: &[SnapshotSlot], is_whole: impl Fn(NodeId) -> bool) -> Result<(), String> {
        let mut seen = vec![0; self.slots.len()];
        for slot in held {
            *seen.get_mut(slot.0 as usize).ok_or_else(|| format!("{slot:?} is held and there is none"))? += 1;
        }
        for (at, (slot, holders)) in self.slots.iter().zip(seen).enumerate() {
            let at = at as u32;
            let is_found = slot.node != NodeId::NONE;
            let is_vacant = !is_found && holders == 0;
            if slot.num_holders != holders || self.vacant.iter().filter(|vacant| **vacant == at).count() != usize::from(is_vacant)
            {
                return Err(format!("snapshot {at} has {holders} holders: {slot:?}"));
            }
            if is_found != self.order.contains(&(slot.used_at, at)) || (is_found && self.get(slot.node) != Some(SnapshotSlot(at)))
            {
                return Err(format!("snapshot {at} is out of order: {slot:?}"));
            }
            if is_found && !is_whole(slot.node) {
                return Err(format!("snapshot {at} is of blocks that are gone"));
            }
        }
        if self.by_node.len() != self.order.len() {
            return Err(format!("{} nodes have {} snapshots", self.by_node.len(), self.order.len()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;

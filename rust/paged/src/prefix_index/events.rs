//! What events tell of the tree.

use super::tree::Kind;
use super::{NONE, NodeId, PrefixIndex};
use crate::kv_events::{EventLog, KvEvent, StoredBlock};

impl PrefixIndex {
    /// Records events from now on; the tree must be empty.
    pub(crate) fn record_events(&mut self, log: EventLog) {
        debug_assert_eq!(self.num_nodes(), 0);
        self.events = Some(Box::new(log));
    }

    /// See [`crate::KvCacheStats::kv_event_blocks`].
    pub(crate) fn num_event_blocks(&self) -> usize {
        self.events.as_ref().map_or(0, |log| log.num_blocks())
    }

    /// Moves what happened since the last time behind `out`; all that is held, where that is not known any more.
    pub(crate) fn take_events(&mut self, out: &mut Vec<KvEvent>) {
        if self.events.as_mut().is_some_and(|log| !log.take(out)) {
            self.list_events(out);
        }
    }

    /// As if nothing had been told yet: that all was cleared, then all that is held, parents before their children.
    pub(crate) fn list_events(&mut self, out: &mut Vec<KvEvent>) {
        self.events.iter_mut().for_each(|log| log.forget());
        let Some(log) = &self.events else { return };
        out.push(KvEvent::Cleared);
        let mut to_visit = self.branches.get(&NONE).cloned().unwrap_or_default();
        while let Some(at) = to_visit.pop() {
            for group in 0..self.num_groups {
                if self.block(NodeId(at), group).is_some() {
                    out.extend(self.stored(log, at, group).map(KvEvent::Stored));
                }
            }
            to_visit.extend(self.branches.get(&at).into_iter().flatten());
            to_visit.extend(self.nodes[at as usize].children.as_slice());
        }
    }

    /// Digest and group of a block as events give them, of a full one.
    pub(crate) fn event_block(&self, node: NodeId, group: usize) -> Option<(u64, u32)> {
        let log = self.events.as_ref()?;
        (self.num_tokens(node) == self.block_size).then(|| (log.digest(node.0), group as u32))
    }

    /// A node has just got its block of a group.
    pub(super) fn tell_attached(&mut self, node: NodeId, group: usize) {
        if let Some(log) = &self.events
            && let Some(block) = self.stored(log, node.0, group)
            && let Some(log) = &mut self.events
        {
            log.store(block);
        }
    }

    /// A node is just losing its block of a group.
    pub(super) fn tell_detached(&mut self, node: NodeId, group: usize) {
        if self.nodes[node.0 as usize].num_tokens as usize == self.block_size
            && let Some(log) = &mut self.events
        {
            log.remove(node.0, group);
        }
    }

    /// What is told of a node's block; nothing of one that is full in part.
    fn stored(&self, log: &EventLog, at: u32, group: usize) -> Option<StoredBlock> {
        let node = &self.nodes[at as usize];
        if node.num_tokens as usize != self.block_size {
            return None;
        }
        let before = &self.nodes[node.parent as usize];
        let is_salted = before.kind == Kind::Text && before.parent != NONE;
        let parent = if is_salted { before.parent } else { node.parent };
        Some(StoredBlock {
            digest: log.digest(at),
            parent: (self.nodes[parent as usize].kind == Kind::Block).then(|| log.digest(parent)),
            group: group as u32,
            tokens: self.tokens_of(at).into(),
            identity: self.texts.get(&log.root(at)).cloned().unwrap_or_default(),
            salt: if is_salted { self.texts.get(&node.parent).cloned() } else { None },
        })
    }
}

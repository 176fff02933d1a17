//! Which full blocks can be found by content, told as a sequence of events.
//!
//! Others route requests by what an engine holds. They know a block by a digest that is the same on every replica: the chain of
//! [`HashInput`] under a key that follows from the weights, and not under the pool's random one. Blocks at the end of a sequence
//! that are full in part are not told of: nobody could look for them. The digests are 128 bits wide and told as 64, so two blocks
//! of a pool of a million have the same one with a probability of 3e-8.

use crate::block_hash::{BlockHash, BlockHasher, HashInput};

/// A change of what can be found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KvEvent {
    /// A block can be found from now on.
    Stored(StoredBlock),
    /// A block cannot be found any more.
    Removed {
        /// Its digest.
        digest: u64,
        /// Its KV group.
        group: u32,
    },
    /// No block can be found any more.
    Cleared,
}

/// A full block that can be found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredBlock {
    /// Digest of the prefix that ends with it.
    pub digest: u64,
    /// Digest of the block before it; `None` for the first one.
    pub parent: Option<u64>,
    /// The KV group whose layers it serves.
    pub group: u32,
    /// Its tokens, `[block_size]`.
    pub tokens: Box<[u32]>,
    /// The identity that its prefix begins with, see [`crate::NewRequest::identity`].
    pub identity: Box<[u8]>,
    /// The salt that stands just before it, if one does, see [`crate::NewRequest::cache_salt`].
    pub salt: Option<Box<[u8]>>,
}

/// What a node is called by events.
#[derive(Debug, Clone, Copy)]
struct Name {
    digest: BlockHash,
    root: u32,
}

const NO_NAME: Name = Name { digest: BlockHash([0; 16]), root: u32::MAX };

/// Keeps events until they are taken, and the digests of the nodes of the prefix index.
#[derive(Debug, Clone)]
pub(crate) struct EventLog {
    digester: BlockHasher,
    /// By node.
    names: Vec<Name>,
    events: Vec<KvEvent>,
    max_events: usize,
    /// There were more than it keeps: those since the last taking are gone.
    overflowed: bool,
    num_blocks: usize,
}

impl EventLog {
    /// Keeps `max_events` at most. The first one tells that nothing is held yet.
    pub(crate) fn new(digest_key: [u8; 32], max_events: usize) -> Self {
        Self {
            digester: BlockHasher::new(digest_key),
            names: Vec::new(),
            events: vec![KvEvent::Cleared],
            max_events,
            overflowed: false,
            num_blocks: 0,
        }
    }

    /// Names a root.
    pub(crate) fn name_root(&mut self, at: u32, identity: &[u8]) {
        let digest = self.digester.hash(HashInput::Root { identity });
        self.name(at, Name { digest, root: at });
    }

    /// Names a salt behind `parent`.
    pub(crate) fn name_salt(&mut self, at: u32, parent: u32, salt: &[u8]) {
        let Name { digest: parent, root } = self.names[parent as usize];
        self.name(at, Name { digest: self.digester.hash(HashInput::Salt { parent, salt }), root });
    }

    /// Names a block behind `parent`.
    pub(crate) fn name_block(&mut self, at: u32, parent: u32, tokens: &[u32]) {
        let Name { digest: parent, root } = self.names[parent as usize];
        self.name(at, Name { digest: self.digester.hash(HashInput::Block { parent, tokens }), root });
    }

    fn name(&mut self, at: u32, name: Name) {
        let least = at as usize + 1;
        self.names.resize(self.names.len().max(least), NO_NAME);
        self.names[at as usize] = name;
    }

    /// The digest of a node as events give it.
    pub(crate) fn digest(&self, at: u32) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.names[at as usize].digest.0;
        u64::from_be_bytes([a, b, c, d, e, f, g, h])
    }

    /// The root of a node's prefix.
    pub(crate) fn root(&self, at: u32) -> u32 {
        self.names[at as usize].root
    }

    /// A block can be found.
    pub(crate) fn store(&mut self, block: StoredBlock) {
        self.num_blocks += 1;
        self.push(KvEvent::Stored(block));
    }

    /// A block cannot be found any more.
    pub(crate) fn remove(&mut self, at: u32, group: usize) {
        self.num_blocks -= 1;
        let digest = self.digest(at);
        self.push(KvEvent::Removed { digest, group: group as u32 });
    }

    /// Nothing can be found any more: whatever was not taken yet does not matter.
    pub(crate) fn clear(&mut self) {
        self.names.clear();
        self.num_blocks = 0;
        self.overflowed = false;
        self.events.clear();
        self.events.push(KvEvent::Cleared);
    }

    fn push(&mut self, event: KvEvent) {
        if self.overflowed {
            return;
        }
        if self.events.len() == self.max_events {
            self.overflowed = true;
            self.events = Vec::new();
            return;
        }
        self.events.push(event);
    }

    /// Blocks that can be found, one for each KV group that has one.
    pub(crate) fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Moves the events behind those of `out`; false when some are gone, so that all that is held must be told anew.
    pub(crate) fn take(&mut self, out: &mut Vec<KvEvent>) -> bool {
        out.append(&mut self.events);
        !std::mem::take(&mut self.overflowed)
    }

    /// Forgets the events that were not taken.
    pub(crate) fn forget(&mut self) {
        self.events.clear();
        self.overflowed = false;
    }
}

//! The tree of cached prefixes: which blocks are findable, and by what.
//!
//! A node stands for one exact prefix: a cache identity followed by whole blocks of tokens, the last of which may be
//! cut short, with a salt between the blocks that are everybody's and those that are not. A block node names, for each
//! KV group, the physical block that holds the KV of its tokens, if any still does. A node lives as long as a block, a
//! child or a running request refers to it, so a prefix whose early blocks were given back (a sliding window needs
//! only the last ones) can still be walked and verified from its root.
//!
//! The hash finds candidates; tokens and the parent, which outlives its children, decide. By induction over the
//! parents a hit is exact whatever the hash function does.

mod events;
mod ghosts;
mod tree;

use std::collections::HashMap;

use ghosts::Ghosts;
use tree::{Kind, Node};

use crate::block_hash::{BlockHash, BlockHasher, HashInput};
use crate::ids::BlockId;
use crate::kv_events::EventLog;

/// A node of the tree. Only valid while something keeps the node alive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct NodeId(u32);

impl NodeId {
    /// No node.
    pub(crate) const NONE: Self = Self(NONE);
}

const NONE: u32 = u32::MAX;

/// Of the children that begin most like some tokens, so many on either side of them are looked at.
const MAX_NEIGHBOURS: usize = 4;
/// So many other salts or identities are asked when a first block is not found.
const MAX_BRANCHES: usize = 16;

#[derive(Debug, Clone)]
pub(crate) struct PrefixIndex {
    hasher: BlockHasher,
    num_groups: usize,
    block_size: usize,
    nodes: Vec<Node>,
    vacant: Vec<u32>,
    /// `[nodes, block_size]`
    tokens: Vec<u32>,
    /// `[nodes, num_groups]`
    blocks: Vec<BlockId>,
    /// By the first bits of the hash, the first node of each chain; a power of two, and no fewer than the nodes.
    buckets: Vec<u32>,
    /// Identities of roots and salts.
    texts: HashMap<u32, Box<[u8]>>,
    /// Roots (of the parent `NONE`) and the salts behind a node.
    branches: HashMap<u32, Vec<u32>>,
    ghosts: Ghosts,
    /// Keeps what changes, where somebody wants to know.
    events: Option<Box<EventLog>>,
}

impl PrefixIndex {
    /// For blocks of `block_size` tokens; remembers about `num_blocks` that were evicted.
    pub(crate) fn new(hasher: BlockHasher, num_groups: usize, block_size: usize, num_blocks: usize) -> Self {
        Self {
            hasher,
            num_groups,
            block_size,
            nodes: Vec::new(),
            vacant: Vec::new(),
            tokens: Vec::new(),
            blocks: Vec::new(),
            buckets: vec![NONE],
            texts: HashMap::new(),
            branches: HashMap::new(),
            ghosts: Ghosts::new(num_blocks),
            events: None,
        }
    }

    pub(crate) fn num_nodes(&self) -> usize {
        self.nodes.len() - self.vacant.len()
    }

    /// Forgets every node. The caller has unpublished every block and drops every pin.
    pub(crate) fn clear(&mut self) {
        self.nodes.clear();
        self.vacant.clear();
        self.tokens.clear();
        self.blocks.clear();
        self.buckets.fill(NONE);
        self.texts.clear();
        self.branches.clear();
        self.ghosts.clear();
        self.events.iter_mut().for_each(|log| log.clear());
    }

    pub(crate) fn find_root(&self, identity: &[u8]) -> Option<NodeId> {
        self.find_text(HashInput::Root { identity }, NONE, identity)
    }

    /// The prefix of `parent`, to those with this salt.
    pub(crate) fn find_salt(&self, parent: NodeId, salt: &[u8]) -> Option<NodeId> {
        let input = HashInput::Salt { parent: self.nodes[parent.0 as usize].hash, salt };
        self.find_text(input, parent.0, salt)
    }

    fn find_text(&self, input: HashInput<'_>, parent: u32, text: &[u8]) -> Option<NodeId> {
        self.find(self.hasher.hash(input), |at, node| {
            node.kind == Kind::Text && node.parent == parent && self.texts.get(&at).is_some_and(|own| **own == *text)
        })
    }

    /// The prefix of `parent` followed by `tokens`.
    pub(crate) fn find_child(&self, parent: NodeId, tokens: &[u32]) -> Option<NodeId> {
        self.find_with_hash(self.child_hash(parent, tokens), parent, tokens)
    }

    fn find_with_hash(&self, hash: BlockHash, parent: NodeId, tokens: &[u32]) -> Option<NodeId> {
        self.find(hash, |at, node| node.kind == Kind::Block && node.parent == parent.0 && self.tokens_of(at) == tokens)
    }

    /// The child of `parent` with the longest beginning in common with `tokens` among those that `accept` likes, and
    /// how many tokens that is; at least 1.
    pub(crate) fn find_longest(
        &self,
        parent: NodeId,
        tokens: &[u32],
        accept: impl Fn(NodeId) -> bool,
    ) -> Option<(NodeId, usize)> {
        let children = self.nodes[parent.0 as usize].children.as_slice();
        // Those that begin most alike are neighbours in the order.
        let place = children.partition_point(|child| self.tokens_of(*child) < tokens);
        let from = place.saturating_sub(MAX_NEIGHBOURS);
        let to = (place + MAX_NEIGHBOURS).min(children.len());
        let common = |child: &u32| self.tokens_of(*child).iter().zip(tokens).take_while(|(a, b)| a == b).count();
        let candidates = children[from..to].iter().map(|child| (NodeId(*child), common(child)));
        candidates.filter(|(node, common)| *common > 0 && accept(*node)).max_by_key(|(_, common)| *common)
    }

    /// Finds or makes the root, and pins it.
    pub(crate) fn pin_root(&mut self, identity: &[u8]) -> NodeId {
        let node = self.find_root(identity).unwrap_or_else(|| {
            let hash = self.hasher.hash(HashInput::Root { identity });
            self.insert_text(hash, NONE, identity)
        });
        self.pin(node);
        node
    }

    /// Finds or makes the salt behind `parent`, and moves a pin from the parent to it.
    pub(crate) fn pin_salt(&mut self, parent: NodeId, salt: &[u8]) -> NodeId {
        let node = self.find_salt(parent, salt).unwrap_or_else(|| {
            let input = HashInput::Salt { parent: self.nodes[parent.0 as usize].hash, salt };
            let hash = self.hasher.hash(input);
            self.insert_text(hash, parent.0, salt)
        });
        self.pin(node);
        self.unpin(parent);
        node
    }

    /// Finds or makes a child, and moves a pin from the parent to it.
    pub(crate) fn pin_child(&mut self, parent: NodeId, tokens: &[u32]) -> NodeId {
        let hash = self.child_hash(parent, tokens);
        let node = match self.find_with_hash(hash, parent, tokens) {
            Some(node) => node,
            None => self.insert_block(hash, parent, tokens),
        };
        self.pin(node);
        self.unpin(parent);
        node
    }

    /// The block node `num_steps` blocks nearer to the root, which must be there.
    pub(crate) fn ancestor(&self, node: NodeId, num_steps: usize) -> NodeId {
        let mut at = node.0;
        for _ in 0..num_steps {
            at = self.nodes[at as usize].parent;
            while self.nodes[at as usize].kind == Kind::Text && self.nodes[at as usize].parent != NONE {
                at = self.nodes[at as usize].parent;
            }
        }
        NodeId(at)
    }

    pub(crate) fn pin(&mut self, node: NodeId) {
        self.nodes[node.0 as usize].ref_cnt += 1;
    }

    /// Drops one reference; nodes that nothing refers to any more go, up to the root.
    pub(crate) fn unpin(&mut self, node: NodeId) {
        let mut at = node.0;
        while at != NONE {
            let node = &mut self.nodes[at as usize];
            node.ref_cnt -= 1;
            if node.ref_cnt > 0 {
                return;
            }
            at = self.remove(at);
        }
    }

    /// Hash of the prefix that a node stands for.
    pub(crate) fn hash(&self, node: NodeId) -> BlockHash {
        self.nodes[node.0 as usize].hash
    }

    pub(crate) fn block(&self, node: NodeId, group: usize) -> Option<BlockId> {
        let block = self.blocks[node.0 as usize * self.num_groups + group];
        (block != BlockId::NULL).then_some(block)
    }

    /// Whether `tokens` begin with those of a block node.
    pub(crate) fn begins(&self, node: NodeId, tokens: &[u32]) -> bool {
        tokens.starts_with(self.tokens_of(node.0))
    }

    /// Tokens of a block node.
    pub(crate) fn num_tokens(&self, node: NodeId) -> usize {
        self.nodes[node.0 as usize].num_tokens as usize
    }

    pub(crate) fn attach(&mut self, node: NodeId, group: usize, block: BlockId) {
        let place = &mut self.blocks[node.0 as usize * self.num_groups + group];
        debug_assert_eq!(*place, BlockId::NULL);
        *place = block;
        self.tell_attached(node, group);
        self.pin(node);
    }

    pub(crate) fn detach(&mut self, node: NodeId, group: usize) {
        let place = &mut self.blocks[node.0 as usize * self.num_groups + group];
        debug_assert_ne!(*place, BlockId::NULL);
        *place = BlockId::NULL;
        self.tell_detached(node, group);
        self.unpin(node);
    }

    /// Remembers for a while that a block of this node was there.
    pub(crate) fn note_eviction(&mut self, node: NodeId) {
        self.ghosts.insert(self.nodes[node.0 as usize].hash);
    }

    /// Whether `tokens` were there not long ago, as far as is remembered, behind `parent` (without one, the root of
    /// `identity`) and, if it is not empty, `salt`.
    pub(crate) fn was_evicted(&self, parent: Option<NodeId>, identity: &[u8], salt: &[u8], tokens: &[u32]) -> bool {
        let mut hash = match parent {
            Some(node) => self.nodes[node.0 as usize].hash,
            None => self.hasher.hash(HashInput::Root { identity }),
        };
        if !salt.is_empty() {
            hash = self.hasher.hash(HashInput::Salt { parent: hash, salt });
        }
        self.ghosts.contains(self.hasher.hash(HashInput::Block { parent: hash, tokens }))
    }

    /// Whether `tokens` follow `parent` under some other salt than `salt`, or without one.
    pub(crate) fn is_under_other_salt(&self, parent: NodeId, salt: &[u8], tokens: &[u32]) -> bool {
        let own = self.find_salt(parent, salt);
        let salts = self.branches.get(&parent.0).map_or(&[][..], Vec::as_slice);
        let others = salts.iter().map(|at| NodeId(*at)).filter(|node| Some(*node) != own).take(MAX_BRANCHES);
        let unsalted = (!salt.is_empty()).then_some(parent);
        unsalted.into_iter().chain(others).any(|node| self.find_child(node, tokens).is_some())
    }

    /// Whether `tokens` are a first block under some other identity.
    pub(crate) fn is_under_other_identity(&self, identity: &[u8], salt: &[u8], tokens: &[u32]) -> bool {
        let own = self.find_root(identity);
        let roots = self.branches.get(&NONE).map_or(&[][..], Vec::as_slice);
        let others = roots.iter().map(|at| NodeId(*at)).filter(|node| Some(*node) != own).take(MAX_BRANCHES);
        others
            .flat_map(|root| [Some(root), self.find_salt(root, salt)])
            .flatten()
            .any(|node| self.find_child(node, tokens).is_some())
    }

    fn child_hash(&self, parent: NodeId, tokens: &[u32]) -> BlockHash {
        let parent = self.nodes[parent.0 as usize].hash;
        self.hasher.hash(HashInput::Block { parent, tokens })
    }

    fn find(&self, hash: BlockHash, is_it: impl Fn(u32, &Node) -> bool) -> Option<NodeId> {
        let mut at = self.buckets[self.bucket(hash)];
        while at != NONE {
            let node = &self.nodes[at as usize];
            if node.hash == hash && is_it(at, node) {
                return Some(NodeId(at));
            }
            at = node.next_in_bucket;
        }
        None
    }
}

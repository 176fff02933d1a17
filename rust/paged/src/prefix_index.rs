//! The tree of cached prefixes: which full blocks are findable, and by what.
//!
//! A node stands for one exact prefix: a cache identity followed by whole blocks of tokens. It names, for each KV
//! group, the physical block that holds the KV of its last `block_size` tokens, if any still does. A node lives as
//! long as a block, a child or a running request refers to it, so a prefix whose early blocks were given back
//! (a sliding window needs only the last ones) can still be walked and verified from its root.
//!
//! The hash finds candidates; tokens and the parent's serial, which is never reused, decide. By induction over the
//! parents a hit is exact whatever the hash function does.

use std::collections::HashMap;

use crate::block_hash::{BlockHash, BlockHasher, HashInput};
use crate::block_pool::BlockId;

/// A node of the tree. Only valid while something keeps the node alive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NodeId(u32);

const NONE: u32 = u32::MAX;
const NO_SERIAL: u64 = 0;

#[derive(Debug)]
enum Content {
    Root(Box<[u8]>),
    Block(Box<[u32]>),
    Vacant,
}

#[derive(Debug)]
struct Node {
    hash: BlockHash,
    serial: u64,
    parent: u32,
    parent_serial: u64,
    next_same_hash: u32,
    /// Blocks attached + children + pins.
    ref_cnt: u32,
    content: Content,
}

#[derive(Debug)]
pub(crate) struct PrefixIndex {
    hasher: BlockHasher,
    num_groups: usize,
    nodes: Vec<Node>,
    vacant: Vec<u32>,
    /// `[nodes, num_groups]`
    blocks: Vec<BlockId>,
    by_hash: HashMap<BlockHash, u32>,
    next_serial: u64,
}

impl PrefixIndex {
    pub(crate) fn new(hasher: BlockHasher, num_groups: usize) -> Self {
        Self {
            hasher,
            num_groups,
            nodes: Vec::new(),
            vacant: Vec::new(),
            blocks: Vec::new(),
            by_hash: HashMap::new(),
            next_serial: NO_SERIAL + 1,
        }
    }

    pub(crate) fn num_nodes(&self) -> usize {
        self.nodes.len() - self.vacant.len()
    }

    /// Forgets every node. The caller has unpublished every block and drops every pin.
    pub(crate) fn clear(&mut self) {
        self.nodes.clear();
        self.vacant.clear();
        self.blocks.clear();
        self.by_hash.clear();
    }

    pub(crate) fn find_root(&self, identity: &[u8]) -> Option<NodeId> {
        let hash = self.hasher.hash(HashInput::Root { identity });
        self.find(hash, |node| matches!(&node.content, Content::Root(bytes) if **bytes == *identity))
    }

    /// The prefix of `parent` followed by `tokens`.
    pub(crate) fn find_child(&self, parent: NodeId, tokens: &[u32]) -> Option<NodeId> {
        self.find(self.child_hash(parent, tokens), self.is_child(parent, tokens))
    }

    /// Finds or makes the root, and pins it.
    pub(crate) fn pin_root(&mut self, identity: &[u8]) -> NodeId {
        let node = self.find_root(identity).unwrap_or_else(|| {
            let hash = self.hasher.hash(HashInput::Root { identity });
            self.insert(hash, None, Content::Root(identity.into()))
        });
        self.pin(node);
        node
    }

    /// Finds or makes a child, and moves a pin from the parent to it.
    pub(crate) fn pin_child(&mut self, parent: NodeId, tokens: &[u32]) -> NodeId {
        let hash = self.child_hash(parent, tokens);
        let node = match self.find(hash, self.is_child(parent, tokens)) {
            Some(node) => node,
            None => self.insert(hash, Some(parent), Content::Block(tokens.into())),
        };
        self.pin(node);
        self.unpin(parent);
        node
    }

    /// The node `num_steps` nearer to the root, which must be there.
    pub(crate) fn ancestor(&self, node: NodeId, num_steps: usize) -> NodeId {
        (0..num_steps).fold(node, |node, _| NodeId(self.nodes[node.0 as usize].parent))
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

    pub(crate) fn block(&self, node: NodeId, group: usize) -> Option<BlockId> {
        let block = self.blocks[node.0 as usize * self.num_groups + group];
        (block != BlockId::NULL).then_some(block)
    }

    pub(crate) fn attach(&mut self, node: NodeId, group: usize, block: BlockId) {
        let place = &mut self.blocks[node.0 as usize * self.num_groups + group];
        debug_assert_eq!(*place, BlockId::NULL);
        *place = block;
        self.pin(node);
    }

    pub(crate) fn detach(&mut self, node: NodeId, group: usize) {
        let place = &mut self.blocks[node.0 as usize * self.num_groups + group];
        debug_assert_ne!(*place, BlockId::NULL);
        *place = BlockId::NULL;
        self.unpin(node);
    }

    fn child_hash(&self, parent: NodeId, tokens: &[u32]) -> BlockHash {
        let parent = self.nodes[parent.0 as usize].hash;
        self.hasher.hash(HashInput::Block { parent, tokens })
    }

    fn is_child<'a>(&self, parent: NodeId, tokens: &'a [u32]) -> impl Fn(&Node) -> bool + use<'a> {
        let serial = self.nodes[parent.0 as usize].serial;
        move |node| node.parent_serial == serial && matches!(&node.content, Content::Block(own) if **own == *tokens)
    }

    fn find(&self, hash: BlockHash, is_it: impl Fn(&Node) -> bool) -> Option<NodeId> {
        let mut at = self.by_hash.get(&hash).copied().unwrap_or(NONE);
        while at != NONE {
            let node = &self.nodes[at as usize];
            if is_it(node) {
                return Some(NodeId(at));
            }
            at = node.next_same_hash;
        }
        None
    }

    /// A node with no reference of its own yet; its parent gains one.
    fn insert(&mut self, hash: BlockHash, parent: Option<NodeId>, content: Content) -> NodeId {
        let parent_serial = parent.map_or(NO_SERIAL, |parent| self.nodes[parent.0 as usize].serial);
        if let Some(parent) = parent {
            self.pin(parent);
        }
        let node = Node {
            hash,
            serial: self.next_serial,
            parent: parent.map_or(NONE, |parent| parent.0),
            parent_serial,
            next_same_hash: self.by_hash.get(&hash).copied().unwrap_or(NONE),
            ref_cnt: 0,
            content,
        };
        self.next_serial += 1;
        let at = if let Some(at) = self.vacant.pop() {
            self.nodes[at as usize] = node;
            at
        } else {
            self.nodes.push(node);
            self.blocks.resize(self.nodes.len() * self.num_groups, BlockId::NULL);
            self.nodes.len() as u32 - 1
        };
        self.by_hash.insert(hash, at);
        NodeId(at)
    }

    /// Takes a node out and returns its parent.
    fn remove(&mut self, at: u32) -> u32 {
        let Node { hash, next_same_hash, parent, .. } = self.nodes[at as usize];
        let first = self.by_hash.get(&hash).copied().unwrap_or(NONE);
        if first == at {
            if next_same_hash == NONE {
                self.by_hash.remove(&hash);
            } else {
                self.by_hash.insert(hash, next_same_hash);
            }
        } else {
            let mut before = first;
            while self.nodes[before as usize].next_same_hash != at {
                before = self.nodes[before as usize].next_same_hash;
            }
            self.nodes[before as usize].next_same_hash = next_same_hash;
        }
        let node = &mut self.nodes[at as usize];
        node.content = Content::Vacant;
        node.serial = NO_SERIAL;
        self.vacant.push(at);
        parent
    }

    /// Checks that every node is findable exactly once, that parents are alive, and that the references add up;
    /// returns how many blocks are attached. `num_pins` is what the requests hold.
    pub(crate) fn check_integrity(&self, num_pins: usize) -> Result<usize, String> {
        let mut references = 0usize;
        let mut num_children = 0usize;
        let mut num_found = 0usize;
        let mut num_attached = 0usize;
        for (at, node) in self.nodes.iter().enumerate() {
            let attached = &self.blocks[at * self.num_groups..(at + 1) * self.num_groups];
            let num_blocks = attached.iter().filter(|block| **block != BlockId::NULL).count();
            num_attached += num_blocks;
            if matches!(node.content, Content::Vacant) {
                if num_blocks > 0 {
                    return Err(format!("vacant node {at} has blocks"));
                }
                continue;
            }
            references += node.ref_cnt as usize;
            if node.ref_cnt == 0 {
                return Err(format!("node {at} is kept alive by nothing"));
            }
            if node.parent != NONE {
                num_children += 1;
                if self.nodes[node.parent as usize].serial != node.parent_serial {
                    return Err(format!("node {at} has lost its parent"));
                }
            }
            let serial = node.serial;
            if self.find(node.hash, |node| node.serial == serial).is_some() {
                num_found += 1;
            }
        }
        if references != num_children + num_attached + num_pins {
            return Err(format!(
                "{references} references to nodes, but {num_children} children, {num_attached} blocks and {num_pins} pins"
            ));
        }
        if num_found != self.num_nodes() {
            return Err(format!("{num_found} of {} nodes can be found by hash", self.num_nodes()));
        }
        Ok(num_attached)
    }
}

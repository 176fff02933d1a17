//! The nodes and their links: making, removing, checking them.

use super::{NONE, NodeId, PrefixIndex};
use crate::block_hash::BlockHash;
use crate::ids::BlockId;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Vacant,
    /// A root or a salt.
    Text,
    Block,
}

/// Block nodes behind a node, in the order of their tokens. Most nodes have one child, which needs no list.
#[derive(Debug, Clone)]
pub(super) enum Children {
    None,
    One(u32),
    Many(Vec<u32>),
}

impl Children {
    pub(super) fn as_slice(&self) -> &[u32] {
        match self {
            Self::None => &[],
            Self::One(child) => std::slice::from_ref(child),
            Self::Many(children) => children,
        }
    }

    fn insert(&mut self, place: usize, child: u32) {
        match self {
            Self::None => *self = Self::One(child),
            Self::One(other) => {
                let mut children = vec![*other];
                children.insert(place, child);
                *self = Self::Many(children);
            }
            Self::Many(children) => children.insert(place, child),
        }
    }

    fn remove(&mut self, place: usize) {
        match self {
            Self::None => {}
            Self::One(_) => *self = Self::None,
            Self::Many(children) => {
                children.remove(place);
                if let [only] = children[..] {
                    *self = Self::One(only);
                }
            }
        }
    }
}

#[derive(Debug, Clone)]
pub(super) struct Node {
    pub(super) hash: BlockHash,
    pub(super) parent: u32,
    pub(super) next_in_bucket: u32,
    /// Blocks attached + children + pins.
    pub(super) ref_cnt: u32,
    /// Of a block node: the block size, or less for the end of a sequence.
    pub(super) num_tokens: u32,
    pub(super) kind: Kind,
    pub(super) children: Children,
}

impl PrefixIndex {
    pub(super) fn tokens_of(&self, at: u32) -> &[u32] {
        let first = at as usize * self.block_size;
        &self.tokens[first..first + self.nodes[at as usize].num_tokens as usize]
    }

    /// Place of `tokens`, or of the first child behind them.
    fn place_among_children(&self, parent: u32, tokens: &[u32]) -> usize {
        let children = self.nodes[parent as usize].children.as_slice();
        children.partition_point(|child| self.tokens_of(*child) < tokens)
    }

    pub(super) fn insert_text(&mut self, hash: BlockHash, parent: u32, text: &[u8]) -> NodeId {
        let at = self.insert(hash, parent, Kind::Text);
        self.texts.insert(at, text.into());
        self.branches.entry(parent).or_default().push(at);
        if let Some(log) = &mut self.events {
            if parent == NONE { log.name_root(at, text) } else { log.name_salt(at, parent, text) }
        }
        NodeId(at)
    }

    pub(super) fn insert_block(&mut self, hash: BlockHash, parent: NodeId, tokens: &[u32]) -> NodeId {
        let place = self.place_among_children(parent.0, tokens);
        let at = self.insert(hash, parent.0, Kind::Block);
        let first = at as usize * self.block_size;
        self.tokens[first..first + tokens.len()].copy_from_slice(tokens);
        self.nodes[at as usize].num_tokens = tokens.len() as u32;
        self.nodes[parent.0 as usize].children.insert(place, at);
        if let Some(log) = &mut self.events {
            log.name_block(at, parent.0, tokens);
        }
        NodeId(at)
    }

    /// A node with no reference of its own yet; its parent gains one.
    fn insert(&mut self, hash: BlockHash, parent: u32, kind: Kind) -> u32 {
        if parent != NONE {
            self.pin(NodeId(parent));
        }
        let node = Node { hash, parent, next_in_bucket: NONE, ref_cnt: 0, num_tokens: 0, kind, children: Children::None };
        let at = if let Some(at) = self.vacant.pop() {
            self.nodes[at as usize] = node;
            at
        } else {
            self.nodes.push(node);
            self.blocks.resize(self.nodes.len() * self.num_groups, BlockId::NULL);
            self.tokens.resize(self.nodes.len() * self.block_size, 0);
            self.nodes.len() as u32 - 1
        };
        if self.nodes.len() > self.buckets.len() {
            self.grow_buckets();
        } else {
            self.link(at);
        }
        at
    }

    pub(super) fn bucket(&self, hash: BlockHash) -> usize {
        let [a, b, c, d, ..] = hash.0;
        u32::from_le_bytes([a, b, c, d]) as usize & (self.buckets.len() - 1)
    }

    fn link(&mut self, at: u32) {
        let bucket = self.bucket(self.nodes[at as usize].hash);
        self.nodes[at as usize].next_in_bucket = std::mem::replace(&mut self.buckets[bucket], at);
    }

    /// Doubles the buckets and links every node anew, the one just inserted for the first time.
    fn grow_buckets(&mut self) {
        self.buckets = vec![NONE; 2 * self.buckets.len()];
        for at in 0..self.nodes.len() as u32 {
            if self.nodes[at as usize].kind != Kind::Vacant {
                self.link(at);
            }
        }
    }

    /// Takes a node out, which has no children, and returns its parent.
    pub(super) fn remove(&mut self, at: u32) -> u32 {
        let Node { hash, next_in_bucket, parent, kind, .. } = self.nodes[at as usize];
        let bucket = self.bucket(hash);
        if self.buckets[bucket] == at {
            self.buckets[bucket] = next_in_bucket;
        } else {
            let mut before = self.buckets[bucket];
            while self.nodes[before as usize].next_in_bucket != at {
                before = self.nodes[before as usize].next_in_bucket;
            }
            self.nodes[before as usize].next_in_bucket = next_in_bucket;
        }
        if kind == Kind::Block {
            let place = match self.nodes[parent as usize].children {
                Children::Many(_) => self.place_among_children(parent, self.tokens_of(at)),
                _ => 0,
            };
            self.nodes[parent as usize].children.remove(place);
        } else {
            self.texts.remove(&at);
            if let Some(branches) = self.branches.get_mut(&parent) {
                branches.retain(|branch| *branch != at);
                if branches.is_empty() {
                    self.branches.remove(&parent);
                }
            }
        }
        self.nodes[at as usize].kind = Kind::Vacant;
        self.vacant.push(at);
        parent
    }

    /// Checks that every node is findable exactly once, that parents are alive and know their children, and that the
    /// references add up; returns how many blocks are attached. `num_pins` is what the requests hold.
    pub(crate) fn check_integrity(&self, num_pins: usize) -> Result<usize, String> {
        let mut num_references = 0usize;
        let mut num_children = 0usize;
        let mut num_found = 0usize;
        let mut num_attached = 0usize;
        for (at, node) in self.nodes.iter().enumerate() {
            let attached = &self.blocks[at * self.num_groups..(at + 1) * self.num_groups];
            let num_blocks = attached.iter().filter(|block| **block != BlockId::NULL).count();
            num_attached += num_blocks;
            if node.kind != Kind::Block && num_blocks > 0 {
                return Err(format!("node {at}, which has no tokens, has blocks"));
            }
            if node.kind == Kind::Vacant {
                continue;
            }
            num_references += node.ref_cnt as usize;
            if node.ref_cnt == 0 {
                return Err(format!("node {at} is kept alive by nothing"));
            }
            if node.parent != NONE {
                num_children += 1;
                let parent = &self.nodes[node.parent as usize];
                let is_known = match node.kind {
                    Kind::Block => parent.children.as_slice().contains(&(at as u32)),
                    _ => self.branches.get(&node.parent).is_some_and(|branches| branches.contains(&(at as u32))),
                };
                if parent.kind == Kind::Vacant || !is_known {
                    return Err(format!("node {at} has lost its parent"));
                }
            }
            if !node.children.as_slice().is_sorted_by(|a, b| self.tokens_of(*a) < self.tokens_of(*b)) {
                return Err(format!("the children of node {at} are out of order"));
            }
            num_found += usize::from(self.find(node.hash, |found, _| found == at as u32).is_some());
        }
        if num_references != num_children + num_attached + num_pins {
            return Err(format!(
                "{num_references} references to nodes, but {num_children} children, {num_attached} blocks, {num_pins} pins"
            ));
        }
        if num_found != self.num_nodes() {
            return Err(format!("{num_found} of {} nodes can be found by hash", self.num_nodes()));
        }
        Ok(num_attached)
    }
}

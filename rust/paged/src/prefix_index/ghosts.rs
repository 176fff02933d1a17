//! What was evicted not long ago: to tell a prefix that had to go from one that never was.

use crate::block_hash::BlockHash;

const MAX_GHOSTS: usize = 1 << 20;

/// One place for each hash, which a later one may take.
#[derive(Debug, Clone)]
pub(super) struct Ghosts {
    /// Fingerprints; 0: none.
    places: Vec<u32>,
}

impl Ghosts {
    pub(super) fn new(num_blocks: usize) -> Self {
        Self { places: vec![0; (2 * num_blocks).next_power_of_two().min(MAX_GHOSTS)] }
    }

    fn place(&self, hash: BlockHash) -> (usize, u32) {
        let [a, b, c, d, e, f, g, h, ..] = hash.0;
        let place = u32::from_le_bytes([a, b, c, d]) as usize & (self.places.len() - 1);
        (place, u32::from_le_bytes([e, f, g, h]).max(1))
    }

    pub(super) fn insert(&mut self, hash: BlockHash) {
        let (place, fingerprint) = self.place(hash);
        self.places[place] = fingerprint;
    }

    pub(super) fn contains(&self, hash: BlockHash) -> bool {
        let (place, fingerprint) = self.place(hash);
        self.places[place] == fingerprint
    }

    pub(super) fn clear(&mut self) {
        self.places.fill(0);
    }
}

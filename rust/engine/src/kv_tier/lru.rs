//! Which entries of a bounded store go first.

use std::{
    collections::{BTreeSet, HashMap},
    hash::Hash,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// Microseconds since 1970.
pub type Stamp = u64;

/// So many seconds older is an entry for each block before it in its prefix: the beginning of a prefix, without which the rest
/// is of no use, outlives what extends it.
const SECONDS_PER_BLOCK: u64 = 10;

/// The stamp of the block at `index` of a prefix that is used now.
pub fn stamp(index: u32) -> Stamp {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.saturating_sub(Duration::from_secs(SECONDS_PER_BLOCK * u64::from(index))).as_micros() as Stamp
}

/// Entries by age, with their sizes.
#[derive(Debug)]
pub struct Lru<K> {
    entries: HashMap<K, (Stamp, u64)>,
    by_age: BTreeSet<(Stamp, K)>,
    total_bytes: u64,
}

impl<K: Clone + Ord + Hash> Lru<K> {
    /// Nothing yet.
    pub fn new() -> Self {
        Self { entries: HashMap::new(), by_age: BTreeSet::new(), total_bytes: 0 }
    }

    /// Adds an entry, or replaces it.
    pub fn insert(&mut self, key: K, stamp: Stamp, bytes: u64) {
        self.remove(&key);
        self.by_age.insert((stamp, key.clone()));
        self.entries.insert(key, (stamp, bytes));
        self.total_bytes = self.total_bytes.saturating_add(bytes);
    }

    /// Makes an entry as young as `stamp`, if there is one.
    pub fn touch(&mut self, key: &K, stamp: Stamp) {
        if let Some(&(_, bytes)) = self.entries.get(key) {
            self.insert(key.clone(), stamp, bytes);
        }
    }

    /// Takes an entry out; `false` if there is none.
    pub fn remove(&mut self, key: &K) -> bool {
        let Some((stamp, bytes)) = self.entries.remove(key) else { return false };
        self.by_age.remove(&(stamp, key.clone()));
        self.total_bytes -= bytes;
        true
    }

    /// Takes out the oldest entries until `needed` more bytes stay within `max_bytes`.
    pub fn make_room(&mut self, needed: u64, max_bytes: u64) -> Vec<K> {
        let mut gone = Vec::new();
        while self.total_bytes.saturating_add(needed) > max_bytes
            && let Some((_, key)) = self.by_age.first().cloned()
        {
            self.remove(&key);
            gone.push(key);
        }
        gone
    }

    /// The entries, in no order.
    pub fn keys(&self) -> impl Iterator<Item = &K> {
        self.entries.keys()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_go_first_and_only_as_many_as_must() {
        let mut lru = Lru::new();
        for (key, stamp) in [(1, 30), (2, 10), (3, 20), (4, 40)] {
            lru.insert(key, stamp, 100);
        }
        lru.touch(&2, 50);
        assert!(lru.make_room(0, 400).is_empty());
        assert_eq!(lru.make_room(100, 400), [3]);
        assert_eq!(lru.make_room(150, 400), [1]);
        assert_eq!(lru.total_bytes, 200);
        lru.insert(2, 5, 40);
        assert_eq!((lru.total_bytes, lru.make_room(0, 100)), (140, vec![2]));
        assert!(lru.remove(&4) && !lru.remove(&4));
        assert_eq!((lru.total_bytes, lru.keys().count()), (0, 0));
        assert!(lru.make_room(1, 0).is_empty());
    }

    #[test]
    fn a_later_block_of_a_prefix_is_older() {
        assert!(stamp(1) < stamp(0) && stamp(100) < stamp(1));
        assert_eq!(stamp(u32::MAX), 0);
    }
}

//! A buddy allocator: contiguous chunks whose sizes are powers of two.

use std::collections::BTreeSet;

/// A chunk that is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// First slot.
    pub offset: usize,
    /// Base-two logarithm of its length.
    pub order: u32,
}

impl Chunk {
    /// Slots in it.
    pub fn len(self) -> usize {
        1 << self.order
    }

    /// Never: a chunk has at least one slot.
    pub fn is_empty(self) -> bool {
        false
    }
}

/// Hands out chunks of `2^order` slots; a chunk that is freed joins its buddy when that is free too.
///
/// A number of slots that is no power of two is cut into falling powers of two, which never join.
#[derive(Debug, Clone)]
pub struct Buddy {
    /// Offsets of the free chunks of each order.
    free: Vec<BTreeSet<usize>>,
    num_slots: usize,
    num_free: usize,
}

impl Buddy {
    /// All of `num_slots` slots free.
    pub fn new(num_slots: usize) -> Self {
        let mut free = vec![BTreeSet::new(); usize::BITS as usize];
        let mut offset = 0;
        for order in (0..usize::BITS).rev().filter(|order| num_slots >> order & 1 == 1) {
            free[order as usize].insert(offset);
            offset += 1 << order;
        }
        Self { free, num_slots, num_free: num_slots }
    }

    /// Slots that nobody holds, in pieces of any size.
    pub fn num_free(&self) -> usize {
        self.num_free
    }

    /// Length of the largest chunk that an empty memory has.
    pub fn largest_chunk(&self) -> usize {
        if self.num_slots == 0 { 0 } else { 1 << self.num_slots.ilog2() }
    }

    /// The smallest chunk of at least `len` slots, from the lowest free place of the best fit; `None` if there is none.
    pub fn allocate(&mut self, len: usize) -> Option<Chunk> {
        if len > self.num_free {
            return None;
        }
        let order = len.max(1).next_power_of_two().ilog2();
        let mut found = (order..usize::BITS).find(|found| !self.free[*found as usize].is_empty())?;
        let offset = self.free[found as usize].pop_first()?;
        while found > order {
            found -= 1;
            self.free[found as usize].insert(offset + (1 << found));
        }
        self.num_free -= 1 << order;
        Some(Chunk { offset, order })
    }

    /// Takes a chunk back.
    pub fn free(&mut self, chunk: Chunk) {
        self.num_free += chunk.len();
        let Chunk { mut offset, mut order } = chunk;
        while self.free[order as usize].remove(&(offset ^ (1 << order))) {
            offset &= !(1 << order);
            order += 1;
        }
        self.free[order as usize].insert(offset);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shape(buddy: &Buddy) -> Vec<(usize, usize)> {
        let chunks = buddy.free.iter().enumerate().flat_map(|(order, offsets)| offsets.iter().map(move |at| (*at, 1 << order)));
        let mut chunks: Vec<_> = chunks.collect();
        chunks.sort_unstable();
        chunks
    }

    #[test]
    fn halves_are_split_off_and_join_again() {
        let mut buddy = Buddy::new(16);
        let three = buddy.allocate(3).unwrap();
        let eight = buddy.allocate(8).unwrap();
        assert_eq!((three, eight), (Chunk { offset: 0, order: 2 }, Chunk { offset: 8, order: 3 }));
        assert_eq!(shape(&buddy), [(4, 4)]);
        // Four slots are free and five are asked for; four of four work.
        assert_eq!(buddy.allocate(5), None);
        let four = buddy.allocate(4).unwrap();
        buddy.free(three);
        buddy.free(eight);
        // The free halves on both sides of the held quarter are no buddies.
        assert_eq!(shape(&buddy), [(0, 4), (8, 8)]);
        assert_eq!(buddy.allocate(12), None);
        buddy.free(four);
        assert_eq!(shape(&buddy), [(0, 16)]);
    }

    #[test]
    fn a_memory_of_any_size_is_used_to_the_last_slot() {
        let mut buddy = Buddy::new(15_700);
        assert_eq!(buddy.largest_chunk(), 8192);
        let held: Vec<_> = (0..7).map(|_| buddy.allocate(2048).unwrap()).collect();
        assert_eq!(buddy.allocate(2048), None);
        let rest: Vec<_> = std::iter::from_fn(|| buddy.allocate(1)).collect();
        assert_eq!(rest.len(), 15_700 - 7 * 2048);
        held.into_iter().chain(rest).for_each(|chunk| buddy.free(chunk));
        assert_eq!(shape(&buddy), shape(&Buddy::new(15_700)));
    }

    proptest! {
        #[test]
        fn chunks_never_overlap_and_everything_comes_back(
            num_slots in 1usize..300,
            script in proptest::collection::vec((any::<bool>(), 1usize..80, any::<proptest::sample::Index>()), 1..80),
        ) {
            let mut buddy = Buddy::new(num_slots);
            let mut held: Vec<Chunk> = Vec::new();
            for (take, len, which) in script {
                if take {
                    let largest_free = shape(&buddy).iter().map(|(_, len)| *len).max().unwrap_or(0);
                    match buddy.allocate(len) {
                        Some(chunk) => {
                            prop_assert!(chunk.len() >= len && chunk.len() < 2 * len && chunk.offset % chunk.len() == 0);
                            held.push(chunk);
                        }
                        None => prop_assert!(largest_free < len.next_power_of_two()),
                    }
                } else if !held.is_empty() {
                    let chunk = held.swap_remove(which.index(held.len()));
                    buddy.free(chunk);
                }
                let mut owners = vec![0; num_slots];
                let pieces = shape(&buddy).into_iter().chain(held.iter().map(|chunk| (chunk.offset, chunk.len())));
                for (offset, len) in pieces {
                    owners[offset..offset + len].iter_mut().for_each(|owner| *owner += 1);
                }
                prop_assert!(owners.iter().all(|count| *count == 1), "each slot is free or held, once");
                prop_assert_eq!(buddy.num_free() + held.iter().map(|chunk| chunk.len()).sum::<usize>(), num_slots);
            }
            for chunk in held {
                buddy.free(chunk);
            }
            prop_assert_eq!(shape(&buddy), shape(&Buddy::new(num_slots)));
        }
    }
}

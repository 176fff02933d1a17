//! Small memory of a GPU, cut from slabs. The driver gives memory in pages of 2 MiB: a model of experts has thousands of weights
//! of 3 MB, which would take 4 each.

use std::collections::BTreeMap;

use crate::kernel_args::DevicePtr;

/// What is larger is not cut from slabs.
pub const MAX_PIECE: usize = 8 << 20;
/// Bytes of a slab, whole pages.
pub const SLAB_BYTES: usize = 64 << 20;
/// Pieces begin at multiples of this, as what the driver gives does.
const ALIGNMENT: usize = 256;

/// Which slabs there are, and what of them is in use.
#[derive(Default)]
pub struct Slabs {
    by_start: BTreeMap<DevicePtr, Slab>,
    /// The one that pieces are cut from.
    current: Option<DevicePtr>,
}

#[derive(Default)]
struct Slab {
    used: usize,
    pieces: usize,
}

/// What became of a piece that was given back.
#[derive(Debug, PartialEq, Eq)]
pub enum Given {
    /// It is from no slab.
    Stranger,
    /// Others of its slab are in use.
    Kept,
    /// It was the last one of this slab, which is forgotten.
    Slab(DevicePtr),
}

impl Slabs {
    /// So many bytes of the current slab, if it has room.
    pub fn take(&mut self, bytes: usize) -> Option<DevicePtr> {
        let start = self.current?;
        let slab = self.by_start.get_mut(&start)?;
        if bytes > SLAB_BYTES - slab.used {
            return None;
        }
        let at = start + slab.used as u64;
        slab.used += bytes.next_multiple_of(ALIGNMENT);
        slab.pieces += 1;
        Some(at)
    }

    /// A slab that the driver gave is the current one from now on.
    pub fn add(&mut self, start: DevicePtr) {
        self.by_start.insert(start, Slab::default());
        self.current = Some(start);
    }

    /// Takes a piece back.
    pub fn give(&mut self, at: DevicePtr) -> Given {
        let Some((&start, slab)) = self.by_start.range_mut(..=at).next_back() else { return Given::Stranger };
        if at - start >= SLAB_BYTES as u64 {
            return Given::Stranger;
        }
        slab.pieces -= 1;
        if slab.pieces > 0 {
            return Given::Kept;
        }
        self.by_start.remove(&start);
        self.current = self.current.filter(|current| *current != start);
        Given::Slab(start)
    }
}

#[cfg(test)]
mod tests {
    use super::{Given, MAX_PIECE, SLAB_BYTES, Slabs};

    const START: u64 = 1 << 40;

    #[test]
    fn pieces_of_a_slab_do_not_overlap_and_end_within_it() {
        let mut slabs = Slabs::default();
        assert_eq!(slabs.take(16), None, "there is no slab");
        slabs.add(START);
        let mut end = START;
        for bytes in [16, 300, MAX_PIECE, 256].into_iter().cycle() {
            let Some(at) = slabs.take(bytes) else { break };
            assert!(at >= end && at.is_multiple_of(256) && at + bytes as u64 <= START + SLAB_BYTES as u64);
            end = at + bytes as u64;
        }
        assert!(end > START + (SLAB_BYTES - MAX_PIECE) as u64);
    }

    #[test]
    fn a_slab_is_given_back_with_its_last_piece() {
        let mut slabs = Slabs::default();
        slabs.add(START);
        let [a, b] = [slabs.take(100).unwrap(), slabs.take(100).unwrap()];
        slabs.add(START + (1 << 30));
        let c = slabs.take(100).unwrap();
        assert_eq!([START - 256, START + SLAB_BYTES as u64].map(|at| slabs.give(at)), [Given::Stranger, Given::Stranger]);
        assert_eq!([slabs.give(b), slabs.give(a), slabs.give(a)], [Given::Kept, Given::Slab(START), Given::Stranger]);
        assert_eq!(slabs.give(c), Given::Slab(START + (1 << 30)));
        assert_eq!(slabs.take(16), None, "the current one is gone");
    }
}

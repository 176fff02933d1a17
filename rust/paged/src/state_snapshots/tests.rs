//! The slots against a list that is walked.

use proptest::prelude::*;

use super::*;
use crate::block_hash::BlockHasher;
use crate::prefix_index::PrefixIndex;

/// Nodes of an index, by number.
fn nodes(count: u32) -> Vec<NodeId> {
    let mut index = PrefixIndex::new(BlockHasher::new([1; 32]), 1, 1, 8);
    let root = index.pin_root(b"");
    let children = (0..count).map(|token| {
        index.pin(root);
        index.pin_child(root, &[token])
    });
    children.collect()
}

/// Node, slot and holders of each snapshot that can be found or is held; the least recently used first.
#[derive(Default)]
struct Model {
    num_slots: usize,
    entries: Vec<(Option<usize>, SnapshotSlot, u32)>,
}

impl Model {
    fn place(&self, node: usize) -> Option<usize> {
        self.entries.iter().position(|entry| entry.0 == Some(node))
    }

    fn touch(&mut self, place: usize) {
        let entry = self.entries.remove(place);
        self.entries.push(entry);
    }

    /// Whether a slot is given out.
    fn makes_room(&mut self, node: usize) -> bool {
        if let Some(place) = self.place(node) {
            self.touch(place);
            return false;
        }
        if self.entries.len() < self.num_slots {
            return true;
        }
        let Some(oldest) = self.entries.iter().position(|entry| entry.2 == 0) else { return false };
        self.entries.remove(oldest);
        true
    }

    fn sweep(&mut self) {
        self.entries.retain(|entry| entry.0.is_some() || entry.2 > 0);
    }
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Take(usize),
    Hold(usize),
    Release(usize),
    Forget(usize),
    Clear,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (0usize..8).prop_map(Op::Take),
        4 => (0usize..8).prop_map(Op::Hold),
        4 => (0usize..8).prop_map(Op::Release),
        2 => (0usize..8).prop_map(Op::Forget),
        1 => Just(Op::Clear),
    ]
}

proptest! {
    #[test]
    fn the_slots_do_what_the_list_does(num_slots in 0usize..5, ops in proptest::collection::vec(op(), 1..200)) {
        let nodes = nodes(8);
        let mut snapshots = StateSnapshots::new(num_slots);
        let mut model = Model { num_slots, entries: Vec::new() };
        for op in ops {
            match op {
                Op::Take(node) => {
                    let taken = snapshots.take(nodes[node]);
                    prop_assert_eq!(taken.is_some(), model.makes_room(node), "{:?}", model.entries);
                    if let Some(slot) = taken {
                        prop_assert!(model.entries.iter().all(|entry| entry.1 != slot), "{:?} is in use", slot);
                        model.entries.push((Some(node), slot, 0));
                    }
                }
                Op::Hold(node) => {
                    let found = snapshots.get(nodes[node]);
                    prop_assert_eq!(found, model.place(node).map(|place| model.entries[place].1));
                    if let (Some(slot), Some(place)) = (found, model.place(node)) {
                        snapshots.hold(slot);
                        model.entries[place].2 += 1;
                        model.touch(place);
                    }
                }
                Op::Release(which) => {
                    let held = model.entries.iter().filter(|entry| entry.2 > 0).count();
                    if held == 0 {
                        continue;
                    }
                    let entry = model.entries.iter_mut().filter(|entry| entry.2 > 0).nth(which % held).unwrap();
                    entry.2 -= 1;
                    snapshots.release(entry.1);
                }
                Op::Forget(node) => {
                    snapshots.forget(nodes[node]);
                    model.entries.iter_mut().filter(|entry| entry.0 == Some(node)).for_each(|entry| entry.0 = None);
                }
                Op::Clear => {
                    snapshots.clear();
                    model.entries.iter_mut().for_each(|entry| entry.0 = None);
                }
            }
            model.sweep();
            let held: Vec<_> = model.entries.iter().flat_map(|entry| vec![entry.1; entry.2 as usize]).collect();
            prop_assert_eq!(snapshots.check_integrity(&held, |_| true), Ok(()));
            let found = |entry: &(Option<usize>, SnapshotSlot, u32)| Some(nodes[entry.0?]);
            prop_assert!(snapshots.nodes().eq(model.entries.iter().filter_map(found)), "{:?}", model.entries);
        }
    }
}

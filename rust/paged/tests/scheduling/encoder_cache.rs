//! The encoder cache against a plain model of it, and requests that share it.

use std::collections::{HashMap, HashSet, VecDeque};

use paged::{EncoderCache, EncoderCacheError, EncoderContent, EncoderIndex, EncoderItem, EncoderKey, EncoderLease};
use proptest::prelude::*;

const PIXELS: &[u8] = &[7; 600];
const ITEM: EncoderItem<'static> = EncoderItem {
    dimensions: &[10, 20, 3],
    mode: "RGB8",
    processor: b"size=20",
    tower: b"siglip:1",
    adapter: b"",
    content: EncoderContent::Samples(PIXELS),
};

/// The key of the item with a number, and its size in the tests with a model.
fn item(number: u8) -> (EncoderKey, u64) {
    let key = EncoderItem { processor: &[number], ..ITEM }.key(&[1; 32]);
    (key, u64::from(number) % 5 * 3 + 1)
}

#[test]
fn a_key_covers_all_that_decides_the_output() {
    let items = [
        ITEM,
        EncoderItem { dimensions: &[20, 10, 3], ..ITEM },
        EncoderItem { dimensions: &[10, 20], ..ITEM },
        EncoderItem { mode: "BGR8", ..ITEM },
        EncoderItem { processor: b"size=40", ..ITEM },
        EncoderItem { tower: b"siglip:2", ..ITEM },
        EncoderItem { adapter: b"1", ..ITEM },
        EncoderItem { content: EncoderContent::File(PIXELS), ..ITEM },
        EncoderItem { content: EncoderContent::Samples(&PIXELS[1..]), ..ITEM },
        // The same bytes in a row, divided otherwise.
        EncoderItem { tower: b"siglip:", adapter: b"1", ..ITEM },
        EncoderItem { mode: "RGB8size=", processor: b"20", ..ITEM },
    ];
    let keys: HashSet<_> = items.iter().map(|item| item.key(&[1; 32])).collect();
    assert_eq!(keys.len(), items.len());
    assert_eq!(ITEM.key(&[1; 32]), ITEM.key(&[1; 32]));
    assert_ne!(ITEM.key(&[1; 32]), ITEM.key(&[2; 32]), "the key of the hash counts");
}

#[test]
fn no_bytes_mean_off_not_unbounded() {
    let mut cache = EncoderCache::new(0);
    let (key, _) = item(1);
    assert_eq!(cache.check(5), Err(EncoderCacheError::Off { needed_bytes: 5 }));
    assert!(matches!(cache.acquire(key, 0), Err(EncoderCacheError::Off { .. })));
}

#[test]
fn an_item_larger_than_the_budget_is_refused_with_the_figures() {
    let cache = EncoderCache::new(100);
    assert_eq!(cache.check(100), Ok(()));
    let text = cache.check(101).unwrap_err().to_string();
    assert!(text.contains("needs 101 bytes") && text.contains("has 100") && text.contains("at least 101"), "{text}");
}

#[test]
fn an_output_of_another_size_is_refused() {
    let mut cache = EncoderCache::new(100);
    let (key, _) = item(1);
    let _lease = cache.acquire(key, 10).unwrap().unwrap();
    let expected = EncoderCacheError::OtherSize { kept_bytes: 10, asked_bytes: 11 };
    assert_eq!(cache.acquire(key, 11).unwrap_err(), expected);
}

#[test]
fn an_output_is_reused_only_after_it_was_marked() {
    let mut cache = EncoderCache::new(100);
    let (key, _) = item(1);
    let first = cache.acquire(key, 10).unwrap().unwrap();
    let second = cache.acquire(key, 10).unwrap().unwrap();
    assert_eq!(first.index(), second.index(), "encoded once for both");
    // The first request ends before the step is committed: the second must encode.
    drop(first);
    assert!(!cache.is_encoded(&second));
    drop(second);
    assert_eq!(cache.stats().num_outputs, 0);
    let third = cache.acquire(key, 10).unwrap().unwrap();
    assert!(!cache.is_encoded(&third));
    cache.mark_encoded(&third);
    drop(third);
    let fourth = cache.acquire(key, 10).unwrap().unwrap();
    assert!(cache.is_encoded(&fourth));
}

#[test]
fn a_lease_outlives_the_cache_without_harm() {
    let mut cache = EncoderCache::new(100);
    let lease = cache.acquire(item(1).0, 10).unwrap();
    drop(cache);
    drop(lease);
}

#[test]
fn after_a_refusal_nobody_behind_gets_anything_in_that_step() {
    let mut cache = EncoderCache::new(10);
    let [held, big, small] = [1, 2, 3].map(|number| item(number).0);
    let lease = cache.acquire(held, 6).unwrap().unwrap();
    cache.mark_encoded(&lease);
    assert!(cache.acquire(big, 6).unwrap().is_none());
    assert!(cache.acquire(small, 1).unwrap().is_none());
    assert!(cache.acquire(held, 6).unwrap().is_none(), "a hit would keep the first from its room");
    cache.begin_step();
    drop(lease);
    assert!(cache.acquire(big, 6).unwrap().is_some());
    assert!(cache.acquire(small, 1).unwrap().is_some());
}

#[test]
fn clearing_drops_what_nobody_holds() {
    let mut cache = EncoderCache::new(100);
    let held = cache.acquire(item(1).0, 10).unwrap().unwrap();
    let idle = cache.acquire(item(2).0, 10).unwrap().unwrap();
    cache.mark_encoded(&held);
    cache.mark_encoded(&idle);
    let index = idle.index();
    drop(idle);
    cache.clear();
    assert_eq!(cache.drain_dropped().collect::<Vec<_>>(), [index]);
    assert!(cache.is_encoded(&held));
}

/// The same rules over a plain list, the output used longest ago first.
struct Model {
    budget: u64,
    /// Item, leases, whether it is encoded.
    outputs: VecDeque<(u8, u32, bool)>,
    closed: bool,
}

impl Model {
    fn bytes(&self, counts: impl Fn(u32) -> bool) -> u64 {
        self.outputs.iter().filter(|output| counts(output.1)).map(|output| item(output.0).1).sum()
    }

    /// Whether the lease is given.
    fn acquire(&mut self, number: u8) -> bool {
        if self.closed {
            return false;
        }
        if let Some(output) = self.outputs.iter_mut().find(|output| output.0 == number) {
            output.1 += 1;
            return true;
        }
        let needed = item(number).1;
        if self.bytes(|leases| leases > 0) + needed > self.budget {
            self.closed = true;
            return false;
        }
        while self.bytes(|_| true) + needed > self.budget {
            let oldest = self.outputs.iter().position(|output| output.1 == 0).unwrap();
            self.outputs.remove(oldest);
        }
        self.outputs.push_back((number, 1, false));
        true
    }

    fn release(&mut self, number: u8) {
        let place = self.outputs.iter().position(|output| output.0 == number).unwrap();
        self.outputs[place].1 -= 1;
        if self.outputs[place].1 == 0 {
            let output = self.outputs.remove(place).unwrap();
            if output.2 {
                self.outputs.push_back(output);
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Op {
    Acquire(u8),
    Mark(usize),
    Release(usize),
    BeginStep,
    Drain,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (0u8..12).prop_map(Op::Acquire),
        3 => (0usize..8).prop_map(Op::Mark),
        5 => (0usize..8).prop_map(Op::Release),
        3 => Just(Op::BeginStep),
        1 => Just(Op::Drain),
    ]
}

proptest! {
    #[test]
    fn the_cache_does_what_the_model_does(budget in 1u64..40, ops in proptest::collection::vec(op(), 1..200)) {
        let mut cache = EncoderCache::new(budget);
        let mut model = Model { budget, outputs: VecDeque::new(), closed: false };
        let mut leases: Vec<(u8, EncoderLease)> = Vec::new();
        // The owner's memory: what lies at each index.
        let mut memory: HashMap<EncoderIndex, u8> = HashMap::new();
        for op in ops {
            match op {
                Op::Acquire(number) => {
                    let (key, num_bytes) = item(number);
                    if num_bytes > budget {
                        prop_assert!(cache.acquire(key, num_bytes).is_err());
                        continue;
                    }
                    let known = model.outputs.iter().find(|output| output.0 == number).map(|output| output.2);
                    let lease = cache.acquire(key, num_bytes).unwrap();
                    prop_assert_eq!(lease.is_some(), model.acquire(number));
                    if let Some(lease) = lease {
                        prop_assert_eq!(cache.is_encoded(&lease), known.unwrap_or(false));
                        leases.push((number, lease));
                    }
                }
                Op::Mark(which) if !leases.is_empty() => {
                    for index in cache.drain_dropped().collect::<Vec<_>>() {
                        memory.remove(&index);
                    }
                    let (number, lease) = &leases[which % leases.len()];
                    if cache.is_encoded(lease) {
                        prop_assert_eq!(memory.get(&lease.index()), Some(number), "another item's output, or none");
                    } else {
                        memory.insert(lease.index(), *number);
                        cache.mark_encoded(lease);
                        model.outputs.iter_mut().find(|output| output.0 == *number).unwrap().2 = true;
                    }
                }
                Op::Release(which) if !leases.is_empty() => {
                    let (number, lease) = leases.swap_remove(which % leases.len());
                    drop(lease);
                    model.release(number);
                }
                Op::BeginStep => {
                    cache.begin_step();
                    model.closed = false;
                }
                Op::Drain => {
                    for index in cache.drain_dropped().collect::<Vec<_>>() {
                        memory.remove(&index);
                    }
                }
                Op::Mark(_) | Op::Release(_) => {}
            }
            let stats = cache.stats();
            prop_assert!(stats.leased_bytes <= stats.used_bytes && stats.used_bytes <= budget);
            prop_assert_eq!(stats.used_bytes, model.bytes(|_| true));
            prop_assert_eq!(stats.leased_bytes, model.bytes(|leases| leases > 0));
            prop_assert_eq!(stats.num_outputs, model.outputs.len());
            let indices: HashMap<_, _> = leases.iter().map(|(number, lease)| (lease.index(), number)).collect();
            let numbers: HashSet<_> = leases.iter().map(|(number, _)| number).collect();
            prop_assert_eq!(indices.len(), numbers.len(), "items share an index, or one has two");
        }
        leases.clear();
        prop_assert_eq!(cache.stats().leased_bytes, 0);
    }

    /// Requests with several items each, all of which fit alone: whatever the sizes, each step somebody computes, and the
    /// first to have arrived is never overtaken for room.
    #[test]
    fn requests_that_together_exceed_the_budget_take_turns(
        budget in 13u64..30,
        mut requests in proptest::collection::vec(proptest::collection::vec(0u8..12, 1..5), 1..8),
        span in 1usize..4,
    ) {
        let mut cache = EncoderCache::new(budget);
        // The lease of each request's current item, and how many steps its tokens still take.
        let mut current: Vec<Option<(EncoderLease, usize)>> = requests.iter().map(|_| None).collect();
        let most = requests.iter().map(Vec::len).sum::<usize>() * span;
        for _ in 0..most {
            cache.begin_step();
            for (items, current) in requests.iter_mut().zip(&mut current) {
                if current.is_none() && let Some(&number) = items.last() {
                    let (key, num_bytes) = item(number);
                    *current = cache.acquire(key, num_bytes).unwrap().map(|lease| (lease, span));
                }
            }
            let holders = current.iter().flatten().count();
            prop_assert!(holders > 0 || requests.iter().all(Vec::is_empty), "everybody waits");
            for (items, current) in requests.iter_mut().zip(&mut current) {
                if let Some((lease, remaining)) = current {
                    cache.mark_encoded(lease);
                    *remaining -= 1;
                    if *remaining == 0 {
                        *current = None;
                        items.pop();
                    }
                }
            }
        }
        prop_assert!(requests.iter().all(Vec::is_empty), "a request was left behind");
    }
}

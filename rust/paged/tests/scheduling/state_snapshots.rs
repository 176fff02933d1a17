//! Snapshots of states against a device that knows what each state is made of: exactly which tokens, of whom.

use std::collections::HashMap;

use paged::*;
use proptest::prelude::*;

use crate::common::{Owner, Prefixes, kv_config, scheduler_config};

/// A scheduler, and states that name the prefix that they are behind; 0: behind nothing.
struct Device {
    scheduler: Scheduler,
    prefixes: Prefixes,
    owners: HashMap<RequestId, Owner>,
    /// Prefix and tokens that each request's states are behind.
    states: HashMap<RequestId, (usize, usize)>,
    snapshots: HashMap<SnapshotSlot, (usize, usize)>,
    /// Those that ended, whole.
    ended: Vec<(Owner, Vec<u32>)>,
    cached: HashMap<RequestId, (usize, Option<MissReason>)>,
    next_id: u64,
    block_size: usize,
}

impl Device {
    fn new(config: &SchedulerConfig, kv: KvCacheConfig, num_snapshots: usize, min_snapshot_tokens: usize) -> Self {
        let config =
            SchedulerConfig { has_states: true, num_state_snapshots: num_snapshots, min_snapshot_tokens, ..config.clone() };
        Self {
            block_size: kv.block_size,
            scheduler: Scheduler::new(config, kv).unwrap(),
            prefixes: Prefixes::default(),
            owners: HashMap::new(),
            states: HashMap::new(),
            snapshots: HashMap::new(),
            ended: Vec::new(),
            cached: HashMap::new(),
            next_id: 0,
        }
    }

    fn add(&mut self, tokens: &[u32], max_tokens: usize, owner: &Owner) -> Option<RequestId> {
        let id = RequestId(self.next_id);
        let new = NewRequest {
            identity: owner.identity.clone(),
            cache_salt: owner.salt.clone(),
            public_prefix_len: owner.public_prefix_len,
            ..NewRequest::new(id, tokens.to_vec(), max_tokens)
        };
        self.scheduler.add_request(new).ok()?;
        self.next_id += 1;
        let num_public = owner.public_prefix_len.min(tokens.len());
        let num_public_tokens = num_public / self.block_size * self.block_size;
        self.owners.insert(id, Owner { public_prefix_len: num_public, num_public_tokens, ..owner.clone() });
        Some(id)
    }

    /// The prefix of a request's first `num_tokens` tokens.
    fn prefix(&mut self, id: RequestId, num_tokens: usize) -> usize {
        let chain = self.prefixes.chain(&self.owners[&id], &self.scheduler.token_ids(id)[..num_tokens]);
        chain.last().map_or(0, |prefix| prefix + 1)
    }

    fn save(&mut self) {
        let mut saves = Vec::new();
        self.scheduler.take_state_saves(&mut saves);
        for save in saves {
            let state = self.states[&save.request_id];
            assert_eq!(state.1, save.num_tokens, "states of {:?} are elsewhere", save.request_id);
            self.snapshots.insert(save.slot, state);
        }
        self.scheduler.check_integrity().unwrap();
    }

    fn end(&mut self, id: RequestId) {
        self.ended.push((self.owners[&id].clone(), self.scheduler.token_ids(id).to_vec()));
    }

    fn step(&mut self, fail: bool, abort: Option<usize>) {
        let before: HashMap<_, _> = self.owners.keys().map(|id| (*id, self.scheduler.token_ids(*id).to_vec())).collect();
        let output = self.scheduler.schedule();
        assert_eq!(output.stuck, None);
        for (id, _) in &output.finished {
            self.ended.push((self.owners[id].clone(), before[id].clone()));
        }
        self.save();
        if output.rows.is_empty() {
            return;
        }
        let mut sampled = Vec::new();
        for row in &output.rows {
            let (id, start) = (row.request_id, row.num_computed_tokens);
            let state = match row.snapshot {
                Some(slot) => self.snapshots[&slot],
                None if start == 0 => (0, 0),
                None => self.states[&id],
            };
            assert_eq!(state, (self.prefix(id, start), start), "{id:?} goes on with other states");
            let end = start + row.num_scheduled_tokens;
            let behind = (self.prefix(id, end), end);
            self.states.insert(id, behind);
            self.cached.entry(id).or_insert((row.num_cached_tokens, row.miss));
            if row.num_outputs > 0 {
                sampled.push((id, [(end as u32 * 31 + id.0 as u32 % 3) % 5]));
            }
        }
        if let Some(row) = abort.and_then(|which| output.rows.get(which)) {
            self.end(row.request_id);
            self.scheduler.abort_request(row.request_id);
        }
        if fail {
            self.scheduler.step_failed(&output);
        } else {
            let tokens: Vec<_> = sampled.iter().map(|(id, token)| (*id, &token[..])).collect();
            self.scheduler.update(&output, &tokens).unwrap();
        }
        self.save();
    }

    fn run(&mut self) {
        for _ in 0..10_000 {
            if !self.scheduler.has_requests() {
                return;
            }
            self.step(false, None);
        }
        panic!("still {:?}", self.scheduler.stats());
    }

    fn serve(&mut self, tokens: &[u32], max_tokens: usize) -> (usize, Option<MissReason>) {
        let id = self.add(tokens, max_tokens, &Owner::default()).unwrap();
        self.run();
        self.cached[&id]
    }

    fn pick(&self, which: usize) -> Option<RequestId> {
        let mut ids: Vec<_> = self.owners.keys().filter(|id| self.scheduler.status(**id).is_some()).copied().collect();
        ids.sort();
        (!ids.is_empty()).then(|| ids[which % ids.len()])
    }

    fn fork(&mut self, source: RequestId, less: usize, more: &[u32]) {
        let num_tokens = self.scheduler.token_ids(source).len();
        let cut = num_tokens.saturating_sub(less).max(1);
        let child = RequestId(self.next_id);
        let fork = ForkRequest { num_source_tokens: Some(cut), token_ids: more.to_vec(), ..ForkRequest::new(child, 4) };
        if self.scheduler.fork(source, fork).is_err() {
            return;
        }
        self.next_id += 1;
        let owner = &self.owners[&source];
        let public_prefix_len = owner.public_prefix_len.min(cut);
        let num_public_tokens = public_prefix_len / self.block_size * self.block_size;
        self.owners.insert(child, Owner { public_prefix_len, num_public_tokens, ..owner.clone() });
        if self.scheduler.num_computed_tokens(child).is_some_and(|(computed, _)| computed > 0) {
            let state = self.states[&source];
            self.states.insert(child, state);
        }
        self.save();
    }
}

fn device(num_snapshots: usize) -> Device {
    Device::new(&scheduler_config(4, 64, 200), kv_config(100, 4, &[None]), num_snapshots, 4)
}

fn numbered(from: u32, count: u32) -> Vec<u32> {
    (from..from + count).collect()
}

#[test]
fn a_repeated_prompt_begins_at_its_last_block_boundary() {
    for len in 6..30 {
        let mut device = device(8);
        let prompt = numbered(10, len);
        assert_eq!(device.serve(&prompt, 1).0, 0);
        assert_eq!(device.serve(&prompt, 1).0, (len as usize - 1) / 4 * 4, "{len} tokens");
    }
}

#[test]
fn the_next_turn_begins_where_the_last_one_ended_within_a_block() {
    let mut device = device(8);
    device.serve(&numbered(10, 9), 6);
    let mut next = device.ended[0].1.clone();
    assert_eq!(next.len(), 15);
    next.extend([77; 5]);
    assert_eq!(device.serve(&next, 1).0, 14);
}

#[test]
fn where_a_prompt_leaves_another_is_learned_on_the_first_miss_which_says_so() {
    let mut device = device(8);
    let with = |own: u32| [numbered(10, 24), numbered(100 * own, 9)].concat();
    assert_eq!(device.serve(&with(1), 1), (0, Some(MissReason::Cold)));
    assert_eq!(device.serve(&with(2), 1), (0, Some(MissReason::NoSnapshot)));
    assert_eq!(device.serve(&with(3), 1), (24, Some(MissReason::Cold)));
    let missed = device.scheduler.stats().prefix_missed_tokens[MissReason::NoSnapshot as usize];
    assert_eq!(missed, 33);
}

#[test]
fn prompts_that_come_together_wait_for_what_they_have_in_common() {
    let mut device = Device::new(&scheduler_config(8, 8, 200), kv_config(100, 4, &[None]), 8, 4);
    let ids: Vec<_> = (1..6)
        .map(|own| device.add(&[numbered(10, 24), numbered(100 * own, 9)].concat(), 2, &Owner::default()).unwrap())
        .collect();
    device.run();
    let cached: Vec<_> = ids.iter().map(|id| device.cached[id].0).collect();
    assert_eq!(cached, [0, 24, 24, 24, 24]);
}

#[test]
fn no_chunk_is_cut_for_less_than_a_snapshot_is_worth() {
    let steps = |min_snapshot_tokens| {
        let mut device = Device::new(&scheduler_config(4, 64, 200), kv_config(100, 4, &[None]), 8, min_snapshot_tokens);
        device.serve(&numbered(10, 22), 1);
        device.scheduler.stats().steps
    };
    assert_eq!((steps(20), steps(21)), (2, 1));
}

#[test]
fn a_snapshot_goes_with_its_blocks_and_the_least_recently_used_for_another() {
    let mut device = device(2);
    // The end of each is within a block that its prompt's end is before.
    device.serve(&numbered(10, 9), 1);
    device.serve(&numbered(10, 9), 1);
    device.serve(&numbered(50, 9), 1);
    let stats = device.scheduler.stats();
    assert_eq!((stats.state_snapshots_used, stats.state_snapshots_total, stats.state_snapshots_taken), (2, 2, 4));
    assert_eq!(stats.state_snapshots_evicted, 2);
    assert_eq!(device.serve(&numbered(10, 9), 1), (0, Some(MissReason::NoSnapshot)));
    device.serve(&numbered(1000, 190), 1);
    device.serve(&numbered(2000, 190), 1);
    device.serve(&numbered(3000, 190), 1);
    assert_ne!(device.serve(&numbered(10, 9), 1).1, Some(MissReason::NoSnapshot));
    device.scheduler.reset_prefix_cache();
    assert_eq!(device.scheduler.stats().state_snapshots_used, 0);
}

#[test]
fn without_snapshots_there_is_no_prefix_cache_and_without_states_there_are_none() {
    let mut device = device(0);
    assert_eq!(device.serve(&[1; 9], 1), (0, Some(MissReason::Disabled)));
    assert_eq!(device.serve(&[1; 9], 1), (0, Some(MissReason::Disabled)));
    let config = SchedulerConfig { num_state_snapshots: 3, ..scheduler_config(1, 8, 8) };
    let error = Scheduler::new(config, kv_config(8, 4, &[None])).unwrap_err().to_string();
    assert!(error.contains("num_state_snapshots") && error.contains('3'), "{error}");
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Add { shared: usize, own: usize, variant: u32, max_tokens: usize, whose: usize },
    Continue { which: usize, more: usize },
    Fork { which: usize, less: usize, more: usize },
    Keep(usize),
    Release(usize),
    Step,
    Fails,
    StepAborts(usize),
    Abort(usize),
    Reset,
}

fn op() -> impl Strategy<Value = Op> {
    let add = (0usize..20, 0usize..8, 0u32..3, 1usize..8, 0usize..6);
    prop_oneof![
        6 => add.prop_map(|(shared, own, variant, max_tokens, whose)| Op::Add { shared, own, variant, max_tokens, whose }),
        4 => (0usize..20, 1usize..6).prop_map(|(which, more)| Op::Continue { which, more }),
        3 => (0usize..8, 0usize..6, 0usize..4).prop_map(|(which, less, more)| Op::Fork { which, less, more }),
        2 => (0usize..8).prop_map(Op::Keep),
        2 => (0usize..8).prop_map(Op::Release),
        16 => Just(Op::Step),
        1 => Just(Op::Fails),
        1 => (0usize..4).prop_map(Op::StepAborts),
        1 => (0usize..8).prop_map(Op::Abort),
        1 => Just(Op::Reset),
    ]
}

fn whose(which: usize) -> Owner {
    match which {
        0 => Owner::new(b"adapter"),
        1 => Owner::salted(b"a", 6),
        2 => Owner::salted(b"b", 10),
        _ => Owner::default(),
    }
}

fn apply(device: &mut Device, op: Op) {
    match op {
        Op::Add { shared, own, variant, max_tokens, whose: which } => {
            let tokens: Vec<u32> = (0..shared as u32).chain((0..own as u32).map(|k| 100 * (variant + 1) + k)).collect();
            device.add(&tokens, max_tokens, &whose(which));
        }
        Op::Continue { which, more } if !device.ended.is_empty() => {
            let (owner, mut tokens) = device.ended[which % device.ended.len()].clone();
            tokens.extend((0..more as u32).map(|k| 900 + k));
            device.add(&tokens, 3, &owner);
        }
        Op::Continue { .. } => {}
        Op::Fork { which, less, more } => {
            if let Some(source) = device.pick(which) {
                device.fork(source, less, &vec![800; more]);
            }
        }
        Op::Keep(which) => {
            if let Some(id) = device.pick(which)
                && device.scheduler.keep_request(id)
            {
                device.end(id);
            }
            device.save();
        }
        Op::Release(which) => {
            if let Some(id) = device.pick(which) {
                device.scheduler.release(id);
            }
            device.save();
        }
        Op::Step => device.step(false, None),
        Op::Fails => device.step(true, None),
        Op::StepAborts(which) => device.step(false, Some(which)),
        Op::Abort(which) => {
            if let Some(id) = device.pick(which) {
                device.end(id);
                device.scheduler.abort_request(id);
            }
            device.save();
        }
        Op::Reset => device.scheduler.reset_prefix_cache(),
    }
}

proptest! {
    #[test]
    fn nobody_goes_on_with_states_of_other_tokens(
        (num_blocks, num_snapshots, budget) in (6usize..40, 1usize..6, 3usize..40),
        (has_windows, min_snapshot_tokens, optimistic) in (any::<bool>(), 1usize..9, any::<bool>()),
        ops in proptest::collection::vec(op(), 1..120),
    ) {
        let windows = if has_windows { vec![Some(6), None] } else { vec![None] };
        let admission = if optimistic { AdmissionPolicy::Optimistic } else { AdmissionPolicy::default() };
        let config = SchedulerConfig { admission, ..scheduler_config(4, budget, 48) };
        let mut device = Device::new(&config, kv_config(num_blocks, 4, &windows), num_snapshots, min_snapshot_tokens);
        for op in ops {
            apply(&mut device, op);
        }
        device.run();
        while let Some(id) = device.pick(0) {
            device.scheduler.release(id);
        }
        device.save();
        let stats = device.scheduler.stats();
        prop_assert_eq!(stats.blocks_used, 0);
    }
}

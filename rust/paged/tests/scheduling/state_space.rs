//! Every state that small schedulers can reach, by any order of operations: each is sound, each step makes progress, and
//! from each state, steps alone lead to the end of every request.

use std::collections::hash_map::DefaultHasher;
use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{Hash, Hasher};
use std::num::NonZeroU32;

use paged::*;

/// Prompt, most tokens to generate, priority, and tenant, whose weight is one more: at most 4 blocks of 2 tokens each, and the
/// second is the first's twin for a block.
const REQUESTS: [(&[u32], usize, i32, u64); 3] = [(&[1, 2, 3], 4, 0, 0), (&[1, 2, 4, 4], 3, 0, 1), (&[5], 2, -1, 0)];
const BLOCK_SIZE: usize = 2;
const MAX_DRAFTS: usize = 2;

struct Model {
    config: SchedulerConfig,
    kv: KvCacheConfig,
    max_requests: usize,
    /// Drafts that may be proposed for each request before a step.
    max_drafts: usize,
}

/// A scheduler and its step in flight.
#[derive(Clone)]
struct State {
    scheduler: Scheduler,
    output: SchedulerOutput,
    ids: Vec<RequestId>,
    next_id: u64,
}

impl State {
    fn hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.scheduler.hash_state(&mut hasher);
        for row in &self.output.rows {
            let place = self.ids.iter().position(|id| *id == row.request_id);
            (place, row.num_computed_tokens, row.num_scheduled_tokens, row.num_drafts).hash(&mut hasher);
        }
        hasher.finish()
    }

    fn is_in_flight(&self) -> bool {
        !self.output.rows.is_empty()
    }

    fn forget_ended(&mut self) {
        let scheduler = &self.scheduler;
        self.ids.retain(|id| scheduler.status(*id).is_some());
    }

    fn schedule(&mut self) {
        let had_requests = self.scheduler.has_requests();
        self.scheduler.schedule_into(&mut self.output);
        assert!(!had_requests || !self.output.rows.is_empty() || !self.output.finished.is_empty(), "no progress");
        assert_eq!(self.output.stuck, None);
        if self.scheduler.config().admission == AdmissionPolicy::Reserved {
            assert!(self.output.preempted.is_empty());
        }
    }

    /// What is generated depends on the length alone, so that the states stay few. Of each row's drafts up to `num_accepted`
    /// turn out right.
    fn update(&mut self, num_accepted: usize) {
        let samples = self.output.rows.iter().filter(|row| row.num_outputs > 0);
        let tokens: Vec<_> =
            samples.map(|row| (row.request_id, &[7; 1 + MAX_DRAFTS][..=num_accepted.min(row.num_drafts)])).collect();
        self.scheduler.update(&self.output, &tokens).unwrap();
        self.output = SchedulerOutput::default();
    }

    fn fail(&mut self) {
        self.scheduler.step_failed(&self.output);
        self.output = SchedulerOutput::default();
    }

    fn add(&mut self, kind: usize) {
        let (prompt, max_tokens, priority, tenant) = REQUESTS[kind];
        let request_id = RequestId(self.next_id);
        let new = NewRequest::new(request_id, prompt.to_vec(), max_tokens);
        let priority = if self.scheduler.config().fairness == FairnessPolicy::Fcfs { 0 } else { priority };
        let tenant = Tenant { id: tenant, weight: NonZeroU32::MIN.saturating_add(tenant as u32) };
        if self.scheduler.add_request(NewRequest { priority, tenant, ..new }).is_ok() {
            self.next_id += 1;
            self.ids.push(request_id);
        }
    }

    fn step(&mut self) {
        if !self.is_in_flight() {
            self.propose(0);
            self.schedule();
        }
        if self.is_in_flight() {
            self.update(0);
        }
    }

    /// Proposes so many drafts for every request. What a step does otherwise is the same with them.
    fn propose(&mut self, num_drafts: usize) {
        for id in &self.ids {
            assert!(self.scheduler.set_drafts(*id, &[7; MAX_DRAFTS][..num_drafts]));
        }
    }

    /// Everything that can happen next.
    fn successors(&self, max_requests: usize, max_drafts: usize) -> Vec<Self> {
        let with = |change: &dyn Fn(&mut Self)| {
            let mut next = self.clone();
            change(&mut next);
            next.forget_ended();
            next
        };
        let mut all = Vec::new();
        if self.is_in_flight() {
            let most = self.output.rows.iter().map(|row| row.num_drafts).max().unwrap_or(0);
            all.extend((0..=most).map(|num_accepted| with(&|state: &mut Self| state.update(num_accepted))));
            all.push(with(&Self::fail));
        } else {
            all.extend((0..=max_drafts).map(|num_drafts| {
                with(&|state: &mut Self| {
                    state.propose(num_drafts);
                    state.schedule();
                })
            }));
        }
        if self.ids.len() < max_requests {
            all.extend((0..REQUESTS.len()).map(|kind| with(&|state: &mut Self| state.add(kind))));
        }
        for &id in &self.ids {
            all.push(with(&|state: &mut Self| assert!(state.scheduler.finish_request(id))));
        }
        all
    }
}

/// Visits every state; returns how many there are.
fn explore(model: &Model) -> usize {
    let scheduler = Scheduler::new(model.config.clone(), model.kv.clone()).unwrap();
    let first = State { scheduler, output: SchedulerOutput::default(), ids: Vec::new(), next_id: 0 };
    // For each state, the one that a step leads to; `None` where no request is left.
    let mut step_of: HashMap<u64, Option<u64>> = HashMap::new();
    let mut open = VecDeque::from([first]);
    while let Some(state) = open.pop_front() {
        let hash = state.hash();
        if step_of.contains_key(&hash) {
            continue;
        }
        state.scheduler.check_integrity().unwrap();
        let mut stepped = state.clone();
        stepped.step();
        stepped.forget_ended();
        step_of.insert(hash, state.scheduler.has_requests().then(|| stepped.hash()));
        open.extend(
            state.successors(model.max_requests, model.max_drafts).into_iter().filter(|next| !step_of.contains_key(&next.hash())),
        );
    }
    check_ends(&step_of);
    step_of.len()
}

/// Steps alone come to an end from every state.
fn check_ends(step_of: &HashMap<u64, Option<u64>>) {
    let mut ends: HashSet<u64> = HashSet::new();
    for &from in step_of.keys() {
        let mut path = Vec::new();
        let mut at = from;
        while !ends.contains(&at) {
            assert!(path.len() <= step_of.len(), "steps go round in a circle");
            path.push(at);
            match step_of[&at] {
                Some(next) => at = next,
                None => break,
            }
        }
        ends.extend(path);
    }
}

fn model(num_blocks: usize, max_requests: usize, windows: &[Option<usize>], prefix_caching: bool) -> Model {
    let groups = KvGroups::from_layers(windows);
    Model {
        config: SchedulerConfig { max_preemptions: 1, drr_quantum: 2, ..SchedulerConfig::new(3, 3, 8) },
        kv: KvCacheConfig {
            num_blocks,
            block_size: BLOCK_SIZE,
            groups,
            enable_prefix_caching: prefix_caching,
            hash_key: [0; 32],
        },
        max_requests,
        max_drafts: 0,
    }
}

#[test]
fn every_policy_makes_progress_in_every_state() {
    let mut num_states = 0;
    for (_, admission) in AdmissionPolicy::ALL {
        for (_, victim) in VictimPolicy::ALL {
            for (_, fairness) in FairnessPolicy::ALL {
                for num_blocks in [2, 4] {
                    let mut model = model(num_blocks, 3, &[None], false);
                    (model.config.admission, model.config.victim, model.config.fairness) = (*admission, *victim, *fairness);
                    num_states += explore(&model);
                }
            }
        }
    }
    println!("{num_states} states");
}

#[test]
fn prompts_that_share_a_step_make_progress_in_every_state() {
    for (_, admission) in AdmissionPolicy::ALL {
        for num_blocks in [2, 4, 6] {
            // Of four and five prompt tokens one goes to the shortest.
            for max_num_batched_tokens in [4, 5] {
                let mut model = model(num_blocks, 3, &[None], false);
                (model.config.admission, model.config.max_num_batched_tokens) = (*admission, max_num_batched_tokens);
                println!("{admission}, {num_blocks} blocks: {} states", explore(&model));
            }
        }
    }
}

#[test]
fn four_requests_on_eight_blocks_make_progress_in_every_state() {
    for num_blocks in [1, 3, 5, 8] {
        println!("{num_blocks} blocks: {} states", explore(&model(num_blocks, 4, &[None], false)));
    }
}

#[test]
fn a_prefix_cache_makes_progress_in_every_state() {
    for num_blocks in [2, 3] {
        println!("{num_blocks} blocks: {} states", explore(&model(num_blocks, 2, &[None], true)));
    }
}

#[test]
fn windows_make_progress_in_every_state() {
    for num_blocks in [2, 4] {
        println!("{num_blocks} blocks: {} states", explore(&model(num_blocks, 2, &[Some(3), None], false)));
    }
}

#[test]
fn drafts_that_are_accepted_and_rejected_make_progress_in_every_state() {
    let models = [(3, 3, &[None][..], false), (2, 2, &[None], true), (4, 2, &[Some(3), None], false)];
    for (num_blocks, max_requests, windows, prefix_caching) in models {
        let model = Model { max_drafts: MAX_DRAFTS, ..model(num_blocks, max_requests, windows, prefix_caching) };
        println!("{num_blocks} blocks, windows {windows:?}: {} states", explore(&model));
    }
}

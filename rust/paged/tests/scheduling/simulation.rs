//! Random scripts against the shadow of every slot: the ten invariants of the pool and the progress theorem.

use paged::*;
use proptest::prelude::*;

use crate::common::{Meanwhile, Owner, Sim, kv_config, same_hash, scheduler_config};

#[derive(Clone, Copy, Debug)]
enum Whose {
    All,
    Adapter,
    Tenant { salt: u8, public_prefix_len: usize },
}

#[derive(Clone, Debug)]
enum Op {
    Add {
        shared: usize,
        own: usize,
        variant: u32,
        max_tokens: usize,
        whose: Whose,
        skip: bool,
        priority: i32,
        deadline: Option<u64>,
        tenant: u64,
    },
    /// The next turn of a conversation: what an ended request had, and some more.
    Continue {
        which: usize,
        more: usize,
    },
    /// A branch of a live request: cut to so many tokens less than it has, and some more.
    Fork {
        which: usize,
        less: usize,
        more: usize,
    },
    Keep(usize),
    ForkKept {
        which: usize,
        less: usize,
        more: usize,
    },
    Release(usize),
    Step,
    StepFails(Option<Meanwhile>),
    StepMeanwhile(Meanwhile),
    Abort(usize),
    Reset,
    Tick(u64),
    Pause,
    Resume,
    Drain,
}

fn whose() -> impl Strategy<Value = Whose> {
    let tenant = (0u8..2, 0usize..10).prop_map(|(salt, public_prefix_len)| Whose::Tenant { salt, public_prefix_len });
    prop_oneof![6 => Just(Whose::All), 1 => Just(Whose::Adapter), 3 => tenant]
}

fn meanwhile() -> impl Strategy<Value = Meanwhile> {
    prop_oneof![
        4 => (0usize..8).prop_map(Meanwhile::Abort),
        4 => (0usize..8).prop_map(Meanwhile::Keep),
        1 => Just(Meanwhile::Reset),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let add = (0usize..14, 0usize..8, 0u32..3, 1usize..8, whose(), proptest::bool::weighted(0.1));
    let standing = (prop_oneof![3 => Just(0), 1 => -1..3], proptest::option::weighted(0.2, 0u64..30), 0u64..3);
    prop_oneof![
        6 => (add, standing).prop_map(|((shared, own, variant, max_tokens, whose, skip), (priority, deadline, tenant))| {
            Op::Add { shared, own, variant, max_tokens, whose, skip, priority, deadline, tenant }
        }),
        2 => (0usize..20, 1usize..5).prop_map(|(which, more)| Op::Continue { which, more }),
        4 => (0usize..8, 0usize..6, 0usize..4).prop_map(|(which, less, more)| Op::Fork { which, less, more }),
        3 => (0usize..8).prop_map(Op::Keep),
        3 => (0usize..8, 0usize..6, 0usize..4).prop_map(|(which, less, more)| Op::ForkKept { which, less, more }),
        1 => (0usize..8).prop_map(Op::Release),
        14 => Just(Op::Step),
        1 => proptest::option::of(meanwhile()).prop_map(Op::StepFails),
        2 => meanwhile().prop_map(Op::StepMeanwhile),
        2 => (0usize..8).prop_map(Op::Abort),
        1 => Just(Op::Reset),
        2 => (0u64..4).prop_map(Op::Tick),
        1 => Just(Op::Pause),
        2 => Just(Op::Resume),
        1 => Just(Op::Drain),
    ]
}

fn windows() -> impl Strategy<Value = Vec<Option<usize>>> {
    prop_oneof![
        4 => Just(vec![None; 2]),
        2 => (1usize..12).prop_map(|window| vec![Some(window)]),
        3 => (1usize..10).prop_map(|window| vec![Some(window), Some(window), None]),
        1 => (1usize..6, 6usize..12).prop_map(|(short, long)| vec![Some(short), Some(long)]),
        1 => (1usize..6, 6usize..12).prop_map(|(short, long)| vec![Some(short), None, Some(long)]),
    ]
}

#[derive(Clone, Debug)]
struct Setup {
    config: SchedulerConfig,
    kv: KvCacheConfig,
    weak_hash: bool,
    /// One in so many loads fails and one in so many offers is dropped, if there is a tier.
    tier: Option<(u64, u64)>,
    /// Seed of the drafts, if there are any.
    drafts: Option<u64>,
    /// Events that are kept, and one in so many that are lost, and looked at, if anybody hears of them.
    events: Option<(usize, u64, u64)>,
}

fn any_of<P: Policy>() -> impl Strategy<Value = P> {
    (0..P::ALL.len()).prop_map(|at| P::ALL[at].1)
}

type Policies = ((AdmissionPolicy, VictimPolicy, FairnessPolicy), (usize, u32));

fn policies() -> impl Strategy<Value = Policies> {
    ((any_of(), any_of(), any_of()), (1usize..6, 1u32..4))
}

fn setup() -> impl Strategy<Value = Setup> {
    let limits = (1usize..5, 1usize..12, 8usize..30, proptest::option::weighted(0.3, 1usize..5));
    let modes = (proptest::bool::weighted(0.9), proptest::bool::weighted(0.1), any::<bool>(), proptest::bool::weighted(0.9));
    let tier = proptest::option::weighted(0.5, (0u64..5, 0u64..5));
    let drafts = proptest::option::weighted(0.6, any::<u64>());
    let events = proptest::option::weighted(0.8, (1usize..30, 0u64..5, 0u64..6));
    (limits, modes, windows(), 1usize..24, 1usize..5, policies(), (tier, drafts, events)).prop_map(
        |(limits, modes, windows, num_blocks, block_size, policies, (tier, drafts, events))| {
            let mut config = scheduler_config(limits.0, limits.1, limits.2);
            config.max_chunk_len = limits.3;
            (config.admission, config.victim, config.fairness) = policies.0;
            (config.drr_quantum, config.max_preemptions) = policies.1;
            config.retain_kv = modes.0;
            config.reserve_full_context = modes.1;
            let mut kv = kv_config(1, block_size, &windows);
            kv.num_blocks = num_blocks.max(kv.groups.groups.len());
            kv.enable_prefix_caching = modes.3;
            Setup { config, kv, weak_hash: modes.2, tier, drafts, events }
        },
    )
}

fn sim(setup: &Setup) -> Sim {
    let hasher = if setup.weak_hash { BlockHasher::with_function([0; 32], same_hash) } else { BlockHasher::new([1; 32]) };
    let mut sim = Sim::with_hasher(setup.config.clone(), setup.kv.clone(), hasher);
    if let Some((fails_one_in, drops_one_in)) = setup.tier {
        sim.attach_tier(fails_one_in, drops_one_in);
    }
    if let Some(seed) = setup.drafts {
        sim.draft(seed);
    }
    if let Some((max_events, loses_one_in, looks_one_in)) = setup.events {
        sim.record_events([9; 32], max_events, loses_one_in, looks_one_in);
    }
    sim
}

fn fork(sim: &mut Sim, source: RequestId, less: usize, more: usize) {
    let cut = (less > 0).then(|| sim.scheduler.token_ids(source).len().saturating_sub(less - 1));
    let more: Vec<u32> = (0..more as u32).map(|position| 70 + position).collect();
    let _ = sim.fork(source, cut, &more);
}

fn apply(sim: &mut Sim, op: &Op) {
    match *op {
        Op::Add { shared, own, variant, max_tokens, whose, skip, priority, deadline, tenant } => {
            let mut tokens: Vec<u32> = (0..shared as u32).map(|position| position % 3).collect();
            tokens.extend((0..own as u32).map(|position| 10 * variant + position));
            let mut owner = match whose {
                Whose::All => Owner::default(),
                Whose::Adapter => Owner::new(b"adapter"),
                Whose::Tenant { salt, public_prefix_len } => Owner::salted(&[salt], public_prefix_len),
            };
            owner.skip_prefix_lookup = skip;
            let new = NewRequest::new(RequestId(0), tokens, max_tokens);
            let _ = sim.add_request(NewRequest { priority, deadline, tenant: tenant.into(), ..new }, &owner);
        }
        Op::Continue { which, more } => {
            if !sim.ended.is_empty() {
                let (_, owner, mut tokens) = sim.ended[which % sim.ended.len()].clone();
                tokens.extend((0..more as u32).map(|position| 50 + position));
                let _ = sim.add_with(&tokens, 3, &owner);
            }
        }
        Op::Fork { which, less, more } => {
            if let Some(source) = sim.pick(which) {
                fork(sim, source, less, more);
            }
        }
        Op::Keep(k) => {
            if let Some(request_id) = sim.pick(k) {
                sim.keep(request_id);
            }
        }
        Op::ForkKept { which, less, more } => {
            if let Some(source) = sim.pick_kept(which) {
                fork(sim, source, less, more);
            }
        }
        Op::Release(k) => {
            if let Some(request_id) = sim.pick_kept(k) {
                sim.release(request_id);
            }
        }
        Op::Step => {
            sim.step(false, None);
        }
        Op::StepFails(meanwhile) => {
            sim.step(true, meanwhile);
        }
        Op::StepMeanwhile(meanwhile) => {
            sim.step(false, Some(meanwhile));
        }
        Op::Abort(k) => {
            if let Some(request_id) = sim.pick(k) {
                sim.abort(request_id);
            }
        }
        Op::Reset => sim.reset(),
        Op::Tick(ticks) => sim.tick(ticks),
        Op::Pause => sim.scheduler.pause(),
        Op::Resume => sim.scheduler.resume(),
        Op::Drain => sim.scheduler.drain(),
    }
    sim.check();
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(3000) })]

    /// Reads are of the right KV, publishing follows committing, books balance, and everything ends.
    #[test]
    fn any_script_keeps_the_invariants_and_ends(setup in setup(), script in proptest::collection::vec(op(), 1..60)) {
        let mut sim = sim(&setup);
        for op in &script {
            apply(&mut sim, op);
        }
        sim.drain();
        // With the cache forgotten nothing is left behind.
        sim.reset();
        prop_assert_eq!(sim.scheduler.stats().blocks_cached, 0);
    }

    /// What a request generates does not depend on chunks, batch, pool, preemption or cache.
    #[test]
    fn outputs_do_not_depend_on_how_they_were_scheduled(setup in setup(), prompts in proptest::collection::vec((1usize..12, 0u32..3), 1..6)) {
        let mut sim = sim(&setup);
        let mut expected = Vec::new();
        for (len, variant) in prompts {
            let tokens: Vec<u32> = (0..len as u32).map(|position| if position < 6 { position } else { position + variant }).collect();
            if let Ok(request_id) = sim.add(&tokens, 4) {
                expected.push((request_id, tokens));
            }
        }
        sim.drain();
        for (request_id, prompt) in expected {
            let (_, _, tokens) = sim.ended.iter().find(|ended| ended.0 == request_id).unwrap();
            prop_assert!(tokens.starts_with(&prompt));
            prop_assert!(tokens.len() > prompt.len(), "nothing was generated");
            // Greedy decoding is a function of the prefix; the shadow checks that only the prefix was read.
            let full = tokens.len() == (prompt.len() + 4).min(setup.config.max_model_len);
            let servable = sim.scheduler.servable_tokens();
            prop_assert!(full || tokens.len() > servable, "{} tokens of {} servable", tokens.len(), servable);
        }
    }
}

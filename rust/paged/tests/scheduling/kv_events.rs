//! What events tell of the prefix cache.

use paged::*;

use crate::common::{Owner, Sim, kv_config, scheduler_config};

const KEY: [u8; 32] = [4; 32];
const BLOCK_SIZE: usize = 4;

fn sim(num_blocks: usize, windows: &[Option<usize>]) -> Sim {
    Sim::new(scheduler_config(4, 32, 64), kv_config(num_blocks, BLOCK_SIZE, windows))
}

fn recording(num_blocks: usize, windows: &[Option<usize>]) -> Sim {
    let mut sim = sim(num_blocks, windows);
    sim.record_events(KEY, 1000, 0, 0);
    sim
}

fn serve(sim: &mut Sim, tokens: &[u32], owner: &Owner) {
    sim.add_with(tokens, 1, owner).unwrap();
    sim.run();
}

/// Blocks that the consumer holds, parents first.
fn held(sim: &Sim) -> Vec<StoredBlock> {
    let mut blocks: Vec<_> = sim.consumer.as_ref().unwrap().held.values().cloned().collect();
    blocks.sort_by(|a, b| (a.parent.is_some(), &a.tokens).cmp(&(b.parent.is_some(), &b.tokens)));
    blocks
}

#[test]
fn a_block_is_told_of_with_its_tokens_its_parent_its_identity_and_the_salt_before_it() {
    let mut sim = recording(20, &[None]);
    let tokens: Vec<u32> = (0..10).collect();
    serve(&mut sim, &tokens, &Owner::default());
    let [first, second] = held(&sim).try_into().unwrap();
    assert_eq!((&*first.tokens, &*second.tokens), (&tokens[..4], &tokens[4..8]), "the partial block is not told of");
    assert_eq!((first.parent, second.parent), (None, Some(first.digest)));
    assert_eq!((&first.salt, &second.salt, first.group), (&None, &None, 0));

    let mut salted = recording(20, &[None]);
    serve(&mut salted, &tokens, &Owner::salted(b"tenant", BLOCK_SIZE));
    let [public, private] = held(&salted).try_into().unwrap();
    assert_eq!(public, first, "what is everybody's is called alike");
    assert_ne!(private.digest, second.digest);
    assert_eq!(private.parent, Some(public.digest));
    assert_eq!(private.salt.as_deref(), Some(&b"tenant"[..]));

    let mut adapted = recording(20, &[None]);
    serve(&mut adapted, &tokens, &Owner::new(b"adapter"));
    let [first_adapted, second_adapted] = held(&adapted).try_into().unwrap();
    assert!(first_adapted.digest != first.digest && second_adapted.digest != second.digest);
    assert_eq!(&*second_adapted.identity, b"adapter");
}

#[test]
fn replicas_with_other_random_keys_call_blocks_alike_and_other_weights_otherwise() {
    let tokens: Vec<u32> = (0..20).collect();
    let digests = |hash_key: [u8; 32], digest_key: [u8; 32]| {
        let mut kv = kv_config(20, BLOCK_SIZE, &[Some(8), None]);
        kv.hash_key = hash_key;
        let mut sim = Sim::new(scheduler_config(4, 32, 64), kv);
        sim.record_events(digest_key, 1000, 0, 0);
        serve(&mut sim, &tokens, &Owner::salted(b"x", 0));
        let mut digests: Vec<_> = sim.scheduler.pool().kv_event_blocks().collect();
        digests.sort_unstable();
        digests
    };
    let one = digests([1; 32], KEY);
    assert!(one.iter().any(|(_, group)| *group == 0) && one.iter().any(|(_, group)| *group == 1));
    assert_eq!(one, digests([2; 32], KEY));
    let other = digests([1; 32], [5; 32]);
    assert!(other.iter().all(|block| !one.contains(block)) && other.len() == one.len());
}

#[test]
fn a_reset_tells_that_all_is_gone_and_events_that_nobody_took_make_the_next_taking_begin_anew() {
    let mut sim = sim(20, &[None]);
    sim.scheduler.record_kv_events(KEY, 2);
    serve(&mut sim, &[1; 13], &Owner::default());
    let mut events = Vec::new();
    sim.scheduler.take_kv_events(&mut events);
    assert!(matches!(&events[..], [KvEvent::Cleared, KvEvent::Stored(_), KvEvent::Stored(_), KvEvent::Stored(_)]), "{events:?}");
    sim.scheduler.reset_prefix_cache();
    events.clear();
    sim.scheduler.take_kv_events(&mut events);
    assert_eq!(events, [KvEvent::Cleared]);
}

#[test]
fn nothing_is_told_of_without_a_prefix_cache_or_before_recording() {
    let mut off = kv_config(20, BLOCK_SIZE, &[None]);
    off.enable_prefix_caching = false;
    let mut off = Sim::new(scheduler_config(4, 32, 64), off);
    off.record_events(KEY, 1000, 0, 0);
    serve(&mut off, &[1; 13], &Owner::default());
    assert_eq!(off.consumer.as_ref().unwrap().num_events, 1, "that nothing is held");
    let mut late = sim(20, &[None]);
    serve(&mut late, &[1; 13], &Owner::default());
    assert_eq!(late.scheduler.stats().kv_event_blocks, 0);
    let mut events = Vec::new();
    late.scheduler.list_kv_events(&mut events);
    assert_eq!(events, []);
}

/// Of a hundred thousand operations in small pools that evict all the time, a consumer that loses batches knows the outcome.
#[test]
fn a_consumer_of_a_hundred_thousand_operations_holds_what_the_pool_holds() {
    let mut state = 7u64;
    let mut random = |n: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % n
    };
    let windows: [&[Option<usize>]; 2] = [&[None], &[Some(6), Some(6), None]];
    for windows in windows {
        let mut sim = sim(36, windows);
        sim.record_events(KEY, 50, 50, 2);
        for _ in 0..50_000 {
            match random(100) {
                0..15 => {
                    let mut tokens: Vec<u32> = (0..random(24) as u32).collect();
                    tokens.extend((0..=random(8)).map(|position| (random(3) * 100 + position) as u32));
                    let owner = if random(4) == 0 { Owner::salted(&[random(2) as u8], 4) } else { Owner::default() };
                    let _ = sim.add_with(&tokens, 1 + random(6) as usize, &owner);
                }
                15 => sim.pick(random(8) as usize).into_iter().for_each(|id| sim.abort(id)),
                16 if random(50) == 0 => sim.reset(),
                17 => drop(sim.step(true, None)),
                _ => drop(sim.step(false, None)),
            }
            sim.ended.clear();
        }
        let consumer = sim.consumer.as_ref().unwrap();
        assert!(consumer.num_events > 10_000 && consumer.num_listings > 100, "{} events", consumer.num_events);
    }
}

//! Blocks outside the pool: offered when they are committed, fetched when a hit ends, and never believed.

use paged::*;

use crate::common::{Owner, Sim, kv_config, scheduler_config, tier_config};

fn full() -> Vec<Option<usize>> {
    vec![None; 3]
}

fn sim(num_blocks: usize, windows: &[Option<usize>]) -> Sim {
    let mut sim = Sim::new(scheduler_config(8, 64, 64), kv_config(num_blocks, 4, windows));
    sim.attach_tier(0, 0);
    sim
}

/// The next process: an empty pool over the same tier.
fn restarted(mut before: Sim) -> Sim {
    before.step(false, None);
    let mut after = Sim::new(scheduler_config(8, 64, 64), before.kv.clone());
    after.adopt_tier(&mut before);
    after
}

fn prompt(len: u32) -> Vec<u32> {
    (0..len).collect()
}

#[test]
fn every_full_block_goes_out_once_and_a_restarted_scheduler_begins_behind_them() {
    for (windows, num_groups) in [(full(), 1), (vec![Some(6), None], 2)] {
        let mut first = sim(40, &windows);
        for _ in 0..2 {
            first.add(&prompt(22), 3).unwrap();
            first.drain();
        }
        // 24 tokens have KV, of which the last of the answer never gets any.
        let stats = first.scheduler.tier_stats();
        assert_eq!(stats.swapped_out_blocks, 6 * num_groups);
        assert_eq!((stats.swapped_in_blocks, stats.blocks as u64), (0, 6 * num_groups));
        let output = first.ended[0].2.clone();

        let mut second = restarted(first);
        second.add(&prompt(22), 3).unwrap();
        second.drain();
        assert_eq!(second.ended[0].2, output);
        let stats = second.scheduler.stats();
        assert_eq!((stats.prefix_hit_tokens, stats.tier.hit_tokens), (20, 20));
        // Of the window, only what a query behind 20 tokens sees: from position 15 on.
        assert_eq!(stats.tier.swapped_in_blocks, if num_groups == 1 { 5 } else { 5 + 2 });
        assert_eq!(stats.tier.swapped_out_blocks, 0);
    }
}

#[test]
fn a_hit_in_the_pool_is_extended_by_the_tier() {
    let mut first = sim(40, &full());
    first.add(&prompt(30), 1).unwrap();
    first.drain();
    let mut second = restarted(first);
    // Two blocks and half of the third.
    second.add(&[&prompt(10)[..], &[90; 3]].concat(), 1).unwrap();
    second.drain();
    let fetched = second.scheduler.tier_stats().swapped_in_blocks;
    second.add(&prompt(30), 1).unwrap();
    second.drain();
    assert_eq!((fetched, second.scheduler.tier_stats().swapped_in_blocks), (2, 7));
}

#[test]
fn a_preempted_request_fetches_its_blocks_instead_of_computing_them() {
    let steps_with = |tier: bool| {
        let mut sim = Sim::new(scheduler_config(2, 8, 64), kv_config(12, 4, &full()));
        if tier {
            sim.attach_tier(0, 0);
        }
        sim.add(&prompt(20), 20).unwrap();
        sim.add(&(100..120).collect::<Vec<_>>(), 20).unwrap();
        sim.drain();
        let stats = sim.scheduler.stats();
        assert!(stats.preemptions > 0);
        (stats.recomputed_tokens, stats.tier.hit_tokens, sim.ended.clone())
    };
    let (without, none, expected) = steps_with(false);
    let (with, fetched, ended) = steps_with(true);
    assert!(with < without && none == 0 && fetched > 0, "{with} of {without} computed again, {fetched} fetched");
    assert_eq!(ended, expected);
}

#[test]
fn what_fails_to_load_is_computed_and_what_did_not_fail_is_kept() {
    for windows in [full(), vec![Some(6), None]] {
        let mut first = sim(40, &windows);
        first.add(&prompt(22), 3).unwrap();
        first.drain();
        let output = first.ended[0].2.clone();
        let mut second = restarted(first);
        second.tier.as_mut().unwrap().fails_one_in = 4;
        second.add(&prompt(22), 3).unwrap();
        second.drain();
        assert_eq!(second.ended[0].2, output);
        let stats = second.scheduler.stats();
        assert_eq!(stats.tier.failed_blocks, 1);
        if windows == full() {
            // The fourth block; the three before it stay.
            assert_eq!((stats.tier.swapped_in_blocks, stats.tier.hit_tokens, stats.prefix_hit_tokens), (4, 12, 12));
        }
        // What was computed instead is offered again.
        assert!(stats.tier.swapped_out_blocks >= 1);
    }
}

#[test]
fn a_tier_that_is_detached_while_blocks_are_fetched_leaves_them_to_be_computed() {
    for windows in [full(), vec![Some(6), None]] {
        let mut first = sim(40, &windows);
        first.add(&prompt(22), 3).unwrap();
        first.drain();
        let output = first.ended[0].2.clone();
        let mut second = restarted(first);
        second.add(&prompt(22), 3).unwrap();
        let step = second.scheduler.schedule();
        let swap_in = step.swap_in.expect("the tier has its blocks");
        second.tier = None;
        second.scheduler.detach_tier();
        let failed: Vec<_> = swap_in.blocks.iter().map(|block| block.id).collect();
        second.scheduler.swapped_in(&swap_in, &failed);
        second.drain();
        assert_eq!(second.ended[0].2, output);
        assert_eq!(second.scheduler.tier_stats(), TierStats::default());
        let mut offers = Vec::new();
        second.scheduler.take_swap_outs(&mut offers);
        assert!(offers.is_empty());
    }
}

#[test]
fn another_salt_identity_or_model_finds_nothing() {
    let mut first = sim(40, &full());
    first.add_with(&prompt(22), 1, &Owner::salted(b"a", 8)).unwrap();
    first.drain();
    let mut second = restarted(first);
    let mut hits_of = |owner: Owner| {
        let before = second.scheduler.tier_stats().hit_tokens;
        second.add_with(&prompt(22), 1, &owner).unwrap();
        second.drain();
        second.scheduler.tier_stats().hit_tokens - before
    };
    assert_eq!(hits_of(Owner::new(b"adapter")), 0);
    assert_eq!(hits_of(Owner::salted(b"b", 0)), 0);
    // The public part alone.
    assert_eq!(hits_of(Owner::salted(b"b", 8)), 8);
    second.reset();
    second.add_with(&prompt(22), 1, &Owner::salted(b"a", 8)).unwrap();
    second.drain();
    assert_eq!(second.scheduler.tier_stats().hit_tokens, 0);
}

#[test]
fn what_is_cheaper_to_compute_is_computed() {
    let mut first = sim(40, &full());
    first.add(&prompt(22), 1).unwrap();
    first.drain();
    let mut second = restarted(first);
    second.scheduler.set_tier_rates(TierRates { bytes_per_second: 1.0, tokens_per_second: 5.0 });
    second.add(&prompt(22), 1).unwrap();
    second.drain();
    let stats = second.scheduler.tier_stats();
    assert_eq!((stats.hit_tokens, stats.declined_tokens), (0, 20));
}

#[test]
fn requests_that_share_a_prefix_fetch_it_once() {
    let mut first = sim(60, &full());
    first.add(&prompt(22), 1).unwrap();
    first.drain();
    let mut second = restarted(first);
    for last in 0..4 {
        second.add(&[&prompt(21)[..], &[50 + last]].concat(), 2).unwrap();
    }
    second.drain();
    assert_eq!(second.scheduler.tier_stats().swapped_in_blocks, 5);
}

#[test]
fn a_request_that_ends_while_its_blocks_are_fetched_leaves_nothing_behind() {
    let mut first = sim(40, &full());
    first.add(&prompt(22), 1).unwrap();
    first.drain();
    let mut second = restarted(first);
    let id = second.add(&prompt(22), 1).unwrap();
    let swap_in = second.scheduler.schedule().swap_in.unwrap();
    assert_eq!((swap_in.request_id, swap_in.blocks.len()), (id, 5));
    assert!(second.scheduler.schedule().swap_in.is_none());
    second.abort(id);
    second.scheduler.swapped_in(&swap_in, &[]);
    second.check_idle();
    second.add(&prompt(22), 1).unwrap();
    second.drain();
    assert_eq!(second.scheduler.tier_stats().hit_tokens, 20);
}

#[test]
fn without_a_prefix_cache_nothing_is_offered() {
    let mut kv = kv_config(40, 4, &full());
    kv.enable_prefix_caching = false;
    let mut sim = Sim::new(scheduler_config(8, 64, 64), kv);
    sim.scheduler.attach_tier(tier_config(0));
    sim.add(&prompt(22), 1).unwrap();
    sim.drain();
    let mut blocks = Vec::new();
    sim.scheduler.take_swap_outs(&mut blocks);
    assert_eq!((blocks.len(), sim.scheduler.tier_stats()), (0, TierStats::default()));
}

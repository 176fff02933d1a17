//! What the prefix cache finds, what it recomputes, what it evicts, and what it says about misses.

use paged::*;

use crate::common::{Owner, Sim, kv_config, same_hash, scheduler_config};

fn full() -> Vec<Option<usize>> {
    vec![None; 3]
}

fn kinds() -> [Vec<Option<usize>>; 3] {
    [full(), vec![Some(5); 2], vec![Some(5), Some(5), None]]
}

/// The row of a prompt that is looked up now, after which it is gone.
fn probe(sim: &mut Sim, tokens: &[u32], owner: &Owner) -> ScheduledRequest {
    let request = sim.add_with(tokens, 1, owner).unwrap();
    let output = sim.scheduler.schedule();
    let row = *output.rows.iter().find(|row| row.request_id == request).unwrap();
    assert_eq!(row.num_cached_tokens, row.num_computed_tokens);
    sim.cached_tokens.insert(request, row.num_cached_tokens);
    sim.scheduler.step_failed(&output);
    sim.live.clear();
    row
}

fn cached(sim: &mut Sim, tokens: &[u32]) -> (usize, Option<MissReason>) {
    let row = probe(sim, tokens, &Owner::default());
    (row.num_cached_tokens, row.miss)
}

fn serve(sim: &mut Sim, tokens: &[u32], owner: &Owner) {
    sim.add_with(tokens, 1, owner).unwrap();
    sim.drain();
}

#[test]
fn a_prompt_that_is_all_in_the_cache_computes_one_token_wherever_its_blocks_end() {
    for windows in kinds() {
        for len in 2..20 {
            let mut sim = Sim::new(scheduler_config(4, 64, 64), kv_config(64, 4, &windows));
            let prompt: Vec<u32> = (0..len).collect();
            serve(&mut sim, &prompt, &Owner::default());
            assert_eq!(cached(&mut sim, &prompt), (prompt.len() - 1, None), "{windows:?}");
            // Two at once: neither writes to what the other reads.
            sim.add(&prompt, 4).unwrap();
            sim.add(&prompt, 4).unwrap();
            let before = sim.scheduler.stats().prefix_hit_tokens;
            sim.drain();
            assert_eq!(sim.scheduler.stats().prefix_hit_tokens - before, 2 * (u64::from(len) - 1), "{windows:?} {len}");
        }
    }
}

#[test]
fn any_beginning_of_what_is_cached_is_a_full_hit() {
    let mut sim = Sim::new(scheduler_config(4, 64, 64), kv_config(64, 4, &full()));
    let prompt: Vec<u32> = (0..14).collect();
    serve(&mut sim, &prompt, &Owner::default());
    for len in 2..=14 {
        assert_eq!(cached(&mut sim, &prompt[..len]), (len - 1, None));
    }
}

#[test]
fn the_partial_tail_of_a_conversation_is_found_by_its_next_turn() {
    for windows in kinds() {
        let mut sim = Sim::new(scheduler_config(4, 64, 64), kv_config(64, 4, &windows));
        sim.add(&[1, 2, 3, 4, 5], 6).unwrap();
        sim.drain();
        let mut next = sim.ended[0].2.clone();
        assert_eq!(next.len(), 11);
        next.extend([7; 3]);
        // Ten of eleven tokens have KV.
        assert_eq!(probe(&mut sim, &next, &Owner::default()).num_cached_tokens, 10, "{windows:?}");
    }
}

#[test]
fn of_several_tails_the_one_most_alike_is_taken() {
    let mut sim = Sim::new(scheduler_config(4, 64, 64), kv_config(64, 8, &full()));
    for tail in [[1, 2, 3, 4], [1, 2, 9, 9], [5, 5, 5, 5], [1, 7, 7, 7], [0, 0, 0, 0]] {
        let prompt: Vec<u32> = (10..18).chain(tail).collect();
        serve(&mut sim, &prompt, &Owner::default());
    }
    let mut with_tail = |tail: &[u32]| {
        let prompt: Vec<u32> = (10..18).chain(tail.iter().copied()).collect();
        cached(&mut sim, &prompt).0
    };
    assert_eq!(with_tail(&[1, 2, 3, 8, 8]), 11);
    assert_eq!(with_tail(&[1, 2, 9, 9, 4]), 12);
    assert_eq!(with_tail(&[1, 8, 8]), 9);
    assert_eq!(with_tail(&[4, 4, 4]), 8);
}

#[test]
fn a_copied_tail_stays_findable_when_there_is_room_and_is_taken_over_when_there_is_none() {
    let prompt: Vec<u32> = (0..6).collect();
    let tail_survives = |num_blocks| {
        let mut sim = Sim::new(scheduler_config(1, 64, 12), kv_config(num_blocks, 4, &full()));
        serve(&mut sim, &prompt, &Owner::default());
        let output = {
            sim.add(&prompt, 1).unwrap();
            sim.scheduler.schedule()
        };
        assert_eq!((output.rows[0].num_computed_tokens, output.rows[0].num_scheduled_tokens), (5, 1));
        output.copies.len()
    };
    assert_eq!((tail_survives(3), tail_survives(2)), (1, 0));
}

#[test]
fn a_lookup_says_why_it_ended() {
    let prompt: Vec<u32> = (0..10).collect();
    let mut sim = Sim::new(scheduler_config(1, 64, 64), kv_config(8, 4, &full()));
    assert_eq!(cached(&mut sim, &prompt), (0, Some(MissReason::Cold)));
    serve(&mut sim, &prompt, &Owner::default());
    let mut other = prompt.clone();
    other[9] = 77;
    assert_eq!(cached(&mut sim, &prompt), (9, None));
    other.push(78);
    assert_eq!(cached(&mut sim, &other), (9, Some(MissReason::PartialTail)));
    assert_eq!(cached(&mut sim, &[0, 1, 2, 3, 9, 9, 9, 9, 9]), (4, Some(MissReason::Cold)));
    let reason = |sim: &mut Sim, owner: &Owner| probe(sim, &prompt, owner).miss;
    assert_eq!(reason(&mut sim, &Owner::new(b"adapter")), Some(MissReason::Identity));
    assert_eq!(reason(&mut sim, &Owner::salted(b"tenant", 0)), Some(MissReason::Salt));
    assert_eq!(reason(&mut sim, &Owner::salted(b"tenant", 4)), Some(MissReason::Salt));
    let skips = Owner { skip_prefix_lookup: true, ..Owner::default() };
    assert_eq!(reason(&mut sim, &skips), Some(MissReason::Skipped));
    // Everything else has to go.
    serve(&mut sim, &[50; 31], &Owner::default());
    assert_eq!(cached(&mut sim, &prompt), (0, Some(MissReason::Evicted)));
    sim.scheduler.reset_prefix_cache();
    assert_eq!(cached(&mut sim, &prompt), (0, Some(MissReason::Cold)));
    let mut kv = kv_config(8, 4, &full());
    kv.enable_prefix_caching = false;
    let mut off = Sim::new(scheduler_config(1, 64, 64), kv);
    assert_eq!(cached(&mut off, &prompt), (0, Some(MissReason::Disabled)));
}

#[test]
fn a_window_that_is_gone_is_told_from_a_prefix_that_is_gone() {
    let mut sim = Sim::new(scheduler_config(1, 64, 64), kv_config(20, 4, &[Some(5), None]));
    let prompt: Vec<u32> = (0..32).collect();
    serve(&mut sim, &prompt, &Owner::default());
    // The middle of the prompt: what its window held is used for another request.
    serve(&mut sim, &[60; 20], &Owner::default());
    let mut middle = prompt[..16].to_vec();
    middle.push(99);
    let (num_tokens, reason) = cached(&mut sim, &middle);
    assert!(num_tokens < 16);
    assert_eq!(reason, Some(MissReason::WindowEvicted));
}

#[test]
fn queried_hit_and_missed_tokens_add_up() {
    let mut sim = Sim::new(scheduler_config(1, 64, 64), kv_config(32, 4, &full()));
    let prompt: Vec<u32> = (0..10).collect();
    serve(&mut sim, &prompt, &Owner::default());
    serve(&mut sim, &prompt, &Owner::default());
    serve(&mut sim, &prompt, &Owner::salted(b"a", 4));
    let stats = sim.scheduler.stats();
    let missed = |reason: MissReason| stats.prefix_missed_tokens[reason as usize];
    assert_eq!((stats.prefix_queried_tokens, stats.prefix_hit_tokens), (30, 9 + 4));
    // The second prompt's last token is neither.
    assert_eq!((missed(MissReason::Cold), missed(MissReason::Salt)), (10, 6));
    assert_eq!(stats.prefix_missed_tokens.iter().sum::<u64>(), 16);
    assert_eq!((stats.resumed_queried_tokens, stats.resumed_hit_tokens), (0, 0));
}

#[test]
fn what_a_preempted_request_finds_again_is_counted_apart() {
    let mut sim = Sim::new(scheduler_config(4, 64, 64), kv_config(6, 2, &full()));
    sim.add(&[1; 4], 6).unwrap();
    sim.add(&[2; 4], 6).unwrap();
    sim.drain();
    let stats = sim.scheduler.stats();
    assert!(stats.preemptions > 0 && stats.resumed_queried_tokens > 0);
    assert_eq!(stats.prefix_queried_tokens, 8);
}

#[test]
fn blocks_within_the_public_prefix_are_everybodys_and_no_others() {
    for windows in [full(), vec![Some(64), None]] {
        for weak in [false, true] {
            let hasher = if weak { BlockHasher::with_function([0; 32], same_hash) } else { BlockHasher::new([9; 32]) };
            let mut sim = Sim::with_hasher(scheduler_config(4, 64, 64), kv_config(64, 4, &windows), hasher);
            let prompt: Vec<u32> = (0..15).collect();
            serve(&mut sim, &prompt, &Owner::salted(b"a", 9));
            let mut tokens_for = |owner: &Owner| probe(&mut sim, &prompt, owner).num_cached_tokens;
            assert_eq!(tokens_for(&Owner::salted(b"a", 9)), 14);
            // Blocks 0 and 1 lie within the first nine tokens.
            assert_eq!(tokens_for(&Owner::salted(b"b", 9)), 8);
            assert_eq!(tokens_for(&Owner::salted(b"b", 8)), 8);
            assert_eq!(tokens_for(&Owner::salted(b"b", 7)), 4);
            assert_eq!(tokens_for(&Owner::salted(b"b", 0)), 0);
            assert_eq!(tokens_for(&Owner::salted(b"a", 12)), 8);
            assert_eq!(tokens_for(&Owner::default()), 8);
        }
    }
}

/// Identity and salt are fields of their own: no two different pairs are the same key.
#[test]
fn an_identity_and_a_salt_that_join_to_the_same_text_stay_apart() {
    let mut sim = Sim::new(scheduler_config(4, 64, 64), kv_config(64, 4, &full()));
    let prompt: Vec<u32> = (0..9).collect();
    let owner = |identity: &[u8], salt: &[u8]| Owner { salt: salt.to_vec(), ..Owner::new(identity) };
    serve(&mut sim, &prompt, &owner(b"org_1", b"2345"));
    for (identity, salt) in
        [(&b"org_12345"[..], &b""[..]), (b"", b"org_12345"), (b"org_1", b""), (b"2345", b"org_1"), (b"", b"2345")]
    {
        assert_eq!(probe(&mut sim, &prompt, &owner(identity, salt)).num_cached_tokens, 0);
    }
    assert_eq!(probe(&mut sim, &prompt, &owner(b"org_1", b"2345")).num_cached_tokens, 8);
}

/// Conversations on a model of windowed and full layers: each is asked again after the others have had their turn. What
/// left the windows would fill most of the pool, and reuse would end long before the pool is full.
#[test]
fn conversations_of_a_windowed_model_are_reused_while_the_pool_holds_their_ends() {
    let windows = [Some(8), Some(8), Some(8), Some(8), Some(8), None];
    let mut sim = Sim::new(scheduler_config(1, 16, 400), kv_config(400, 4, &windows));
    let num_groups = sim.kv.groups.groups.len();
    assert_eq!(num_groups, 6);
    let conversation = |n: u32| -> Vec<u32> { (0..120).map(|position| 1000 * n + position).collect() };
    // Each leaves 31 full blocks and at most 5 windows of 4 blocks: seven of them are 357 of 400 blocks.
    for n in 0..7 {
        serve(&mut sim, &conversation(n), &Owner::default());
    }
    for n in 0..7 {
        let mut next = conversation(n);
        next.extend([999_999; 2]);
        let (num_tokens, reason) = cached(&mut sim, &next);
        assert_eq!(num_tokens, 120, "conversation {n}: {reason:?}");
    }
}

#[test]
fn a_hot_system_prompt_outlives_what_extends_it() {
    for windows in kinds() {
        let mut sim = Sim::new(scheduler_config(1, 256, 400), kv_config(60, 4, &windows));
        let system: Vec<u32> = (0..40).collect();
        for n in 0..30 {
            let mut prompt = system.clone();
            prompt.extend((0..12).map(|position| 100 * (n + 1) + position));
            let request = sim.add(&prompt, 1).unwrap();
            let output = sim.scheduler.schedule();
            if n > 0 {
                assert_eq!(output.rows[0].num_cached_tokens, 40, "{windows:?}, request {n}");
            }
            sim.scheduler.update(&output, &[(request, &[1])]).unwrap();
            sim.scheduler.finish_request(request);
            sim.live.clear();
        }
    }
}

#[test]
fn a_public_prefix_ends_with_the_prompt() {
    let mut sim = Sim::new(scheduler_config(4, 64, 64), kv_config(16, 4, &[None]));
    let mine = Owner::salted(b"a", 100);
    let request = sim.add_with(&[1, 2, 3, 4, 5], 8, &mine).unwrap();
    sim.run();
    let answered = sim.ended.iter().find(|ended| ended.0 == request).unwrap().2.clone();
    sim.add_with(&answered, 1, &Owner::salted(b"b", 100)).unwrap();
    sim.run();
    assert_eq!(sim.scheduler.stats().prefix_hit_tokens, 4, "another tenant finds the prompt and not the answer");
}

#[test]
fn a_forks_public_prefix_ends_with_what_it_has_of_its_source() {
    let mut sim = Sim::new(scheduler_config(1, 64, 64), kv_config(16, 4, &[None]));
    let source = sim.add_with(&[1; 8], 4, &Owner::salted(b"a", 8)).unwrap();
    sim.step(false, None);
    sim.fork(source, Some(4), &[9; 6]).unwrap();
    sim.run();
    let others = [&[1; 4][..], &[9; 6]].concat();
    sim.add_with(&others, 1, &Owner::salted(b"b", 8)).unwrap();
    sim.run();
    // The fork found the source's first block, the other tenant the same.
    assert_eq!(sim.scheduler.stats().prefix_hit_tokens, 4 + 4);
}

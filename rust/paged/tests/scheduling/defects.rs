//! Defects of other paged engines, each by the number it has in this project's list, held off by name.

use paged::*;

use crate::common::{Owner, Sim, StepResult, kv_config, same_hash, scheduler_config};

fn one_group() -> Vec<Option<usize>> {
    vec![None; 2]
}

/// Prompts of different lengths arrive together and not all fit the step; those left out published all their blocks,
/// computed or not, and hit them when they came back.
#[test]
fn defect_01_a_request_that_was_not_computed_publishes_nothing() {
    let mut sim = Sim::new(scheduler_config(4, 4, 64), kv_config(32, 2, &one_group()));
    let short = sim.add(&[1, 2, 3, 4], 2).unwrap();
    let long = sim.add(&[5, 6, 7, 8, 9, 10, 11, 12], 2).unwrap();
    sim.step(false, None);
    assert_eq!(sim.scheduler.status(long), Some(RequestStatus::Waiting));
    assert_eq!(sim.scheduler.num_computed_tokens(short), Some((4, 2)));
    // Nothing of the long prompt can be found.
    sim.abort(long);
    sim.add(&[5, 6, 7, 8, 9, 10, 11, 12], 2).unwrap();
    sim.drain();
    assert_eq!(sim.scheduler.stats().prefix_hit_tokens, 0);
}

/// The same through a real preemption: only what was computed may be found by the victim that comes back.
#[test]
fn defect_01_a_preempted_request_hits_only_what_it_had_computed() {
    let mut sim = Sim::new(scheduler_config(4, 6, 64), kv_config(8, 2, &one_group()));
    let first = sim.add(&[1, 2, 3, 4], 12).unwrap();
    let second = sim.add(&[5, 6, 7, 8, 9, 10], 4).unwrap();
    while sim.scheduler.stats().preemptions == 0 {
        assert_ne!(sim.step(false, None), StepResult::Idle);
    }
    assert_eq!(sim.scheduler.status(second), Some(RequestStatus::Preempted));
    assert_eq!(sim.scheduler.num_computed_tokens(second), Some((0, 0)));
    assert!(sim.scheduler.token_ids(second).len() >= 6, "it keeps its tokens");
    assert_eq!(sim.scheduler.status(first), Some(RequestStatus::Running));
    sim.drain();
    assert_eq!(sim.finished.len(), 2);
}

/// The last sampled token has no KV; when it completes a block, the block was published with an unwritten slot.
#[test]
fn defect_02_the_block_that_the_last_sampled_token_completes_is_not_published() {
    let mut sim = Sim::new(scheduler_config(4, 64, 64), kv_config(32, 4, &one_group()));
    let request = sim.add(&[1, 2, 3, 4, 5, 6, 7], 1).unwrap();
    sim.step(false, None);
    // Eight tokens are known, seven have KV.
    assert_eq!(sim.scheduler.token_ids(request).len(), 8);
    assert_eq!(sim.scheduler.num_computed_tokens(request), Some((7, 1)));
    let mut next_turn = sim.scheduler.token_ids(request).to_vec();
    assert!(sim.scheduler.finish_request(request));
    sim.live.clear();
    next_turn.extend([50, 51]);
    sim.add(&next_turn, 1).unwrap();
    let output = sim.scheduler.schedule();
    assert_eq!((output.rows[0].num_computed_tokens, output.rows[0].num_cached_tokens), (7, 7));
}

/// The victim of a preemption was taken for the candidate: it ran without blocks, or was lost.
#[test]
fn defect_03_the_victim_waits_without_blocks_ahead_of_all_who_came_later() {
    let mut sim = Sim::new(scheduler_config(3, 8, 64), kv_config(6, 2, &one_group()));
    let ids: Vec<_> = (0..4).map(|n| sim.add(&[n, n + 1, n + 2], 8).unwrap()).collect();
    let mut preempted: Vec<RequestId> = Vec::new();
    for _ in 0..200 {
        let before = sim.scheduler.stats().preemptions;
        if sim.step(false, None) == StepResult::Idle && !sim.scheduler.has_requests() {
            break;
        }
        if sim.scheduler.stats().preemptions > before {
            let waiting: Vec<RequestId> =
                ids.iter().copied().filter(|id| sim.scheduler.status(*id) == Some(RequestStatus::Preempted)).collect();
            for id in &waiting {
                assert!(sim.scheduler.block_table(*id, 0).is_empty());
            }
            // All who run are ahead of all who wait.
            let first_waiting = ids
                .iter()
                .filter(|id| matches!(sim.scheduler.status(**id), Some(RequestStatus::Preempted | RequestStatus::Waiting)));
            let last_running = ids.iter().filter(|id| sim.scheduler.status(**id) == Some(RequestStatus::Running));
            assert!(last_running.max() < first_waiting.min());
            preempted.extend(waiting);
        }
    }
    assert!(!preempted.is_empty(), "the pool was meant to be too small");
    let mut finished: Vec<_> = sim.finished.iter().map(|finished| finished.0).collect();
    assert!(finished.is_sorted(), "served in order of arrival");
    finished.sort();
    assert_eq!(finished, ids, "nobody is lost");
}

/// Sequences of a failed step stayed in the batch with their blocks and were revived.
#[test]
fn defect_04_the_requests_of_a_failed_step_leave_and_publish_nothing() {
    let mut sim = Sim::new(scheduler_config(2, 64, 64), kv_config(32, 2, &one_group()));
    let first = sim.add(&[1, 2, 3, 4], 4).unwrap();
    let second = sim.add(&[5, 6, 7, 8], 4).unwrap();
    let third = sim.add(&[1, 2, 3, 4, 5], 4).unwrap();
    assert_eq!(sim.step(true, None), StepResult::Failed);
    assert_eq!((sim.scheduler.status(first), sim.scheduler.status(second)), (None, None));
    assert_eq!(sim.scheduler.status(third), Some(RequestStatus::Waiting));
    assert_eq!((sim.scheduler.stats().blocks_used, sim.scheduler.stats().blocks_cached), (0, 0));
    let output = sim.scheduler.schedule();
    assert_eq!((output.rows.len(), output.rows[0].request_id), (1, third));
    assert_eq!(output.rows[0].num_computed_tokens, 0, "what the failed step wrote is not found");
}

/// The pool itself refuses a double free (see its own tests); no order of the scheduler's calls gets that far.
#[test]
fn defect_06_ending_a_request_twice_frees_its_blocks_once() {
    let mut sim = Sim::new(scheduler_config(2, 64, 64), kv_config(8, 2, &one_group()));
    let request = sim.add(&[1, 2, 3, 4], 4).unwrap();
    let output = sim.scheduler.schedule();
    assert!(sim.scheduler.finish_request(request));
    assert!(!sim.scheduler.finish_request(request) && !sim.scheduler.abort_request(request));
    assert!(sim.scheduler.step_failed(&output).is_empty());
    sim.live.clear();
    sim.check_idle();
}

/// A lookup over several groups silently used the first.
#[test]
fn defect_09_a_hit_must_be_accepted_by_every_group() {
    let groups = KvGroups::from_layers(&[None, Some(4)]);
    let mut manager = KvCacheManager::new(13, 2, groups, BlockHasher::new([0; 32]), true);
    let mut blocks = RequestBlocks::new(2, 13);
    let tokens: Vec<u32> = (0..13).collect();
    manager.allocate_slots(&mut blocks, 0, 12, &mut Vec::new()).unwrap();
    manager.commit(&mut blocks, &tokens, CacheKey::new(b""), 12);
    manager.free(&mut blocks);
    assert_eq!(manager.get_computed_blocks(&tokens[..9], CacheKey::new(b"")).num_tokens, 8);
    // Another request takes the block that was never used and the window group's first three.
    manager.allocate_slots(&mut blocks, 0, 4, &mut Vec::new()).unwrap();
    assert_eq!(manager.pool().num_cached_blocks(), 9);
    // The full group still has all four blocks of the short prefix, the window group none it would need.
    assert_eq!(manager.get_computed_blocks(&tokens[..9], CacheKey::new(b"")).num_tokens, 0);
    let whole = manager.get_computed_blocks(&tokens, CacheKey::new(b""));
    let expected = PrefixHit { num_tokens: 12, num_blocks: 8, num_free_blocks: 8, num_block_tokens: 12, ..PrefixHit::default() };
    assert_eq!(whole, expected);
}

/// Every access to a sequence took a lock, and every step cloned every token list. Here one thread owns everything:
/// the scheduler can be sent to it, and hands out borrows.
#[test]
fn defect_12_the_scheduler_is_plainly_owned_and_lends_its_lists() {
    fn is_send<T: Send>(_: &T) {}
    let mut sim = Sim::new(scheduler_config(64, 2048, 4096), kv_config(512, 8, &one_group()));
    is_send(&sim.scheduler);
    let ids: Vec<_> = (0..64).map(|n| sim.add(&[n; 20], 40).unwrap()).collect();
    for _ in 0..3 {
        sim.step(false, None);
    }
    assert_eq!(sim.scheduler.num_running(), 64);
    // In a steady step nothing moves: same lists, same output buffers.
    let places = |sim: &Sim| ids.iter().map(|id| sim.scheduler.token_ids(*id).as_ptr()).collect::<Vec<_>>();
    let before = places(&sim);
    let mut output = SchedulerOutput::default();
    output.rows.reserve(64);
    let rows = output.rows.as_ptr();
    sim.scheduler.schedule_into(&mut output);
    assert_eq!((output.rows.len(), output.rows.as_ptr()), (64, rows));
    assert_eq!(places(&sim), before);
}

/// The hit counter counted requests.
#[test]
fn defect_13_prefix_hits_are_counted_in_tokens() {
    let mut sim = Sim::new(scheduler_config(1, 64, 64), kv_config(32, 4, &one_group()));
    let prompt: Vec<u32> = (0..14).collect();
    for _ in 0..2 {
        sim.add(&prompt, 1).unwrap();
        sim.drain();
    }
    let stats = sim.scheduler.stats();
    assert_eq!((stats.prefix_queried_tokens, stats.prefix_hit_tokens), (28, 13));
    // A request that computes every position neither asks nor hits.
    sim.add_with(&prompt, 1, &Owner { skip_prefix_lookup: true, ..Owner::default() }).unwrap();
    sim.drain();
    let stats = sim.scheduler.stats();
    assert_eq!((stats.prefix_queried_tokens, stats.prefix_hit_tokens), (28, 13));
}

/// The null block was held by touches and counted as usable; a prompt of exactly the advertised size was admitted and
/// then starved everyone.
#[test]
fn defects_10_and_11_a_prompt_of_exactly_the_pool_is_served_and_one_more_token_is_refused() {
    let mut sim = Sim::new(scheduler_config(4, 64, 1000), kv_config(4, 8, &one_group()));
    let prompt = vec![1; 33];
    let error = sim.add(&prompt, 1).unwrap_err();
    let expected = AdmissionError::TooLongForPool {
        request_id: RequestId(0),
        num_tokens: 33,
        needed_blocks: 5,
        usable_blocks: 4,
        usable_tokens: 32,
    };
    assert_eq!(error, expected);
    assert!(error.to_string().contains("33 tokens need 5 KV blocks and the whole pool has 4, which hold 32 tokens"));
    let other = sim.add(&[2; 8], 20).unwrap();
    let request = sim.add(&prompt[..32], 5).unwrap();
    sim.drain();
    assert_eq!(sim.scheduler.stats().blocks_total, 4);
    assert_eq!(sim.finished, [(other, FinishReason::Length), (request, FinishReason::Length)]);
    let tokens = |id| sim.ended.iter().find(|ended| ended.0 == id).unwrap().2.len();
    assert_eq!((tokens(other), tokens(request)), (28, 33));
    assert_eq!(sim.scheduler.pool().ref_cnt(BlockId::NULL), 0);
}

/// Hits stay exact though every hash is the same: tokens and parents decide.
#[test]
fn a_constant_hash_function_serves_no_wrong_block() {
    let hasher = BlockHasher::with_function([0; 32], same_hash);
    let mut sim = Sim::with_hasher(scheduler_config(2, 64, 64), kv_config(64, 2, &one_group()), hasher);
    // The same block of tokens below different parents, and below different identities.
    for (prompt, identity, hit) in [
        (vec![1, 2, 7, 7, 0], b"a", 0),
        (vec![3, 4, 7, 7, 0], b"a", 0),
        (vec![7, 7, 7, 7, 0], b"a", 0),
        (vec![1, 2, 7, 7, 0], b"b", 0),
        (vec![1, 2, 7, 7, 0], b"a", 4),
        (vec![3, 4, 7, 7, 0], b"a", 4),
        (vec![1, 2, 7, 8, 0], b"a", 3),
        (vec![1, 2, 7, 7, 0], b"b", 4),
    ] {
        let before = sim.scheduler.stats().prefix_hit_tokens;
        sim.add_with(&prompt, 1, &Owner::new(identity)).unwrap();
        sim.drain();
        assert_eq!(sim.scheduler.stats().prefix_hit_tokens - before, hit, "{prompt:?}");
    }
}

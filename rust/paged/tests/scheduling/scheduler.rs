//! What the scheduler promises, one case at a time.

use paged::*;

use crate::common::{Sim, StepResult, kv_config, scheduler_config};

fn rows(output: &SchedulerOutput) -> Vec<(u64, usize, usize, bool)> {
    output
        .rows
        .iter()
        .map(|row| (row.request_id.0, row.num_computed_tokens, row.num_scheduled_tokens, row.num_outputs > 0))
        .collect()
}

fn full() -> Vec<Option<usize>> {
    vec![None; 3]
}

fn new_request(id: u64, tokens: &[u32]) -> NewRequest {
    NewRequest::new(RequestId(id), tokens.to_vec(), 8)
}

#[test]
fn one_budget_mixes_chunks_and_single_tokens() {
    let mut scheduler = Scheduler::new(scheduler_config(4, 8, 64), kv_config(32, 4, &full())).unwrap();
    scheduler.add_request(new_request(1, &[1; 3])).unwrap();
    scheduler.add_request(new_request(2, &[2; 12])).unwrap();
    let output = scheduler.schedule();
    assert_eq!(rows(&output), [(1, 0, 3, true), (2, 0, 5, false)]);
    assert_eq!((output.step_id, output.total_num_scheduled_tokens), (1, 8));
    scheduler.update(&output, &[(RequestId(1), &[9])]).unwrap();
    let output = scheduler.schedule();
    assert_eq!(rows(&output), [(1, 3, 1, true), (2, 5, 7, true)]);
    scheduler.update(&output, &[(RequestId(1), &[9]), (RequestId(2), &[9])]).unwrap();
    assert_eq!(scheduler.token_ids(RequestId(1)), [1, 1, 1, 9, 9]);
    assert_eq!(scheduler.num_prompt_tokens(RequestId(1)), 3);
    assert_eq!(rows(&scheduler.schedule()), [(1, 4, 1, true), (2, 12, 1, true)]);
}

#[test]
fn a_chunk_cap_leaves_room_for_those_behind() {
    let mut config = scheduler_config(4, 8, 64);
    config.max_chunk_len = Some(4);
    let mut scheduler = Scheduler::new(config, kv_config(32, 4, &full())).unwrap();
    scheduler.add_request(new_request(1, &[1; 20])).unwrap();
    scheduler.add_request(new_request(2, &[2; 3])).unwrap();
    assert_eq!(rows(&scheduler.schedule()), [(1, 0, 4, false), (2, 0, 3, true)]);
}

#[test]
fn prompts_beside_answers_are_computed_in_smaller_chunks() {
    let mut scheduler = Scheduler::new(scheduler_config(4, 64, 64), kv_config(64, 4, &full())).unwrap();
    scheduler.limit_prompt_tokens(PromptLimits { beside_answers: Some(10), alone: None });
    scheduler.add_request(new_request(1, &[1; 20])).unwrap();
    let output = scheduler.schedule();
    assert_eq!(rows(&output), [(1, 0, 20, true)], "nobody waits for a token");
    scheduler.update(&output, &[(RequestId(1), &[9])]).unwrap();
    scheduler.add_request(new_request(2, &[2; 20])).unwrap();
    let output = scheduler.schedule();
    assert_eq!(rows(&output), [(1, 20, 1, true), (2, 0, 10, false)]);
    scheduler.update(&output, &[(RequestId(1), &[9])]).unwrap();
    // However low the limit, a prompt gets on.
    scheduler.limit_prompt_tokens(PromptLimits { beside_answers: Some(0), alone: None });
    let output = scheduler.schedule();
    assert_eq!(rows(&output), [(1, 21, 1, true), (2, 10, 1, false)]);
    scheduler.update(&output, &[(RequestId(1), &[9])]).unwrap();
    scheduler.limit_prompt_tokens(PromptLimits { beside_answers: None, alone: None });
    assert_eq!(rows(&scheduler.schedule()), [(1, 22, 1, true), (2, 11, 9, true)]);
}

#[test]
fn a_step_without_answers_has_a_limit_of_its_own() {
    let mut scheduler = Scheduler::new(scheduler_config(4, 64, 64), kv_config(64, 4, &full())).unwrap();
    scheduler.limit_prompt_tokens(PromptLimits { beside_answers: Some(10), alone: Some(12) });
    scheduler.add_request(new_request(1, &[1; 20])).unwrap();
    let output = scheduler.schedule();
    assert_eq!(rows(&output), [(1, 0, 12, false)]);
}

/// The step, from 1, in which each request gets its first token.
fn first_tokens(fairness: FairnessPolicy, lengths: &[usize]) -> Vec<usize> {
    let config = SchedulerConfig { fairness, ..scheduler_config(64, 32, 1024) };
    let mut scheduler = Scheduler::new(config, kv_config(4096, 4, &full())).unwrap();
    for (id, length) in lengths.iter().enumerate() {
        // No two prompts begin alike.
        let request = NewRequest::new(RequestId(id as u64), vec![id as u32; *length], 1);
        scheduler.add_request(request).unwrap();
    }
    let mut steps = vec![0; lengths.len()];
    for step in 1.. {
        let output = scheduler.schedule();
        if output.rows.is_empty() {
            break;
        }
        assert!(output.total_num_scheduled_tokens == 32 || output.rows.iter().all(|row| row.num_outputs == 1));
        let sampled: Vec<_> = output.rows.iter().filter(|row| row.num_outputs > 0).map(|row| row.request_id).collect();
        scheduler.update(&output, &sampled.iter().map(|id| (*id, &[9][..])).collect::<Vec<_>>()).unwrap();
        for id in sampled {
            steps[id.0 as usize] = step;
            scheduler.finish_request(id);
        }
    }
    steps
}

#[test]
fn short_prompts_do_not_wait_for_long_ones_and_long_ones_wait_a_third_longer_at_most() {
    let lengths = [600, 5, 700, 8, 3, 400, 30];
    let by_arrival = first_tokens(FairnessPolicy::Fcfs, &lengths);
    assert_eq!(by_arrival, [19, 19, 41, 42, 42, 54, 55]);
    let shared = first_tokens(FairnessPolicy::Priority, &lengths);
    for short in [1, 3, 4, 6] {
        assert!(shared[short] <= 1 + 46_usize.div_ceil(8) + 1, "{shared:?}");
    }
    for (shared, alone) in shared.iter().zip(&by_arrival) {
        assert!(*shared <= (alone * 4).div_ceil(3), "{shared} steps instead of {alone}");
    }
    assert_eq!(shared.iter().max(), by_arrival.iter().max(), "no step has room left");
}

#[test]
fn a_long_prompt_gets_on_however_many_short_ones_come() {
    let mut scheduler = Scheduler::new(scheduler_config(64, 32, 1024), kv_config(4096, 4, &full())).unwrap();
    scheduler.add_request(new_request(0, &[1; 960])).unwrap();
    for step in 0..40_u64 {
        for id in 1..=8 {
            let id = step * 8 + id;
            scheduler.add_request(NewRequest::new(RequestId(id), vec![id as u32 + 10; 20], 1)).unwrap();
        }
        let output = scheduler.schedule();
        assert_eq!(output.rows[0].request_id, RequestId(0));
        assert!(output.rows[0].num_scheduled_tokens >= 24);
        let sampled: Vec<_> = output.rows.iter().filter(|row| row.num_outputs > 0).map(|row| row.request_id).collect();
        scheduler.update(&output, &sampled.iter().map(|id| (*id, &[9][..])).collect::<Vec<_>>()).unwrap();
        assert_eq!(sampled.contains(&RequestId(0)), step == 39);
        for id in sampled {
            scheduler.finish_request(id);
        }
    }
}

#[test]
fn what_waiting_prompts_cannot_use_goes_to_those_that_run() {
    // Seven blocks: the second prompt has to wait until the first has gone.
    let mut scheduler = Scheduler::new(scheduler_config(4, 8, 64), kv_config(7, 4, &[None])).unwrap();
    scheduler.add_request(new_request(1, &[1; 20])).unwrap();
    scheduler.add_request(new_request(2, &[2; 12])).unwrap();
    for start in [0, 8] {
        let output = scheduler.schedule();
        assert_eq!(rows(&output), [(1, start, 8, false)]);
        scheduler.update(&output, &[]).unwrap();
    }
}

#[test]
fn a_prompt_of_a_less_urgent_priority_gets_nothing_of_a_more_urgent_ones_step() {
    let mut scheduler = Scheduler::new(scheduler_config(4, 8, 64), kv_config(64, 4, &full())).unwrap();
    scheduler.add_request(NewRequest { priority: 1, ..new_request(1, &[1; 3]) }).unwrap();
    scheduler.add_request(new_request(2, &[2; 20])).unwrap();
    assert_eq!(rows(&scheduler.schedule()), [(2, 0, 8, false)]);
}

#[test]
fn a_prompt_leaves_a_token_for_each_answer_behind_it() {
    let mut scheduler = Scheduler::new(scheduler_config(4, 8, 64), kv_config(64, 4, &full())).unwrap();
    for id in [1, 2] {
        scheduler.add_request(new_request(id, &[id as u32; 3])).unwrap();
    }
    let output = scheduler.schedule();
    scheduler.update(&output, &[(RequestId(1), &[9]), (RequestId(2), &[9])]).unwrap();
    scheduler.add_request(NewRequest { priority: -1, ..new_request(3, &[3; 30]) }).unwrap();
    for start in [0, 6, 12] {
        let output = scheduler.schedule();
        assert_eq!(output.rows.len(), 3);
        assert_eq!(rows(&output)[0], (3, start, 6, false), "the more urgent goes first");
        scheduler.update(&output, &[(RequestId(1), &[9]), (RequestId(2), &[9])]).unwrap();
    }
}

#[test]
fn who_waits_for_a_leader_is_looked_at_up_to_a_number() {
    for (num_siblings, passes) in [(8, true), (40, false)] {
        let mut scheduler = Scheduler::new(scheduler_config(64, 8, 64), kv_config(640, 4, &full())).unwrap();
        scheduler.add_request(new_request(0, &[1; 20])).unwrap();
        let output = scheduler.schedule();
        scheduler.update(&output, &[]).unwrap();
        for id in 1..=num_siblings {
            scheduler.add_request(new_request(id, &[1; 20])).unwrap();
            assert_eq!(scheduler.waits_for(RequestId(id)), Some(RequestId(0)));
        }
        scheduler.add_request(new_request(99, &[2; 3])).unwrap();
        let output = scheduler.schedule();
        // The leader's chunk takes the step; in the one after it there is room.
        scheduler.update(&output, &[]).unwrap();
        let output = scheduler.schedule();
        assert_eq!(rows(&output).iter().any(|row| row.0 == 99), passes, "{num_siblings} siblings: {:?}", rows(&output));
    }
}

#[test]
fn requests_that_can_never_be_served_are_refused_with_the_numbers() {
    let mut scheduler = Scheduler::new(scheduler_config(4, 8, 64), kv_config(4, 4, &full())).unwrap();
    let error = |scheduler: &mut Scheduler, request| scheduler.add_request(request).unwrap_err().to_string();
    assert!(error(&mut scheduler, new_request(1, &[])).contains("0 tokens"));
    assert!(error(&mut scheduler, NewRequest { max_tokens: 0, ..new_request(1, &[1]) }).contains("max_tokens is 0"));
    let text = error(&mut scheduler, new_request(1, &[1; 64]));
    assert!(text.contains("64 tokens") && text.contains("at most 63 prompt tokens"), "{text}");
    let text = error(&mut scheduler, new_request(1, &[1; 17]));
    assert!(text.contains("17 tokens need 5 KV blocks") && text.contains("has 4, which hold 16 tokens"), "{text}");
    scheduler.add_request(new_request(1, &[1; 16])).unwrap();
    assert!(error(&mut scheduler, new_request(1, &[1])).contains("already being served"));
    assert_eq!((scheduler.num_waiting(), scheduler.num_running()), (1, 0));
}

#[test]
fn configurations_that_cannot_work_are_refused() {
    let good = || (scheduler_config(1, 1, 2), kv_config(1, 1, &full()));
    let refused = |change: fn(&mut SchedulerConfig, &mut KvCacheConfig), field: &str| {
        let (mut config, mut kv) = good();
        change(&mut config, &mut kv);
        assert_eq!(Scheduler::new(config, kv).unwrap_err().field, field);
    };
    let (config, kv) = good();
    assert!(Scheduler::new(config, kv).is_ok());
    refused(|config, _| config.max_num_seqs = 0, "max_num_seqs");
    refused(|config, _| config.max_num_batched_tokens = 0, "max_num_batched_tokens");
    refused(|config, _| config.max_model_len = 1, "max_model_len");
    refused(|config, _| config.max_chunk_len = Some(0), "max_chunk_len");
    refused(|_, kv| kv.block_size = 0, "block_size");
    refused(|_, kv| kv.num_blocks = 0, "num_blocks");
    refused(|_, kv| kv.num_blocks = u32::MAX as usize, "num_blocks");
    refused(|_, kv| kv.groups.groups.clear(), "number of KV groups");
    refused(|_, kv| kv.groups = KvGroups::from_layers(&[Some(1), None]), "num_blocks");
}

#[test]
fn the_whole_prompt_must_fit_before_a_request_is_admitted_beside_others() {
    let mut sim = Sim::new(scheduler_config(4, 4, 64), kv_config(6, 4, &full()));
    let first = sim.add(&[1; 8], 4).unwrap();
    let second = sim.add(&[2; 20], 1).unwrap();
    while sim.scheduler.status(first).is_some() {
        // Its first chunk would fit from the start.
        assert_eq!(sim.scheduler.status(second), Some(RequestStatus::Waiting));
        sim.step(false, None);
    }
    sim.drain();
    assert_eq!(sim.scheduler.stats().preemptions, 0);
}

#[test]
fn blocks_promised_to_a_half_computed_prompt_are_not_given_to_the_next() {
    let mut sim = Sim::new(scheduler_config(4, 8, 64), kv_config(10, 4, &full()));
    let mut config = scheduler_config(4, 8, 64);
    config.max_chunk_len = Some(4);
    sim.scheduler = Scheduler::new(config, sim.kv.clone()).unwrap();
    sim.add(&[1; 32], 1).unwrap();
    let second = sim.add(&[2; 12], 1).unwrap();
    sim.step(false, None);
    // Nine blocks are free, but seven of them are the first one's.
    assert_eq!(sim.scheduler.status(second), Some(RequestStatus::Waiting));
    sim.drain();
    assert_eq!(sim.scheduler.stats().preemptions, 0);
}

#[test]
fn after_a_preemption_nobody_is_admitted_until_the_victim_fits_again() {
    let mut sim = Sim::new(scheduler_config(4, 32, 64), kv_config(8, 2, &full()));
    let first = sim.add(&[1; 6], 9).unwrap();
    let second = sim.add(&[2; 6], 9).unwrap();
    let third = sim.add(&[3; 1], 1).unwrap();
    while sim.scheduler.stats().preemptions == 0 {
        assert_eq!(sim.step(false, None), StepResult::Done);
    }
    assert_eq!(sim.scheduler.status(second), Some(RequestStatus::Preempted));
    assert_eq!(sim.finished, [(third, FinishReason::Length)]);
    // One token would fit beside the first, but room for it and the victim there is not.
    sim.add(&[4; 1], 1).unwrap();
    while sim.scheduler.status(first).is_some() {
        assert_eq!((sim.scheduler.num_running(), sim.scheduler.stats().preemptions), (1, 1));
        sim.step(false, None);
    }
    sim.drain();
    assert_eq!(sim.scheduler.stats().preemptions, 1);
}

#[test]
fn a_sequence_that_alone_outgrows_the_pool_ends_with_length() {
    for windows in [full(), vec![Some(3), None]] {
        let mut sim = Sim::new(scheduler_config(4, 32, 64), kv_config(4, 2, &windows));
        let servable = sim.scheduler.servable_tokens();
        let request = sim.add(&[1, 2, 3], 40).unwrap();
        sim.drain();
        assert_eq!(sim.finished, [(request, FinishReason::Length)]);
        // The last token needs no KV.
        assert_eq!(sim.ended[0].2.len(), servable + 1);
    }
}

#[test]
fn a_windowed_model_serves_a_prompt_far_longer_than_its_pool() {
    let mut sim = Sim::new(scheduler_config(2, 64, 1000), kv_config(12, 4, &[Some(9), Some(9)]));
    assert_eq!(sim.scheduler.servable_tokens(), 1000);
    let request = sim.add(&vec![5; 400], 20).unwrap();
    let mut most_used = 0;
    while sim.scheduler.has_requests() {
        sim.step(false, None);
        most_used = most_used.max(sim.scheduler.stats().blocks_used);
    }
    assert_eq!(sim.ended[0].2.len(), 420);
    assert_eq!(sim.finished, [(request, FinishReason::Length)]);
    assert!(most_used <= 12);
    // One block fewer than the smallest steps need, and it is refused.
    let mut small = Sim::new(scheduler_config(2, 64, 1000), kv_config(2, 4, &[Some(9), Some(9)]));
    assert!(matches!(small.add(&[5; 400], 1), Err(AdmissionError::TooLongForPool { needed_blocks: 3, usable_blocks: 2, .. })));
}

#[test]
fn out_of_window_blocks_are_given_back_between_the_chunks_of_a_prompt() {
    let mut sim = Sim::new(scheduler_config(1, 4, 1000), kv_config(64, 4, &[Some(6), Some(6)]));
    let request = sim.add(&vec![5; 100], 2).unwrap();
    for step in 1..=20 {
        sim.step(false, None);
        let table = sim.scheduler.block_table(request, 0);
        assert_eq!(table.len(), step);
    }
    // The window of the last computed token, which a repeated prompt computes again, and one chunk.
    assert_eq!(sim.most_used, 3);
}

#[test]
fn a_prefix_hit_of_a_windowed_model_needs_only_the_last_window() {
    let mut sim = Sim::new(scheduler_config(1, 64, 1000), kv_config(10, 4, &[Some(5), Some(5)]));
    let prompt: Vec<u32> = (0..64).collect();
    sim.add(&prompt, 1).unwrap();
    sim.drain();
    let mut next: Vec<u32> = sim.ended[0].2.clone();
    next.push(99);
    let request = sim.add(&next, 1).unwrap();
    let output = sim.scheduler.schedule();
    assert_eq!(rows(&output), [(request.0, 64, 2, true)]);
    let table = sim.scheduler.block_table(request, 0);
    assert_eq!(table.iter().filter(|block| **block != BlockId::NULL).count(), 2);
}

#[test]
fn requests_that_begin_one_prefix_together_come_to_share_it() {
    let mut sim = Sim::new(scheduler_config(8, 64, 64), kv_config(32, 4, &full()));
    for n in 0..4 {
        let mut prompt: Vec<u32> = (0..8).collect();
        prompt.push(100 + n);
        sim.add(&prompt, 4).unwrap();
    }
    sim.step(false, None);
    assert_eq!(sim.scheduler.num_running(), 1);
    sim.step(false, None);
    assert_eq!(sim.scheduler.num_running(), 4);
    // Two shared blocks, and one of each request's own.
    assert_eq!(sim.scheduler.stats().blocks_used, 2 + 4);
    sim.drain();
}

#[test]
fn a_whole_prompt_in_the_cache_still_computes_one_token() {
    let mut sim = Sim::new(scheduler_config(1, 64, 64), kv_config(32, 4, &full()));
    let prompt: Vec<u32> = (0..8).collect();
    sim.add(&prompt, 3).unwrap();
    sim.drain();
    sim.add(&prompt, 3).unwrap();
    assert_eq!(rows(&sim.scheduler.schedule()), [(1, 7, 1, true)]);
}

#[test]
fn without_retained_kv_every_token_is_computed_from_nothing_and_blocks_are_dropped() {
    let mut config = scheduler_config(4, 4, 64);
    config.retain_kv = false;
    let mut sim = Sim::new(config, kv_config(16, 2, &full()));
    let request = sim.add(&[1, 2, 3, 4, 5, 6], 3).unwrap();
    let mut samples = 0;
    while sim.scheduler.has_requests() {
        sim.step(false, None);
        let num_tokens = sim.scheduler.token_ids(request).len();
        if num_tokens > 6 + samples {
            samples += 1;
            assert_eq!(sim.scheduler.stats().blocks_used, 0);
            assert_eq!(sim.scheduler.num_computed_tokens(request), Some((0, 0)));
        }
    }
    assert_eq!(samples, 3);
    assert_eq!(sim.scheduler.stats().blocks_cached, 0);
}

#[test]
fn a_reserved_context_takes_all_its_blocks_at_admission() {
    let mut config = scheduler_config(4, 64, 16);
    config.reserve_full_context = true;
    let mut sim = Sim::new(config.clone(), kv_config(9, 4, &full()));
    for n in 0..3 {
        sim.add(&[n; 2], 3).unwrap();
    }
    sim.step(false, None);
    assert_eq!((sim.scheduler.num_running(), sim.scheduler.num_waiting()), (2, 1));
    assert_eq!(sim.scheduler.stats().blocks_used, 8);
    sim.drain();
    assert_eq!(sim.scheduler.stats().preemptions, 0);
    let mut small = Sim::new(config, kv_config(3, 4, &full()));
    assert!(matches!(small.add(&[1], 1), Err(AdmissionError::TooLongForPool { num_tokens: 16, needed_blocks: 4, .. })));
}

#[test]
fn a_result_that_does_not_match_the_step_is_refused_and_changes_nothing() {
    let mut scheduler = Scheduler::new(scheduler_config(4, 5, 64), kv_config(32, 4, &full())).unwrap();
    for id in 1..=2 {
        scheduler.add_request(new_request(id, &[id as u32; 3])).unwrap();
    }
    let output = scheduler.schedule();
    assert_eq!(rows(&output), [(1, 0, 3, true), (2, 0, 2, false)]);
    let refused = |scheduler: &mut Scheduler, sampled: &[(RequestId, &[u32])], error| {
        assert_eq!(scheduler.update(&output, sampled), Err(error));
        assert_eq!(scheduler.num_computed_tokens(RequestId(1)), Some((0, 0)));
        assert!(scheduler.schedule().rows.is_empty(), "still in flight");
    };
    refused(&mut scheduler, &[], UpdateError::MissingSample { request_id: RequestId(1) });
    let five: &[u32] = &[5];
    let extra = [(RequestId(1), five), (RequestId(2), five)];
    refused(&mut scheduler, &extra, UpdateError::UnexpectedSample { request_id: RequestId(2) });
    let twice = [(RequestId(1), five), (RequestId(1), five)];
    refused(&mut scheduler, &twice, UpdateError::UnexpectedSample { request_id: RequestId(1) });
    let empty = SchedulerOutput::default();
    assert_eq!(scheduler.update(&empty, &[]), Ok(()));
    assert!(scheduler.schedule().rows.is_empty(), "an empty result must not stand for the one in flight");
    scheduler.update(&output, &[(RequestId(1), &[5])]).unwrap();
    assert_eq!(scheduler.update(&output, &[(RequestId(1), &[5])]), Err(UpdateError::StaleStep { got: 1, expected: None }));
}

#[test]
fn a_request_that_takes_an_ended_ones_id_is_not_in_the_step_in_flight() {
    let mut scheduler = Scheduler::new(scheduler_config(4, 16, 64), kv_config(32, 4, &full())).unwrap();
    scheduler.add_request(new_request(1, &[1; 8])).unwrap();
    let output = scheduler.schedule();
    assert!(scheduler.abort_request(RequestId(1)));
    scheduler.add_request(new_request(1, &[2; 8])).unwrap();
    scheduler.update(&output, &[(RequestId(1), &[9])]).unwrap();
    assert_eq!(scheduler.token_ids(RequestId(1)), [2; 8]);
    assert_eq!(scheduler.num_computed_tokens(RequestId(1)), Some((0, 0)));
    assert_eq!(scheduler.stats().blocks_cached, 0);
}

#[test]
fn a_reset_keeps_running_requests_from_sharing_what_they_computed_before_it() {
    let mut sim = Sim::new(scheduler_config(1, 4, 64), kv_config(32, 4, &full()));
    let prompt: Vec<u32> = (0..16).collect();
    sim.add(&prompt, 1).unwrap();
    sim.step(false, None);
    sim.reset();
    sim.drain();
    assert_eq!(sim.scheduler.stats().blocks_cached, 0);
    sim.add(&prompt, 1).unwrap();
    sim.drain();
    assert_eq!(sim.scheduler.stats().prefix_hit_tokens, 0);
    assert_eq!(sim.scheduler.stats().blocks_cached, 4);
}

/// Half of 64 requests are dropped midway: nothing is left behind.
#[test]
fn dropped_requests_leave_every_block_free() {
    let mut sim = Sim::new(scheduler_config(32, 64, 64), kv_config(80, 4, &full()));
    let ids: Vec<_> = (0..64).map(|n| sim.add(&[n % 7; 9], 20).unwrap()).collect();
    for _ in 0..12 {
        assert_eq!(sim.step(false, None), StepResult::Done);
    }
    for id in ids.iter().step_by(2) {
        if sim.live.contains_key(id) {
            sim.abort(*id);
        }
    }
    sim.drain();
}

/// Failed allocations change nothing, whatever the number of groups.
#[test]
fn a_failed_allocation_changes_nothing() {
    let groups = KvGroups::from_layers(&[Some(4), Some(4), None]);
    let num_groups = groups.groups.len();
    assert!(num_groups > 1);
    let mut manager = KvCacheManager::new(7, 4, groups, BlockHasher::new([0; 32]), true);
    let mut blocks = RequestBlocks::new(num_groups, 0);
    manager.allocate_slots(&mut blocks, 0, 4, &mut Vec::new()).unwrap();
    let before: Vec<_> = manager.pool().free_block_ids().collect();
    let tables: Vec<_> = (0..num_groups).map(|group| blocks.table(group).to_vec()).collect();
    let needed = 3 * num_groups;
    let free = 7 - num_groups;
    assert!(needed > free);
    assert_eq!(manager.allocate_slots(&mut blocks, 0, 16, &mut Vec::new()), Err(PoolError::OutOfBlocks { needed, free }));
    assert_eq!(manager.pool().free_block_ids().collect::<Vec<_>>(), before);
    for (group, table) in tables.iter().enumerate() {
        assert_eq!(blocks.table(group), table);
    }
    manager.check_integrity(std::iter::once(&blocks)).unwrap();
}

/// Full groups from the tail; the last windows after them, since a next turn needs them whole.
#[test]
fn blocks_are_given_up_in_the_order_in_which_they_lose_their_use() {
    let groups = KvGroups::from_layers(&[None, Some(6)]);
    let mut manager = KvCacheManager::new(16, 4, groups, BlockHasher::new([0; 32]), true);
    let mut blocks = RequestBlocks::new(2, 16);
    let tokens: Vec<u32> = (0..16).collect();
    manager.allocate_slots(&mut blocks, 0, 16, &mut Vec::new()).unwrap();
    let (full, windowed) = (blocks.table(0).to_vec(), blocks.table(1).to_vec());
    manager.commit(&mut blocks, &tokens, CacheKey::new(b""), 16);
    assert_eq!(blocks.table(1), [BlockId::NULL, windowed[1], windowed[2], windowed[3]]);
    manager.free(&mut blocks);
    let order: Vec<_> = manager.pool().free_block_ids().skip(8).collect();
    let expected = [windowed[0], full[3], full[2], full[1], full[0], windowed[3], windowed[2], windowed[1]];
    assert_eq!(order, expected);
}

/// A request at its limit needs no more blocks and must not be preempted, which would delay its end.
#[test]
fn a_request_at_its_limit_ends_before_anyone_is_preempted() {
    let mut sim = Sim::new(scheduler_config(4, 32, 64), kv_config(3, 2, &full()));
    let first = sim.add(&[1; 4], 9).unwrap();
    let second = sim.add(&[2; 1], 1).unwrap();
    sim.step(false, None);
    assert_eq!((sim.scheduler.num_running(), sim.scheduler.pool().num_free_blocks()), (2, 0));
    let output = sim.scheduler.schedule();
    assert_eq!((output.finished, output.preempted), (vec![(second, FinishReason::Length)], vec![]));
    assert_eq!(output.rows.iter().map(|row| row.request_id).collect::<Vec<_>>(), [first]);
}

/// Without the pause the victim comes back as soon as it fits, and leaves again when the one ahead of it grows.
#[test]
fn a_victim_does_not_come_back_only_to_be_preempted_again() {
    for victim in [VictimPolicy::Newest, VictimPolicy::LeastCost] {
        let config = SchedulerConfig { victim, ..scheduler_config(4, 64, 64) };
        let mut sim = Sim::new(config, kv_config(8, 2, &full()));
        sim.add(&[1; 2], 14).unwrap();
        sim.add(&[2; 1], 4).unwrap();
        sim.add(&[3; 5], 8).unwrap();
        sim.drain();
        let mut victims: Vec<_> = sim.preempted.iter().map(|preemption| preemption.request_id).collect();
        victims.sort();
        let times = victims.len();
        victims.dedup();
        assert!(times == victims.len() && times > 0, "{victim}: {victims:?}, {times} times");
        assert!(victim != VictimPolicy::Newest || times == 1);
    }
}

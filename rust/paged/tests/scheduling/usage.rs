//! Figures of the memory that requests hold, step by step.

use paged::*;

use crate::common::{kv_config, scheduler_config};

/// Runs two requests of 5 and 3 prompt tokens for two steps.
fn two_steps(reserve_full_context: bool) -> Scheduler {
    let config = SchedulerConfig { reserve_full_context, ..scheduler_config(4, 64, 32) };
    let mut scheduler = Scheduler::new(config, kv_config(16, 4, &[None])).unwrap();
    for (id, length) in [(1, 5), (2, 3)] {
        scheduler.add_request(NewRequest::new(RequestId(id), vec![id as u32; length], 8)).unwrap();
    }
    for _ in 0..2 {
        let output = scheduler.schedule();
        scheduler.update(&output, &[(RequestId(1), &[9]), (RequestId(2), &[9])]).unwrap();
    }
    scheduler
}

#[test]
fn held_and_live_slots_are_summed_over_the_steps() {
    let stats = two_steps(false).stats();
    assert_eq!((stats.slots_held, stats.slots_live), (8 + 4, 6 + 4));
    assert_eq!((stats.steps, stats.slots_held_sum, stats.slots_live_sum), (2, 12 + 12, 8 + 10));
    assert_eq!((stats.peak_running, stats.peak_running_before_preemption), (2, 2));
}

#[test]
fn the_peak_of_blocks_counts_those_that_are_given_back_when_a_window_moves() {
    let mut scheduler = Scheduler::new(scheduler_config(4, 4, 32), kv_config(16, 4, &[Some(4)])).unwrap();
    scheduler.add_request(NewRequest::new(RequestId(1), vec![1; 12], 1)).unwrap();
    for _ in 0..3 {
        let output = scheduler.schedule();
        let sampled: Vec<_> =
            output.rows.iter().filter(|row| row.num_outputs > 0).map(|row| (row.request_id, &[9][..])).collect();
        scheduler.update(&output, &sampled).unwrap();
    }
    assert!(scheduler.finish_request(RequestId(1)));
    let stats = scheduler.stats();
    assert_eq!((stats.blocks_used, stats.peak_blocks_used), (0, 2));
}

#[test]
fn a_reserved_context_is_held_whatever_is_in_it() {
    let stats = two_steps(true).stats();
    assert_eq!((stats.slots_held, stats.slots_live), (32 + 32, 6 + 4));
    assert_eq!((stats.steps, stats.slots_held_sum, stats.slots_live_sum), (2, 2 * 64, 8 + 10));
}

#[test]
fn the_peak_before_a_preemption_stays_when_more_run_later() {
    let mut scheduler = Scheduler::new(scheduler_config(8, 64, 32), kv_config(4, 4, &[None])).unwrap();
    let step = |scheduler: &mut Scheduler| {
        let output = scheduler.schedule();
        let sampled: Vec<_> = output.rows.iter().map(|row| (row.request_id, &[9][..])).collect();
        scheduler.update(&output, &sampled).unwrap();
        output
    };
    for id in 1..=2 {
        scheduler.add_request(NewRequest::new(RequestId(id), vec![id as u32; 4], 20)).unwrap();
    }
    while step(&mut scheduler).preempted.is_empty() {}
    for id in 1..=2 {
        assert!(scheduler.abort_request(RequestId(id)));
    }
    for id in 3..=5 {
        scheduler.add_request(NewRequest::new(RequestId(id), vec![id as u32; 3], 1)).unwrap();
    }
    step(&mut scheduler);
    let stats = scheduler.stats();
    assert_eq!((stats.preemptions, stats.peak_running_before_preemption, stats.peak_running), (1, 2, 3));
}

#[test]
fn reserved_contexts_fill_the_pool_to_the_last_block() {
    let config = SchedulerConfig { reserve_full_context: true, ..scheduler_config(4, 64, 1600) };
    let mut scheduler = Scheduler::new(config, kv_config(2 * 400, 4, &[None])).unwrap();
    for id in 1..=3 {
        scheduler.add_request(NewRequest::new(RequestId(id), vec![id as u32; 4], 8)).unwrap();
    }
    assert_eq!(scheduler.schedule().rows.len(), 2);
    assert_eq!((scheduler.num_waiting(), scheduler.pool().num_free_blocks()), (1, 0));
}

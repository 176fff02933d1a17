//! Requests that are over but kept: what they hold, when they give it up, and what a fork of them finds.

use paged::*;

use crate::common::{Owner, Sim, kv_config, scheduler_config};

fn full() -> Vec<Option<usize>> {
    vec![None; 2]
}

/// A sequence of `len` computed tokens and one more, kept.
fn kept(sim: &mut Sim, first: u32, len: u32) -> RequestId {
    let request = sim.add(&(first..first + len).collect::<Vec<_>>(), 4).unwrap();
    sim.step(false, None);
    sim.keep(request);
    request
}

#[test]
fn a_kept_request_holds_its_blocks_and_a_fork_computes_only_what_is_new() {
    for windows in [full(), vec![Some(6), None]] {
        let num_groups = KvGroups::from_layers(&windows).groups.len();
        let mut sim = Sim::new(scheduler_config(4, 64, 64), kv_config(40, 4, &windows));
        let source = kept(&mut sim, 0, 10);
        let stats = sim.scheduler.stats();
        assert_eq!((stats.requests_kept, stats.blocks_kept, stats.blocks_used), (1, stats.blocks_used, 3 * num_groups));
        assert!(!sim.scheduler.has_requests());
        assert_eq!(sim.scheduler.status(source), Some(RequestStatus::Kept));
        let branches: Vec<_> = (0..3).map(|n| sim.fork(source, None, &[50 + n]).unwrap()).collect();
        let output = sim.scheduler.schedule();
        // Ten of twelve tokens have KV.
        assert!(output.rows.iter().all(|row| (row.num_computed_tokens, row.num_scheduled_tokens) == (10, 2)));
        assert_eq!(output.rows.iter().map(|row| row.request_id).collect::<Vec<_>>(), branches);
        assert_eq!(output.copies.len(), 3 * num_groups);
        assert_eq!(sim.scheduler.stats().blocks_used, (3 + 3) * num_groups);
        assert!(sim.scheduler.stats().blocks_saved >= 3 * 2);
    }
}

#[test]
fn a_fork_may_cut_a_kept_request() {
    let mut sim = Sim::new(scheduler_config(4, 64, 64), kv_config(40, 4, &full()));
    let source = kept(&mut sim, 0, 10);
    sim.fork(source, Some(7), &[]).unwrap();
    let output = sim.scheduler.schedule();
    assert_eq!((output.rows[0].num_computed_tokens, output.rows[0].num_scheduled_tokens), (6, 1));
}

#[test]
fn kept_blocks_are_given_up_least_recently_used_first_before_anyone_waits_or_is_preempted() {
    let mut sim = Sim::new(scheduler_config(4, 64, 64), kv_config(12, 4, &full()));
    let ids: Vec<_> = (0..3).map(|n| kept(&mut sim, 100 * n, 8)).collect();
    assert_eq!(sim.scheduler.stats().blocks_used, 6);
    // A fork makes the first one the most recently used.
    let branch = sim.fork(ids[0], None, &[]).unwrap();
    sim.abort(branch);
    let request = sim.add(&(500..530).collect::<Vec<_>>(), 4).unwrap();
    sim.step(false, None);
    assert_eq!(sim.scheduler.status(request), Some(RequestStatus::Running));
    let held: Vec<_> = ids.iter().map(|id| !sim.scheduler.block_table(*id, 0).is_empty()).collect();
    assert_eq!(held, [true, false, true]);
    // The name stays, and so do the tokens.
    assert_eq!(sim.scheduler.token_ids(ids[1]).len(), 9);
    sim.run();
    assert_eq!(sim.scheduler.stats().preemptions, 0);
    let branch = sim.fork(ids[1], None, &[1]).unwrap();
    sim.run();
    assert!(sim.ended.iter().any(|ended| ended.0 == branch && ended.2.len() == 9 + 1 + 4));
}

#[test]
fn a_pool_full_of_kept_blocks_serves_whatever_it_could_serve_empty() {
    for windows in [full(), vec![Some(5), None]] {
        let mut sim = Sim::new(scheduler_config(4, 64, 64), kv_config(8, 4, &windows));
        let longest = sim.scheduler.servable_tokens();
        for n in 0..4 {
            kept(&mut sim, 100 * n, 4);
        }
        let request = sim.add(&(500..500 + longest as u32).collect::<Vec<_>>(), 1).unwrap();
        sim.run();
        assert_eq!(sim.finished.last(), Some(&(request, FinishReason::Length)));
        assert_eq!(sim.scheduler.stats().requests_kept, 4);
        sim.drain();
    }
}

#[test]
fn two_running_requests_prefer_kept_blocks_to_each_others() {
    let mut sim = Sim::new(scheduler_config(4, 64, 64), kv_config(8, 2, &full()));
    for n in 0..2 {
        kept(&mut sim, 100 * n, 4);
    }
    sim.add(&[1, 1], 5).unwrap();
    sim.add(&[2, 2], 5).unwrap();
    sim.run();
    // Six of eight blocks were needed, and no more were taken.
    assert_eq!((sim.scheduler.stats().preemptions, sim.scheduler.stats().blocks_kept), (0, 2));
}

#[test]
fn without_a_prefix_cache_a_kept_request_holds_nothing_and_can_still_be_forked() {
    let mut kv = kv_config(8, 4, &full());
    kv.enable_prefix_caching = false;
    let mut sim = Sim::new(scheduler_config(4, 64, 64), kv);
    let source = kept(&mut sim, 0, 6);
    assert_eq!(sim.scheduler.stats().blocks_used, 0);
    sim.fork(source, None, &[9]).unwrap();
    sim.drain();
    assert_eq!(sim.ended[1].2.len(), 6 + 1 + 1 + 4);
}

#[test]
fn a_reset_takes_what_kept_requests_hold() {
    let mut sim = Sim::new(scheduler_config(4, 64, 64), kv_config(8, 4, &full()));
    let source = kept(&mut sim, 0, 6);
    sim.reset();
    assert_eq!((sim.scheduler.stats().blocks_used, sim.scheduler.stats().requests_kept), (0, 1));
    sim.fork(source, None, &[9]).unwrap();
    sim.drain();
}

#[test]
fn what_is_not_served_cannot_be_kept_and_what_is_not_kept_cannot_be_released() {
    let mut sim = Sim::new(scheduler_config(4, 64, 64), kv_config(8, 4, &full()));
    assert!(!sim.scheduler.keep_request(RequestId(5)));
    let request = sim.add(&[1, 2, 3], 4).unwrap();
    assert!(!sim.scheduler.release(request));
    // One that never ran has tokens and no KV.
    sim.keep(request);
    assert_eq!(sim.scheduler.stats().blocks_used, 0);
    let taken = sim.scheduler.add_request(NewRequest::new(request, vec![1], 1)).unwrap_err();
    assert!(matches!(taken, AdmissionError::DuplicateRequest { .. }));
    sim.release(request);
    assert_eq!(sim.scheduler.token_ids(request), [0u32; 0]);
}

/// Its tail was there already under its salt when it was kept, and is so when it gives its blocks up.
#[test]
fn a_tail_that_is_cached_already_is_not_cached_again() {
    let mut sim = Sim::new(scheduler_config(4, 64, 64), kv_config(16, 4, &full()));
    let owner = Owner::salted(b"a", 4);
    let ids: Vec<_> = (0..2)
        .map(|_| sim.add_with(&[1, 2, 3, 4, 5, 6], 4, &Owner { skip_prefix_lookup: true, ..owner.clone() }).unwrap())
        .collect();
    sim.step(false, None);
    for id in &ids {
        sim.keep(*id);
    }
    for id in ids {
        sim.release(id);
    }
    // A full block, and one tail of the two.
    assert_eq!(sim.scheduler.stats().blocks_cached, 2);
    sim.drain();
}

#[test]
fn a_drain_refuses_forks_of_kept_requests_and_serves_those_of_others() {
    let mut sim = Sim::new(scheduler_config(4, 64, 64), kv_config(16, 4, &full()));
    let source = kept(&mut sim, 0, 6);
    let running = sim.add(&[7, 7, 7], 4).unwrap();
    sim.step(false, None);
    sim.scheduler.drain();
    let refused = sim.fork(source, None, &[9]).unwrap_err();
    assert!(matches!(refused, ForkError::Child(AdmissionError::Draining { .. })));
    sim.fork(running, None, &[9]).unwrap();
    sim.drain();
    assert_eq!(sim.finished.len(), 2);
}

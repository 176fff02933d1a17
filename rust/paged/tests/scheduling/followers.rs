//! Requests that begin alike and arrive together: their common part is computed once.

use paged::*;

use crate::common::{Owner, Sim, StepResult, kv_config, scheduler_config};

fn full() -> Vec<Option<usize>> {
    vec![None; 2]
}

/// Nine requests with 16 tokens in common and 3 of their own.
fn alike(budget: usize, windows: &[Option<usize>]) -> (Sim, Vec<RequestId>) {
    let mut sim = Sim::new(scheduler_config(16, budget, 64), kv_config(200, 4, windows));
    let ids = (0..9).map(|n| {
        let prompt: Vec<u32> = (0..16).chain((0..3).map(|k| 100 + 10 * n + k)).collect();
        sim.add(&prompt, 2).unwrap()
    });
    let ids = ids.collect();
    (sim, ids)
}

fn tokens_computed_until_all_have_answered(sim: &mut Sim) -> usize {
    let mut computed = 0;
    while sim.scheduler.has_requests() {
        assert_eq!(sim.step(false, None) == StepResult::Idle, sim.last_rows().is_empty());
        computed += sim.last_rows().iter().map(|row| row.num_scheduled_tokens).sum::<usize>();
    }
    computed
}

#[test]
fn what_nine_requests_have_in_common_is_computed_once() {
    for windows in [full(), vec![Some(6), None]] {
        for budget in [4, 5, 7, 16, 64] {
            let (mut sim, _) = alike(budget, &windows);
            // The common part, each one's own three tokens, and the first of two answers of each.
            assert_eq!(tokens_computed_until_all_have_answered(&mut sim), 16 + 9 * (3 + 1), "{windows:?}, budget {budget}");
            assert_eq!(sim.scheduler.stats().prefix_hit_tokens, 8 * 16);
        }
    }
}

#[test]
fn followers_name_their_leader_and_let_others_pass() {
    let (mut sim, ids) = alike(4, &full());
    let other = sim.add(&[7, 7, 7], 2).unwrap();
    assert_eq!(sim.scheduler.waits_for(ids[1]), None, "nobody runs yet");
    let output = sim.scheduler.schedule();
    assert_eq!(output.rows.iter().map(|row| row.request_id).collect::<Vec<_>>(), [ids[0], other]);
    assert!(ids[1..].iter().all(|id| sim.scheduler.waits_for(*id) == Some(ids[0])));
    assert_eq!((sim.scheduler.waits_for(ids[0]), sim.scheduler.waits_for(other)), (None, None));
    let mut sim = alike(6, &full()).0;
    let mut config = scheduler_config(16, 6, 64);
    config.max_chunk_len = Some(4);
    sim.scheduler = Scheduler::new(config, sim.kv.clone()).unwrap();
    for (id, prompt) in [(1, vec![5; 12]), (2, vec![5; 12]), (3, vec![6; 3])] {
        sim.scheduler.add_request(NewRequest::new(RequestId(id), prompt, 2)).unwrap();
    }
    let output = sim.scheduler.schedule();
    assert_eq!(output.rows.iter().map(|row| row.request_id.0).collect::<Vec<_>>(), [1, 3]);
}

#[test]
fn a_leader_that_is_gone_holds_nobody_up() {
    for fail in [false, true] {
        let (mut sim, ids) = alike(4, &full());
        sim.step(false, None);
        assert_eq!(sim.scheduler.num_running(), 1);
        if fail {
            sim.step(true, None);
        } else {
            sim.abort(ids[0]);
        }
        assert_eq!(sim.scheduler.waits_for(ids[1]), None);
        sim.step(false, None);
        assert_eq!(sim.scheduler.status(ids[1]), Some(RequestStatus::Running));
        assert_eq!(sim.scheduler.waits_for(ids[2]), Some(ids[1]));
        sim.drain();
        assert_eq!(sim.ended.len(), 9);
    }
}

#[test]
fn only_those_who_could_share_wait() {
    let prompt: Vec<u32> = (0..12).collect();
    let mut sim = Sim::new(scheduler_config(16, 64, 64), kv_config(200, 4, &full()));
    sim.add_with(&prompt, 2, &Owner::salted(b"a", 0)).unwrap();
    sim.add_with(&prompt, 2, &Owner::salted(b"b", 0)).unwrap();
    sim.add_with(&prompt, 2, &Owner::new(b"adapter")).unwrap();
    sim.add_with(&prompt, 2, &Owner { skip_prefix_lookup: true, ..Owner::salted(b"a", 0) }).unwrap();
    let follower = sim.add_with(&prompt, 2, &Owner::salted(b"a", 0)).unwrap();
    let output = sim.scheduler.schedule();
    assert_eq!(output.rows.iter().map(|row| row.request_id.0).collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert_eq!(sim.scheduler.waits_for(follower), Some(RequestId(0)));
    // Within the public prefix salts do not matter.
    let mut sim = Sim::new(scheduler_config(16, 64, 64), kv_config(200, 4, &full()));
    sim.add_with(&prompt, 2, &Owner::salted(b"a", 4)).unwrap();
    let follower = sim.add_with(&prompt, 2, &Owner::salted(b"b", 4)).unwrap();
    sim.step(false, None);
    assert_eq!(sim.scheduler.status(follower), Some(RequestStatus::Waiting));
    sim.drain();
    assert_eq!(sim.scheduler.stats().prefix_hit_tokens, 4);
}

#[test]
fn without_a_prefix_cache_nobody_waits() {
    let mut kv = kv_config(200, 4, &full());
    kv.enable_prefix_caching = false;
    let mut sim = Sim::new(scheduler_config(16, 64, 64), kv);
    for _ in 0..3 {
        sim.add(&[1; 12], 2).unwrap();
    }
    assert_eq!(sim.scheduler.schedule().rows.len(), 3);
}

/// Who is less urgent gets no token as long as others use up the steps.
#[test]
fn nobody_waits_for_one_who_is_less_urgent() {
    let prompt: Vec<u32> = (0..12).collect();
    for (priority, deadline) in [(-1, None), (1, Some(90))] {
        let mut sim = Sim::new(scheduler_config(16, 64, 64), kv_config(200, 4, &full()));
        let mut config = scheduler_config(16, 8, 64);
        config.max_chunk_len = Some(4);
        sim.scheduler = Scheduler::new(config, sim.kv.clone()).unwrap();
        let mut add = |priority, deadline| {
            let new = NewRequest::new(RequestId(0), prompt.clone(), 2);
            let request_id = sim.add_request(NewRequest { priority, deadline, ..new }, &Owner::default()).unwrap();
            sim.step(false, None);
            request_id
        };
        add(1, None);
        let urgent = add(priority, deadline);
        assert_eq!(sim.scheduler.status(urgent), Some(RequestStatus::Running));
        sim.drain();
    }
}

//! A request that is more urgent than some of those that run goes before them, and takes what it needs.

use paged::*;

use crate::common::{Owner, Sim, StepResult, kv_config, scheduler_config};

fn add(sim: &mut Sim, prompt: &[u32], priority: i32) -> RequestId {
    let new = NewRequest { priority, ..NewRequest::new(RequestId(0), prompt.to_vec(), 8) };
    sim.add_request(new, &Owner::default()).unwrap()
}

fn victims(sim: &Sim) -> Vec<RequestId> {
    sim.preempted.iter().map(|preemption| preemption.request_id).collect()
}

fn rows(sim: &Sim) -> Vec<RequestId> {
    sim.last_rows().iter().map(|row| row.request_id).collect()
}

#[test]
fn it_takes_the_blocks_of_less_urgent_ones_and_of_no_more_than_it_must() {
    for (_, admission) in AdmissionPolicy::ALL {
        let config = SchedulerConfig { admission: *admission, ..scheduler_config(8, 64, 64) };
        let mut sim = Sim::new(config, kv_config(16, 2, &[None]));
        let equal = add(&mut sim, &[1; 3], 0);
        let dear = add(&mut sim, &[2; 10], 1);
        let cheap = add(&mut sim, &[3; 8], 1);
        sim.step(false, None);
        let urgent = add(&mut sim, &[4; 9], 0);
        sim.step(false, None);
        if *admission == AdmissionPolicy::Reserved {
            assert!(sim.preempted.is_empty(), "nobody who has reserved loses anything");
        } else {
            assert_eq!((victims(&sim), rows(&sim)), (vec![cheap], vec![equal, urgent, dear]), "{admission}");
        }
        sim.drain();
        assert_eq!(sim.finished.len(), 4);
    }
}

#[test]
fn it_takes_the_seat_of_the_one_whom_that_costs_least() {
    let mut sim = Sim::new(scheduler_config(2, 64, 64), kv_config(64, 2, &[None]));
    let cheap = add(&mut sim, &[1; 4], 2);
    let dear = add(&mut sim, &[2; 8], 2);
    sim.step(false, None);
    let urgent = add(&mut sim, &[3; 4], 1);
    sim.step(false, None);
    assert_eq!((victims(&sim), rows(&sim)), (vec![cheap], vec![urgent, dear]));
    sim.drain();
}

/// Its prompt is computed before the rest of a long one that would use up step after step.
#[test]
fn it_does_not_wait_for_the_tokens_of_less_urgent_prompts() {
    for fairness in [FairnessPolicy::Priority, FairnessPolicy::Drr] {
        let mut sim = Sim::new(SchedulerConfig { fairness, ..scheduler_config(4, 8, 200) }, kv_config(200, 2, &[None]));
        add(&mut sim, &[1; 100], 1);
        sim.step(false, None);
        let urgent = add(&mut sim, &[2; 8], 0);
        assert_eq!(sim.step(false, None), StepResult::Done);
        assert_eq!(sim.scheduler.token_ids(urgent).len(), 8 + 1, "{fairness}");
        assert!(sim.preempted.is_empty());
        sim.drain();
    }
}

#[test]
fn equals_and_the_more_urgent_keep_what_they_have() {
    let mut sim = Sim::new(scheduler_config(2, 64, 64), kv_config(8, 2, &[None]));
    add(&mut sim, &[1; 4], -1);
    add(&mut sim, &[2; 4], 0);
    sim.step(false, None);
    let waiting = add(&mut sim, &[3; 4], 0);
    sim.step(false, None);
    assert_eq!((sim.preempted.len(), sim.scheduler.status(waiting)), (0, Some(RequestStatus::Waiting)));
    sim.drain();
}

/// What the more urgent one holds is not to be had, and the rest would not do.
#[test]
fn nobody_loses_blocks_for_one_who_would_not_fit_even_then() {
    let mut sim = Sim::new(scheduler_config(4, 64, 64), kv_config(12, 2, &[None]));
    add(&mut sim, &[1; 14], -1);
    let last = add(&mut sim, &[2; 4], 1);
    sim.step(false, None);
    add(&mut sim, &[3; 12], 0);
    sim.step(false, None);
    assert_eq!((sim.preempted.len(), sim.scheduler.status(last)), (0, Some(RequestStatus::Running)));
    sim.drain();
}

/// Its prefix hit is the blocks of the one behind it, which therefore would not become free.
#[test]
fn nobody_loses_blocks_for_one_whose_prefix_hit_leaves_no_room() {
    let config = SchedulerConfig { admission: AdmissionPolicy::Optimistic, ..scheduler_config(4, 3, 64) };
    let mut sim = Sim::new(config, kv_config(9, 1, &[None]));
    add(&mut sim, &[9; 2], 0);
    add(&mut sim, &[1, 2, 3, 4], 1);
    for _ in 0..3 {
        sim.step(false, None);
    }
    let waiting = add(&mut sim, &[1, 2, 3, 4, 5, 6], 0);
    sim.step(false, None);
    assert!(sim.preempted.iter().all(|preemption| preemption.in_need != waiting));
    sim.drain();
}

/// A fork holds little of its own and so is the cheapest victim, although one of a less urgent priority runs as well.
#[test]
fn who_loses_its_blocks_in_a_step_does_not_come_back_in_it() {
    let config = SchedulerConfig { admission: AdmissionPolicy::Optimistic, ..scheduler_config(3, 3, 19) };
    let mut sim = Sim::new(config, kv_config(8, 3, &[None]));
    let source = sim.add(&[0, 1, 2, 0, 1], 1).unwrap();
    let fork = sim.fork(source, None, &[70]).unwrap();
    sim.fork(fork, None, &[]).unwrap();
    sim.step(false, None);
    sim.step(false, None);
    add(&mut sim, &[0, 1, 2, 3], 1);
    sim.step(false, None);
    sim.step(false, None);
    add(&mut sim, &[0], -1);
    sim.step(false, None);
    assert!(victims(&sim).iter().all(|victim| !rows(&sim).contains(victim)));
    sim.drain();
}

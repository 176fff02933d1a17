//! What each policy promises, one case at a time.

use std::num::NonZeroU32;

use paged::*;

use crate::common::{Owner, Sim, StepResult, kv_config, scheduler_config};

fn add(sim: &mut Sim, tokens: &[u32], max_tokens: usize, change: impl FnOnce(&mut NewRequest)) -> RequestId {
    let mut new = NewRequest::new(RequestId(0), tokens.to_vec(), max_tokens);
    change(&mut new);
    sim.add_request(new, &Owner::default()).unwrap()
}

fn running(sim: &Sim, ids: &[RequestId]) -> Vec<bool> {
    ids.iter().map(|id| sim.scheduler.status(*id) == Some(RequestStatus::Running)).collect()
}

#[test]
fn policies_are_known_by_name_and_others_are_refused_with_the_names_that_work() {
    fn round_trip<P: Policy + std::fmt::Display + std::str::FromStr<Err = UnknownPolicy> + Default>(names: &str) {
        for (name, policy) in P::ALL {
            assert_eq!((policy.to_string().as_str(), name.parse().ok()), (*name, Some(*policy)));
        }
        assert_eq!(P::default(), P::ALL[0].1);
        let Err(error) = "best".parse::<P>() else { panic!("no policy is called best") };
        assert_eq!(error.to_string(), format!("unknown {} \"best\": use {names}", P::KIND));
    }
    round_trip::<AdmissionPolicy>("watermark, reserved, optimistic");
    round_trip::<VictimPolicy>("least_cost, newest");
    round_trip::<FairnessPolicy>("priority, fcfs, drr");
}

/// Two prompts of two blocks, which come to need four each, in a pool of six.
#[test]
fn admission_policies_differ_in_what_must_fit() {
    let admitted = |admission, num_blocks| {
        let config = SchedulerConfig { admission, ..scheduler_config(4, 2, 64) };
        let mut sim = Sim::new(config, kv_config(num_blocks, 2, &[None]));
        let ids = [sim.add(&[1; 4], 5).unwrap(), sim.add(&[2; 4], 5).unwrap()];
        let mut beside = None;
        while sim.scheduler.status(ids[0]).is_some() {
            sim.step(false, None);
            if running(&sim, &ids) == [true, true] {
                beside.get_or_insert(sim.scheduler.token_ids(ids[0]).len());
            }
        }
        sim.drain();
        (beside, sim.preempted.len())
    };
    // At the first free place in a step; with room for the prompt; with room to the end; alone.
    assert_eq!(admitted(AdmissionPolicy::Optimistic, 4).0, Some(6));
    assert_eq!(admitted(AdmissionPolicy::Watermark, 4).0, None);
    assert_eq!(admitted(AdmissionPolicy::Watermark, 6).0, Some(6));
    assert_eq!(admitted(AdmissionPolicy::Reserved, 6), (None, 0));
    assert_eq!(admitted(AdmissionPolicy::Reserved, 10), (Some(6), 0));
    assert!(admitted(AdmissionPolicy::Optimistic, 4).1 > 0);
}

/// The newest has computed most: taking its blocks costs most.
#[test]
fn the_victim_is_whom_it_costs_least_among_those_behind() {
    let victim = |victim| {
        let config = SchedulerConfig { victim, admission: AdmissionPolicy::Optimistic, ..scheduler_config(4, 64, 64) };
        let mut sim = Sim::new(config, kv_config(8, 2, &[None]));
        sim.add(&[1; 4], 20).unwrap();
        let cheap = sim.add(&[2; 3], 20).unwrap();
        let dear = sim.add(&[3; 7], 20).unwrap();
        while sim.preempted.is_empty() {
            assert_eq!(sim.step(false, None), StepResult::Done);
        }
        let first = sim.preempted[0];
        sim.drain();
        (first.request_id == cheap, first.request_id == dear, first.num_lost_tokens)
    };
    let (cheap, _, cost) = victim(VictimPolicy::LeastCost);
    let (_, dear, more) = victim(VictimPolicy::Newest);
    assert!(cheap && dear && cost < more, "{cost} against {more}");
}

#[test]
fn a_lower_priority_goes_first_and_then_the_earlier_deadline() {
    let mut sim = Sim::new(scheduler_config(1, 64, 64), kv_config(32, 2, &[None]));
    let last = add(&mut sim, &[1], 1, |new| new.priority = 1);
    let third = add(&mut sim, &[2], 1, |_| {});
    let second = add(&mut sim, &[3], 1, |new| new.deadline = Some(90));
    let first = add(&mut sim, &[4], 1, |new| (new.deadline, new.priority) = (Some(80), 0));
    let urgent = add(&mut sim, &[5], 1, |new| new.priority = -1);
    sim.drain();
    let order: Vec<_> = sim.finished.iter().map(|finished| finished.0).collect();
    assert_eq!(order, [urgent, first, second, third, last]);
}

#[test]
fn first_come_first_served_refuses_priorities() {
    let config = SchedulerConfig { fairness: FairnessPolicy::Fcfs, ..scheduler_config(1, 64, 64) };
    let mut scheduler = Scheduler::new(config, kv_config(32, 2, &[None])).unwrap();
    let new = NewRequest { priority: 3, ..NewRequest::new(RequestId(1), vec![1], 1) };
    let error = scheduler.add_request(new).unwrap_err();
    assert_eq!(error, AdmissionError::NoPriorities { request_id: RequestId(1), priority: 3 });
    assert!(error.to_string().contains("use priority or drr"));
}

#[test]
fn a_request_past_its_deadline_ends_with_what_it_has() {
    let mut sim = Sim::new(scheduler_config(1, 64, 64), kv_config(32, 2, &[None]));
    let runs = add(&mut sim, &[1, 2], 50, |new| new.deadline = Some(10));
    let waits = add(&mut sim, &[3, 4], 50, |new| new.deadline = Some(10));
    let stays = add(&mut sim, &[5, 6], 2, |new| new.deadline = Some(11));
    sim.step(false, None);
    sim.step(false, None);
    sim.tick(9);
    sim.step(false, None);
    assert!(sim.finished.is_empty());
    sim.tick(1);
    sim.step(false, None);
    assert_eq!(sim.finished, [(runs, FinishReason::Deadline), (waits, FinishReason::Deadline)]);
    assert_eq!(sim.ended[0].2.len(), 2 + 3);
    assert_eq!(running(&sim, &[stays]), [true]);
    assert_eq!(sim.scheduler.stats().deadlines_missed, 2);
    sim.drain();
    assert_eq!(sim.finished[2], (stays, FinishReason::Length));
}

/// One tenant sends forty long prompts, then another one a short one: it waits for its turn, not for the forty.
#[test]
fn turns_bound_the_time_to_the_first_token_of_every_tenant() {
    let steps_to_first_token = |fairness| {
        let config = SchedulerConfig { fairness, drr_quantum: 8, ..scheduler_config(64, 16, 128) };
        let mut sim = Sim::new(config, kv_config(2000, 4, &[None]));
        for n in 0..40 {
            add(&mut sim, &[n; 100], 2, |new| new.tenant = 1.into());
        }
        sim.step(false, None);
        let short = add(&mut sim, &[99; 20], 2, |new| new.tenant = 2.into());
        let mut steps = 0;
        while sim.scheduler.token_ids(short).len() == 20 {
            sim.step(false, None);
            steps += 1;
        }
        sim.drain();
        steps
    };
    // Its 20 tokens are three turns of 8, in steps of 16 that two tenants share.
    assert!(steps_to_first_token(FairnessPolicy::Drr) <= 4);
    assert!(steps_to_first_token(FairnessPolicy::Fcfs) > 200);
}

/// Two tenants with endless prompts: tokens and admissions go by weight.
#[test]
fn a_tenant_of_weight_three_gets_three_times_as_much() {
    let tenants = [(1, 1), (2, 3)].map(|(id, weight)| Tenant { id, weight: NonZeroU32::new(weight).unwrap() });
    let config = SchedulerConfig { fairness: FairnessPolicy::Drr, drr_quantum: 4, ..scheduler_config(64, 16, 512) };
    let mut sim = Sim::new(config, kv_config(2000, 4, &[None]));
    let long = tenants.map(|tenant| add(&mut sim, &[tenant.id as u32; 400], 2, |new| new.tenant = tenant));
    for _ in 0..10 {
        let output = sim.scheduler.schedule();
        let num_tokens = long.map(|id| output.rows.iter().find(|row| row.request_id == id).unwrap().num_scheduled_tokens);
        assert_eq!(num_tokens, [4, 12]);
        sim.scheduler.update(&output, &[]).unwrap();
    }

    // One seat: whoever waits gets it in turn.
    let config = SchedulerConfig { fairness: FairnessPolicy::Drr, ..scheduler_config(1, 16, 128) };
    let mut sim = Sim::new(config, kv_config(200, 4, &[None]));
    let mut ids = Vec::new();
    for n in 0..8 {
        ids.extend(tenants.map(|tenant| (add(&mut sim, &[n; 4], 1, |new| new.tenant = tenant), tenant.id)));
    }
    sim.drain();
    let order: Vec<_> = sim.finished.iter().map(|(id, _)| ids.iter().find(|(other, _)| other == id).unwrap().1).collect();
    assert_eq!(order[..8], [1, 2, 2, 2, 1, 2, 2, 2]);
}

#[test]
fn what_a_tenant_leaves_of_its_share_goes_to_the_others() {
    let config = SchedulerConfig { fairness: FairnessPolicy::Drr, drr_quantum: 4, ..scheduler_config(8, 32, 128) };
    let mut sim = Sim::new(config, kv_config(200, 4, &[None]));
    add(&mut sim, &[1; 60], 2, |new| new.tenant = 1.into());
    add(&mut sim, &[2; 6], 2, |new| new.tenant = 2.into());
    let output = sim.scheduler.schedule();
    let rows: Vec<_> = output.rows.iter().map(|row| row.num_scheduled_tokens).collect();
    assert_eq!(rows, [26, 6]);
}

/// Two requests that each come to need most of the pool: without a cap they take it from each other again and again.
#[test]
fn large_requests_do_not_alternate_for_ever_and_waste_is_bounded() {
    for (_, victim) in VictimPolicy::ALL {
        for max_preemptions in [1, 2, 3] {
            let admission = AdmissionPolicy::Optimistic;
            let config = SchedulerConfig { admission, victim: *victim, max_preemptions, ..scheduler_config(4, 16, 64) };
            let mut kv = kv_config(16, 2, &[None]);
            kv.enable_prefix_caching = false;
            let mut sim = Sim::new(config, kv);
            for n in 0..4 {
                sim.add(&[n; 10], 20).unwrap();
            }
            let mut wasted = 0;
            while sim.scheduler.has_requests() {
                sim.step(false, None);
                wasted = sim.scheduler.stats().recomputed_tokens;
            }
            for (id, _, tokens) in &sim.ended {
                let times = sim.preempted.iter().filter(|preemption| preemption.request_id == *id).count();
                // It may give way once more when all behind it are protected.
                assert!(times <= max_preemptions as usize + 1 && tokens.len() == 30, "{id:?}: {times} times");
            }
            assert!(wasted > 0 && wasted <= u64::from(max_preemptions + 1) * 4 * 30, "{wasted} tokens");
            assert_eq!(sim.scheduler.stats().preemptions, sim.preempted.len() as u64);
        }
    }
}

#[test]
fn what_a_preemption_cost_is_counted_for_its_victim() {
    let mut kv = kv_config(8, 2, &[None]);
    kv.enable_prefix_caching = false;
    let mut sim = Sim::new(scheduler_config(4, 32, 64), kv);
    let first = sim.add(&[1; 6], 9).unwrap();
    let second = sim.add(&[2; 6], 9).unwrap();
    while sim.preempted.is_empty() {
        sim.step(false, None);
    }
    let lost = sim.preempted[0].num_lost_tokens;
    assert_eq!((sim.preempted[0].request_id, sim.preempted[0].in_need), (second, first));
    while sim.scheduler.status(second) != Some(RequestStatus::Running) {
        sim.step(false, None);
    }
    let cost = PreemptionCost { preemptions: 1, recomputed_tokens: lost as u64 };
    assert_eq!(sim.scheduler.preemption_cost(second), Some(cost));
    assert_eq!(sim.scheduler.stats().recomputed_tokens, lost as u64);
    sim.drain();
}

#[test]
fn a_pause_keeps_requests_and_blocks_and_a_drain_refuses_new_ones() {
    let mut sim = Sim::new(scheduler_config(4, 32, 64), kv_config(32, 2, &[None]));
    sim.add(&[1; 6], 3).unwrap();
    sim.step(false, None);
    sim.scheduler.pause();
    let used = sim.scheduler.stats().blocks_used;
    sim.add(&[2; 6], 3).unwrap();
    for _ in 0..3 {
        assert_eq!(sim.step(false, None), StepResult::Idle);
    }
    let stats = sim.scheduler.stats();
    assert_eq!((stats.blocks_used, stats.requests_running, stats.requests_waiting), (used, 1, 1));
    assert!(stats.paused && !stats.draining);
    sim.scheduler.drain();
    let refused = sim.add(&[3; 6], 3).unwrap_err();
    assert!(matches!(refused, AdmissionError::Draining { .. }) && refused.to_string().contains("resume it first"));
    assert!(sim.scheduler.stats().draining && !sim.scheduler.stats().paused);
    while sim.scheduler.has_requests() {
        sim.step(false, None);
    }
    assert_eq!(sim.finished.len(), 2, "those accepted are served");
    sim.scheduler.resume();
    sim.add(&[3; 6], 3).unwrap();
    sim.drain();
    assert_eq!(sim.finished.len(), 3);
}

/// Taking the blocks of forks that hold nothing of their own helps nobody.
#[test]
fn a_victim_that_frees_no_block_is_the_last_choice() {
    let mut scheduler = Scheduler::new(scheduler_config(8, 64, 64), kv_config(8, 2, &[None])).unwrap();
    for (id, first, priority) in [(0, 1, 0), (1, 2, 1)] {
        let new = NewRequest { priority, ..NewRequest::new(RequestId(id), vec![first; 8], 8) };
        scheduler.add_request(new).unwrap();
    }
    let output = scheduler.schedule();
    scheduler.update(&output, &[(RequestId(0), &[7]), (RequestId(1), &[7])]).unwrap();
    for id in 2..5 {
        let child = ForkRequest { priority: 1, token_ids: vec![9], ..ForkRequest::new(RequestId(id), 4) };
        let child = ForkRequest { num_source_tokens: Some(8), ..child };
        scheduler.fork(RequestId(0), child).unwrap();
        assert_eq!(scheduler.status(RequestId(id)), Some(RequestStatus::Running));
    }
    assert_eq!(scheduler.pool().num_free_blocks(), 0);
    let output = scheduler.schedule();
    let victims: Vec<_> = output.preempted.iter().map(|preemption| preemption.request_id.0).collect();
    assert_eq!(victims, [1]);
}

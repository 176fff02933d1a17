//! Traces small enough to be followed by hand, and what holds for all of them.

use paged::{AdmissionPolicy, FairnessPolicy, Policies, Policy, VictimPolicy};
use proptest::prelude::*;
use simulator::*;

/// Every step takes a second.
const SECOND: CostModel = CostModel { step_seconds: 1.0, weights_seconds: 0.0, token_seconds: 0.0, kv_token_seconds: 0.0 };

fn run(requests: &[TraceRequest], config: &SimulationConfig) -> SimulationResult {
    Simulation::new(Trace::new(requests.to_vec()).unwrap(), config).unwrap().run().unwrap()
}

fn memory(result: &SimulationResult) -> Vec<[f64; 6]> {
    result.timeline.iter().map(|interval| interval.memory.values()).collect()
}

#[test]
fn one_request_alone() {
    let config = SimulationConfig { enable_prefix_caching: false, ..SimulationConfig::new(2, 4, SECOND) };
    let result = run(&[TraceRequest::new(10.0, 3, 4)], &config);
    let record = &result.requests[0];
    assert_eq!((record.first_token, record.last_token, record.max_gap, record.end), (11.0, 14.0, 1.0, 14.0));
    assert_eq!((record.output_tokens, record.ending, record.mean_gap()), (4, Ending::Stop, 1.0));
    // Prompt and output are 7 tokens in two blocks of 4; the last token's KV is never needed.
    let expected = [
        [3.0, 0.0, 1.0, 0.0, 0.0, 4.0],
        [4.0, 0.0, 0.0, 0.0, 0.0, 4.0],
        [5.0, 1.0, 2.0, 0.0, 0.0, 0.0],
        [6.0, 1.0, 1.0, 0.0, 0.0, 0.0],
    ];
    assert_eq!(memory(&result), expected);
    assert_eq!(result.timeline.iter().map(|interval| interval.start).collect::<Vec<_>>(), [10.0, 11.0, 12.0, 13.0]);
    let totals = result.totals;
    assert_eq!((totals.steps, totals.seconds, totals.output_tokens, totals.computed_tokens), (4, 4.0, 4, 6));
    assert_eq!(totals.normalized_latency, 1.0);
    assert_eq!(totals.saturated, None);
}

#[test]
fn a_long_prompt_is_computed_in_chunks_and_costs_what_it_reads() {
    let cost = CostModel { step_seconds: 1.0, weights_seconds: 10.0, token_seconds: 100.0, kv_token_seconds: 1000.0 };
    let config = SimulationConfig { max_num_batched_tokens: 4, ..SimulationConfig::new(8, 4, cost) };
    let result = run(&[TraceRequest::new(0.0, 6, 2)], &config);
    // Chunks of 4 and 2 tokens, which read 4 and 6; then one token that reads 7.
    let prefill = 11.0 + 400.0 + 4000.0 + 11.0 + 200.0 + 6000.0;
    assert_eq!(result.requests[0].first_token, prefill);
    assert_eq!(result.requests[0].end, prefill + 11.0 + 100.0 + 7000.0);
}

#[test]
fn the_engine_sleeps_until_the_next_arrival_whatever_the_order_of_the_rows() {
    let config = SimulationConfig { enable_prefix_caching: false, ..SimulationConfig::new(4, 4, SECOND) };
    let result = run(&[TraceRequest::new(100.0, 3, 1), TraceRequest::new(0.5, 3, 1)], &config);
    assert_eq!(result.requests.iter().map(|record| record.end).collect::<Vec<_>>(), [101.0, 1.5]);
    assert_eq!(result.totals.seconds, 100.5);
    let sleep = result.timeline[1];
    assert_eq!((sleep.start, sleep.seconds, sleep.running, sleep.memory.free), (1.5, 98.5, 0.0, 16.0));
}

#[test]
fn a_shared_prefix_is_found_and_counted() {
    let prefix = Some(Prefix { id: 5, len: 9 });
    let with_prefix = |arrival| TraceRequest { prefix, ..TraceRequest::new(arrival, 10, 3) };
    let requests = [with_prefix(0.0), with_prefix(100.0), TraceRequest::new(200.0, 10, 3)];
    let on = run(&requests, &SimulationConfig::new(16, 4, SECOND));
    // The nine shared tokens: two whole blocks, and the first token of the third.
    assert_eq!(on.requests.iter().map(|record| record.cached_tokens).collect::<Vec<_>>(), [0, 9, 0]);
    assert_eq!((on.totals.prefix_queried_tokens, on.totals.prefix_hit_tokens), (30, 9));
    let asleep = on.timeline.iter().find(|interval| interval.running == 0.0).unwrap();
    assert_eq!((asleep.memory.cached, asleep.memory.token_states), (12.0, 0.0));
    let off = run(&requests, &SimulationConfig { enable_prefix_caching: false, ..SimulationConfig::new(16, 4, SECOND) });
    assert_eq!((off.totals.prefix_queried_tokens, off.totals.prefix_hit_tokens), (0, 0));
    assert_eq!(off.totals.computed_tokens, on.totals.computed_tokens + 9);
}

#[test]
fn a_next_turn_finds_the_answer_of_the_last() {
    let turn = |arrival, prompt, output| TraceRequest {
        prefix: Some(Prefix { id: 1, len: prompt + output }),
        ..TraceRequest::new(arrival, prompt, output)
    };
    let result = run(&[turn(0.0, 4, 9), turn(50.0, 16, 4)], &SimulationConfig::new(16, 4, SECOND));
    assert_eq!(result.requests[1].cached_tokens, 12);
}

#[test]
fn blocks_are_counted_once_however_many_share_them() {
    let shared = |arrival| TraceRequest { prefix: Some(Prefix { id: 1, len: 8 }), ..TraceRequest::new(arrival, 9, 50) };
    let result = run(&[shared(0.0), shared(2.0)], &SimulationConfig::new(64, 4, SECOND));
    // After the third second: the first has 11 tokens, the second 9, and 8 are the same.
    assert_eq!(result.timeline[2].memory.token_states, 11.0 + 9.0 - 8.0);
}

#[test]
fn what_is_lost_by_preemption_is_computed_again_and_counted() {
    let config = SimulationConfig { enable_prefix_caching: false, ..SimulationConfig::new(6, 2, SECOND) };
    let requests = [TraceRequest::new(0.0, 2, 8), TraceRequest::new(0.0, 2, 8)];
    let result = run(&requests, &config);
    assert!(result.requests.iter().all(|record| record.ending == Ending::Stop));
    assert_eq!(result.requests[0].preemptions, 0, "nobody loses blocks to a request behind it");
    assert!(result.requests[1].preemptions > 0);
    assert_eq!(result.totals.preemptions, result.requests[1].preemptions as u64);
    assert!(result.totals.recomputed_tokens > 0);
    assert_eq!(result.totals.computed_tokens, 2 * 9 + result.totals.recomputed_tokens);
    assert!(result.requests[1].max_gap > 1.0);
    assert!(result.totals.saturated.unwrap().waiting > 0.0);
}

#[test]
fn requests_that_never_fit_are_rejected_with_a_reason_and_others_are_cut_short() {
    let requests = [TraceRequest::new(0.0, 40, 1), TraceRequest::new(0.0, 4, 60), TraceRequest::new(0.0, 3, 3)];
    let result = run(&requests, &SimulationConfig::new(4, 4, SECOND));
    let endings: Vec<_> = result.requests.iter().map(|record| record.ending).collect();
    assert_eq!(endings, [Ending::Rejected, Ending::Length, Ending::Stop]);
    let reason = result.requests[0].rejection.as_ref().unwrap();
    assert!(reason.contains("40 tokens need 10 KV blocks") && reason.contains("pool has 4"), "{reason}");
    // Sixteen slots have KV and one more token was sampled from them.
    assert_eq!(result.requests[1].output_tokens, 16 - 4 + 1);
}

fn policies(names: &[&str]) -> Policies {
    policies_of_names(names.iter().copied()).unwrap()
}

#[test]
fn a_request_whose_deadline_passes_ends_with_what_it_has() {
    let late = TraceRequest { deadline: Some(3.5), ..TraceRequest::new(0.0, 4, 60) };
    let in_time = TraceRequest { deadline: Some(3.5), ..TraceRequest::new(0.0, 4, 3) };
    let result = run(&[late, in_time], &SimulationConfig::new(64, 4, SECOND));
    assert_eq!((result.requests[0].ending, result.requests[0].end, result.requests[0].output_tokens), (Ending::Deadline, 4.0, 4));
    assert_eq!((result.requests[1].ending, result.requests[1].end), (Ending::Stop, 3.0));
}

#[test]
fn priorities_rule_who_goes_first_and_fcfs_refuses_them() {
    let request = |priority| TraceRequest { priority, ..TraceRequest::new(0.0, 4, 2) };
    let requests = [request(0), request(5), request(-5)];
    let config = SimulationConfig { max_num_seqs: 1, ..SimulationConfig::new(64, 4, SECOND) };
    let ends = |result: &SimulationResult| result.requests.iter().map(|record| record.end).collect::<Vec<_>>();
    assert_eq!(ends(&run(&requests, &config)), [4.0, 6.0, 2.0]);
    let fcfs = run(&requests, &SimulationConfig { policies: policies(&["fcfs"]), ..config.clone() });
    assert!(fcfs.requests[2].rejection.as_ref().unwrap().contains("priority"));
    let contiguous = run(&requests, &SimulationConfig { allocator: Allocator::Oracle, ..config });
    assert!(contiguous.requests[2].rejection.as_ref().unwrap().contains("only the paged allocator"));
}

#[test]
fn tenants_take_turns_under_drr() {
    let request = |tenant| TraceRequest { tenant, ..TraceRequest::new(0.0, 256, 1) };
    let mut requests = vec![request(1); 8];
    requests.push(request(2));
    let end_of_the_last = |names: &[&str]| {
        let config =
            SimulationConfig { max_num_batched_tokens: 256, policies: policies(names), ..SimulationConfig::new(256, 16, SECOND) };
        run(&requests, &config).requests[8].end
    };
    assert_eq!(end_of_the_last(&["fcfs"]), 9.0);
    assert!(end_of_the_last(&["drr"]) <= 3.0, "the other tenant's queue is not in its way");
}

#[test]
fn admission_trades_preemptions_for_batch() {
    let requests: Vec<_> = (0..12).map(|row| TraceRequest::new(f64::from(row) * 0.1, 8, 24)).collect();
    let with = |name| {
        let config = SimulationConfig { policies: policies(&[name]), ..SimulationConfig::new(24, 4, SECOND) };
        let totals = run(&requests, &config).totals;
        (totals.preemptions, totals.saturated.unwrap().running)
    };
    let (reserved, optimistic) = (with("reserved"), with("optimistic"));
    assert_eq!(reserved.0, 0, "whoever is admitted has room to its end");
    assert!(optimistic.0 > 0);
    assert!(optimistic.1 > reserved.1);
}

#[test]
fn the_three_contiguous_allocators_reserve_what_they_are_named_for() {
    // 32 slots; the model could take 16 tokens, the request takes 5 and 3.
    let held = |allocator| {
        let config = SimulationConfig { allocator, max_model_len: Some(16), ..SimulationConfig::new(8, 4, SECOND) };
        memory(&run(&[TraceRequest::new(0.0, 5, 3)], &config))[0]
    };
    //                                      states, internal, reserved, external, cached, free
    assert_eq!(held(Allocator::Max), [5.0, 8.0, 3.0, 0.0, 0.0, 16.0]);
    // Five and four, in a chunk of sixteen.
    assert_eq!(held(Allocator::Pow2), [5.0, 1.0, 3.0, 7.0, 0.0, 16.0]);
    assert_eq!(held(Allocator::Oracle), [5.0, 0.0, 3.0, 0.0, 0.0, 24.0]);
}

#[test]
fn contiguous_requests_wait_their_turn_and_are_never_preempted() {
    let config = SimulationConfig { allocator: Allocator::Max, max_model_len: Some(16), ..SimulationConfig::new(8, 4, SECOND) };
    let requests: Vec<_> = [4, 2, 3, 1].map(|output| TraceRequest::new(0.0, 5, output)).into();
    let result = run(&requests, &config);
    // Two fit; the third takes the place of the second, the fourth that of the first.
    assert_eq!(result.requests.iter().map(|record| record.end).collect::<Vec<_>>(), [4.0, 2.0, 5.0, 5.0]);
    assert_eq!((result.totals.preemptions, result.totals.recomputed_tokens), (0, 0));
    assert_eq!(result.totals.saturated.unwrap().running, 2.0);
    let too_long = run(&[TraceRequest::new(0.0, 16, 1)], &config);
    assert!(too_long.requests[0].rejection.as_ref().unwrap().contains("at most 15"));
    let small = SimulationConfig { num_blocks: 3, ..config };
    assert!(run(&requests, &small).requests[0].rejection.as_ref().unwrap().contains("16 contiguous tokens"));
}

#[test]
fn settings_that_cannot_be_honoured_are_named() {
    let good = SimulationConfig::new(4, 4, SECOND);
    let bad = [
        ("blocks", SimulationConfig { num_blocks: 0, ..good.clone() }),
        ("blocks", SimulationConfig { num_blocks: usize::MAX, ..good.clone() }),
        ("block_size", SimulationConfig { block_size: 0, ..good.clone() }),
        ("max_num_seqs", SimulationConfig { max_num_seqs: 0, ..good.clone() }),
        ("max_model_len", SimulationConfig { allocator: Allocator::Max, ..good.clone() }),
        ("policy", SimulationConfig { allocator: Allocator::Pow2, policies: policies(&["drr"]), ..good.clone() }),
        ("windows", SimulationConfig { allocator: Allocator::Oracle, windows: vec![Some(4)], ..good.clone() }),
        ("num_intervals", SimulationConfig { max_intervals: 1, ..good.clone() }),
        ("token_seconds", SimulationConfig { cost: CostModel { token_seconds: f64::NAN, ..SECOND }, ..good.clone() }),
    ];
    for (field, config) in bad {
        let error = Simulation::new(Trace::new(Vec::new()).unwrap(), &config).err().unwrap().to_string();
        assert!(error.contains(field), "{field}: {error}");
    }
    let nothing = run(&[], &good);
    assert_eq!((nothing.timeline.len(), nothing.totals.steps, nothing.totals.overall), (0, 0, None));
}

fn requests() -> impl Strategy<Value = Vec<TraceRequest>> {
    let prefix = proptest::option::of((0u64..3, 0.0..1.0f64));
    let rank = (0u64..3, prop_oneof![3 => Just(0), 1 => -2i32..3], proptest::option::weighted(0.2, 0.0..60.0f64));
    let request = (0.0..20.0f64, 1usize..40, 1usize..30, prefix, rank);
    let request = request.prop_map(|(arrival, prompt_tokens, output_tokens, prefix, (tenant, priority, deadline))| {
        let len = |share: f64| (share * (prompt_tokens + output_tokens) as f64) as usize;
        let prefix = prefix.map(|(id, share)| Prefix { id, len: len(share) });
        TraceRequest { arrival, prompt_tokens, output_tokens, prefix, tenant, priority, deadline }
    });
    proptest::collection::vec(request, 0..20)
}

fn config() -> impl Strategy<Value = SimulationConfig> {
    let limits = (1usize..6, 1usize..40, proptest::option::of(2usize..60));
    let windows = prop_oneof![3 => Just(vec![]), 1 => Just(vec![Some(5), None]), 1 => Just(vec![Some(9)])];
    let names = (0..AdmissionPolicy::ALL.len(), 0..VictimPolicy::ALL.len(), 0..FairnessPolicy::ALL.len());
    let policies = names.prop_map(|(admission, victim, fairness)| Policies {
        admission: AdmissionPolicy::ALL[admission].1,
        victim: VictimPolicy::ALL[victim].1,
        fairness: FairnessPolicy::ALL[fairness].1,
    });
    let allocator = (0usize..4, policies).prop_map(|(allocator, policies)| match Allocator::NAMES[allocator].1 {
        Allocator::Paged => (Allocator::Paged, policies),
        other => (other, Policies::default()),
    });
    (allocator, 2usize..30, 1usize..6, limits, any::<bool>(), windows).prop_map(
        |(
            (allocator, policies),
            num_blocks,
            block_size,
            (max_num_seqs, max_num_batched_tokens, max_model_len),
            caching,
            windows,
        )| {
            let cost = CostModel { step_seconds: 0.1, weights_seconds: 0.2, token_seconds: 0.01, kv_token_seconds: 0.001 };
            SimulationConfig {
                allocator,
                policies,
                max_num_seqs,
                max_num_batched_tokens,
                max_model_len: if allocator == Allocator::Max { max_model_len.or(Some(70)) } else { max_model_len },
                enable_prefix_caching: caching,
                windows: if allocator == Allocator::Paged { windows } else { Vec::new() },
                max_intervals: 16,
                ..SimulationConfig::new(num_blocks, block_size, cost)
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(1500) })]

    /// That the kinds of memory add up to the pool in each step, the simulation asserts itself.
    #[test]
    fn every_request_ends_and_time_never_goes_back(requests in requests(), config in config()) {
        let result = run(&requests, &config);
        let num_slots = (config.num_blocks * config.block_size) as f64;
        let mut computed_tokens = result.totals.recomputed_tokens;
        for (request, record) in requests.iter().zip(&result.requests) {
            match record.ending {
                Ending::Unfinished => prop_assert!(false, "a request never ends"),
                Ending::Stop => prop_assert_eq!(record.output_tokens, request.output_tokens),
                Ending::Deadline => prop_assert!(request.deadline.is_some_and(|deadline| record.end >= deadline - 1e-6)),
                Ending::Length => prop_assert!(record.output_tokens < request.output_tokens),
                Ending::Rejected => prop_assert!(record.output_tokens == 0 && record.rejection.is_some()),
            }
            prop_assert!(record.end >= request.arrival && record.cached_tokens < request.prompt_tokens.max(1));
            if record.output_tokens > 0 {
                prop_assert!(request.arrival < record.first_token && record.first_token <= record.last_token);
                prop_assert!(record.last_token <= record.end);
                computed_tokens += (request.prompt_tokens + record.output_tokens - 1) as u64;
            }
            if record.output_tokens > 1 {
                prop_assert!(record.mean_gap() <= record.max_gap * (1.0 + 1e-9));
            }
        }
        // A deadline may pass in the middle of a prompt.
        let all_known = result.requests.iter().all(|record| record.ending != Ending::Deadline);
        if all_known && (!config.enable_prefix_caching || config.allocator != Allocator::Paged) {
            prop_assert_eq!(result.totals.computed_tokens, computed_tokens);
        }
        prop_assert!(result.timeline.len() <= config.max_intervals);
        let mut now = requests.iter().map(|request| request.arrival).fold(f64::INFINITY, f64::min);
        for interval in &result.timeline {
            prop_assert!((interval.start - now).abs() < 1e-6 && interval.seconds > 0.0);
            prop_assert!((interval.memory.total() - num_slots).abs() < 1e-6);
            prop_assert!(interval.memory.values().iter().all(|slots| *slots >= 0.0));
            now += interval.seconds;
        }
    }

    #[test]
    fn the_same_trace_gives_the_same_result_bit_for_bit(requests in requests(), config in config()) {
        prop_assert_eq!(format!("{:?}", run(&requests, &config)), format!("{:?}", run(&requests, &config)));
    }
}

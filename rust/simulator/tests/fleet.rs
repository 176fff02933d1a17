//! Replicas behind a router: who gets what, and what it comes to.

use proptest::prelude::*;
use simulator::*;

/// Every step takes a second.
const SECOND: CostModel = CostModel { step_seconds: 1.0, weights_seconds: 0.0, token_seconds: 0.0, kv_token_seconds: 0.0 };

fn run(requests: &[TraceRequest], config: &SimulationConfig, num_replicas: usize, policy: RouterPolicy) -> Vec<ReplicaResult> {
    Fleet::new(Trace::new(requests.to_vec()).unwrap(), config, num_replicas, policy).unwrap().run().unwrap()
}

fn rows(results: &[ReplicaResult]) -> Vec<&[usize]> {
    results.iter().map(|replica| replica.rows.as_slice()).collect()
}

/// Share of the looked-up tokens of all replicas that were found.
fn hit_rate(results: &[ReplicaResult]) -> f64 {
    let sum = |of: fn(&Totals) -> u64| results.iter().map(|replica| of(&replica.result.totals)).sum::<u64>() as f64;
    sum(|totals| totals.prefix_hit_tokens) / sum(|totals| totals.prefix_queried_tokens)
}

/// Turns of conversations, each behind all of the one before it.
fn conversations(number: usize, turns: usize) -> Vec<TraceRequest> {
    let turn = |conversation: usize, turn: usize| TraceRequest {
        prefix: Some(Prefix { id: conversation as u64, len: 40 * (turn + 1) }),
        ..TraceRequest::new((turn * 1000 + conversation) as f64, 40 * turn + 30, 10)
    };
    (0..turns).flat_map(|at| (0..number).map(move |conversation| turn(conversation, at))).collect()
}

#[test]
fn a_request_goes_to_the_replica_with_the_fewest() {
    let long = TraceRequest::new(0.0, 4, 50);
    let short = |arrival| TraceRequest::new(arrival, 4, 2);
    let requests = [long, short(1.0), short(10.0), short(20.0)];
    let config = SimulationConfig::new(64, 4, SECOND);
    assert_eq!(rows(&run(&requests, &config, 2, RouterPolicy::RoundRobin)), [&[0, 2][..], &[1, 3]]);
    assert_eq!(rows(&run(&requests, &config, 2, RouterPolicy::LeastLoaded)), [&[0][..], &[1, 2, 3]]);
}

#[test]
fn conversations_that_go_home_find_as_much_as_in_one_engine_and_in_turn_less() {
    // Five conversations over four replicas: in turn, none comes back to where it was.
    let requests = conversations(5, 4);
    let config = SimulationConfig::new(1000, 4, SECOND);
    let pooled = hit_rate(&run(&requests, &config, 1, RouterPolicy::RoundRobin));
    assert!(pooled > 0.6, "{pooled}");
    assert_eq!(hit_rate(&run(&requests, &config, 4, RouterPolicy::Prefix)), pooled);
    assert_eq!(hit_rate(&run(&requests, &config, 4, RouterPolicy::RoundRobin)), 0.0);
}

#[test]
fn what_one_pool_has_no_room_for_several_keep() {
    let requests = conversations(8, 4);
    // A quarter of all blocks in each of four pools.
    let config = SimulationConfig::new(100, 4, SECOND);
    let of = |num_replicas| hit_rate(&run(&requests, &config, num_replicas, RouterPolicy::Prefix));
    assert!(of(4) > 1.5 * of(1), "{} {}", of(4), of(1));
}

#[test]
fn replicas_are_counted_and_named_when_there_are_none() {
    let new =
        |number| Fleet::new(Trace::new(Vec::new()).unwrap(), &SimulationConfig::new(4, 4, SECOND), number, RouterPolicy::Prefix);
    assert!(new(0).err().unwrap().to_string().contains("`replicas` is 0: from 1 to 4096 work"));
    let results = new(3).unwrap().run().unwrap();
    assert_eq!(rows(&results), [&[][..]; 3]);
    assert!(results.iter().all(|replica| replica.result.totals.seconds == 0.0));
}

fn any_request() -> impl Strategy<Value = TraceRequest> {
    let prefix = prop::option::of((0u64..4, 0.0..1.0));
    let sizes = (0.0f64..60.0, 1usize..60, 1usize..30, prefix, prop::option::of(1.0f64..200.0), -1..2);
    sizes.prop_map(|(arrival, prompt_tokens, output_tokens, prefix, deadline, priority)| TraceRequest {
        prefix: prefix.map(|(id, share)| Prefix { id, len: (share * (prompt_tokens + output_tokens) as f64) as usize }),
        deadline,
        priority,
        ..TraceRequest::new(arrival, prompt_tokens, output_tokens)
    })
}

proptest! {
    #[test]
    fn one_replica_is_an_engine_alone(requests in prop::collection::vec(any_request(), 0..40), num_blocks in 8usize..60) {
        // A replica numbers its requests as they come, an engine alone as they stand in the trace, and numbers part equals.
        let mut requests = requests;
        requests.sort_by(|a, b| a.arrival.total_cmp(&b.arrival));
        let config = SimulationConfig::new(num_blocks, 4, SECOND);
        let alone = Simulation::new(Trace::new(requests.clone()).unwrap(), &config).unwrap().run().unwrap();
        for (_, policy) in RouterPolicy::NAMES {
            let [replica] = run(&requests, &config, 1, policy).try_into().unwrap();
            // Compared as text, for there are NaNs.
            let by_arrival: Vec<_> = replica.rows.iter().map(|row| &alone.requests[*row]).collect();
            prop_assert_eq!(format!("{:?}", replica.result.requests), format!("{by_arrival:?}"));
            prop_assert_eq!(&replica.result.timeline, &alone.timeline);
            prop_assert_eq!(Totals { normalized_latency: 0.0, ..replica.result.totals }, Totals { normalized_latency: 0.0, ..alone.totals });
        }
    }

    #[test]
    fn every_request_ends_once(requests in prop::collection::vec(any_request(), 0..60), num_replicas in 1usize..6) {
        for (_, policy) in RouterPolicy::NAMES {
            let results = run(&requests, &SimulationConfig::new(30, 4, SECOND), num_replicas, policy);
            let mut all: Vec<_> = results.iter().flat_map(|replica| replica.rows.clone()).collect();
            all.sort_unstable();
            prop_assert_eq!(all, (0..requests.len()).collect::<Vec<_>>());
            prop_assert!(results.iter().flat_map(|replica| &replica.result.requests).all(|record| record.ending != Ending::Unfinished));
        }
    }
}

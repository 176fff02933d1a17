//! Prompts that are computed in one step or not at all.

use std::collections::BTreeMap;

use paged::*;
use proptest::prelude::*;

const MAX_TOKENS: usize = 40;

fn config(admission: AdmissionPolicy, fairness: FairnessPolicy) -> SchedulerConfig {
    let limits = SchedulerConfig::new(6, MAX_TOKENS, MAX_TOKENS + 1);
    SchedulerConfig { whole_prompts: true, admission, fairness, ..limits }
}

fn kv(num_blocks: usize, is_windowed: bool) -> KvCacheConfig {
    let windows: &[Option<usize>] = if is_windowed { &[Some(8), None] } else { &[None] };
    let groups = KvGroups::from_layers(windows);
    KvCacheConfig { num_blocks, block_size: 4, groups, enable_prefix_caching: false, hash_key: [0; 32] }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn every_prompt_is_computed_whole_and_every_request_ends(
        lens in prop::collection::vec((1..=MAX_TOKENS, -1i32..2, 1usize..4), 1..20),
        // A pool that holds one of the longest, or several.
        room in 0usize..30,
        is_windowed in any::<bool>(),
        is_optimistic in any::<bool>(),
        is_fcfs in any::<bool>(),
    ) {
        let admission = if is_optimistic { AdmissionPolicy::Optimistic } else { AdmissionPolicy::Watermark };
        let fairness = if is_fcfs { FairnessPolicy::Fcfs } else { FairnessPolicy::Priority };
        let mut scheduler = Scheduler::new(config(admission, fairness), kv(22 + room, is_windowed)).unwrap();
        scheduler.limit_prompt_tokens(PromptLimits { beside_answers: Some(2), alone: Some(3) });
        let mut left = BTreeMap::new();
        for (i, &(len, priority, answers)) in lens.iter().enumerate() {
            let id = RequestId(i as u64);
            let priority = if is_fcfs { 0 } else { priority };
            scheduler.add_request(NewRequest { priority, ..NewRequest::new(id, vec![1; len], answers) }).unwrap();
            left.insert(id, answers);
        }
        let mut steps = 0;
        while !left.is_empty() {
            steps += 1;
            prop_assert!(steps < 500, "{left:?} never end");
            let output = scheduler.schedule();
            for (id, _) in &output.finished {
                left.remove(id);
            }
            let mut sampled = Vec::new();
            for row in &output.rows {
                prop_assert_eq!(row.num_computed_tokens + row.num_scheduled_tokens, scheduler.token_ids(row.request_id).len());
                prop_assert_eq!(row.num_outputs, 1);
                let answers = left.get_mut(&row.request_id).unwrap();
                *answers -= 1;
                // The last one ends with no token, as one whose vector was wanted.
                let tokens: &[u32] = if *answers == 0 { &[] } else { &[2] };
                sampled.push((row.request_id, tokens));
            }
            prop_assert!(output.total_num_scheduled_tokens <= MAX_TOKENS);
            scheduler.update(&output, &sampled).unwrap();
            left.retain(|_, answers| *answers > 0);
        }
        prop_assert_eq!(scheduler.stats().blocks_used, 0);
    }
}

#[test]
fn short_prompts_share_a_step_up_to_its_budget() {
    let mut scheduler = Scheduler::new(config(AdmissionPolicy::Watermark, FairnessPolicy::Priority), kv(100, false)).unwrap();
    for (i, len) in [10, 20, 15, 5].into_iter().enumerate() {
        scheduler.add_request(NewRequest::new(RequestId(i as u64), vec![1; len], 1)).unwrap();
    }
    let output = scheduler.schedule();
    assert_eq!(output.rows.iter().map(|row| row.num_scheduled_tokens).collect::<Vec<_>>(), [10, 20], "15 more do not fit 40");
}

#[test]
fn a_step_that_is_smaller_than_a_prompt_is_refused() {
    let config = SchedulerConfig { whole_prompts: true, ..SchedulerConfig::new(4, 32, 64) };
    let error = Scheduler::new(config, kv(10, false)).unwrap_err().to_string();
    assert_eq!(error, "max_num_batched_tokens is 32: a whole prompt is computed in one step");
}

#[test]
fn a_prompt_whose_blocks_no_step_can_have_at_once_is_refused() {
    let mut scheduler = Scheduler::new(config(AdmissionPolicy::Optimistic, FairnessPolicy::Priority), kv(12, true)).unwrap();
    let servable = scheduler.servable_tokens();
    assert_eq!(servable, 24, "six blocks of four in each of two groups, windows or not");
    scheduler.add_request(NewRequest::new(RequestId(1), vec![1; servable], 1)).unwrap();
    assert!(scheduler.add_request(NewRequest::new(RequestId(2), vec![1; servable + 1], 1)).is_err());
}

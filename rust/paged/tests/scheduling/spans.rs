//! Tokens that a step computes together: the rows of an image that see each other.

use std::{collections::BTreeMap, ops::Range};

use paged::*;
use proptest::prelude::*;

const MAX_TOKENS: usize = 24;
const LONGEST: usize = 10;

fn config(admission: AdmissionPolicy, fairness: FairnessPolicy) -> SchedulerConfig {
    SchedulerConfig { longest_span: LONGEST, admission, fairness, ..SchedulerConfig::new(5, MAX_TOKENS, 80) }
}

fn kv(num_blocks: usize, is_windowed: bool) -> KvCacheConfig {
    let windows: &[Option<usize>] = if is_windowed { &[Some(8), None] } else { &[None] };
    let groups = KvGroups::from_layers(windows);
    KvCacheConfig { num_blocks, block_size: 4, groups, enable_prefix_caching: true, hash_key: [0; 32] }
}

/// A prompt of texts and images, of so many tokens each, in turns. Equal parts have equal tokens.
fn prompt(parts: &[usize]) -> (Vec<u32>, Vec<Range<usize>>) {
    let (mut tokens, mut spans) = (Vec::new(), Vec::new());
    for (i, &len) in parts.iter().enumerate() {
        if i % 2 == 1 {
            spans.push(tokens.len()..tokens.len() + len);
        }
        tokens.extend((0..len).map(|at| (100 * len + at) as u32));
    }
    tokens.push(7);
    (tokens, spans)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn no_row_and_no_prefix_hit_cuts_a_span_and_every_request_ends(
        requests in prop::collection::vec(
            (prop::collection::vec(1..=LONGEST, 1..6), -1i32..2, 1usize..5, any::<bool>()),
            1..16,
        ),
        // A pool that holds one of the longest, or several.
        room in 0usize..40,
        is_windowed in any::<bool>(),
        admission in prop::sample::select(
            vec![AdmissionPolicy::Optimistic, AdmissionPolicy::Watermark, AdmissionPolicy::Reserved],
        ),
        fairness in prop::sample::select(vec![FairnessPolicy::Fcfs, FairnessPolicy::Priority, FairnessPolicy::Drr]),
    ) {
        let mut scheduler = Scheduler::new(config(admission, fairness), kv(36 + room, is_windowed)).unwrap();
        scheduler.limit_prompt_tokens(PromptLimits { beside_answers: Some(2), alone: Some(3) });
        let mut left = BTreeMap::new();
        let mut all_spans = BTreeMap::new();
        for (i, (parts, priority, answers, forks)) in requests.iter().enumerate() {
            let id = RequestId(i as u64);
            let priority = if fairness == FairnessPolicy::Fcfs { 0 } else { *priority };
            let (tokens, spans) = prompt(parts);
            let new = NewRequest { priority, spans: spans.clone(), ..NewRequest::new(id, tokens, *answers) };
            if scheduler.add_request(new).is_err() {
                continue;
            }
            left.insert(id, *answers);
            all_spans.insert(id, spans.clone());
            let child = RequestId(1000 + i as u64);
            if *forks && scheduler.fork(id, ForkRequest::new(child, *answers)).is_ok() {
                left.insert(child, *answers);
                all_spans.insert(child, spans);
            }
        }
        let mut steps = 0;
        while !left.is_empty() {
            steps += 1;
            prop_assert!(steps < 2000, "{left:?} never end");
            let output = scheduler.schedule();
            for (id, reason) in &output.finished {
                prop_assert_eq!(*reason, FinishReason::Length);
                left.remove(id);
            }
            let mut sampled = Vec::new();
            for row in &output.rows {
                let (start, end) = (row.num_computed_tokens, row.num_computed_tokens + row.num_scheduled_tokens);
                for span in &all_spans[&row.request_id] {
                    let is_within = |place: usize| span.start < place && place < span.end;
                    prop_assert!(!is_within(start) && !is_within(end), "rows {start}..{end} cut {span:?}");
                }
                if row.num_outputs > 0 {
                    let answers = left.get_mut(&row.request_id).unwrap();
                    *answers = answers.saturating_sub(1);
                    sampled.push((row.request_id, &[2u32][..]));
                }
            }
            prop_assert!(output.total_num_scheduled_tokens <= MAX_TOKENS);
            scheduler.update(&output, &sampled).unwrap();
            left.retain(|id, answers| {
                if *answers == 0 {
                    scheduler.finish_request(*id);
                }
                *answers > 0
            });
        }
        prop_assert_eq!(scheduler.stats().blocks_used, 0);
    }
}

#[test]
fn a_span_may_exceed_what_a_step_has_for_prompts_beside_answers() {
    let mut scheduler = Scheduler::new(config(AdmissionPolicy::Watermark, FairnessPolicy::Priority), kv(100, false)).unwrap();
    scheduler.limit_prompt_tokens(PromptLimits { beside_answers: Some(2), alone: Some(3) });
    let (tokens, spans) = prompt(&[2, 9, 1]);
    scheduler.add_request(NewRequest { spans, ..NewRequest::new(RequestId(1), tokens, 1) }).unwrap();
    let mut rows = Vec::new();
    for _ in 0..3 {
        let output = scheduler.schedule();
        rows.extend(output.rows.iter().map(|row| row.num_scheduled_tokens));
        let sampled: Vec<_> =
            output.rows.iter().filter(|row| row.num_outputs > 0).map(|row| (row.request_id, &[1u32][..])).collect();
        scheduler.update(&output, &sampled).unwrap();
    }
    assert_eq!(rows, [2, 9, 2]);
}

#[test]
fn a_prefix_hit_ends_before_an_image_that_is_cached_in_part() {
    let mut scheduler = Scheduler::new(config(AdmissionPolicy::Watermark, FairnessPolicy::Priority), kv(100, false)).unwrap();
    let (mut tokens, spans) = prompt(&[2, 8, 6]);
    let run = |scheduler: &mut Scheduler, id, tokens: &[u32], spans: &[Range<usize>]| {
        scheduler
            .add_request(NewRequest { spans: spans.to_vec(), ..NewRequest::new(RequestId(id), tokens.to_vec(), 1) })
            .unwrap();
        let output = scheduler.schedule();
        let first = output.rows[0].num_computed_tokens;
        scheduler.update(&output, &[(RequestId(id), &[])]).unwrap();
        first
    };
    assert_eq!(run(&mut scheduler, 1, &tokens, &spans), 0);
    // The same beginning up to the middle of the image.
    tokens[6..].fill(9);
    assert_eq!(run(&mut scheduler, 2, &tokens, &spans), 2);
    assert_eq!(run(&mut scheduler, 3, &tokens, &spans), 16, "all but the last token");
}

#[test]
fn a_span_that_no_step_holds_is_refused() {
    let mut scheduler = Scheduler::new(config(AdmissionPolicy::Watermark, FairnessPolicy::Priority), kv(100, false)).unwrap();
    let span = 0..LONGEST + 1;
    let new = NewRequest { spans: vec![span], ..NewRequest::new(RequestId(1), vec![1; 20], 1) };
    let error = scheduler.add_request(new).unwrap_err().to_string();
    assert_eq!(error, "request 1: 11 tokens must be computed in one step, and it was made for 10 at most");
    let config = SchedulerConfig { longest_span: 30, ..SchedulerConfig::new(4, 20, 64) };
    let error = Scheduler::new(config, kv(10, false)).unwrap_err().to_string();
    assert_eq!(error, "max_num_batched_tokens is 20: the rows of an image are computed in one step");
}

//! Drafts: how many are computed, what becomes of the wrong ones, and what a step's result may say of them.

use paged::*;

use crate::common::{Sim, kv_config, scheduler_config};

const ID: RequestId = RequestId(1);

fn new_scheduler(config: SchedulerConfig, num_blocks: usize, block_size: usize) -> Scheduler {
    Scheduler::new(config, kv_config(num_blocks, block_size, &[None])).unwrap()
}

/// A scheduler with one request that has a prompt of `len` tokens and its first answer.
fn answered(config: SchedulerConfig, num_blocks: usize, len: usize, max_tokens: usize) -> Scheduler {
    let mut scheduler = new_scheduler(config, num_blocks, 4);
    scheduler.add_request(NewRequest::new(ID, vec![1; len], max_tokens)).unwrap();
    let output = scheduler.schedule();
    scheduler.update(&output, &[(ID, &[2])]).unwrap();
    scheduler
}

/// Tokens, drafts and outputs of each row.
fn rows(output: &SchedulerOutput) -> Vec<(u64, usize, usize, usize)> {
    let row = |row: &ScheduledRequest| (row.request_id.0, row.num_scheduled_tokens, row.num_drafts, row.num_outputs);
    output.rows.iter().map(row).collect()
}

#[test]
fn drafts_follow_the_last_known_token() {
    let mut scheduler = answered(scheduler_config(4, 64, 64), 16, 5, 20);
    assert!(scheduler.set_drafts(ID, &[3, 4, 5]));
    assert!(!scheduler.set_drafts(RequestId(9), &[3]));
    let output = scheduler.schedule();
    assert_eq!(rows(&output), [(1, 4, 3, 4)]);
    assert_eq!((&output.drafts[..], output.total_num_scheduled_tokens), (&[3, 4, 5][..], 4));
    assert_eq!(scheduler.token_ids(ID), [1, 1, 1, 1, 1, 2], "a draft is not known");
    scheduler.update(&output, &[(ID, &[3, 4, 9])]).unwrap();
    assert_eq!(scheduler.token_ids(ID), [1, 1, 1, 1, 1, 2, 3, 4, 9]);
    // The prompt, the token behind it, and two drafts; of the third nothing is left, nor is it proposed again.
    assert_eq!(scheduler.num_computed_tokens(ID), Some((8, 2)));
    assert_eq!(scheduler.block_table(ID, 0).len(), 2);
    assert_eq!(rows(&scheduler.schedule()), [(1, 1, 0, 1)]);
}

#[test]
fn a_prompt_takes_drafts_in_the_step_that_ends_it() {
    let mut scheduler = new_scheduler(scheduler_config(4, 4, 64), 16, 4);
    scheduler.add_request(NewRequest::new(ID, vec![1; 6], 20)).unwrap();
    scheduler.set_drafts(ID, &[3, 4, 5]);
    let output = scheduler.schedule();
    assert_eq!(rows(&output), [(1, 4, 0, 0)]);
    scheduler.update(&output, &[]).unwrap();
    scheduler.set_drafts(ID, &[3, 4, 5]);
    let output = scheduler.schedule();
    assert_eq!(rows(&output), [(1, 4, 2, 3)]);
    scheduler.update(&output, &[(ID, &[3, 4, 5])]).unwrap();
    assert_eq!(scheduler.num_computed_tokens(ID), Some((8, 2)));
}

#[test]
fn drafts_are_cut_to_what_is_left() {
    let drafts = [3; 9];
    let cut = |config: SchedulerConfig, num_blocks, len, max_tokens| {
        let mut scheduler = answered(config, num_blocks, len, max_tokens);
        scheduler.set_drafts(ID, &drafts);
        let output = scheduler.schedule();
        output.rows[0].num_drafts
    };
    let config = |budget, max_model_len| scheduler_config(4, budget, max_model_len);
    assert_eq!(cut(config(64, 64), 16, 5, 40), 9, "there is room for all");
    assert_eq!(cut(config(6, 64), 16, 5, 40), 5, "the budget");
    assert_eq!(cut(config(64, 64), 3, 5, 40), 6, "the pool: slots of 3 blocks but 6 tokens");
    assert_eq!(cut(config(64, 64), 16, 5, 4), 2, "max_tokens: one is there, and one comes behind the drafts");
    assert_eq!(cut(config(64, 64), 16, 5, 2), 0, "max_tokens: the last token");
    assert_eq!(cut(config(64, 11), 16, 5, 40), 4, "the context");
    assert_eq!(cut(SchedulerConfig { max_chunk_len: Some(3), ..config(64, 64) }, 16, 3, 40), 2, "the chunk");
    assert_eq!(cut(SchedulerConfig { reserve_full_context: true, ..config(64, 16) }, 4, 5, 40), 9, "a reserved context");
}

#[test]
fn a_draft_takes_nothing_from_anybody() {
    // Of 5 blocks 2 are the first request's, 1 is kept, and 2 are for the prompt that waits.
    let mut scheduler = answered(scheduler_config(4, 64, 64), 5, 5, 40);
    scheduler.add_request(NewRequest::new(RequestId(2), vec![7; 4], 2)).unwrap();
    let output = scheduler.schedule();
    scheduler.update(&output, &[(ID, &[2]), (RequestId(2), &[8])]).unwrap();
    assert!(scheduler.keep_request(RequestId(2)));
    scheduler.add_request(NewRequest::new(RequestId(3), vec![9; 8], 1)).unwrap();
    scheduler.set_drafts(ID, &[3; 9]);
    let output = scheduler.schedule();
    // A slot is left in its second block.
    assert_eq!(rows(&output), [(1, 2, 1, 2), (3, 8, 0, 1)]);
    assert_eq!((scheduler.stats().blocks_kept, scheduler.stats().blocks_free), (1, 0));
    assert_eq!(output.preempted, []);
}

#[test]
fn a_prompt_goes_before_drafts() {
    let mut scheduler = answered(scheduler_config(4, 8, 64), 16, 5, 40);
    scheduler.set_drafts(ID, &[3; 5]);
    scheduler.add_request(NewRequest::new(RequestId(2), vec![7; 5], 2)).unwrap();
    assert_eq!(rows(&scheduler.schedule()), [(1, 3, 2, 3), (2, 5, 0, 1)]);
}

#[test]
fn blocks_of_wrong_drafts_are_free_and_hold_nothing_that_is_found() {
    let mut scheduler = answered(scheduler_config(4, 64, 64), 16, 5, 40);
    let stats = scheduler.stats();
    scheduler.set_drafts(ID, &[3; 9]);
    let output = scheduler.schedule();
    assert_eq!(scheduler.stats().blocks_used, 4);
    scheduler.update(&output, &[(ID, &[9])]).unwrap();
    let after = scheduler.stats();
    assert_eq!((after.blocks_used, after.blocks_cached), (stats.blocks_used, stats.blocks_cached));
    // Neither by its tokens as they are nor by the drafts is more found than was right.
    scheduler.finish_request(ID);
    for (id, third, found) in [(2, 3, 6), (3, 9, 6)] {
        let prompt = [[1; 5].as_slice(), &[2], &[third; 6]].concat();
        scheduler.add_request(NewRequest::new(RequestId(id), prompt, 4)).unwrap();
        let output = scheduler.schedule();
        assert_eq!(output.rows[0].num_cached_tokens, found);
        scheduler.step_failed(&output);
    }
}

/// Of a model with states, and places for so many of them.
fn with_states(num_spare_states: usize) -> SchedulerConfig {
    SchedulerConfig { has_states: true, num_spare_states, ..scheduler_config(4, 64, 64) }
}

#[test]
fn a_request_with_states_goes_back_behind_a_wrong_draft() {
    let mut scheduler = answered(with_states(1), 16, 5, 40);
    let step = |scheduler: &mut Scheduler, drafts: &[u32], tokens: &[u32]| {
        scheduler.set_drafts(ID, drafts);
        let output = scheduler.schedule();
        scheduler.update(&output, &[(ID, tokens)]).unwrap();
        (rows(&output)[0], scheduler.num_computed_tokens(ID).unwrap().0)
    };
    // Right drafts count as ever; behind a wrong one all tokens of the step are computed again, with drafts behind them.
    assert_eq!(step(&mut scheduler, &[3, 4], &[3, 4, 5]), ((1, 3, 2, 3), 8));
    assert_eq!(step(&mut scheduler, &[6, 7], &[6, 9]), ((1, 3, 2, 3), 8));
    assert_eq!(scheduler.token_ids(ID), [1, 1, 1, 1, 1, 2, 3, 4, 5, 6, 9]);
    assert_eq!(step(&mut scheduler, &[7], &[8]), ((1, 4, 1, 2), 8));
    assert_eq!(step(&mut scheduler, &[7], &[7, 7]), ((1, 5, 1, 2), 13));
    // Not too many of them.
    let known = MOST_KNOWN as u32;
    let drafts: Vec<_> = (20..=20 + known).collect();
    let right = [&drafts[..known as usize], &[99]].concat();
    assert_eq!(step(&mut scheduler, &drafts, &right).1, 13);
    assert_eq!(step(&mut scheduler, &drafts, &[5]), ((1, MOST_KNOWN + 2, 0, 1), 15 + MOST_KNOWN));
}

/// Else a more urgent prompt would have all of the steps that it takes.
#[test]
fn an_answer_that_went_back_has_its_tokens_beside_a_prompt_of_higher_priority() {
    let mut scheduler = answered(SchedulerConfig { max_num_batched_tokens: 8, ..with_states(1) }, 64, 5, 40);
    scheduler.set_drafts(ID, &[3, 4]);
    let output = scheduler.schedule();
    scheduler.update(&output, &[(ID, &[3, 9])]).unwrap();
    scheduler.add_request(NewRequest { priority: -1, ..NewRequest::new(RequestId(2), vec![7; 40], 4) }).unwrap();
    let output = scheduler.schedule();
    let of_answer = output.rows.iter().find(|row| row.request_id == ID).expect("it has a row");
    assert_eq!((of_answer.num_scheduled_tokens, of_answer.num_again, of_answer.num_outputs), (3, 2, 1));
    assert_eq!(output.rows.iter().map(|row| row.num_scheduled_tokens).sum::<usize>(), 8);
    assert_eq!(output.rows.iter().filter(|row| row.is_chunk()).count(), 1);
    scheduler.update(&output, &[(ID, &[5])]).unwrap();
    assert_eq!(scheduler.num_computed_tokens(ID).map(|(computed, _)| computed), Some(8));
}

#[test]
fn no_more_requests_with_states_have_drafts_than_can_go_back() {
    for (num_spare_states, expected) in [(0, [0, 0]), (1, [2, 0]), (2, [2, 2])] {
        let mut scheduler = answered(with_states(num_spare_states), 16, 5, 40);
        scheduler.add_request(NewRequest::new(RequestId(2), vec![7; 5], 20)).unwrap();
        let output = scheduler.schedule();
        scheduler.update(&output, &[(ID, &[3]), (RequestId(2), &[3])]).unwrap();
        for id in [ID, RequestId(2)] {
            scheduler.set_drafts(id, &[4, 5]);
        }
        let output = scheduler.schedule();
        assert_eq!(output.rows.iter().map(|row| row.num_drafts).collect::<Vec<_>>(), expected);
    }
    // Nor has one that has not begun: there is nothing to go back to.
    let mut scheduler = new_scheduler(with_states(2), 16, 4);
    scheduler.add_request(NewRequest::new(ID, vec![1; 5], 20)).unwrap();
    scheduler.set_drafts(ID, &[3]);
    assert_eq!(rows(&scheduler.schedule()), [(1, 5, 0, 1)]);
}

#[test]
fn a_fork_behind_wrong_drafts_copies_what_it_shares() {
    let mut sim = Sim::new(scheduler_config(4, 64, 64), kv_config(32, 4, &[None]));
    sim.draft(7);
    let source = sim.add(&[1, 2, 3, 4, 5], 55).unwrap();
    for _ in 0..4 {
        sim.step(false, None);
        let child = sim.fork(source, None, &[]).unwrap();
        sim.step(false, None);
        sim.abort(child);
    }
    sim.drain();
    let (accepted, computed) = sim.draft_counts();
    assert!(0 < accepted && accepted < computed, "{accepted} of {computed}");
}

#[test]
fn a_result_that_drafts_cannot_have_come_to_is_refused_and_changes_nothing() {
    let mut scheduler = answered(scheduler_config(4, 64, 64), 16, 5, 40);
    scheduler.set_drafts(ID, &[3, 4]);
    let output = scheduler.schedule();
    let refused = |scheduler: &mut Scheduler, tokens: &[u32]| {
        let error = scheduler.update(&output, &[(ID, tokens)]).unwrap_err();
        assert_eq!((scheduler.num_computed_tokens(ID), scheduler.token_ids(ID).len()), (Some((5, 1)), 6));
        assert!(scheduler.schedule().rows.is_empty(), "still in flight");
        error
    };
    let too_many = UpdateError::TooManyTokens { request_id: ID, given: 4, num_outputs: 3 };
    assert_eq!(refused(&mut scheduler, &[3, 4, 5, 6]), too_many);
    assert_eq!(refused(&mut scheduler, &[3, 9, 5]), UpdateError::NotTheDraft { request_id: ID, token: 9, draft: 4 });
    let error = refused(&mut scheduler, &[9, 4]);
    let text = error.to_string();
    assert!(text.contains("request 1") && text.contains("token 9") && text.contains("draft 3"), "{text}");
    scheduler.update(&output, &[(ID, &[3, 9])]).unwrap();
}

#[test]
fn a_request_without_a_token_has_ended_and_its_blocks_are_found() {
    let mut scheduler = new_scheduler(scheduler_config(4, 64, 64), 16, 4);
    for (id, found) in [(1, 0), (2, 9)] {
        scheduler.add_request(NewRequest::new(RequestId(id), vec![1; 10], 1)).unwrap();
        let output = scheduler.schedule();
        assert_eq!(output.rows[0].num_cached_tokens, found);
        scheduler.update(&output, &[(RequestId(id), &[])]).unwrap();
        assert_eq!(scheduler.status(RequestId(id)), None);
        assert!(!scheduler.has_requests());
        assert_eq!(scheduler.stats().blocks_used, 0);
        scheduler.check_integrity().unwrap();
    }
}

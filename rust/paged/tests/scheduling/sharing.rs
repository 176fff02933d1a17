//! Forks: what is shared, what is copied, and when.

use paged::*;

use crate::common::{Owner, Sim, StepResult, kv_config, scheduler_config};

fn full() -> Vec<Option<usize>> {
    vec![None; 3]
}

fn full_and_windowed() -> Vec<Option<usize>> {
    vec![Some(9), None]
}

/// Six tokens in blocks of four: after the prompt step, three children with first tokens of their own.
fn four_choices(windows: &[Option<usize>]) -> (Sim, Vec<RequestId>) {
    let mut sim = Sim::new(scheduler_config(8, 64, 64), kv_config(32, 4, windows));
    let source = sim.add(&[1, 2, 3, 4, 5, 6], 5).unwrap();
    sim.step(false, None);
    let mut ids = vec![source];
    ids.extend((0..3).map(|n| sim.fork(source, Some(6), &[90 + n]).unwrap()));
    (sim, ids)
}

#[test]
fn choices_of_one_prompt_share_its_blocks_and_copy_only_the_partial_one() {
    for windows in [full(), full_and_windowed()] {
        let (mut sim, ids) = four_choices(&windows);
        let num_groups = sim.kv.groups.groups.len();
        let stats = sim.scheduler.stats();
        let expected = (2 * num_groups, 2 * num_groups, 6 * num_groups);
        assert_eq!((stats.blocks_used, stats.blocks_shared, stats.blocks_saved), expected);
        let output = sim.scheduler.schedule();
        assert!(output.rows.iter().all(|row| (row.num_computed_tokens, row.num_scheduled_tokens) == (6, 1)));
        // Three of four copy the partial block, in one list; the last holder writes to the original.
        assert_eq!((output.rows.len(), output.copies.len()), (4, 3 * num_groups));
        for group in 0..num_groups {
            let tables: Vec<_> = ids.iter().map(|id| sim.scheduler.block_table(*id, group)).collect();
            assert!(tables.iter().all(|table| table[0] == tables[0][0]));
            let last: std::collections::HashSet<_> = tables.iter().map(|table| table[1]).collect();
            assert_eq!(last.len(), 4);
            let original = output.copies.iter().find(|copy| last.contains(&copy.1) && copy.1 == tables[0][1]).unwrap().0;
            assert_eq!(tables[3][1], original);
        }
    }
}

#[test]
fn every_choice_reads_its_own_continuation() {
    for windows in [full(), full_and_windowed()] {
        let (mut sim, _) = four_choices(&windows);
        sim.drain();
        assert_eq!(sim.ended.len(), 4);
        assert_eq!(sim.scheduler.stats().preemptions, 0);
    }
}

#[test]
fn on_a_block_boundary_nothing_is_copied() {
    let mut sim = Sim::new(scheduler_config(8, 64, 64), kv_config(32, 4, &full()));
    let source = sim.add(&[1; 8], 5).unwrap();
    sim.step(false, None);
    sim.fork(source, Some(8), &[9]).unwrap();
    let output = sim.scheduler.schedule();
    assert_eq!((output.rows.len(), output.copies.len()), (2, 0));
    assert_eq!(sim.scheduler.stats().blocks_used, 2 + 2);
}

#[test]
fn a_child_without_tokens_of_its_own_computes_the_last_one_again() {
    let mut sim = Sim::new(scheduler_config(8, 64, 64), kv_config(32, 4, &full()));
    let source = sim.add(&[1; 8], 5).unwrap();
    sim.step(false, None);
    let child = sim.fork(source, Some(8), &[]).unwrap();
    let output = sim.scheduler.schedule();
    let row = output.rows.iter().find(|row| row.request_id == child).unwrap();
    assert_eq!((row.num_computed_tokens, row.num_scheduled_tokens, row.num_outputs), (7, 1, 1));
    // The full block can be found by others, so not even its last holder may write to it.
    assert_eq!(output.copies.len(), 1);
}

#[test]
fn a_child_that_finds_no_place_in_the_batch_waits_without_blocks_and_hits_the_prefix() {
    let mut sim = Sim::new(scheduler_config(1, 64, 64), kv_config(32, 4, &full()));
    let source = sim.add(&[1; 9], 5).unwrap();
    sim.step(false, None);
    let child = sim.fork(source, None, &[7]).unwrap();
    assert_eq!(sim.scheduler.status(child), Some(RequestStatus::Waiting));
    assert_eq!(sim.scheduler.stats().blocks_shared, 0);
    sim.drain();
    assert!(sim.scheduler.stats().prefix_hit_tokens >= 8);
}

#[test]
fn a_child_waits_when_a_window_has_left_the_place_of_the_cut() {
    let mut sim = Sim::new(scheduler_config(4, 64, 200), kv_config(32, 4, &[Some(5), None]));
    let source = sim.add(&[1; 40], 5).unwrap();
    sim.step(false, None);
    let early = sim.fork(source, Some(10), &[]).unwrap();
    let late = sim.fork(source, Some(40), &[7]).unwrap();
    assert_eq!(sim.scheduler.status(early), Some(RequestStatus::Waiting));
    assert_eq!(sim.scheduler.status(late), Some(RequestStatus::Running));
    sim.drain();
}

#[test]
fn what_cannot_be_forked_is_refused_with_the_numbers() {
    let mut sim = Sim::new(scheduler_config(4, 64, 16), kv_config(32, 4, &full()));
    let source = sim.add(&[1; 8], 5).unwrap();
    let message = |sim: &mut Sim, source, cut, more: &[u32]| sim.fork(source, cut, more).unwrap_err().to_string();
    assert!(message(&mut sim, source, Some(9), &[]).contains("has 8 tokens and cannot be cut to 9: ask for 1 to 8"));
    assert!(message(&mut sim, source, Some(0), &[1]).contains("cannot be cut to 0"));
    assert!(message(&mut sim, source, None, &[1; 8]).contains("the context length is 16"));
    let child = |id| ForkRequest::new(RequestId(id), 1);
    let unknown = sim.scheduler.fork(RequestId(77), child(78)).unwrap_err();
    assert_eq!(unknown, ForkError::UnknownSource { source_id: RequestId(77) });
    let taken = sim.scheduler.fork(source, child(source.0)).unwrap_err();
    assert!(matches!(taken, ForkError::Child(AdmissionError::DuplicateRequest { .. })));
    let output = sim.scheduler.schedule();
    let in_flight = sim.scheduler.fork(source, child(50)).unwrap_err();
    assert_eq!(in_flight, ForkError::StepInFlight { source_id: source, step_id: output.step_id });
}

/// Two holders of every block and not one free: the child leaves, and the source writes in place.
#[test]
fn sharers_of_a_full_pool_make_progress() {
    for windows in [full(), vec![Some(64), None]] {
        let num_groups = KvGroups::from_layers(&windows).groups.len();
        let mut sim = Sim::new(scheduler_config(4, 64, 64), kv_config(2 * num_groups, 4, &windows));
        let source = sim.add(&[1, 2, 3, 4, 5, 6], 2).unwrap();
        sim.step(false, None);
        let child = sim.fork(source, Some(6), &[9]).unwrap();
        assert_eq!(sim.scheduler.pool().num_free_blocks(), 0);
        assert_eq!(sim.step(false, None), StepResult::Done);
        assert_eq!(sim.scheduler.status(child), Some(RequestStatus::Preempted));
        sim.drain();
        assert_eq!(sim.ended.len(), 2);
    }
}

/// One block is missing for the copies of two groups: no table changes, nothing is taken, nothing is to be copied.
#[test]
fn a_write_that_cannot_be_copied_for_changes_nothing() {
    let groups = KvGroups::from_layers(&[Some(64), None]);
    let mut manager = KvCacheManager::new(5, 4, groups, BlockHasher::new([0; 32]), true);
    let (mut parent, mut child) = (RequestBlocks::new(2, 0), RequestBlocks::new(2, 0));
    let mut copies = Vec::new();
    manager.allocate_slots(&mut parent, 0, 6, &mut copies).unwrap();
    manager.commit(&mut parent, &[1; 6], CacheKey::new(b""), 6);
    assert!(manager.share_blocks(&parent, &mut child, 6));
    let before: Vec<_> = (0..2).map(|group| child.table(group).to_vec()).collect();
    let error = manager.allocate_slots(&mut child, 6, 7, &mut copies).unwrap_err();
    assert_eq!(error, PoolError::OutOfBlocks { needed: 2, free: 1 });
    assert!(copies.is_empty());
    assert_eq!((0..2).map(|group| child.table(group).to_vec()).collect::<Vec<_>>(), before);
    assert_eq!(manager.pool().num_free_blocks(), 1);
    manager.check_integrity([&parent, &child].into_iter()).unwrap();
}

/// Its last token was sampled when the pool had no block left for it, and then it lost its blocks to an urgent fork.
#[test]
fn who_comes_back_longer_than_the_pool_ends_with_length() {
    let mut sim = Sim::new(scheduler_config(2, 5, 8), kv_config(15, 1, &[Some(4), None, Some(6)]));
    let request = sim.add_request(NewRequest { priority: 1, ..NewRequest::new(RequestId(0), vec![1; 5], 2) }, &Owner::default());
    sim.step(false, None);
    sim.fork(request.unwrap(), Some(5), &[]).unwrap();
    sim.drain();
    assert!(sim.finished.iter().all(|finished| finished.1 == FinishReason::Length));
    assert_eq!(sim.finished.len(), 2);
}

//! What may happen while a step is in flight, and what a step that fails leaves behind.

use paged::*;

use crate::common::{Meanwhile, Sim, kv_config, scheduler_config};

/// A source of six tokens in blocks of four and its fork, which is about to copy the partial block.
fn about_to_copy() -> (Sim, RequestId, RequestId) {
    let mut sim = Sim::new(scheduler_config(4, 64, 64), kv_config(8, 4, &[None]));
    let source = sim.add(&[1, 2, 3, 4, 5, 6], 4).unwrap();
    sim.step(false, None);
    let child = sim.fork(source, Some(6), &[9]).unwrap();
    (sim, source, child)
}

/// Copies are part of the step: when it fails, nobody knows whether they were made.
#[test]
fn a_copy_of_a_step_that_failed_is_never_found() {
    for meanwhile in [None, Some(Meanwhile::Abort(0)), Some(Meanwhile::Keep(0)), Some(Meanwhile::Keep(1))] {
        let (mut sim, ..) = about_to_copy();
        sim.step(true, meanwhile);
        assert_eq!(sim.scheduler.num_running(), 0);
        sim.add(&[1, 2, 3, 4, 5, 6, 7], 4).unwrap();
        sim.drain();
    }
}

#[test]
fn a_request_kept_in_flight_has_what_was_committed() {
    let (mut sim, source, child) = about_to_copy();
    sim.step(false, Some(Meanwhile::Keep(0)));
    assert_eq!(sim.scheduler.num_computed_tokens(source).unwrap().0, 6);
    assert_eq!(sim.scheduler.num_computed_tokens(child).unwrap().0, 7);
    sim.drain();
}

#[test]
fn a_reset_in_flight_lets_the_step_end_and_publishes_none_of_it() {
    let (mut sim, ..) = about_to_copy();
    sim.step(false, Some(Meanwhile::Reset));
    sim.add(&[1, 2, 3, 4, 5, 6, 7], 4).unwrap();
    sim.step(false, None);
    assert_eq!(sim.scheduler.stats().prefix_hit_tokens, 0);
    sim.drain();
}

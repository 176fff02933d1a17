//! Every short script over small pools: nothing hangs, nobody is lost, no KV is misread.

use crate::common::{Meanwhile, Sim, kv_config, scheduler_config};

// Longer orders, without the shadow: see state_space.rs.
const DEPTH: u32 = 4;
const NUM_OPS: u32 = 9;

fn apply(sim: &mut Sim, op: u32) {
    match op {
        0 => {
            sim.step(false, None);
        }
        1 => {
            let _ = sim.add(&[1, 2, 3], 3);
        }
        2 => {
            let _ = sim.add(&[1, 2, 3, 4, 5], 4);
        }
        3 => {
            let _ = sim.add(&[1, 2, 9], 6);
        }
        4 => {
            if let Some(request_id) = sim.pick(0) {
                sim.abort(request_id);
            }
        }
        5 => {
            if let Some(source) = sim.pick(0) {
                let _ = sim.fork(source, None, &[8]);
            }
        }
        6 => {
            // Keeps one, then forks it and lets it go.
            if let Some(source) = sim.pick_kept(0) {
                let _ = sim.fork(source, None, &[8]);
                sim.release(source);
            } else if let Some(request_id) = sim.pick(0) {
                sim.keep(request_id);
            }
        }
        7 => {
            sim.step(false, Some(Meanwhile::Abort(1)));
        }
        _ => {
            sim.step(true, None);
        }
    }
}

/// All scripts of `DEPTH` operations after two requests, each then drained; where there are drafts, with others each.
fn run_all(num_blocks: usize, block_size: usize, windows: &[Option<usize>], budget: usize, drafts: bool) {
    for script in 0..NUM_OPS.pow(DEPTH) {
        let mut sim = Sim::new(scheduler_config(3, budget, 9), kv_config(num_blocks, block_size, windows));
        if drafts {
            sim.draft(u64::from(script));
        }
        let _ = sim.add(&[1, 2, 3, 4], 4);
        let _ = sim.add(&[1, 2, 3], 3);
        let mut rest = script;
        for _ in 0..DEPTH {
            apply(&mut sim, rest % NUM_OPS);
            rest /= NUM_OPS;
        }
        sim.drain();
    }
}

#[test]
fn pools_of_one_block() {
    run_all(1, 4, &[None], 3, false);
}

#[test]
fn pools_of_three_blocks() {
    run_all(3, 2, &[None], 3, false);
}

#[test]
fn pools_of_five_blocks() {
    run_all(5, 2, &[None], 8, false);
}

#[test]
fn windowed_pools() {
    run_all(3, 2, &[Some(3)], 4, false);
}

#[test]
fn mixed_pools() {
    run_all(8, 2, &[Some(3), None], 4, false);
}

#[test]
fn pools_with_drafts() {
    run_all(3, 2, &[None], 5, true);
}

#[test]
fn mixed_pools_with_drafts() {
    run_all(8, 2, &[Some(3), None], 6, true);
}

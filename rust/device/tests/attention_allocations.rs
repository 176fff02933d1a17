//! Attention, rotation and the write of K and V allocate nothing once their buffers have grown.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering},
};

use device::{
    AttentionArgs, AttentionParams, Device, KvCacheSpec, KvDType, KvGroupMetadata, KvShape, Phases, Precision, RopeArgs,
    RopeStyle, RopeTable, StepMetadata,
    cpu::{CpuBackend, Isa},
};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(p, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One request: `queries` tokens, the last of `len`, in blocks one after the other.
fn step(len: u32, queries: u32) -> StepMetadata {
    let positions: Vec<u32> = (len - queries..len).collect();
    let slot_mapping = positions.iter().map(|&p| i64::from(p) + 32).collect();
    StepMetadata {
        rope_positions: positions.clone(),
        positions,
        query_start_loc: vec![0, queries],
        seq_lens: vec![len],
        groups: vec![KvGroupMetadata { block_tables: (1..101).collect(), max_blocks: 100, slot_mapping }],
        state_slots: Vec::new(),
        adapters: Vec::new(),
        span_ends: Vec::new(),
    }
}

#[test]
fn a_step_allocates_nothing_once_its_buffers_have_grown() {
    let backend = CpuBackend::new(Isa::detect(), 3).unwrap();
    let spec = KvCacheSpec::uniform((101, 32), KvDType::F16, KvShape::new(2, 64), 1).unwrap();
    let cache = backend.alloc_kv_cache(&spec).unwrap();
    let params = AttentionParams::new([6, 2, 64], Precision::Fast);
    let [mut q, mut out] = [(); 2].map(|()| backend.alloc(300, 384).unwrap());
    let [mut k, mut v] = [(); 2].map(|()| backend.alloc(300, 128).unwrap());
    let rope =
        RopeTable { style: RopeStyle::Neox, rotary_dim: 64, cos: vec![1.0; 3200 * 32].into(), sin: vec![0.0; 3200 * 32].into() };
    let mut run = |step: &StepMetadata| {
        let rows = step.positions.len();
        for t in [&mut q, &mut k, &mut v] {
            t.set_rows(rows);
            t.as_mut_slice().fill(0.5);
        }
        backend.rope_and_cache(RopeArgs::new(&mut q, Some((&mut k, Some(&mut v))), Some(&rope), (&cache, 0)), step);
        backend.attention(AttentionArgs { q: &q, out: &mut out, cache: &cache, layer: 0, sinks: None, params, next: None }, step);
        assert!(out.as_slice().iter().all(|x| x.is_finite()));
    };
    // Many queries make the most items; one query over many keys the most partial results.
    let steps = [step(300, 300), step(3200, 1), step(3200, 300), step(900, 20), step(10, 1)];
    for step in &steps {
        // A thread allocates once when it starts, which may be late: let it.
        for _ in 0..50 {
            run(step);
        }
    }
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    for step in &steps {
        run(step);
    }
    assert_eq!(ALLOCATIONS.load(Ordering::Relaxed), before, "allocations in a step");
}

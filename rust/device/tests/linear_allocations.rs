//! A step allocates nothing once its buffers have grown.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    sync::atomic::{AtomicUsize, Ordering},
};

use device::{
    Activation, DType, GateUpArgs, GgmlType, Linear, LinearOptions, Norm, NormKind, Precision, Projection, ResidualArgs, Tensor,
    TokenSet, WeightView,
    cpu::{
        Isa, ThreadPool,
        linear::{CpuLinear, LinearContext, LinearScratch, gate_up, greedy_tokens, linear_residual, norm_linear},
    },
    mmap::Bytes,
};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Whether this thread's allocations count: those of the pool do, not those of the test harness.
    static COUNTED: Cell<bool> = const { Cell::new(false) };
}

// SAFETY: every call is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if COUNTED.get() {
            ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        }
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

#[test]
fn a_step_allocates_nothing_once_its_buffers_have_grown() {
    let pool = ThreadPool::new(2).expect("a thread pool");
    pool.run(&|_| COUNTED.set(true));
    let context = LinearContext { pool: &pool, isa: Isa::detect(), adapters: &[] };
    let norm = Norm { kind: NormKind::Rms, weight: vec![1.0; 128].into(), bias: None, eps: 1e-5 };
    for precision in [Precision::Exact, Precision::Fast] {
        let weight = |rows| {
            let dtype = DType::Ggml(GgmlType::Q4_1);
            let bytes = Bytes::from_vec(vec![0x31; rows * 128 / 32 * 20]);
            let view = WeightView::new(dtype, rows, 128, bytes).expect("a valid weight");
            let options = LinearOptions { name: "w".to_owned(), precision, bias: Some(vec![0.5; rows]) };
            Linear::from(CpuLinear::new(&view, &options, context.isa, &pool).expect("a linear layer"))
        };
        let lm_head = {
            // One row has an outlier.
            let mut bytes = vec![0x31; 512 * 128 / 32 * 34];
            bytes[7 * 128 / 32 * 34..8 * 128 / 32 * 34].fill(0x33);
            let bytes = Bytes::from_vec(bytes);
            let view = WeightView::new(DType::Ggml(GgmlType::Q8_0), 512, 128, bytes).expect("a valid weight");
            let options = LinearOptions { name: "w".to_owned(), precision, bias: None };
            Linear::from(CpuLinear::lm_head(&view, &options, context.isa, &pool).expect("a linear layer"))
        };
        let (q, o, gate, up) = (weight(128), weight(128), weight(320), weight(320));
        let mut scratch = LinearScratch::default();
        let tensor = |cols| Tensor::new(40, cols).expect("memory");
        let (mut x, mut query, mut wide, mut tokens) = (tensor(128), tensor(128), tensor(320), Vec::new());
        let mask = TokenSet::new((0..512).step_by(7), 512);
        let all_masks = [Some(mask.mask()); 40];
        let mut step = |rows: usize, masked: bool| {
            x.set_rows(rows);
            x.as_mut_slice().fill(0.25);
            norm_linear(context, &mut scratch, &x, Some(&norm), &mut [Projection { linear: &q, out: &mut query }]);
            let args = ResidualArgs { x: &query, linear: &o, post_norm: Some(&norm), scale: 1.0, residual: &mut x };
            linear_residual(context, &mut scratch, args);
            let (norm, activation) = (Some(&norm), Activation::Silu);
            gate_up(
                context,
                &mut scratch,
                GateUpArgs { x: &x, norm, gate: Some(&gate), up: &up, activation, out: &mut wide, next: None },
            );
            let masks = &all_masks[..if masked { rows } else { 0 }];
            let found = greedy_tokens(context, &mut scratch, &x, norm, &lm_head, masks, &mut tokens);
            let searches = precision == Precision::Fast && context.isa >= Isa::Avx2;
            assert!(
                if found { tokens.len() == rows && tokens.iter().all(|token| *token == 7) } else { rows > 1 || !searches },
                "{found}, {tokens:?}"
            );
        };
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        // Kernels of many rows have other buffers than those of few.
        step(40, true);
        step(23, false);
        step(1, true);
        assert_ne!(ALLOCATIONS.load(Ordering::Relaxed), before, "the first steps grow buffers, and that is counted");
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        for rows in [1, 40, 7, 33] {
            step(rows, false);
            step(rows, true);
        }
        assert_eq!(ALLOCATIONS.load(Ordering::Relaxed), before, "allocations in a {precision:?} step");
    }
}

//! What `make bench-gpu` times runs, and reads what it says it reads.

use device::{
    DType, GgmlType, KvDType,
    cuda::timing::{GpuTimer, TimedWork},
};
use kernel_tests::{Order, driver};

const ATTENTION: TimedWork = TimedWork::Attention {
    batch: 2,
    context: 20,
    num_kv_heads: 1,
    queries_per_kv: 2,
    head_dim: 64,
    cache: KvDType::BF16,
    block_size: 8,
};

#[test]
fn copies_attention_and_products_are_timed() {
    let timer = GpuTimer::new(driver(Order::Ascending), 4096).unwrap();
    let linear = |rows, format| TimedWork::Linear { rows, out_features: 8, in_features: 256, format };
    let works = [TimedWork::Copy { bytes: 1 << 20 }, ATTENTION, linear(1, DType::BF16), linear(3, DType::Ggml(GgmlType::Q4K))];
    for work in works {
        let seconds = timer.seconds(&work, 2).unwrap();
        assert!(seconds.len() == 2 && seconds.iter().all(|s| *s > 0.0 && *s < 10.0), "{work:?}: {seconds:?}");
    }
}

#[test]
fn what_no_kernel_does_is_refused() {
    let timer = GpuTimer::new(driver(Order::Ascending), 4096).unwrap();
    let TimedWork::Attention { batch, context, num_kv_heads, queries_per_kv, cache, block_size, .. } = ATTENTION else {
        unreachable!()
    };
    let work = TimedWork::Attention { batch, context, num_kv_heads, queries_per_kv, head_dim: 72, cache, block_size };
    assert!(timer.seconds(&work, 1).unwrap_err().to_string().contains("72"));
    let work = TimedWork::Linear { rows: 1, out_features: 8, in_features: 100, format: DType::Ggml(GgmlType::Q4K) };
    assert!(timer.seconds(&work, 1).unwrap_err().to_string().contains("100 columns of Q4_K"));
}

//! Speed of paged attention: GB/s of keys and values in decode, GFLOP/s in prefill. Shape: 9 heads, 3 KV heads, `head_dim` 64.
//!
//! `cargo run --release -p mistral-paged-device --example bench_attention [threads] [tier] [dtype]`

use std::time::Instant;

use device::{
    AttentionArgs, AttentionParams, Backend, DeviceError, KvCacheSpec, KvDType, KvGroupMetadata, KvPlace, KvSide, StepMetadata,
    cpu::{CpuBackend, CpuTier},
    num_physical_cores,
};

const NUM_PLANES: usize = 30;
const BLOCK_SIZE: usize = 32;

/// A step of `num_reqs` requests of `queries` queries each, the last ones of `len` tokens.
fn step(num_reqs: usize, queries: usize, len: usize) -> StepMetadata {
    let max_blocks = len.div_ceil(BLOCK_SIZE);
    let group =
        KvGroupMetadata { block_tables: (1..=(num_reqs * max_blocks) as u32).collect(), max_blocks, slot_mapping: vec![] };
    let positions: Vec<u32> = (0..num_reqs).flat_map(|_| (len - queries..len).map(|p| p as u32)).collect();
    StepMetadata {
        rope_positions: positions.clone(),
        positions,
        query_start_loc: (0..=num_reqs).map(|r| (r * queries) as u32).collect(),
        seq_lens: vec![len as u32; num_reqs],
        groups: vec![group],
    }
}

/// Seconds that the attention of all layers takes, the best of several runs: other programs on the machine only make it slower.
fn measure(backend: &CpuBackend, dtype: KvDType, step: &StepMetadata) -> Result<f64, DeviceError> {
    let params = AttentionParams { num_heads: 9, num_kv_heads: 3, head_dim: 64, scale: 0.125, window: None, softcap: None };
    let num_blocks = step.groups[0].block_tables.len() + 1;
    let spec = KvCacheSpec { num_blocks, block_size: BLOCK_SIZE, num_kv_heads: 3, head_dim: 64, num_planes: NUM_PLANES, dtype };
    let cache = backend.alloc_kv_cache(&spec)?;
    for (plane, slot, head) in (0..NUM_PLANES).flat_map(|p| (0..BLOCK_SIZE).flat_map(move |s| (0..3).map(move |h| (p, s, h)))) {
        let values: [f32; 64] = std::array::from_fn(|i| ((slot * 7 + i * 13 + head) % 101) as f32 * 0.01 - 0.5);
        for side in [KvSide::Key, KvSide::Value] {
            cache.write(side, KvPlace { plane, slot, head }, &values);
        }
    }
    let copies: Vec<_> = (1..num_blocks as u32).map(|block| (0, block)).collect();
    backend.copy_blocks(&cache, &copies);
    let num_tokens = step.positions.len();
    let (mut q, mut out) = (backend.alloc(num_tokens, 576)?, backend.alloc(num_tokens, 576)?);
    q.set_rows(num_tokens);
    q.as_mut_slice().iter_mut().enumerate().for_each(|(i, x)| *x = (i % 37) as f32 * 0.05 - 0.9);
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        let start = Instant::now();
        for plane in 0..NUM_PLANES {
            backend.attention(AttentionArgs { q: &q, out: &mut out, cache: &cache, plane, group: 0, params }, step);
        }
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let threads = args.next().map_or(Ok(num_physical_cores()), |n| n.parse())?;
    let tier = args.next().map_or(Ok(CpuTier::detect()), |name| CpuTier::parse(&name))?;
    let backend = CpuBackend::new(tier, threads)?;
    println!("{:?}", backend.info());
    let only = args.next();
    for dtype in KvDType::ALL.into_iter().filter(|d| only.as_ref().is_none_or(|o| format!("{d:?}").eq_ignore_ascii_case(o))) {
        for (num_reqs, len) in [(1, 128), (1, 1024), (1, 8192), (8, 8192)] {
            let seconds = measure(&backend, dtype, &step(num_reqs, 1, len))?;
            let bytes = (num_reqs * len * NUM_PLANES * 2 * 3 * (64 * dtype.element_bytes() + dtype.scale_bytes())) as f64;
            println!("decode {dtype:?} {num_reqs} x {len}: {:.2} ms, {:.1} GB/s", seconds * 1e3, bytes / seconds * 1e-9);
        }
        for len in [64, 1400, 4096] {
            let seconds = measure(&backend, dtype, &step(1, len, len))?;
            let flop = (len * (len + 1) / 2 * 9 * 64 * 4 * NUM_PLANES) as f64;
            println!("prefill {dtype:?} {len}: {:.1} ms, {:.0} GFLOP/s", seconds * 1e3, flop / seconds * 1e-9);
        }
    }
    Ok(())
}

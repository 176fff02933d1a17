//! Speed of paged attention beside the read bandwidth of memory in the same run: GB/s of keys and values in decode, GFLOP/s in
//! prefill.
//!
//! `cargo run --release -p mistral-paged-device --example bench_attention [-- KEY=VALUE ...]` with `threads`, `tier`, `dtype`,
//! `shape` (KV heads x query heads of each x `head_dim`, such as 3x3x64), `phase` (decode, prefill) and `rounds`; what is not
//! given runs for all its values. Calls of decode alternate with reads of as many bytes of a buffer that no cache holds, and so
//! do the planes that they read.

use std::time::Instant;

use device::{
    AttentionArgs, AttentionParams, CacheEngine, Device, DeviceError, KvCacheSpec, KvDType, KvGroupMetadata, KvPlace, KvShape,
    KvSide, Phases, Precision, StepMetadata, Tensor,
    cpu::{CpuBackend, Isa, roofline::ReadBuffer},
    num_physical_cores,
};

/// What is streamed before anything is read again: several times the last-level cache of most machines.
const STREAMED_BYTES: usize = 320 << 20;
const BLOCK_SIZE: usize = 32;
/// Planes at most: the layers of a model.
const LAYERS: usize = 30;
/// (KV heads, query heads of each, `head_dim`). The first is SmolLM2-135M's, the last but one gemma-3-270m's.
const SHAPES: [(usize, usize, usize); 8] =
    [(3, 3, 64), (8, 1, 64), (4, 4, 64), (4, 8, 64), (4, 1, 128), (4, 4, 128), (1, 4, 256), (2, 8, 128)];

type Error = Box<dyn std::error::Error>;

struct Options {
    threads: usize,
    isa: Isa,
    rounds: usize,
    dtype: Option<String>,
    shape: Option<String>,
    phase: Option<String>,
}

fn options() -> Result<Options, Error> {
    let mut options =
        Options { threads: num_physical_cores(), isa: Isa::detect(), rounds: 5, dtype: None, shape: None, phase: None };
    for argument in std::env::args().skip(1) {
        match argument.split_once('=') {
            Some(("threads", n)) => options.threads = n.parse()?,
            Some(("tier", name)) => options.isa = Isa::parse(name)?,
            Some(("rounds", n)) => options.rounds = n.parse()?,
            Some(("dtype", name)) => options.dtype = Some(name.to_lowercase()),
            Some(("shape", shape)) => options.shape = Some(shape.to_owned()),
            Some(("phase", phase)) => options.phase = Some(phase.to_owned()),
            _ => return Err(format!("`{argument}`: threads, tier, rounds, dtype, shape and phase take =VALUE").into()),
        }
    }
    Ok(options)
}

/// A step of `num_reqs` requests of `queries` queries each, the last ones of `len` tokens, in the blocks of set `set`.
fn step(num_reqs: usize, queries: usize, len: usize, set: usize) -> StepMetadata {
    let max_blocks = len.div_ceil(BLOCK_SIZE);
    let first = 1 + (set * num_reqs * max_blocks) as u32;
    let block_tables = (first..first + (num_reqs * max_blocks) as u32).collect();
    let group = KvGroupMetadata { block_tables, max_blocks, slot_mapping: vec![] };
    let positions: Vec<u32> = (0..num_reqs).flat_map(|_| (len - queries..len).map(|p| p as u32)).collect();
    StepMetadata {
        state_slots: Vec::new(),
        adapters: Vec::new(),
        span_ends: Vec::new(),
        rope_positions: positions.clone(),
        positions,
        query_start_loc: (0..=num_reqs).map(|r| (r * queries) as u32).collect(),
        seq_lens: vec![len as u32; num_reqs],
        groups: vec![group],
    }
}

/// A cache that holds `num_sets` sets of the blocks of `step`, and its queries.
struct Case {
    num_sets: usize,
    params: AttentionParams,
    cache: CacheEngine,
    q: Tensor,
    out: Tensor,
}

impl Case {
    fn new(
        backend: &CpuBackend,
        (num_kv_heads, queries_per_kv, head_dim): (usize, usize, usize),
        dtype: KvDType,
        step: &StepMetadata,
        streamed: usize,
    ) -> Result<Self, DeviceError> {
        let num_heads = num_kv_heads * queries_per_kv;
        let params = AttentionParams::new([num_heads, num_kv_heads, head_dim], Precision::Fast);
        let num_blocks = step.groups[0].block_tables.len();
        let shape = KvShape::new(num_kv_heads, head_dim);
        let spec = |num_blocks, num_layers| KvCacheSpec::uniform((num_blocks, BLOCK_SIZE), dtype, shape, num_layers);
        let layer_bytes = spec(num_blocks, 1)?.total_bytes().map_or(0, |bytes| bytes as usize);
        let num_layers = streamed.div_ceil(layer_bytes).min(LAYERS);
        let num_sets = streamed.div_ceil(layer_bytes * num_layers);
        let spec = spec(num_sets * num_blocks + 1, num_layers)?;
        let cache = backend.alloc_kv_cache(&spec)?;
        for (layer, slot) in (0..num_layers).flat_map(|l| (0..BLOCK_SIZE).map(move |s| (l, s))) {
            for head in 0..num_kv_heads {
                let values: Vec<f32> = (0..head_dim).map(|i| ((slot * 7 + i * 13 + head) % 101) as f32 * 0.01 - 0.5).collect();
                for side in [KvSide::Key, KvSide::Value] {
                    cache.write(side, KvPlace { layer, slot, head }, &values);
                }
            }
        }
        let copies: Vec<_> = (1..spec.num_blocks as u32).map(|block| (0, block)).collect();
        cache.copy_blocks(&copies);
        let num_tokens = step.positions.len();
        let [mut q, out] = [backend.alloc(num_tokens, num_heads * head_dim)?, backend.alloc(num_tokens, num_heads * head_dim)?];
        q.set_rows(num_tokens);
        q.as_mut_slice().iter_mut().enumerate().for_each(|(i, x)| *x = (i % 37) as f32 * 0.05 - 0.9);
        Ok(Self { num_sets, params, cache, q, out })
    }

    /// Seconds of one call.
    fn seconds(&mut self, backend: &CpuBackend, step: &StepMetadata, layer: usize) -> f64 {
        let (cache, params) = (&self.cache, self.params);
        let start = Instant::now();
        backend.attention(AttentionArgs { q: &self.q, out: &mut self.out, cache, layer, sinks: None, params, next: None }, step);
        start.elapsed().as_secs_f64()
    }
}

/// The median, and the best.
fn summary(mut seconds: Vec<f64>) -> (f64, f64) {
    seconds.sort_by(f64::total_cmp);
    (seconds[seconds.len() / 2], seconds[0])
}

fn decode(options: &Options, backend: &CpuBackend, shape: (usize, usize, usize), dtype: KvDType) -> Result<(), Error> {
    let mut buffer = ReadBuffer::new(STREAMED_BYTES)?;
    for (num_reqs, len) in [(1, 128), (1, 512), (1, 2048), (1, 8192), (8, 128), (8, 1024), (8, 8192)] {
        let mut case = Case::new(backend, shape, dtype, &step(num_reqs, 1, len, 0), STREAMED_BYTES)?;
        let steps: Vec<_> = (0..case.num_sets).map(|set| step(num_reqs, 1, len, set)).collect();
        let vector = shape.2 * dtype.element_bytes() + dtype.scale_bytes();
        let bytes = num_reqs * len * 2 * shape.0 * vector;
        let (mut calls, mut reads) = (vec![], vec![]);
        for _ in 0..options.rounds {
            for (step, layer) in steps.iter().flat_map(|s| (0..LAYERS).map(move |l| (s, l))) {
                if layer >= case.cache.spec().layers.len() {
                    continue;
                }
                calls.push(case.seconds(backend, step, layer));
                reads.push(buffer.read(backend.pool(), options.isa, bytes));
            }
        }
        let (call, read) = (summary(calls), summary(reads));
        let rate = |seconds: f64| bytes as f64 / seconds * 1e-9;
        println!(
            "decode {:?} {}x{}x{} {num_reqs} x {len}: {:.1} us, {:.1} GB/s, {:.2} of reading ({:.1} GB/s); best {:.1} and {:.1} GB/s",
            dtype,
            shape.0,
            shape.1,
            shape.2,
            call.0 * 1e6,
            rate(call.0),
            read.0 / call.0,
            rate(read.0),
            rate(call.1),
            rate(read.1)
        );
    }
    Ok(())
}

fn prefill(options: &Options, backend: &CpuBackend, shape: (usize, usize, usize), dtype: KvDType) -> Result<(), Error> {
    for len in [64, 256, 1420, 4096] {
        let step = step(1, len, len, 0);
        let mut case = Case::new(backend, shape, dtype, &step, 1)?;
        let calls = 2 + (options.rounds * 4096 * 256) / (len * len);
        let (median, best) = summary((0..calls.min(200)).map(|_| case.seconds(backend, &step, 0)).collect());
        let flop = (len * (len + 1) / 2 * shape.0 * shape.1 * shape.2 * 4) as f64;
        let rate = |seconds: f64| flop / seconds * 1e-9;
        println!(
            "prefill {dtype:?} {}x{}x{} {len}: {:.2} ms, {:.0} GFLOP/s, best {:.0}",
            shape.0,
            shape.1,
            shape.2,
            median * 1e3,
            rate(median),
            rate(best)
        );
    }
    Ok(())
}

fn main() -> Result<(), Error> {
    let options = options()?;
    let wants = |wanted: &Option<String>, name: &str| wanted.as_ref().is_none_or(|wanted| wanted == name);
    let backend = CpuBackend::new(options.isa, options.threads)?;
    println!("{:?}", backend.info());
    for shape in SHAPES.into_iter().filter(|s| wants(&options.shape, &format!("{}x{}x{}", s.0, s.1, s.2))) {
        for dtype in KvDType::ALL.into_iter().filter(|d| wants(&options.dtype, &format!("{d:?}").to_lowercase())) {
            if wants(&options.phase, "decode") {
                decode(&options, &backend, shape, dtype)?;
            }
            if wants(&options.phase, "prefill") {
                prefill(&options, &backend, shape, dtype)?;
            }
        }
    }
    Ok(())
}

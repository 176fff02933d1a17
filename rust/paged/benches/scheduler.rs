//! What the books cost: blocks, lookups, hashes and steps. Each figure that is promised a bound is a benchmark here.

use std::hint::black_box;
use std::slice;
use std::time::{Duration, Instant};

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use paged::{
    BlockHasher, BlockPool, CacheKey, HashInput, KvCacheConfig, KvCacheManager, KvGroups, NewRequest, RequestBlocks, RequestId,
    Scheduler, SchedulerConfig, SchedulerOutput,
};

const POOL: u32 = 1_000_000;
const BLOCK_SIZE: usize = 16;
const CHUNK: usize = 1024;

fn new_pool() -> BlockPool {
    BlockPool::new(POOL, BLOCK_SIZE, vec![true], BlockHasher::new([7; 32]))
}

/// Blocks of a pool of a million, in the order of the pool: handed out and given back.
fn blocks(c: &mut Criterion) {
    let mut group = c.benchmark_group("pool of 1M blocks");
    group.throughput(Throughput::Elements(u64::from(POOL)));
    group.sample_size(10);
    group.bench_function("allocate", |b| {
        b.iter_batched_ref(
            || (new_pool(), Vec::with_capacity(POOL as usize)),
            |(pool, out)| pool.get_new_blocks(POOL as usize, out).unwrap(),
            BatchSize::PerIteration,
        );
    });
    group.bench_function("free", |b| {
        b.iter_batched_ref(
            || {
                let (mut pool, mut out) = (new_pool(), Vec::with_capacity(POOL as usize));
                pool.get_new_blocks(POOL as usize, &mut out).unwrap();
                (pool, out)
            },
            |(pool, out)| out.chunks(CHUNK).for_each(|blocks| pool.free_blocks(blocks).unwrap()),
            BatchSize::PerIteration,
        );
    });
    group.finish();
}

fn prompt(seed: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|position| position.wrapping_mul(2_654_435_761).wrapping_add(seed.wrapping_mul(40_503))).collect()
}

fn scheduler(num_blocks: usize, max_num_seqs: usize) -> Scheduler {
    let kv = KvCacheConfig {
        num_blocks,
        block_size: BLOCK_SIZE,
        groups: KvGroups::from_layers(&[None]),
        enable_prefix_caching: true,
        hash_key: [7; 32],
    };
    Scheduler::new(SchedulerConfig::new(max_num_seqs, 1 << 20, 1 << 20), kv).unwrap()
}

/// One step; each row that samples gets a token of its own.
fn step(scheduler: &mut Scheduler, output: &mut SchedulerOutput, sampled: &mut Vec<(RequestId, u32)>) {
    scheduler.schedule_into(output);
    sampled.clear();
    let samples = output.rows.iter().filter(|row| row.num_outputs > 0);
    sampled.extend(samples.map(|row| (row.request_id, (row.request_id.0 as u32).wrapping_mul(97) + output.step_id as u32)));
    let sampled: Vec<_> = sampled.iter().map(|(id, token)| (*id, slice::from_ref(token))).collect();
    scheduler.update(output, &sampled).unwrap();
}

/// Blocks that are cached and handed out again: what they held is forgotten.
fn evict(c: &mut Criterion) {
    let num_blocks = 1 << 17;
    let mut group = c.benchmark_group("cached blocks");
    group.throughput(Throughput::Elements(num_blocks as u64));
    group.sample_size(10);
    group.bench_function("evict", |b| {
        b.iter_custom(|iters| {
            let mut total = Duration::ZERO;
            for _ in 0..iters {
                let mut manager = KvCacheManager::new(
                    num_blocks as u32,
                    BLOCK_SIZE,
                    KvGroups::from_layers(&[None]),
                    BlockHasher::new([7; 32]),
                    true,
                );
                let tokens = prompt(1, num_blocks * BLOCK_SIZE);
                let (mut blocks, mut copies) = (RequestBlocks::new(1, tokens.len()), Vec::new());
                manager.allocate_slots(&mut blocks, 0, tokens.len(), &mut copies).unwrap();
                let key = CacheKey { identity: b"", salt: b"", num_public_blocks: 0 };
                manager.commit(&mut blocks, &tokens, key, tokens.len());
                manager.free(&mut blocks);
                let mut other = RequestBlocks::new(1, tokens.len());
                let start = Instant::now();
                manager.allocate_slots(&mut other, 0, tokens.len(), &mut copies).unwrap();
                total += start.elapsed();
                black_box(&manager);
            }
            total
        });
    });
    group.finish();
}

/// A prefix of 50k tokens is hashed, looked up and verified: the time a block.
fn lookup(c: &mut Criterion) {
    let num_tokens = 50_000;
    let num_blocks = num_tokens / BLOCK_SIZE;
    let groups = KvGroups::from_layers(&[None]);
    let mut manager = KvCacheManager::new(1 << 17, BLOCK_SIZE, groups, BlockHasher::new([7; 32]), true);
    let key = CacheKey { identity: b"", salt: b"", num_public_blocks: 0 };
    let prompts: Vec<_> = (0..32).map(|seed| prompt(seed, num_tokens)).collect();
    for tokens in &prompts {
        let mut blocks = RequestBlocks::new(1, num_tokens);
        manager.allocate_slots(&mut blocks, 0, num_tokens, &mut Vec::new()).unwrap();
        manager.commit(&mut blocks, tokens, key, num_tokens);
        manager.free(&mut blocks);
    }
    let mut group = c.benchmark_group("prefix of 50k tokens");
    group.throughput(Throughput::Elements(num_blocks as u64));
    let mut turn = 0;
    group.bench_function("lookup, a block", |b| {
        b.iter(|| {
            turn = (turn + 13) % prompts.len();
            let hit = manager.get_computed_blocks(&prompts[turn], key);
            assert!(hit.num_tokens >= num_tokens - BLOCK_SIZE);
            hit
        });
    });
    let hasher = BlockHasher::new([7; 32]);
    let tokens = prompt(1, num_tokens);
    group.bench_function("hash", |b| {
        b.iter(|| {
            let root = hasher.hash(HashInput::Root { identity: b"" });
            tokens.chunks(BLOCK_SIZE).fold(root, |parent, tokens| hasher.hash(HashInput::Block { parent, tokens }))
        });
    });
    group.finish();
}

/// Requests that have their prompts computed, `num_running` in the batch and the others waiting for a seat.
fn decoding(num_running: usize, num_waiting: usize) -> Scheduler {
    let mut scheduler = scheduler(POOL as usize, num_running);
    for id in 0..num_running + num_waiting {
        let new = NewRequest::new(RequestId(id as u64), prompt(id as u32, PROMPT), 1 << 19);
        scheduler.add_request(new).unwrap();
    }
    step(&mut scheduler, &mut SchedulerOutput::default(), &mut Vec::new());
    assert_eq!(scheduler.num_running(), num_running);
    scheduler
}

const PROMPT: usize = 512;
/// Steps that are timed before the sequences start anew, so that they neither end nor fill the pool.
const STEPS: u64 = 1000;

/// A whole step, schedule and update, with so many sequences decoding; and with 4096 more waiting that do not fit.
fn steps(c: &mut Criterion) {
    let mut group = c.benchmark_group("step");
    for (num_running, num_waiting) in [(1, 0), (64, 0), (256, 0), (512, 0), (512, 4096)] {
        group.bench_function(BenchmarkId::new(format!("{num_running} running"), format!("{num_waiting} waiting")), |b| {
            b.iter_custom(|iters| {
                let (mut output, mut sampled) = (SchedulerOutput::default(), Vec::new());
                let mut total = Duration::ZERO;
                let mut left = iters;
                while left > 0 {
                    let mut scheduler = decoding(num_running, num_waiting);
                    let start = Instant::now();
                    for _ in 0..left.min(STEPS) {
                        step(&mut scheduler, &mut output, &mut sampled);
                    }
                    total += start.elapsed();
                    assert_eq!(output.rows.len(), num_running);
                    left -= left.min(STEPS);
                }
                total
            });
        });
    }
    group.finish();
}

criterion_group!(benches, blocks, evict, lookup, steps);
criterion_main!(benches);

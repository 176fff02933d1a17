//! Paged attention.
//!
//! A step's work is cut into items: (request, KV head, tile of query tokens), and for few queries over many keys also a range of
//! *splits* of [`SPLIT_KEYS`] keys. Query heads that share a KV head (GQA) are computed together, so that K and V are read once
//! for all. An item of a few queries has all KV heads where there are items enough: it goes through them tile by tile, and so
//! through whole blocks.
//!
//! ```text
//!                  split 0 (512 keys)        split 1
//! keys        |tile|tile| ... |tile|tile|tile| ...  |       a tile: 32 keys at absolute positions, found through the block table
//! query rows  .--------------------------.
//!   (tokens   | block of up to 8 rows    |   scores [rows, 32] -> weights [rows, 32] -> acc [rows, head_dim]
//!   x heads)  | block                    |   max, sum of each row; merged over splits in order of position
//!             '--------------------------'
//! ```
//!
//! - K lies transposed in its blocks, `[head_dim, block_size]` ([`crate::kv_layout`]): a score is summed over the dimensions in
//!   order, 8 or 16 keys side by side.
//! - K and V are read where they lie, and widened in registers, while a single block of rows needs them (V of whole vectors
//!   only); for more rows a tile is widened once, to `[head_dim, 32]` and `[32, head_dim]` in the first-level cache. Blocks of 8
//!   tokens are put side by side first where a vector has 16 lanes.
//! - Both are prefetched, through the table of the next tile, line after line as they lie ([`ahead`]): in that order the
//!   processor's own prefetchers follow, without which a core has too few reads under way. Where products are fast, prefetches
//!   are dropped unless they come a few at a time, and each is issued twice.
//! - Over a BF16 cache products may be those of pairs ([`product`]): pairs of dimensions for scores, of keys for the sum of
//!   values.
//!
//! An output of a head takes, for each key it sees, `4 * head_dim` floating-point operations, an exponential, and its share of
//! the `2 * head_dim` elements of K and V, which the rows of an item read together: the `queries_per_kv` heads
//! of a decoded token read each pair of them once.
//!
//! Measured on two cores of a Milan (AVX2; `bench_attention`, F16): 8 requests of 8192 keys stream 0.68 to 0.77 of what reading
//! alone does in the same run (heads of 64, 3 a KV head, 18 to 21 GB/s; of 256, 4 a KV head, 0.73 to 0.78) in quiet minutes, 0.54
//! to 0.59 beside neighbours, since a core alone makes 17 GB/s. A prompt of 1420 tokens computes at 90 to 110 GFLOP/s.
//!
//! Heads of 64, 3 a KV head, over BF16: on two cores of a Zen 5 1 and 8 requests of 8192 keys stream 0.73 to 0.82 of reading (32
//! to 37 GB/s) while its memory gives 42 to 50 GB/s, 0.65 to 0.73 (45 to 53) while it gives 70 and more, and a prompt computes at
//! 470 to 520 GFLOP/s as pairs (F16: 240 to 330). On two of a Zen 4, before each prefetch was issued twice, 1 request of 2048 and
//! 8192 keys and 8 of 1024 and 8192 streamed 0.77 to 0.88 (27 to 30 GB/s).
//!
//! What a query row computes does not depend on how the work is cut: keys go through tiles of [`TILE_KEYS`] and splits whose
//! bounds are absolute positions, a row visits exactly the tiles that hold keys it sees, and the results of its splits are merged
//! in order of position. So the output is the same, bit for bit, alone or in a batch, in one chunk or many, on any number of
//! threads and for any block size; but with AMX and [`Precision::Fast`], where items of many rows are computed by tiles of 16
//! bits ([`amx`]) and others are not.

mod accumulate;
mod ahead;
#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(not(target_arch = "x86_64"))]
#[path = "no_amx.rs"]
mod amx;
mod cached;
mod element;
mod kernel;
mod merge;
mod plan;
mod product;
mod score;
mod scratch;
#[cfg(all(test, target_arch = "x86_64"))]
mod tests;
mod tile;

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicUsize, Ordering},
};

use crate::{
    AttentionArgs, AttentionParams, KvCacheSpec, KvDType, KvGroupMetadata, KvLayer, KvShape, KvSide, Mask, Precision,
    StepMetadata, WorkspaceShape, kv_layout::PlaneLayout,
};

#[cfg(target_arch = "x86_64")]
use super::simd::Avx512;
use super::{Isa, ThreadPool, isa::reads_ahead_to_l2, simd::isa_entry};
use amx::{ByTiles, attend_by_tiles, buffer_len, is_for_tiles};
use cached::{AsFloats, Cached};
use element::{BF16, BF16Pair, Element, F8E4M3, F16, F32, Int8};
use kernel::attend_by_vectors;
use merge::merge_rows;
use plan::Plan;
#[cfg(target_arch = "x86_64")]
use product::Pairs;

/// Keys of a tile: what enters the softmax at once.
const TILE_KEYS: usize = 32;
/// Keys of a strip: what lies side by side in blocks of every size.
const STRIP_KEYS: usize = 8;
/// Such strips in a tile.
const STRIPS: usize = TILE_KEYS / STRIP_KEYS;
/// Tokens a block may have.
pub(super) const BLOCK_SIZES: [usize; 3] = [STRIP_KEYS, 2 * STRIP_KEYS, TILE_KEYS];
/// Keys of a split: what has its own softmax state.
const SPLIT_KEYS: usize = 512;
/// Query rows that are computed together at most, sharing loads of keys and values.
const MAX_ROW_BLOCK: usize = 8;
/// Below this estimate of cycles a step is not worth waking other threads.
const SERIAL_CYCLES: usize = 8_000;

/// Everything that the items of one call share.
struct Problem<'a> {
    q: *const f32,
    out: *mut f32,
    keys: *const u8,
    values: *const u8,
    spec: &'a KvCacheSpec,
    layout: PlaneLayout,
    params: AttentionParams,
    /// `[num_heads]`.
    sinks: Option<&'a [f32]>,
    group: &'a KvGroupMetadata,
    span_ends: &'a [u32],
    partials: *mut f32,
    /// Whether the keys are the values too.
    is_latent: bool,
    /// Whether products are those of pairs of bf16 values.
    pairs: bool,
    /// Where keys and values are prefetched to.
    to_l2: bool,
}

// SAFETY: items write disjoint rows and heads of `out` and disjoint ranges of `partials`; the rest is only read.
unsafe impl Sync for Problem<'_> {}

impl Problem<'_> {
    fn queries_per_kv(&self) -> usize {
        self.params.num_heads / self.params.num_kv_heads
    }

    fn first_key(&self, position: usize) -> usize {
        self.params.first_key(position)
    }

    /// Whether two dimensions of a BF16 key lie together.
    fn keys_in_pairs(&self) -> bool {
        self.layout.key_unit_bytes == 2 * BF16::BYTES
    }

    fn end_key(&self, query: (usize, usize), seq_len: usize) -> usize {
        self.params.end_key(query, seq_len, self.span_ends)
    }
}

/// Elements from the start of q or of the output to head `row % queries_per_kv` of token `row / queries_per_kv`.
#[allow(clippy::inline_always)] // ISA code must be inlined.
#[inline(always)]
fn row_offset(problem: &Problem<'_>, kv_head: usize, first_row: usize, row: usize) -> usize {
    let queries_per_kv = problem.queries_per_kv();
    ((first_row + row / queries_per_kv) * problem.params.num_heads + kv_head * queries_per_kv + row % queries_per_kv)
        * problem.params.head_dim
}

/// Sixteen floats on a cache line of their own.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// Cache-line aligned floats that grow to the largest size ever asked for.
#[derive(Default)]
struct Floats(Vec<Line>);

impl Floats {
    fn at_least(&mut self, len: usize) -> *mut f32 {
        let lines = len.div_ceil(16);
        if self.0.len() < lines {
            self.0.resize(lines, Line([0.0; 16]));
        }
        self.0.as_mut_ptr().cast()
    }
}

/// Buffers that live from step to step.
pub(crate) struct AttentionScratch {
    shared: Mutex<(Plan, Floats)>,
    workers: Vec<Mutex<Floats>>,
}

impl AttentionScratch {
    /// Buffers for a pool of `num_threads` workers.
    pub(crate) fn new(num_threads: usize) -> Self {
        Self { shared: Mutex::default(), workers: (0..num_threads).map(|_| Mutex::default()).collect() }
    }
}

/// Bytes of [`AttentionScratch`] at most, once the largest step has run: of each worker what its largest item takes, and partial
/// results of the items that are divided, which are so many that each has a quarter of a worker's share of the work at least.
pub(crate) fn workspace_bytes(shape: &WorkspaceShape, isa: Isa, num_threads: usize) -> u64 {
    let rows = plan::ROWS_PER_ITEM.max(shape.queries_per_kv).max(shape.num_kv_heads * MAX_ROW_BLOCK);
    let by_tiles = isa == Isa::Amx && shape.precision == Precision::Fast;
    let tiles = if by_tiles { buffer_len(rows, shape.head_dim) } else { 0 };
    let workers = num_threads * (scratch::Scratch::len(rows, shape.head_dim) + tiles);
    let divided = if num_threads > 1 { (4 * num_threads * rows).min(shape.num_tokens * shape.num_heads) } else { 0 };
    let partials = shape.seq_len.div_ceil(SPLIT_KEYS) * plan::partial_stride(divided, shape.head_dim);
    ((workers + partials) * size_of::<f32>()) as u64
}

/// [`crate::Phases::attention`]; the machine must have `isa`.
pub(crate) fn attention(args: AttentionArgs<'_>, step: &StepMetadata, isa: Isa, pool: &ThreadPool, scratch: &AttentionScratch) {
    let AttentionArgs { q, out, cache, layer, sinks, params, next: _ } = args;
    let layer = cache.layer(layer);
    let group = &step.groups[layer.group];
    assert_eq!([q.cols(), out.cols()], [params.num_heads * params.head_dim; 2], "columns of q and out");
    assert!(sinks.is_none_or(|sinks| sinks.len() == params.num_heads), "sinks of {} heads", params.num_heads);
    check(&params, (cache.spec(), layer), step, group, q.rows());
    out.set_rows(q.rows());
    let reader = cache.reader();
    let mut shared = scratch.shared.lock().unwrap_or_else(PoisonError::into_inner);
    let (plan, partials) = &mut *shared;
    plan.make(&params, step, pool.num_threads());
    let problem = Problem {
        q: q.as_slice().as_ptr(),
        out: out.as_mut_slice().as_mut_ptr(),
        keys: reader.base(KvSide::Key, layer),
        values: reader.base(KvSide::Value, layer),
        spec: cache.spec(),
        layout: cache.host_layout(layer, KvSide::Key),
        params,
        sinks: sinks.map(|sinks| &sinks[..]),
        group,
        span_ends: &step.span_ends,
        partials: partials.at_least(plan.partial_len),
        is_latent: layer.shape.is_latent(),
        pairs: params.precision != Precision::Exact
            && cache.spec().dtype == KvDType::BF16
            && isa.dots_bf16()
            && params.head_dim.is_multiple_of(16)
            && !layer.shape.is_latent(),
        to_l2: reads_ahead_to_l2(),
    };
    // Every worker's, for any of them may come to any item.
    let by_tiles = ByTiles::of(isa, &params, cache.spec().dtype).filter(|_| !problem.is_latent);
    let buffers = scratch::Scratch::len(plan.max_rows, params.head_dim);
    let scratch_len = buffers + if by_tiles.is_some() { buffer_len(plan.max_rows, params.head_dim) } else { 0 };
    for worker in &scratch.workers {
        worker.lock().unwrap_or_else(PoisonError::into_inner).at_least(scratch_len);
    }
    let next = AtomicUsize::new(0);
    let work = |worker: usize| {
        let mut floats = scratch.workers[worker].lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(item) = plan.items.get(next.fetch_add(1, Ordering::Relaxed)) {
            let floats = floats.at_least(scratch_len);
            // SAFETY: the machine has `isa`; `check` found the sizes consistent; `floats` is long enough for every item.
            unsafe {
                match by_tiles.filter(|_| is_for_tiles(item, problem.queries_per_kv())) {
                    Some(by) => attend_by_tiles(&problem, item, by, floats, floats.add(buffers)),
                    None if problem.pairs => attend_pairs(&problem, item, floats),
                    None => attend_stored(isa, &problem, item, floats),
                }
            }
        }
    };
    if plan.items.len() < 2 || plan.cycles < SERIAL_CYCLES {
        work(0);
    } else {
        pool.run_available(&work);
    }
    pool.for_each_range(plan.merges.len(), 1, &|start, end| {
        for merge in &plan.merges[start..end] {
            // SAFETY: as above; every partial result of the merge has been written.
            unsafe { merge_rows_isa(isa, &problem, merge) };
        }
    });
}

/// The kernels trust these sizes.
fn check(
    params: &AttentionParams,
    (spec, layer): (&KvCacheSpec, &KvLayer),
    step: &StepMetadata,
    group: &KvGroupMetadata,
    num_tokens: usize,
) {
    let expected = if layer.shape.is_latent() {
        KvShape::latent(params.head_dim)
    } else {
        KvShape::new(params.num_kv_heads, params.head_dim)
    };
    assert_eq!(expected, layer.shape, "heads of the layer's keys and values");
    assert_eq!(params.num_kv_heads, layer.shape.num_kv_heads, "{params:?}");
    assert_eq!(params.num_heads % params.num_kv_heads, 0, "{params:?}");
    let block_size = spec.block_size;
    assert!(BLOCK_SIZES.contains(&block_size), "blocks of {block_size} tokens");
    assert_ne!(params.window, Some(0), "a window holds the query's own key at least");
    assert_ne!(params.chunk, Some(0), "a chunk holds the query's own key at least");
    let starts = &step.query_start_loc;
    assert_eq!(starts.len(), step.num_reqs() + 1, "entries of query_start_loc");
    assert!(starts.is_sorted() && starts.last().is_none_or(|&end| end as usize <= num_tokens), "{starts:?} of {num_tokens} rows");
    assert!(params.mask != Mask::Full || has_whole_requests(step), "a query sees keys behind it only where the step has them");
    assert!(params.mask != Mask::Spans || has_whole_spans(step, num_tokens), "ends of spans {:?}", step.span_ends);
    assert!(step.positions.len() >= num_tokens, "{} positions of {num_tokens} rows", step.positions.len());
    assert!(group.block_tables.len() >= step.num_reqs() * group.max_blocks, "{} block ids", group.block_tables.len());
    debug_assert!(
        starts.windows(2).all(|w| step.positions[w[0] as usize..w[1] as usize].windows(2).all(|p| p[0] + 1 == p[1])),
        "positions of a request count up by one"
    );
}

/// Whether the step has all queries of each of its requests.
fn has_whole_requests(step: &StepMetadata) -> bool {
    step.query_start_loc.windows(2).zip(&step.seq_lens).all(|(rows, len)| rows[1] - rows[0] == *len)
}

/// Whether rows see their own keys at least, none that the step does not have, and no fewer than the row before.
fn has_whole_spans(step: &StepMetadata, num_tokens: usize) -> bool {
    let ends = &step.span_ends;
    let is_whole = |(rows, len): (&[u32], &u32)| {
        let rows = rows[0] as usize..rows[1] as usize;
        rows.clone().all(|row| (step.positions[row] + 1..=*len).contains(&ends[row])) && ends[rows].is_sorted()
    };
    ends.is_empty() || ends.len() >= num_tokens && step.query_start_loc.windows(2).zip(&step.seq_lens).all(is_whole)
}

/// [`kernel::attend`] over pairs; the machine must have AVX-512 BF16.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
unsafe fn attend_pairs(problem: &Problem<'_>, item: &plan::Item, scratch: *mut f32) {
    // SAFETY: the features are enabled; the rest is the caller's promise.
    unsafe { attend_by_vectors::<Avx512<true>, Pairs>(problem, item, scratch) }
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn attend_pairs(_: &Problem<'_>, _: &plan::Item, _: *mut f32) {
    unreachable!("no other processor multiplies pairs");
}

/// [`kernel::attend`] over f32 products; the machine must have `isa`.
unsafe fn attend_stored(isa: Isa, problem: &Problem<'_>, item: &plan::Item, scratch: *mut f32) {
    let attend = match problem.spec.dtype {
        KvDType::F32 => attend_isa::<AsFloats<F32>>,
        KvDType::F16 => attend_isa::<AsFloats<F16>>,
        KvDType::BF16 if problem.keys_in_pairs() => attend_isa::<AsFloats<BF16, BF16Pair>>,
        KvDType::BF16 => attend_isa::<AsFloats<BF16>>,
        KvDType::F8E4M3 => attend_isa::<AsFloats<F8E4M3>>,
        KvDType::Int8 => attend_isa::<AsFloats<Int8>>,
    };
    // SAFETY: the caller's promise, and the type is the cache's.
    unsafe { attend(isa, problem, item, scratch) }
}

isa_entry! { fn attend_isa<C: Cached> => attend_by_vectors(problem: &Problem<'_>, item: &plan::Item, scratch: *mut f32) }
isa_entry! { fn merge_rows_isa => merge_rows(problem: &Problem<'_>, merge: &plan::Merge) }

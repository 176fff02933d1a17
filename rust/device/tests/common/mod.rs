//! Random attention problems and the dense oracle.
#![allow(dead_code, reason = "each test file uses its own part")]

#[path = "../../kernel-tests/src/random.rs"]
mod random;

use device::{
    AttentionArgs, AttentionParams, Backend, CacheEngine, Constant, DType, Device, KvCacheSpec, KvDType, KvGroupMetadata,
    KvPlace, KvShape, KvSide, Linear, LinearOptions, Mask, Precision, StepMetadata, Tensor, WeightView, cpu::Isa, mmap::Bytes,
};
pub use random::Rng;

/// A float matrix whose products are about as large as what they are of.
pub fn weight(rng: &mut Rng, rows: usize, cols: usize) -> WeightView {
    let scale = (cols as f32).sqrt().recip();
    let bytes = rng.floats(rows * cols).into_iter().flat_map(|value| (value * scale).to_le_bytes()).collect();
    WeightView::new(DType::F32, rows, cols, Bytes::from_vec(bytes)).unwrap()
}

/// A matrix on a backend, without a bias.
pub fn load(backend: &dyn Device, weight: &WeightView, precision: Precision) -> Linear {
    backend.load_linear(weight, &LinearOptions { name: "w".into(), precision, bias: None }).unwrap()
}

/// ISAs that this machine has.
pub fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|t| *t <= Isa::detect())
}

/// A step of several requests over one plane.
pub struct Case {
    pub params: AttentionParams,
    pub block_size: usize,
    pub dtype: KvDType,
    /// (keys before the chunk, queries) of each.
    pub requests: Vec<(usize, usize)>,
    /// Of each head.
    pub sinks: Option<Constant>,
    /// What lies in slots that no query may read.
    pub poison: f32,
    seed: u64,
    /// Of each request: q `[queries, num_heads * head_dim]`; k and v `[len, num_kv_heads * head_dim]`.
    q: Vec<Vec<f32>>,
    k: Vec<Vec<f32>>,
    v: Vec<Vec<f32>>,
    /// k and v as the cache gives them back.
    stored: [Vec<Vec<f32>>; 2],
}

/// What a cache of `dtype` makes of vectors of `head_dim`.
fn stored(dtype: KvDType, head_dim: usize, vectors: &[f32]) -> Vec<f32> {
    let spec = KvCacheSpec::uniform((1, 1), dtype, KvShape::new(1, head_dim), 1).unwrap();
    let (cache, at) = (CacheEngine::new(&spec).unwrap(), KvPlace { layer: 0, slot: 0, head: 0 });
    let mut read = vectors.to_vec();
    for vector in read.chunks_exact_mut(head_dim) {
        cache.write(KvSide::Key, at, vector);
        cache.read(KvSide::Key, at, vector);
    }
    read
}

impl Case {
    pub fn new(seed: u64, params: AttentionParams, block_size: usize, dtype: KvDType, requests: &[(usize, usize)]) -> Self {
        let mut rng = Rng::new(seed);
        let kv_cols = params.num_kv_heads * params.head_dim;
        let (mut q, mut k, mut v) = (vec![], vec![], vec![]);
        for &(before, queries) in requests {
            q.push(rng.floats(queries * params.num_heads * params.head_dim));
            k.push(rng.floats((before + queries) * kv_cols));
            v.push(rng.floats((before + queries) * kv_cols));
        }
        let stored = [&k, &v].map(|side| side.iter().map(|x| stored(dtype, params.head_dim, x)).collect());
        Self { params, block_size, dtype, requests: requests.to_vec(), sinks: None, poison: 1e4, seed, q, k, v, stored }
    }

    /// With a sink for each head, one of them heavier than all keys.
    pub fn with_sinks(mut self) -> Self {
        let mut sinks = Rng::new(self.seed ^ 2).floats(self.params.num_heads);
        sinks[0] = 60.0;
        self.sinks = Some(sinks.into());
        self
    }

    /// Rounds the queries to bfloat16.
    pub fn round_queries(&mut self) {
        self.q.iter_mut().flatten().for_each(|x| *x = half::bf16::from_f32(*x).to_f32());
    }

    /// Makes request `which` a chunk of request `source` of another case: its queries from `before` on.
    pub fn adopt(&mut self, which: usize, other: &Self, source: usize, before: usize) {
        let (_, queries) = self.requests[which];
        let (cols, kv_cols) = (self.params.num_heads * self.params.head_dim, self.params.num_kv_heads * self.params.head_dim);
        let first = before - other.requests[source].0;
        self.q[which] = other.q[source][first * cols..(first + queries) * cols].to_vec();
        self.k[which] = other.k[source][..(before + queries) * kv_cols].to_vec();
        self.v[which] = other.v[source][..(before + queries) * kv_cols].to_vec();
        for (own, others) in self.stored.iter_mut().zip(&other.stored) {
            own[which] = others[source][..(before + queries) * kv_cols].to_vec();
        }
    }
}

/// One more than the last key that a query sees where 70 of each 100 positions, from the 13th on, are a span.
fn span_end(position: usize, len: usize) -> usize {
    if (13..83).contains(&(position % 100)) { (position / 100 * 100 + 83).min(len) } else { position + 1 }
}

/// Lays the case out in shuffled blocks and runs it.
pub fn run(backend: &dyn Backend, case: &Case) -> Vec<f32> {
    let Case { params, block_size, .. } = case;
    let (head_dim, block_size) = (params.head_dim, *block_size);
    let max_blocks = case.requests.iter().map(|r| (r.0 + r.1).div_ceil(block_size)).max().unwrap() + 1;
    let num_blocks = case.requests.iter().map(|r| (r.0 + r.1).div_ceil(block_size)).sum::<usize>() + 1;
    let spec =
        KvCacheSpec::uniform((num_blocks, block_size), case.dtype, KvShape::new(params.num_kv_heads, head_dim), 2).unwrap();
    let cache = backend.alloc_kv_cache(&spec).unwrap();
    for slot in 0..num_blocks * block_size {
        for head in 0..params.num_kv_heads {
            for side in [KvSide::Key, KvSide::Value] {
                cache.write(side, KvPlace { layer: 1, slot, head }, &vec![case.poison; head_dim]);
            }
        }
    }
    let mut free: Vec<u32> = (1..num_blocks as u32).collect();
    let mut rng = Rng::new(case.seed ^ 1);
    for i in (1..free.len()).rev() {
        free.swap(i, rng.below(i + 1));
    }
    let mut step = StepMetadata { query_start_loc: vec![0], ..StepMetadata::default() };
    let mut group = KvGroupMetadata { max_blocks, ..KvGroupMetadata::default() };
    let num_tokens: usize = case.requests.iter().map(|r| r.1).sum();
    let mut q = backend.alloc(num_tokens, params.num_heads * head_dim).unwrap();
    q.set_rows(num_tokens);
    q.as_mut_slice().copy_from_slice(&case.q.concat());
    for (r, &(before, queries)) in case.requests.iter().enumerate() {
        let len = before + queries;
        let first = params.first_key(before);
        let mut table = vec![0; max_blocks];
        for (i, entry) in table.iter_mut().enumerate().take(len.div_ceil(block_size)) {
            let block = free.pop().unwrap();
            // Blocks wholly out of the window of every query of the chunk are given back: their entry is the null block.
            if (i + 1) * block_size > first {
                *entry = block;
            }
        }
        for key in first..len {
            let slot = table[key / block_size] as usize * block_size + key % block_size;
            for head in 0..params.num_kv_heads {
                let at = (key * params.num_kv_heads + head) * head_dim;
                cache.write(KvSide::Key, KvPlace { layer: 1, slot, head }, &case.k[r][at..at + head_dim]);
                cache.write(KvSide::Value, KvPlace { layer: 1, slot, head }, &case.v[r][at..at + head_dim]);
            }
        }
        group.block_tables.extend(table);
        step.positions.extend((before..len).map(|p| p as u32));
        if params.mask == Mask::Spans {
            step.span_ends.extend((before..len).map(|p| span_end(p, len) as u32));
        }
        step.query_start_loc.push(step.positions.len() as u32);
        step.seq_lens.push(len as u32);
    }
    step.groups.push(group);
    let mut out = Tensor::new(num_tokens, params.num_heads * head_dim).unwrap();
    backend.attention(
        AttentionArgs { q: &q, out: &mut out, cache: &cache, layer: 1, sinks: case.sinks.as_ref(), params: *params, next: None },
        &step,
    );
    backend.fetch(&mut out);
    out.as_slice().to_vec()
}

/// Softmax attention over contiguous keys, as the cache gives them back, in f64.
pub fn dense(case: &Case) -> Vec<f64> {
    let p = &case.params;
    let mut out = vec![];
    for (r, &(before, queries)) in case.requests.iter().enumerate() {
        for (i, head) in (0..queries).flat_map(|i| (0..p.num_heads).map(move |h| (i, h))) {
            let position = before + i;
            let row = |x: &[f32], key: usize| -> Vec<f64> {
                let at = (key * p.num_kv_heads + head * p.num_kv_heads / p.num_heads) * p.head_dim;
                x[at..at + p.head_dim].iter().map(|&x| f64::from(x)).collect()
            };
            let query = &case.q[r][(i * p.num_heads + head) * p.head_dim..][..p.head_dim];
            let end = match p.mask {
                Mask::Causal => position + 1,
                Mask::Full => before + queries,
                Mask::Spans => span_end(position, before + queries),
            };
            let seen: Vec<usize> = (0..end)
                .filter(|&j| p.mask == Mask::Spans && j > position || p.window.is_none_or(|w| j.abs_diff(position) < w))
                .filter(|&j| p.chunk.is_none_or(|c| j / c == position / c))
                .collect();
            let scores: Vec<f64> = seen
                .iter()
                .map(|&j| {
                    let dot: f64 = query.iter().zip(row(&case.stored[0][r], j)).map(|(&a, b)| f64::from(a) * b).sum();
                    let s = dot * f64::from(p.scale);
                    p.softcap.map_or(s, |c| f64::from(c) * (s / f64::from(c)).tanh())
                })
                .collect();
            let max = scores.iter().copied().fold(f64::MIN, f64::max);
            let sink = case.sinks.as_ref().map_or(0.0, |sinks| (f64::from(sinks[head]) - max).exp());
            let total: f64 = scores.iter().map(|s| (s - max).exp()).sum::<f64>() + sink;
            let mut sum = vec![0.0; p.head_dim];
            for (&j, s) in seen.iter().zip(&scores) {
                let weight = (s - max).exp() / total;
                sum.iter_mut().zip(row(&case.stored[1][r], j)).for_each(|(o, v)| *o += weight * v);
            }
            out.extend(sum);
        }
    }
    out
}

//! Latent attention: its kernels against plain oracles in f64, and the phase against the plain backend.

use device::{
    AttentionParams, Backend, CacheEngine, DType, KvCacheSpec, KvDType, KvGroupMetadata, KvPlace, KvShape, KvSide, LatentArgs,
    LatentAttention, LatentQuery, Linear, LinearOptions, Norm, NormKind, Precision, QueryScale, RopeStyle, RopeTable,
    StepMetadata, Tensor, WeightView,
    cpu::ReferenceBackend,
    cuda::CudaBackend,
    kernel_args::{AttentionMerge, AttentionMergeArgs, AttentionWork, LatentAttentionArgs, LatentCacheArgs},
    mmap::Bytes,
};
use half::{bf16, f16};
use kernel_tests::{
    Buffer, Kernel, Order, assert_close, driver,
    pool::{block_bytes, cache_name, filled, planes, poisoned, vector},
    random::Rng,
    tensors::{fetched, tensor},
};

/// Elements that rotate, and of a latent vector, as published models have them.
const PUBLISHED: [usize; 2] = [64, 512];

#[derive(Clone, Debug)]
struct Case {
    dtype: KvDType,
    dims: [usize; 2],
    num_heads: usize,
    /// Of a CTA.
    heads: usize,
    block_size: usize,
    split: usize,
    /// (keys before, queries) of each request.
    requests: Vec<(usize, usize)>,
}

impl Case {
    fn new(dtype: KvDType, num_heads: usize) -> Self {
        let dims = if dtype == KvDType::F32 { [8, 16] } else { PUBLISHED };
        let heads = if dtype == KvDType::F32 { 4 } else { num_heads.div_ceil(num_heads.div_ceil(32)) };
        Self { dtype, dims, num_heads, heads, block_size: 16, split: 1 << 20, requests: vec![(40, 1)] }
    }

    /// CTAs that share the query heads.
    fn shares(&self) -> usize {
        self.num_heads.div_ceil(self.heads)
    }

    fn kernel(&self) -> Kernel {
        match self.dtype {
            KvDType::F32 => Kernel::named("latent_f32"),
            dtype => Kernel::named(&format!("latent_{}_d576", cache_name(dtype))),
        }
    }
}

/// A case with its inputs.
struct Problem {
    case: Case,
    scale: f32,
    q: Vec<f32>,
    positions: Vec<u32>,
    cache: CacheEngine,
    tables: Vec<u32>,
    max_blocks: usize,
}

impl Problem {
    fn new(case: &Case, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let width = case.dims[0] + case.dims[1];
        let spec = KvCacheSpec::uniform((0, case.block_size), case.dtype, KvShape::latent(width), 1).unwrap();
        let lens: Vec<_> = case.requests.iter().map(|r| r.0 + r.1).collect();
        let (cache, tables, max_blocks) = filled(&spec, &lens, &mut rng);
        let positions: Vec<u32> = case.requests.iter().flat_map(|&(before, n)| (before..before + n).map(|p| p as u32)).collect();
        let q = rng.floats(positions.len() * case.num_heads * width);
        Self { case: case.clone(), scale: 1.5 / (width as f32).sqrt(), q, positions, cache, tables, max_blocks }
    }

    /// Cuts rows and keys as a host would: rows that fit a CTA, keys at multiples of the split.
    fn plan(&self) -> (Vec<AttentionWork>, Vec<AttentionMerge>, usize) {
        let (mut works, mut merges, mut num_parts, mut row) = (vec![], vec![], 0, 0);
        let Case { dtype, heads, split, .. } = self.case;
        let rows_per_work = if dtype == KvDType::F32 { 1 } else { 32 / heads };
        for (request, &(_, queries)) in self.case.requests.iter().enumerate() {
            let end = row + queries;
            while row < end {
                let num_rows = rows_per_work.min(end - row);
                let key_end = self.positions[row + num_rows - 1] as usize + 1;
                let splits = key_end.div_ceil(split);
                works.extend((0..splits).map(|s| AttentionWork {
                    request: request as u32,
                    first_row: row as u32,
                    num_rows: num_rows as u32,
                    key_begin: (s * split) as u32,
                    key_end: key_end.min((s + 1) * split) as u32,
                    part: if splits == 1 { -1 } else { (num_parts + s * num_rows) as i32 },
                }));
                if splits > 1 {
                    merges.extend((0..num_rows).map(|r| AttentionMerge {
                        row: (row + r) as u32,
                        first_part: (num_parts + r) as u32,
                        num_parts: splits as u32,
                        part_stride: num_rows as u32,
                    }));
                    num_parts += splits * num_rows;
                }
                row += num_rows;
            }
        }
        // Padding of a captured graph.
        works.push(AttentionWork { request: u32::MAX, ..AttentionWork::default() });
        merges.push(AttentionMerge { row: u32::MAX, ..AttentionMerge::default() });
        (works, merges, num_parts)
    }

    fn run(&self, order: Order) -> Vec<f32> {
        self.run_planned(self.plan(), order)
    }

    fn run_planned(
        &self,
        (works, merges, num_parts): (Vec<AttentionWork>, Vec<AttentionMerge>, usize),
        order: Order,
    ) -> Vec<f32> {
        let Case { dims: [rope_dim, kv_rank], num_heads, heads, block_size, .. } = self.case;
        let plane = Buffer::input(&planes(&self.cache)[0]);
        let (q, tables, positions) = (Buffer::input(&self.q), Buffer::input(&self.tables), Buffer::input(&self.positions));
        let (work, merge) = (Buffer::input(&works), Buffer::input(&merges));
        let out = Buffer::output::<f32>(self.positions.len() * num_heads * kv_rank);
        let part_out = Buffer::output::<f32>(num_parts * num_heads * kv_rank);
        let part_lse = Buffer::output::<f32>(num_parts * num_heads);
        let args = LatentAttentionArgs {
            q: q.ptr(),
            out: out.ptr(),
            part_out: part_out.ptr(),
            part_lse: part_lse.ptr(),
            plane: plane.ptr(),
            block_tables: tables.ptr(),
            positions: positions.ptr(),
            work: work.ptr(),
            block_bytes: block_bytes(self.cache.spec()) as u64,
            max_blocks: self.max_blocks as u32,
            block_size: block_size as u32,
            num_heads: num_heads as u32,
            rope_dim: rope_dim as u32,
            kv_rank: kv_rank as u32,
            heads: heads as u32,
            scale: self.scale,
            reserved: 0,
        };
        self.case.kernel().launch([works.len() * self.case.shares(), 1, 1], &args, order);
        let args = AttentionMergeArgs {
            part_out: part_out.ptr(),
            part_lse: part_lse.ptr(),
            merges: merge.ptr(),
            out: out.ptr(),
            num_heads: num_heads as u32,
            head_dim: kv_rank as u32,
            ..AttentionMergeArgs::default()
        };
        Kernel::named("attention_merge").launch([merges.len(), num_heads.div_ceil(4), 1], &args, order);
        out.values()
    }

    fn expected(&self) -> Vec<f32> {
        let Case { dims: [rope_dim, kv_rank], num_heads, block_size, dtype, .. } = self.case;
        let width = rope_dim + kv_rank;
        // Queries as the tensor cores take them.
        let rounded = |x: f32| {
            f64::from(match dtype {
                KvDType::F16 => f16::from_f32(x).to_f32(),
                KvDType::BF16 => bf16::from_f32(x).to_f32(),
                _ => x,
            })
        };
        let mut out = vec![];
        let requests = self.case.requests.iter().enumerate().flat_map(|(request, r)| std::iter::repeat_n(request, r.1));
        for (row, request) in requests.enumerate() {
            let table = &self.tables[request * self.max_blocks..];
            let keys: Vec<_> = (0..=self.positions[row] as usize)
                .map(|key| vector(&self.cache, KvSide::Key, table[key / block_size] as usize * block_size + key % block_size, 0))
                .collect();
            for head in 0..num_heads {
                let q = &self.q[(row * num_heads + head) * width..][..width];
                let dot = |k: &Vec<f32>| q.iter().zip(k).map(|(a, b)| rounded(*a) * f64::from(*b)).sum::<f64>();
                let scores: Vec<f64> = keys.iter().map(|k| dot(k) * f64::from(self.scale)).collect();
                let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = scores.iter().map(|score| (score - most).exp()).sum();
                let mut sum = vec![0.0; kv_rank];
                for (k, score) in keys.iter().zip(&scores) {
                    let weight = (score - most).exp() / total;
                    sum.iter_mut().zip(&k[rope_dim..]).for_each(|(sum, v)| *sum += weight * f64::from(*v));
                }
                out.extend(sum.iter().map(|sum| *sum as f32));
            }
        }
        out
    }
}

fn check(case: &Case, seed: u64) {
    let problem = Problem::new(case, seed);
    let order = if seed.is_multiple_of(2) { Order::Ascending } else { Order::Descending };
    // What rounding of weights can come to: values are within 2.
    let tolerance = match case.dtype {
        KvDType::F32 => 1e-5,
        KvDType::F16 => 2e-3,
        _ => 1e-2,
    };
    assert_close(&problem.run(order), &problem.expected(), [tolerance, 0.0], &format!("{case:?}"));
}

/// Decodes of one key, odd lengths, and ends of tiles and blocks; prompts, and chunks behind others. Heads of one CTA and of
/// several, which do not divide them evenly, and rows of which several share a CTA.
#[test]
fn latent_attention_agrees_with_the_oracle() {
    let requests = [(0, 1), (36, 1), (63, 1), (64, 1), (130, 1), (0, 9), (70, 3), (127, 2)];
    for (round, num_heads) in [1, 3, 16, 20, 32, 33, 128, 5].into_iter().enumerate() {
        for (dtype, split) in [(KvDType::F16, 64), (KvDType::BF16, 1 << 20), (KvDType::BF16, 32), (KvDType::F32, 1 << 20)] {
            let some = if num_heads == 128 { 1 } else { 3 };
            let case = Case {
                block_size: [8, 16, 32][round % 3],
                split,
                requests: (0..some).map(|i| requests[(round + 3 * i) % requests.len()]).collect(),
                ..Case::new(dtype, num_heads)
            };
            check(&case, round as u64);
        }
    }
}

/// Parts that end within a tile, and as many as a row has at most.
#[test]
fn many_parts_are_merged_into_the_row() {
    let case = Case { split: 8, requests: vec![(511, 1), (7, 1), (50, 2)], ..Case::new(KvDType::BF16, 3) };
    let (_, merges, _) = Problem::new(&case, 4).plan();
    assert_eq!(merges.iter().map(|merge| merge.num_parts).collect::<Vec<_>>(), [64, 7, 7, 0]);
    check(&case, 4);
    check(&Case { split: 40, requests: vec![(200, 1)], ..Case::new(KvDType::F16, 18) }, 5);
}

/// Fewer heads of a CTA leave room for more rows, as of a prompt; a share may have fewer heads than the others.
#[test]
fn more_rows_with_fewer_heads_have_the_same_bits() {
    for (num_heads, shares) in [(20, [20, 10, 4]), (33, [17, 3, 32])] {
        let run = |heads| {
            let case = Case { heads, requests: vec![(20, 5), (0, 9)], ..Case::new(KvDType::BF16, num_heads) };
            check(&case, 8);
            Problem::new(&case, 8).run(Order::Ascending)
        };
        let [one, two, three] = shares.map(run);
        assert!(one == two && one == three, "{num_heads} heads");
    }
}

/// The widest vectors of published models in f32, and ones that are not a multiple of a warp.
#[test]
fn vectors_of_other_widths_in_f32_agree_with_the_oracle() {
    for dims in [PUBLISHED, [4, 8], [16, 44], [64, 960]] {
        check(&Case { dims, requests: vec![(37, 2), (0, 1)], ..Case::new(KvDType::F32, 6) }, 6);
    }
}

#[test]
fn the_order_of_threads_changes_no_bit() {
    for (dtype, num_heads) in [(KvDType::BF16, 9), (KvDType::F16, 40), (KvDType::F32, 5)] {
        let split = if dtype == KvDType::F32 { 1 << 20 } else { 64 };
        let problem = Problem::new(&Case { split, requests: vec![(100, 3), (0, 1)], ..Case::new(dtype, num_heads) }, 11);
        assert_eq!(problem.run(Order::Ascending), problem.run(Order::Descending), "{dtype:?}");
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_beside_the_rows_of_its_prompt() {
    for dtype in [KvDType::BF16, KvDType::F16, KvDType::F32] {
        // Three rows share a CTA of the first two types.
        let problem = Problem::new(&Case { requests: vec![(90, 7)], ..Case::new(dtype, 10) }, 12);
        let alone = (0..7).map(|row| AttentionWork {
            request: 0,
            first_row: row,
            num_rows: 1,
            key_begin: 0,
            key_end: problem.positions[row as usize] + 1,
            part: -1,
        });
        let merges = vec![AttentionMerge { row: u32::MAX, ..AttentionMerge::default() }];
        assert_eq!(
            problem.run_planned((alone.collect(), merges, 0), Order::Ascending),
            problem.run(Order::Ascending),
            "{dtype:?}"
        );
    }
}

#[test]
fn rows_without_a_key_are_zeros() {
    for dtype in [KvDType::BF16, KvDType::F32] {
        let problem = Problem::new(&Case { requests: vec![(3, 1), (40, 1)], ..Case::new(dtype, 2) }, 9);
        let (mut works, merges, num_parts) = problem.plan();
        works[0] = AttentionWork { key_begin: 8, key_end: 8, ..works[0] };
        let out = problem.run_planned((works, merges, num_parts), Order::Ascending);
        let (first, second) = out.split_at(out.len() / 2);
        assert!(first.iter().all(|x| *x == 0.0) && second.iter().all(|x| x.is_finite() && *x != 0.0), "{dtype:?}");
    }
}

/// What `latent_cache_*` reads.
struct Fill {
    dims: [usize; 3],
    num_heads: usize,
    query: Vec<f32>,
    latent: Vec<f32>,
    weight: Vec<f32>,
    /// Of 40 positions.
    angles: [Vec<f32>; 2],
    rotary_dim: usize,
    style: RopeStyle,
    rope_positions: Vec<u32>,
    slots: Vec<i64>,
}

impl Fill {
    fn new(rng: &mut Rng, dims: [usize; 3], rotary_dim: usize, style: RopeStyle) -> Self {
        let ([nope_dim, rope_dim, kv_rank], num_heads, tokens) = (dims, 5, 4);
        Self {
            dims,
            num_heads,
            query: rng.floats(tokens * num_heads * (nope_dim + rope_dim)),
            latent: rng.floats(tokens * (kv_rank + rope_dim)),
            weight: rng.floats(kv_rank),
            angles: [(); 2].map(|()| rng.floats(40 * rotary_dim / 2)),
            rotary_dim,
            style,
            rope_positions: vec![7, 39, 0, 12],
            slots: vec![17, -1, 8, 30],
        }
    }

    /// Of a vector whose first elements rotate.
    fn rotated(&self, x: &[f32], token: usize) -> Vec<f64> {
        let half = self.rotary_dim / 2;
        let mut out: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
        for pair in 0..half {
            let (a, b) = if self.style == RopeStyle::Interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + half) };
            let [cos, sin] =
                self.angles.each_ref().map(|table| f64::from(table[self.rope_positions[token] as usize * half + pair]));
            (out[a], out[b]) = (out[a] * cos - out[b] * sin, out[b] * cos + out[a] * sin);
        }
        out
    }

    /// The vector that is cached of a token.
    fn cached(&self, token: usize) -> Vec<f64> {
        let [_, rope_dim, kv_rank] = self.dims;
        let (vector, rotates) = self.latent[token * (kv_rank + rope_dim)..][..kv_rank + rope_dim].split_at(kv_rank);
        let squares: f64 = vector.iter().map(|x| f64::from(*x).powi(2)).sum();
        let scale = (squares / kv_rank as f64 + 1e-5).sqrt().recip();
        let normed = vector.iter().zip(&self.weight).map(|(x, w)| f64::from(*x) * scale * f64::from(*w));
        self.rotated(rotates, token).into_iter().chain(normed).collect()
    }

    /// What is written to the plane, and to the absorbed queries, of which the rest is 7.
    fn run(&self, dtype: KvDType, spec: &KvCacheSpec, order: Order) -> (Vec<u8>, Vec<f32>) {
        let [nope_dim, rope_dim, kv_rank] = self.dims;
        let floats = |values: &[f32]| Buffer::input(values);
        let (query, latent, weight) = (floats(&self.query), floats(&self.latent), floats(&self.weight));
        let [cos, sin] = self.angles.each_ref().map(|table| floats(table));
        let (rope_positions, slots) = (Buffer::input(&self.rope_positions), Buffer::input(&self.slots));
        let plane = Buffer::inout(&planes(&poisoned(spec))[0]);
        let absorbed = Buffer::inout(&vec![7.0_f32; self.slots.len() * self.num_heads * (rope_dim + kv_rank)]);
        let has_rope = self.rotary_dim > 0;
        let args = LatentCacheArgs {
            query: query.ptr(),
            latent: latent.ptr(),
            absorbed: absorbed.ptr(),
            weight: weight.ptr(),
            cos: if has_rope { cos.ptr() } else { 0 },
            sin: if has_rope { sin.ptr() } else { 0 },
            rope_positions: rope_positions.ptr(),
            slot_mapping: slots.ptr(),
            plane: plane.ptr(),
            block_bytes: block_bytes(spec) as u64,
            num_heads: self.num_heads as u32,
            nope_dim: nope_dim as u32,
            rope_dim: rope_dim as u32,
            kv_rank: kv_rank as u32,
            block_size: spec.block_size as u32,
            rotary_dim: self.rotary_dim as u32,
            interleaved: u32::from(self.style == RopeStyle::Interleaved),
            eps: 1e-5,
            ..LatentCacheArgs::default()
        };
        Kernel::named(&format!("latent_cache_{}", cache_name(dtype))).launch([self.slots.len(), 1, 1], &args, order);
        (plane.values(), absorbed.values())
    }
}

#[test]
fn latent_vectors_are_normed_and_rotated_into_their_slots_and_queries_into_theirs() {
    let mut rng = Rng::new(21);
    let shapes = [([16, 8, 32], 8), ([24, 8, 24], 4), ([128, 64, 512], 64), ([8, 12, 16], 0)];
    for ((dims, rotary_dim), style) in shapes.into_iter().flat_map(|s| [RopeStyle::Interleaved, RopeStyle::Neox].map(|r| (s, r)))
    {
        let fill = Fill::new(&mut rng, dims, rotary_dim, style);
        let [nope_dim, rope_dim, kv_rank] = dims;
        let width = rope_dim + kv_rank;
        for (dtype, order) in
            [(KvDType::F32, Order::Ascending), (KvDType::F16, Order::Descending), (KvDType::BF16, Order::Ascending)]
        {
            let spec = KvCacheSpec::uniform((4, 8), dtype, KvShape::latent(width), 1).unwrap();
            let (plane, absorbed) = fill.run(dtype, &spec, order);
            let bytes = width * dtype.element_bytes();
            let at = |slot: usize| slot / 8 * block_bytes(&spec) + slot % 8 * bytes;
            let what = format!("{dims:?}, {rotary_dim} rotate, {style:?}, {dtype:?}");
            for (token, slot) in fill.slots.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
                let stored = &plane[at(*slot as usize)..][..bytes];
                let half = |b: &[u8]| u16::from_le_bytes([b[0], b[1]]);
                let values: Vec<f32> = match dtype {
                    KvDType::F32 => stored.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(),
                    KvDType::F16 => stored.chunks_exact(2).map(|b| f16::from_bits(half(b)).to_f32()).collect(),
                    _ => stored.chunks_exact(2).map(|b| bf16::from_bits(half(b)).to_f32()).collect(),
                };
                let expected: Vec<f32> = fill.cached(token).iter().map(|x| *x as f32).collect();
                let relative = match dtype {
                    KvDType::F32 => 1e-5,
                    KvDType::F16 => 1.0 / 1024.0,
                    _ => 1.0 / 128.0,
                };
                assert_close(&values, &expected, [1e-5, relative], &what);
            }
            let written: Vec<_> = fill.slots.iter().filter(|slot| **slot >= 0).map(|slot| at(*slot as usize)).collect();
            let untouched = (0..plane.len()).filter(|i| !written.iter().any(|at| (*at..at + bytes).contains(i)));
            assert!(untouched.into_iter().all(|i| plane[i] == 0xff), "{what}: a byte of another slot was written");
            for (vector, absorbed) in absorbed.chunks_exact(width).enumerate() {
                let query = &fill.query[vector * (nope_dim + rope_dim)..][nope_dim..nope_dim + rope_dim];
                let expected: Vec<f32> = fill.rotated(query, vector / fill.num_heads).iter().map(|x| *x as f32).collect();
                assert_close(&absorbed[..rope_dim], &expected, [1e-5, 1e-5], &what);
                assert!(absorbed[rope_dim..].iter().all(|x| *x == 7.0), "{what}: more of the queries was written");
            }
        }
    }
}

const HIDDEN: usize = 64;
const BLOCK_SIZE: usize = 8;

#[test]
fn blocks_of_latent_layers_are_copied_and_moved_whole() {
    let mut rng = Rng::new(30);
    let backend: &dyn Backend = &cuda(Order::Ascending);
    let spec = KvCacheSpec::uniform((5, BLOCK_SIZE), KvDType::F32, KvShape::latent(24), 2).unwrap();
    let cache = backend.alloc_kv_cache(&spec).unwrap();
    let vectors: Vec<_> = (0..2 * BLOCK_SIZE).map(|_| rng.floats(24)).collect();
    for (i, vector) in vectors.iter().enumerate() {
        cache.write(KvSide::Key, KvPlace { layer: i % 2, slot: BLOCK_SIZE + i / 2, head: 0 }, vector);
    }
    cache.copy_blocks(&[(1, 4)]);
    let bytes = cache.export_blocks(&[4]).remove(0);
    assert_eq!(bytes.len(), 2 * BLOCK_SIZE * 24 * size_of::<f32>());
    cache.import_block(2, &bytes);
    for (i, vector) in vectors.iter().enumerate() {
        for block in [2, 4] {
            let mut read = vec![0.0; 24];
            cache.read(KvSide::Key, KvPlace { layer: i % 2, slot: block * BLOCK_SIZE + i / 2, head: 0 }, &mut read);
            assert_eq!(read, *vector, "block {block}, vector {i}");
        }
    }
}

/// A layer: elements that do not rotate and that do, of a value, of the latent vector, and of a query's low rank.
struct Layer {
    num_heads: usize,
    dims: [usize; 4],
    q_rank: Option<usize>,
    query: Vec<WeightView>,
    kv_down: WeightView,
    key_up: Vec<WeightView>,
    value_up: Vec<WeightView>,
    norms: [Norm; 3],
    rope: RopeTable,
}

fn weight(rng: &mut Rng, dtype: DType, rows: usize, cols: usize) -> WeightView {
    let values = rng.floats(rows * cols).into_iter().map(|x| x / (cols as f32).sqrt());
    let bytes = match dtype {
        DType::F32 => values.flat_map(f32::to_le_bytes).collect(),
        _ => values.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
    };
    WeightView::new(dtype, rows, cols, Bytes::from_vec(bytes)).unwrap()
}

impl Layer {
    fn new(rng: &mut Rng, dtype: DType, num_heads: usize, dims: [usize; 4], q_rank: Option<usize>) -> Self {
        let [nope, rope, value, kv_rank] = dims;
        let q_size = num_heads * (nope + rope);
        let query = match q_rank {
            None => vec![weight(rng, dtype, q_size, HIDDEN)],
            Some(rank) => vec![weight(rng, dtype, rank, HIDDEN), weight(rng, dtype, q_size, rank)],
        };
        let norm = |rng: &mut Rng, len: usize| {
            let weight: Vec<f32> = rng.floats(len).iter().map(|x| 1.0 + x / 8.0).collect();
            Norm { kind: NormKind::Rms, weight: weight.into(), bias: None, eps: 1e-6 }
        };
        let angles = rng.floats(700 * rope / 2);
        let [cos, sin] = [f32::cos, f32::sin].map(|of: fn(f32) -> f32| angles.iter().map(|a| of(*a)).collect::<Vec<_>>());
        Self {
            num_heads,
            dims,
            q_rank,
            query,
            kv_down: weight(rng, dtype, kv_rank + rope, HIDDEN),
            key_up: (0..num_heads).map(|_| weight(rng, dtype, kv_rank, nope)).collect(),
            value_up: (0..num_heads).map(|_| weight(rng, dtype, value, kv_rank)).collect(),
            norms: [norm(rng, HIDDEN), norm(rng, q_rank.unwrap_or(1)), norm(rng, kv_rank)],
            rope: RopeTable { style: RopeStyle::Interleaved, rotary_dim: rope, cos: cos.into(), sin: sin.into() },
        }
    }

    fn load(&self, backend: &dyn Backend, precision: Precision) -> LatentAttention {
        let load = |weight: &WeightView| -> Linear {
            backend.load_linear(weight, &LinearOptions { name: "w".into(), precision, bias: None }).unwrap()
        };
        let [_, low, latent] = self.norms.clone();
        LatentAttention {
            query: match &self.query[..] {
                [down, up] => LatentQuery::LowRank { down: load(down), norm: low, up: load(up) },
                whole => LatentQuery::Whole(load(&whole[0])),
            },
            kv_down: load(&self.kv_down),
            kv_norm: latent,
            key_up: self.key_up.iter().map(load).collect(),
            value_up: self.value_up.iter().map(load).collect(),
        }
    }

    /// What steps of (computed tokens, rows) of each request give, over a cache that holds the same vector at every other
    /// position.
    fn run(&self, backend: &dyn Backend, kv: KvDType, precision: Precision, steps: &[&[(usize, usize)]]) -> Vec<f32> {
        let [nope, rope, value, kv_rank] = self.dims;
        let (weights, width) = (self.load(backend, precision), rope + kv_rank);
        let longest = steps.iter().flat_map(|step| step.iter().map(|(before, rows)| before + rows)).max().unwrap();
        let (max_blocks, num_requests) = (longest.div_ceil(BLOCK_SIZE), steps[0].len());
        let spec = KvCacheSpec::uniform((num_requests * max_blocks + 1, BLOCK_SIZE), kv, KvShape::latent(width), 2).unwrap();
        let cache = backend.alloc_kv_cache(&spec).unwrap();
        let mut rng = Rng::new(77);
        let past: Vec<_> = (0..3).map(|_| rng.floats(width)).collect();
        for slot in BLOCK_SIZE..spec.num_blocks * BLOCK_SIZE {
            cache.write(KvSide::Key, KvPlace { layer: 1, slot, head: 0 }, &past[slot % 3]);
        }
        let tables: Vec<_> =
            (0..num_requests).flat_map(|r| (0..max_blocks).map(move |i| (num_requests * (max_blocks - i) - r) as u32)).collect();
        let rows: Vec<_> = (0..longest).map(|_| rng.floats(HIDDEN)).collect();
        let scale = ((nope + rope) as f32).sqrt().recip();
        let params = AttentionParams { scale, ..AttentionParams::new([self.num_heads, 1, width], precision) };
        let mut all = vec![];
        for requests in steps {
            let mut step = StepMetadata { query_start_loc: vec![0], ..StepMetadata::default() };
            let mut group = KvGroupMetadata { block_tables: tables.clone(), max_blocks, slot_mapping: vec![] };
            let mut hidden = vec![];
            for (request, &(before, count)) in requests.iter().enumerate() {
                for position in before..before + count {
                    step.positions.push(position as u32);
                    let block = tables[request * max_blocks + position / BLOCK_SIZE] as usize;
                    group.slot_mapping.push((block * BLOCK_SIZE + position % BLOCK_SIZE) as i64);
                    hidden.extend(rows[position].iter().map(|x| x * (1.0 + request as f32)));
                }
                step.query_start_loc.push(step.positions.len() as u32);
                step.seq_lens.push((before + count) as u32);
            }
            step.rope_positions.clone_from(&step.positions);
            step.groups.push(group);
            let count = step.positions.len();
            backend.begin_step(&step);
            let x = tensor(backend, &hidden, HIDDEN);
            let mut out: Tensor = backend.alloc(count, self.num_heads * value).unwrap();
            let (norm, rope) = (Some(&self.norms[0]), Some(&self.rope));
            let q_scale = self.q_rank.map(|_| QueryScale { beta: 0.3, length: 7, offset: 1 });
            let args =
                LatentArgs { hidden: &x, norm, weights: &weights, rope, q_scale, cache: &cache, layer: 1, params, out: &mut out };
            backend.latent_phases().unwrap().latent_attention(args, &step);
            all.extend(fetched(backend, out));
        }
        all
    }
}

fn cuda(order: Order) -> CudaBackend {
    CudaBackend::new(driver(order)).unwrap()
}

/// Decodes beside a prompt and a chunk of one; with few heads, keys of decodes come in parts.
#[test]
fn the_phase_agrees_with_the_plain_backend() {
    let mut rng = Rng::new(31);
    let long: &[&[(usize, usize)]] = &[&[(0, 11), (600, 1), (37, 2), (9, 1)], &[(11, 1), (601, 1), (39, 1), (10, 1)]];
    let short: &[&[(usize, usize)]] = &[&[(0, 5), (37, 1), (9, 1)]];
    for (kv, dtype, num_heads, dims, q_rank) in [
        (KvDType::F32, DType::F32, 3, [16, 8, 24, 32], Some(24)),
        (KvDType::F32, DType::BF16, 5, [24, 16, 8, 40], None),
        (KvDType::BF16, DType::F32, 3, [16, 64, 24, 512], None),
        (KvDType::F16, DType::BF16, 34, [8, 64, 16, 512], Some(40)),
    ] {
        let layer = Layer::new(&mut rng, dtype, num_heads, dims, q_rank);
        // Over a cache of 16 bits, queries and weights of values are rounded as well.
        let tolerance = match kv {
            KvDType::F32 => 1e-4,
            KvDType::F16 => 4e-3,
            _ => 3e-2,
        };
        let steps = if num_heads < 8 { long } else { short };
        let expected = layer.run(&ReferenceBackend::new(), kv, Precision::Exact, steps);
        let actual = layer.run(&cuda(Order::Ascending), kv, Precision::Exact, steps);
        assert!(expected.iter().any(|x| x.abs() > 0.1), "{kv:?}: nearly zeros");
        let what = format!("{kv:?}, {num_heads} heads of {dims:?}, rank {:?}, {dtype}", layer.q_rank);
        assert_close(&actual, &expected, [tolerance, tolerance], &what);
    }
}

#[test]
fn deterministic_rows_have_the_same_bits_in_chunks_of_any_size() {
    let mut rng = Rng::new(32);
    for (kv, dims) in [(KvDType::F32, [16, 8, 24, 32]), (KvDType::BF16, [16, 64, 24, 512])] {
        let layer = Layer::new(&mut rng, DType::BF16, 3, dims, None);
        let run = |steps: &[&[(usize, usize)]]| layer.run(&cuda(Order::Ascending), kv, Precision::Deterministic, steps);
        let whole = run(&[&[(0, 20)]]);
        let chunks = run(&[&[(0, 9)], &[(9, 1)], &[(10, 10)]]);
        assert!(whole == chunks, "{kv:?}: chunks change bits");
    }
}

#[test]
fn what_has_no_kernel_is_refused_with_what_has() {
    let backend: &dyn Backend = &cuda(Order::Ascending);
    let check = |dtype, width| backend.check_kv_layer(dtype, KvShape::latent(width), 1).map_err(|error| error.to_string());
    for (dtype, width) in [(KvDType::F16, 576), (KvDType::BF16, 576), (KvDType::F32, 576), (KvDType::F32, 24)] {
        assert_eq!(check(dtype, width), Ok(()));
    }
    for (dtype, width) in [(KvDType::F16, 24), (KvDType::Int8, 576), (KvDType::F8E4M3, 576), (KvDType::F32, 28)] {
        let text = check(dtype, width).unwrap_err();
        assert!(text.contains(&format!("{width} elements")) && text.contains("576") && text.contains("cpu"), "{text}");
    }
}

//! Attention through block tables: the kernels of decoding, of prompts and of f32 against a plain oracle in f64.

use device::{
    CacheEngine, KvCacheSpec, KvDType, KvPlace, KvShape, KvSide,
    kernel_args::{AttentionArgs, AttentionMerge, AttentionMergeArgs, AttentionWork, ElementType},
};
use half::{bf16, f16};
use kernel_tests::{
    Buffer, Kernel, Order, assert_close,
    pool::{block_bytes, cache_name, filled, planes, scales_offset, vector},
    random::Rng,
};

const HEAD_DIMS: [usize; 8] = [64, 80, 96, 112, 128, 192, 256, 512];

#[derive(Clone)]
struct Case {
    dtype: KvDType,
    head_dim: usize,
    num_kv_heads: usize,
    queries_per_kv: usize,
    block_size: usize,
    window: usize,
    chunk: usize,
    softcap: f32,
    sinks: bool,
    out_type: ElementType,
    /// Query vectors of a CTA; keys of a split.
    vectors: usize,
    split: usize,
    /// (keys before, queries) of each request.
    requests: Vec<(usize, usize)>,
}

impl Case {
    fn new(dtype: KvDType, head_dim: usize, queries_per_kv: usize) -> Self {
        Self {
            dtype,
            head_dim,
            num_kv_heads: 2,
            queries_per_kv,
            block_size: 16,
            window: 0,
            chunk: 0,
            softcap: 0.0,
            sinks: false,
            out_type: ElementType::F32,
            vectors: 16,
            split: 1 << 20,
            requests: vec![(40, 1)],
        }
    }

    fn kernel(&self) -> Kernel {
        let family = if self.vectors == 64 { "prefill" } else { "attention" };
        match self.dtype {
            KvDType::F32 => Kernel::named(if self.head_dim > 256 { "attention_f32_d512" } else { "attention_f32" }),
            dtype => Kernel::named(&format!("{family}_{}_d{}", cache_name(dtype), self.head_dim)),
        }
    }

    /// For so many entries of work: but in `prefill_*`, the KV heads of an entry follow each other.
    fn grid(&self, works: usize) -> [usize; 3] {
        let prefills = self.vectors == 64 && self.dtype != KvDType::F32;
        if prefills { [works, self.num_kv_heads, 1] } else { [works * self.num_kv_heads, 1, 1] }
    }

    fn describe(&self) -> String {
        let Self { queries_per_kv, block_size, window, chunk, softcap, sinks, split, requests, .. } = self;
        let name = self.kernel().name();
        format!(
            "{name} queries_per_kv {queries_per_kv} blocks {block_size} window {window} chunk {chunk} cap {softcap} sinks {sinks} split {split} {requests:?}"
        )
    }
}

/// A case with its inputs.
struct Problem {
    case: Case,
    num_heads: usize,
    scale: f32,
    q: Vec<f32>,
    sinks: Vec<f32>,
    positions: Vec<u32>,
    cache: CacheEngine,
    tables: Vec<u32>,
    max_blocks: usize,
}

impl Problem {
    fn new(case: &Case, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let num_heads = case.num_kv_heads * case.queries_per_kv;
        let spec =
            KvCacheSpec::uniform((0, case.block_size), case.dtype, KvShape::new(case.num_kv_heads, case.head_dim), 1).unwrap();
        let lens: Vec<_> = case.requests.iter().map(|r| r.0 + r.1).collect();
        let (cache, tables, max_blocks) = filled(&spec, &lens, &mut rng);
        let positions: Vec<u32> = case.requests.iter().flat_map(|&(before, n)| (before..before + n).map(|p| p as u32)).collect();
        let q = rng.floats(positions.len() * num_heads * case.head_dim);
        let sinks = rng.floats(num_heads);
        let scale = 1.5 / (case.head_dim as f32).sqrt();
        Self { case: case.clone(), num_heads, scale, q, sinks, positions, cache, tables, max_blocks }
    }

    fn first_key(&self, position: u32) -> u32 {
        let of_window = if self.case.window == 0 { 0 } else { (position + 1).saturating_sub(self.case.window as u32) };
        of_window.max(position.checked_div(self.case.chunk as u32).map_or(0, |chunks| chunks * self.case.chunk as u32))
    }

    /// Cuts rows and keys as a host would: rows that fit a CTA, keys at absolute multiples of the split.
    fn plan(&self) -> (Vec<AttentionWork>, Vec<AttentionMerge>, usize) {
        let (mut works, mut merges, mut num_parts, mut row) = (vec![], vec![], 0, 0);
        // Prompts of wide heads are cut into smaller tiles.
        let vectors = if self.case.head_dim > 256 { self.case.vectors.min(32) } else { self.case.vectors };
        let rows_per_work = if self.case.dtype == KvDType::F32 { 1 } else { vectors / self.case.queries_per_kv };
        for (request, &(_, queries)) in self.case.requests.iter().enumerate() {
            let end = row + queries;
            while row < end {
                let num_rows = rows_per_work.min(end - row);
                let key_end = self.positions[row + num_rows - 1] as usize + 1;
                let begin = self.first_key(self.positions[row]) as usize / 8 * 8;
                let split = self.case.split;
                let splits: Vec<_> = (begin / split..key_end.div_ceil(split)).collect();
                for (i, s) in splits.iter().enumerate() {
                    works.push(AttentionWork {
                        request: request as u32,
                        first_row: row as u32,
                        num_rows: num_rows as u32,
                        key_begin: begin.max(s * split) as u32,
                        key_end: key_end.min((s + 1) * split) as u32,
                        part: if splits.len() == 1 { -1 } else { (num_parts + i * num_rows) as i32 },
                    });
                }
                if splits.len() > 1 {
                    merges.extend((0..num_rows).map(|r| AttentionMerge {
                        row: (row + r) as u32,
                        first_part: (num_parts + r) as u32,
                        num_parts: splits.len() as u32,
                        part_stride: num_rows as u32,
                    }));
                    num_parts += splits.len() * num_rows;
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
        let Self { case, num_heads, .. } = self;
        let (works, merges, num_parts) = self.plan();
        let cols = num_heads * case.head_dim;
        // Rows of q lie apart, as in a buffer of q, k and v.
        let q_stride = cols + 8;
        let mut q = vec![f32::NAN; self.positions.len() * q_stride];
        for (to, from) in q.chunks_exact_mut(q_stride).zip(self.q.chunks_exact(cols)) {
            to[..cols].copy_from_slice(from);
        }
        let [k_plane, v_plane] = planes(&self.cache).map(|plane| Buffer::input(&plane));
        let (q, tables, positions) = (Buffer::input(&q), Buffer::input(&self.tables), Buffer::input(&self.positions));
        let (work, merge, sinks) = (Buffer::input(&works), Buffer::input(&merges), Buffer::input(&self.sinks));
        let bytes = if case.out_type == ElementType::F32 { 4 } else { 2 };
        let out = Buffer::output::<u8>(self.positions.len() * cols * bytes);
        let part_out = Buffer::output::<f32>(num_parts * cols);
        let part_lse = Buffer::output::<f32>(num_parts * num_heads);
        let spec = self.cache.spec();
        let sinks = if case.sinks { sinks.ptr() } else { 0 };
        let args = AttentionArgs {
            q: q.ptr(),
            out: out.ptr(),
            part_out: part_out.ptr(),
            part_lse: part_lse.ptr(),
            k_plane: k_plane.ptr(),
            v_plane: v_plane.ptr(),
            block_tables: tables.ptr(),
            positions: positions.ptr(),
            ends: 0,
            work: work.ptr(),
            sinks,
            block_bytes: block_bytes(spec) as u64,
            scales_offset: scales_offset(spec) as u64,
            max_blocks: self.max_blocks as u32,
            block_size: case.block_size as u32,
            num_heads: *num_heads as u32,
            num_kv_heads: case.num_kv_heads as u32,
            q_stride: q_stride as u32,
            window: case.window as u32,
            chunk: case.chunk as u32,
            reserved: 0,
            out_type: case.out_type as u32,
            scale: self.scale,
            softcap: case.softcap,
            head_dim: case.head_dim as u32,
        };
        case.kernel().launch_behind(&[&q, &k_plane, &v_plane], case.grid(works.len()), &args, order);
        let args = AttentionMergeArgs {
            part_out: part_out.ptr(),
            part_lse: part_lse.ptr(),
            merges: merge.ptr(),
            sinks,
            out: out.ptr(),
            num_heads: *num_heads as u32,
            head_dim: case.head_dim as u32,
            out_type: case.out_type as u32,
            reserved: 0,
        };
        let grid = [merges.len(), num_heads.div_ceil(4), 1];
        Kernel::named("attention_merge").launch_behind(&[&part_out, &part_lse, &out], grid, &args, order);
        match case.out_type {
            ElementType::F32 => out.values(),
            ElementType::F16 => out.values::<u16>().into_iter().map(|x| f16::from_bits(x).to_f32()).collect(),
            ElementType::BF16 => out.values::<u16>().into_iter().map(|x| bf16::from_bits(x).to_f32()).collect(),
        }
    }

    /// Queries as the tensor cores take them.
    fn rounded(&self, x: f32) -> f64 {
        f64::from(match self.case.dtype {
            KvDType::F32 => x,
            KvDType::F16 => f16::from_f32(x).to_f32(),
            _ => bf16::from_f32(x).to_f32(),
        })
    }

    fn expected(&self) -> Vec<f32> {
        let Case { head_dim, queries_per_kv, block_size, softcap, .. } = self.case;
        let mut out = vec![];
        let requests = self.case.requests.iter().enumerate().flat_map(|(request, r)| std::iter::repeat_n(request, r.1));
        for (row, request) in requests.enumerate() {
            let position = self.positions[row];
            let table = &self.tables[request * self.max_blocks..];
            for head in 0..self.num_heads {
                let q = &self.q[(row * self.num_heads + head) * head_dim..][..head_dim];
                let keys = self.first_key(position) as usize..=position as usize;
                let read = |side, key: usize| {
                    vector(
                        &self.cache,
                        side,
                        table[key / block_size] as usize * block_size + key % block_size,
                        head / queries_per_kv,
                    )
                };
                let mut scores: Vec<f64> = keys
                    .clone()
                    .map(|key| {
                        let k = read(KvSide::Key, key);
                        let dot: f64 = q.iter().zip(&k).map(|(a, b)| self.rounded(*a) * f64::from(*b)).sum();
                        let score = dot * f64::from(self.scale);
                        if softcap > 0.0 { f64::from(softcap) * (score / f64::from(softcap)).tanh() } else { score }
                    })
                    .collect();
                let sink = if self.case.sinks { f64::from(self.sinks[head]) } else { f64::NEG_INFINITY };
                let most = scores.iter().copied().fold(sink, f64::max);
                for score in &mut scores {
                    *score = (*score - most).exp();
                }
                let total = scores.iter().sum::<f64>() + (sink - most).exp();
                let mut sum = vec![0.0; head_dim];
                for (key, weight) in keys.zip(&scores) {
                    let v = read(KvSide::Value, key);
                    sum.iter_mut().zip(&v).for_each(|(s, v)| *s += weight * f64::from(*v));
                }
                out.extend(sum.iter().map(|s| (s / total) as f32));
            }
        }
        out
    }
}

/// What rounding of weights, and of the output, can come to: values are within 2.
fn tolerance(case: &Case) -> [f32; 2] {
    let weights = match case.dtype {
        KvDType::F32 => 1e-5,
        KvDType::F16 => 2e-3,
        _ => 1e-2,
    };
    let output = match case.out_type {
        ElementType::F32 => 0.0,
        ElementType::F16 => 1.0 / 2048.0,
        ElementType::BF16 => 1.0 / 256.0,
    };
    [weights, output]
}

fn check(case: &Case, seed: u64) {
    let problem = Problem::new(case, seed);
    let order = if seed.is_multiple_of(2) { Order::Ascending } else { Order::Descending };
    assert_close(&problem.run(order), &problem.expected(), tolerance(case), &case.describe());
}

/// Every head size with every number of queries a KV head, each with two of the requests; block sizes, windows, caps, sinks,
/// splits and types of the output are drawn.
fn check_shapes(dtype: KvDType, vectors: usize, requests: &[(usize, usize)]) {
    for round in 0..HEAD_DIMS.len() * 16 {
        let seed = round as u64 + 1000 * dtype as u64 + 10_000 * vectors as u64;
        let mut rng = Rng::new(seed);
        let case = Case {
            block_size: [8, 16, 32][rng.below(3)],
            window: [0, 0, 1, 19, 64][rng.below(5)],
            chunk: [0, 0, 0, 40, 64][rng.below(5)],
            softcap: [0.0, 2.0, 0.0][rng.below(3)],
            sinks: rng.below(3) == 0,
            out_type: [ElementType::F32, ElementType::F16, ElementType::BF16][rng.below(3)],
            num_kv_heads: 1 + rng.below(2),
            vectors,
            split: [1 << 20, 64, 32][rng.below(3)],
            requests: [0, 1].map(|i| requests[(round + i) % requests.len()]).to_vec(),
            ..Case::new(dtype, HEAD_DIMS[round % HEAD_DIMS.len()], 1 + round / HEAD_DIMS.len())
        };
        check(&case, seed);
    }
}

/// One key, odd lengths, ends of tiles and blocks.
const DECODES: [(usize, usize); 5] = [(0, 1), (36, 1), (63, 1), (64, 1), (130, 1)];
/// Prompts, chunks behind others, and a row that decodes beside them.
const MIXED: [(usize, usize); 4] = [(0, 9), (70, 3), (90, 1), (127, 2)];

macro_rules! shapes {
    ($($name:ident: $dtype:ident, $vectors:expr, $requests:expr;)*) => {
        $(#[test]
        fn $name() {
            check_shapes(KvDType::$dtype, $vectors, &$requests);
        })*
    };
}

shapes! {
    decoding_over_f16_agrees_with_the_oracle: F16, 16, DECODES;
    decoding_over_bf16_agrees_with_the_oracle: BF16, 16, DECODES;
    decoding_over_int8_agrees_with_the_oracle: Int8, 16, DECODES;
    decoding_over_f8_agrees_with_the_oracle: F8E4M3, 16, DECODES;
    prompts_over_f16_agree_with_the_oracle: F16, 64, MIXED;
    prompts_over_bf16_agree_with_the_oracle: BF16, 64, MIXED;
    prompts_over_int8_agree_with_the_oracle: Int8, 64, MIXED;
    prompts_over_f8_agree_with_the_oracle: F8E4M3, 64, MIXED;
    f32_agrees_with_the_oracle: F32, 1, MIXED;
}

/// As Gemma 2 has them: heads of 256, two of them a KV head, capped scores, a window in every other layer.
#[test]
fn wide_heads_with_a_cap_and_a_window_agree_with_the_oracle() {
    for (dtype, vectors) in KvDType::ALL.into_iter().flat_map(|dtype| [16, 64].map(|vectors| (dtype, vectors))) {
        let vectors = if dtype == KvDType::F32 { 1 } else { vectors };
        for softcap in [2.0, 50.0] {
            let case = Case { window: 33, softcap, vectors, split: 64, num_kv_heads: 2, ..Case::new(dtype, 256, 2) };
            check(&Case { requests: vec![(0, 9), (130, 1), (70, 3)], ..case }, 31);
        }
    }
}

/// Up to 64 parts of a row: their weights are made 16 at a time, and the columns of 192 and 256 are added in two rounds.
#[test]
fn long_contexts_in_many_parts_agree_with_the_oracle() {
    for (dtype, head_dim, keys) in [
        (KvDType::BF16, 128, 1024),
        (KvDType::F16, 256, 529),
        (KvDType::F16, 80, 270),
        (KvDType::Int8, 128, 1023),
        (KvDType::F8E4M3, 192, 1010),
        (KvDType::F32, 64, 1024),
        (KvDType::BF16, 512, 300),
    ] {
        for (sinks, out_type) in [(false, ElementType::F32), (true, ElementType::F16), (true, ElementType::BF16)] {
            let case = Case { sinks, out_type, split: 16, num_kv_heads: 1, ..Case::new(dtype, head_dim, 3) };
            let case = Case { requests: vec![(keys - 1, 1), (15, 1), (40, 1)], ..case };
            let (_, merges, _) = Problem::new(&case, 4).plan();
            assert_eq!(merges.iter().map(|merge| merge.num_parts as usize).collect::<Vec<_>>(), [keys.div_ceil(16), 3, 0]);
            check(&case, 4);
        }
    }
}

#[test]
fn several_rows_of_a_request_decode_together() {
    for (dtype, queries_per_kv) in [(KvDType::BF16, 4), (KvDType::F8E4M3, 3), (KvDType::F16, 1)] {
        check(&Case { requests: vec![(50, 5), (3, 2)], window: 20, ..Case::new(dtype, 64, queries_per_kv) }, 7);
    }
}

#[test]
fn the_order_of_threads_changes_no_bit() {
    for (dtype, head_dim) in KvDType::ALL.into_iter().flat_map(|dtype| [80, 512].map(|head_dim| (dtype, head_dim))) {
        for vectors in [16, 64] {
            let case = Case { vectors, split: 48, requests: vec![(100, 3), (0, 1)], ..Case::new(dtype, head_dim, 3) };
            let problem = Problem::new(&case, 11);
            assert_eq!(problem.run(Order::Ascending), problem.run(Order::Descending), "{}", case.describe());
        }
    }
}

#[test]
fn a_decoded_row_has_the_same_bits_alone_and_in_a_batch() {
    for (dtype, head_dim) in KvDType::ALL.into_iter().flat_map(|dtype| [64, 512].map(|head_dim| (dtype, head_dim))) {
        let case = Case { split: 64, requests: vec![(150, 1)], ..Case::new(dtype, head_dim, 4) };
        let alone = Problem::new(&case, 5);
        let mut batch = Problem::new(&Case { requests: vec![(150, 1), (77, 1)], ..case }, 5);
        // The first request's cache is another one in shuffled blocks; let both rows be the same request.
        batch.cache = Problem::new(&alone.case, 5).cache;
        batch.tables = [alone.tables.clone(), alone.tables.clone()].concat();
        batch.max_blocks = alone.max_blocks;
        let cols = alone.q.len();
        batch.q[..cols].copy_from_slice(&alone.q);
        assert_eq!(batch.run(Order::Ascending)[..cols], alone.run(Order::Ascending), "{dtype:?}, heads of {head_dim}");
    }
}

#[test]
fn rows_without_a_key_are_zeros() {
    for (dtype, vectors) in [(KvDType::BF16, 16), (KvDType::Int8, 64), (KvDType::F32, 1)] {
        // Row 0 sees nothing of the keys from 8 on.
        let case = Case { vectors, ..Case::new(dtype, 64, 2) };
        let problem = Problem::new(&Case { requests: vec![(3, 1), (40, 1)], ..case }, 9);
        let mut late = problem.plan().0;
        late[0] = AttentionWork { key_begin: 8, key_end: 8, ..late[0] };
        let [k_plane, v_plane] = planes(&problem.cache).map(|plane| Buffer::input(&plane));
        let (q, tables, positions) =
            (Buffer::input(&problem.q), Buffer::input(&problem.tables), Buffer::input(&problem.positions));
        let (work, out) = (Buffer::input(&late), Buffer::output::<f32>(problem.q.len()));
        let args = AttentionArgs {
            q: q.ptr(),
            out: out.ptr(),
            k_plane: k_plane.ptr(),
            v_plane: v_plane.ptr(),
            block_tables: tables.ptr(),
            positions: positions.ptr(),
            ends: 0,
            work: work.ptr(),
            block_bytes: block_bytes(problem.cache.spec()) as u64,
            scales_offset: scales_offset(problem.cache.spec()) as u64,
            max_blocks: problem.max_blocks as u32,
            block_size: 16,
            num_heads: 4,
            num_kv_heads: 2,
            q_stride: 4 * 64,
            scale: 1.0,
            head_dim: 64,
            ..AttentionArgs::default()
        };
        problem.case.kernel().launch(problem.case.grid(late.len()), &args, Order::Ascending);
        let out = out.values::<f32>();
        assert!(out[..256].iter().all(|&x| x == 0.0) && out[256..].iter().all(|x| x.is_finite() && *x != 0.0), "{dtype:?}");
    }
}

/// Every code of a byte, as keys and as values: one key has all the weight, so its value comes out as it is. The codes of F8E4M3
/// below 2^-6 have no leading one, and become bfloat16s through ones that have none either, which the multiplication that follows
/// must not take for zeros.
#[test]
fn every_code_of_a_byte_comes_out_as_its_value() {
    let codes = |dtype| -> Vec<f32> {
        let value = |code: u8| match dtype {
            KvDType::Int8 => f32::from((code as i8).max(-127)),
            // Codes 0x7f and 0xff are NaNs.
            _ => f8_value(if code & 0x7f == 0x7f { 0 } else { code }),
        };
        (0..=255).map(value).collect()
    };
    for (dtype, vectors) in
        [KvDType::Int8, KvDType::F8E4M3].into_iter().flat_map(|dtype| [16, 64].map(|vectors| (dtype, vectors)))
    {
        let case = Case { vectors, requests: vec![(1, 1)], ..Case::new(dtype, 256, 4) };
        let mut problem = Problem::new(&case, 3);
        let values = codes(dtype);
        // The first key has all the weight: the other one is its negative.
        for (slot, sign) in [(0, 1.0), (1, -1.0)] {
            let slot = problem.tables[0] as usize * case.block_size + slot;
            for head in 0..case.num_kv_heads {
                let place = KvPlace { layer: 0, slot, head };
                let key: Vec<f32> = values.iter().map(|x| x * sign).collect();
                problem.cache.write(KvSide::Key, place, &key);
                problem.cache.write(KvSide::Value, place, &if sign > 0.0 { values.clone() } else { vec![1.0; 256] });
            }
        }
        // Only the smallest codes count in the score.
        let smallest = |x: &f32| *x != 0.0 && x.abs() < if dtype == KvDType::Int8 { 8.0 } else { 1.0 / 64.0 };
        problem.scale = 1.0;
        for (q, x) in problem.q.iter_mut().zip(values.iter().cycle()) {
            *q = if smallest(x) { x.signum() * 65536.0 } else { 0.0 };
        }
        for order in [Order::Ascending, Order::Descending] {
            let out = problem.run(order);
            for (head, out) in out.chunks_exact(256).enumerate() {
                assert_eq!(out, values, "{}, head {head}", case.describe());
            }
        }
    }
}

/// What a code of F8E4M3 stands for: 4 bits of exponent with a bias of 7, 3 of fraction.
fn f8_value(code: u8) -> f32 {
    let (exponent, fraction) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = if exponent == 0 { fraction / 512.0 } else { (1.0 + fraction / 8.0) * 2.0_f32.powi(exponent - 7) };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

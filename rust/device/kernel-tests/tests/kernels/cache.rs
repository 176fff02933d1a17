//! What is written to the KV cache, and whole blocks of it.

use device::{
    CacheEngine, Device, HeadNorm, KvCacheSpec, KvDType, KvGroupMetadata, KvPlace, KvShape, KvSide, Norm, NormKind, NormSpan,
    Phases, QueryScale, RopeArgs, RopeStyle, RopeTable, StepMetadata,
    cpu::ReferenceBackend,
    kernel_args::{AttentionArgs, AttentionWork, CopyBlocksArgs, HeadNormArgs, RopeAndCacheArgs},
};
use kernel_tests::{
    Buffer, Kernel, Order, assert_close,
    pool::{block_bytes, cache_name, from_planes, planes, poisoned, scales_offset, vector},
    random::Rng,
};

const TOKENS: usize = 5;
/// Rows of the rope tables.
const POSITIONS: usize = 9;

/// Norms of query and key heads.
#[derive(Clone, Copy, Debug)]
struct HeadNormCase {
    kind: NormKind,
    has_bias: bool,
    /// A weight a head, not one for all of them.
    per_head: bool,
}

impl HeadNormCase {
    fn draw(self, rng: &mut Rng, heads: usize, dim: usize) -> Norm {
        let len = if self.per_head { heads * dim } else { dim };
        let bias = self.has_bias.then(|| rng.floats(len).into());
        Norm { kind: self.kind, weight: rng.floats(len).into(), bias, eps: 1e-3 }
    }

    fn args(self, [weight, bias]: &[Option<Buffer>; 2], dim: usize) -> HeadNormArgs {
        HeadNormArgs {
            weight: weight.as_ref().map_or(0, Buffer::ptr),
            bias: bias.as_ref().map_or(0, Buffer::ptr),
            stride: if self.per_head { dim as u32 } else { 0 },
            has_mean: u32::from(self.kind == NormKind::Layer),
            eps: 1e-3,
            reserved: 0,
        }
    }
}

struct Case {
    spec: KvCacheSpec,
    num_heads: usize,
    rope: Option<(RopeStyle, usize)>,
    norm: Option<HeadNormCase>,
    /// Whether the values have such a norm as well.
    norms_values: bool,
    norms_last: bool,
    q_scale: Option<QueryScale>,
    /// Put into the values of the first token.
    extremes: bool,
}

impl Case {
    /// Those of queries, keys and values.
    fn draw_norms(&self, rng: &mut Rng, dim: usize) -> [Option<Norm>; 3] {
        let kv_heads = self.spec.layers[0].shape.num_kv_heads;
        [(self.num_heads, true), (kv_heads, true), (kv_heads, self.norms_values)]
            .map(|(heads, is_there)| self.norm.filter(|_| is_there).map(|norm| norm.draw(rng, heads, dim)))
    }
}

fn rope_table(style: RopeStyle, rotary_dim: usize, rng: &mut Rng) -> RopeTable {
    let angles = rng.floats(POSITIONS * rotary_dim / 2);
    let [cos, sin] = [f32::cos, f32::sin].map(|of: fn(f32) -> f32| angles.iter().map(|a| of(*a)).collect::<Vec<_>>().into());
    RopeTable { style, rotary_dim, cos, sin }
}

/// Infinities, tiny vectors and, where they have a defined code, NaNs.
fn put_extremes(v: &mut [f32], spec: &KvCacheSpec) {
    let (dim, kv_cols) = (spec.layers[0].shape.k_dim, spec.layers[0].shape.num_kv_heads * spec.layers[0].shape.k_dim);
    v[..dim].fill(0.0);
    v[..6].copy_from_slice(&[f32::INFINITY, -1e9, 65520.0, 1e-40, -0.0, f32::MIN_POSITIVE]);
    v[kv_cols..kv_cols + dim].fill(1e-39);
    if spec.dtype.scale_bytes() > 0 {
        v[2 * kv_cols] = f32::NAN;
    }
}

/// One step of rounding, where f32 and f64 come to different sides of a tie.
fn rounding(dtype: KvDType) -> [f32; 2] {
    match dtype {
        KvDType::F32 => [1e-5, 1e-5],
        KvDType::F16 => [1e-5, 1.0 / 1024.0],
        KvDType::BF16 => [1e-5, 1.0 / 128.0],
        KvDType::Int8 => [0.1, 1.0 / 100.0],
        KvDType::F8E4M3 => [0.02, 1.0 / 7.0],
    }
}

/// Runs kernel and oracle on the same inputs, and compares q, keys and values.
fn check(case: &Case, seed: u64) {
    let (mut rng, spec) = (Rng::new(seed), &case.spec);
    let dim = spec.layers[0].shape.k_dim;
    let (q_cols, kv_cols) = (case.num_heads * dim, spec.layers[0].shape.num_kv_heads * dim);
    let what = format!("{:?} {} heads of {dim} rope {:?} norm {:?}", spec.dtype, case.num_heads, case.rope, case.norm);
    let (q, k, mut v) = (rng.floats(TOKENS * q_cols), rng.floats(TOKENS * kv_cols), rng.floats(TOKENS * kv_cols));
    if case.extremes {
        put_extremes(&mut v, spec);
    }
    let [q_norm, k_norm, v_norm] = case.draw_norms(&mut rng, dim);
    let head_norm = |norm| HeadNorm { norm, span: NormSpan::Head };
    let rope = case.rope.map(|(style, rotary_dim)| rope_table(style, rotary_dim, &mut rng));
    let rope_positions: Vec<u32> = (0..TOKENS).map(|_| rng.below(POSITIONS) as u32).collect();
    let positions: Vec<u32> = (0..TOKENS).map(|_| rng.below(100) as u32).collect();
    let mut slots: Vec<i64> = rng.permutation(spec.num_blocks * spec.block_size)[..TOKENS].iter().map(|&s| s as i64).collect();
    slots[3] = -1;

    let backend = ReferenceBackend::new();
    let tensor = |x: &[f32], cols| {
        let mut tensor = backend.alloc(TOKENS, cols).unwrap();
        tensor.set_rows(TOKENS);
        tensor.as_mut_slice().copy_from_slice(x);
        tensor
    };
    let (mut expected_q, mut expected_k, mut expected_v) = (tensor(&q, q_cols), tensor(&k, kv_cols), tensor(&v, kv_cols));
    let cache = poisoned(spec);
    let [before_k, before_v] = planes(&cache);
    let group = KvGroupMetadata { slot_mapping: slots.clone(), ..KvGroupMetadata::default() };
    let step = StepMetadata {
        positions: positions.clone(),
        rope_positions: rope_positions.clone(),
        groups: vec![group],
        ..StepMetadata::default()
    };
    let kv = Some((&mut expected_k, Some(&mut expected_v)));
    let rope_args = RopeArgs {
        q_norm: q_norm.as_ref().map(head_norm),
        k_norm: k_norm.as_ref().map(head_norm),
        v_norm: v_norm.as_ref().map(head_norm),
        norms_last: case.norms_last,
        q_scale: case.q_scale,
        ..RopeArgs::new(&mut expected_q, kv, rope.as_ref(), (&cache, 0))
    };
    backend.rope_and_cache(rope_args, &step);

    let (q, k, v) = (Buffer::inout(&q), Buffer::input(&k), Buffer::input(&v));
    let (k_plane, v_plane) = (Buffer::inout(&before_k), Buffer::inout(&before_v));
    let weight = |norm: &Option<Norm>| norm.as_ref().map(|norm| Buffer::input(&norm.weight));
    let bias = |norm: &Option<Norm>| norm.as_ref()?.bias.as_ref().map(|bias| Buffer::input(bias));
    let [q_weights, k_weights, v_weights] = [&q_norm, &k_norm, &v_norm].map(|norm| [weight(norm), bias(norm)]);
    let table = |of: fn(&RopeTable) -> &Vec<f32>| Buffer::input(rope.as_ref().map_or(&[][..], |rope| of(rope)));
    let (cos, sin) = (table(|rope| &rope.cos), table(|rope| &rope.sin));
    let (rope_positions, slot_mapping) = (Buffer::input(&rope_positions), Buffer::input(&slots));
    let positions = Buffer::input(&positions);
    let given = |there: bool, buffer: &Buffer| if there { buffer.ptr() } else { 0 };
    let args = RopeAndCacheArgs {
        q: q.ptr(),
        k: k.ptr(),
        v: v.ptr(),
        q_norm: case.norm.map(|norm| norm.args(&q_weights, dim)).unwrap_or_default(),
        k_norm: case.norm.map(|norm| norm.args(&k_weights, dim)).unwrap_or_default(),
        v_norm: case.norm.map(|norm| norm.args(&v_weights, dim)).filter(|_| case.norms_values).unwrap_or_default(),
        cos: given(rope.is_some(), &cos),
        sin: given(rope.is_some(), &sin),
        rope_positions: rope_positions.ptr(),
        positions: positions.ptr(),
        slot_mapping: slot_mapping.ptr(),
        k_plane: k_plane.ptr(),
        v_plane: v_plane.ptr(),
        block_bytes: block_bytes(spec) as u64,
        scales_offset: scales_offset(spec) as u64,
        num_tokens: TOKENS as u32,
        num_heads: case.num_heads as u32,
        num_kv_heads: spec.layers[0].shape.num_kv_heads as u32,
        head_dim: dim as u32,
        block_size: spec.block_size as u32,
        q_stride: q_cols as u32,
        k_stride: kv_cols as u32,
        v_stride: kv_cols as u32,
        rotary_dim: case.rope.map_or(0, |rope| rope.1 as u32),
        interleaved: u32::from(case.rope.is_some_and(|rope| rope.0 == RopeStyle::Interleaved)),
        norms_last: u32::from(case.norms_last),
        scale_length: case.q_scale.map_or(0, |scale| scale.length),
        scale_offset: case.q_scale.map_or(0, |scale| scale.offset),
        scale_beta: case.q_scale.map_or(0.0, |scale| scale.beta),
    };
    let warps = TOKENS * (case.num_heads + 2 * spec.layers[0].shape.num_kv_heads);
    let order = if seed.is_multiple_of(2) { Order::Ascending } else { Order::Descending };
    let wide = if dim > 256 { "_d512" } else { "" };
    let kernel = Kernel::named(&format!("rope_and_cache_{}{wide}", cache_name(spec.dtype)));
    kernel.launch_behind(&[&q, &k, &v], [warps.div_ceil(4), 1, 1], &args, order);

    assert_close(&q.values::<f32>(), expected_q.as_slice(), [1e-5, 1e-5], &what);
    // What is not changed on its way is the same bytes, poison around it included.
    if v_norm.is_none() {
        assert_eq!(v_plane.values::<u8>(), planes(&cache)[1], "{what}");
    }
    if rope.is_none() && case.norm.is_none() {
        assert_eq!(k_plane.values::<u8>(), planes(&cache)[0], "{what}");
    }
    let caches = [from_planes(spec, &k_plane, &v_plane), cache];
    compare(&caches, KvSide::Key, &slots, &what);
    if v_norm.is_some() {
        compare(&caches, KvSide::Value, &slots, &what);
    }
}

/// Compares the vectors of slots, those that were written first.
fn compare(caches: &[CacheEngine; 2], side: KvSide, slots: &[i64], what: &str) {
    let spec = caches[1].spec();
    for &slot in slots.iter().filter(|slot| **slot >= 0) {
        for head in 0..spec.layers[0].shape.num_kv_heads {
            let [actual, expected] = caches.each_ref().map(|cache| vector(cache, side, slot as usize, head));
            assert_close(&actual, &expected, rounding(spec.dtype), what);
        }
    }
}

#[test]
fn keys_and_values_reach_their_slots_as_on_the_cpu() {
    for dtype in KvDType::ALL {
        for (round, head_dim) in [64, 80, 96, 112, 128, 192, 256, 16, 128, 24, 32, 512].into_iter().enumerate() {
            let block_size = [8, 16, 32][round % 3];
            let spec = KvCacheSpec::uniform((3, block_size), dtype, KvShape::new(1 + round % 3, head_dim), 1).unwrap();
            let rope = [
                None,
                Some((RopeStyle::Neox, head_dim)),
                Some((RopeStyle::Interleaved, head_dim)),
                Some((RopeStyle::Neox, head_dim / 2)),
                Some((RopeStyle::Interleaved, head_dim / 4)),
            ][round % 5];
            let norm = HeadNormCase { kind: NormKind::Rms, has_bias: false, per_head: false };
            let norm = (round % 2 == 1).then_some(norm);
            let (norms_last, q_scale) = (false, None);
            let norms_values = round % 4 == 3 && round % 3 != 0;
            let case = Case { spec, num_heads: 4, rope, norm, norms_values, norms_last, q_scale, extremes: round % 3 == 0 };
            check(&case, round as u64 + 100 * dtype as u64);
        }
    }
}

#[test]
fn heads_have_rms_and_layer_norms_with_a_weight_for_all_or_one_each() {
    for (round, head_dim) in [16, 24, 64, 96, 128, 192, 256, 512].into_iter().enumerate() {
        for (kind, has_bias, per_head) in [
            (NormKind::Rms, false, false),
            (NormKind::Rms, false, true),
            (NormKind::Layer, false, true),
            (NormKind::Layer, true, true),
            (NormKind::Layer, true, false),
        ] {
            let norm = Some(HeadNormCase { kind, has_bias, per_head });
            let (block_size, dtype) = (8, KvDType::F32);
            let spec = KvCacheSpec::uniform((3, block_size), dtype, KvShape::new(2, head_dim), 1).unwrap();
            let rope = [None, Some((RopeStyle::Neox, head_dim / 2)), Some((RopeStyle::Interleaved, head_dim / 4))][round % 3];
            let q_scale = (round % 2 == 0).then_some(QueryScale { beta: 0.3, length: 16, offset: 1 });
            let norms_last = has_bias == per_head;
            let norms_values = round % 2 == 0;
            let case = Case { spec, num_heads: 6, rope, norm, norms_values, norms_last, q_scale, extremes: false };
            check(&case, 1000 + round as u64);
        }
    }
}

#[test]
fn blocks_are_copied_in_every_plane() {
    let (num_blocks, block_bytes) = (6, 16 * 67);
    let mut rng = Rng::new(1);
    let planes: Vec<Vec<u8>> = (0..3).map(|_| (0..num_blocks * block_bytes).map(|_| rng.below(256) as u8).collect()).collect();
    let pairs = [4u32, 1, 0, 5, 4, 2];
    let buffers: Vec<_> = planes.iter().map(|plane| Buffer::inout(plane)).collect();
    let addresses = Buffer::input(&buffers.iter().map(Buffer::ptr).collect::<Vec<_>>());
    let pair_buffer = Buffer::input(&pairs);
    let args = CopyBlocksArgs {
        planes: addresses.ptr(),
        pairs: pair_buffer.ptr(),
        block_bytes: block_bytes as u64,
        num_pairs: 3,
        num_planes: 3,
    };
    Kernel::named("copy_blocks").launch([3, 3, 1], &args, Order::Ascending);
    for (buffer, mut expected) in buffers.iter().zip(planes) {
        for pair in pairs.chunks_exact(2) {
            let source = pair[0] as usize * block_bytes;
            expected.copy_within(source..source + block_bytes, pair[1] as usize * block_bytes);
        }
        assert_eq!(buffer.values::<u8>(), expected);
    }
}

/// Writes a token to the last block of a pool of more than 2^32 bytes and 2^31 elements, copies the block, and attends to the
/// copy.
fn check_large_pool(dtype: KvDType) {
    let spec = KvCacheSpec::uniform((140_000, 32), dtype, KvShape::new(4, 128), 1).unwrap();
    let (bytes, last, copy) = (block_bytes(&spec), spec.num_blocks - 1, spec.num_blocks - 3);
    assert!(last * bytes > 1 << 31 && last * 32 * 4 * 128 > 1 << 31);
    let mut rng = Rng::new(3);
    let cols = 4 * 128;
    let [q_values, k_values, v_values] = [(); 3].map(|()| rng.floats(cols));
    let (q, k, v) = (Buffer::inout(&q_values), Buffer::input(&k_values), Buffer::input(&v_values));
    let pool_bytes = (spec.num_blocks * bytes).next_multiple_of(4096);
    let planes = [Buffer::sparse(pool_bytes), Buffer::sparse(pool_bytes)];
    let (zero, slot) = (Buffer::input(&[0u32]), Buffer::input(&[(last * 32) as i64]));
    let args = RopeAndCacheArgs {
        q: q.ptr(),
        k: k.ptr(),
        v: v.ptr(),
        rope_positions: zero.ptr(),
        slot_mapping: slot.ptr(),
        k_plane: planes[0].ptr(),
        v_plane: planes[1].ptr(),
        block_bytes: bytes as u64,
        scales_offset: scales_offset(&spec) as u64,
        num_tokens: 1,
        num_heads: 4,
        num_kv_heads: 4,
        head_dim: 128,
        block_size: 32,
        q_stride: cols as u32,
        k_stride: cols as u32,
        v_stride: cols as u32,
        ..RopeAndCacheArgs::default()
    };
    Kernel::named(&format!("rope_and_cache_{}", cache_name(dtype))).launch([3, 1, 1], &args, Order::Ascending);
    let addresses = Buffer::input(&[planes[0].ptr(), planes[1].ptr()]);
    let pairs = Buffer::input(&[last as u32, copy as u32]);
    let args =
        CopyBlocksArgs { planes: addresses.ptr(), pairs: pairs.ptr(), block_bytes: bytes as u64, num_pairs: 1, num_planes: 2 };
    Kernel::named("copy_blocks").launch([1, 2, 1], &args, Order::Ascending);

    // What the CPU's storage makes of the same values.
    let small = poisoned(&KvCacheSpec { num_blocks: 1, ..spec.clone() });
    let stored: Vec<f32> = (0..4)
        .flat_map(|head| {
            small.write(KvSide::Value, KvPlace { layer: 0, slot: 0, head }, &v_values[head * 128..][..128]);
            vector(&small, KvSide::Value, 0, head)
        })
        .collect();
    let cpu_values = &kernel_tests::pool::planes(&small)[1];
    let vector_bytes = 32 * 128 * dtype.element_bytes();
    for block in [last, copy] {
        for head in 0..4 {
            let written = planes[1].values_at::<u8>(block * bytes + head * vector_bytes, 128 * dtype.element_bytes());
            assert!(written == cpu_values[head * vector_bytes..][..written.len()], "{dtype:?} block {block} head {head}");
        }
    }
    for (family, grid) in [("attention", [4, 1, 1]), ("prefill", [1, 4, 1])] {
        let (kernel, grid) = match dtype {
            KvDType::F32 => ("attention_f32".into(), [4, 1, 1]),
            dtype => (format!("{family}_{}_d128", cache_name(dtype)), grid),
        };
        let (table, out) = (Buffer::input(&[copy as u32]), Buffer::output::<f32>(cols));
        let work = AttentionWork { request: 0, first_row: 0, num_rows: 1, key_begin: 0, key_end: 1, part: -1 };
        let work = Buffer::input(&[work]);
        let args = AttentionArgs {
            q: q.ptr(),
            out: out.ptr(),
            k_plane: planes[0].ptr(),
            v_plane: planes[1].ptr(),
            block_tables: table.ptr(),
            positions: zero.ptr(),
            work: work.ptr(),
            block_bytes: bytes as u64,
            scales_offset: scales_offset(&spec) as u64,
            max_blocks: 1,
            block_size: 32,
            num_heads: 4,
            num_kv_heads: 4,
            q_stride: cols as u32,
            scale: 0.1,
            head_dim: 128,
            ..AttentionArgs::default()
        };
        Kernel::named(&kernel).launch(grid, &args, Order::Ascending);
        // Of one key the value comes out, but for the rounding of its weight by a scale to bfloat16.
        let tolerance = if dtype.scale_bytes() > 0 { [0.0, 1.0 / 128.0] } else { [0.0, 0.0] };
        assert_close(&out.values::<f32>(), &stored, tolerance, &kernel);
    }
}

#[test]
fn a_pool_may_have_more_than_2_31_elements() {
    for dtype in KvDType::ALL {
        check_large_pool(dtype);
    }
}

//! Every phase of `CudaBackend` against the plain backend.

use device::{
    Activation, AttentionArgs, AttentionParams, Backend, Constant, DType, EmbedArgs, EmbeddingTable, GateUpArgs, GgmlType,
    HeadNorm, KvCacheSpec, KvDType, KvGroupMetadata, KvPlace, KvShape, KvSide, LayerInputArgs, Linear, LinearOptions, Mask, Norm,
    NormKind, NormSpan, Precision, Projection, ResidualArgs, RopeArgs, RopeStyle, RopeTable, StepMetadata, StreamArgs,
    WeightView, Xielu, cpu::ReferenceBackend, cuda::CudaBackend, mmap::Bytes,
};
use kernel_tests::{
    Order, assert_close, driver,
    random::Rng,
    tensors::{fetched, tensor},
    weight::Weight,
};

const HIDDEN: usize = 64;
const CLOSE: [f32; 2] = [2e-5, 2e-5];

/// What a phase gives on both backends, the plain one first.
fn both(run: impl Fn(&dyn Backend) -> Vec<f32>, what: &str) {
    both_within(CLOSE, run, what);
}

fn both_within(close: [f32; 2], run: impl Fn(&dyn Backend) -> Vec<f32>, what: &str) {
    let cuda = CudaBackend::new(driver(Order::Ascending)).unwrap();
    let (expected, actual) = (run(&ReferenceBackend::new()), run(&cuda));
    assert!(expected.iter().any(|x| *x != 0.0), "{what}: all zeros");
    assert_close(&actual, &expected, close, what);
}

fn floats(rng: &mut Rng, n: usize) -> Vec<f32> {
    rng.floats(n)
}

fn view(rng: &mut Rng, dtype: DType, rows: usize, cols: usize) -> WeightView {
    let bytes = match dtype {
        DType::F32 => floats(rng, rows * cols).iter().flat_map(|x| x.to_le_bytes()).collect(),
        DType::BF16 => floats(rng, rows * cols).iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect(),
        DType::Ggml(GgmlType::Q8_0) => (0..rows * cols / 32)
            .flat_map(|_| {
                let codes: Vec<u8> = (0..32).map(|_| rng.below(255) as u8).collect();
                [half::f16::from_f32(0.01).to_le_bytes().to_vec(), codes].concat()
            })
            .collect(),
        other => unreachable!("{other}"),
    };
    WeightView::new(dtype, rows, cols, Bytes::from_vec(bytes)).unwrap()
}

const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::Ggml(GgmlType::Q8_0)];

fn linear(backend: &dyn Backend, weight: &WeightView, bias: Option<Vec<f32>>) -> Linear {
    backend.load_linear(weight, &LinearOptions { name: "w".into(), precision: Precision::Exact, bias }).unwrap()
}

fn norm(rng: &mut Rng, dim: usize) -> Norm {
    let weight: Vec<f32> = rng.floats(dim).iter().map(|x| x + 1.5).collect();
    Norm { kind: NormKind::Rms, weight: weight.into(), bias: None, eps: 1e-5 }
}

/// An RMS norm, and layer norms without and with a bias.
fn norms(rng: &mut Rng, dim: usize) -> [Norm; 3] {
    let layer = Norm { kind: NormKind::Layer, ..norm(rng, dim) };
    [norm(rng, dim), layer.clone(), Norm { bias: Some(rng.floats(dim).into()), ..layer }]
}

#[test]
fn tied_embeddings_and_gathered_rows() {
    let mut rng = Rng::new(1);
    for dtype in DTYPES {
        let table = view(&mut rng, dtype, 20, HIDDEN);
        let run = |backend: &dyn Backend| {
            let table = linear(backend, &table, None);
            let mut x = backend.alloc(5, HIDDEN).unwrap();
            let args = EmbedArgs {
                table: EmbeddingTable::Loaded(&table),
                token_ids: &[3, 19, 0, 3, 7],
                beyond: None,
                adapters: &[],
                scale: 1.5,
            };
            backend.embed(&args, &mut x);
            let mut out = backend.alloc(4, HIDDEN).unwrap();
            backend.gather_rows(&x, &[4, 0, 4], &mut out);
            fetched(backend, out)
        };
        both(run, &format!("{dtype}"));
    }
}

#[test]
fn normed_projections_with_and_without_bias() {
    let mut rng = Rng::new(2);
    for (dtype, rows) in DTYPES.into_iter().flat_map(|dtype| [1, 3, 8, 19].map(|rows| (dtype, rows))) {
        let (x, weight) = (floats(&mut rng, rows * HIDDEN), view(&mut rng, dtype, 33, HIDDEN));
        let (norms, bias) = (norms(&mut rng, HIDDEN), floats(&mut rng, 33));
        let [rms, layer, layer_with_bias] = norms.each_ref();
        let cases = [(Some(rms), None), (None, Some(&bias)), (Some(layer), None), (Some(layer_with_bias), Some(&bias))];
        for (norm, bias) in cases {
            let run = |backend: &dyn Backend| {
                let linear = linear(backend, &weight, bias.cloned());
                let mut out = backend.alloc(rows, 33).unwrap();
                let x = tensor(backend, &x, HIDDEN);
                backend.norm_linear(&x, norm, &mut [Projection { linear: &linear, out: &mut out }], &StepMetadata::default());
                fetched(backend, out)
            };
            both(run, &format!("{dtype}, {rows} rows"));
        }
    }
}

#[test]
fn projections_are_added_to_the_residual_with_and_without_a_norm() {
    let mut rng = Rng::new(3);
    for rows in [1, 11] {
        let (x, residual) = (floats(&mut rng, rows * 96), floats(&mut rng, rows * HIDDEN));
        let (weight, norms) = (view(&mut rng, DType::F32, HIDDEN, 96), norms(&mut rng, HIDDEN));
        let bias = floats(&mut rng, HIDDEN);
        let post_norms = std::iter::once(None).chain(norms.iter().map(Some));
        for (post_norm, bias) in post_norms.flat_map(|norm| [None, Some(&bias)].map(|bias| (norm, bias))) {
            let run = |backend: &dyn Backend| {
                let (linear, x) = (linear(backend, &weight, bias.cloned()), tensor(backend, &x, 96));
                let mut residual = tensor(backend, &residual, HIDDEN);
                let args = ResidualArgs { x: &x, linear: &linear, post_norm, scale: 0.7, residual: &mut residual };
                backend.linear_residual(args, &StepMetadata::default());
                fetched(backend, residual)
            };
            both(run, &format!("{rows} rows, norm {:?}, bias {}", post_norm.map(|norm| norm.kind), bias.is_some()));
        }
    }
}

/// Its exponents are cut early enough to be seen.
const XIELU: Activation = Activation::Xielu(Xielu { positive: 0.7, negative: 1.3, linear: 0.5, eps: -0.25 });

#[test]
fn feed_forward_halves_with_and_without_gates_and_biases() {
    let mut rng = Rng::new(4);
    for (activation, rows) in [
        (Activation::Silu, 1),
        (Activation::GeluTanh, 9),
        (Activation::Gelu, 4),
        (Activation::Swish(0.6), 3),
        (Activation::Relu, 2),
        (Activation::Relu2, 5),
        (XIELU, 7),
    ] {
        let x = floats(&mut rng, rows * HIDDEN);
        let [gate, up] = [(); 2].map(|()| view(&mut rng, DType::F32, 104, HIDDEN));
        let biases = [(); 2].map(|()| floats(&mut rng, 104));
        let cases = norms(&mut rng, HIDDEN).into_iter().zip([false, true, true]);
        for ((norm, has_biases), gated) in cases.flat_map(|case| [true, false].map(|gated| (case.clone(), gated))) {
            let run = |backend: &dyn Backend| {
                let [gate, up] = [(&gate, &biases[0]), (&up, &biases[1])]
                    .map(|(weight, bias)| linear(backend, weight, has_biases.then(|| bias.clone())));
                let (x, mut out) = (tensor(backend, &x, HIDDEN), backend.alloc(rows, 104).unwrap());
                let gate = gated.then_some(&gate);
                let args = GateUpArgs { x: &x, norm: Some(&norm), gate, up: &up, activation, out: &mut out, next: None };
                backend.gate_up(args, &StepMetadata::default());
                fetched(backend, out)
            };
            // What one half is off by is multiplied by the other, which has such values.
            let largest = |weight: &WeightView| {
                let plain: &dyn Backend = &ReferenceBackend::new();
                let linear = linear(plain, weight, has_biases.then(|| biases[1].clone()));
                let (x, mut out) = (tensor(plain, &x, HIDDEN), plain.alloc(rows, 104).unwrap());
                let projection = Projection { linear: &linear, out: &mut out };
                plain.norm_linear(&x, Some(&norm), &mut [projection], &StepMetadata::default());
                fetched(plain, out).iter().fold(1.0_f32, |largest, x| largest.max(x.abs()))
            };
            let close = if gated { [CLOSE[0] * largest(&up), CLOSE[1]] } else { CLOSE };
            both_within(close, run, &format!("{activation:?}, gated {gated}, {:?}, biases {has_biases}", norm.kind));
        }
    }
}

/// Rows of each way to multiply: what reads them alone may be told of before they are made, which changes no bit.
#[test]
fn rows_that_are_left_as_the_next_product_reads_them_have_the_same_bits() {
    let (mut rng, hidden, wide) = (Rng::new(12), 256, 512);
    for (dtype, rows) in
        [DType::F32, DType::F16, DType::BF16, DType::Ggml(GgmlType::Q4K)].into_iter().flat_map(|it| [3, 9, 40].map(|n| (it, n)))
    {
        let mut view = |features, cols| {
            let bytes = Weight::random(dtype, features, cols, &mut rng).bytes;
            WeightView::new(dtype, features, cols, Bytes::from_vec(bytes)).unwrap()
        };
        let views = [view(wide, hidden), view(wide, hidden), view(hidden, wide)];
        let x = floats(&mut rng, rows * hidden);
        for gated in [true, false] {
            let backend: &dyn Backend = &CudaBackend::new(driver(Order::Ascending)).unwrap();
            let [gate, up, down] = views.each_ref().map(|view| linear(backend, view, None));
            let run = |next| {
                let (step, x) = (StepMetadata::default(), tensor(backend, &x, hidden));
                let (mut out, mut residual) =
                    (backend.alloc(rows, wide).unwrap(), tensor(backend, &vec![1.0; rows * hidden], hidden));
                let (gate, activation) = (gated.then_some(&gate), Activation::Silu);
                backend.gate_up(GateUpArgs { x: &x, norm: None, gate, up: &up, activation, out: &mut out, next }, &step);
                let args = ResidualArgs { x: &out, linear: &down, post_norm: None, scale: 0.5, residual: &mut residual };
                backend.linear_residual(args, &step);
                fetched(backend, residual)
            };
            let (told, untold) = (run(Some(&down)), run(None));
            assert!(told.iter().any(|x| *x != 1.0) && told == untold, "{dtype}, {rows} rows, gated {gated}");
        }
    }
}

/// Requests of (computed tokens, rows), with blocks of their own.
/// Rows between products, element by element: sizes that a CTA, a lane or four values divide or do not.
#[test]
fn rows_are_scaled_bounded_multiplied_and_made_inputs_of_layers() {
    let mut rng = Rng::new(9);
    for (rows, width, layers) in [(1, 32, 3), (7, 36, 2), (5, 256, 5)] {
        let cols = width * layers;
        let (x, by) = (floats(&mut rng, rows * cols), floats(&mut rng, rows * cols));
        let narrow = floats(&mut rng, rows * width);
        let norm = norm(&mut rng, width);
        let run = |backend: &dyn Backend| {
            let phases = backend.elementwise_phases().unwrap();
            let (mut inputs, tokens) = (tensor(backend, &x, cols), tensor(backend, &by, cols));
            phases.layer_inputs(LayerInputArgs { x: &mut inputs, tokens: &tokens, norm: &norm, scale: 0.7 });
            let mut product = tensor(backend, &narrow, width);
            phases.multiply(&mut product, &inputs, (layers - 1) * width);
            let mut bounded = tensor(backend, &x, cols);
            phases.scale(&mut bounded, 1.75);
            phases.clamp(&mut bounded, [-0.5, 0.75]);
            let mut gate = tensor(backend, &x, cols);
            phases.gated(Activation::GeluTanh, &mut gate, &tokens);
            [inputs, product, bounded, gate].map(|tensor| fetched(backend, tensor)).concat()
        };
        both(run, &format!("{rows} rows, {layers} parts of {width}"));
    }
}

#[test]
fn bounds_leave_what_is_no_number() {
    let run = |backend: &dyn Backend| {
        let mut x = tensor(backend, &[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.25, -7.0], 5);
        backend.elementwise_phases().unwrap().clamp(&mut x, [-1.0, 2.0]);
        fetched(backend, x)
    };
    let cuda = CudaBackend::new(driver(Order::Ascending)).unwrap();
    for x in [run(&ReferenceBackend::new()), run(&cuda)] {
        assert!(x[0].is_nan() && x[1..] == [2.0, -1.0, 0.25, -1.0], "{x:?}");
    }
}

fn step(requests: &[(usize, usize)], block_size: usize) -> StepMetadata {
    let mut step = StepMetadata { query_start_loc: vec![0], ..StepMetadata::default() };
    let max_blocks = requests.iter().map(|(computed, rows)| (computed + rows).div_ceil(block_size)).max().unwrap_or(0);
    let mut group = KvGroupMetadata { max_blocks, ..KvGroupMetadata::default() };
    for (request, &(computed, rows)) in requests.iter().enumerate() {
        let table: Vec<u32> = (0..max_blocks).map(|block| (1 + block * requests.len() + request) as u32).collect();
        for position in computed..computed + rows {
            step.positions.push(position as u32);
            group.slot_mapping.push((table[position / block_size] as usize * block_size + position % block_size) as i64);
        }
        group.block_tables.extend(table);
        step.query_start_loc.push(step.positions.len() as u32);
        step.seq_lens.push((computed + rows) as u32);
    }
    step.rope_positions.clone_from(&step.positions);
    step.groups.push(group);
    step
}

#[test]
fn rotation_cache_and_attention_of_decodes_beside_prompts() {
    let mut rng = Rng::new(5);
    let requests = [(700, 1), (0, 20), (37, 2), (9, 1)];
    let (step, rows) = (step(&requests, 8), 24);
    for (dtype, head_dim, window) in [
        (KvDType::F32, 24, None),
        (KvDType::F32, 64, Some(30)),
        (KvDType::F32, 384, None),
        (KvDType::BF16, 64, None),
        (KvDType::BF16, 512, None),
    ] {
        let params = AttentionParams { scale: 0.03, window, ..AttentionParams::new([6, 2, head_dim], Precision::Exact) };
        let spec = KvCacheSpec::uniform((400, 8), dtype, KvShape::new(2, head_dim), 1).unwrap();
        let [q, k, v] = [6, 2, 2].map(|heads| floats(&mut rng, rows * heads * head_dim));
        let [cos, sin] = [(); 2].map(|()| floats(&mut rng, 800 * head_dim / 2).into());
        let rope = RopeTable { style: RopeStyle::Neox, rotary_dim: head_dim, cos, sin };
        let norm = norm(&mut rng, head_dim);
        let past = floats(&mut rng, 700 * head_dim);
        let run = |backend: &dyn Backend| {
            let cache = backend.alloc_kv_cache(&spec).unwrap();
            for (request, &(computed, _)) in requests.iter().enumerate() {
                let table = &step.groups[0].block_tables[request * step.groups[0].max_blocks..];
                for position in 0..computed {
                    let slot = table[position / 8] as usize * 8 + position % 8;
                    for head in 0..2 {
                        let values = &past[position * head_dim..(position + 1) * head_dim];
                        cache.write(KvSide::Key, KvPlace { layer: 0, slot, head }, values);
                        cache.write(KvSide::Value, KvPlace { layer: 0, slot, head }, values);
                    }
                }
            }
            backend.begin_step(&step);
            let (mut q, mut k) = (tensor(backend, &q, 6 * head_dim), tensor(backend, &k, 2 * head_dim));
            let mut v = tensor(backend, &v, 2 * head_dim);
            let args = RopeArgs {
                q_norm: Some(HeadNorm { norm: &norm, span: NormSpan::Head }),
                k_norm: Some(HeadNorm { norm: &norm, span: NormSpan::Head }),
                v_norm: (head_dim > 256).then_some(HeadNorm { norm: &norm, span: NormSpan::Head }),
                ..RopeArgs::new(&mut q, Some((&mut k, Some(&mut v))), Some(&rope), (&cache, 0))
            };
            backend.rope_and_cache(args, &step);
            if dtype == KvDType::BF16 {
                // As the matrix units take them: else scores differ by what rounding 64 products of up to 50 comes to.
                let rounded: Vec<f32> = fetched(backend, q).iter().map(|x| half::bf16::from_f32(*x).to_f32()).collect();
                q = tensor(backend, &rounded, 6 * head_dim);
            }
            let mut out = backend.alloc(rows, 6 * head_dim).unwrap();
            backend.attention(
                AttentionArgs { q: &q, out: &mut out, cache: &cache, layer: 0, sinks: None, params, next: None },
                &step,
            );
            let mut written = vec![0.0; head_dim];
            let slot = step.groups[0].slot_mapping[23] as usize;
            cache.read(KvSide::Key, KvPlace { layer: 0, slot, head: 1 }, &mut written);
            [fetched(backend, out), written].concat()
        };
        if dtype == KvDType::F32 {
            both(run, &format!("{dtype:?}, heads of {head_dim}, window {window:?}"));
        } else {
            let cuda = CudaBackend::new(driver(Order::Descending)).unwrap();
            // Weights are rounded by up to 2^-9 of themselves, values are within 2, and a query or key on the edge may have gone
            // the other way.
            assert_close(&run(&cuda), &run(&ReferenceBackend::new()), [1e-2, 0.0], "bf16");
        }
    }
}

#[test]
fn rows_that_see_keys_behind_them() {
    let mut rng = Rng::new(8);
    let mut step = step(&[(0, 3), (0, 70), (0, 1), (0, 20)], 8);
    step.span_ends = step.positions.iter().map(|position| position + 1).collect();
    // Rows 5 to 49 of the second request, and all but the first of the last.
    step.span_ends[8..53].fill(50);
    step.span_ends[75..].fill(20);
    let rows = step.positions.len();
    let [q, k, v] = [6, 2, 2].map(|heads| floats(&mut rng, rows * heads * 64));
    for ((mask, window), dtype) in [(Mask::Full, None), (Mask::Full, Some(9)), (Mask::Spans, None), (Mask::Spans, Some(9))]
        .into_iter()
        .flat_map(|mask| [KvDType::F32, KvDType::BF16].map(|dtype| (mask, dtype)))
    {
        let params = AttentionParams { scale: 0.03, mask, window, ..AttentionParams::new([6, 2, 64], Precision::Exact) };
        let spec = KvCacheSpec::uniform((60, 8), dtype, KvShape::new(2, 64), 1).unwrap();
        let run = |backend: &dyn Backend| {
            let cache = backend.alloc_kv_cache(&spec).unwrap();
            backend.begin_step(&step);
            let round = |x: &[f32]| -> Vec<f32> { x.iter().map(|x| half::bf16::from_f32(*x).to_f32()).collect() };
            let [mut q, mut k, mut v] = [(&q, 6), (&k, 2), (&v, 2)].map(|(x, heads)| tensor(backend, &round(x), heads * 64));
            backend.rope_and_cache(RopeArgs::new(&mut q, Some((&mut k, Some(&mut v))), None, (&cache, 0)), &step);
            let mut out = backend.alloc(rows, 6 * 64).unwrap();
            backend.attention(
                AttentionArgs { q: &q, out: &mut out, cache: &cache, layer: 0, sinks: None, params, next: None },
                &step,
            );
            fetched(backend, out)
        };
        let tolerance = if dtype == KvDType::F32 { 1e-5 } else { 1e-2 };
        for order in [Order::Ascending, Order::Descending] {
            let cuda = CudaBackend::new(driver(order)).unwrap();
            let what = format!("{mask:?}, window {window:?}, {dtype:?}");
            assert_close(&run(&cuda), &run(&ReferenceBackend::new()), [tolerance, 0.0], &what);
        }
    }
}

/// Rows with drafts: more of a request than a CTA takes, whose keys come in parts, some of which not all rows see.
#[test]
fn few_rows_of_long_requests_see_their_own_keys() {
    let mut rng = Rng::new(14);
    let (computed, drafted) = (step(&[(0, 705), (0, 11), (0, 1026)], 8), step(&[(700, 5), (3, 8), (1017, 9)], 8));
    let [k, v] = [(); 2].map(|()| floats(&mut rng, computed.positions.len() * 2 * 64));
    let q = floats(&mut rng, drafted.positions.len() * 16 * 64);
    for (window, dtype) in [None, Some(600)].into_iter().flat_map(|window| [KvDType::BF16, KvDType::Int8].map(|it| (window, it)))
    {
        let params = AttentionParams { scale: 0.1, window, ..AttentionParams::new([16, 2, 64], Precision::Fast) };
        let spec = KvCacheSpec::uniform((400, 8), dtype, KvShape::new(2, 64), 1).unwrap();
        let run = |backend: &dyn Backend| {
            let cache = backend.alloc_kv_cache(&spec).unwrap();
            backend.begin_step(&computed);
            let [mut k, mut v] = [&k, &v].map(|x| tensor(backend, x, 2 * 64));
            let mut unused = tensor(backend, &vec![0.0; computed.positions.len() * 16 * 64], 16 * 64);
            backend.rope_and_cache(RopeArgs::new(&mut unused, Some((&mut k, Some(&mut v))), None, (&cache, 0)), &computed);
            backend.begin_step(&drafted);
            let (q, mut out) = (tensor(backend, &q, 16 * 64), backend.alloc(drafted.positions.len(), 16 * 64).unwrap());
            backend.attention(
                AttentionArgs { q: &q, out: &mut out, cache: &cache, layer: 0, sinks: None, params, next: None },
                &drafted,
            );
            fetched(backend, out)
        };
        for order in [Order::Ascending, Order::Descending] {
            let cuda = CudaBackend::new(driver(order)).unwrap();
            assert_close(&run(&cuda), &run(&ReferenceBackend::new()), [1e-2, 0.0], &format!("window {window:?}, {dtype:?}"));
        }
    }
}

#[test]
fn norms_of_rows_and_of_heads_before_the_cache_is_written() {
    let (mut rng, head_dim, rows) = (Rng::new(6), 24, 6);
    let step = step(&[(3, 1), (0, 4), (9, 1)], 8);
    let spec = KvCacheSpec::uniform((20, 8), KvDType::F32, KvShape::new(2, head_dim), 1).unwrap();
    let [q, k] = [6, 2].map(|heads| floats(&mut rng, rows * heads * head_dim));
    let [cos, sin] = [(); 2].map(|()| floats(&mut rng, 16 * head_dim / 4).into());
    let rope = RopeTable { style: RopeStyle::Interleaved, rotary_dim: head_dim / 2, cos, sin };
    for (span, heads) in [(NormSpan::Head, [1, 1]), (NormSpan::Head, [6, 2]), (NormSpan::Row, [6, 2])] {
        let [q_norms, k_norms] = heads.map(|heads| norms(&mut rng, heads * head_dim));
        let norms = q_norms.iter().zip(&k_norms);
        for ((q_norm, k_norm), rope) in norms.flat_map(|norms| [None, Some(&rope)].map(|rope| (norms, rope))) {
            let run = |backend: &dyn Backend| {
                let cache = backend.alloc_kv_cache(&spec).unwrap();
                backend.begin_step(&step);
                let [mut q, mut k, mut v] = [(&q, 6), (&k, 2), (&k, 2)].map(|(x, heads)| tensor(backend, x, heads * head_dim));
                let [q_norm, k_norm] = [q_norm, k_norm].map(|norm| Some(HeadNorm { norm, span }));
                let args = RopeArgs { q_norm, k_norm, ..RopeArgs::new(&mut q, Some((&mut k, Some(&mut v))), rope, (&cache, 0)) };
                backend.rope_and_cache(args, &step);
                let mut written = fetched(backend, q);
                for (slot, head) in step.groups[0].slot_mapping.iter().flat_map(|slot| [(*slot, 0), (*slot, 1)]) {
                    let mut key = vec![0.0; head_dim];
                    cache.read(KvSide::Key, KvPlace { layer: 0, slot: slot as usize, head }, &mut key);
                    written.extend(key);
                }
                written
            };
            let what = format!("{span:?} {heads:?} {:?} bias {} rope {}", q_norm.kind, q_norm.bias.is_some(), rope.is_some());
            both(run, &what);
        }
    }
}

/// Attention of a prompt of 40 rows in chunks of so many, beside a request that decodes.
fn in_chunks(cache_type: KvDType, precision: Precision, window: Option<usize>, chunk: usize) -> Vec<f32> {
    let (mut rng, head_dim, rows) = (Rng::new(7), 64, 40);
    let cuda = CudaBackend::new(driver(Order::Ascending)).unwrap();
    let backend: &dyn Backend = &cuda;
    let spec = KvCacheSpec::uniform((100, 8), cache_type, KvShape::new(2, head_dim), 1).unwrap();
    let cache = backend.alloc_kv_cache(&spec).unwrap();
    let [q, k, v] = [6, 2, 2].map(|heads| floats(&mut rng, rows * heads * head_dim));
    let params = AttentionParams { scale: 0.03, window, ..AttentionParams::new([6, 2, head_dim], precision) };
    let mut all = Vec::new();
    for first in (0..rows).step_by(chunk) {
        let count = chunk.min(rows - first);
        let step = step(&[(first, count)], 8);
        let of = |x: &[f32], heads: usize| {
            tensor(backend, &x[first * heads * head_dim..][..count * heads * head_dim], heads * head_dim)
        };
        let (mut q, mut k, mut v) = (of(&q, 6), of(&k, 2), of(&v, 2));
        backend.begin_step(&step);
        backend.rope_and_cache(RopeArgs::new(&mut q, Some((&mut k, Some(&mut v))), None, (&cache, 0)), &step);
        let mut out = backend.alloc(count, 6 * head_dim).unwrap();
        backend
            .attention(AttentionArgs { q: &q, out: &mut out, cache: &cache, layer: 0, sinks: None, params, next: None }, &step);
        all.extend(fetched(backend, out));
    }
    all
}

#[test]
fn streams_are_mixed_changed_copied_and_cut_off() {
    let mut rng = Rng::new(13);
    for (rows, cols, count, active) in [(1, 64, 4, 0), (3, 1100, 8, 5), (2, 2048, 2, 1), (5, 36, 1, 0)] {
        let streams: Vec<_> = (0..count).map(|_| floats(&mut rng, rows * cols)).collect();
        let [hidden, scale] = [rows * cols, cols].map(|n| floats(&mut rng, n));
        let routed = floats(&mut rng, rows * count);
        let [to_predict, to_correct] = [count.pow(3), count.pow(2)].map(|n| Constant::from(floats(&mut rng, n)));
        let (scale, norm) = (Constant::from(scale), norm(&mut rng, cols));
        let run = |backend: &dyn Backend| {
            let phases = backend.stream_phases().unwrap();
            let mut streams: Vec<_> = streams.iter().map(|stream| tensor(backend, stream, cols)).collect();
            let (mut hidden, routed) = (tensor(backend, &hidden, cols), tensor(backend, &routed, count));
            let mut copies = [(); 2].map(|()| backend.alloc(rows, cols).unwrap());
            // What a layer would have changed of the active one.
            let (mut predicted, routed) = (backend.alloc(rows, cols).unwrap(), &routed);
            for (coefficients, is_first) in [(&to_predict, true), (&to_correct, false)] {
                let hidden = if is_first { &mut predicted } else { &mut hidden };
                let args = StreamArgs { routed, coefficients, streams: &mut streams, active, hidden };
                if is_first { phases.predict(args) } else { phases.correct(args, (count > 1).then_some(&scale)) }
            }
            let [plain, normed] = &mut copies;
            phases.copy(&hidden, None, plain);
            phases.copy(&predicted, Some(&norm), normed);
            phases.add(normed, plain, 0.75);
            phases.match_size(plain, &predicted);
            phases.keep_largest(&mut hidden, 0.5);
            let all = streams.into_iter().chain([hidden, predicted]).chain(copies);
            all.flat_map(|tensor| fetched(backend, tensor)).collect()
        };
        both_within([1e-4, 1e-4], run, &format!("{rows} rows of {count} streams of {cols}"));
    }
}

#[test]
fn deterministic_rows_have_the_same_bits_in_chunks_of_any_size() {
    for cache_type in KvDType::ALL {
        for window in [None, Some(11)] {
            let [whole, chunks, single] = [40, 7, 1].map(|chunk| in_chunks(cache_type, Precision::Deterministic, window, chunk));
            assert!(whole == chunks && whole == single, "{cache_type:?}, window {window:?}: chunks change bits");
        }
    }
    // What it is for: tiles of rows sum in another order than rows that are alone.
    let [whole, single] = [40, 1].map(|chunk| in_chunks(KvDType::BF16, Precision::Fast, None, chunk));
    assert_close(&whole, &single, [1e-2, 0.0], "fast");
    assert!(whole != single, "the fast way is deterministic, too");
}

#[test]
fn a_normed_row_has_the_bits_that_it_has_beside_others() {
    let mut rng = Rng::new(11);
    let (hidden, features) = (1280, 152);
    for dtype in DType::all() {
        let weights = [(); 2].map(|()| Weight::random(dtype, features, hidden, &mut rng));
        let views = weights.map(|it| WeightView::new(dtype, features, hidden, Bytes::from_vec(it.bytes)).unwrap());
        let (x, norm) = (floats(&mut rng, 3 * hidden), norm(&mut rng, hidden));
        let backend: &dyn Backend = &CudaBackend::new(driver(Order::Ascending)).unwrap();
        let run = |rows: &[f32]| {
            let options = LinearOptions { name: "w".into(), precision: Precision::Fast, bias: None };
            let [gate, up] = views.each_ref().map(|view| backend.load_linear(view, &options).unwrap());
            let (x, step) = (tensor(backend, rows, hidden), StepMetadata::default());
            let mut outs = [(); 3].map(|()| backend.alloc(3, features).unwrap());
            let [one, two, out] = &mut outs;
            let mut projections = [Projection { linear: &gate, out: one }, Projection { linear: &up, out: two }];
            backend.norm_linear(&x, Some(&norm), &mut projections, &step);
            let args = GateUpArgs {
                x: &x,
                norm: Some(&norm),
                gate: Some(&gate),
                up: &up,
                activation: Activation::Silu,
                out,
                next: None,
            };
            backend.gate_up(args, &step);
            outs.map(|out| fetched(backend, out))
        };
        let together = run(&x);
        for (row, x) in x.chunks_exact(hidden).enumerate() {
            let beside = together.each_ref().map(|out| out[row * features..(row + 1) * features].to_vec());
            assert!(run(x) == beside, "{dtype}: row {row} has other bits alone");
        }
    }
}

//! Every phase of the fast backend against the plain one.

use device::{
    Activation, AttentionArgs, AttentionParams, Backend, CacheEngine, DType, Device, EmbedArgs, EmbeddingTable, GateUpArgs,
    HeadNorm, KvCacheSpec, KvDType, KvGroupMetadata, KvPlace, KvShape, KvSide, Linear, LinearOptions, Norm, NormKind, NormSpan,
    Phases, Precision, Projection, QueryScale, ResidualArgs, RopeArgs, RopeStyle, RopeTable, StepMetadata, Tensor, WeightView,
    cpu::{CpuBackend, ReferenceBackend},
    mmap::Bytes,
};

use crate::common::{Rng, isas};

fn tensor(rng: &mut Rng, rows: usize, cols: usize) -> Tensor {
    let mut t = Tensor::new(rows, cols).unwrap();
    t.set_rows(rows);
    t.as_mut_slice().copy_from_slice(&rng.floats(rows * cols));
    t
}

fn copy(x: &Tensor) -> Tensor {
    let mut t = Tensor::new(x.rows(), x.cols()).unwrap();
    t.set_rows(x.rows());
    t.as_mut_slice().copy_from_slice(x.as_slice());
    t
}

fn weight(rng: &mut Rng, rows: usize, cols: usize) -> WeightView {
    let bytes = rng.floats(rows * cols).into_iter().flat_map(f32::to_le_bytes).collect();
    WeightView::new(DType::F32, rows, cols, Bytes::from_vec(bytes)).unwrap()
}

fn load(backend: &dyn Backend, weight: &WeightView, bias: Option<Vec<f32>>) -> Linear {
    backend.load_linear(weight, &LinearOptions { name: "w".into(), precision: Precision::Exact, bias }).unwrap()
}

/// A norm with a bias, or without one.
fn norm(rng: &mut Rng, (kind, has_bias): (NormKind, bool), dim: usize) -> Norm {
    let bias = has_bias.then(|| rng.floats(dim).into());
    Norm { kind, weight: rng.floats(dim).into(), bias, eps: 1e-5 }
}

const NORMS: [(NormKind, bool); 3] = [(NormKind::Rms, false), (NormKind::Layer, false), (NormKind::Layer, true)];
const ACTIVATIONS: [Activation; 3] = [Activation::Silu, Activation::GeluTanh, Activation::Gelu];

fn assert_close(got: &[f32], expected: &[f32], tolerance: f32, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        assert!((g - e).abs() <= tolerance * (1.0 + e.abs()), "{what}: element {i} is {g}, the oracle says {e}");
    }
}

fn backends() -> impl Iterator<Item = CpuBackend> {
    isas().flat_map(|isa| [1, 3].map(|threads| CpuBackend::new(isa, threads).unwrap()))
}

#[test]
fn linear_phases_agree_for_every_norm_with_and_without_biases_and_gates() {
    let mut rng = Rng::new(1);
    let (hidden, inner) = (96, 160);
    for rows in [1, 3, 17] {
        let (x, y, residual) = (tensor(&mut rng, rows, hidden), tensor(&mut rng, rows, inner), tensor(&mut rng, rows, hidden));
        let (a, b, down) = (weight(&mut rng, inner, hidden), weight(&mut rng, inner, hidden), weight(&mut rng, hidden, inner));
        let biases = [inner, inner, hidden].map(|len| rng.floats(len));
        let cases = NORMS.into_iter().zip(ACTIVATIONS).flat_map(|case| [false, true].map(|has_biases| (case, has_biases)));
        for ((kind, activation), has_biases) in cases {
            let norm = norm(&mut rng, kind, hidden);
            let all = |backend: &dyn Backend| {
                let [a, b, down] = [(&a, &biases[0]), (&b, &biases[1]), (&down, &biases[2])]
                    .map(|(weight, bias)| load(backend, weight, has_biases.then(|| bias.clone())));
                let mut outs = [(); 4].map(|()| Tensor::new(rows, inner).unwrap());
                let [first, second, gated, ungated] = &mut outs;
                let mut projections = [Projection { linear: &a, out: first }, Projection { linear: &b, out: second }];
                backend.norm_linear(&x, Some(&norm), &mut projections, &StepMetadata::default());
                for (gate, out) in [(Some(&a), gated), (None, ungated)] {
                    let args = GateUpArgs { x: &x, norm: Some(&norm), gate, up: &b, activation, out, next: None };
                    backend.gate_up(args, &StepMetadata::default());
                }
                let mut stream = copy(&residual);
                for post_norm in [None, Some(&norm)] {
                    let args = ResidualArgs { x: &y, linear: &down, post_norm, scale: 0.22, residual: &mut stream };
                    backend.linear_residual(args, &StepMetadata::default());
                }
                [outs.map(|o| o.as_slice().to_vec()).concat(), stream.as_slice().to_vec()].concat()
            };
            let expected = all(&ReferenceBackend::new());
            assert_eq!(expected.len(), rows * (4 * inner + hidden));
            for backend in backends() {
                let what = format!("{:?} {rows} rows {kind:?} {activation:?} biases {has_biases}", backend.info());
                assert_close(&all(&backend), &expected, 2e-4, &what);
            }
        }
    }
}

/// By hand, on the plain backend as well.
#[test]
fn a_network_without_a_gate_activates_what_it_projects() {
    let view = |values: &[f32]| {
        let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        WeightView::new(DType::F32, 2, 2, Bytes::from_vec(bytes)).unwrap()
    };
    let mut x = Tensor::new(1, 2).unwrap();
    x.set_rows(1);
    x.as_mut_slice().copy_from_slice(&[1.0, -2.0]);
    let reference: &dyn Backend = &ReferenceBackend::new();
    let fast: Vec<CpuBackend> = backends().collect();
    for backend in std::iter::once(reference).chain(fast.iter().map(|b| b as &dyn Backend)) {
        let up = load(backend, &view(&[1.0, 0.5, 3.0, 1.0]), Some(vec![0.25, 1.0]));
        let gate = load(backend, &view(&[0.0, 0.0, 0.0, 0.0]), Some(vec![2.0, -1.0]));
        let mut out = Tensor::new(1, 2).unwrap();
        let silu = |x: f32| x / (1.0 + (-x).exp());
        for (gate, expected) in [(None, [silu(0.25), silu(2.0)]), (Some(&gate), [silu(2.0) * 0.25, silu(-1.0) * 2.0])] {
            let args = GateUpArgs { x: &x, norm: None, gate, up: &up, activation: Activation::Silu, out: &mut out, next: None };
            backend.gate_up(args, &StepMetadata::default());
            assert_close(out.as_slice(), &expected, 1e-6, &format!("{:?} gated {}", backend.info(), gate.is_some()));
        }
    }
}

#[test]
fn embedding_and_gather_pick_rows() {
    let mut rng = Rng::new(2);
    let (table, x) = (weight(&mut rng, 7, 32), tensor(&mut rng, 5, 8));
    for backend in backends() {
        let (mut out, mut picked) = (backend.alloc(4, 32).unwrap(), backend.alloc(4, 8).unwrap());
        backend.embed(
            &EmbedArgs { table: EmbeddingTable::Stored(&table), token_ids: &[6, 0, 6], beyond: None, adapters: &[], scale: 3.0 },
            &mut out,
        );
        assert_eq!(out.rows(), 3);
        for (i, id) in [6, 0, 6].into_iter().enumerate() {
            let stored: Vec<f32> = table.row(id).chunks(4).map(|b| 3.0 * f32::from_le_bytes(b.try_into().unwrap())).collect();
            assert_eq!(out.row(i), stored);
        }
        backend.gather_rows(&x, &[4, 4, 1], &mut picked);
        assert_eq!([picked.row(0), picked.row(1), picked.row(2)], [x.row(4), x.row(4), x.row(1)]);
    }
}

/// A call of `rope_and_cache`: q, k, then every slot of both planes as f32.
struct RopeCase {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    /// Of q and of k.
    norms: Option<[Norm; 2]>,
    span: NormSpan,
    norms_last: bool,
    q_scale: Option<QueryScale>,
    rope: Option<RopeTable>,
    spec: KvCacheSpec,
    step: StepMetadata,
}

fn slot_values(cache: &CacheEngine, side: KvSide) -> Vec<f32> {
    let spec = cache.spec();
    let mut all = vec![];
    for slot in 0..spec.num_blocks * spec.block_size {
        for head in 0..cache.layer(1).shape.num_kv_heads {
            let mut values = vec![0.0; cache.layer(1).shape.dim(side)];
            cache.read(side, KvPlace { layer: 1, slot, head }, &mut values);
            all.extend(values);
        }
    }
    all
}

fn run_rope(backend: &dyn Backend, case: &RopeCase) -> [Vec<f32>; 4] {
    let cache = backend.alloc_kv_cache(&case.spec).unwrap();
    let (mut q, mut k, mut v) = (copy(&case.q), copy(&case.k), copy(&case.v));
    let head_norm = |norm| HeadNorm { norm, span: case.span };
    let (q_norm, k_norm) = case.norms.as_ref().map(|[q, k]| (head_norm(q), head_norm(k))).unzip();
    let args = RopeArgs {
        q: &mut q,
        kv: Some((&mut k, Some(&mut v))),
        q_norm,
        k_norm,
        v_norm: case.norms.as_ref().map(|[_, k]| head_norm(k)),
        norms_last: case.norms_last,
        q_scale: case.q_scale,
        rope: case.rope.as_ref(),
        cache: &cache,
        layer: 1,
    };
    backend.rope_and_cache(args, &case.step);
    [q.as_slice().to_vec(), k.as_slice().to_vec(), slot_values(&cache, KvSide::Key), slot_values(&cache, KvSide::Value)]
}

/// One rounding of the cache type where the last bit of f32 differs.
fn cache_tolerance(dtype: KvDType) -> f32 {
    match dtype {
        KvDType::F32 => 1e-5,
        KvDType::F16 => 1e-3,
        KvDType::BF16 => 8e-3,
        // One step of a vector whose elements reach 8 or so.
        KvDType::Int8 => 8.0 / 126.0,
        KvDType::F8E4M3 => 0.125,
    }
}

/// Compares every backend with the plain one.
fn check_rope(case: &RopeCase, what: &str) {
    let expected = run_rope(&ReferenceBackend::new(), case);
    for backend in backends() {
        let got = run_rope(&backend, case);
        let what = format!("{:?} {what}", backend.info());
        for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
            let tolerance = if i < 2 { 1e-5 } else { cache_tolerance(case.spec.dtype) };
            assert_close(got, expected, tolerance, &format!("{what}, output {i}"));
        }
        if case.norms.is_none() {
            assert_eq!(got[3], expected[3], "{what}: values are only converted");
        }
    }
}

/// Six query heads and two of keys, in slots of which every fifth is none.
fn rope_case(rng: &mut Rng, (head_dim, dtype, tokens): (usize, KvDType, usize), rope: Option<(RopeStyle, usize)>) -> RopeCase {
    let slot_mapping = (0..tokens).map(|t| if t % 5 == 4 { -1 } else { (t * 11 + 8) as i64 % 72 }).collect();
    RopeCase {
        q: tensor(rng, tokens, 6 * head_dim),
        k: tensor(rng, tokens, 2 * head_dim),
        v: tensor(rng, tokens, 2 * head_dim),
        norms: None,
        span: NormSpan::Head,
        norms_last: false,
        q_scale: None,
        rope: rope.map(|(style, rotary_dim)| {
            let angles = rng.floats(64 * rotary_dim / 2);
            let [cos, sin] = [f32::cos, f32::sin].map(|of: fn(f32) -> f32| angles.iter().map(|a| of(*a)).collect::<Vec<_>>());
            RopeTable { style, rotary_dim, cos: cos.into(), sin: sin.into() }
        }),
        step: StepMetadata {
            positions: (0..tokens).map(|t| 40 + t as u32).collect(),
            rope_positions: (0..tokens).map(|_| rng.below(64) as u32).collect(),
            groups: vec![KvGroupMetadata { slot_mapping, ..KvGroupMetadata::default() }],
            ..StepMetadata::default()
        },
        spec: KvCacheSpec::uniform((9, 8), dtype, KvShape::new(2, head_dim), 2).unwrap(),
    }
}

#[test]
fn rope_and_cache_agree_for_every_style_width_and_type() {
    let mut rng = Rng::new(3);
    let sizes =
        [(64, 64), (80, 20), (80, 32), (40, 40), (27, 6), (96, 64), (8, 2), (16, 16), (16, 4), (24, 24), (24, 12), (32, 8)];
    for (head_dim, rotary_dim) in sizes.into_iter().chain([(128, 128), (192, 48), (256, 256), (256, 64)]) {
        for rope in [None, Some((RopeStyle::Neox, rotary_dim)), Some((RopeStyle::Interleaved, rotary_dim))] {
            for dtype in KvDType::ALL {
                for (kind, tokens) in [(None, 1), (Some(NORMS[0]), 37), (Some(NORMS[2]), 5)] {
                    let mut case = rope_case(&mut rng, (head_dim, dtype, tokens), rope);
                    case.norms = kind.map(|kind| [(); 2].map(|()| norm(&mut rng, kind, head_dim)));
                    check_rope(&case, &format!("{head_dim} {rope:?} {dtype:?} {kind:?}"));
                }
            }
        }
    }
}

#[test]
fn norms_of_queries_and_keys_run_over_heads_or_rows_with_one_weight_or_one_a_head() {
    let mut rng = Rng::new(4);
    for (head_dim, rope) in [(64, Some((RopeStyle::Neox, 64))), (24, Some((RopeStyle::Interleaved, 8))), (27, None), (80, None)] {
        for (kind, tokens) in NORMS.into_iter().flat_map(|kind| [1, 9].map(|tokens| (kind, tokens))) {
            for (span, heads) in [(NormSpan::Head, [1, 1]), (NormSpan::Head, [6, 2]), (NormSpan::Row, [6, 2])] {
                let mut case = rope_case(&mut rng, (head_dim, KvDType::F32, tokens), rope);
                case.norms = Some(heads.map(|heads| norm(&mut rng, kind, heads * head_dim)));
                case.span = span;
                check_rope(&case, &format!("{head_dim} {rope:?} {kind:?} {span:?} weights of {heads:?} heads"));
            }
        }
    }
}

#[test]
fn norms_come_before_or_after_the_rotation_and_queries_grow_with_their_position() {
    let mut rng = Rng::new(7);
    for (head_dim, tokens) in [(64, 1), (64, 9), (24, 5), (27, 3)] {
        let mut case = rope_case(&mut rng, (head_dim, KvDType::F32, tokens), Some((RopeStyle::Neox, 16)));
        case.norms = Some([(); 2].map(|()| norm(&mut rng, NORMS[0], head_dim)));
        let before = run_rope(&ReferenceBackend::new(), &case);
        case.norms_last = true;
        check_rope(&case, &format!("{head_dim}, norms last"));
        let after = run_rope(&ReferenceBackend::new(), &case);
        assert!(before[0] != after[0] && before[2] != after[2]);
        // Positions 40 and 41 fill 7 steps of 6 with an offset of 2, those of 46 and 47 8.
        case.q_scale = Some(QueryScale { beta: 0.5, length: 6, offset: 2 });
        check_rope(&case, &format!("{head_dim}, scaled"));
        let [scaled, ..] = run_rope(&ReferenceBackend::new(), &case);
        let factor = |token: usize| 1.0 + 0.5 * (1.0 + ((42 + token) / 6) as f32).ln();
        for (token, (x, y)) in after[0].chunks(6 * head_dim).zip(scaled.chunks(6 * head_dim)).enumerate() {
            let expected: Vec<_> = x.iter().map(|x| x * factor(token)).collect();
            assert_close(y, &expected, 1e-6, "queries times their factor");
        }
    }
}

/// Of the plain backend and of the fast ones.
#[test]
fn a_norm_of_rows_sees_all_heads_and_one_of_heads_each_alone() {
    let mut rng = Rng::new(5);
    let mut case = rope_case(&mut rng, (8, KvDType::F32, 1), None);
    // The first query head is a hundred times the others.
    case.q.as_mut_slice()[..8].iter_mut().for_each(|x| *x *= 100.0);
    let ones = |len: usize| Norm { kind: NormKind::Rms, weight: vec![1.0; len].into(), bias: None, eps: 0.0 };
    let mean_square = |x: &[f32]| x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32;
    for (span, lens) in [(NormSpan::Head, [8, 8]), (NormSpan::Head, [48, 16]), (NormSpan::Row, [48, 16])] {
        case.norms = Some(lens.map(ones));
        case.span = span;
        let reference: &dyn Backend = &ReferenceBackend::new();
        let fast: Vec<CpuBackend> = backends().collect();
        for backend in std::iter::once(reference).chain(fast.iter().map(|b| b as &dyn Backend)) {
            let [q, ..] = run_rope(backend, &case);
            let heads: Vec<f32> = q.chunks_exact(8).map(mean_square).collect();
            match span {
                NormSpan::Head => assert_close(&heads, &[1.0; 6], 1e-5, "each head"),
                NormSpan::Row => {
                    assert_close(&[mean_square(&q)], &[1.0], 1e-5, "the row");
                    assert!(heads[0] > 5.9 && heads[1..].iter().all(|x| *x < 0.1), "{heads:?}");
                }
            }
        }
    }
}

#[test]
#[should_panic(expected = "a norm of 8 values over 6 heads of 8, Row")]
fn a_norm_of_rows_has_a_weight_as_long_as_a_row() {
    let mut rng = Rng::new(6);
    let mut case = rope_case(&mut rng, (8, KvDType::F32, 1), None);
    case.norms = Some([(); 2].map(|()| norm(&mut rng, NORMS[0], 8)));
    case.span = NormSpan::Row;
    run_rope(&CpuBackend::new(isas().next().unwrap(), 1).unwrap(), &case);
}

#[test]
fn rotation_is_the_plain_formula_and_slot_minus_one_is_skipped() {
    let spec = KvCacheSpec::uniform((2, 8), KvDType::F32, KvShape::new(1, 4), 2).unwrap();
    let (cos, sin) = (vec![9.0, 9.0, 0.6, 0.8], vec![9.0, 9.0, 0.8, 0.6]);
    let mut x = Tensor::new(2, 4).unwrap();
    x.set_rows(2);
    x.as_mut_slice().copy_from_slice(&[1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0, 4.0]);
    for (style, expected) in [
        (RopeStyle::Neox, [1.0 * 0.6 - 3.0 * 0.8, 2.0 * 0.8 - 4.0 * 0.6, 3.0 * 0.6 + 1.0 * 0.8, 4.0 * 0.8 + 2.0 * 0.6]),
        (RopeStyle::Interleaved, [1.0 * 0.6 - 2.0 * 0.8, 2.0 * 0.6 + 1.0 * 0.8, 3.0 * 0.8 - 4.0 * 0.6, 4.0 * 0.8 + 3.0 * 0.6]),
    ] {
        let case = RopeCase {
            q: copy(&x),
            k: copy(&x),
            v: copy(&x),
            norms: None,
            span: NormSpan::Head,
            norms_last: false,
            q_scale: None,
            rope: Some(RopeTable { style, rotary_dim: 4, cos: cos.clone().into(), sin: sin.clone().into() }),
            spec: spec.clone(),
            step: StepMetadata {
                rope_positions: vec![1, 1],
                groups: vec![KvGroupMetadata { slot_mapping: vec![-1, 10], ..KvGroupMetadata::default() }],
                ..StepMetadata::default()
            },
        };
        let reference: &dyn Backend = &ReferenceBackend::new();
        let fast: Vec<CpuBackend> = backends().collect();
        for backend in std::iter::once(reference).chain(fast.iter().map(|b| b as &dyn Backend)) {
            let [q, k, keys, values] = run_rope(backend, &case);
            assert_close(&q, &[expected, expected].concat(), 1e-6, "q");
            assert_close(&k, &[expected, expected].concat(), 1e-6, "k");
            assert_eq!(keys[40..44], k[4..]);
            assert_eq!(values[40..44], [1.0, 2.0, 3.0, 4.0]);
            assert!(keys[..40].iter().chain(&keys[44..]).all(|&x| x == 0.0), "only slot 10 is written");
        }
    }
}

/// Attention and the feed-forward network of a layer read the same rows (GPT-J, Cohere, Phi): both are projected before either is
/// added.
#[test]
fn layers_with_parallel_parts_agree() {
    const HIDDEN: usize = 96;
    let (mut rng, head_dim) = (Rng::new(7), 24);
    let layers = [(); 3].map(|()| {
        let shapes = [[96, HIDDEN], [48, HIDDEN], [48, HIDDEN], [HIDDEN, 96], [160, HIDDEN], [HIDDEN, 160]];
        let linears = shapes.map(|[rows, cols]| (weight(&mut rng, rows, cols), rng.floats(rows)));
        (norm(&mut rng, NORMS[2], HIDDEN), linears)
    });
    let spec = KvCacheSpec::uniform((4, 8), KvDType::F32, KvShape::new(2, head_dim), 3).unwrap();
    let params = AttentionParams { scale: 0.05, ..AttentionParams::new([4, 2, head_dim], Precision::Exact) };
    let rows = [5, 1, 1].map(|rows| tensor(&mut rng, rows, HIDDEN));
    let run = |backend: &dyn Backend| {
        let layers = layers.each_ref().map(|(norm, linears)| {
            (norm, linears.each_ref().map(|(weight, bias)| load(backend, weight, Some(bias.iter().map(|b| b * 0.1).collect()))))
        });
        let cache = backend.alloc_kv_cache(&spec).unwrap();
        let [mut q, mut k, mut v, mut attended, mut inner] = [96, 48, 48, 96, 160].map(|cols| backend.alloc(5, cols).unwrap());
        let (mut all, mut computed) = (vec![], 0);
        for rows in &rows {
            let mut hidden = copy(rows);
            let positions: Vec<u32> = (computed..computed + rows.rows() as u32).collect();
            computed += rows.rows() as u32;
            let slot_mapping = positions.iter().map(|p| i64::from(*p) + 8).collect();
            let step = StepMetadata {
                rope_positions: positions.clone(),
                positions,
                query_start_loc: vec![0, rows.rows() as u32],
                seq_lens: vec![computed],
                groups: vec![KvGroupMetadata { block_tables: vec![1], max_blocks: 1, slot_mapping }],
                ..StepMetadata::default()
            };
            backend.begin_step(&step);
            for (layer, (norm, [wq, wk, wv, wo, up, down])) in layers.iter().enumerate() {
                let projections = &mut [
                    Projection { linear: wq, out: &mut q },
                    Projection { linear: wk, out: &mut k },
                    Projection { linear: wv, out: &mut v },
                ];
                backend.norm_linear(&hidden, Some(norm), projections, &step);
                let activation = Activation::GeluTanh;
                let args = GateUpArgs { x: &hidden, norm: Some(norm), gate: None, up, activation, out: &mut inner, next: None };
                backend.gate_up(args, &step);
                let cache = &cache;
                backend.rope_and_cache(RopeArgs::new(&mut q, Some((&mut k, Some(&mut v))), None, (cache, layer)), &step);
                backend
                    .attention(AttentionArgs { q: &q, out: &mut attended, cache, layer, sinks: None, params, next: None }, &step);
                for (x, linear) in [(&attended, wo), (&inner, down)] {
                    let args = ResidualArgs { x, linear, post_norm: None, scale: 0.22, residual: &mut hidden };
                    backend.linear_residual(args, &step);
                }
            }
            all.extend_from_slice(hidden.as_slice());
        }
        all
    };
    let expected = run(&ReferenceBackend::new());
    for backend in backends() {
        assert_close(&run(&backend), &expected, 1e-3, &format!("{:?}", backend.info()));
    }
}

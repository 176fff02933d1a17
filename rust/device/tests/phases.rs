//! Every phase of the fast backend against the plain one.

mod common;

use common::{Rng, tiers};
use device::{
    Activation, Backend, CacheEngine, DType, Device, EmbedArgs, EmbeddingTable, GateUpArgs, KvCacheSpec, KvDType,
    KvGroupMetadata, KvPlace, KvShape, KvSide, Linear, LinearOptions, Norm, NormKind, Phases, Precision, Projection,
    ResidualArgs, RopeArgs, RopeStyle, RopeTable, StepMetadata, Tensor, WeightView,
    cpu::{CpuBackend, ReferenceBackend},
    mmap::Bytes,
};

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

fn norm(rng: &mut Rng, kind: NormKind, dim: usize) -> Norm {
    let bias = (kind == NormKind::Layer).then(|| rng.floats(dim).into());
    Norm { kind, weight: rng.floats(dim).into(), bias, eps: 1e-5 }
}

fn assert_close(got: &[f32], expected: &[f32], tolerance: f32, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        assert!((g - e).abs() <= tolerance * (1.0 + e.abs()), "{what}: element {i} is {g}, the oracle says {e}");
    }
}

fn backends() -> impl Iterator<Item = CpuBackend> {
    tiers().flat_map(|tier| [1, 3].map(|threads| CpuBackend::new(tier, threads).unwrap()))
}

#[test]
fn linear_phases_agree() {
    let mut rng = Rng::new(1);
    let (hidden, inner) = (96, 160);
    for rows in [1, 3, 17] {
        let (x, y, residual) = (tensor(&mut rng, rows, hidden), tensor(&mut rng, rows, inner), tensor(&mut rng, rows, hidden));
        let (a, b, down) = (weight(&mut rng, inner, hidden), weight(&mut rng, inner, hidden), weight(&mut rng, hidden, inner));
        let bias = rng.floats(inner);
        for (kind, activation) in
            [(NormKind::Rms, Activation::Silu), (NormKind::Layer, Activation::Gelu), (NormKind::Rms, Activation::GeluTanh)]
        {
            let norm = norm(&mut rng, kind, hidden);
            let all = |backend: &dyn Backend| {
                let (a, b, down) = (load(backend, &a, Some(bias.clone())), load(backend, &b, None), load(backend, &down, None));
                let mut outs = [(); 3].map(|()| Tensor::new(rows, inner).unwrap());
                let [first, second, gated] = &mut outs;
                let mut projections = [Projection { linear: &a, out: first }, Projection { linear: &b, out: second }];
                let step = StepMetadata::default();
                backend.norm_linear(&x, Some(&norm), &mut projections, &step);
                backend.gate_up(GateUpArgs { x: &x, norm: Some(&norm), gate: &a, up: &b, activation, out: gated }, &step);
                let mut stream = copy(&residual);
                for post_norm in [None, Some(&norm)] {
                    let args = ResidualArgs { x: &y, linear: &down, post_norm, scale: 0.5, residual: &mut stream };
                    backend.linear_residual(args, &step);
                }
                [outs.map(|o| o.as_slice().to_vec()).concat(), stream.as_slice().to_vec()].concat()
            };
            let expected = all(&ReferenceBackend::new());
            assert_eq!(expected.len(), rows * (3 * inner + hidden));
            for backend in backends() {
                assert_close(&all(&backend), &expected, 2e-4, &format!("{:?} {rows} rows {kind:?}", backend.info()));
            }
        }
    }
}

#[test]
fn embedding_and_gather_pick_rows() {
    let mut rng = Rng::new(2);
    let (table, x) = (weight(&mut rng, 7, 32), tensor(&mut rng, 5, 8));
    for backend in backends() {
        let (mut out, mut picked) = (backend.alloc(4, 32).unwrap(), backend.alloc(4, 8).unwrap());
        backend.embed(&EmbedArgs { table: EmbeddingTable::Stored(&table), token_ids: &[6, 0, 6], scale: 3.0 }, &mut out);
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
    norms: Option<(Norm, Norm)>,
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
    let (mut q, mut k) = (copy(&case.q), copy(&case.k));
    let (q_norm, k_norm) = case.norms.as_ref().map(|(q, k)| (q, k)).unzip();
    let args =
        RopeArgs { q: &mut q, kv: Some((&mut k, &case.v)), q_norm, k_norm, rope: case.rope.as_ref(), cache: &cache, layer: 1 };
    backend.rope_and_cache(args, &case.step);
    [q.as_slice().to_vec(), k.as_slice().to_vec(), slot_values(&cache, KvSide::Key), slot_values(&cache, KvSide::Value)]
}

#[test]
fn rope_and_cache_agree_for_every_style_width_and_type() {
    let mut rng = Rng::new(3);
    for (head_dim, rotary_dim) in [(64, 64), (80, 20), (40, 40), (27, 6), (96, 64), (8, 2)] {
        for style in [RopeStyle::Neox, RopeStyle::Interleaved] {
            for dtype in KvDType::ALL {
                for (kind, tokens) in [(None, 1), (Some(NormKind::Rms), 37), (Some(NormKind::Layer), 5)] {
                    let spec = KvCacheSpec::uniform((9, 8), dtype, KvShape::new(2, head_dim), 2).unwrap();
                    let angles = rng.floats(64 * rotary_dim / 2);
                    let rope = RopeTable {
                        style,
                        rotary_dim,
                        cos: angles.iter().map(|a| a.cos()).collect::<Vec<_>>().into(),
                        sin: angles.iter().map(|a| a.sin()).collect::<Vec<_>>().into(),
                    };
                    let slot_mapping = (0..tokens).map(|t| if t % 5 == 4 { -1 } else { (t * 11 + 8) as i64 % 72 }).collect();
                    let case = RopeCase {
                        q: tensor(&mut rng, tokens, 6 * head_dim),
                        k: tensor(&mut rng, tokens, 2 * head_dim),
                        v: tensor(&mut rng, tokens, 2 * head_dim),
                        norms: kind.map(|kind| (norm(&mut rng, kind, head_dim), norm(&mut rng, kind, head_dim))),
                        rope: (head_dim != 40).then_some(rope),
                        step: StepMetadata {
                            rope_positions: (0..tokens).map(|_| rng.below(64) as u32).collect(),
                            groups: vec![KvGroupMetadata { slot_mapping, ..KvGroupMetadata::default() }],
                            ..StepMetadata::default()
                        },
                        spec,
                    };
                    let expected = run_rope(&ReferenceBackend::new(), &case);
                    // One rounding of the cache type where the last bit of f32 differs.
                    let cache_tolerance = match dtype {
                        KvDType::F32 => 1e-5,
                        KvDType::F16 => 1e-3,
                        KvDType::BF16 => 8e-3,
                        // One step of a vector whose elements reach 8 or so.
                        KvDType::Int8 => 8.0 / 126.0,
                        KvDType::F8E4M3 => 0.125,
                    };
                    for backend in backends() {
                        let got = run_rope(&backend, &case);
                        let what = format!("{:?} {head_dim}/{rotary_dim} {style:?} {dtype:?} {kind:?}", backend.info());
                        for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
                            let tolerance = if i < 2 { 1e-5 } else { cache_tolerance };
                            assert_close(got, expected, tolerance, &format!("{what}, output {i}"));
                        }
                        assert_eq!(got[3], expected[3], "{what}: values are only converted");
                    }
                }
            }
        }
    }
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

//! Norms, activation functions, and the phases that fuse them with projections.

use super::*;
use crate::{Activation, GateUpArgs, ResidualArgs, Xielu, cpu::read_ahead::Reader};

/// Norm of each row in f64.
fn plain_norm(norm: &Norm, x: &[f32]) -> Vec<f32> {
    let n = norm.weight.len();
    x.chunks_exact(n)
        .flat_map(|row| {
            let mean = if norm.kind == NormKind::Layer { row.iter().map(|v| f64::from(*v)).sum::<f64>() / n as f64 } else { 0.0 };
            let var = row.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / n as f64;
            let factor = 1.0 / (var + f64::from(norm.eps)).sqrt();
            (0..n).map(move |i| {
                let bias = norm.bias.as_ref().map_or(0.0, |b| f64::from(b[i]));
                ((f64::from(row[i]) - mean) * factor * f64::from(norm.weight[i]) + bias) as f32
            })
        })
        .collect()
}

fn plain_activation(activation: Activation, x: f64) -> f64 {
    // erf by its Taylor series, good to |x| of about 4.
    let erf = |x: f64| {
        let (mut term, mut sum) = (x, x);
        for n in 1..200 {
            term *= -x * x / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        sum * std::f64::consts::FRAC_2_SQRT_PI
    };
    match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh()),
        Activation::Gelu => 0.5 * x * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2)),
        Activation::Swish(beta) => x / (1.0 + (-f64::from(beta) * x).exp()),
        Activation::Relu => x.max(0.0),
        Activation::Relu2 => x.max(0.0).powi(2),
        Activation::Xielu(Xielu { positive, negative, linear, eps }) => {
            let [positive, negative, linear, eps] = [positive, negative, linear, eps].map(f64::from);
            linear * x + if x > 0.0 { positive * x * x } else { negative * (x.min(eps).exp() - 1.0 - x) }
        }
    }
}

#[test]
fn activations_with_an_edge_agree_with_f64() {
    let xielu = Activation::Xielu(Xielu { positive: 0.7, negative: 1.3, linear: 0.5, eps: -0.25 });
    for activation in [Activation::Relu, Activation::Relu2, xielu] {
        let inputs: Vec<f32> = (-5_000..5_000).map(|i| i as f32 / 1_000.0).collect();
        let mut got = inputs.clone();
        activate(activation, &mut got);
        for (x, g) in inputs.iter().zip(&got) {
            let e = plain_activation(activation, f64::from(*x));
            // Of the exponential, 1 and x are subtracted.
            let bound = 3e-7 * (e.abs() + if activation == xielu { 1.0 + f64::from(x.abs()) } else { 0.0 });
            assert!((f64::from(*g) - e).abs() <= bound, "{activation:?}({x}) is {g} instead of {e}");
        }
        let mut far = [f32::NAN, -1e30];
        activate(activation, &mut far);
        assert!(far[0].is_nan() && (activation == xielu || far[1] == 0.0), "{activation:?}: {far:?}");
    }
}

#[test]
fn norms_agree_with_f64_and_are_the_same_on_every_isa() {
    let mut random = Random::new(11);
    for kind in [NormKind::Rms, NormKind::Layer] {
        for dim in [1, 7, 64, 577] {
            let (norm, x) = (random.norm(kind, dim), random.vec(dim));
            let expected = plain_norm(&norm, &x);
            let mut got = vec![0.0; dim];
            apply_norm(&norm, &x, &mut got);
            for (g, e) in got.iter().zip(&expected) {
                assert!((g - e).abs() <= 2e-6 * (1.0 + e.abs()), "{kind:?} {dim}: {g} instead of {e}");
            }
            for isa in isas() {
                let mut again = vec![0.0; dim];
                elementwise::norm_row(isa, &norm, &x, &mut again);
                assert!(again.iter().zip(&got).all(|(a, b)| a.to_bits() == b.to_bits()), "{kind:?} {dim} {}", isa.name());
                again.copy_from_slice(&x);
                elementwise::normed_row(isa, &norm, &mut again);
                assert!(
                    again.iter().zip(&got).all(|(a, b)| a.to_bits() == b.to_bits()),
                    "in place, {kind:?} {dim} {}",
                    isa.name()
                );
            }
        }
    }
}

#[test]
fn activation_functions_agree_with_f64() {
    for activation in [Activation::Silu, Activation::GeluTanh, Activation::Gelu, Activation::Swish(1.702)] {
        let inputs: Vec<f32> = (-5_000..5_000).map(|i| i as f32 / 1_000.0).collect();
        let mut got = inputs.clone();
        activate(activation, &mut got);
        for (x, g) in inputs.iter().zip(&got) {
            let e = plain_activation(activation, f64::from(*x));
            // Rounding the argument of the exponential to f32 costs the result as many relative ulps as the argument is large.
            let argument = match activation {
                Activation::Silu | Activation::Swish(_) => 1.702 * f64::from(x.abs()),
                _ => f64::from(x.abs()) + f64::from(x.abs()).powi(3) * 0.1,
            };
            let bound = (6e-7 + 2e-7 * argument) * e.abs();
            assert!((f64::from(*g) - e).abs() <= bound + 1e-15, "{activation:?}({x}) is {g} instead of {e}");
        }
        let mut far = [-200.0, -90.0, 90.0, 1e30, f32::NAN];
        activate(activation, &mut far);
        assert!(far[0].abs() < 1e-30 && far[1].abs() < 1e-30 && far[2..4] == [90.0, 1e30] && far[4].is_nan(), "{far:?}");
    }
}

/// An RMS norm, or a layer norm with a bias or without one.
fn norm_of_step(random: &mut Random, rows: usize, dim: usize) -> Norm {
    match rows {
        1 => random.norm(NormKind::Layer, dim),
        6 => random.norm(NormKind::Rms, dim),
        _ => Norm { bias: None, ..random.norm(NormKind::Layer, dim) },
    }
}

#[test]
fn fused_phases_are_the_plain_operations_one_after_the_other() {
    let mut scratch = LinearScratch::default();
    for threads in [1, 2] {
        let pool = ThreadPool::new(threads).unwrap();
        for (isa, precision, dtype) in isas().into_iter().flat_map(|t| {
            let q41 = DType::Ggml(GgmlType::Q4_1);
            [
                (t, Precision::Exact, DType::BF16),
                (t, Precision::Exact, q41),
                (t, Precision::Fast, q41),
                (t, Precision::Deterministic, DType::BF16),
                (t, Precision::Fast, DType::F32),
                (t, Precision::Fast, DType::BF16),
            ]
        }) {
            let context = LinearContext { pool: &pool, isa, adapters: &[] };
            for m in [1, 6, 40] {
                let mut random = Random::new(m as u64);
                let (k, n) = (256, 90);
                let weights: Vec<_> = (0..3).map(|i| random.weight(dtype, n - 30 * i, k)).collect();
                let biases: Vec<_> = weights.iter().map(|w| random.vec(w.rows)).collect();
                let linears: Vec<Linear> = weights
                    .iter()
                    .zip(&biases)
                    .map(|(w, b)| {
                        let options = options(precision, Some(b.clone()));
                        CpuLinear::new(w, &options, isa, &pool).expect("a linear layer").into()
                    })
                    .collect();
                let x = random.tensor(m, k);
                let norm = norm_of_step(&mut random, m, k);
                let rounded = precision != Precision::Exact && in_bf16(isa, dtype, k);
                let seen = |x: &[f32]| match dtype {
                    _ if rounded => through_bf16(x),
                    _ if in_tiles(isa, m, dtype, k) => x.to_vec(),
                    DType::Ggml(_) if precision == Precision::Fast => through_integers(isa, x, k),
                    _ => x.to_vec(),
                };
                let plain = |x: &[f32], i: usize| -> Vec<f32> {
                    let x = seen(x);
                    let (mut y, _) = oracle(&x, &weights[i]);
                    y.iter_mut().enumerate().for_each(|(j, y)| *y += f64::from(biases[i][j % weights[i].rows]));
                    y.iter().map(|v| *v as f32).collect()
                };
                let near = |what: &str, got: &[f32], expected: &[f32]| {
                    let scale = expected.iter().fold(1.0f32, |a, v| a.max(v.abs()));
                    // A normalised value that lies between two codes may round the other way: a code is 1/127 of its block.
                    let tolerance = if precision == Precision::Exact { 3e-6 } else { 3e-3 };
                    assert_eq!(got.len(), expected.len());
                    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
                        let close = (g - e).abs() <= tolerance * scale;
                        assert!(close, "{what} {dtype} {precision:?} {} {m} rows, output {i}: {g} instead of {e}", isa.name());
                    }
                };
                let normed = plain_norm(&norm, x.as_slice());

                let mut outs: Vec<_> = weights.iter().map(|w| Tensor::new(64, w.rows).expect("memory")).collect();
                let mut projections: Vec<_> =
                    linears.iter().zip(&mut outs).map(|(linear, out)| Projection { linear, out }).collect();
                norm_linear(context, &mut scratch, &x, Some(&norm), &mut projections);
                for (i, out) in outs.iter().enumerate() {
                    near("norm_linear", out.as_slice(), &plain(&normed, i));
                }

                for post_norm in [None, Some(random.norm(NormKind::Layer, n))] {
                    let mut residual = random.tensor(m, n);
                    let mut expected = plain(x.as_slice(), 0);
                    if let Some(norm) = &post_norm {
                        expected = plain_norm(norm, &expected);
                    }
                    expected.iter_mut().zip(residual.as_slice()).for_each(|(e, r)| *e = r + *e * 0.3);
                    let args = ResidualArgs {
                        x: &x,
                        linear: &linears[0],
                        post_norm: post_norm.as_ref(),
                        scale: 0.3,
                        residual: &mut residual,
                    };
                    linear_residual(context, &mut scratch, args);
                    near("linear_residual", residual.as_slice(), &expected);
                }

                let mut out = Tensor::new(64, n).expect("memory");
                let (up_weight, up_bias) = (random.weight(dtype, n, k), random.vec(n));
                let up_options = options(precision, Some(up_bias.clone()));
                let up = CpuLinear::new(&up_weight, &up_options, isa, &pool).expect("a linear layer").into();
                let ups = oracle(&seen(&normed), &up_weight).0;
                let ups: Vec<f64> = ups.iter().enumerate().map(|(i, u)| u + f64::from(up_bias[i % n])).collect();
                let activation = Activation::Silu;
                for gate in [Some(&linears[0]), None] {
                    let args = GateUpArgs { x: &x, norm: Some(&norm), gate, up: &up, activation, out: &mut out, next: None };
                    gate_up(context, &mut scratch, args);
                    let gated =
                        plain(&normed, 0).into_iter().zip(&ups).map(|(g, u)| plain_activation(activation, f64::from(g)) * u);
                    let expected: Vec<f64> = match gate {
                        Some(_) => gated.collect(),
                        None => ups.iter().map(|u| plain_activation(activation, *u)).collect(),
                    };
                    let expected: Vec<f32> = expected.into_iter().map(|e| e as f32).collect();
                    near(if gate.is_some() { "gate_up" } else { "up" }, out.as_slice(), &expected);
                }
            }
        }
    }
}

#[test]
fn gate_and_up_of_few_rows_have_the_bits_of_many() {
    // More panels than a thread takes at once, and a last one that is not whole.
    let (k, n, rows) = (64, 21 * 32 + 10, 40);
    let mut random = Random::new(5);
    let (x, norm) = (random.tensor(rows, k), random.norm(NormKind::Rms, k));
    for (precision, dtype) in [(Precision::Deterministic, DType::Ggml(GgmlType::Q4_1)), (Precision::Exact, DType::F32)] {
        let weights = [random.weight(dtype, n, k), random.weight(dtype, n, k)];
        for (isa, threads) in isas().into_iter().flat_map(|isa| [(isa, 1), (isa, 3)]) {
            let pool = ThreadPool::new(threads).unwrap();
            let [gate, up] = weights.each_ref().map(|weight| linear(weight, precision, isa, &pool));
            let run = |x: &Tensor| {
                let mut out = Tensor::new(rows, n).expect("memory");
                let args = GateUpArgs {
                    x,
                    norm: Some(&norm),
                    gate: Some(&gate),
                    up: &up,
                    activation: Activation::Silu,
                    out: &mut out,
                    next: None,
                };
                gate_up(LinearContext { pool: &pool, isa, adapters: &[] }, &mut LinearScratch::default(), args);
                out.as_slice().iter().map(|v| v.to_bits()).collect::<Vec<_>>()
            };
            let all = run(&x);
            for few in 1..=4 {
                let mut some = Tensor::new(few, k).expect("memory");
                some.set_rows(few);
                some.as_mut_slice().copy_from_slice(&x.as_slice()[..few * k]);
                assert!(run(&some) == all[..few * n], "{few} rows, {dtype} {precision:?}, {} on {threads} threads", isa.name());
            }
        }
    }
}

#[test]
fn a_worker_that_waits_fetches_its_share_of_the_next_phase() {
    let (pool, mut random, mut scratch) = (ThreadPool::new(2).unwrap(), Random::new(6), LinearScratch::default());
    let (context, x) = (LinearContext { pool: &pool, isa: Isa::Scalar, adapters: &[] }, random.tensor(1, 64));
    let q4_0 = DType::Ggml(GgmlType::Q4_0);
    let linears = [0; 3].map(|_| linear(&random.weight(q4_0, 128, 64), Precision::Fast, Isa::Scalar, &pool));
    let mut out = Tensor::new(1, 128).expect("memory");
    let fetched = || {
        let mut reader = Reader::new();
        reader.look(pool.ahead(), (1, 2));
        reader.proceed()
    };
    assert_eq!(fetched(), None);
    for linear in linears.iter().chain(&linears[..1]) {
        norm_linear(context, &mut scratch, &x, None, &mut [Projection { linear, out: &mut out }]);
    }
    let panels = linears[1].weight::<CpuLinear>().memory();
    assert_eq!(fetched().map(|memory| memory.start), Some(panels.address + 2 * panels.bytes));
}

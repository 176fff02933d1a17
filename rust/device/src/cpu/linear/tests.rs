//! Oracle: exact dequantisation and a matmul in f64.

use half::f16;
use proptest::prelude::*;

use super::{activations::BLOCK, *};
use crate::{
    Activation, DType, GateUpArgs, GgmlType, Norm, NormKind, Projection, ResidualArgs, Tensor, mmap::Bytes, quant::dequantize_row,
};

fn tiers() -> Vec<CpuTier> {
    CpuTier::ALL.into_iter().filter(|t| *t <= CpuTier::detect()).collect()
}

fn dtypes() -> Vec<DType> {
    [DType::F32, DType::F16, DType::BF16].into_iter().chain(GgmlType::ALL.map(DType::Ggml)).collect()
}

/// xorshift64*.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// In -1..1.
    fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    fn tensor(&mut self, rows: usize, cols: usize) -> Tensor {
        let mut t = Tensor::new(rows, cols).expect("memory");
        t.set_rows(rows);
        // Rows of different sizes, and a few outliers, as activations have.
        for (i, row) in t.as_mut_slice().chunks_exact_mut(cols.max(1)).enumerate() {
            for v in row {
                *v = self.unit() * (1 + i % 5) as f32 * if self.bits().is_multiple_of(37) { 8.0 } else { 1.0 };
            }
        }
        t
    }

    fn weight(&mut self, dtype: DType, rows: usize, cols: usize) -> WeightView {
        let mut bytes = vec![0u8; rows * dtype.row_bytes(cols).expect("whole blocks")];
        match dtype {
            DType::F32 => bytes.as_chunks_mut::<4>().0.iter_mut().for_each(|b| *b = self.unit().to_le_bytes()),
            DType::F16 => bytes.as_chunks_mut::<2>().0.iter_mut().for_each(|b| *b = f16::from_f32(self.unit()).to_le_bytes()),
            DType::BF16 => {
                bytes.as_chunks_mut::<2>().0.iter_mut().for_each(|b| *b = half::bf16::from_f32(self.unit()).to_le_bytes());
            }
            DType::Ggml(format) => {
                let scales: &[usize] = match format {
                    GgmlType::Q4_0 | GgmlType::Q5_0 | GgmlType::Q8_0 => &[0],
                    GgmlType::Q4_1 | GgmlType::Q5_1 | GgmlType::Q4K | GgmlType::Q5K => &[0, 2],
                    GgmlType::Q2K => &[80, 82],
                    GgmlType::Q3K => &[108],
                    GgmlType::Q6K => &[208],
                    GgmlType::Mxfp4 => &[],
                };
                for block in bytes.chunks_exact_mut(format.block_bytes()) {
                    block.fill_with(|| self.bits() as u8);
                    for at in scales {
                        block[*at..at + 2].copy_from_slice(&f16::from_f32(self.unit() * 0.02).to_le_bytes());
                    }
                    if format == GgmlType::Mxfp4 {
                        block[0] = 116 + (self.bits() % 10) as u8;
                    }
                }
            }
        }
        WeightView::new(dtype, rows, cols, Bytes::from_vec(bytes)).expect("a valid weight")
    }

    fn vec(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.unit()).collect()
    }

    fn norm(&mut self, kind: NormKind, dim: usize) -> Norm {
        let bias = (kind == NormKind::Layer).then(|| self.vec(dim));
        Norm { kind, weight: self.vec(dim).iter().map(|v| v + 1.5).collect(), bias, eps: 1e-5 }
    }
}

fn dequantise(weight: &WeightView) -> Vec<f32> {
    let mut out = vec![0.0; weight.rows * weight.cols];
    for (i, row) in out.chunks_exact_mut(weight.cols).enumerate() {
        dequantize_row(weight.dtype, weight.row(i), row);
    }
    out
}

/// What a linear layer with int8 activations sees of `x`, written plainly.
fn through_int8(x: &[f32]) -> Vec<f32> {
    x.chunks(BLOCK)
        .flat_map(|block| {
            let max = block.iter().fold(0f32, |m, v| m.max(v.abs()));
            let (scale, inverse) = (max / 127.0, if max > 0.0 { 127.0 / max } else { 0.0 });
            block.iter().map(move |v| (v * inverse).round_ties_even() * scale)
        })
        .collect()
}

/// `x @ weight^T` and, for bounds, `|x| @ |weight|^T`.
fn oracle(x: &[f32], weight: &WeightView) -> (Vec<f64>, Vec<f64>) {
    let w = dequantise(weight);
    let mut out = (Vec::new(), Vec::new());
    for x in x.chunks_exact(weight.cols) {
        for w in w.chunks_exact(weight.cols) {
            let products = || x.iter().zip(w).map(|(a, b)| f64::from(*a) * f64::from(*b));
            out.0.push(products().sum());
            out.1.push(products().map(f64::abs).sum());
        }
    }
    out
}

fn options(precision: Precision, bias: Option<Vec<f32>>) -> LinearOptions {
    LinearOptions { name: "w".to_owned(), precision, bias }
}

fn linear(weight: &WeightView, precision: Precision, tier: CpuTier, pool: &ThreadPool) -> Linear {
    CpuLinear::new(weight, &options(precision, None), tier, pool).expect("a linear layer").into()
}

/// `x @ weight^T`.
fn project(context: LinearContext<'_>, scratch: &mut LinearScratch, x: &Tensor, linear: &Linear) -> Vec<f32> {
    let mut out = Tensor::new(x.rows(), linear.out_features).expect("memory");
    norm_linear(context, scratch, x, None, &mut [Projection { linear, out: &mut out }]);
    assert_eq!(out.rows(), x.rows());
    out.as_slice().to_vec()
}

fn assert_close(what: &str, got: &[f32], expected: &[f64], bounds: &[f64], relative: f64) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, ((g, e), b)) in got.iter().zip(expected).zip(bounds).enumerate() {
        let error = (f64::from(*g) - e).abs();
        assert!(error <= relative * b + 1e-9, "{what}: output {i} is {g} instead of {e}, error {error:e} of {b:e}");
    }
}

/// Rounding of f32 sums; and of scales to f16, where a format's own scales are products.
fn fast_bound(dtype: DType) -> f64 {
    match dtype {
        DType::Ggml(GgmlType::Q2K | GgmlType::Q3K | GgmlType::Q4K | GgmlType::Q5K | GgmlType::Q6K) => 6e-4,
        _ => 2e-6,
    }
}

fn check_fast(dtype: DType, (m, n, k): (usize, usize, usize), seed: u64, pool: &ThreadPool) {
    let mut random = Random::new(seed);
    let (weight, x) = (random.weight(dtype, n, k), random.tensor(m, k));
    let seen = if matches!(dtype, DType::Ggml(_)) { through_int8(x.as_slice()) } else { x.as_slice().to_vec() };
    let (expected, mut bounds) = oracle(&seen, &weight);
    if fast_bound(dtype) > 1e-5 {
        // A scale and a minimum are rounded apart, and may cancel in the weight.
        let span = dequantise(&weight).iter().fold(0f32, |a, v| a.max(v.abs()));
        for (b, i) in bounds.iter_mut().zip(0..) {
            let x: f64 = seen[i / n * k..(i / n + 1) * k].iter().map(|v| f64::from(v.abs())).sum();
            *b += x * f64::from(span);
        }
    }
    for tier in tiers() {
        let linear = linear(&weight, Precision::Fast, tier, pool);
        assert_eq!(linear.cpu().is_packed(), matches!(dtype, DType::Ggml(_)));
        let got = project(LinearContext { pool, tier }, &mut LinearScratch::default(), &x, &linear);
        assert_close(&format!("{dtype} {} [{m}, {n}, {k}]", tier.name()), &got, &expected, &bounds, fast_bound(dtype));
    }
}

#[test]
fn the_fast_path_is_the_oracle_on_int8_activations() {
    let pool = ThreadPool::new(2);
    for dtype in dtypes() {
        for (i, shape) in [(1, 96, 256), (2, 33, 512), (3, 70, 256), (5, 1, 256), (33, 40, 768)].into_iter().enumerate() {
            check_fast(dtype, shape, i as u64 + 1, &pool);
        }
    }
}

#[test]
fn extreme_codes_neither_saturate_nor_overflow() {
    let pool = ThreadPool::new(1);
    for format in GgmlType::ALL {
        for fill in [0x00, 0x80, 0x7f, 0xff] {
            let mut bytes = vec![fill; 32 * format.block_bytes()];
            for block in bytes.chunks_exact_mut(format.block_bytes()) {
                let one = f16::from_f32(0.01).to_le_bytes();
                match format {
                    GgmlType::Mxfp4 => block[0] = 120,
                    GgmlType::Q2K => block[80..84].copy_from_slice(&[one, one].concat()),
                    GgmlType::Q3K => block[108..110].copy_from_slice(&one),
                    GgmlType::Q6K => block[208..210].copy_from_slice(&one),
                    GgmlType::Q4_0 | GgmlType::Q5_0 | GgmlType::Q8_0 => block[..2].copy_from_slice(&one),
                    _ => block[..4].copy_from_slice(&[one, one].concat()),
                }
            }
            let weight = WeightView::new(DType::Ggml(format), 32, format.block_len(), Bytes::from_vec(bytes)).expect("a weight");
            for sign in [1.0, -1.0] {
                let mut x = Tensor::new(2, weight.cols).expect("memory");
                x.set_rows(2);
                x.as_mut_slice().fill(3.0 * sign);
                let (expected, bounds) = oracle(x.as_slice(), &weight);
                for tier in tiers() {
                    let linear = linear(&weight, Precision::Fast, tier, &pool);
                    let got = project(LinearContext { pool: &pool, tier }, &mut LinearScratch::default(), &x, &linear);
                    let what = format!("{} {} {fill:#x}", format.name(), tier.name());
                    assert_close(&what, &got, &expected, &bounds, fast_bound(weight.dtype) * 4.0);
                }
            }
        }
    }
}

/// Every row of a batch has the bits it has alone, on one thread or three.
fn check_rows_alone(precision: Precision, dtype: DType, tier: CpuTier, rows: impl Iterator<Item = usize>) {
    let mut random = Random::new(7);
    let (n, k) = (67, if matches!(dtype, DType::Ggml(_)) { 512 } else { 501 });
    let (weight, all) = (random.weight(dtype, n, k), random.tensor(65, k));
    let (one, three) = (ThreadPool::new(1), ThreadPool::new(3));
    let linear = linear(&weight, precision, tier, &three);
    let mut scratch = LinearScratch::default();
    let mut part = |pool: &ThreadPool, m: usize, start: usize| {
        let mut x = Tensor::new(m, k).expect("memory");
        x.set_rows(m);
        x.as_mut_slice().copy_from_slice(&all.as_slice()[start * k..(start + m) * k]);
        project(LinearContext { pool, tier }, &mut scratch, &x, &linear)
    };
    let alone: Vec<u32> = (0..65).flat_map(|i| part(&one, 1, i)).map(f32::to_bits).collect();
    for m in rows {
        for pool in [&one, &three] {
            let start = 65 - m;
            let got = part(pool, m, start);
            let same = got.iter().zip(&alone[start * n..]).all(|(g, a)| g.to_bits() == *a);
            assert!(same, "{dtype} {} {precision:?}: {m} rows differ from the same rows alone", tier.name());
        }
    }
}

#[test]
fn an_exact_row_has_the_same_bits_in_every_batch() {
    for tier in tiers() {
        for dtype in dtypes() {
            let all = dtype == DType::BF16 || dtype == DType::Ggml(GgmlType::Q4_1);
            check_rows_alone(Precision::Exact, dtype, tier, (1..=65).filter(|m| all || [1, 2, 3, 4, 7, 33, 65].contains(m)));
        }
    }
}

#[test]
fn a_fast_row_has_the_same_bits_in_every_batch() {
    for tier in tiers() {
        for dtype in dtypes() {
            check_rows_alone(Precision::Fast, dtype, tier, [1, 2, 3, 4, 6, 8, 31, 65].into_iter());
        }
    }
}

#[test]
fn the_exact_path_is_the_oracle_on_float_activations() {
    let pool = ThreadPool::new(2);
    for dtype in dtypes() {
        let mut random = Random::new(3);
        let k = if matches!(dtype, DType::Ggml(_)) { 768 } else { 777 };
        let (weight, x) = (random.weight(dtype, 45, k), random.tensor(6, k));
        let (expected, bounds) = oracle(x.as_slice(), &weight);
        for tier in tiers() {
            let linear = linear(&weight, Precision::Exact, tier, &pool);
            let got = project(LinearContext { pool: &pool, tier }, &mut LinearScratch::default(), &x, &linear);
            assert_close(&format!("{dtype} {}", tier.name()), &got, &expected, &bounds, 1e-6);
        }
    }
}

#[test]
fn a_nan_or_infinite_activation_is_not_lost() {
    let pool = ThreadPool::new(1);
    for tier in tiers() {
        for dtype in dtypes() {
            for bad in [f32::NAN, -f32::NAN, f32::INFINITY] {
                let mut random = Random::new(5);
                let (weight, mut x) = (random.weight(dtype, 5, 256), random.tensor(2, 256));
                x.as_mut_slice()[300] = bad;
                let linear = linear(&weight, Precision::Fast, tier, &pool);
                let got = project(LinearContext { pool: &pool, tier }, &mut LinearScratch::default(), &x, &linear);
                assert!(
                    got[..5].iter().all(|v| v.is_finite()) && got[5..].iter().all(|v| !v.is_finite()),
                    "{dtype} {bad}: {got:?}"
                );
            }
        }
    }
}

#[test]
fn a_scale_beyond_f16_is_computed_in_f32() {
    let pool = ThreadPool::new(1);
    let mut bytes = vec![0x21; 34];
    (bytes[0], bytes[17]) = (150, 120);
    let weight = WeightView::new(DType::Ggml(GgmlType::Mxfp4), 1, 64, Bytes::from_vec(bytes)).expect("a weight");
    let x = Random::new(1).tensor(1, 64);
    let (expected, bounds) = oracle(x.as_slice(), &weight);
    let tier = CpuTier::detect();
    let linear = linear(&weight, Precision::Fast, tier, &pool);
    let got = project(LinearContext { pool: &pool, tier }, &mut LinearScratch::default(), &x, &linear);
    assert_close("MXFP4", &got, &expected, &bounds, 1e-6);
}

#[test]
fn a_bias_of_the_wrong_length_is_refused_by_name_and_numbers() {
    let weight = Random::new(1).weight(DType::F32, 4, 8);
    let error = CpuLinear::new(&weight, &options(Precision::Fast, Some(vec![0.0; 3])), CpuTier::Scalar, &ThreadPool::new(1));
    let message = error.err().expect("an error").to_string();
    assert!(message.contains("`w`") && message.contains('3') && message.contains('4'), "{message}");
}

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
    }
}

#[test]
fn norms_agree_with_f64_and_are_the_same_on_every_tier() {
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
            for tier in tiers() {
                let mut again = vec![0.0; dim];
                elementwise::norm_row(tier, &norm, &x, &mut again);
                assert!(again.iter().zip(&got).all(|(a, b)| a.to_bits() == b.to_bits()), "{kind:?} {dim} {}", tier.name());
            }
        }
    }
}

#[test]
fn activation_functions_agree_with_f64() {
    for activation in [Activation::Silu, Activation::GeluTanh, Activation::Gelu] {
        let inputs: Vec<f32> = (-5_000..5_000).map(|i| i as f32 / 1_000.0).collect();
        let mut got = inputs.clone();
        activate(activation, &mut got);
        for (x, g) in inputs.iter().zip(&got) {
            let e = plain_activation(activation, f64::from(*x));
            // Rounding the argument of the exponential to f32 costs the result as many relative ulps as the argument is large.
            let argument =
                f64::from(x.abs()) + if activation == Activation::Silu { 0.0 } else { f64::from(x.abs()).powi(3) * 0.1 };
            let bound = (6e-7 + 2e-7 * argument) * e.abs();
            assert!((f64::from(*g) - e).abs() <= bound + 1e-15, "{activation:?}({x}) is {g} instead of {e}");
        }
        let mut far = [-200.0, -90.0, 90.0, 1e30, f32::NAN];
        activate(activation, &mut far);
        assert!(far[0].abs() < 1e-30 && far[1].abs() < 1e-30 && far[2..4] == [90.0, 1e30] && far[4].is_nan(), "{far:?}");
    }
}

#[test]
fn fused_phases_are_the_plain_operations_one_after_the_other() {
    let mut scratch = LinearScratch::default();
    for threads in [1, 2] {
        let pool = ThreadPool::new(threads);
        for (tier, precision, dtype) in tiers().into_iter().flat_map(|t| {
            let q41 = DType::Ggml(GgmlType::Q4_1);
            [(t, Precision::Exact, DType::BF16), (t, Precision::Exact, q41), (t, Precision::Fast, q41)]
        }) {
            let context = LinearContext { pool: &pool, tier };
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
                        CpuLinear::new(w, &options, tier, &pool).expect("a linear layer").into()
                    })
                    .collect();
                let x = random.tensor(m, k);
                let norm = random.norm(NormKind::Rms, k);
                let plain = |x: &[f32], i: usize| -> Vec<f32> {
                    let x = if precision == Precision::Fast { through_int8(x) } else { x.to_vec() };
                    let (mut y, _) = oracle(&x, &weights[i]);
                    y.iter_mut().enumerate().for_each(|(j, y)| *y += f64::from(biases[i][j % weights[i].rows]));
                    y.iter().map(|v| *v as f32).collect()
                };
                let near = |what: &str, got: &[f32], expected: &[f32]| {
                    let scale = expected.iter().fold(1.0f32, |a, v| a.max(v.abs()));
                    // A normalised value that lies between two codes may round the other way: a code is 1/127 of its block.
                    let tolerance = if precision == Precision::Fast { 3e-3 } else { 3e-6 };
                    assert_eq!(got.len(), expected.len());
                    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
                        let close = (g - e).abs() <= tolerance * scale;
                        assert!(close, "{what} {dtype} {precision:?} {} {m} rows, output {i}: {g} instead of {e}", tier.name());
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
                let up_weight = random.weight(dtype, n, k);
                let up = linear(&up_weight, precision, tier, &pool);
                let args = GateUpArgs {
                    x: &x,
                    norm: Some(&norm),
                    gate: &linears[0],
                    up: &up,
                    activation: Activation::Silu,
                    out: &mut out,
                };
                gate_up(context, &mut scratch, args);
                let seen = if precision == Precision::Fast { through_int8(&normed) } else { normed.clone() };
                let ups = oracle(&seen, &up_weight).0;
                let expected: Vec<f32> = plain(&normed, 0)
                    .iter()
                    .zip(ups)
                    .map(|(g, u)| (plain_activation(Activation::Silu, f64::from(*g)) * u) as f32)
                    .collect();
                near("gate_up", out.as_slice(), &expected);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn any_shape_of_any_type_agrees_with_the_oracle(
        dtype in proptest::sample::select(dtypes()), m in 1usize..34, n in 1usize..100, blocks in 1usize..12, seed in 1u64..1_000_000,
    ) {
        let block = match dtype { DType::Ggml(f) => f.block_len(), _ => 7 };
        let blocks = if block == 256 { blocks.div_ceil(4) } else { blocks };
        check_fast(dtype, (m, n, block * blocks), seed, &ThreadPool::new(2));
    }
}

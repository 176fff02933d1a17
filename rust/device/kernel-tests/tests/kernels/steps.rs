//! The small steps between matrix products.

use device::kernel_args::{
    ActivationKind, ElementType, FillBiasArgs, GatedActivationArgs, GatherRowsArgs, NormArgs, RoundValuesArgs,
};
use half::{bf16, f16};
use kernel_tests::{Buffer, Kernel, Order, assert_close, random::Rng};

const TYPES: [ElementType; 3] = [ElementType::F32, ElementType::F16, ElementType::BF16];

fn output(out_type: ElementType, len: usize) -> Buffer {
    Buffer::output::<u8>(len * if out_type == ElementType::F32 { 4 } else { 2 })
}

fn values(out_type: ElementType, buffer: &Buffer) -> Vec<f32> {
    match out_type {
        ElementType::F32 => buffer.values(),
        ElementType::F16 => buffer.values::<u16>().into_iter().map(|x| f16::from_bits(x).to_f32()).collect(),
        ElementType::BF16 => buffer.values::<u16>().into_iter().map(|x| bf16::from_bits(x).to_f32()).collect(),
    }
}

fn tolerance(out_type: ElementType) -> [f32; 2] {
    match out_type {
        ElementType::F32 => [2e-6, 2e-6],
        ElementType::F16 => [1e-6, 1.0 / 2000.0],
        ElementType::BF16 => [1e-6, 1.0 / 250.0],
    }
}

/// Weight and bias of a norm; `None` for a norm that is left out.
type Affine = Option<(Vec<f32>, Option<Vec<f32>>)>;

fn normed(has_mean: bool, x: &[f32], (weight, bias): &(Vec<f32>, Option<Vec<f32>>), eps: f64) -> Vec<f32> {
    let len = x.len() as f64;
    let mean = if has_mean { x.iter().map(|x| f64::from(*x)).sum::<f64>() / len } else { 0.0 };
    let squares: f64 = x.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum();
    let factor = (squares / len + eps).sqrt().recip();
    let bias = |i| bias.as_ref().map_or(0.0, |bias| f64::from(bias[i]));
    x.iter()
        .zip(weight)
        .enumerate()
        .map(|(i, (x, w))| ((f64::from(*x) - mean) * factor * f64::from(*w) + bias(i)) as f32)
        .collect()
}

#[test]
fn norms_and_additions_agree_with_the_oracle() {
    let mut rng = Rng::new(1);
    for (round, cols) in [4, 64, 576, 1028, 4096, 5124, 8192].into_iter().cycle().take(56).enumerate() {
        let (rows, out_type, has_mean) = (3, TYPES[round % 3], round / 7 % 2 == 1);
        let (adds, has_post, norms) = (round % 4 != 3, round % 2 == 0, round % 5 != 4 || round % 4 == 3);
        // Layer norms are of values that lie to one side: what is left of them about their mean is small.
        let shift = if has_mean { 3.0 } else { 0.0 };
        let [x, y] = [(); 2].map(|()| rng.floats(rows * cols).iter().map(|x| x + shift).collect::<Vec<_>>());
        let mut affine = |there: bool| there.then(|| (rng.floats(cols), (round % 3 == 0).then(|| rng.floats(cols))));
        let (post, norm): (Affine, Affine) = (affine(has_post), affine(norms));
        let (x_buffer, y_buffer) = (Buffer::inout(&x), Buffer::input(&y));
        let weight = |affine: &Affine| affine.as_ref().map(|affine| Buffer::input(&affine.0));
        let bias = |affine: &Affine| affine.as_ref().and_then(|affine| affine.1.as_deref().map(Buffer::input));
        let buffers = [weight(&post), bias(&post), weight(&norm), bias(&norm)];
        let [post_weight, post_bias, weight, bias] = buffers.each_ref().map(|buffer| buffer.as_ref().map_or(0, Buffer::ptr));
        let out = output(out_type, rows * cols);
        let args = NormArgs {
            x: x_buffer.ptr(),
            y: if adds { y_buffer.ptr() } else { 0 },
            post_weight,
            post_bias,
            weight,
            bias,
            out: if norms { out.ptr() } else { 0 },
            num_rows: rows as u32,
            cols: cols as u32,
            out_type: out_type as u32,
            eps: 1e-3,
            post_eps: 1e-2,
            y_scale: 0.5,
        };
        let kernel = if has_mean { "layer_norm" } else { "rms_norm" };
        Kernel::named(kernel).launch_behind(&[&x_buffer, &y_buffer], [rows, 1, 1], &args, Order::Descending);
        let mut expected = x.clone();
        if adds {
            for (x, y) in expected.chunks_exact_mut(cols).zip(y.chunks_exact(cols)) {
                let y = post.as_ref().map_or_else(|| y.to_vec(), |post| normed(has_mean, y, post, 1e-2));
                x.iter_mut().zip(&y).for_each(|(x, y)| *x += y * 0.5);
            }
        }
        let what = format!("{kernel}, {rows} rows of {cols}: adds {adds} post {has_post} norms {norms} {out_type:?}");
        assert_close(&x_buffer.values::<f32>(), &expected, [4e-6, 4e-6], &what);
        if let Some(norm) = &norm {
            let expected: Vec<f32> = expected.chunks_exact(cols).flat_map(|x| normed(has_mean, x, norm, 1e-3)).collect();
            let [absolute, relative] = tolerance(out_type);
            // Four values whose mean is large lose bits of what is left.
            assert_close(&values(out_type, &out), &expected, [absolute + shift * 2e-6, relative], &what);
        }
    }
}

/// By the series of positive terms (Abramowitz and Stegun 7.1.6).
fn erf(x: f64) -> f64 {
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= 2.0 * x * x / f64::from(2 * n + 1);
        sum += term;
    }
    sum * (-x * x).exp() * std::f64::consts::FRAC_2_SQRT_PI
}

#[test]
fn activations_agree_with_the_oracle() {
    let mut rng = Rng::new(2);
    let kinds = [
        ActivationKind::Silu,
        ActivationKind::GeluTanh,
        ActivationKind::Gelu,
        ActivationKind::Swish,
        ActivationKind::Relu,
        ActivationKind::Relu2,
        ActivationKind::Xielu,
        ActivationKind::Identity,
    ];
    for activation in kinds {
        for ((out_type, cols), gated) in
            TYPES.into_iter().zip([4, 1024, 2052]).flat_map(|case| [true, false].map(|gated| (case, gated)))
        {
            let (rows, gate_stride, up_stride) = (3, cols + 4, cols + 8);
            let (mut gate, up) = (rng.floats(rows * gate_stride), rng.floats(rows * up_stride));
            gate[..4].copy_from_slice(&[-5.0, 5.0, 0.0, -0.1]);
            let (gate_buffer, up_buffer) = (Buffer::input(&gate), Buffer::input(&up));
            let out = output(out_type, rows * cols);
            let args = GatedActivationArgs {
                gate: gate_buffer.ptr(),
                up: if gated { up_buffer.ptr() } else { 0 },
                weights: 0,
                out: out.ptr(),
                num_rows: rows as u32,
                cols: cols as u32,
                gate_stride: gate_stride as u32,
                up_stride: up_stride as u32,
                activation: activation as u32,
                out_type: out_type as u32,
                alpha: 0.6,
                limit: 0.0,
                positive: 0.7,
                negative: 1.3,
                linear: 0.5,
                eps: -0.25,
            };
            Kernel::named("gated_activation").launch([cols.div_ceil(1024), rows, 1], &args, Order::Ascending);
            let activate = |x: f64| match activation {
                ActivationKind::Silu => x / (1.0 + (-x).exp()),
                ActivationKind::GeluTanh => {
                    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh())
                }
                ActivationKind::Gelu => 0.5 * x * (1.0 + erf(x / std::f64::consts::SQRT_2)),
                ActivationKind::Swish => x / (1.0 + (-f64::from(0.6_f32) * x).exp()),
                ActivationKind::Relu => x.max(0.0),
                ActivationKind::Relu2 => x.max(0.0).powi(2),
                ActivationKind::Xielu if x > 0.0 => f64::from(0.7_f32) * x * x + 0.5 * x,
                ActivationKind::Xielu => f64::from(1.3_f32) * (x.min(-0.25).exp() - 1.0 - x) + 0.5 * x,
                ActivationKind::Identity => x,
                ActivationKind::Clamped => unreachable!("a gate and its up make one value"),
            };
            let expected: Vec<f32> = (0..rows * cols)
                .map(|i| {
                    let (row, col) = (i / cols, i % cols);
                    let up = if gated { f64::from(up[row * up_stride + col]) } else { 1.0 };
                    (activate(f64::from(gate[row * gate_stride + col])) * up) as f32
                })
                .collect();
            assert_close(
                &values(out_type, &out),
                &expected,
                tolerance(out_type),
                &format!("{activation:?} {cols} gated {gated}"),
            );
        }
    }
}

#[test]
fn rows_are_gathered() {
    let mut rng = Rng::new(3);
    for cols in [4, 576, 1028] {
        let (x, rows) = (rng.floats(5 * cols), [4u32, 0, 0, 3]);
        let (x_buffer, row_buffer, out) = (Buffer::input(&x), Buffer::input(&rows), Buffer::output::<f32>(4 * cols));
        let args = GatherRowsArgs { x: x_buffer.ptr(), rows: row_buffer.ptr(), out: out.ptr(), num_rows: 4, cols: cols as u32 };
        Kernel::named("gather_rows").launch([4, 1, 1], &args, Order::Ascending);
        let expected: Vec<f32> = rows.iter().flat_map(|&row| x[row as usize * cols..][..cols].to_vec()).collect();
        assert_eq!(out.values::<f32>(), expected);
    }
}

#[test]
fn values_are_rounded_to_the_nearest_that_is_finite() {
    let mut rng = Rng::new(4);
    for (out_type, count) in [(ElementType::F16, 8), (ElementType::F16, 1028), (ElementType::BF16, 4096)] {
        let mut x = rng.floats(count);
        x[..4].copy_from_slice(&[65504.0, 65530.0, -1e30, f32::NAN]);
        let (from, out) = (Buffer::input(&x), output(out_type, count));
        let args = RoundValuesArgs { x: from.ptr(), out: out.ptr(), count: count as u64, out_type: out_type as u32, reserved: 0 };
        Kernel::named("round_values").launch([count.div_ceil(1024), 1, 1], &args, Order::Ascending);
        let round = |x: &f32| match out_type {
            ElementType::F16 => f16::from_f32(x.clamp(-65504.0, 65504.0)).to_f32(),
            _ => bf16::from_f32(*x).to_f32(),
        };
        let bits = |values: Vec<f32>| values.iter().map(|x| if x.is_nan() { 0 } else { x.to_bits() }).collect::<Vec<_>>();
        assert_eq!(bits(values(out_type, &out)), bits(x.iter().map(round).collect()), "{out_type:?}");
    }
}

#[test]
fn rows_begin_with_the_bias_or_have_it_added() {
    let mut rng = Rng::new(5);
    for (rows, cols) in [(1, 3), (4, 700)] {
        let (bias, before) = (rng.floats(cols), rng.floats(rows * cols));
        for accumulate in [false, true] {
            let (bias_buffer, out) = (Buffer::input(&bias), Buffer::inout(&before));
            let args = FillBiasArgs {
                bias: bias_buffer.ptr(),
                out: out.ptr(),
                num_rows: rows as u32,
                cols: cols as u32,
                accumulate: accumulate.into(),
                scale: 0.5,
            };
            Kernel::named("fill_bias").launch([rows, 1, 1], &args, Order::Descending);
            let expected = before.iter().zip(bias.iter().cycle());
            let expected: Vec<f32> = expected.map(|(x, bias)| bias * 0.5 + if accumulate { *x } else { 0.0 }).collect();
            assert_eq!(out.values::<f32>(), expected, "{accumulate}");
        }
    }
}

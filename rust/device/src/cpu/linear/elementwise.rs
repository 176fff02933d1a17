//! Norms and activation functions.
//!
//! Plain Rust that the compiler vectorises once for each ISA. Sums run in 16 lanes with a fixed order and no operation is fused,
//! so a row has the same bits on every ISA and in every batch.

// A body that is not inlined would be compiled for the baseline instructions only.
#![allow(clippy::inline_always)]

use crate::{Activation, GateActivation, Norm, NormKind, Xielu};

/// Defines `$name(isa, ...)`: `$body(...)` compiled for the instructions of the ISA.
macro_rules! per_isa {
    ($(#[$doc:meta])* $name:ident = $body:ident($($arg:ident: $ty:ty),*)) => {
        $(#[$doc])*
        #[allow(unused_variables)]
        pub(in crate::cpu) fn $name(isa: $crate::cpu::Isa, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2")]
                fn avx2($($arg: $ty),*) { $body($($arg),*) }
                #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
                fn avx512($($arg: $ty),*) { $body($($arg),*) }
                match isa {
                    // SAFETY: the phases never pass an ISA above `$crate::cpu::Isa::detect`.
                    $crate::cpu::Isa::Amx | $crate::cpu::Isa::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    $crate::cpu::Isa::Avx2 => return unsafe { avx2($($arg),*) },
                    $crate::cpu::Isa::Scalar => {}
                }
            }
            $body($($arg),*)
        }
    };
}
pub(in crate::cpu) use per_isa;

/// Partial sums of a row.
pub(in crate::cpu) const LANES: usize = 16;

/// 1.5 * 2^23. A small number added to it is rounded to the nearest integer, ties to even, which is then the difference of the
/// bits; baseline x86-64 has no instruction that does so.
pub(in crate::cpu) const ROUND: f32 = 12_582_912.0;

/// Sum of `f(x)` over a row: 16 partial sums, added pairwise.
#[inline(always)]
pub(in crate::cpu) fn sum(x: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (chunks, tail) = x.as_chunks::<LANES>();
    for c in chunks {
        for (l, v) in lanes.iter_mut().zip(c) {
            *l += f(*v);
        }
    }
    for (l, v) in lanes.iter_mut().zip(tail) {
        *l += f(*v);
    }
    add_lanes(lanes)
}

/// Adds partial sums: i and i + 8, then i and i + 4, and so on.
#[inline(always)]
pub(super) fn add_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Mean to subtract and factor to multiply by, before the weight.
#[inline(always)]
fn shift_and_factor(norm: &Norm, x: &[f32]) -> (f32, f32) {
    let n = x.len() as f32;
    let mean = match norm.kind {
        NormKind::Rms => 0.0,
        NormKind::Layer => sum(x, |v| v) / n,
    };
    let var = sum(x, |v| (v - mean) * (v - mean)) / n;
    (mean, 1.0 / (var + norm.eps).sqrt())
}

/// Normalises one row: `out = norm(x)`, both `[dim]`.
///
/// # Panics
/// When the lengths of `x`, `out` and the norm's weight differ.
#[inline(always)]
pub fn apply_norm(norm: &Norm, x: &[f32], out: &mut [f32]) {
    let (n, weight) = (x.len(), norm.weight.as_slice());
    assert!(out.len() == n && weight.len() == n, "a norm of {} values over a row of {n} into {}", weight.len(), out.len());
    let (mean, factor) = shift_and_factor(norm, x);
    for i in 0..n {
        out[i] = (x[i] - mean) * factor * weight[i];
    }
    if let Some(bias) = &norm.bias {
        for (o, b) in out.iter_mut().zip(bias.iter()) {
            *o += b;
        }
    }
}

/// The same in place, of a norm without a bias or with one.
#[inline(always)]
fn normed_body(norm: &Norm, x: &mut [f32]) {
    assert_eq!(x.len(), norm.weight.len(), "values of a row and weights of its norm");
    let (mean, factor) = shift_and_factor(norm, x);
    for (x, weight) in x.iter_mut().zip(norm.weight.iter()) {
        *x = (*x - mean) * factor * weight;
    }
    if let Some(bias) = &norm.bias {
        x.iter_mut().zip(bias.iter()).for_each(|(x, bias)| *x += bias);
    }
}

#[inline(always)]
fn add_scaled_body(x: &[f32], scale: f32, out: &mut [f32]) {
    for (o, x) in out.iter_mut().zip(x) {
        *o += x * scale;
    }
}

/// e^x to 2e-7 relative: 2^n times a degree-6 polynomial on |r| <= ln(2) / 2 (the classic Cody-Waite reduction, Taylor-like
/// coefficients fitted by Cephes `expf`).
#[inline(always)]
pub(in crate::cpu) fn exp(x: f32) -> f32 {
    // The clamp keeps n within the exponents of normal numbers; silu and gelu do not see the difference.
    let x = x.clamp(-87.0, 88.0);
    let rounded = x * std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = x - n * 0.693_359_4 - n * -2.121_944_4e-4;
    let mut p = 1.987_569_1e-4;
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 5e-1] {
        p = p * r + c;
    }
    let p = p * (r * r) + r + 1.0;
    p * f32::from_bits(rounded.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23)
}

/// `ln(1 + e^x)` to 3e-7 relative: x, if it is positive, and `ln(1 + t)` of `t = e^-|x|`, which is `2 atanh(t / (2 + t))`, by the
/// first terms of the series.
#[inline(always)]
pub(in crate::cpu) fn softplus(x: f32) -> f32 {
    let t = exp(-x.abs());
    let s = t / (2.0 + t);
    let square = s * s;
    let mut p = 1.0 / 15.0;
    for c in [1.0 / 13.0, 1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0, 1.0] {
        p = p * square + c;
    }
    let above = if x > 0.0 { x } else { 0.0 };
    above + 2.0 * s * p
}

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Complementary error function to 1.2e-7 relative (Press et al., Numerical Recipes in C, 2nd ed., `erfcc`).
fn erfc(x: f64) -> f64 {
    const C: [f64; 10] = [
        0.170_872_77,
        -0.822_152_23,
        1.488_515_87,
        -1.135_203_98,
        0.278_868_07,
        -0.186_288_06,
        0.096_784_18,
        0.374_091_96,
        1.000_023_68,
        -1.265_512_23,
    ];
    let z = x.abs();
    let t = 1.0 / (1.0 + 0.5 * z);
    let y = t * (-z * z + C.iter().fold(0.0, |p, c| p * t + c)).exp();
    if x >= 0.0 { y } else { 2.0 - y }
}

/// Applies an activation function to every element.
#[inline(always)]
pub fn activate(activation: Activation, values: &mut [f32]) {
    match activation {
        Activation::Silu => {
            for v in values {
                *v *= sigmoid(*v);
            }
        }
        Activation::Swish(beta) => {
            for v in values {
                *v *= sigmoid(beta * *v);
            }
        }
        // 0.5 * (1 + tanh(u)) = sigmoid(2 u), with u = sqrt(2 / pi) * (x + 0.044715 x^3).
        Activation::GeluTanh => {
            for v in values {
                *v *= sigmoid(1.595_769 * (*v + 0.044_715 * *v * *v * *v));
            }
        }
        Activation::Gelu => {
            for v in values {
                let x = f64::from(*v);
                *v = (0.5 * x * erfc(-x * std::f64::consts::FRAC_1_SQRT_2)) as f32;
            }
        }
        Activation::Relu => {
            for v in values {
                *v = if *v < 0.0 { 0.0 } else { *v };
            }
        }
        Activation::Relu2 => {
            for v in values {
                *v = if *v < 0.0 { 0.0 } else { *v * *v };
            }
        }
        Activation::Xielu(Xielu { positive, negative, linear, eps }) => {
            for v in values {
                let x = *v;
                let below = negative * (exp(if x < eps { x } else { eps }) - 1.0 - x);
                *v = linear * x + if x > 0.0 { positive * x * x } else { below };
            }
        }
    }
}

#[inline(always)]
fn gate_body(activation: Activation, gate: &mut [f32], up: &[f32]) {
    activate(activation, gate);
    for (g, u) in gate.iter_mut().zip(up) {
        *g *= u;
    }
}

#[inline(always)]
fn attention_gate_body(x: &mut [f32], gate: &[f32], activation: GateActivation) {
    let passed = |gate: f32| match activation {
        GateActivation::Sigmoid => sigmoid(gate),
        GateActivation::Softplus => softplus(gate),
    };
    if x.len() == gate.len() {
        for (x, gate) in x.iter_mut().zip(gate) {
            *x *= passed(*gate);
        }
        return;
    }
    for (head, gate) in x.chunks_exact_mut(x.len() / gate.len()).zip(gate) {
        let by = passed(*gate);
        for x in head {
            *x *= by;
        }
    }
}

per_isa!(
    /// `x` times the gate's activation, which is of one element or of as many as there are more of them.
    attention_gate = attention_gate_body(x: &mut [f32], gate: &[f32], activation: GateActivation)
);
per_isa!(
    /// `x = norm(x)`.
    normed_row = normed_body(norm: &Norm, x: &mut [f32])
);
per_isa!(norm_row = apply_norm(norm: &Norm, x: &[f32], out: &mut [f32]));
per_isa!(
    /// `out += x * scale`.
    add_scaled = add_scaled_body(x: &[f32], scale: f32, out: &mut [f32])
);
per_isa!(
    /// `values = activation(values)`.
    activate_row = activate(activation: Activation, values: &mut [f32])
);
per_isa!(
    /// `gate = activation(gate) * up`.
    gate_row = gate_body(activation: Activation, gate: &mut [f32], up: &[f32])
);

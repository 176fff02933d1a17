//! Activations in two int8 parts, quantised once a phase and shared by all of its projections.
//!
//! One part is not enough: with it, SmolLM2's log probabilities are up to 0.4 away from those of float activations, with two less than
//! 0.01. The second part costs arithmetic, which decoding has to spare, and no bytes of weights.

// A body that is not inlined would be compiled for the baseline instructions only.
#![allow(clippy::inline_always)]

use super::elementwise::{ROUND, per_tier};

/// Values that share a scale.
pub(super) const BLOCK: usize = 32;

/// Parts that add up to a value: its rounded value, and what rounding left of it, rounded.
pub(super) const ACT_PARTS: usize = 2;

/// 32 activations, `value = scale * q` with `scale = max |value| / 127`, and their sums: one cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct ActBlock {
    pub q: [i8; BLOCK],
    pub scale: f32,
    /// `scale` times the sum of `q`: of all 32, of the first 16, of the last 16.
    pub scaled_sums: [f32; 3],
    /// The sums of `q`, likewise.
    pub sums: [i32; 3],
    pub pad: i32,
}

impl ActBlock {
    pub(super) const ZERO: Self = Self { q: [0; BLOCK], scale: 0.0, scaled_sums: [0.0; 3], sums: [0; 3], pad: 0 };
}

#[inline(always)]
fn quantise_block(x: &[f32; BLOCK], out: &mut ActBlock) {
    // The magnitudes are compared as integers: a NaN is above them all, becomes the scale, and so is not lost.
    let max = x.iter().fold(0u32, |m, v| m.max(v.to_bits() & 0x7fff_ffff));
    let max = f32::from_bits(max);
    let inverse = if max > 0.0 { 127.0 / max } else { 0.0 };
    out.scale = max / 127.0;
    let mut codes = [0i32; BLOCK];
    for (q, v) in codes.iter_mut().zip(x) {
        *q = ((v * inverse + ROUND).to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32).clamp(-127, 127);
    }
    for (q, code) in out.q.iter_mut().zip(&codes) {
        *q = *code as i8;
    }
    let mut width = BLOCK / 4;
    while width > 0 {
        for i in 0..width {
            codes[i] += codes[i + width];
            codes[BLOCK / 2 + i] += codes[BLOCK / 2 + i + width];
        }
        width /= 2;
    }
    let sums = [codes[0], codes[BLOCK / 2]];
    out.sums = [sums[0] + sums[1], sums[0], sums[1]];
    out.scaled_sums = out.sums.map(|s| s as f32 * out.scale);
}

#[inline(always)]
fn quantise_body(x: &[f32], out: &mut [ActBlock]) {
    let (values, rests) = out.split_at_mut(out.len() / ACT_PARTS);
    for ((x, value), rest) in x.as_chunks().0.iter().zip(values).zip(rests) {
        quantise_block(x, value);
        let mut left = *x;
        for (left, q) in left.iter_mut().zip(&value.q) {
            *left -= value.scale * f32::from(*q);
        }
        quantise_block(&left, rest);
    }
}

per_tier!(
    /// Quantises one row: `out` is `[ACT_PARTS, row length / 32]`.
    quantise_row = quantise_body(x: &[f32], out: &mut [ActBlock])
);

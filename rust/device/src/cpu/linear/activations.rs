//! Activations as int8, quantised once a phase and shared by all of its projections.

// A body that is not inlined would be compiled for the baseline instructions only.
#![allow(clippy::inline_always)]

use super::elementwise::{ROUND, per_tier};

/// Values that share a scale.
pub(super) const BLOCK: usize = 32;

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
fn quantise_body(x: &[f32], out: &mut [ActBlock]) {
    for (x, out) in x.as_chunks::<BLOCK>().0.iter().zip(out) {
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
}

per_tier!(
    /// Quantises one row, whose length is 32 times that of `out`.
    quantise_row = quantise_body(x: &[f32], out: &mut [ActBlock])
);

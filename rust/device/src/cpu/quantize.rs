//! Quantizers of the K types, Q2_K to Q6_K, with and without importance.
//!
//! A super-block has 256 columns. For each of its sub-blocks some scales are tried; each rounds the columns to codes, and
//! weighted least squares over these give a better scale (and minimum), as in llama.cpp's `make_qkx3_quants` and
//! `make_qx_quants`. Scales and minima are then rounded to codes themselves, and the columns once more to theirs.
//!
//! Sixteen sub-blocks lie side by side, a lane each, so that a trial passes their columns once and adds nothing across lanes. The
//! squared error of a trial follows from its sums. Nothing is fused: a row has the same bytes on every ISA.

#![allow(unsafe_op_in_unsafe_fn)]
#![allow(clippy::inline_always, clippy::needless_range_loop)] // As in `simd`.

use half::f16;

use super::{
    Isa,
    simd::{Simd, isa_entry},
};
use crate::GgmlType;

/// Columns of a super-block.
const SUPER_BLOCK: usize = 256;
/// Sub-blocks side by side: those of one super-block, or of two where sub-blocks have 32 columns.
const SIDE_BY_SIDE: usize = 16;
/// Added to a small number, it leaves the nearest integer, ties to even, in the low bits.
const ROUND: f32 = (3 << 22) as f32;

/// What the scales of a search bring the range of a sub-block to, beside its largest code: 37 steps of 0.05 around it.
const STEPS: std::ops::RangeInclusive<i8> = -18..=18;
const STEP: f32 = 0.05;

/// Whether [`quantize_rows`] makes a type.
pub const fn quantizes(format: GgmlType) -> bool {
    matches!(format, GgmlType::Q2K | GgmlType::Q3K | GgmlType::Q4K | GgmlType::Q5K | GgmlType::Q6K)
}

/// Quantizes whole rows of `cols` columns to a type that this module [`quantizes`]; `importance`, `[cols]`, says how much the
/// squared error of a column counts. The bytes are the same on every ISA.
///
/// # Panics
/// When `cols` is no multiple of 256, `out` has another size than the rows take, the type is another, or the machine lacks the
/// ISA.
pub fn quantize_rows(isa: Isa, values: &[f32], cols: usize, format: GgmlType, importance: Option<&[f32]>, out: &mut [u8]) {
    assert!(quantizes(format), "{} is quantized elsewhere", format.name());
    assert!(cols > 0 && cols.is_multiple_of(SUPER_BLOCK) && values.len().is_multiple_of(cols), "rows of {cols} columns");
    assert!(importance.is_none_or(|of| of.len() == cols), "the importance of {cols} columns");
    assert_eq!(values.len() / SUPER_BLOCK * format.block_bytes(), out.len(), "bytes of {} values", values.len());
    assert!(isa <= Isa::detect(), "this machine has no {}", isa.name());
    // SAFETY: the machine has the ISA, and sizes are as asserted.
    unsafe { quantize_isa(isa, values, cols, format, importance, out) }
}

isa_entry! {
    fn quantize_isa => quantize(
        values: &[f32], cols: usize, format: GgmlType, importance: Option<&[f32]>, out: &mut [u8],
    )
}

/// The machine must have the ISA; sizes are those that [`quantize_rows`] asserts.
#[inline(always)]
unsafe fn quantize<S: Simd>(values: &[f32], cols: usize, format: GgmlType, importance: Option<&[f32]>, out: &mut [u8]) {
    let sub_columns = format.format().sub_block_len;
    let blocks_at_once = SIDE_BY_SIDE * sub_columns / SUPER_BLOCK;
    let mut group = Group::new();
    let values = values.chunks(blocks_at_once * SUPER_BLOCK);
    for (at, (values, out)) in values.zip(out.chunks_mut(blocks_at_once * format.block_bytes())).enumerate() {
        let first = at * blocks_at_once * SUPER_BLOCK;
        group.fill(values, importance.map(|importance| (importance, first % cols)), sub_columns);
        let [scales, mins] = match format {
            GgmlType::Q2K => group.search_with_min::<S>(sub_columns, 3.0),
            GgmlType::Q4K => group.search_with_min::<S>(sub_columns, 15.0),
            GgmlType::Q5K => group.search_with_min::<S>(sub_columns, 31.0),
            GgmlType::Q3K => [group.search::<S>(4.0), [0.0; SIDE_BY_SIDE]],
            _ => [group.search::<S>(32.0), [0.0; SIDE_BY_SIDE]],
        };
        let each = SIDE_BY_SIDE / blocks_at_once;
        for (i, (x, out)) in
            values.as_chunks::<SUPER_BLOCK>().0.iter().zip(out.chunks_exact_mut(format.block_bytes())).enumerate()
        {
            let subs = i * each..(i + 1) * each;
            let (scales, mins, totals) = (&scales[subs.clone()], &mins[subs.clone()], &group.totals[subs]);
            match format {
                GgmlType::Q2K => put_q2(&with_min::<S, 16>(x, scales, mins, totals, (3.0, 15.0)), out),
                GgmlType::Q4K => put_q4(&with_min::<S, 8>(x, scales, mins, totals, (15.0, 63.0)), out),
                GgmlType::Q5K => put_q5(&with_min::<S, 8>(x, scales, mins, totals, (31.0, 63.0)), out),
                GgmlType::Q3K => put_q3(&without_min::<S>(x, scales, totals, (4.0, 32.0)), out),
                _ => put_q6(&without_min::<S>(x, scales, totals, (32.0, 128.0)), out),
            }
        }
    }
}

/// Sixteen sub-blocks, `[columns, sub-blocks]`.
struct Group {
    x: [[f32; SIDE_BY_SIDE]; 32],
    /// What the squared error of each column counts for.
    weights: [[f32; SIDE_BY_SIDE]; 32],
    /// Sums of weights over the columns.
    totals: [f32; SIDE_BY_SIDE],
}

impl Group {
    const fn new() -> Self {
        Self { x: [[0.0; SIDE_BY_SIDE]; 32], weights: [[0.0; SIDE_BY_SIDE]; 32], totals: [0.0; SIDE_BY_SIDE] }
    }

    /// `values` are one or two super-blocks; sub-blocks that they do not fill keep what they had. `importance` comes with the
    /// column of the first value, and begins anew where a row ends.
    #[inline(always)]
    fn fill(&mut self, values: &[f32], importance: Option<(&[f32], usize)>, sub_columns: usize) {
        let subs = SUPER_BLOCK / sub_columns;
        let mut weights = [0.0; SUPER_BLOCK];
        for (block, x) in values.as_chunks::<SUPER_BLOCK>().0.iter().enumerate() {
            let mut squares = [0.0; SIDE_BY_SIDE];
            for x in x.as_chunks::<SIDE_BY_SIDE>().0 {
                for (sum, x) in squares.iter_mut().zip(x) {
                    *sum += x * x;
                }
            }
            let mean_square = squares.iter().sum::<f32>() / SUPER_BLOCK as f32;
            // What is large counts for somewhat more.
            for (weight, x) in weights.iter_mut().zip(x) {
                *weight = (mean_square + x * x).sqrt();
            }
            if let Some((importance, first)) = importance {
                let first = (first + block * SUPER_BLOCK) % importance.len();
                for (weight, of) in weights.iter_mut().zip(&importance[first..first + SUPER_BLOCK]) {
                    *weight *= of;
                }
            }
            for i in 0..sub_columns {
                for sub in 0..subs {
                    self.x[i][block * subs + sub] = x[sub * sub_columns + i];
                    self.weights[i][block * subs + sub] = weights[sub * sub_columns + i];
                }
            }
        }
        self.totals = [0.0; SIDE_BY_SIDE];
        for weights in &self.weights[..sub_columns] {
            for (total, weight) in self.totals.iter_mut().zip(weights) {
                *total += weight;
            }
        }
    }

    /// Scales, and minima with their signs changed, for codes from 0 to `most`: neither is negative.
    #[inline(always)]
    unsafe fn search_with_min<S: Simd>(&self, columns: usize, most: f32) -> [[f32; SIDE_BY_SIDE]; 2] {
        let mut found = [[0.0; SIDE_BY_SIDE]; 2];
        let (zero, codes) = (S::splat(0.0), S::splat(most));
        for lane in (0..SIDE_BY_SIDE).step_by(S::LANES) {
            let x = |i: usize| S::load(self.x[i].as_ptr().add(lane));
            let weight = |i: usize| S::load(self.weights[i].as_ptr().add(lane));
            let (mut low, mut high) = (zero, S::splat(f32::MIN));
            for i in 0..columns {
                (low, high) = (S::min(x(i), low), S::max(x(i), high));
            }
            let range = S::sub(high, low);
            // Columns are taken from the lowest on, so that little cancels. The line is `scale * code + min`.
            let (mut w, mut wx, mut wxx) = (zero, zero, zero);
            for i in 0..columns {
                let (x, weight) = (S::sub(x(i), low), weight(i));
                let weighted = S::mul(weight, x);
                (w, wx, wxx) = (S::add(w, weight), S::add(wx, weighted), S::add(wxx, S::mul(weighted, x)));
            }
            let (mut best_scale, mut best_min) = (S::div(range, codes), zero);
            let mut least = S::splat(f32::INFINITY);
            for step in STEPS {
                let inverse = S::div(S::splat(most + STEP * f32::from(step)), range);
                let (mut wl, mut wll, mut wlx) = (zero, zero, zero);
                for i in 0..columns {
                    let x = S::sub(x(i), low);
                    let code = S::round(S::min(S::mul(x, inverse), codes));
                    let weighted = S::mul(weight(i), code);
                    wl = S::add(wl, weighted);
                    wll = S::add(wll, S::mul(weighted, code));
                    wlx = S::add(wlx, S::mul(weighted, x));
                }
                let determinant = S::sub(S::mul(w, wll), S::mul(wl, wl));
                let per = S::div(S::splat(1.0), determinant);
                let mut scale = S::mul(S::sub(S::mul(w, wlx), S::mul(wx, wl)), per);
                let mut min = S::mul(S::sub(S::mul(wll, wx), S::mul(wl, wlx)), per);
                // A minimum above zero is none: the line through zero.
                let above = S::add(min, low);
                let through_zero = S::div(S::sub(wlx, S::mul(low, wl)), wll);
                scale = S::select_below(zero, above, through_zero, scale);
                min = S::select_below(zero, above, S::sub(zero, low), min);
                let of_scale = S::mul(scale, S::add(S::mul(scale, wll), twice::<S>(S::sub(S::mul(min, wl), wlx))));
                let of_min = S::mul(min, S::sub(S::mul(min, w), twice::<S>(wx)));
                let error = S::add(S::add(of_scale, of_min), wxx);
                // Codes that are all the same have no line through them; what is left then has been rounded up from zero.
                let rounded_up = S::mul(S::mul(w, wll), S::splat(1e-5));
                let error = S::select_below(rounded_up, determinant, error, S::splat(f32::INFINITY));
                let error = S::select_below(zero, scale, error, S::splat(f32::INFINITY));
                best_scale = S::select_below(error, least, scale, best_scale);
                best_min = S::select_below(error, least, min, best_min);
                least = S::min(error, least);
            }
            S::store(found[0].as_mut_ptr().add(lane), best_scale);
            S::store(found[1].as_mut_ptr().add(lane), S::sub(S::sub(zero, best_min), low));
        }
        found
    }

    /// Scales for codes from `-most` to `most - 1` of sub-blocks of 16 columns. The largest magnitude has the code `-most` or
    /// near it, so that a scale is negative where that is a positive value's.
    #[inline(always)]
    unsafe fn search<S: Simd>(&self, most: f32) -> [f32; SIDE_BY_SIDE] {
        const COLUMNS: usize = 16;
        let mut found = [0.0; SIDE_BY_SIDE];
        let (zero, from, to) = (S::splat(0.0), S::splat(-most), S::splat(most - 1.0));
        for lane in (0..SIDE_BY_SIDE).step_by(S::LANES) {
            let x = |i: usize| S::load(self.x[i].as_ptr().add(lane));
            let (mut low, mut high) = (zero, zero);
            for i in 0..COLUMNS {
                (low, high) = (S::min(x(i), low), S::max(x(i), high));
            }
            let largest = S::select_below(high, S::sub(zero, low), low, high);
            let (mut best, mut least) = (zero, zero);
            for step in STEPS {
                let inverse = S::div(S::splat(-most - 2.0 * STEP * f32::from(step)), largest);
                let (mut cross, mut square) = (zero, zero);
                for i in 0..COLUMNS {
                    let code = S::round(S::max(S::min(S::mul(x(i), inverse), to), from));
                    let weighted = S::mul(S::load(self.weights[i].as_ptr().add(lane)), code);
                    cross = S::add(cross, S::mul(weighted, x(i)));
                    square = S::add(square, S::mul(weighted, code));
                }
                // The squared error is less by this than that of nothing.
                let scale = S::div(cross, square);
                let worth = S::mul(scale, cross);
                best = S::select_below(least, worth, scale, best);
                least = S::max(worth, least);
            }
            S::store(found.as_mut_ptr().add(lane), best);
        }
        found
    }
}

#[inline(always)]
unsafe fn twice<S: Simd>(x: S::V) -> S::V {
    S::add(x, x)
}

/// A super-block as it is kept: scales and minima in units, and the code of every column.
struct Quantized<const SUBS: usize> {
    unit: f32,
    /// Those that may be negative in two's complement.
    scales: [u8; SUBS],
    min_unit: f32,
    mins: [u8; SUBS],
    /// From 0 on.
    codes: [u8; SUPER_BLOCK],
}

/// Codes of columns go up to `most`, those of scales and minima to another number.
#[inline(always)]
unsafe fn with_min<S: Simd, const SUBS: usize>(
    x: &[f32; SUPER_BLOCK],
    scales: &[f32],
    mins: &[f32],
    totals: &[f32],
    (most, most_of_scales): (f32, f32),
) -> Quantized<SUBS> {
    let (unit, scales) = in_units::<SUBS>(scales, totals, 0.0, most_of_scales);
    let (min_unit, mins) = in_units::<SUBS>(mins, totals, 0.0, most_of_scales);
    let mut codes = [0; SUPER_BLOCK];
    for sub in 0..SUBS {
        let (scale, min) = (unit * f32::from(scales[sub]), min_unit * f32::from(mins[sub]));
        round_to_codes::<S>(x, sub, SUPER_BLOCK / SUBS, (scale, min), (0.0, most), &mut codes);
    }
    Quantized { unit, scales, min_unit, mins, codes }
}

/// Codes go from `-most` to `most - 1`, those of scales likewise.
#[inline(always)]
unsafe fn without_min<S: Simd>(
    x: &[f32; SUPER_BLOCK],
    scales: &[f32],
    totals: &[f32],
    (most, most_of_scales): (f32, f32),
) -> Quantized<16> {
    let (unit, scales) = in_units::<16>(scales, totals, -most_of_scales, most_of_scales - 1.0);
    let mut codes = [0; SUPER_BLOCK];
    for sub in 0..16 {
        let scale = unit * f32::from(scales[sub].cast_signed());
        round_to_codes::<S>(x, sub, 16, (scale, 0.0), (-most, most - 1.0), &mut codes);
    }
    Quantized { unit, scales, min_unit: 0.0, mins: [0; 16], codes: codes.map(|code| code.wrapping_add(most as u8)) }
}

/// The nearest codes of the columns of a sub-block.
#[inline(always)]
unsafe fn round_to_codes<S: Simd>(
    x: &[f32; SUPER_BLOCK],
    sub: usize,
    columns: usize,
    (scale, min): (f32, f32),
    (from, to): (f32, f32),
    codes: &mut [u8; SUPER_BLOCK],
) {
    // Of a scale of zero any code is as near.
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    let mut rounded = [0.0f32; SIDE_BY_SIDE];
    for at in (sub * columns..(sub + 1) * columns).step_by(SIDE_BY_SIDE) {
        for lane in (0..SIDE_BY_SIDE).step_by(S::LANES) {
            let x = S::add(S::load(x.as_ptr().add(at + lane)), S::splat(min));
            let code = S::max(S::min(S::mul(x, S::splat(inverse)), S::splat(to)), S::splat(from));
            S::store(rounded.as_mut_ptr().add(lane), S::add(code, S::splat(ROUND)));
        }
        for (code, rounded) in codes[at..at + SIDE_BY_SIDE].iter_mut().zip(rounded) {
            *code = rounded.to_bits() as u8;
        }
    }
}

/// A unit, and how many of it each of some values has, from `from` to `to`, so that what weighs most is nearest: some units are
/// tried, and the best one's numbers are then changed one by one while that brings them nearer.
#[inline(always)]
fn in_units<const N: usize>(values: &[f32], weights: &[f32], from: f32, to: f32) -> (f32, [u8; N]) {
    const PASSES: usize = 5;
    let (values, weights): (&[f32; N], &[f32; N]) =
        (values.try_into().expect("one a sub-block"), weights.try_into().expect("as many"));
    let largest = values.iter().fold(0.0f32, |largest, value| if value.abs() > largest.abs() { *value } else { largest });
    let most = if from < 0.0 { from } else { to };
    if largest == 0.0 || !largest.is_finite() {
        return (0.0, [0; N]);
    }
    let nearest = |x: f32| {
        (if x < from {
            from
        } else if x > to {
            to
        } else {
            x
        } + ROUND)
            - ROUND
    };
    // The squared error is less by this than that of nothing.
    let worth = |cross: f32, square: f32| if square > 0.0 { cross * cross / square } else { 0.0 };
    let (mut numbers, mut cross, mut square) = ([0.0f32; N], 0.0, 0.0);
    for trial in -4i8..=4 {
        let inverse = (most + most.signum() * 0.1 * f32::from(trial)) / largest;
        let (mut tried, mut sums) = ([0.0f32; N], [0.0f32; 2]);
        for i in 0..N {
            tried[i] = nearest(values[i] * inverse);
            sums[0] += weights[i] * values[i] * tried[i];
            sums[1] += weights[i] * tried[i] * tried[i];
        }
        if worth(sums[0], sums[1]) > worth(cross, square) {
            (numbers, [cross, square]) = (tried, sums);
        }
    }
    for _ in 0..PASSES {
        let before = numbers;
        for i in 0..N {
            let (value, weight, number) = (values[i], weights[i], numbers[i]);
            let others = (cross - weight * value * number, square - weight * number * number);
            if others.0 * others.0 <= 0.0 || others.1 <= 0.0 {
                continue;
            }
            let other = nearest(value * others.1 / others.0);
            let with = (others.0 + weight * value * other, others.1 + weight * other * other);
            if other != number && worth(with.0, with.1) > worth(cross, square) {
                (numbers[i], cross, square) = (other, with.0, with.1);
            }
        }
        if numbers == before {
            break;
        }
    }
    // As it is kept.
    let limit = f16::MAX.to_f32();
    let unit = if square > 0.0 { f16::from_f32((cross / square).clamp(-limit, limit)).to_f32() } else { 0.0 };
    if unit == 0.0 { (0.0, [0; N]) } else { (unit, numbers.map(|number| (number + ROUND).to_bits() as u8)) }
}

fn units<const SUBS: usize>(of: &Quantized<SUBS>) -> [u8; 4] {
    let ([a, b], [c, d]) = (f16::from_f32(of.unit).to_le_bytes(), f16::from_f32(of.min_unit).to_le_bytes());
    [a, b, c, d]
}

/// 16 scales and minima of 4 bits, codes of 2 bits, units: see ggml's `block_q2_K`.
fn put_q2(of: &Quantized<16>, out: &mut [u8]) {
    for (out, (scale, min)) in out.iter_mut().zip(of.scales.iter().zip(of.mins)) {
        *out = scale | min << 4;
    }
    for (half, codes) in of.codes.chunks_exact(128).enumerate() {
        for i in 0..32 {
            out[16 + half * 32 + i] = codes[i] | codes[i + 32] << 2 | codes[i + 64] << 4 | codes[i + 96] << 6;
        }
    }
    out[80..84].copy_from_slice(&units(of));
}

/// Eight scales and minima of 6 bits in 12 bytes: the upper two bits of the last four lie above those of the first four.
fn put_scales(of: &Quantized<8>, out: &mut [u8]) {
    for i in 0..4 {
        let (scale, min) = (of.scales[i + 4], of.mins[i + 4]);
        out[i] = of.scales[i] | scale >> 4 << 6;
        out[i + 4] = of.mins[i] | min >> 4 << 6;
        out[i + 8] = scale & 15 | (min & 15) << 4;
    }
}

/// Units, scales, codes of 4 bits: `block_q4_K`.
fn put_q4(of: &Quantized<8>, out: &mut [u8]) {
    out[..4].copy_from_slice(&units(of));
    put_scales(of, &mut out[4..16]);
    for (codes, out) in of.codes.chunks_exact(64).zip(out[16..].chunks_exact_mut(32)) {
        for (i, out) in out.iter_mut().enumerate() {
            *out = codes[i] | codes[i + 32] << 4;
        }
    }
}

/// Units, scales, the fifth bits of codes, the four lower ones: `block_q5_K`.
fn put_q5(of: &Quantized<8>, out: &mut [u8]) {
    out[..4].copy_from_slice(&units(of));
    put_scales(of, &mut out[4..16]);
    let (fifth, low) = out[16..].split_at_mut(32);
    fifth.fill(0);
    for (pair, (codes, low)) in of.codes.chunks_exact(64).zip(low.chunks_exact_mut(32)).enumerate() {
        for i in 0..32 {
            let (first, second) = (codes[i], codes[i + 32]);
            fifth[i] |= first >> 4 << (2 * pair) | second >> 4 << (2 * pair + 1);
            low[i] = first & 15 | (second & 15) << 4;
        }
    }
}

/// The fourth bits of codes, the two lower ones, 16 scales from -32 on of 6 bits in 12 bytes, unit: `block_q3_K`.
fn put_q3(of: &Quantized<16>, out: &mut [u8]) {
    let (high, low) = out.split_at_mut(32);
    high.fill(0);
    for (bit, codes) in of.codes.chunks_exact(32).enumerate() {
        for (high, code) in high.iter_mut().zip(codes) {
            *high |= code >> 2 << bit;
        }
    }
    for (codes, out) in of.codes.chunks_exact(128).zip(low.chunks_exact_mut(32)) {
        for (i, out) in out.iter_mut().enumerate() {
            *out = codes[i] & 3 | (codes[i + 32] & 3) << 2 | (codes[i + 64] & 3) << 4 | (codes[i + 96] & 3) << 6;
        }
    }
    let scale = |i: usize| of.scales[i].wrapping_add(32);
    for i in 0..8 {
        low[64 + i] = scale(i) & 15 | scale(i + 8) << 4;
    }
    for i in 0..4 {
        low[72 + i] = scale(i) >> 4 | scale(i + 4) >> 4 << 2 | scale(i + 8) >> 4 << 4 | scale(i + 12) >> 4 << 6;
    }
    low[76..78].copy_from_slice(&f16::from_f32(of.unit).to_le_bytes());
}

/// The four lower bits of codes, the two upper ones, scales, unit: `block_q6_K`.
fn put_q6(of: &Quantized<16>, out: &mut [u8]) {
    for (half, codes) in of.codes.chunks_exact(128).enumerate() {
        for i in 0..64 {
            out[64 * half + i] = codes[i] & 15 | codes[i + 64] << 4;
        }
        for i in 0..32 {
            let high = |j: usize| codes[i + 32 * j] >> 4 << (2 * j);
            out[128 + 32 * half + i] = high(0) | high(1) | high(2) | high(3);
        }
    }
    out[192..208].copy_from_slice(&of.scales);
    out[208..210].copy_from_slice(&f16::from_f32(of.unit).to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, quant::dequantize_row};

    const FORMATS: [GgmlType; 5] = [GgmlType::Q2K, GgmlType::Q3K, GgmlType::Q4K, GgmlType::Q5K, GgmlType::Q6K];

    fn quantized(isa: Isa, values: &[f32], cols: usize, format: GgmlType, importance: Option<&[f32]>) -> Vec<u8> {
        let mut out = vec![0xaa; values.len() / SUPER_BLOCK * format.block_bytes()];
        quantize_rows(isa, values, cols, format, importance, &mut out);
        out
    }

    #[test]
    fn bytes_are_the_same_on_every_isa_and_in_any_rows() {
        let mut state = 7u32;
        let mut uniform = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32 - 0.5
        };
        let cols = 3 * SUPER_BLOCK;
        let values: Vec<f32> = (0..5 * cols).map(|i| uniform() * if i % 31 == 0 { 9.0 } else { 0.7 } + 0.01).collect();
        let importance: Vec<f32> = (0..cols).map(|_| uniform().abs() * 4.0).collect();
        for format in FORMATS {
            for importance in [None, Some(&importance[..])] {
                let whole = quantized(Isa::Scalar, &values, cols, format, importance);
                for isa in Isa::ALL.into_iter().filter(|isa| *isa <= Isa::detect()) {
                    let rows: Vec<u8> =
                        values.chunks(cols).flat_map(|row| quantized(isa, row, cols, format, importance)).collect();
                    assert!(rows == whole, "{} on {}, importance: {}", format.name(), isa.name(), importance.is_some());
                }
            }
        }
    }

    #[test]
    fn blocks_without_range_or_sign_are_kept() {
        for value in [0.0f32, 0.25, -0.25, 1e-30, -1e30, 65504.0] {
            for format in FORMATS {
                let out = quantized(Isa::detect(), &[value; SUPER_BLOCK], SUPER_BLOCK, format, None);
                let mut row = [0.0; SUPER_BLOCK];
                dequantize_row(DType::Ggml(format), &out, &mut row);
                if value.abs() < 1e5 {
                    let off = row.iter().fold(0.0f32, |off, x| off.max((x - value).abs()));
                    assert!(off <= 0.01 * value.abs() + 1e-6, "{}: {value} became {row:?}", format.name());
                }
            }
        }
    }
}

//! Quantizers of the K types whose sub-blocks have a scale and a minimum: Q2_K, Q4_K and Q5_K.
//!
//! A super-block has 256 columns. For each of its sub-blocks some scales are tried; each rounds the columns to codes, and a line
//! through these (weighted least squares) gives a better scale and minimum, as in llama.cpp's `make_qkx3_quants`. The sums of a
//! trial are kept in lanes that compilers make vectors of, and the error follows from them, so that a trial passes the columns
//! once. Scales and minima are then rounded to codes themselves, and the columns once more to theirs.

use device::GgmlType;
use half::f16;

/// Columns of a super-block.
const SUPER_BLOCK: usize = 256;
/// Sums that are kept side by side.
const LANES: usize = 8;

/// Scales that a search tries: those that bring the range of a sub-block to the largest code less 0.9, and so on in steps of
/// 0.05 up to 0.9 more.
const TRIALS: [f32; 37] = {
    let (mut trials, mut i) = ([0.0; 37], 0);
    while i < 37 {
        trials[i] = 0.05 * (i as f32 - 18.0);
        i += 1;
    }
    trials
};

/// To nearest, ties to even; of magnitudes below 2^22.
fn nearest(x: f32) -> f32 {
    const UNIT_OF_LAST_BIT: f32 = (3 << 22) as f32;
    (x + UNIT_OF_LAST_BIT) - UNIT_OF_LAST_BIT
}

/// `n` sums over the columns, whose addends `of` gives.
fn sums<const N: usize, const M: usize>(of: impl Fn(usize) -> [f32; M]) -> [f64; M] {
    let mut lanes = [[0.0f32; LANES]; M];
    for i in (0..N).step_by(LANES) {
        for lane in 0..LANES {
            for (sum, x) in lanes.iter_mut().zip(of(i + lane)) {
                sum[lane] += x;
            }
        }
    }
    lanes.map(|lanes| lanes.iter().copied().map(f64::from).sum())
}

/// The scale, and the minimum with its sign changed, of a sub-block with codes from 0 to `most`: neither is negative.
fn search<const N: usize>(x: &[f32; N], weights: &[f32; N], most: f32) -> (f32, f32) {
    let low = x.iter().fold(0.0f32, |low, x| low.min(*x));
    let high = x.iter().fold(f32::MIN, |high, x| high.max(*x));
    let range = high - low;
    if range <= 0.0 {
        return (0.0, -low);
    }
    let [w, wx, wxx] = sums::<N, 3>(|i| [weights[i], weights[i] * x[i], weights[i] * x[i] * x[i]]);
    let (mut best, mut least) = ((range / most, -low), f64::INFINITY);
    for trial in TRIALS {
        let inverse = (trial + most) / range;
        let [wl, wll, wlx] = sums::<N, 3>(|i| {
            let code = nearest((x[i] - low) * inverse).clamp(0.0, most);
            let weighted = weights[i] * code;
            [weighted, weighted * code, weighted * x[i]]
        });
        let determinant = w * wll - wl * wl;
        if determinant <= 0.0 {
            continue;
        }
        let (mut scale, mut min) = ((w * wlx - wx * wl) / determinant, (wll * wx - wl * wlx) / determinant);
        if min > 0.0 {
            (scale, min) = (wlx / wll, 0.0);
        }
        let error = scale * (scale * wll + 2.0 * (min * wl - wlx)) + min * (min * w - 2.0 * wx) + wxx;
        if scale > 0.0 && error < least {
            (best, least) = ((scale as f32, -min as f32), error);
        }
    }
    best
}

/// A unit, and how many of it each of some values has, at most `most`, so that what weighs most is nearest: some units are
/// tried, and the best one's numbers are then changed one by one while that brings them nearer.
fn in_units<const N: usize>(values: &[f32; N], weights: &[f32; N], most: f32) -> (f32, [u8; N]) {
    const PASSES: usize = 5;
    let largest = values.iter().fold(0.0f32, |largest, value| largest.max(*value));
    if largest <= 0.0 {
        return (0.0, [0; N]);
    }
    // Of values times numbers, and of squared numbers.
    let sums = |numbers: &[f32; N]| {
        let (mut cross, mut square) = (0.0, 0.0);
        for ((number, value), weight) in numbers.iter().zip(values).zip(weights) {
            cross += weight * value * number;
            square += weight * number * number;
        }
        (cross, square)
    };
    // The nearer, the larger: what the squared error is less by than that of nothing.
    let worth = |(cross, square): (f32, f32)| if square > 0.0 { cross * cross / square } else { 0.0 };
    let trials = (-4i16..=4).map(|trial| {
        let inverse = (0.1 * f32::from(trial) + most) / largest;
        values.map(|value| nearest(value * inverse).clamp(0.0, most))
    });
    let best = trials.max_by(|a, b| worth(sums(a)).total_cmp(&worth(sums(b))));
    let mut numbers = best.unwrap_or([0.0; N]);
    let (mut cross, mut square) = sums(&numbers);
    for _ in 0..PASSES {
        let before = numbers;
        for ((number, value), weight) in numbers.iter_mut().zip(values).zip(weights) {
            let others = (cross - weight * value * *number, square - weight * *number * *number);
            if others.0 <= 0.0 || others.1 <= 0.0 {
                continue;
            }
            let other = nearest((value * others.1 / others.0).min(most)).clamp(0.0, most);
            let with = (others.0 + weight * value * other, others.1 + weight * other * other);
            if worth(with) > worth((cross, square)) {
                (*number, cross, square) = (other, with.0, with.1);
            }
        }
        if numbers == before {
            break;
        }
    }
    // As it is kept.
    let unit = if square > 0.0 { f16::from_f32((cross / square).min(f16::MAX.to_f32())).to_f32() } else { 0.0 };
    if unit > 0.0 { (unit, numbers.map(|number| number as u8)) } else { (0.0, [0; N]) }
}

/// A super-block as it is kept: `[SUBS]` scales and minima in units, and the code of every column.
struct Quantized<const SUBS: usize> {
    unit: f32,
    scales: [u8; SUBS],
    min_unit: f32,
    mins: [u8; SUBS],
    codes: [u8; SUPER_BLOCK],
}

/// Codes of columns go up to `most`, and those of scales up to another number.
fn quantize<const SUBS: usize, const N: usize>(
    x: &[f32; SUPER_BLOCK],
    importance: Option<&[f32]>,
    (most, most_of_scales): (f32, f32),
) -> Quantized<SUBS> {
    let (mut scales, mut mins, mut totals) = ([0.0; SUBS], [0.0; SUBS], [0.0; SUBS]);
    let (subs, _) = x.as_chunks::<N>();
    let mean_square = x.iter().map(|x| x * x).sum::<f32>() / SUPER_BLOCK as f32;
    for (sub, x) in subs.iter().enumerate() {
        // What is large counts for somewhat more.
        let mut weights = x.map(|x| (mean_square + x * x).sqrt());
        if let Some(importance) = importance {
            weights.iter_mut().zip(&importance[sub * N..]).for_each(|(weight, of)| *weight *= of);
        }
        totals[sub] = weights.iter().sum();
        (scales[sub], mins[sub]) = search(x, &weights, most);
    }
    let (unit, scales) = in_units(&scales, &totals, most_of_scales);
    let (min_unit, mins) = in_units(&mins, &totals, most_of_scales);
    let mut codes = [0; SUPER_BLOCK];
    for (sub, (x, codes)) in subs.iter().zip(codes.as_chunks_mut::<N>().0).enumerate() {
        let (scale, min) = (unit * f32::from(scales[sub]), min_unit * f32::from(mins[sub]));
        if scale > 0.0 {
            let inverse = 1.0 / scale;
            for (code, x) in codes.iter_mut().zip(x) {
                *code = nearest(((x + min) * inverse).min(most)).clamp(0.0, most) as u8;
            }
        }
    }
    Quantized { unit, scales, min_unit, mins, codes }
}

/// Whether [`quantize_rows`] has a type.
pub(crate) const fn is_here(format: GgmlType) -> bool {
    matches!(format, GgmlType::Q2K | GgmlType::Q4K | GgmlType::Q5K)
}

/// Whole rows of `cols` columns, a multiple of 256, to a type that [`is_here`]; `importance` is `[cols]`.
pub(crate) fn quantize_rows(values: &[f32], cols: usize, format: GgmlType, importance: Option<&[f32]>, out: &mut [u8]) {
    let bytes = format.block_bytes();
    let (blocks, _) = values.as_chunks::<SUPER_BLOCK>();
    for (at, (x, out)) in blocks.iter().zip(out.chunks_exact_mut(bytes)).enumerate() {
        let start = at * SUPER_BLOCK % cols;
        let importance = importance.map(|importance| &importance[start..start + SUPER_BLOCK]);
        match format {
            GgmlType::Q2K => put_q2(&quantize::<16, 16>(x, importance, (3.0, 15.0)), out),
            GgmlType::Q4K => put_q4(&quantize::<8, 32>(x, importance, (15.0, 63.0)), out),
            _ => put_q5(&quantize::<8, 32>(x, importance, (31.0, 63.0)), out),
        }
    }
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

#[cfg(test)]
mod tests {
    use candle_core::{
        Device, Tensor,
        quantized::{GgmlDType, QTensor},
    };
    use device::{DType, quant::dequantize_row};

    use super::*;

    const COLS: usize = 512;

    /// Weights as models have them: near a bell, some columns wider.
    fn weights(seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut uniform = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32 - 0.5
        };
        (0..64 * COLS)
            .map(|i| {
                let bell = (0..6).map(|_| uniform()).sum::<f32>();
                bell * if i % 37 == 0 { 4.0 } else { 1.0 } * 0.03
            })
            .collect()
    }

    /// Squares, weighted as the search has them.
    fn error(format: GgmlType, bytes: &[u8], values: &[f32], importance: Option<&[f32]>) -> f64 {
        let mut row = vec![0.0; COLS];
        let row_bytes = format.block_bytes() * COLS / SUPER_BLOCK;
        let mut sum = 0.0;
        for (bytes, values) in bytes.chunks_exact(row_bytes).zip(values.chunks_exact(COLS)) {
            dequantize_row(DType::Ggml(format), bytes, &mut row);
            let mean_square = |i: usize| {
                let block = &values[i / SUPER_BLOCK * SUPER_BLOCK..][..SUPER_BLOCK];
                block.iter().map(|x| x * x).sum::<f32>() / SUPER_BLOCK as f32
            };
            for (i, (a, b)) in row.iter().zip(values).enumerate() {
                let weight = (mean_square(i) + b * b).sqrt() * importance.map_or(1.0, |of| of[i]);
                sum += f64::from((a - b) * (a - b) * weight);
            }
        }
        sum
    }

    /// candle's are the slow plain version.
    #[test]
    fn blocks_are_as_near_as_those_of_candle() {
        let importance: Vec<f32> = (0..COLS).map(|i| if i % 5 == 0 { 30.0 } else { 0.5 }).collect();
        for (format, to) in [(GgmlType::Q2K, GgmlDType::Q2K), (GgmlType::Q4K, GgmlDType::Q4K), (GgmlType::Q5K, GgmlDType::Q5K)] {
            for seed in 1..4 {
                let values = weights(seed);
                let tensor = Tensor::from_vec(values.clone(), (64, COLS), &Device::Cpu).unwrap();
                for importance in [None, Some(&importance[..])] {
                    let theirs = match importance {
                        Some(importance) => QTensor::quantize_imatrix(&tensor, importance, to),
                        None => QTensor::quantize_imatrix(&tensor, &[1.0; COLS], to),
                    };
                    let theirs = theirs.unwrap().data().unwrap().to_vec();
                    let mut own = vec![0xaa; theirs.len()];
                    quantize_rows(&values, COLS, format, importance, &mut own);
                    let [own, theirs] = [own, theirs].map(|bytes| error(format, &bytes, &values, importance));
                    let name = format.name();
                    assert!(own <= 1.05 * theirs, "{name}, importance {}: {own} against {theirs}", importance.is_some());
                }
            }
        }
    }

    #[test]
    fn blocks_without_range_or_sign_are_kept() {
        for value in [0.0f32, 0.25, -0.25, 1e-30, -1e30, 65504.0] {
            for format in [GgmlType::Q2K, GgmlType::Q4K, GgmlType::Q5K] {
                let values = [value; SUPER_BLOCK];
                let mut out = vec![0xaa; format.block_bytes()];
                quantize_rows(&values, SUPER_BLOCK, format, None, &mut out);
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

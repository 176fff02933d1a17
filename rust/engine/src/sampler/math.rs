//! Reductions over a row of logits, written so that the compiler vectorises them; the order of additions is fixed.

use std::cmp::Ordering;

const LANES: usize = 16;

/// e^x, for x at most 88, to 2.5e-7 of its value; 0 is reached only by underflow.
pub(super) fn exp(x: f32) -> f32 {
    // 2^n e^r with n whole: adding 1.5 * 2^23 rounds to n and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts, so that n * LN2_HIGH is exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let x = x.max(-87.0);
    let rounded = x * std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    let series = 1.0
        + r * (1.0 + r * (0.5 + r * (1.0 / 6.0 + r * (1.0 / 24.0 + r * (1.0 / 120.0 + r * (1.0 / 720.0 + r * (1.0 / 5040.0)))))));
    series * f32::from_bits(rounded.to_bits().wrapping_add(127) << 23)
}

/// The largest logit; `None` when the row is empty or has a NaN or an infinity.
pub(super) fn finite_max(row: &[f32]) -> Option<f32> {
    let mut max = [f32::NEG_INFINITY; LANES];
    // 0 times a finite number is 0; times anything else it is NaN.
    let mut zero = [0.0_f32; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            max[i] = if chunk[i] > max[i] { chunk[i] } else { max[i] };
            zero[i] += chunk[i] * 0.0;
        }
    }
    for (i, &x) in rest.iter().enumerate() {
        max[i] = if x > max[i] { x } else { max[i] };
        zero[i] += x * 0.0;
    }
    let largest = max.into_iter().fold(f32::NEG_INFINITY, f32::max);
    (!row.is_empty() && zero.iter().sum::<f32>() == 0.0).then_some(largest)
}

/// The lowest index of the largest value, which is `max`.
#[allow(clippy::float_cmp)] // `max` is one of the values.
pub(super) fn position_of(row: &[f32], max: f32) -> u32 {
    row.iter().position(|x| *x == max).unwrap_or(0) as u32
}

/// Replaces each logit by e^((x - max) * scale) and returns their sum.
pub(super) fn exponentials(row: &mut [f32], max: f32, scale: f32) -> f64 {
    // Short sums in f32, their total in f64.
    let mut total = 0.0;
    for block in row.chunks_mut(LANES * 32) {
        let mut sums = [0.0_f32; LANES];
        let (chunks, rest) = block.as_chunks_mut::<LANES>();
        for chunk in chunks {
            for i in 0..LANES {
                chunk[i] = exp((chunk[i] - max) * scale);
                sums[i] += chunk[i];
            }
        }
        for (i, x) in rest.iter_mut().enumerate() {
            *x = exp((*x - max) * scale);
            sums[i] += *x;
        }
        total += f64::from(sums.iter().sum::<f32>());
    }
    total
}

/// ln of the sum of e^x over the row, whose largest value is `max`.
pub(super) fn log_sum_exp(row: &[f32], max: f32) -> f32 {
    let mut total = 0.0;
    for block in row.chunks(LANES * 32) {
        let mut sums = [0.0_f32; LANES];
        let (chunks, rest) = block.as_chunks::<LANES>();
        for chunk in chunks {
            for i in 0..LANES {
                sums[i] += exp(chunk[i] - max);
            }
        }
        for (i, x) in rest.iter().enumerate() {
            sums[i] += exp(x - max);
        }
        total += f64::from(sums.iter().sum::<f32>());
    }
    max + total.ln() as f32
}

/// Largest value first; of equal ones the lowest id.
#[allow(clippy::trivially_copy_pass_by_ref)] // As sorting wants it.
pub(super) fn likelier(a: &(u32, f32), b: &(u32, f32)) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// The `n` largest entries with their ids, largest first.
pub(super) fn largest(row: &[f32], n: usize) -> Vec<(u32, f32)> {
    // Up to here, inserting into a sorted list beats gathering the row.
    const INSERT: usize = 32;
    let n = n.min(row.len());
    if n == 0 {
        return Vec::new();
    }
    let entries = (0..).zip(row.iter().copied());
    if n > INSERT {
        let mut all: Vec<(u32, f32)> = entries.collect();
        all.select_nth_unstable_by(n - 1, likelier);
        all.truncate(n);
        all.sort_unstable_by(likelier);
        return all;
    }
    let mut best: Vec<(u32, f32)> = Vec::with_capacity(n + 1);
    for entry in entries {
        if best.len() == n && entry.1 <= best[n - 1].1 {
            continue;
        }
        let at = best.partition_point(|b| likelier(b, &entry).is_lt());
        best.insert(at, entry);
        best.truncate(n);
    }
    best
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn exp_is_precise(x in -86.0_f32..88.0) {
            let exact = f64::from(x).exp();
            prop_assert!((f64::from(exp(x)) - exact).abs() <= 2.5e-7 * exact, "{} instead of {}", exp(x), exact);
        }

        #[test]
        fn reductions_agree_with_plain_ones(row in proptest::collection::vec(-30.0_f32..30.0, 1..1500)) {
            let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            prop_assert_eq!(finite_max(&row), Some(max));
            let sum: f64 = row.iter().map(|x| f64::from(x - max).exp()).sum();
            prop_assert!((log_sum_exp(&row, max) - (max + sum.ln() as f32)).abs() < 1e-5);
            let mut scaled = row.clone();
            let total = exponentials(&mut scaled, max, 0.5);
            let plain: f64 = row.iter().map(|x| (f64::from(x - max) * 0.5).exp()).sum();
            prop_assert!((total - plain).abs() < 1e-5 * plain);
        }

        #[test]
        fn largest_is_the_start_of_the_sorted_row(row in proptest::collection::vec(-4_i8..4, 1..200), n in 0_usize..250) {
            let row: Vec<f32> = row.into_iter().map(f32::from).collect();
            let mut sorted: Vec<(u32, f32)> = (0..).zip(row.iter().copied()).collect();
            sorted.sort_by(likelier);
            sorted.truncate(n);
            prop_assert_eq!(largest(&row, n), sorted);
        }

        #[test]
        fn one_bad_value_is_noticed(len in 1_usize..100, at in 0_usize..100, kind in 0_usize..3) {
            let mut row = vec![1.0; len];
            row[at % len] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][kind];
            prop_assert_eq!(finite_max(&row), None);
        }
    }

    #[test]
    fn very_small_exponents_vanish() {
        assert!(exp(-1000.0) < 2e-38 && exp(0.0) == 1.0 && exp(f32::NEG_INFINITY) < 2e-38);
    }
}

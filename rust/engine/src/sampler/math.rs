//! Reductions over a row of logits, written so that the compiler vectorises them; the order of additions is fixed.

use std::{cmp::Ordering, ops::Range};

use device::cpu::softmax::{BLOCK, Softmax, block_sums, entries_above, few_largest};

/// The lowest index of the largest value, which is `max`.
#[allow(clippy::float_cmp)] // `max` is one of the values.
pub(super) fn position_of(row: &[f32], max: f32) -> u32 {
    let chunk = row.chunks(SCANNED).position(|chunk| any(chunk, |x| x == max)).unwrap_or(0) * SCANNED;
    let within = row[chunk..].iter().position(|x| *x == max).unwrap_or(0);
    (chunk + within) as u32
}

/// The mass of a softmax, block by block.
#[derive(Clone, Debug, Default)]
pub(super) struct BlockSums {
    sums: Vec<f32>,
    len: usize,
    softmax: Softmax,
}

impl BlockSums {
    /// Adds up its weights; returns the sum of the whole row.
    pub fn fill(&mut self, row: &[f32], softmax: Softmax) -> f64 {
        (self.len, self.softmax) = (row.len(), softmax);
        block_sums(row, softmax, &mut self.sums);
        self.sums.iter().map(|sum| f64::from(*sum)).sum()
    }

    /// The (id, weight) of the entries whose weight is no less than `least`, by id; `row` is the one that was filled in.
    pub fn entries_above(&self, row: &[f32], least: f32, entries: &mut Vec<(u32, f32)>) {
        entries_above(row, self.softmax, least, &self.sums, entries);
    }

    /// The block in which the running sum passes `target`, or else the last that has any mass, and what of `target` is left in
    /// it.
    pub fn find(&self, target: f64) -> (Range<usize>, f64) {
        let mut left = target;
        let mut found = (0, target);
        for (index, sum) in self.sums.iter().enumerate().filter(|(_, sum)| **sum > 0.0) {
            found = (index, left);
            if f64::from(*sum) > left {
                break;
            }
            left -= f64::from(*sum);
        }
        let start = found.0 * BLOCK;
        (start..(start + BLOCK).min(self.len), found.1)
    }
}

/// ln of the sum of e^x over the row, whose largest value is `max`.
pub(super) fn log_sum_exp(row: &[f32], max: f32) -> f32 {
    max + BlockSums::default().fill(row, Softmax::new(max, 1.0)).ln() as f32
}

/// Largest value first; of equal ones the lowest id.
#[allow(clippy::trivially_copy_pass_by_ref)] // As sorting wants it.
pub(super) fn likelier(a: &(u32, f32), b: &(u32, f32)) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// Up to so many entries, inserting into a sorted list beats gathering the row.
pub(super) const FEW: usize = 64;

/// The `n` largest entries with their ids, largest first.
pub(crate) fn largest(row: &[f32], n: usize) -> Vec<(u32, f32)> {
    let mut best = Vec::new();
    if n <= FEW {
        few_largest(row, n, &mut best);
    } else {
        best.extend((0..).zip(row.iter().copied()));
        if n < best.len() {
            best.select_nth_unstable_by(n - 1, likelier);
            best.truncate(n);
        }
        best.sort_unstable_by(likelier);
    }
    best
}

/// Values that are looked at together.
const SCANNED: usize = 64;

/// Without a branch, so that it vectorises.
#[allow(clippy::needless_bitwise_bool)]
fn any(chunk: &[f32], holds: impl Fn(f32) -> bool) -> bool {
    chunk.iter().fold(false, |found, x| found | holds(*x))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn reductions_agree_with_plain_ones(row in proptest::collection::vec(-30.0_f32..30.0, 1..1500)) {
            let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = row.iter().map(|x| f64::from(x - max).exp()).sum();
            prop_assert!((log_sum_exp(&row, max) - (max + sum.ln() as f32)).abs() < 1e-5);
            let mut sums = BlockSums::default();
            let total = sums.fill(&row, Softmax::new(max, 0.5));
            let plain: f64 = row.iter().map(|x| (f64::from(x - max) * 0.5).exp()).sum();
            prop_assert!((total - plain).abs() < 1e-5 * plain);
        }

        #[test]
        fn a_target_lies_in_the_block_that_is_found(row in proptest::collection::vec(-30.0_f32..30.0, 1..2000), part in 0.0_f64..1.0) {
            let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let mut sums = BlockSums::default();
            let target = part * sums.fill(&row, Softmax::new(max, 1.0));
            let (block, left) = sums.find(target);
            let mass = |range: Range<usize>| row[range].iter().map(|x| f64::from(x - max).exp()).sum::<f64>();
            prop_assert!((mass(0..block.start) + left - target).abs() < 1e-4);
            prop_assert!(left < mass(block.clone()) + 1e-4);
        }

        #[test]
        fn largest_is_the_start_of_the_sorted_row(row in proptest::collection::vec(-4_i8..4, 1..200), n in 0_usize..250) {
            let row: Vec<f32> = row.into_iter().map(f32::from).collect();
            let mut sorted: Vec<(u32, f32)> = (0..).zip(row.iter().copied()).collect();
            sorted.sort_by(likelier);
            sorted.truncate(n);
            prop_assert_eq!(largest(&row, n), sorted);
        }
    }
}

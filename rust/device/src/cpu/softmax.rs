//! Passes over a row of logits, for who samples from it on the host: its largest value, the mass of its softmax, its entries
//! above a threshold.
//!
//! ```text
//! logits  [vocab_size] f32  |  block 0: 512  |  block 1: 512  |  ...  |  what is left  |
//! sums    [blocks] f32      |  sum e^((x - max) * scale)      |  ...
//! ```
//!
//! Each pass reads 4 bytes a logit. That of the mass does about 20 operations with it and writes nothing back: who draws a token
//! looks for its block among the sums and computes the weights of that block again. Who wants all entries of some weight reads
//! only the blocks whose sum is no less. Sums run in 16 lanes in a fixed order and no operation is fused, so a row has the same
//! bits on every ISA. The mass of 49152 logits takes 19 us with AVX2 (Milan); it took 34 when weights were powers of e with the
//! reduction that needs.

// A body that is not inlined would be compiled for the baseline instructions only.
#![allow(clippy::inline_always)]
#![allow(unsafe_op_in_unsafe_fn)]

use std::sync::LazyLock;

use super::{
    Isa,
    linear::elementwise::{LANES, ROUND, per_isa, sum},
    simd::{Simd, isa_entry},
};

/// Logits whose weights are added up together.
pub const BLOCK: usize = 512;

/// Logits that are looked at together: one a bit.
const SCANNED: usize = u64::BITS as usize;

static ISA: LazyLock<Isa> = LazyLock::new(Isa::detect);

/// Weights of a softmax that are not yet divided by their sum: e^((logit - max) * scale), 1 for the largest logit.
#[derive(Clone, Copy, Debug, Default)]
pub struct Softmax {
    max: f32,
    log2_scale: f32,
}

impl Softmax {
    /// Of logits whose largest is `max`; `scale` is 1 / temperature.
    pub fn new(max: f32, scale: f32) -> Self {
        Self { max, log2_scale: (scale * std::f32::consts::LOG2_E).min(f32::MAX) }
    }

    /// 2^x to 2.5e-7 of its value, x being the rounded (logit - max) * scale * log2(e); 2^-126 for any less.
    ///
    /// The fraction's polynomial was fitted for the least relative error, 7.5e-8, by reweighted least squares.
    #[inline(always)]
    pub fn weight(self, logit: f32) -> f32 {
        let x = (logit - self.max) * self.log2_scale;
        let x = if x > -126.0 { x } else { -126.0 };
        let rounded = x + ROUND;
        let r = x - (rounded - ROUND);
        let mut p = 1.327_644_9e-3;
        for c in [9.675_564e-3, 5.550_713_5e-2, 0.240_221_19, 0.693_146_94, 1.0] {
            p = p * r + c;
        }
        // The integer's bits are the last ones of `rounded`; the rest leaves the word.
        f32::from_bits(p.to_bits().wrapping_add(rounded.to_bits() << 23))
    }
}

/// The largest logit; `None` when the row is empty or has a NaN or an infinity.
pub fn finite_max(row: &[f32]) -> Option<f32> {
    let mut max = None;
    find_max(*ISA, row, &mut max);
    max
}

/// Replaces `sums` by the sum of the weights of each [`BLOCK`] of the row.
pub fn block_sums(row: &[f32], softmax: Softmax, sums: &mut Vec<f32>) {
    sums.clear();
    sums.resize(row.len().div_ceil(BLOCK), 0.0);
    add_up(*ISA, row, softmax, sums);
}

/// Replaces `entries` by the (position, weight) of each logit whose weight is no less than `least`, by position. `sums` are the
/// [`block_sums`] of that softmax.
pub fn entries_above(row: &[f32], softmax: Softmax, least: f32, sums: &[f32], entries: &mut Vec<(u32, f32)>) {
    entries.clear();
    // A bit less than the logit of that weight: both are rounded. The least weight may stand for any less.
    let Softmax { max, log2_scale } = softmax;
    let logit =
        if least > f32::MIN_POSITIVE { max + (least.log2() - 1.5e-4) / log2_scale - 1e-5 * max.abs() } else { f32::NEG_INFINITY };
    // No sum of weights is less than one of them.
    for (index, block) in row.chunks(BLOCK).enumerate().filter(|(index, _)| sums[*index] >= least) {
        // SAFETY: the ISA is this machine's.
        unsafe { gather(*ISA, (index * BLOCK) as u32, block, logit, entries) };
    }
    weigh(*ISA, softmax, entries);
    entries.retain(|(_, weight)| *weight >= least);
}

/// Replaces `best` by the (position, logit) of the `n` largest logits, largest first, of equal ones the lowest position. For
/// small `n`: each one found is inserted into the list. A NaN is never among them.
pub fn few_largest(row: &[f32], n: usize, best: &mut Vec<(u32, f32)>) {
    best.clear();
    if n > 0 {
        // SAFETY: the ISA is this machine's.
        unsafe { find_few(*ISA, row, n, best) };
    }
}

per_isa! {
    /// Into `max`.
    find_max = find_finite_max(row: &[f32], max: &mut Option<f32>)
}

#[inline(always)]
fn find_finite_max(row: &[f32], largest: &mut Option<f32>) {
    let mut max = [f32::NEG_INFINITY; LANES];
    // 0 times a finite number is 0; times anything else it is NaN.
    let mut zero = [0.0_f32; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    // Two loops, which vectorise on every ISA; one does not.
    let mut take = |values: &[f32]| {
        for (max, &x) in max.iter_mut().zip(values) {
            *max = if x > *max { x } else { *max };
        }
        for (zero, &x) in zero.iter_mut().zip(values) {
            *zero += x * 0.0;
        }
    };
    for chunk in chunks {
        take(chunk);
    }
    take(rest);
    let is_finite = !row.is_empty() && zero.iter().sum::<f32>() == 0.0;
    *largest = is_finite.then(|| max.into_iter().fold(f32::NEG_INFINITY, f32::max));
}

per_isa! {
    /// Into `sums`, one for each block.
    add_up = add_up_blocks(row: &[f32], softmax: Softmax, sums: &mut [f32])
}

#[inline(always)]
fn add_up_blocks(row: &[f32], softmax: Softmax, sums: &mut [f32]) {
    for (block, out) in row.chunks(BLOCK).zip(sums) {
        *out = sum(block, |x| softmax.weight(x));
    }
}

isa_entry! {
    /// The values from `least` on, onto the end of `entries`; the first is at `start`. The caller promises that the machine has
    /// the ISA.
    fn gather => gather_reaching(start: u32, values: &[f32], least: f32, entries: &mut Vec<(u32, f32)>)
}

#[inline(always)]
unsafe fn gather_reaching<S: Simd>(start: u32, values: &[f32], least: f32, entries: &mut Vec<(u32, f32)>) {
    for (start, chunk) in (start..).step_by(SCANNED).zip(values.chunks(SCANNED)) {
        for i in ones(reaching::<S>(chunk, least)) {
            entries.push((start + i, chunk[i as usize]));
        }
    }
}

isa_entry! {
    /// [`few_largest`], onto the end of `best`. The caller promises that the machine has the ISA.
    fn find_few => insert_largest(row: &[f32], n: usize, best: &mut Vec<(u32, f32)>)
}

#[inline(always)]
unsafe fn insert_largest<S: Simd>(row: &[f32], n: usize, best: &mut Vec<(u32, f32)>) {
    let mut least = f32::NEG_INFINITY;
    for (start, chunk) in (0..).step_by(SCANNED).zip(row.chunks(SCANNED)) {
        for i in ones(reaching::<S>(chunk, least)) {
            let logit = chunk[i as usize];
            if logit < least {
                continue;
            }
            best.truncate(n - 1);
            let place = best.partition_point(|(_, larger)| *larger >= logit);
            best.insert(place, (start + i, logit));
            if best.len() == n {
                least = best[n - 1].1.next_up();
            }
        }
    }
}

/// Which of up to 64 values are no less than `least`: one a bit.
#[inline(always)]
unsafe fn reaching<S: Simd>(values: &[f32], least: f32) -> u64 {
    if values.len() < SCANNED {
        return values.iter().rev().fold(0, |found, x| found << 1 | u64::from(*x >= least));
    }
    let mut found = 0;
    for i in (0..SCANNED).step_by(S::LANES) {
        found |= u64::from(S::reaches(S::load(values.as_ptr().add(i)), S::splat(least))) << i;
    }
    found
}

/// The positions of ones.
fn ones(mut bits: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let first = (bits != 0).then(|| bits.trailing_zeros());
        bits &= bits.wrapping_sub(1);
        first
    })
}

per_isa! {
    /// From logits to weights.
    weigh = weigh_entries(softmax: Softmax, entries: &mut [(u32, f32)])
}

#[inline(always)]
fn weigh_entries(softmax: Softmax, entries: &mut [(u32, f32)]) {
    for (_, value) in entries {
        *value = softmax.weight(*value);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn weights_are_precise(x in -125.9_f32..=0.0) {
            let (weight, exact) = (Softmax { max: 0.0, log2_scale: 1.0 }.weight(x), f64::from(x).exp2());
            prop_assert!((f64::from(weight) - exact).abs() <= 2.5e-7 * exact, "{} instead of {}", weight, exact);
        }

        #[test]
        fn weights_are_powers_of_e(max in -30.0_f32..30.0, below in 0.0_f32..60.0, scale in 0.2_f32..5.0) {
            let logit = max - below;
            let exponent = f64::from(logit - max) * f64::from(scale);
            let (weight, exact) = (f64::from(Softmax::new(max, scale).weight(logit)), exponent.exp());
            // Three roundings of the exponent.
            let bound = 2.5e-7 + 3.0 * 6e-8 * exponent.abs();
            prop_assert!(exponent < -87.0 || (weight - exact).abs() <= bound * exact, "{} instead of {}", weight, exact);
        }

        #[test]
        fn sums_are_those_of_the_blocks_with_the_same_bits_on_every_isa(row in proptest::collection::vec(-30.0_f32..30.0, 0..1500)) {
            let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let mut sums = vec![7.0; 9];
            let softmax = Softmax { max, log2_scale: 0.5 };
            block_sums(&row, softmax, &mut sums);
            prop_assert_eq!(sums.len(), row.chunks(BLOCK).count());
            for (block, sum) in row.chunks(BLOCK).zip(&sums) {
                let plain: f64 = block.iter().map(|x| (f64::from(x - max) * 0.5).exp2()).sum();
                prop_assert!((f64::from(*sum) - plain).abs() <= 1e-6 * plain);
            }
            for isa in isas() {
                let mut on_isa = vec![0.0; sums.len()];
                add_up(isa, &row, softmax, &mut on_isa);
                prop_assert_eq!(&on_isa, &sums);
            }
        }
    }

    fn isas() -> impl Iterator<Item = Isa> {
        Isa::ALL.into_iter().filter(|isa| *isa <= Isa::detect())
    }

    proptest! {
        #[test]
        fn the_largest_is_found_on_every_isa(row in proptest::collection::vec(-30.0_f32..30.0, 1..200)) {
            for isa in isas() {
                let mut max = None;
                find_max(isa, &row, &mut max);
                prop_assert_eq!(max, row.iter().copied().reduce(f32::max));
            }
        }

        #[test]
        fn one_bad_value_is_noticed(len in 1_usize..100, at in 0_usize..100, kind in 0_usize..3) {
            let mut row = vec![1.0; len];
            row[at % len] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][kind];
            prop_assert_eq!(finite_max(&row), None);
        }

        #[test]
        fn entries_above_are_those_whose_weight_is_large_enough(
            row in proptest::collection::vec(prop_oneof![-30.0_f32..30.0, Just(5.0), Just(-1e30)], 1..1500),
            scale in 0.1_f32..20.0,
            at in any::<proptest::sample::Index>(),
            nothing in any::<bool>(),
        ) {
            let max = finite_max(&row).unwrap();
            let softmax = Softmax::new(max, scale);
            let least = if nothing { 0.0 } else { softmax.weight(row[at.index(row.len())]) };
            let (mut sums, mut entries) = (Vec::new(), vec![(7, 7.0)]);
            block_sums(&row, softmax, &mut sums);
            entries_above(&row, softmax, least, &sums, &mut entries);
            let all = (0..).zip(row.iter().map(|x| softmax.weight(*x)));
            prop_assert_eq!(entries, all.filter(|(_, weight)| *weight >= least).collect::<Vec<_>>());
        }

        #[test]
        fn entries_are_gathered_and_weighed_alike_on_every_isa(row in proptest::collection::vec(-30.0_f32..30.0, 0..300), least in -30.0_f32..30.0) {
            let mut expected: Vec<_> = (3..).zip(row.iter().copied()).filter(|(_, x)| *x >= least).collect();
            let softmax = Softmax::new(30.0, 0.7);
            for entry in &mut expected {
                entry.1 = softmax.weight(entry.1);
            }
            for isa in isas() {
                let mut entries = Vec::new();
                // SAFETY: this machine has `isa`.
                unsafe { gather(isa, 3, &row, least, &mut entries) };
                weigh(isa, softmax, &mut entries);
                prop_assert_eq!(&entries, &expected);
            }
        }

        #[test]
        fn the_few_largest_are_the_start_of_the_sorted_row_on_every_isa(row in proptest::collection::vec(-9_i8..9, 1..300), n in 1_usize..70) {
            let row: Vec<f32> = row.into_iter().map(f32::from).collect();
            let mut sorted: Vec<(u32, f32)> = (0..).zip(row.iter().copied()).collect();
            // Stable: of equal ones the first stays first.
            sorted.sort_by(|a, b| b.1.total_cmp(&a.1));
            sorted.truncate(n);
            for isa in isas() {
                let mut best = Vec::new();
                // SAFETY: this machine has `isa`.
                unsafe { find_few(isa, &row, n, &mut best) };
                prop_assert_eq!(&best, &sorted);
            }
        }
    }

    #[test]
    fn no_row_has_no_largest() {
        assert_eq!(finite_max(&[]), None);
    }

    #[test]
    fn very_small_weights_vanish() {
        for scale in [1.0, f32::MAX] {
            let softmax = Softmax::new(0.0, scale);
            assert!(softmax.weight(-1000.0) < 2e-38 && softmax.weight(0.0) == 1.0 && softmax.weight(f32::NEG_INFINITY) < 2e-38);
        }
    }
}

//! Passes over a row of logits, for who samples from it on the host: its largest value, the mass of its softmax, its heavy entries.
//!
//! ```text
//! logits  [vocab_size] f32  |  block 0: 512  |  block 1: 512  |  ...  |  what is left  |
//! sums    [blocks] f32      |  sum e^((x - max) * scale)      |  ...
//! ```
//!
//! Each pass reads 4 bytes a logit. That of the mass does about 20 operations with it and writes nothing back: who draws a token looks
//! for its block among the sums and computes the weights of that block again. Who wants all entries of some weight passes over the
//! blocks whose sum is less. Sums run in 16 lanes in a fixed order and no operation is fused, so a row has the same bits on every tier.
//! The mass of 49152 logits takes 41 us with baseline instructions, 21 us with AVX2 and 11 us with AVX-512 (Zen 5).

// A body that is not inlined would be compiled for the baseline instructions only.
#![allow(clippy::inline_always)]

use std::sync::LazyLock;

use super::{
    CpuTier,
    linear::elementwise::{self, LANES, per_tier, sum},
};

/// Logits whose weights are added up together.
pub const BLOCK: usize = 512;

/// Logits that are looked at together: one a bit.
const SCANNED: usize = u64::BITS as usize;

static TIER: LazyLock<CpuTier> = LazyLock::new(CpuTier::detect);

/// e^x, for x from -87 to 88, to 2.5e-7 of its value; beyond, that of the nearer end.
pub fn exp(x: f32) -> f32 {
    elementwise::exp(x)
}

/// The largest logit; `None` when the row is empty or has a NaN or an infinity.
pub fn finite_max(row: &[f32]) -> Option<f32> {
    let mut max = None;
    find_max(*TIER, row, &mut max);
    max
}

/// Replaces `sums` by the sum of e^((x - max) * scale) over each [`BLOCK`] of the row.
pub fn block_sums(row: &[f32], max: f32, scale: f32, sums: &mut Vec<f32>) {
    sums.clear();
    sums.resize(row.len().div_ceil(BLOCK), 0.0);
    add_up(*TIER, row, max, scale, sums);
}

/// Replaces `entries` by the (position, weight) of each logit whose weight e^((x - max) * scale) is no less than `least`, by position.
/// `sums` are the [`block_sums`] of that softmax.
pub fn heavy_entries(row: &[f32], max: f32, scale: f32, least: f32, sums: &[f32], entries: &mut Vec<(u32, f32)>) {
    entries.clear();
    // A bit less than the logit of that weight: both are rounded. What is smaller than `exp` tells has its least weight.
    let logit =
        if least > exp(f32::NEG_INFINITY) { max + (least.ln() - 1e-4) / scale - 1e-5 * max.abs() } else { f32::NEG_INFINITY };
    // No sum of weights is less than one of them.
    for (index, block) in row.chunks(BLOCK).enumerate().filter(|(index, _)| sums[*index] >= least) {
        gather(*TIER, (index * BLOCK) as u32, block, logit, entries);
    }
    weigh(*TIER, max, scale, entries);
    entries.retain(|(_, weight)| *weight >= least);
}

per_tier! {
    /// Into `max`.
    find_max = find_finite_max(row: &[f32], max: &mut Option<f32>)
}

#[inline(always)]
fn find_finite_max(row: &[f32], largest: &mut Option<f32>) {
    let mut max = [f32::NEG_INFINITY; LANES];
    // 0 times a finite number is 0; times anything else it is NaN.
    let mut zero = [0.0_f32; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    // Two loops, which vectorise on every tier; one does not.
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

per_tier! {
    /// Into `sums`, one for each block.
    add_up = add_up_blocks(row: &[f32], max: f32, scale: f32, sums: &mut [f32])
}

#[inline(always)]
fn add_up_blocks(row: &[f32], max: f32, scale: f32, sums: &mut [f32]) {
    for (block, out) in row.chunks(BLOCK).zip(sums) {
        *out = sum(block, |x| elementwise::exp((x - max) * scale));
    }
}

per_tier! {
    /// The values from `least` on, onto the end of `entries`; the first is at `start`.
    gather = gather_reaching(start: u32, values: &[f32], least: f32, entries: &mut Vec<(u32, f32)>)
}

#[inline(always)]
#[allow(clippy::needless_bitwise_bool)]
fn gather_reaching(start: u32, values: &[f32], least: f32, entries: &mut Vec<(u32, f32)>) {
    for (start, chunk) in (start..).step_by(SCANNED).zip(values.chunks(SCANNED)) {
        // Without a branch, so that it vectorises.
        if !chunk.iter().fold(false, |found, x| found | (*x >= least)) {
            continue;
        }
        let mut found = chunk.iter().enumerate().fold(0_u64, |found, (i, x)| found | u64::from(*x >= least) << i);
        while found != 0 {
            let i = found.trailing_zeros();
            entries.push((start + i, chunk[i as usize]));
            found &= found - 1;
        }
    }
}

per_tier! {
    /// From logits to weights.
    weigh = weigh_entries(max: f32, scale: f32, entries: &mut [(u32, f32)])
}

#[inline(always)]
fn weigh_entries(max: f32, scale: f32, entries: &mut [(u32, f32)]) {
    for (_, value) in entries {
        *value = elementwise::exp((*value - max) * scale);
    }
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
        fn sums_are_those_of_the_blocks_with_the_same_bits_on_every_tier(row in proptest::collection::vec(-30.0_f32..30.0, 0..1500)) {
            let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let mut sums = vec![7.0; 9];
            block_sums(&row, max, 0.5, &mut sums);
            prop_assert_eq!(sums.len(), row.chunks(BLOCK).count());
            for (block, sum) in row.chunks(BLOCK).zip(&sums) {
                let plain: f64 = block.iter().map(|x| (f64::from(x - max) * 0.5).exp()).sum();
                prop_assert!((f64::from(*sum) - plain).abs() <= 1e-6 * plain);
            }
            for tier in tiers() {
                let mut on_tier = vec![0.0; sums.len()];
                add_up(tier, &row, max, 0.5, &mut on_tier);
                prop_assert_eq!(&on_tier, &sums);
            }
        }
    }

    fn tiers() -> impl Iterator<Item = CpuTier> {
        CpuTier::ALL.into_iter().filter(|tier| *tier <= CpuTier::detect())
    }

    proptest! {
        #[test]
        fn the_largest_is_found_on_every_tier(row in proptest::collection::vec(-30.0_f32..30.0, 1..200)) {
            for tier in tiers() {
                let mut max = None;
                find_max(tier, &row, &mut max);
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
        fn heavy_entries_are_those_whose_weight_is_large_enough(
            row in proptest::collection::vec(prop_oneof![-30.0_f32..30.0, Just(5.0), Just(-1e30)], 1..1500),
            scale in 0.1_f32..20.0,
            at in any::<proptest::sample::Index>(),
            nothing in any::<bool>(),
        ) {
            let max = finite_max(&row).unwrap();
            let weight = |x: f32| exp((x - max) * scale);
            let least = if nothing { 0.0 } else { weight(row[at.index(row.len())]) };
            let (mut sums, mut entries) = (Vec::new(), vec![(7, 7.0)]);
            block_sums(&row, max, scale, &mut sums);
            heavy_entries(&row, max, scale, least, &sums, &mut entries);
            let all = (0..).zip(row.iter().map(|x| weight(*x)));
            prop_assert_eq!(entries, all.filter(|(_, weight)| *weight >= least).collect::<Vec<_>>());
        }

        #[test]
        fn entries_are_gathered_and_weighed_alike_on_every_tier(row in proptest::collection::vec(-30.0_f32..30.0, 0..300), least in -30.0_f32..30.0) {
            let mut expected: Vec<_> = (3..).zip(row.iter().copied()).filter(|(_, x)| *x >= least).collect();
            for entry in &mut expected {
                entry.1 = exp((entry.1 - 30.0) * 0.7);
            }
            for tier in tiers() {
                let mut entries = Vec::new();
                gather(tier, 3, &row, least, &mut entries);
                weigh(tier, 30.0, 0.7, &mut entries);
                prop_assert_eq!(&entries, &expected);
            }
        }
    }

    #[test]
    fn no_row_has_no_largest() {
        assert_eq!(finite_max(&[]), None);
    }

    #[test]
    fn very_small_exponents_vanish() {
        assert!(exp(-1000.0) < 2e-38 && exp(0.0) == 1.0 && exp(f32::NEG_INFINITY) < 2e-38);
    }
}

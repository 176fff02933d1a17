//! The mass of a softmax, for who samples from logits on the host.
//!
//! ```text
//! logits  [vocab_size] f32  |  block 0: 512  |  block 1: 512  |  ...  |  what is left  |
//! sums    [blocks] f32      |  sum e^((x - max) * scale)      |  ...
//! ```
//!
//! One pass reads 4 bytes a logit, does about 20 operations with it and writes nothing back: who draws a token looks for its block among
//! the sums and computes the weights of that block again. Sums run in 16 lanes in a fixed order and no operation is fused, so a row has
//! the same bits on every tier. 49152 logits take 41 us with baseline instructions, 21 us with AVX2 and 11 us with AVX-512 (Zen 5).

// A body that is not inlined would be compiled for the baseline instructions only.
#![allow(clippy::inline_always)]

use std::sync::LazyLock;

use super::{
    CpuTier,
    linear::elementwise::{self, per_tier, sum},
};

/// Logits whose weights are added up together.
pub const BLOCK: usize = 512;

static TIER: LazyLock<CpuTier> = LazyLock::new(CpuTier::detect);

/// e^x, for x from -87 to 88, to 2.5e-7 of its value; beyond, that of the nearer end.
pub fn exp(x: f32) -> f32 {
    elementwise::exp(x)
}

/// Replaces `sums` by the sum of e^((x - max) * scale) over each [`BLOCK`] of the row.
pub fn block_sums(row: &[f32], max: f32, scale: f32, sums: &mut Vec<f32>) {
    sums.clear();
    sums.resize(row.len().div_ceil(BLOCK), 0.0);
    add_up(*TIER, row, max, scale, sums);
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
            for tier in CpuTier::ALL.into_iter().filter(|tier| *tier <= CpuTier::detect()) {
                let mut on_tier = vec![0.0; sums.len()];
                add_up(tier, &row, max, 0.5, &mut on_tier);
                prop_assert_eq!(&on_tier, &sums);
            }
        }
    }

    #[test]
    fn very_small_exponents_vanish() {
        assert!(exp(-1000.0) < 2e-38 && exp(0.0) == 1.0 && exp(f32::NEG_INFINITY) < 2e-38);
    }
}

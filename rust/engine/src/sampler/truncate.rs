//! Which candidates are kept: the likeliest, up to a number and a mass.

use super::math::{BlockSums, likelier};

/// Bins of the weights, 16 an octave from 1 down; the last one has all that are smaller.
const BINS: usize = 512;

/// The bin of a weight from 0 to 1.
fn bin(weight: f32) -> usize {
    const MANTISSA_BITS: u32 = 23;
    let below_one = 1.0_f32.to_bits().saturating_sub(weight.to_bits());
    ((below_one >> (MANTISSA_BITS - 4)) as usize).min(BINS - 1)
}

/// The tokens that are kept are the likeliest as far as all of these allow.
#[derive(Clone, Copy)]
pub(super) struct Truncation {
    /// So many.
    pub limit: usize,
    /// Until their weights add up to this.
    pub mass: f64,
    /// Down to this weight.
    pub floor: f32,
}

/// Replaces `candidates` by the (id, weight) of the tokens that are kept of a row, by id; `sums` are of its softmax.
pub(super) fn keep_of_row(sums: &BlockSums, row: &[f32], truncation: Truncation, candidates: &mut Vec<(u32, f32)>) {
    let Truncation { limit, mass, floor } = truncation;
    let is_bounded = limit < row.len() || mass.is_finite();
    // As a rule few tokens hold the mass, so the row is searched for ever smaller weights: from a quarter of the largest on, and
    // from less where it takes many of them.
    let many = if mass.is_finite() { mass.min(limit as f64).max(1.0) } else { 1.0 };
    let mut octaves = 2 + (many.log2() * 1.5).min(7.0) as u16;
    loop {
        let least = if is_bounded && octaves < 126 { floor.max((-f32::from(octaves)).exp2()) } else { floor };
        sums.entries_above(row, least, candidates);
        if keep_likeliest(candidates, limit, mass) || least <= floor {
            return;
        }
        octaves += 2 + octaves / 4;
    }
}

/// Keeps the likeliest candidates, `limit` at most, until their sum reaches `mass`; of equal ones the lowest ids. The order
/// stays.
///
/// False when these are too few or too light, so that all are kept.
pub(super) fn keep_likeliest(candidates: &mut Vec<(u32, f32)>, limit: usize, mass: f64) -> bool {
    let mut bins = [(0_usize, 0.0_f64); BINS];
    for &(_, weight) in &*candidates {
        let (count, sum) = &mut bins[bin(weight)];
        *count += 1;
        *sum += f64::from(weight);
    }
    // Whole bins, as long as they fit; only the one in which it ends has to be brought to order.
    let (mut limit, mut mass) = (limit, mass);
    let edge = bins.iter().position(|(count, sum)| {
        let fits = *count <= limit && *sum < mass;
        if fits {
            limit -= count;
            mass -= sum;
        }
        !fits
    });
    let Some(edge) = edge else { return false };
    let mut at_edge: Vec<_> = candidates.iter().copied().filter(|(_, weight)| bin(*weight) == edge).collect();
    keep_first(&mut at_edge, limit, mass);
    match at_edge.last() {
        Some(last) => candidates.retain(|candidate| likelier(candidate, last).is_le()),
        None => candidates.retain(|(_, weight)| bin(*weight) < edge),
    }
    true
}

/// The same for few candidates, or for ones that are much alike.
fn keep_first(candidates: &mut Vec<(u32, f32)>, limit: usize, mass: f64) {
    let limit = limit.min(candidates.len());
    // Few candidates hold the mass as a rule, so only a growing front is brought to order.
    let mut front = 64.min(limit);
    loop {
        if 0 < front && front < candidates.len() {
            candidates.select_nth_unstable_by(front - 1, likelier);
        }
        let sum: f64 = candidates[..front].iter().map(|(_, weight)| f64::from(*weight)).sum();
        if sum >= mass || front == limit {
            break;
        }
        front = (front * 4).min(limit);
    }
    candidates.truncate(front);
    candidates.sort_unstable_by(likelier);
    let mut sum = 0.0;
    let kept = candidates.iter().take_while(|(_, weight)| {
        let needed = sum < mass;
        sum += f64::from(*weight);
        needed
    });
    let kept = kept.count();
    candidates.truncate(kept);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_kept_is_the_start_of_the_sorted_candidates(
            weights in proptest::collection::vec(prop_oneof![(-12_i8..=0).prop_map(|n| f32::from(n).exp2()), 0.0_f32..=1.0], 1..400),
            limit in 1_usize..400,
            part in 0.01_f64..1.2,
        ) {
            let candidates: Vec<(u32, f32)> = (0..).zip(weights).collect();
            let mass = part * candidates.iter().map(|(_, weight)| f64::from(*weight)).sum::<f64>();
            let mut expected = candidates.clone();
            keep_first(&mut expected, limit, mass);
            let mut sorted = candidates.clone();
            sorted.sort_unstable_by(likelier);
            prop_assert_eq!(&expected[..], &sorted[..expected.len()]);
            let mut kept = candidates;
            keep_likeliest(&mut kept, limit, mass);
            // Sums are added up in another order, so that one may be needed more or less.
            prop_assert!(kept.len().abs_diff(expected.len()) <= 1, "{} and {}", kept.len(), expected.len());
            kept.sort_unstable_by(likelier);
            prop_assert_eq!(&kept[..], &sorted[..kept.len()]);
            prop_assert!(kept.len() <= limit);
        }
    }
}

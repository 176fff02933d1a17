//! Which candidates are kept: the likeliest, up to a number and a mass.

use super::math::likelier;

/// Bins of the weights, 16 an octave from 1 down; the last one has all that are smaller.
const BINS: usize = 512;

/// The bin of a weight from 0 to 1.
fn bin(weight: f32) -> usize {
    const MANTISSA_BITS: u32 = 23;
    let below_one = 1.0_f32.to_bits().saturating_sub(weight.to_bits());
    ((below_one >> (MANTISSA_BITS - 4)) as usize).min(BINS - 1)
}

/// Keeps the likeliest candidates, `limit` at most, until their sum reaches `mass`; of equal ones the lowest ids.
pub(super) fn keep_likeliest(candidates: &mut Vec<(u32, f32)>, limit: usize, mass: f64) {
    let mut bins = [(0_usize, 0.0_f64); BINS];
    for &(_, weight) in &*candidates {
        let (count, sum) = &mut bins[bin(weight)];
        *count += 1;
        *sum += f64::from(weight);
    }
    // Whole bins, as long as they fit; only the one in which it ends has to be brought to order.
    let (mut limit, mut mass, mut edge) = (limit, mass, 0);
    while edge < BINS && bins[edge].0 <= limit && bins[edge].1 < mass {
        limit -= bins[edge].0;
        mass -= bins[edge].1;
        edge += 1;
    }
    let mut at_edge: Vec<_> = candidates.iter().copied().filter(|(_, weight)| bin(*weight) == edge).collect();
    candidates.retain(|(_, weight)| bin(*weight) < edge);
    keep_first(&mut at_edge, limit, mass);
    candidates.append(&mut at_edge);
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

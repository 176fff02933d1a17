//! How long steps take, by their rows.

use std::time::Duration;

/// Seconds of steps of answers, by how many rows they have, as they were measured.
#[derive(Clone, Debug)]
pub(super) struct StepCosts {
    /// Of `1 + index` rows.
    seconds: Vec<Option<f64>>,
}

/// Of an estimate, the part that a measurement leaves.
const KEPT: f64 = 0.8;
/// A step may have waited for the machine: so many times an estimate it says no more.
const MAX_GROWTH: f64 = 1.5;

impl StepCosts {
    /// For steps of up to so many rows.
    pub(super) fn new(max_rows: usize) -> Self {
        Self { seconds: vec![None; max_rows] }
    }

    /// Rows of a step at most whose cost can be guessed: twice as many as any had so far, for steps that wait for memory take
    /// hardly longer, and others no more than twice as long.
    pub(super) fn reach(&self) -> usize {
        let widest = self.seconds.iter().rposition(Option::is_some).map_or(0, |index| index + 1);
        (2 * widest).min(self.seconds.len())
    }

    /// Takes note of a step.
    pub(super) fn note(&mut self, num_rows: usize, took: Duration) {
        let Some(seconds) = num_rows.checked_sub(1).and_then(|index| self.seconds.get_mut(index)) else { return };
        let took = took.as_secs_f64();
        *seconds = Some(seconds.map_or(took, |known| known * KEPT + took.min(known * MAX_GROWTH) * (1.0 - KEPT)));
    }

    /// What a step of so many rows is expected to take: no more than one that had more rows; between two that were measured, what
    /// lies between; beyond all of them as much as the last, so that it is tried. `None` before any was.
    pub(super) fn estimate(&self, num_rows: usize) -> Option<f64> {
        let index = num_rows.checked_sub(1)?;
        let (below, above) = self.seconds.split_at(index.min(self.seconds.len()));
        let lower = below.iter().enumerate().rev().find_map(|(at, seconds)| Some((at, (*seconds)?)));
        let upper = above.iter().enumerate().find_map(|(at, seconds)| Some((index + at, (*seconds)?)));
        let least_above = above.iter().flatten().copied().reduce(f64::min);
        let between = match (lower, upper) {
            (_, Some((at, seconds))) if at == index => seconds,
            (Some((low, from)), Some((high, to))) => from + (to - from) * (index - low) as f64 / (high - low) as f64,
            (Some((_, seconds)), None) | (None, Some((_, seconds))) => seconds,
            (None, None) => return None,
        };
        Some(least_above.map_or(between, |least| between.min(least)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_lie_between_what_was_measured() {
        let mut costs = StepCosts::new(16);
        assert_eq!(costs.estimate(1), None);
        let mut note = |num_rows, millis| costs.note(num_rows, Duration::from_millis(millis));
        note(2, 10);
        note(6, 30);
        note(17, 99);
        note(0, 99);
        assert_eq!(costs.reach(), 12);
        let estimates = [1, 2, 4, 6, 9, 16, 40].map(|num_rows| (costs.estimate(num_rows).unwrap() * 1e3).round());
        assert_eq!(estimates, [10.0, 10.0, 20.0, 30.0, 30.0, 30.0, 30.0]);
        assert_eq!(costs.estimate(0), None);
    }

    #[test]
    fn a_step_with_more_rows_bounds_those_with_fewer() {
        let mut costs = StepCosts::new(4);
        costs.note(1, Duration::from_millis(50));
        costs.note(3, Duration::from_millis(20));
        assert_eq!([1, 2, 3].map(|num_rows| costs.estimate(num_rows)), [Some(0.02); 3]);
    }

    #[test]
    fn one_slow_step_says_little() {
        let mut costs = StepCosts::new(1);
        costs.note(1, Duration::from_millis(10));
        costs.note(1, Duration::from_secs(5));
        assert!((costs.estimate(1).unwrap() - 0.011).abs() < 1e-9);
    }
}

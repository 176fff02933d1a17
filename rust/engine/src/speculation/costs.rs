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

    /// Takes note of a step. What it says of the machine, that it has become slower, holds for steps of other sizes too, half of
    /// it: they may not have been measured for long.
    pub(super) fn note(&mut self, num_rows: usize, took: Duration) {
        let Some(index) = num_rows.checked_sub(1).filter(|index| *index < self.seconds.len()) else { return };
        let took = took.as_secs_f64();
        let Some(known) = self.seconds[index] else {
            let smaller = self.seconds[..index].iter().enumerate().rev().find_map(|(at, seconds)| Some((at + 1, (*seconds)?)));
            let most = smaller.map_or(took, |(rows, seconds)| seconds * num_rows as f64 / rows as f64 * MAX_GROWTH);
            self.seconds[index] = Some(took.min(most));
            return;
        };
        let now = known * KEPT + took.min(known * MAX_GROWTH) * (1.0 - KEPT);
        let others = if known > 0.0 { (now / known).sqrt() } else { 1.0 };
        self.seconds.iter_mut().flatten().for_each(|seconds| *seconds *= others);
        self.seconds[index] = Some(now);
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
    fn a_slow_first_step_of_a_size_says_little() {
        let mut costs = StepCosts::new(4);
        costs.note(1, Duration::from_millis(10));
        costs.note(2, Duration::from_secs(5));
        assert_eq!(costs.estimate(2), Some(0.03), "rows cost what one does, and half as much again");
    }

    #[test]
    fn a_machine_that_slows_down_does_so_for_all_sizes() {
        let mut costs = StepCosts::new(4);
        costs.note(1, Duration::from_millis(10));
        costs.note(4, Duration::from_millis(20));
        for _ in 0..50 {
            costs.note(1, Duration::from_millis(40));
        }
        let (one, four) = (costs.estimate(1).unwrap(), costs.estimate(4).unwrap());
        assert!((one - 0.04).abs() < 1e-3 && (four - 0.04).abs() < 1e-3, "{one} {four}");
    }

    #[test]
    fn one_slow_step_says_little() {
        let mut costs = StepCosts::new(1);
        costs.note(1, Duration::from_millis(10));
        costs.note(1, Duration::from_secs(5));
        assert!((costs.estimate(1).unwrap() - 0.011).abs() < 1e-9);
    }
}

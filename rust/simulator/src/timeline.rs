//! What happened over time, in a bounded number of intervals.

use crate::memory::MemoryByKind;

/// Means over a stretch of time.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Interval {
    /// When it begins, in seconds from the start of the trace.
    pub start: f64,
    /// How long it is.
    pub seconds: f64,
    /// Requests in the batch.
    pub running: f64,
    /// Requests that wait.
    pub waiting: f64,
    /// What the pool is taken by.
    pub memory: MemoryByKind,
}

/// Integrals over time; [`Self::mean`] divides by it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sum(Interval);

impl Sum {
    pub(crate) fn add(&mut self, state: &Interval) {
        if self.0.seconds == 0.0 {
            self.0.start = state.start;
        }
        self.0.seconds += state.seconds;
        self.0.running += state.running * state.seconds;
        self.0.waiting += state.waiting * state.seconds;
        self.0.memory = self.0.memory.plus(&state.memory.map(|slots| slots * state.seconds));
    }

    fn join(&mut self, next: &Self) {
        self.0.seconds += next.0.seconds;
        self.0.running += next.0.running;
        self.0.waiting += next.0.waiting;
        self.0.memory = self.0.memory.plus(&next.0.memory);
    }

    /// `None` if no time has passed.
    pub(crate) fn mean(&self) -> Option<Interval> {
        let Interval { start, seconds, running, waiting, memory } = self.0;
        let over = |value: f64| value / seconds;
        let mean = Interval { start, seconds, running: over(running), waiting: over(waiting), memory: memory.map(over) };
        (seconds > 0.0).then_some(mean)
    }
}

/// Joins neighbours whenever there are too many, so that every interval covers as many steps as the others.
#[derive(Debug)]
pub(crate) struct Timeline {
    sums: Vec<Sum>,
    max_intervals: usize,
    steps_per_interval: usize,
    steps_in_last: usize,
}

impl Timeline {
    /// At most `max_intervals`, at least 2.
    pub(crate) fn new(max_intervals: usize) -> Self {
        Self { sums: Vec::new(), max_intervals, steps_per_interval: 1, steps_in_last: 1 }
    }

    pub(crate) fn push(&mut self, state: &Interval) {
        if self.steps_in_last == self.steps_per_interval {
            if self.sums.len() == self.max_intervals {
                self.halve();
            }
            if self.steps_in_last == self.steps_per_interval {
                self.sums.push(Sum::default());
                self.steps_in_last = 0;
            }
        }
        if let Some(last) = self.sums.last_mut() {
            last.add(state);
        }
        self.steps_in_last += 1;
    }

    fn halve(&mut self) {
        let is_odd = self.sums.len() % 2 == 1;
        self.sums = self
            .sums
            .chunks(2)
            .map(|pair| {
                let mut sum = pair[0];
                pair[1..].iter().for_each(|next| sum.join(next));
                sum
            })
            .collect();
        self.steps_in_last = if is_odd { self.steps_per_interval } else { 2 * self.steps_per_interval };
        self.steps_per_interval *= 2;
    }

    pub(crate) fn intervals(&self) -> Vec<Interval> {
        self.sums.iter().filter_map(Sum::mean).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn state(start: f64, seconds: f64, running: f64) -> Interval {
        Interval { start, seconds, running, ..Interval::default() }
    }

    #[test]
    fn means_are_over_time() {
        let mut sum = Sum::default();
        assert_eq!(sum.mean(), None);
        sum.add(&state(5.0, 3.0, 1.0));
        sum.add(&state(8.0, 1.0, 5.0));
        assert_eq!(sum.mean(), Some(state(5.0, 4.0, 2.0)));
    }

    proptest! {
        #[test]
        fn intervals_are_few_and_lose_nothing(max_intervals in 2usize..9, num_steps in 0usize..200) {
            let mut timeline = Timeline::new(max_intervals);
            for step in 0..num_steps {
                timeline.push(&state(step as f64, 1.0, step as f64));
            }
            let intervals = timeline.intervals();
            prop_assert!(intervals.len() <= max_intervals);
            prop_assert!(2 * intervals.len() + 1 >= max_intervals.min(num_steps));
            let mut end = 0.0;
            for interval in &intervals {
                prop_assert_eq!(interval.start, end);
                prop_assert_eq!(interval.running, interval.start + (interval.seconds - 1.0) / 2.0);
                end += interval.seconds;
            }
            prop_assert_eq!(end, num_steps as f64);
            let (last, all) = intervals.split_last().map_or((0.0, &[][..]), |(last, all)| (last.seconds, all));
            prop_assert!(all.windows(2).all(|pair| pair[0].seconds == pair[1].seconds && pair[0].seconds >= last));
        }
    }
}

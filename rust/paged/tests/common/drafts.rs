//! Drafts, right and wrong, and that they change nothing else of a step.

use paged::*;

use super::Sim;

/// What the simulated model says behind a prefix.
pub(super) fn next_token(prefix: usize) -> u32 {
    (prefix % 3) as u32
}

/// Random numbers of the drafts.
pub(super) struct Drafts {
    state: u64,
    /// Drafts that were accepted, and all that were computed.
    counts: (usize, usize),
}

const MAX_DRAFTS: u64 = 4;

impl Sim {
    /// Proposes drafts for every request from now on: none to four, three of four right.
    pub fn draft(&mut self, seed: u64) {
        self.drafts = Some(Drafts { state: seed, counts: (0, 0) });
    }

    /// Drafts that were accepted, and all that were computed.
    pub fn draft_counts(&self) -> (usize, usize) {
        self.drafts.as_ref().map_or((0, 0), |drafts| drafts.counts)
    }

    pub(super) fn count_drafts(&mut self, num_accepted: usize, num_computed: usize) {
        if let Some(Drafts { counts, .. }) = &mut self.drafts {
            *counts = (counts.0 + num_accepted, counts.1 + num_computed);
        }
    }

    /// In one of `one_in` cases a random number below `below`, if there are drafts.
    pub(super) fn draw(&mut self, below: u64, one_in: u64) -> Option<u64> {
        let drafts = self.drafts.as_mut()?;
        let mut next = || {
            drafts.state = drafts.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            drafts.state >> 33
        };
        (next() % one_in == 0).then(|| next() % below)
    }

    /// Sets the drafts of every request; returns what the next step is without them.
    pub(super) fn propose(&mut self) -> Option<SchedulerOutput> {
        self.drafts.as_ref()?;
        let mut without = self.scheduler.clone();
        let mut ids: Vec<_> = self.live.keys().copied().collect();
        ids.sort();
        for id in ids {
            without.set_drafts(id, &[]);
            let num_drafts = self.draw(MAX_DRAFTS + 1, 1).unwrap_or(0);
            let mut tokens = self.scheduler.token_ids(id).to_vec();
            let num_known = tokens.len();
            for _ in 0..num_drafts {
                let right = next_token(*self.prefixes.chain(&self.live[&id], &tokens).last().unwrap());
                let shift = self.draw(2, 4).map_or(0, |shift| 1 + shift as u32);
                tokens.push((right + shift) % 3);
            }
            assert!(self.scheduler.set_drafts(id, &tokens[num_known..]));
        }
        let mut output = SchedulerOutput::default();
        without.schedule_into(&mut output);
        Some(output)
    }
}

/// A step with drafts is the step without them, and drafts behind its rows.
pub(super) fn check_only_drafts_are_added(output: &SchedulerOutput, expected: &SchedulerOutput) {
    let mut without = output.clone();
    without.drafts.clear();
    for row in &mut without.rows {
        row.num_scheduled_tokens -= row.num_drafts;
        row.num_outputs -= row.num_drafts;
        row.num_drafts = 0;
    }
    without.total_num_scheduled_tokens -= output.drafts.len();
    assert_eq!(without, *expected, "drafts changed more than themselves");
}

//! How many drafts are worth their rows.

use std::time::Duration;

use super::{FORCED, costs::StepCosts};

/// How often drafts of a request turned out right, by how much spoke for them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Acceptance {
    classes: [Rate; NUM_CLASSES],
}

/// Drafts that were compared, and of these the right ones; older ones count less.
#[derive(Clone, Copy, Debug, Default)]
struct Rate {
    seen: f64,
    right: f64,
}

/// Nothing is known to speak for a draft, or 1, 2, 3 or 4, 5 to 8, 9 to 16, or more tokens, or a grammar.
const NUM_CLASSES: usize = 8;
/// Of what a request was seen to do, the part that a further draft leaves.
const REQUEST_KEPT: f64 = 0.9;
/// The same of all requests together.
const OVERALL_KEPT: f64 = 0.99;
/// Drafts of all requests that weigh as much as those of the request itself.
const PRIOR: f64 = 3.0;
/// The part of the time that may be lost by trying what seems not to pay, so that it is seen when it does.
const TRIALS: f64 = 0.005;
/// So many steps' length of that may be saved up.
const MAX_SAVED: f64 = 4.0;

fn class(evidence: usize) -> usize {
    match evidence {
        0..=2 => evidence,
        3..=4 => 3,
        5..=8 => 4,
        9..=16 => 5,
        17..FORCED => 6,
        _ => 7,
    }
}

impl Acceptance {
    /// Takes note of `examined` drafts that were compared, `right` of which were right, in their order; `evidence` tokens spoke
    /// for the first.
    fn note(&mut self, (evidence, examined, right): (usize, usize, usize), kept: f64) {
        for ahead in 0..examined {
            let rate = &mut self.classes[class(evidence + ahead)];
            rate.seen = rate.seen * kept + 1.0;
            rate.right = rate.right * kept + f64::from(u8::from(ahead < right));
        }
    }
}

/// Seconds that grammars were asked what they force, and those that this saved; older ones count less.
#[derive(Clone, Copy, Debug)]
struct Asking {
    seconds: f64,
    gained: f64,
}

/// Of what asking took and brought, the part that is forgotten each time.
const ASKING_LEFT: f64 = 0.02;

impl Asking {
    /// Before anybody has been asked: it is worth the length of some steps to find out.
    fn tried(step: f64) -> Self {
        Self { seconds: 0.0, gained: MAX_SAVED * step }
    }

    fn pays(&self) -> bool {
        self.gained >= self.seconds
    }

    /// Seconds of one time: so much comes in as is forgotten.
    fn usual(&self) -> f64 {
        self.seconds * ASKING_LEFT
    }
}

/// Steps of about as many answers.
fn size_class(num_answers: usize) -> usize {
    num_answers.max(1).ilog2() as usize
}

/// Chooses the drafts of a step so that most tokens a second are to be expected, from what steps of so many rows took and from
/// how often drafts were right.
#[derive(Debug)]
pub(super) struct Policy {
    costs: StepCosts,
    overall: Acceptance,
    /// Seconds that trials may cost.
    saved: f64,
    /// By the size of steps.
    asking: [Option<Asking>; usize::BITS as usize],
    /// The chances of a step's drafts, and whose they are.
    chances: Vec<(f64, usize)>,
}

/// Drafts of a request in a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate<'a> {
    pub(super) acceptance: &'a Acceptance,
    /// Tokens that speak for the first of them.
    pub(super) evidence: usize,
    pub(super) num_drafts: usize,
}

impl Policy {
    /// For steps of up to so many rows; larger ones get no drafts.
    pub(super) fn new(max_rows: usize) -> Self {
        Self {
            costs: StepCosts::new(max_rows),
            overall: Acceptance::default(),
            saved: 0.0,
            asking: [None; usize::BITS as usize],
            chances: Vec::new(),
        }
    }

    /// Takes note of how long a step of so many rows took, none of them of a prompt.
    pub(super) fn note_step(&mut self, num_rows: usize, took: Duration) {
        self.costs.note(num_rows, took);
        let took = took.as_secs_f64();
        self.saved = (self.saved + took * TRIALS).min(took * MAX_SAVED);
    }

    /// Takes note of a request's drafts: how many tokens spoke for the first, how many were computed, how many were right.
    pub(super) fn note_drafts(&mut self, acceptance: &mut Acceptance, evidence: usize, computed: usize, right: usize) {
        // Behind a wrong one nothing is said of the others.
        let seen = (evidence, computed.min(right + 1), right);
        acceptance.note(seen, REQUEST_KEPT);
        self.overall.note(seen, OVERALL_KEPT);
    }

    /// How likely a draft is right, if those before it are. Of what was never seen the best is expected, so that it is tried.
    fn chance(&self, acceptance: &Acceptance, evidence: usize) -> f64 {
        let (own, all) = (acceptance.classes[class(evidence)], self.overall.classes[class(evidence)]);
        let overall = (all.right + 1.0) / (all.seen + 1.0);
        (own.right + PRIOR * overall) / (own.seen + PRIOR)
    }

    /// Whether grammars are to be asked what they force, for a step that has `num_answers` rows without drafts: drafts that are
    /// right would pay, and asking took less than it brought in such steps, or little of the whole.
    pub(super) fn may_ask(&self, num_answers: usize) -> bool {
        let Some(alone) = self.costs.estimate(num_answers) else { return false };
        let pays = |num_rows: usize| {
            let seconds = self.costs.estimate(num_rows).unwrap_or(f64::INFINITY);
            seconds - alone * num_rows as f64 / num_answers as f64 <= self.saved
        };
        let asking = self.asking[size_class(num_answers)].unwrap_or(Asking::tried(alone));
        (asking.pays() || asking.usual() <= self.saved) && (num_answers + 1..=self.costs.reach()).any(pays)
    }

    /// Takes note of how long grammars were asked before a step.
    pub(super) fn note_asking(&mut self, num_answers: usize, took: Duration) {
        let Some(alone) = self.costs.estimate(num_answers) else { return };
        let took = took.as_secs_f64();
        let asking = self.asking[size_class(num_answers)].get_or_insert(Asking::tried(alone));
        if !asking.pays() {
            self.saved = (self.saved - took).max(0.0);
        }
        asking.seconds = asking.seconds * (1.0 - ASKING_LEFT) + took;
        asking.gained *= 1.0 - ASKING_LEFT;
    }

    /// Takes note of the seconds that forced drafts are expected to save.
    pub(super) fn note_forced(&mut self, num_answers: usize, gain: f64) {
        if let Some(asking) = &mut self.asking[size_class(num_answers)] {
            asking.gained += gain;
        }
    }

    /// How many of each candidate's drafts a step should have that has `num_answers` rows without any: into `widths`, which gets
    /// an entry for each. Returns the seconds that these are expected to save.
    pub(super) fn choose(&mut self, num_answers: usize, candidates: &[Candidate<'_>], widths: &mut Vec<usize>) -> f64 {
        widths.clear();
        widths.resize(candidates.len(), 0);
        let Some(alone) = self.costs.estimate(num_answers) else { return 0.0 };
        let room = self.costs.reach().saturating_sub(num_answers);
        let mut chances = std::mem::take(&mut self.chances);
        chances.clear();
        for (index, candidate) in candidates.iter().enumerate() {
            let mut all_right = 1.0;
            for ahead in 0..candidate.num_drafts.min(room) {
                all_right *= self.chance(candidate.acceptance, candidate.evidence + ahead);
                chances.push((all_right, index));
            }
        }
        // A draft is never likelier than the one before it, so the best of all are beginnings of each.
        chances.sort_by(|a, b| b.0.total_cmp(&a.0));
        chances.truncate(room);
        let rate_alone = num_answers as f64 / alone;
        let (mut num_tokens, mut best, mut gain) = (num_answers as f64, (rate_alone, 0), 0.0);
        for (index, (chance, _)) in chances.iter().enumerate() {
            num_tokens += chance;
            let seconds = self.costs.estimate(num_answers + index + 1).unwrap_or(alone);
            if num_tokens / seconds > best.0 {
                best = (num_tokens / seconds, index + 1);
                gain = num_tokens / rate_alone - seconds;
            }
        }
        for (_, index) in &chances[..best.1] {
            widths[*index] += 1;
        }
        self.chances = chances;
        if best.1 == 0 {
            self.try_one(num_answers, alone, candidates, widths);
        }
        gain
    }

    /// Nothing seems to pay. What has most speaking for it is tried all the same, as long as trials cost little of the whole.
    fn try_one(&mut self, num_answers: usize, alone: f64, candidates: &[Candidate<'_>], widths: &mut [usize]) {
        let best = candidates.iter().enumerate().filter(|(_, candidate)| candidate.num_drafts > 0);
        let Some((index, candidate)) = best.max_by_key(|(_, candidate)| candidate.evidence) else { return };
        let room = self.costs.reach().saturating_sub(num_answers);
        let rate_of =
            |width: usize| (num_answers + width) as f64 / self.costs.estimate(num_answers + width).unwrap_or(f64::INFINITY);
        let widths_by_rate = (1..=candidate.num_drafts.min(room)).max_by(|a, b| rate_of(*a).total_cmp(&rate_of(*b)));
        let Some(width) = widths_by_rate else { return };
        let (mut all_right, mut expected) = (1.0, num_answers as f64);
        for ahead in 0..width {
            all_right *= self.chance(candidate.acceptance, candidate.evidence + ahead);
            expected += all_right;
        }
        let seconds = self.costs.estimate(num_answers + width).unwrap_or(alone);
        let loss = (seconds - alone * expected / num_answers as f64).max(0.0);
        if loss <= self.saved {
            self.saved -= loss;
            widths[index] = width;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What steps take that wait for memory up to four rows, and compute from there on.
    fn took(num_rows: usize) -> Duration {
        Duration::from_micros(10_000 + 400 * num_rows as u64 + 2_000 * num_rows.saturating_sub(4) as u64)
    }

    fn policy() -> Policy {
        let mut policy = Policy::new(40);
        (1..=40).for_each(|num_rows| policy.note_step(num_rows, took(num_rows)));
        policy
    }

    /// Serves `num_requests` whose drafts are each right by `chance` so many steps; tokens a second, with drafts and without.
    fn serve(policy: &mut Policy, num_requests: usize, evidence: usize, chance: f64, num_steps: usize) -> (f64, f64) {
        let mut state = 7u64;
        let mut is_right = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 33) as f64 / f64::from(1u32 << 31)) < chance
        };
        let mut requests = vec![Acceptance::default(); num_requests];
        let (mut num_tokens, mut seconds, mut widths) = (0, 0.0, Vec::new());
        for _ in 0..num_steps {
            let candidates: Vec<_> =
                requests.iter().map(|acceptance| Candidate { acceptance, evidence, num_drafts: 15 }).collect();
            policy.choose(num_requests, &candidates, &mut widths);
            for (acceptance, width) in requests.iter_mut().zip(&widths) {
                let right = (0..*width).take_while(|_| is_right()).count();
                policy.note_drafts(acceptance, evidence, *width, right);
                num_tokens += 1 + right;
            }
            let num_rows = num_requests + widths.iter().sum::<usize>();
            policy.note_step(num_rows, took(num_rows));
            seconds += took(num_rows).as_secs_f64();
        }
        (num_tokens as f64 / seconds, num_requests as f64 / took(num_requests).as_secs_f64())
    }

    #[test]
    fn drafts_that_are_right_pay() {
        let (with, without) = serve(&mut policy(), 1, 24, 0.95, 1000);
        assert!(with > 2.5 * without, "{with} against {without}");
    }

    #[test]
    fn drafts_that_are_wrong_cost_hardly_anything() {
        for num_requests in [1, 8, 32] {
            let (with, without) = serve(&mut policy(), num_requests, 2, 0.02, 2000);
            assert!(with > 0.985 * without, "{num_requests} requests: {with} against {without}");
        }
    }

    #[test]
    fn wide_steps_get_only_drafts_that_are_nearly_sure() {
        let policy = &mut policy();
        serve(policy, 16, 3, 0.5, 2000);
        serve(policy, 16, 30, 0.99, 2000);
        let (unsure, sure) = (Acceptance::default(), Acceptance::default());
        let candidates = [
            Candidate { acceptance: &unsure, evidence: 3, num_drafts: 1 },
            Candidate { acceptance: &sure, evidence: 30, num_drafts: 4 },
        ];
        let mut widths = Vec::new();
        policy.saved = 0.0;
        policy.choose(16, &candidates, &mut widths);
        assert!(widths[0] == 0 && widths[1] > 1, "{widths:?}");
    }

    #[test]
    fn what_pays_again_is_found_again() {
        let policy = &mut policy();
        serve(policy, 1, 5, 0.0, 2000);
        let (with, without) = serve(policy, 1, 5, 0.95, 2000);
        assert!(with > 1.8 * without, "{with} against {without}");
    }

    #[test]
    fn grammars_are_not_asked_where_not_even_right_drafts_pay() {
        assert!(!Policy::new(40).may_ask(1), "no step was timed");
        let mut policy = policy();
        policy.saved = 0.0;
        assert!(policy.may_ask(1) && policy.may_ask(4) && policy.may_ask(39) && !policy.may_ask(40));
        let mut dear = Policy::new(40);
        (1..=40).for_each(|num_rows: u64| dear.note_step(num_rows as usize, Duration::from_micros(num_rows * num_rows)));
        dear.saved = 0.0;
        assert!(!dear.may_ask(8));
        dear.saved = 1.0;
        assert!(dear.may_ask(8), "it is tried from time to time");
    }

    #[test]
    fn grammars_that_are_asked_in_vain_are_asked_no_more_but_in_steps_of_other_sizes() {
        let ask = |policy: &mut Policy, num_answers: usize, gain: f64| {
            policy.saved = 0.0;
            (0..1000)
                .filter(|_| {
                    let asks = policy.may_ask(num_answers);
                    if asks {
                        policy.note_asking(num_answers, Duration::from_micros(500));
                        policy.note_forced(num_answers, gain);
                    }
                    asks
                })
                .count()
        };
        let policy = &mut policy();
        assert_eq!(ask(policy, 2, 0.0006), 1000);
        let in_vain = ask(policy, 4, 0.0004);
        assert!((10..900).contains(&in_vain), "{in_vain}");
        assert_eq!(ask(policy, 2, 0.0006), 1000);
        policy.saved = 0.0006;
        assert!(policy.may_ask(4), "it is tried from time to time");
        policy.note_asking(4, Duration::from_micros(500));
        assert!(policy.saved < 0.0002, "and that is counted");
    }

    #[test]
    fn nothing_is_proposed_before_a_step_was_timed() {
        let mut widths = Vec::new();
        let acceptance = Acceptance::default();
        let candidate = Candidate { acceptance: &acceptance, evidence: 30, num_drafts: 4 };
        Policy::new(8).choose(1, &[candidate], &mut widths);
        assert_eq!(widths, [0]);
    }

    #[test]
    fn a_step_never_has_more_rows_than_there_is_room_for() {
        let mut policy = Policy::new(6);
        policy.note_step(4, Duration::from_millis(10));
        let acceptance = Acceptance::default();
        let candidates = [Candidate { acceptance: &acceptance, evidence: 30, num_drafts: 9 }; 4];
        let mut widths = Vec::new();
        policy.choose(4, &candidates, &mut widths);
        assert_eq!(widths.iter().sum::<usize>(), 2);
        policy.choose(7, &candidates, &mut widths);
        assert_eq!(widths, [0; 4]);
    }
}

//! What a simulation found.

use crate::timeline::Interval;
use crate::trace::TraceRequest;

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ending {
    /// Not yet.
    #[default]
    Unfinished,
    /// With all its tokens.
    Stop,
    /// With fewer: the context or the whole pool was full.
    Length,
    /// Its deadline passed.
    Deadline,
    /// When it was submitted: it could never be served.
    Rejected,
}

impl Ending {
    /// All of them, by name; the position is the ending as a number.
    pub const NAMES: [&'static str; 5] = ["unfinished", "stop", "length", "deadline", "rejected"];
}

/// What became of one request. Times are in seconds from the start of the trace.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestRecord {
    /// When its first token came; NaN if none did.
    pub first_token: f64,
    /// When its last token came; NaN if none did.
    pub last_token: f64,
    /// Longest time between two tokens; NaN with fewer than two.
    pub max_gap: f64,
    /// When it ended.
    pub end: f64,
    /// Tokens generated.
    pub output_tokens: usize,
    /// Times its blocks were taken.
    pub preemptions: usize,
    /// Prompt tokens from the prefix cache when it first ran.
    pub cached_tokens: usize,
    /// How it ended.
    pub ending: Ending,
    /// Why it was rejected.
    pub rejection: Option<String>,
    /// Tokens that have been computed at least once.
    pub(crate) furthest: usize,
}

impl Default for RequestRecord {
    fn default() -> Self {
        Self {
            first_token: f64::NAN,
            last_token: f64::NAN,
            max_gap: f64::NAN,
            end: f64::NAN,
            output_tokens: 0,
            preemptions: 0,
            cached_tokens: 0,
            ending: Ending::Unfinished,
            rejection: None,
            furthest: 0,
        }
    }
}

impl RequestRecord {
    /// Mean seconds between its tokens; NaN with fewer than two.
    pub fn mean_gap(&self) -> f64 {
        if self.output_tokens < 2 { f64::NAN } else { (self.last_token - self.first_token) / (self.output_tokens - 1) as f64 }
    }

    pub(crate) fn add_token(&mut self, now: f64) {
        if self.output_tokens == 0 {
            self.first_token = now;
        } else {
            // The first gap is compared with NaN, which `max` passes over.
            self.max_gap = self.max_gap.max(now - self.last_token);
        }
        self.last_token = now;
        self.output_tokens += 1;
    }
}

/// Figures of the whole run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Totals {
    /// Steps.
    pub steps: u64,
    /// Seconds from the first arrival to the last end.
    pub seconds: f64,
    /// Tokens generated.
    pub output_tokens: u64,
    /// Tokens computed, prompt and output, those that were computed again included.
    pub computed_tokens: u64,
    /// Of those, how many had been computed before, and lost by a preemption.
    pub recomputed_tokens: u64,
    /// Times that a request's blocks were taken.
    pub preemptions: u64,
    /// Prompt tokens looked up in the prefix cache, each request once.
    pub prefix_queried_tokens: u64,
    /// Of those, how many were there.
    pub prefix_hit_tokens: u64,
    /// Mean over the requests of seconds from arrival to end for each token generated; NaN if there are none.
    pub normalized_latency: f64,
    /// Means over all time; `None` if there was none.
    pub overall: Option<Interval>,
    /// Means over the steps in which a request had to wait; `None` if none ever did.
    pub saturated: Option<Interval>,
}

/// All that a simulation found.
#[derive(Debug, Clone, PartialEq)]
pub struct SimulationResult {
    /// One a request, in the order of the trace.
    pub requests: Vec<RequestRecord>,
    /// What happened over time.
    pub timeline: Vec<Interval>,
    /// Figures of the whole run.
    pub totals: Totals,
}

/// Mean of latency over tokens, see [`Totals::normalized_latency`].
pub(crate) fn normalized_latency(trace: &[TraceRequest], records: &[RequestRecord]) -> f64 {
    let served = || trace.iter().zip(records).filter(|(_, record)| record.output_tokens > 0);
    let sum: f64 = served().map(|(request, record)| (record.end - request.arrival) / record.output_tokens as f64).sum();
    sum / served().count() as f64
}

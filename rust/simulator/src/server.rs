//! What the simulation runs: a memory, and who gets it next.

use paged::{RequestId, SchedulerOutput, UpdateError};

use crate::error::SimulationError;
use crate::memory::MemoryByKind;
use crate::trace::TraceRequest;

/// How requests get their KV memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Allocator {
    /// In blocks, from the production scheduler.
    #[default]
    Paged,
    /// Contiguously, as much as the longest request could need.
    Max,
    /// Contiguously, the prompt and the output's length rounded up to a power of two.
    Pow2,
    /// Contiguously, just what will be needed: the output's length is foreknown.
    Oracle,
}

impl Allocator {
    /// All of them, by name.
    pub const NAMES: [(&'static str, Self); 4] =
        [("paged", Self::Paged), ("max", Self::Max), ("pow2", Self::Pow2), ("oracle", Self::Oracle)];
}

impl std::str::FromStr for Allocator {
    type Err = SimulationError;

    fn from_str(name: &str) -> Result<Self, SimulationError> {
        let found = Self::NAMES.iter().find(|(known, _)| *known == name);
        found.map(|(_, allocator)| *allocator).ok_or_else(|| {
            let names = Self::NAMES.map(|(known, _)| known).join(", ");
            SimulationError::setting("allocator", &format!("{name:?}"), format!("known allocators are {names}"))
        })
    }
}

/// A scheduler with its memory. Requests are named by their row in the trace.
pub(crate) trait Server {
    /// Queues a request.
    fn add(&mut self, id: RequestId, request: &TraceRequest) -> Result<(), Refusal>;
    /// Decides the next step; `now` is in seconds.
    fn schedule(&mut self, step: &mut SchedulerOutput, now: f64);
    /// Takes the result of a step: the tokens of the rows that sample.
    fn update(&mut self, step: &SchedulerOutput, sampled: &[(RequestId, u32)]) -> Result<(), UpdateError>;
    /// Takes note of how many seconds a step took.
    fn measure(&mut self, _step: &SchedulerOutput, _seconds: f64) {}
    /// Ends a request.
    fn finish(&mut self, id: RequestId);
    /// Requests in the batch, and those that wait.
    fn queue_lengths(&self) -> (usize, usize);
    /// What the memory is taken by; `trace` tells what the requests will still need.
    fn memory(&self, trace: &[TraceRequest]) -> MemoryByKind;
    /// Tokens looked up in the prefix cache, and those found.
    fn prefix_tokens(&self) -> (u64, u64);
}

/// Why a request can never be served.
#[derive(Debug)]
pub(crate) struct Refusal(pub(crate) String);

//! The production scheduler, fed with made-up tokens.

use std::slice;
use std::time::Duration;

use paged::{NewRequest, RequestId, Scheduler, SchedulerOutput, StepPacer, UpdateError};

use crate::memory::MemoryByKind;
use crate::server::{Refusal, Server};
use crate::trace::TraceRequest;

pub(crate) struct PagedServer {
    scheduler: Scheduler,
    pacer: StepPacer,
    num_groups: usize,
    block_size: usize,
}

impl PagedServer {
    pub(crate) fn new(scheduler: Scheduler, pacer: StepPacer, num_groups: usize, block_size: usize) -> Self {
        Self { scheduler, pacer, num_groups, block_size }
    }
}

impl Server for PagedServer {
    fn add(&mut self, id: RequestId, request: &TraceRequest) -> Result<(), Refusal> {
        let prompt = (0..request.prompt_tokens).map(|position| token(id, request, position)).collect();
        let mut new = NewRequest::new(id, prompt, request.output_tokens);
        new.tenant = request.tenant.into();
        new.priority = request.priority;
        new.deadline = request.deadline.map(microseconds);
        self.scheduler.add_request(new).map_err(|error| {
            // The row is told beside the reason.
            let text = error.to_string();
            Refusal(text.strip_prefix(&format!("request {}: ", id.0)).unwrap_or(&text).to_owned())
        })
    }

    fn schedule(&mut self, step: &mut SchedulerOutput, now: f64) {
        self.scheduler.set_now(microseconds(now));
        self.scheduler.limit_prompt_tokens(self.pacer.limits());
        self.scheduler.schedule_into(step);
    }

    fn update(&mut self, step: &SchedulerOutput, sampled: &[(RequestId, u32)]) -> Result<(), UpdateError> {
        let sampled: Vec<_> = sampled.iter().map(|(id, token)| (*id, slice::from_ref(token))).collect();
        self.scheduler.update(step, &sampled)
    }

    fn measure(&mut self, step: &SchedulerOutput, seconds: f64) {
        self.pacer.measure(step, Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX));
    }

    fn finish(&mut self, id: RequestId) {
        self.scheduler.finish_request(id);
    }

    fn queue_lengths(&self) -> (usize, usize) {
        (self.scheduler.num_running(), self.scheduler.num_waiting())
    }

    /// Only what a request holds beyond its computed tokens is its own alone; before that, blocks may be shared or have
    /// left a window. So the empty slots are counted, and the rest of the blocks in use are token states.
    fn memory(&self, trace: &[TraceRequest]) -> MemoryByKind {
        let mut memory = MemoryByKind::default();
        for id in self.scheduler.running_requests() {
            let (computed, _) = self.scheduler.num_computed_tokens(id).unwrap_or_default();
            for group in 0..self.num_groups {
                let len = self.scheduler.block_table(id, group).len() * self.block_size;
                memory.add_held(len, computed, trace[id.0 as usize].num_tokens());
            }
        }
        let stats = self.scheduler.stats();
        let slots = |num_blocks: usize| (num_blocks * self.block_size) as f64;
        memory.token_states = slots(stats.blocks_used) - memory.internal - memory.reserved;
        memory.cached = slots(stats.blocks_cached);
        memory.free = slots(stats.blocks_free - stats.blocks_cached);
        memory
    }

    fn prefix_tokens(&self) -> (u64, u64) {
        let stats = self.scheduler.stats();
        (stats.prefix_queried_tokens, stats.prefix_hit_tokens)
    }
}

/// The scheduler's ticks.
fn microseconds(seconds: f64) -> u64 {
    (seconds * 1e6) as u64
}

/// The token at a position of a request: its prefix's own up to the prefix's length, then the request's own.
pub(crate) fn token(id: RequestId, request: &TraceRequest, position: usize) -> u32 {
    let stream = match request.prefix {
        Some(prefix) if position < prefix.len => mix(prefix.id) ^ 1,
        _ => mix(!id.0),
    };
    mix(stream ^ mix(position as u64)) as u32
}

/// Splitmix64's finalizer: every bit of the result depends on every bit of the value.
fn mix(value: u64) -> u64 {
    let value = (value.wrapping_add(0x9e37_79b9_7f4a_7c15) ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Prefix;

    #[test]
    fn tokens_are_shared_within_the_prefix_and_nowhere_else() {
        let request = |id, len| TraceRequest { prefix: Some(Prefix { id, len }), ..TraceRequest::new(0.0, 100, 100) };
        let tokens = |id, request: &TraceRequest| (0..200).map(|at| token(RequestId(id), request, at)).collect::<Vec<_>>();
        let common = |a: &[u32], b: &[u32]| a.iter().zip(b).filter(|(a, b)| a == b).count();
        let long = tokens(0, &request(3, 150));
        let short = tokens(1, &request(3, 40));
        assert_eq!(long[..40], short[..40]);
        assert_eq!(common(&long[40..], &short[40..]), 0);
        assert_eq!(common(&long, &tokens(2, &request(4, 150))), 0);
        assert_eq!(common(&tokens(3, &TraceRequest::new(0.0, 1, 1)), &short), 0);
        let distinct: std::collections::HashSet<_> = long.iter().collect();
        assert_eq!(distinct.len(), 200);
    }
}

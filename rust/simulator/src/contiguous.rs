//! What the PagedAttention paper compares with (arXiv 2309.06180, section 6.1): each request gets one contiguous chunk
//! from a buddy allocator when it is admitted and keeps it to its end. First come, first served, batched step by step,
//! without preemption: nothing is ever lacking.

use std::collections::VecDeque;

use paged::{PoolLimits, RequestId, ScheduledRequest, SchedulerOutput, UpdateError};

use crate::buddy::{Buddy, Chunk};
use crate::memory::MemoryByKind;
use crate::server::{Allocator, Refusal, Server};
use crate::trace::TraceRequest;

struct Request {
    id: RequestId,
    /// Slots it asks for.
    wanted: usize,
    num_computed_tokens: usize,
    num_tokens: usize,
    chunk: Option<Chunk>,
}

pub(crate) struct ContiguousServer {
    allocator: Allocator,
    limits: PoolLimits,
    memory: Buddy,
    running: Vec<Request>,
    waiting: VecDeque<Request>,
}

impl ContiguousServer {
    pub(crate) fn new(allocator: Allocator, limits: PoolLimits, num_slots: usize) -> Self {
        Self { allocator, limits, memory: Buddy::new(num_slots), running: Vec::new(), waiting: VecDeque::new() }
    }

    fn wanted(&self, request: &TraceRequest) -> usize {
        let output = match self.allocator {
            Allocator::Pow2 => request.output_tokens.next_power_of_two(),
            _ => request.output_tokens,
        };
        match self.allocator {
            Allocator::Max => self.limits.max_model_len,
            _ => (request.prompt_tokens + output).min(self.limits.max_model_len),
        }
    }

    fn admit(&mut self, budget: usize) {
        let mut budget = budget;
        while budget > 0 && self.running.len() < self.limits.max_num_seqs {
            let Some(request) = self.waiting.front_mut() else { return };
            request.chunk = self.memory.allocate(request.wanted);
            if request.chunk.is_none() {
                return;
            }
            budget = budget.saturating_sub(request.num_tokens);
            self.running.extend(self.waiting.pop_front());
        }
    }
}

impl Server for ContiguousServer {
    fn add(&mut self, id: RequestId, request: &TraceRequest) -> Result<(), Refusal> {
        if request.priority != 0 || request.deadline.is_some() {
            return Err(Refusal(format!(
                "request {}: only the paged allocator knows priorities and deadlines: leave them out",
                id.0
            )));
        }
        let max_model_len = self.limits.max_model_len;
        if request.prompt_tokens >= max_model_len {
            return Err(Refusal(format!(
                "request {}: the prompt has {} tokens and the context length is {max_model_len}: at most {} prompt tokens leave \
                 room for an answer",
                id.0,
                request.prompt_tokens,
                max_model_len - 1
            )));
        }
        let (wanted, largest) = (self.wanted(request), self.memory.largest_chunk());
        if wanted > largest {
            return Err(Refusal(format!(
                "request {}: it reserves {wanted} contiguous tokens and the largest piece of the memory has {largest}: give the \
                 KV cache more memory",
                id.0
            )));
        }
        self.waiting.push_back(Request { id, wanted, num_computed_tokens: 0, num_tokens: request.prompt_tokens, chunk: None });
        Ok(())
    }

    fn schedule(&mut self, step: &mut SchedulerOutput, _now: f64) {
        step.rows.clear();
        let needed: usize = self.running.iter().map(|request| request.num_tokens - request.num_computed_tokens).sum();
        self.admit(self.limits.max_num_batched_tokens.saturating_sub(needed));
        let mut budget = self.limits.max_num_batched_tokens;
        for request in &self.running {
            let num_scheduled_tokens = (request.num_tokens - request.num_computed_tokens).min(budget);
            if num_scheduled_tokens == 0 {
                break;
            }
            budget -= num_scheduled_tokens;
            step.rows.push(ScheduledRequest {
                request_id: request.id,
                num_computed_tokens: request.num_computed_tokens,
                num_scheduled_tokens,
                num_drafts: 0,
                num_again: 0,
                num_outputs: usize::from(request.num_computed_tokens + num_scheduled_tokens == request.num_tokens),
                num_cached_tokens: 0,
                miss: None,
                snapshot: None,
            });
        }
    }

    fn update(&mut self, step: &SchedulerOutput, _sampled: &[(RequestId, u32)]) -> Result<(), UpdateError> {
        // Rows are the first running requests, in order.
        for (request, row) in self.running.iter_mut().zip(&step.rows) {
            request.num_computed_tokens += row.num_scheduled_tokens;
            request.num_tokens += row.num_outputs;
        }
        Ok(())
    }

    fn finish(&mut self, id: RequestId) {
        if let Some(index) = self.running.iter().position(|request| request.id == id) {
            let request = self.running.remove(index);
            request.chunk.into_iter().for_each(|chunk| self.memory.free(chunk));
        }
    }

    fn queue_lengths(&self) -> (usize, usize) {
        (self.running.len(), self.waiting.len())
    }

    fn memory(&self, trace: &[TraceRequest]) -> MemoryByKind {
        let mut memory = MemoryByKind::default();
        for request in &self.running {
            memory.add_held(request.wanted, request.num_computed_tokens, trace[request.id.0 as usize].num_tokens());
            let len = request.chunk.map_or(request.wanted, Chunk::len);
            memory.external += (len - request.wanted) as f64;
        }
        // While one waits for memory, no free piece is large enough for it.
        let is_full = !self.waiting.is_empty() && self.running.len() < self.limits.max_num_seqs;
        *(if is_full { &mut memory.external } else { &mut memory.free }) += self.memory.num_free() as f64;
        memory
    }

    fn prefix_tokens(&self) -> (u64, u64) {
        (0, 0)
    }
}

//! How the panels of a phase are shared among the threads.
//!
//! Each thread reads a range of panels of its own, one stream of memory, and then steals from others. SmolLM2's weights of 84 MB
//! in `Q4_1` pass for one row at 50 to 53 GB/s on two cores of a Zen 5 on which `examples/roofline.rs` reads 1 GB at 52 in the
//! same minutes; where threads claim panels in turn it is 42.

use std::ops::Range;

use super::{
    CpuLinear, Input, MANY_ROWS, PANEL,
    act_block::ActBlock,
    activations::stride,
    out::SharedOut,
    phases::{LinearContext, grown},
};
use crate::cpu::read_ahead::Phase;

/// Below this many multiplications a step is faster on one thread.
const MIN_PARALLEL: usize = 1 << 15;
/// Up to so many rows a step waits for memory more than for arithmetic.
const FEW_ROWS: usize = 16;
/// Bytes of weights, or of activations, that stay in a core's L2 cache while the other pass.
const CACHED: usize = 512 << 10;

impl LinearContext<'_> {
    /// Shares the panels `0..work.panels` among the threads; `body(panels, rows, buffer)` is called for every panel and every row
    /// once.
    pub(super) fn for_panels(self, work: &Work, panels: &mut Vec<f32>, body: &PanelBody<'_>) {
        let threads = self.pool.num_threads();
        let alone = work.is_for_one(threads);
        let buffers = grown(panels, work.buffer_len * if alone { 1 } else { threads }, 0.0);
        let buffers = SharedOut::new(buffers);
        let row_block = work.row_block();
        // Several panels share rows that have to be fetched.
        let together = (work.panels / (threads * 6)).min(CACHED / work.panel_bytes.max(1)).max(1);
        let grain = if work.rows > row_block { together } else { work.stretch };
        let worker = |id: usize, start: usize, end: usize| {
            // SAFETY: each worker has a buffer of its own.
            let buffer = unsafe { buffers.part(id * work.buffer_len, work.buffer_len) };
            for m in (0..work.rows).step_by(row_block) {
                body(start..end, m..work.rows.min(m + row_block), buffer);
            }
        };
        if work.waits {
            self.pool.ahead().enter(&work.phase);
        }
        if alone { worker(0, 0, work.panels) } else { self.pool.for_each_share(work.panels, grain, &worker) }
    }
}

/// Called with panels, rows of the input, and the thread's buffer.
pub(super) type PanelBody<'a> = dyn Fn(Range<usize>, Range<usize>, &mut [f32]) + Sync + 'a;

/// What [`LinearContext::for_panels`] shares out.
pub(super) struct Work {
    pub panels: usize,
    pub phase: Phase,
    /// Panels that a thread takes at once, at most.
    pub stretch: usize,
    pub rows: usize,
    pub cols: usize,
    /// Whether the step waits for memory more than for arithmetic.
    pub waits: bool,
    /// Bytes of a row of activations as kernels read it.
    pub row_bytes: usize,
    pub panel_bytes: usize,
    /// f32 that a thread needs to open a panel.
    pub buffer_len: usize,
}

impl Work {
    pub(super) fn new<'a>(input: &Input<'_>, weights: &(impl Iterator<Item = &'a CpuLinear> + Clone)) -> Self {
        let packed = weights.clone().all(CpuLinear::is_packed);
        Self {
            panels: weights.clone().map(CpuLinear::panels).sum(),
            phase: Phase::new(weights.clone().map(CpuLinear::memory)),
            stretch: 1,
            rows: input.rows,
            cols: input.cols,
            waits: input.rows <= FEW_ROWS,
            row_bytes: match packed {
                true => stride(input.cols) * size_of::<ActBlock>(),
                false if !input.pairs.is_empty() => input.cols * 2,
                false => input.cols * 4,
            },
            panel_bytes: weights.clone().map(CpuLinear::panel_bytes).max().unwrap_or(0),
            buffer_len: weights.clone().map(CpuLinear::buffer_len).max().unwrap_or(0),
        }
    }

    /// Whether one thread does it as fast.
    pub(super) fn is_for_one(&self, threads: usize) -> bool {
        threads == 1 || self.rows * self.cols * self.panels * PANEL < MIN_PARALLEL
    }

    /// Rows of activations that stay cached while the panels of a range pass; at least enough to pay for opening a panel.
    pub(super) fn row_block(&self) -> usize {
        let least = if self.buffer_len > 0 { 2 * MANY_ROWS } else { MANY_ROWS };
        (CACHED / self.row_bytes.max(1)).max(least) / MANY_ROWS * MANY_ROWS
    }
}

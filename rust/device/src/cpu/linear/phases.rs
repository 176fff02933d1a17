//! The phases of a decoder layer that multiply by weights.

use std::{
    ops::Range,
    sync::atomic::{AtomicUsize, Ordering},
};

use super::{
    CpuLinear, Input, PANEL, ROWS, Tile,
    activations::{ActBlock, BLOCK, quantise_row},
    elementwise::{add_scaled, gate_row, norm_row},
    many_rows::{Phase, Tiles},
    out::SharedOut,
};
use crate::{
    GateUpArgs, Norm, Projection, ResidualArgs, Tensor,
    cpu::{CpuTier, ThreadPool},
};

/// Where phases run.
#[derive(Clone, Copy)]
pub struct LinearContext<'a> {
    /// The threads.
    pub pool: &'a ThreadPool,
    /// Instructions of norms and activation functions; weights bring their own.
    pub tier: CpuTier,
}

/// Buffers of the phases; they grow to the largest step seen and are then reused.
#[derive(Default)]
pub struct LinearScratch {
    /// Normalised input, `[rows, cols]`.
    normed: Vec<f32>,
    /// Quantised input, `[rows, cols / 32]`.
    acts: Vec<ActBlock>,
    /// Output that waits for a norm, `[rows, out_features]`.
    wide: Vec<f32>,
    /// Dequantised panels, some for each thread.
    panels: Vec<f32>,
    /// Activations and results of the tile units.
    tiles: Option<Tiles>,
}

/// Below this many multiplications a step is faster on one thread.
const MIN_PARALLEL: usize = 1 << 15;
/// Below this many values rows are normalised and quantised on one thread.
const MIN_PARALLEL_ROWS: usize = 1 << 12;
/// Bytes of weights, or of activations, that stay in a core's L2 cache while the other pass.
const CACHED: usize = 512 << 10;

/// The first `len` elements of a buffer that grows when needed.
fn grown<T: Clone>(buffer: &mut Vec<T>, len: usize, fill: T) -> &mut [T] {
    if buffer.len() < len {
        buffer.resize(len, fill);
    }
    &mut buffer[..len]
}

impl LinearContext<'_> {
    /// The same with a tier that this machine is known to have.
    fn checked(self) -> Self {
        Self { tier: self.tier.min(CpuTier::detect()), ..self }
    }

    /// Calls `body(start, end)` for ranges of rows, on one thread when there are few values.
    fn for_rows(self, rows: usize, cols: usize, body: &(dyn Fn(Range<usize>) + Sync)) {
        if rows < 2 || rows * cols < MIN_PARALLEL_ROWS {
            body(0..rows);
        } else {
            let grain = rows.div_ceil(self.pool.num_threads() * 4);
            self.pool.for_each_range(rows, grain, &|start, end| body(start..end));
        }
    }

    /// Normalises `x` and quantises it when a weight is packed.
    fn input<'b>(
        self,
        x: &'b Tensor,
        norm: Option<&Norm>,
        packed: bool,
        normed: &'b mut Vec<f32>,
        acts: &'b mut Vec<ActBlock>,
    ) -> Input<'b> {
        let (rows, cols) = (x.rows(), x.cols());
        let normed = grown(normed, if norm.is_some() { rows * cols } else { 0 }, 0.0);
        let blocks = if packed { cols / BLOCK } else { 0 };
        let acts = grown(acts, rows * blocks, ActBlock::ZERO);
        if norm.is_some() || packed {
            let (shared_normed, shared_acts) = (SharedOut::new(normed), SharedOut::new(acts));
            self.for_rows(rows, cols, &|range| {
                for m in range {
                    let mut row = x.row(m);
                    if let Some(norm) = norm {
                        // SAFETY: each row is written by one thread.
                        let out = unsafe { shared_normed.part(m * cols, cols) };
                        norm_row(self.tier, norm, row, out);
                        row = out;
                    }
                    if packed {
                        // SAFETY: as above.
                        quantise_row(self.tier, row, unsafe { shared_acts.part(m * blocks, blocks) });
                    }
                }
            });
        }
        Input { rows, cols, values: if norm.is_some() { normed } else { x.as_slice() }, acts }
    }

    /// Shares the panels `0..work.panels` among the threads; `body(panel, rows, buffer)` is called for every panel and every row once.
    fn for_panels(self, work: &Work, panels: &mut Vec<f32>, body: &PanelBody<'_>) {
        let threads = self.pool.num_threads();
        let alone = threads == 1 || work.rows * work.cols * work.panels * PANEL < MIN_PARALLEL;
        let buffers = grown(panels, work.buffer_len * if alone { 1 } else { threads }, 0.0);
        let buffers = SharedOut::new(buffers);
        let grain = (work.panels / (threads * 6)).min(CACHED / work.panel_bytes.max(1)).max(1);
        // Rows of activations that stay cached while the panels of a range pass; at least enough to pay for opening a panel.
        let row_block = (CACHED / work.row_bytes.max(1)).max(if work.buffer_len > 0 { 128 } else { 16 }) / ROWS * ROWS;
        let next = AtomicUsize::new(0);
        let worker = |id: usize| {
            // SAFETY: each worker has a buffer of its own.
            let buffer = unsafe { buffers.part(id * work.buffer_len, work.buffer_len) };
            loop {
                let start = next.fetch_add(grain, Ordering::Relaxed);
                if start >= work.panels {
                    break;
                }
                let mut m = 0;
                while m < work.rows {
                    let end = work.rows.min(m + row_block);
                    for panel in start..work.panels.min(start + grain) {
                        body(panel, m..end, buffer);
                    }
                    m = end;
                }
            }
        };
        if alone { worker(0) } else { self.pool.run_available(&worker) }
    }
}

/// Called with a panel, rows of the input, and the thread's buffer.
type PanelBody<'a> = dyn Fn(usize, Range<usize>, &mut [f32]) + Sync + 'a;

/// What [`LinearContext::for_panels`] shares out.
struct Work {
    panels: usize,
    rows: usize,
    cols: usize,
    /// Bytes of a row of activations as kernels read it.
    row_bytes: usize,
    panel_bytes: usize,
    /// f32 that a thread needs to open a panel.
    buffer_len: usize,
}

impl Work {
    fn new<'a>(input: &Input<'_>, weights: &(impl Iterator<Item = &'a CpuLinear> + Clone)) -> Self {
        let max = |f: fn(&CpuLinear) -> usize| weights.clone().map(f).max().unwrap_or(0);
        let packed = weights.clone().all(CpuLinear::is_packed);
        Self {
            panels: weights.clone().map(CpuLinear::panels).sum(),
            rows: input.rows,
            cols: input.cols,
            row_bytes: if packed { input.cols / BLOCK * size_of::<ActBlock>() } else { input.cols * 4 },
            panel_bytes: max(CpuLinear::panel_bytes),
            buffer_len: max(CpuLinear::buffer_len),
        }
    }
}

fn assert_in(x: &Tensor, linear: &CpuLinear) {
    assert_eq!(
        x.cols(),
        linear.in_features,
        "input columns of `{}` [{}, {}]",
        linear.name,
        linear.out_features,
        linear.in_features
    );
}

fn assert_out(out: &Tensor, linear: &CpuLinear) {
    assert_eq!(
        out.cols(),
        linear.out_features,
        "output columns of `{}` [{}, {}]",
        linear.name,
        linear.out_features,
        linear.in_features
    );
}

/// The weight of a panel, and the panel's number in it.
type PanelWeight<'a, 'w> = &'a (dyn Fn(usize) -> (&'w CpuLinear, usize) + Sync);

/// Called with an item, rows, and their values, biases included: `[width][rows, perhaps more][32]`.
type Store<'a> = &'a (dyn Fn(usize, Range<usize>, &mut [f32]) + Sync);

/// Panels of a phase: item i is the panels `width * i..width * (i + 1)`.
pub(super) struct Items<'a, 'w> {
    pub count: usize,
    pub width: usize,
    pub weight: PanelWeight<'a, 'w>,
    pub store: Store<'a>,
}

/// A projection while its output is written.
struct Target<'a> {
    weight: &'a CpuLinear,
    out: SharedOut<'a, f32>,
    /// Number of its first panel among those of all projections.
    first: usize,
}

/// Projections that run as one batch of panels; more run as several.
const MAX_PROJECTIONS: usize = 8;

/// [`Backend::norm_linear`](crate::Backend::norm_linear): for every projection `out = norm(x) @ weight^T + bias`; sets the outputs' rows.
///
/// # Panics
/// When sizes disagree.
pub fn norm_linear(
    context: LinearContext<'_>,
    scratch: &mut LinearScratch,
    x: &Tensor,
    norm: Option<&Norm>,
    projections: &mut [Projection<'_>],
) {
    let context = context.checked();
    if let Some(phase) = Phase::start(context, &mut scratch.tiles, x, norm, projections.iter().map(|p| p.linear.cpu())) {
        for projections in projections.chunks_mut(MAX_PROJECTIONS) {
            let (targets, count) = targets(x, projections);
            let target =
                |panel| targets.iter().flatten().rfind(|t| t.first <= panel).expect("the first target's first panel is 0");
            phase.run(&Items {
                count,
                width: 1,
                weight: &|panel| (target(panel).weight, panel - target(panel).first),
                store: &|panel, rows, c| {
                    let Target { weight, out, first } = target(panel);
                    let columns = weight.panel_rows(panel - first);
                    for (m, values) in rows.zip(c.chunks_exact(PANEL)) {
                        // SAFETY: as in `store`.
                        let out = unsafe { out.part(m * weight.out_features + columns.start, columns.len()) };
                        out.copy_from_slice(&values[..columns.len()]);
                    }
                },
            });
        }
        return;
    }
    let LinearScratch { normed, acts, panels, .. } = scratch;
    let packed = projections.iter().any(|p| p.linear.cpu().is_packed());
    let input = context.input(x, norm, packed, normed, acts);
    for projections in projections.chunks_mut(MAX_PROJECTIONS) {
        let (targets, _) = targets(x, projections);
        let work = Work::new(&input, &targets.iter().flatten().map(|t| t.weight));
        context.for_panels(&work, panels, &|panel, rows, buffer| {
            let Some(target) = targets.iter().flatten().rfind(|t| t.first <= panel) else { return };
            store(target.weight, panel - target.first, &input, rows, buffer, &target.out);
        });
    }
}

/// The projections as targets, and their number of panels.
fn targets<'a>(x: &Tensor, projections: &'a mut [Projection<'_>]) -> ([Option<Target<'a>>; MAX_PROJECTIONS], usize) {
    let mut targets = [const { None }; MAX_PROJECTIONS];
    let mut first = 0;
    for (target, Projection { linear, out }) in targets.iter_mut().zip(projections) {
        let weight = linear.cpu();
        assert_in(x, weight);
        assert_out(out, weight);
        out.set_rows(x.rows());
        *target = Some(Target { weight, out: SharedOut::new(out.as_mut_slice()), first });
        first += weight.panels();
    }
    (targets, first)
}

/// Writes the columns of panel `p` for `rows` of the input.
fn store(weight: &CpuLinear, p: usize, input: &Input<'_>, rows: Range<usize>, buffer: &mut [f32], out: &SharedOut<'_, f32>) {
    let columns = weight.panel_rows(p);
    let panel = weight.open(p, buffer);
    let mut tile: Tile = [[0.0; PANEL]; ROWS];
    for m in rows.clone().step_by(ROWS) {
        let count = ROWS.min(rows.end - m);
        panel.multiply(input, m, count, &mut tile);
        for (i, values) in tile[..count].iter().enumerate() {
            // SAFETY: these columns of these rows belong to this panel, and each panel and row is visited once.
            let out = unsafe { out.part((m + i) * weight.out_features + columns.start, columns.len()) };
            out.copy_from_slice(&values[..columns.len()]);
        }
    }
}

/// [`Backend::linear_residual`](crate::Backend::linear_residual): `residual += post_norm(x @ weight^T + bias) * scale`.
///
/// # Panics
/// When sizes disagree.
pub fn linear_residual(context: LinearContext<'_>, scratch: &mut LinearScratch, args: ResidualArgs<'_>) {
    let ResidualArgs { x, linear, post_norm, scale, residual } = args;
    let context = context.checked();
    let weight = linear.cpu();
    assert_in(x, weight);
    assert_out(residual, weight);
    assert_eq!(residual.rows(), x.rows(), "rows of the residual stream");
    let LinearScratch { normed, acts, wide, panels, tiles } = scratch;
    let cols = weight.out_features;
    let residual = SharedOut::new(residual.as_mut_slice());
    // Adds values of one row and of the columns of one panel to the residual stream, or keeps them for the norm.
    let wide = grown(wide, if post_norm.is_some() { x.rows() * cols } else { 0 }, 0.0);
    let shared_wide = SharedOut::new(wide);
    let finish = |m: usize, columns: &Range<usize>, values: &[f32]| {
        let target = if post_norm.is_some() { &shared_wide } else { &residual };
        // SAFETY: as in `store`.
        let out = unsafe { target.part(m * cols + columns.start, columns.len()) };
        if post_norm.is_some() {
            out.copy_from_slice(&values[..columns.len()]);
        } else {
            add_scaled(context.tier, values, scale, out);
        }
    };
    if let Some(phase) = Phase::start(context, tiles, x, None, std::iter::once(weight)) {
        phase.run(&Items {
            count: weight.panels(),
            width: 1,
            weight: &|p| (weight, p),
            store: &|p, rows, c| {
                let columns = weight.panel_rows(p);
                for (m, values) in rows.zip(c.chunks_exact(PANEL)) {
                    finish(m, &columns, values);
                }
            },
        });
    } else {
        let input = context.input(x, None, weight.is_packed(), normed, acts);
        let work = Work::new(&input, &std::iter::once(weight));
        context.for_panels(&work, panels, &|p, rows, buffer| {
            let columns = weight.panel_rows(p);
            let panel = weight.open(p, buffer);
            let mut tile: Tile = [[0.0; PANEL]; ROWS];
            for m in rows.clone().step_by(ROWS) {
                let count = ROWS.min(rows.end - m);
                panel.multiply(&input, m, count, &mut tile);
                for (i, values) in tile[..count].iter().enumerate() {
                    finish(m + i, &columns, values);
                }
            }
        });
    }
    let Some(norm) = post_norm else { return };
    // The input is no longer read: its buffer holds the normalised rows.
    let normed = SharedOut::new(grown(normed, x.rows() * cols, 0.0));
    let wide = &*wide;
    context.for_rows(x.rows(), cols, &|rows| {
        for m in rows {
            // SAFETY: each row is written by one thread.
            let (row, out) = unsafe { (normed.part(m * cols, cols), residual.part(m * cols, cols)) };
            norm_row(context.tier, norm, &wide[m * cols..(m + 1) * cols], row);
            add_scaled(context.tier, row, scale, out);
        }
    });
}

/// [`Backend::gate_up`](crate::Backend::gate_up): `out = activation(norm(x) @ gate^T) * (norm(x) @ up^T)`, biases included; sets out's rows.
///
/// # Panics
/// When sizes disagree.
pub fn gate_up(context: LinearContext<'_>, scratch: &mut LinearScratch, args: GateUpArgs<'_>) {
    let GateUpArgs { x, norm, gate, up, activation, out } = args;
    let context = context.checked();
    let (gate, up) = (gate.cpu(), up.cpu());
    for weight in [gate, up] {
        assert_in(x, weight);
        assert_out(out, weight);
    }
    out.set_rows(x.rows());
    let LinearScratch { normed, acts, panels, tiles, .. } = scratch;
    if let Some(phase) = Phase::start(context, tiles, x, norm, [gate, up].into_iter()) {
        let cols = gate.out_features;
        let out = SharedOut::new(out.as_mut_slice());
        phase.run(&Items {
            count: gate.panels(),
            width: 2,
            weight: &|panel| (if panel % 2 == 0 { gate } else { up }, panel / 2),
            store: &|p, rows, c| {
                let columns = gate.panel_rows(p);
                let (gates, ups) = c.split_at_mut(c.len() / 2);
                gate_row(context.tier, activation, &mut gates[..rows.len() * PANEL], ups);
                for (m, values) in rows.zip(gates.chunks_exact(PANEL)) {
                    // SAFETY: as in `store`.
                    let out = unsafe { out.part(m * cols + columns.start, columns.len()) };
                    out.copy_from_slice(&values[..columns.len()]);
                }
            },
        });
        return;
    }
    let input = context.input(x, norm, gate.is_packed() || up.is_packed(), normed, acts);
    let pair = Work::new(&input, &[gate, up].into_iter());
    let half = pair.buffer_len;
    let work = Work { panels: gate.panels(), panel_bytes: 2 * pair.panel_bytes, buffer_len: 2 * half, ..pair };
    let cols = gate.out_features;
    let out = SharedOut::new(out.as_mut_slice());
    context.for_panels(&work, panels, &|p, rows, buffer| {
        let columns = gate.panel_rows(p);
        let (first, second) = buffer.split_at_mut(half);
        let (gate, up) = (gate.open(p, first), up.open(p, second));
        let (mut gates, mut ups): (Tile, Tile) = ([[0.0; PANEL]; ROWS], [[0.0; PANEL]; ROWS]);
        for m in rows.clone().step_by(ROWS) {
            let count = ROWS.min(rows.end - m);
            gate.multiply(&input, m, count, &mut gates);
            up.multiply(&input, m, count, &mut ups);
            for (i, (gates, ups)) in gates[..count].iter_mut().zip(&ups).enumerate() {
                gate_row(context.tier, activation, gates, ups);
                // SAFETY: as in `store`.
                let out = unsafe { out.part((m + i) * cols + columns.start, columns.len()) };
                out.copy_from_slice(&gates[..columns.len()]);
            }
        }
    });
}

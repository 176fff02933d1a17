//! The phases of a decoder layer that multiply by weights.

use std::ops::Range;

use super::{
    CpuLinear, Input, MANY_ROWS, PANEL,
    act_block::{ActBlock, BLOCK},
    activations::{quantize_row, stride},
    elementwise::{add_scaled, norm_row},
    for_products,
    largest::Search,
    lora::{LoraScratch, adapt, adapted_residual},
    out::SharedOut,
    panels::Work,
    tiled::round_row,
    tiles::{TilePhase, TileScratch},
};
use crate::{
    AdapterRows, Norm, Projection, ResidualArgs, Tensor,
    cpu::{Isa, ThreadPool, read_ahead::MAX_WEIGHTS, simd::prefetch_to_write},
};

/// Where phases run.
#[derive(Clone, Copy)]
pub struct LinearContext<'a> {
    /// The threads.
    pub pool: &'a ThreadPool,
    /// Instructions of norms and activation functions; weights bring their own.
    pub isa: Isa,
    /// The rows of the phase with adapters.
    pub adapters: &'a [AdapterRows],
}

/// Buffers of the phases; they grow to the largest step seen and are then reused.
#[derive(Default)]
pub struct LinearScratch {
    /// Normalised input, `[rows, cols]`.
    pub(super) normed: Vec<f32>,
    pub(super) acts: Acts,
    /// Output that waits for a norm, `[rows, out_features]`.
    wide: Vec<f32>,
    /// Dequantized panels, some for each thread.
    pub(super) panels: Vec<f32>,
    pub(super) search: Search,
    /// Activations and results of products by AMX.
    pub(super) tiles: Option<TileScratch>,
    pub(super) lora: LoraScratch,
}

/// Quantized input.
#[derive(Default)]
pub(super) struct Acts {
    /// Rounded input, `[rows, cols / 2]`.
    pairs: Vec<u32>,
    /// See [`Input`].
    blocks: Vec<ActBlock>,
}

/// What the weights of a phase take.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Form {
    Floats,
    Blocks,
}

impl Form {
    pub(super) fn of(weight: &CpuLinear) -> Self {
        if weight.is_packed() { Self::Blocks } else { Self::Floats }
    }
}

/// Below this many values rows are normalised and quantized on one thread.
const MIN_PARALLEL_ROWS: usize = 1 << 12;

/// The first `len` elements of a buffer that grows when needed.
pub(super) fn grown<T: Clone>(buffer: &mut Vec<T>, len: usize, fill: T) -> &mut [T] {
    if buffer.len() < len {
        buffer.resize(len, fill);
    }
    &mut buffer[..len]
}

/// Prefetches the lines of what is to be written. After a phase of many rows they are in other cores' caches, and stores wait for
/// one after the other.
fn prefetch_all_to_write<T>(out: &[T]) {
    for byte in (0..size_of_val(out)).step_by(64) {
        prefetch_to_write(out.as_ptr().wrapping_byte_add(byte).cast());
    }
}

impl LinearContext<'_> {
    /// The same with an ISA that this machine is known to have.
    pub(super) fn checked(self) -> Self {
        Self { isa: self.isa.min(Isa::detect()), ..self }
    }

    /// Calls `body(range)` for ranges of rows from multiples of `unit` on, on one thread when there are few values. In every
    /// phase a thread begins with the same rows, so that it writes what its own caches hold.
    pub(super) fn for_rows(self, (rows, cols): (usize, usize), unit: usize, body: &(dyn Fn(Range<usize>) + Sync)) {
        let units = rows.div_ceil(unit);
        if units < 2 || rows * cols < MIN_PARALLEL_ROWS {
            body(0..rows);
        } else {
            let grain = units.div_ceil(self.pool.num_threads() * 4);
            self.pool.for_each_share(units, grain, &|_, start, end| body(start * unit..rows.min(end * unit)));
        }
    }

    /// Normalises `x` and brings it into `form`, and into pairs if asked to.
    pub(super) fn input<'b>(
        self,
        x: &'b Tensor,
        norm: Option<&Norm>,
        form: Form,
        pairs: bool,
        normed: &'b mut Vec<f32>,
        acts: &'b mut Acts,
    ) -> Input<'b> {
        let (rows, cols) = (x.rows(), x.cols());
        let normed = grown(normed, if norm.is_some() { rows * cols } else { 0 }, 0.0);
        let blocks = if form >= Form::Blocks { cols / BLOCK } else { 0 };
        let pair_cols = if pairs { cols / 2 } else { 0 };
        let Acts { pairs: act_pairs, blocks: acts } = acts;
        let act_pairs = grown(act_pairs, rows * pair_cols, 0);
        let stride = if blocks > 0 { stride(cols) } else { 0 };
        let acts = grown(acts, rows * stride, ActBlock::ZERO);
        if norm.is_some() || pairs || form >= Form::Blocks {
            let (shared_normed, shared_acts) = (SharedOut::new(normed), SharedOut::new(acts));
            let shared_pairs = SharedOut::new(act_pairs);
            self.for_rows((rows, cols), 1, &|range| {
                for m in range {
                    let mut row = x.row(m);
                    if let Some(norm) = norm {
                        // SAFETY: each row is written by one thread.
                        let out = unsafe { shared_normed.part(m * cols, cols) };
                        norm_row(self.isa, norm, row, out);
                        row = out;
                    }
                    if pairs {
                        // SAFETY: as above; a weight that takes pairs is of an ISA that multiplies bf16, which this machine has.
                        unsafe { round_row(row, shared_pairs.part(m * pair_cols, pair_cols)) };
                    }
                    if form >= Form::Blocks {
                        // SAFETY: as above.
                        let acts = unsafe { shared_acts.part(m * stride, blocks) };
                        if rows > MANY_ROWS {
                            prefetch_all_to_write(acts);
                        }
                        quantize_row(self.isa, row, acts);
                    }
                }
            });
        }
        Input { rows, cols, values: if norm.is_some() { normed } else { x.as_slice() }, pairs: act_pairs, acts }
    }
}

pub(super) fn assert_in(x: &Tensor, linear: &CpuLinear) {
    assert_eq!(
        x.cols(),
        linear.in_features,
        "input columns of `{}` [{}, {}]",
        linear.name,
        linear.out_features,
        linear.in_features
    );
}

pub(super) fn assert_out(out: &Tensor, linear: &CpuLinear) {
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
const MAX_PROJECTIONS: usize = MAX_WEIGHTS;

/// [`Phases::norm_linear`](crate::Phases::norm_linear): for every projection `out = norm(x) @ weight^T + bias`; sets the outputs'
/// rows.
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
    unadapted(context, scratch, x, norm, projections);
    adapt(context, scratch, x, norm, projections);
}

fn unadapted(
    context: LinearContext<'_>,
    scratch: &mut LinearScratch,
    x: &Tensor,
    norm: Option<&Norm>,
    projections: &mut [Projection<'_>],
) {
    if let Some(phase) =
        TilePhase::start(context, &mut scratch.tiles, x, norm, projections.iter().map(|p| p.linear.weight::<CpuLinear>()))
    {
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
    let form = projections.iter().map(|p| Form::of(p.linear.weight::<CpuLinear>())).max().unwrap_or(Form::Floats);
    let pairs = projections.iter().any(|p| p.linear.weight::<CpuLinear>().takes_pairs());
    let input = context.input(x, norm, form, pairs, normed, acts);
    for projections in projections.chunks_mut(MAX_PROJECTIONS) {
        let (targets, _) = targets(x, projections);
        let work = Work::new(&input, &targets.iter().flatten().map(|t| t.weight));
        context.for_panels(&work, panels, &|panels, rows, buffer| {
            for panel in panels {
                let Some(target) = targets.iter().flatten().rfind(|t| t.first <= panel) else { return };
                store(target.weight, panel - target.first, &input, &rows, buffer, &target.out);
            }
        });
    }
}

/// The projections as targets, and their number of panels.
fn targets<'a>(x: &Tensor, projections: &'a mut [Projection<'_>]) -> ([Option<Target<'a>>; MAX_PROJECTIONS], usize) {
    let mut targets = [const { None }; MAX_PROJECTIONS];
    let mut first = 0;
    for (target, Projection { linear, out }) in targets.iter_mut().zip(projections) {
        let weight = linear.weight::<CpuLinear>();
        assert_in(x, weight);
        assert_out(out, weight);
        out.set_rows(x.rows());
        *target = Some(Target { weight, out: SharedOut::new(out.as_mut_slice()), first });
        first += weight.panels();
    }
    (targets, first)
}

/// Copies a panel's values of a row; of the last panel fewer.
pub(super) fn copy(values: &[f32; PANEL], out: &mut [f32]) {
    if let Ok(out) = <&mut [f32; PANEL]>::try_from(&mut *out) {
        // Of known length: no call.
        *out = *values;
    } else {
        out.copy_from_slice(&values[..out.len()]);
    }
}

/// Writes the columns of panel `p` for `rows` of the input.
pub(super) fn store(
    weight: &CpuLinear,
    p: usize,
    input: &Input<'_>,
    rows: &Range<usize>,
    buffer: &mut [f32],
    out: &SharedOut<'_, f32>,
) {
    let columns = weight.panel_rows(p);
    let panel = weight.open(p, buffer);
    for_products(&[panel], input, rows, &mut |m, [products]| {
        for (i, values) in products.iter().enumerate() {
            // SAFETY: these columns of these rows belong to this panel, and each panel and row is visited once.
            copy(values, unsafe { out.part((m + i) * weight.out_features + columns.start, columns.len()) });
        }
    });
}

/// [`Phases::linear_residual`](crate::Phases::linear_residual): `residual += post_norm(x @ weight^T + bias) * scale`.
///
/// # Panics
/// When sizes disagree.
pub fn linear_residual(context: LinearContext<'_>, scratch: &mut LinearScratch, args: ResidualArgs<'_>) {
    if AdapterRows::touch(context.adapters, [args.linear]) {
        return adapted_residual(context.checked(), scratch, args);
    }
    let ResidualArgs { x, linear, post_norm, scale, residual } = args;
    let context = context.checked();
    let weight = linear.weight::<CpuLinear>();
    assert_in(x, weight);
    assert_out(residual, weight);
    assert_eq!(residual.rows(), x.rows(), "rows of the residual stream");
    let LinearScratch { normed, acts, wide, panels, tiles, .. } = scratch;
    let cols = weight.out_features;
    let residual = SharedOut::new(residual.as_mut_slice());
    // Adds values of one row and of the columns of one panel to the residual stream, or keeps them for the norm.
    let wide = grown(wide, if post_norm.is_some() { x.rows() * cols } else { 0 }, 0.0);
    let shared_wide = SharedOut::new(wide);
    let target = if post_norm.is_some() { &shared_wide } else { &residual };
    let finish = |m: usize, columns: &Range<usize>, values: &[f32]| {
        // SAFETY: as in `store`.
        let out = unsafe { target.part(m * cols + columns.start, columns.len()) };
        if post_norm.is_some() {
            out.copy_from_slice(&values[..columns.len()]);
        } else {
            add_scaled(context.isa, values, scale, out);
        }
    };
    if let Some(phase) = TilePhase::start(context, tiles, x, None, std::iter::once(weight)) {
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
        let input = context.input(x, None, Form::of(weight), weight.takes_pairs(), normed, acts);
        let work = Work::new(&input, &std::iter::once(weight));
        context.for_panels(&work, panels, &|panels, rows, buffer| {
            for p in panels {
                let columns = weight.panel_rows(p);
                let panel = weight.open(p, buffer);
                for_products(&[panel], &input, &rows, &mut |m, [products]| {
                    if rows.len() > MANY_ROWS {
                        for m in m..m + products.len() {
                            // SAFETY: as in `store`.
                            prefetch_all_to_write(unsafe { target.part(m * cols + columns.start, columns.len()) });
                        }
                    }
                    for (i, values) in products.iter().enumerate() {
                        finish(m + i, &columns, values);
                    }
                });
            }
        });
    }
    let Some(norm) = post_norm else { return };
    // The input is no longer read: its buffer holds the normalised rows.
    let normed = SharedOut::new(grown(normed, x.rows() * cols, 0.0));
    let wide = &*wide;
    context.for_rows((x.rows(), cols), 1, &|rows| {
        for m in rows {
            // SAFETY: each row is written by one thread.
            let (row, out) = unsafe { (normed.part(m * cols, cols), residual.part(m * cols, cols)) };
            norm_row(context.isa, norm, &wide[m * cols..(m + 1) * cols], row);
            add_scaled(context.isa, row, scale, out);
        }
    });
}

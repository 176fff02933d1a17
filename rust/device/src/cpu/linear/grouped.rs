//! Products of rows that are sorted by expert, each by the weights of its own. All experts are one phase: threads wait for each
//! other once, not for every expert, and each reads a share of the experts as one stream.

use std::ops::Range;

use super::{
    CpuLinear, Input,
    elementwise::gate_row,
    gate_up::{STRETCH, activated_panels, pairs_of_panels},
    out::SharedOut,
    panels::Work,
    phases::{Form, LinearContext, LinearScratch, grown, store},
};
use crate::{Expert, ExpertActivation, Linear, Tensor, cpu::read_ahead::Phase};

/// Rows of one expert, among rows that are sorted by expert.
pub(super) struct Group<'a> {
    pub expert: &'a Expert,
    pub rows: Range<usize>,
}

/// Called with a group, panels of its expert, rows of the input, and the thread's buffer.
type GroupBody<'a> = dyn Fn(&Group<'_>, Range<usize>, &Input<'_>, Range<usize>, &mut [f32]) + Sync + 'a;

/// What takes the rows of a group first: the gate, or up where there is none, and up.
fn gate_and_up<'a>(group: &Group<'a>) -> [&'a CpuLinear; 2] {
    let Expert { gate, up, .. } = group.expert;
    [gate.as_ref().unwrap_or(up), up].map(Linear::weight::<CpuLinear>)
}

/// `out = activation(x @ gate^T, x @ up^T)`, or of up alone, by the experts of groups that cover the rows of `x`,
/// `[rows, hidden_size]`; sets out's rows.
pub(super) fn gate_up<'a>(
    context: LinearContext<'_>,
    scratch: &mut LinearScratch,
    groups: &[Group<'a>],
    x: &Tensor,
    activation: ExpertActivation,
    out: &mut Tensor,
) {
    out.set_rows(x.rows());
    let out = SharedOut::new(out.as_mut_slice());
    let combine: &(dyn Fn(&mut [f32], &[f32]) + Sync) = match activation {
        ExpertActivation::Plain(activation) => {
            let up = |group: &Group<'a>| [group.expert.up.weight::<CpuLinear>()];
            return run(context, scratch, groups, x, up, &|group, panels, input, rows, buffer| {
                activated_panels(context.isa, (group.expert.up.weight(), activation), panels, input, &rows, buffer, &out);
            });
        }
        ExpertActivation::Gated(activation) => &move |gates, ups| gate_row(context.isa, activation, gates, ups),
        ExpertActivation::Clamped { alpha, limit } => &move |gates, ups| ExpertActivation::clamp(alpha, limit, gates, ups),
    };
    run(context, scratch, groups, x, gate_and_up, &|group, panels, input, rows, buffer| {
        pairs_of_panels(gate_and_up(group), panels, input, &rows, buffer, combine, &out);
    });
}

/// `out = x @ down^T` by the experts of groups that cover the rows of `x`, `[rows, intermediate_size]`; sets out's rows.
pub(super) fn down(context: LinearContext<'_>, scratch: &mut LinearScratch, groups: &[Group<'_>], x: &Tensor, out: &mut Tensor) {
    out.set_rows(x.rows());
    let out = SharedOut::new(out.as_mut_slice());
    run(context, scratch, groups, x, |group| [group.expert.down.weight::<CpuLinear>()], &|group, panels, input, rows, buffer| {
        let weight = group.expert.down.weight::<CpuLinear>();
        panels.for_each(|p| store(weight, p, input, &rows, buffer, &out));
    });
}

/// Shares the panels of all groups' experts among the threads; `body` is called for every panel of an expert with every row of
/// its group once. `weights` are those of a group that take the input, of one shape in all groups.
fn run<'a, const N: usize>(
    context: LinearContext<'_>,
    scratch: &mut LinearScratch,
    groups: &[Group<'a>],
    x: &Tensor,
    weights: impl Fn(&Group<'a>) -> [&'a CpuLinear; N] + Copy,
    body: &GroupBody<'_>,
) {
    let Some(first) = groups.first().map(|group| weights(group)[0]) else { return };
    let all = groups.iter().flat_map(weights);
    let LinearScratch { normed, acts, panels: buffers, .. } = scratch;
    let form = all.clone().map(Form::of).max().unwrap_or(Form::Floats);
    let input = context.input(x, None, form, all.clone().any(CpuLinear::takes_pairs), normed, acts);
    let own = Work::new(&input, &all);
    let work = Work { panels: first.panels(), buffer_len: N * own.buffer_len, ..own };
    let (pool, row_block) = (context.pool, work.row_block());
    let threads = if work.is_for_one(pool.num_threads()) { 1 } else { pool.num_threads() };
    let buffers = SharedOut::new(grown(buffers, work.buffer_len * threads, 0.0));
    let stretches = work.panels.div_ceil(STRETCH);
    let worker = |id: usize, start: usize, end: usize| {
        // SAFETY: each worker has a buffer of its own.
        let buffer = unsafe { buffers.part(id * work.buffer_len, work.buffer_len) };
        for stretch in start..end {
            let (group, first) = (&groups[stretch / stretches], stretch % stretches * STRETCH);
            for m in group.rows.clone().step_by(row_block) {
                let rows = m..group.rows.end.min(m + row_block);
                body(group, first..work.panels.min(first + STRETCH), &input, rows, buffer);
            }
        }
    };
    if work.waits {
        pool.ahead().enter(&Phase::unforeseen(std::ptr::from_ref(first).addr()));
    }
    let count = groups.len() * stretches;
    if threads == 1 { worker(0, 0, count) } else { pool.for_each_share(count, 1, &worker) }
}

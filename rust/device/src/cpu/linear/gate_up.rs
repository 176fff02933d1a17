//! The first half of a feed-forward network.

use std::ops::Range;

use super::{
    CpuLinear, Input, PANEL, ROWS,
    elementwise::{activate_row, gate_row},
    for_products, norm_linear,
    out::SharedOut,
    panels::Work,
    phases::{Form, Items, LinearContext, LinearScratch, assert_in, assert_out, copy},
    tiles::TilePhase,
};
use crate::{Activation, AdapterRows, GateUpArgs, Projection, cpu::Isa};

/// Panels of gate that a thread multiplies by few rows before the same of up: memory is then read in streams that are long enough
/// for the processor's prefetchers.
pub(super) const STRETCH: usize = 8;

/// [`Phases::gate_up`](crate::Phases::gate_up): `out = activation(norm(x) @ gate^T) * (norm(x) @ up^T)`, without a gate
/// `activation(norm(x) @ up^T)`, biases included; sets out's rows.
///
/// # Panics
/// When sizes disagree.
pub fn gate_up(context: LinearContext<'_>, scratch: &mut LinearScratch, args: GateUpArgs<'_>) {
    let context = context.checked();
    if AdapterRows::touch(context.adapters, args.gate.into_iter().chain([args.up])) {
        return adapted(context, scratch, args);
    }
    let GateUpArgs { x, norm, gate: Some(gate), up, activation, out, next: _ } = args else {
        return ungated(context, scratch, args);
    };
    let (gate, up) = (gate.weight::<CpuLinear>(), up.weight::<CpuLinear>());
    for weight in [gate, up] {
        assert_in(x, weight);
        assert_out(out, weight);
    }
    out.set_rows(x.rows());
    let LinearScratch { normed, acts, panels, tiles, .. } = scratch;
    if let Some(phase) = TilePhase::start(context, tiles, x, norm, [gate, up].into_iter()) {
        let cols = gate.out_features;
        let out = SharedOut::new(out.as_mut_slice());
        phase.run(&Items {
            count: gate.panels(),
            width: 2,
            weight: &|panel| (if panel % 2 == 0 { gate } else { up }, panel / 2),
            store: &|p, rows, c| {
                let columns = gate.panel_rows(p);
                let (gates, ups) = c.split_at_mut(c.len() / 2);
                gate_row(context.isa, activation, &mut gates[..rows.len() * PANEL], ups);
                for (m, values) in rows.zip(gates.chunks_exact(PANEL)) {
                    // SAFETY: as in `store`.
                    let out = unsafe { out.part(m * cols + columns.start, columns.len()) };
                    out.copy_from_slice(&values[..columns.len()]);
                }
            },
        });
        return;
    }
    let form = Form::of(gate).max(Form::of(up));
    let pairs = gate.takes_pairs() || up.takes_pairs();
    let input = context.input(x, norm, form, pairs, normed, acts);
    let pair = Work::new(&input, &[gate, up].into_iter());
    let stretch = if x.rows() <= ROWS { STRETCH } else { 1 };
    let phase = pair.phase.in_turn(STRETCH);
    let work = Work {
        panels: gate.panels(),
        phase,
        stretch,
        panel_bytes: 2 * pair.panel_bytes,
        buffer_len: 2 * pair.buffer_len,
        ..pair
    };
    let out = SharedOut::new(out.as_mut_slice());
    let combine = |gates: &mut [f32], ups: &[f32]| gate_row(context.isa, activation, gates, ups);
    context.for_panels(&work, panels, &|panels, rows, buffer| {
        pairs_of_panels([gate, up], panels, &input, &rows, buffer, &combine, &out);
    });
}

/// Multiplies panels of gate and up by rows of the input, and writes to these columns of `out` what `combine(gates, ups)` makes
/// of the gates.
pub(super) fn pairs_of_panels(
    [gate, up]: [&CpuLinear; 2],
    panels: Range<usize>,
    input: &Input<'_>,
    rows: &Range<usize>,
    buffer: &mut [f32],
    combine: &(dyn Fn(&mut [f32], &[f32]) + Sync),
    out: &SharedOut<'_, f32>,
) {
    let finish = |p: usize, m: usize, gates: &mut [[f32; PANEL]], ups: &[[f32; PANEL]]| {
        combine(gates.as_flattened_mut(), ups.as_flattened());
        let columns = gate.panel_rows(p);
        for (i, gates) in gates.iter().enumerate() {
            // SAFETY: as in `store`.
            copy(gates, unsafe { out.part((m + i) * gate.out_features + columns.start, columns.len()) });
        }
    };
    let (first, second) = buffer.split_at_mut(buffer.len() / 2);
    if rows.len() > ROWS {
        for p in panels {
            let panels = [gate.open(p, first), up.open(p, second)];
            for_products(&panels, input, rows, &mut |m, [gates, ups]| finish(p, m, gates, ups));
        }
        return;
    }
    for start in panels.clone().step_by(STRETCH) {
        let mut stretch = [[[0.0; PANEL]; ROWS]; STRETCH];
        for (p, gates) in (start..panels.end).zip(&mut stretch) {
            let panel = gate.open(p, first);
            for_products(&[panel], input, rows, &mut |_, [products]| gates[..products.len()].copy_from_slice(products));
        }
        for (p, gates) in (start..panels.end).zip(&mut stretch) {
            let panel = up.open(p, second);
            for_products(&[panel], input, rows, &mut |m, [ups]| finish(p, m, &mut gates[..ups.len()], ups));
        }
    }
}

/// [`gate_up`] where adapters do something to the weights: the products stand by themselves first.
fn adapted(context: LinearContext<'_>, scratch: &mut LinearScratch, args: GateUpArgs<'_>) {
    let GateUpArgs { x, norm, gate, up, activation, out, next: _ } = args;
    let (rows, cols) = (x.rows(), up.out_features);
    let Some(gate) = gate else {
        norm_linear(context, scratch, x, norm, &mut [Projection { linear: up, out: &mut *out }]);
        let out = SharedOut::new(out.as_mut_slice());
        return context.for_rows((rows, cols), 1, &|range| {
            // SAFETY: each row belongs to one thread.
            range.for_each(|row| activate_row(context.isa, activation, unsafe { out.part(row * cols, cols) }));
        });
    };
    let mut ups = std::mem::take(&mut scratch.lora.up);
    let of_up = ups.rows(rows, cols);
    let mut projections = [Projection { linear: gate, out: &mut *out }, Projection { linear: up, out: &mut *of_up }];
    norm_linear(context, scratch, x, norm, &mut projections);
    let (of_up, out) = (&*of_up, SharedOut::new(out.as_mut_slice()));
    context.for_rows((rows, cols), 1, &|range| {
        // SAFETY: each row belongs to one thread.
        range.for_each(|row| gate_row(context.isa, activation, unsafe { out.part(row * cols, cols) }, of_up.row(row)));
    });
    scratch.lora.up = ups;
}

/// [`gate_up`] without a gate.
fn ungated(context: LinearContext<'_>, scratch: &mut LinearScratch, args: GateUpArgs<'_>) {
    let GateUpArgs { x, norm, up, activation, out, .. } = args;
    let up = up.weight::<CpuLinear>();
    assert_in(x, up);
    assert_out(out, up);
    out.set_rows(x.rows());
    let LinearScratch { normed, acts, panels, tiles, .. } = scratch;
    let out = SharedOut::new(out.as_mut_slice());
    if let Some(phase) = TilePhase::start(context, tiles, x, norm, std::iter::once(up)) {
        phase.run(&Items {
            count: up.panels(),
            width: 1,
            weight: &|p| (up, p),
            store: &|p, rows, c| {
                store_activated(context.isa, (up, activation), (p, rows.start), &mut c.as_chunks_mut().0[..rows.len()], &out);
            },
        });
        return;
    }
    let input = context.input(x, norm, Form::of(up), up.takes_pairs(), normed, acts);
    let work = Work::new(&input, &std::iter::once(up));
    context.for_panels(&work, panels, &|panels, rows, buffer| {
        activated_panels(context.isa, (up, activation), panels, &input, &rows, buffer, &out);
    });
}

/// Multiplies panels of a weight by rows of the input, and writes what the activation makes of that.
pub(super) fn activated_panels(
    isa: Isa,
    (weight, activation): (&CpuLinear, Activation),
    panels: Range<usize>,
    input: &Input<'_>,
    rows: &Range<usize>,
    buffer: &mut [f32],
    out: &SharedOut<'_, f32>,
) {
    for p in panels {
        let panel = weight.open(p, buffer);
        let mut finish = |m: usize, [products]: [&mut [[f32; PANEL]]; 1]| {
            store_activated(isa, (weight, activation), (p, m), products, out);
        };
        for_products(&[panel], input, rows, &mut finish);
    }
}

/// Writes what the activation makes of products of a panel, of rows from `m` on.
fn store_activated(
    isa: Isa,
    (weight, activation): (&CpuLinear, Activation),
    (p, m): (usize, usize),
    products: &mut [[f32; PANEL]],
    out: &SharedOut<'_, f32>,
) {
    activate_row(isa, activation, products.as_flattened_mut());
    let columns = weight.panel_rows(p);
    for (i, products) in products.iter().enumerate() {
        // SAFETY: as in `store`.
        copy(products, unsafe { out.part((m + i) * weight.out_features + columns.start, columns.len()) });
    }
}

//! Mamba, whose channels have states of their own.

#![allow(clippy::inline_always)] // ISA code must be inlined.

use crate::{Activation, Mamba, Tensor};

use super::{
    super::linear::{
        elementwise::{exp, gate_row, normed_row, per_isa, softplus},
        out::SharedOut,
    },
    Input, Multiply, RecurrentScratch, Run,
};

/// Channels of the scan that a thread takes at once.
const SCANNED: usize = 64;

pub(super) fn mamba(
    run: &Run<'_>,
    multiply: Multiply<'_>,
    input: Input<'_>,
    scratch: &mut RecurrentScratch,
    weights: &Mamba,
    out: &mut Tensor,
) {
    let (rows, isa) = (out.rows(), run.context.isa);
    let (width, state_dim) = (weights.x.out_features, weights.state_dim());
    let [x, z, dt_down, b, c, dt, ..] = &mut scratch.projected;
    let (x, z, dt) = (x.rows(rows, width), z.rows(rows, width), dt.rows(rows, width));
    let (dt_down, b, c) = (dt_down.rows(rows, weights.dt_down.out_features), b.rows(rows, state_dim), c.rows(rows, state_dim));
    multiply(input, &mut [(&weights.x, &mut *x), (&weights.z, &mut *z)]);
    let mixed = scratch.mixed[0].rows(rows, width);
    run.convolve(&weights.conv, 0, x, mixed, Some(Activation::Silu));
    multiply((&*mixed, None), &mut [(&weights.dt_down, &mut *dt_down), (&weights.b, &mut *b), (&weights.c, &mut *c)]);
    let norms = weights.norms.as_ref();
    multiply((&*dt_down, norms.map(|[norm, ..]| norm)), &mut [(&weights.dt, &mut *dt)]);
    if let Some([_, of_b, of_c]) = norms {
        for row in 0..rows {
            normed_row(isa, of_b, b.row_mut(row));
            normed_row(isa, of_c, c.row_mut(row));
        }
    }
    let (mixed, z, dt, b, c, offset) = (&*mixed, &*z, &*dt, &*b, &*c, weights.conv.state_len());
    let shared = SharedOut::new(out.as_mut_slice());
    run.for_each(width.div_ceil(SCANNED), &|request, part| {
        let columns = part * SCANNED..width.min((part + 1) * SCANNED);
        let mut buffers = [[0.0; SCANNED]; 3];
        let [steps, changes, gates] = buffers.each_mut().map(|values| &mut values[..columns.len()]);
        for row in run.rows(request) {
            let x = &mixed.row(row)[columns.clone()];
            // SAFETY: each part has columns of its own.
            let out = unsafe { shared.part(row * width + columns.start, columns.len()) };
            steps.copy_from_slice(&dt.row(row)[columns.clone()]);
            begin(isa, &weights.d[columns.clone()], x, steps, changes, out);
            for (n, bc) in b.row(row).iter().zip(c.row(row)).enumerate() {
                let own = n * width + columns.start..n * width + columns.end;
                // SAFETY: as above, of the state.
                let state = unsafe { run.state(request, offset + own.start..offset + own.end) };
                scan(isa, &weights.a[own], [*bc.0, *bc.1], [&*steps, &*changes], state, out);
            }
            gates.copy_from_slice(&z.row(row)[columns.clone()]);
            gate_row(isa, Activation::Silu, gates, out);
            out.copy_from_slice(gates);
        }
    });
}

/// Makes `steps` of what they are before softplus, and what the state is given of x in them.
#[inline(always)]
fn begin_body(d: &[f32], x: &[f32], steps: &mut [f32], changes: &mut [f32], out: &mut [f32]) {
    for ((((d, x), step), change), out) in d.iter().zip(x).zip(steps).zip(changes).zip(out) {
        *step = softplus(*step);
        *change = *step * x;
        *out = d * x;
    }
}

/// A row of the state of some channels, and what it adds to their outputs.
#[inline(always)]
fn scan_body(a: &[f32], [b, c]: [f32; 2], [steps, changes]: [&[f32]; 2], state: &mut [f32], out: &mut [f32]) {
    for ((((a, step), change), state), out) in a.iter().zip(steps).zip(changes).zip(state).zip(out) {
        *state = *state * exp(step * a) + b * change;
        *out += *state * c;
    }
}

per_isa!(begin = begin_body(d: &[f32], x: &[f32], steps: &mut [f32], changes: &mut [f32], out: &mut [f32]));
per_isa!(scan = scan_body(a: &[f32], bc: [f32; 2], of_channels: [&[f32]; 2], state: &mut [f32], out: &mut [f32]));

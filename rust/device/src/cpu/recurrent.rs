//! Recurrent layers: projections of all rows, then convolutions by channel and recurrences by head, each request's rows one after
//! the other. Sums have one order, so a row has the same bits in any chunk and on any number of threads.

#![allow(clippy::inline_always)] // ISA code must be inlined.

mod mamba;

use std::ops::Range;

use crate::{
    Activation, Conv, GateActivation, GatedDelta, Linear, Mamba2, Norm, Projection, Recurrent, RecurrentArgs, ShortConv,
    StateCache, StepMetadata, Tensor, WorkspaceShape,
};

use super::linear::{
    Buffer, LinearContext, LinearScratch,
    elementwise::{self, activate_row, attention_gate, gate_row, norm_row, per_isa, sum},
    norm_linear,
    out::SharedOut,
};

/// Channels of a convolution that a thread takes at once.
const CHANNELS: usize = 256;

/// Buffers of the phase; they grow to the largest step seen and are then reused.
#[derive(Default)]
pub struct RecurrentScratch {
    /// What is projected.
    projected: [Buffer; 8],
    /// What convolutions give.
    mixed: [Buffer; 3],
}

/// Bytes of [`RecurrentScratch`] once it has grown to its largest.
pub fn workspace_bytes(shape: &WorkspaceShape) -> u64 {
    (shape.num_tokens.next_power_of_two() * 2 * shape.recurrent_width * size_of::<f32>()) as u64
}

/// What the parts of a step have in common.
struct Run<'a> {
    context: LinearContext<'a>,
    step: &'a StepMetadata,
    states: &'a StateCache,
    layer: usize,
    values: SharedOut<'a, f32>,
}

impl Run<'_> {
    /// Rows of a request.
    fn rows(&self, request: usize) -> Range<usize> {
        self.step.query_start_loc[request] as usize..self.step.query_start_loc[request + 1] as usize
    }

    /// Calls `body(request, part)` for all parts of all requests, on all threads.
    fn for_each(&self, num_parts: usize, body: &(dyn Fn(usize, usize) + Sync)) {
        let tasks = self.step.state_slots.len() * num_parts;
        let grain = tasks.div_ceil(4 * self.context.pool.num_threads());
        self.context.pool.for_each_range(tasks, grain, &|start, end| {
            (start..end).for_each(|task| body(task / num_parts, task % num_parts));
        });
    }

    /// Values of a request's state.
    ///
    /// # Safety
    /// No two parts that overlap may be alive at once.
    #[allow(clippy::mut_from_ref)]
    unsafe fn state(&self, request: usize, part: Range<usize>) -> &mut [f32] {
        let all = self.states.range(self.step.state_slots[request] as usize, self.layer);
        assert!(part.end <= all.len(), "values {part:?} of a state of {}", all.len());
        // SAFETY: the caller's promise; slots of a step are distinct.
        unsafe { self.values.part(all.start + part.start, part.len()) }
    }

    /// A convolution, whose inputs are kept from `offset` on; `out` has as many columns as `x`.
    fn convolve(&self, conv: &Conv, offset: usize, x: &Tensor, out: &mut Tensor, activation: Option<Activation>) {
        let (channels, kernel, isa) = (conv.num_channels, conv.kernel(), self.context.isa);
        assert_eq!([x.cols(), out.cols()], [channels; 2], "channels of a convolution");
        let out = SharedOut::new(out.as_mut_slice());
        self.for_each(channels.div_ceil(CHANNELS), &|request, part| {
            let columns = part * CHANNELS..channels.min((part + 1) * CHANNELS);
            let (rows, past) = (self.rows(request), kernel - 1);
            // SAFETY: each part has columns of its own, and no other one has them.
            let kept = |i: usize| unsafe {
                self.state(request, offset + i * channels + columns.start..offset + i * channels + columns.end)
            };
            // The input `back` tokens before row `row`.
            let before = |row: usize, back: usize| -> &[f32] {
                let done = row - rows.start;
                if back <= done { &x.row(row - back)[columns.clone()] } else { kept(past + done - back) }
            };
            for row in rows.clone() {
                // SAFETY: as above.
                let out = unsafe { out.part(row * channels + columns.start, columns.len()) };
                match &conv.bias {
                    Some(bias) => out.copy_from_slice(&bias[columns.clone()]),
                    None => out.fill(0.0),
                }
                for i in 0..kernel {
                    let weight = &conv.weight[i * channels..][columns.clone()];
                    add_product(isa, weight, before(row, past - i), out);
                }
                if let Some(activation) = activation {
                    activate_row(isa, activation, out);
                }
            }
            // In order, so that none is overwritten before it is read.
            for i in 0..past {
                let source = i + rows.len();
                let value = if source < past {
                    kept(source).to_vec()
                } else {
                    x.row(rows.start + source - past)[columns.clone()].to_vec()
                };
                kept(i).copy_from_slice(&value);
            }
        });
    }
}

/// [`RecurrentPhases::recurrent`](crate::RecurrentPhases::recurrent).
///
/// # Panics
/// When sizes disagree.
pub fn recurrent(
    context: LinearContext<'_>,
    linear: &mut LinearScratch,
    scratch: &mut RecurrentScratch,
    args: RecurrentArgs<'_>,
    step: &StepMetadata,
) {
    let RecurrentArgs { hidden, norm, weights, states, layer, out } = args;
    assert_eq!(step.state_slots.len(), step.num_reqs(), "slots of the requests");
    debug_assert!(
        step.state_slots.iter().enumerate().all(|(i, slot)| !step.state_slots[..i].contains(slot)),
        "slots of a step are distinct: {:?}",
        step.state_slots
    );
    out.set_rows(hidden.rows());
    let mut values = states.values();
    for (request, slot) in step.state_slots.iter().enumerate() {
        if step.positions[step.query_start_loc[request] as usize] == 0 {
            values.as_mut_slice()[states.range(*slot as usize, layer)].fill(0.0);
        }
    }
    let run = Run { context, step, states, layer, values: SharedOut::new(values.as_mut_slice()) };
    let mut multiply = |(x, norm): Input<'_>, outputs: &mut [(&Linear, &mut Tensor)]| {
        let mut projections: Vec<_> = outputs.iter_mut().map(|(linear, out)| Projection { linear, out }).collect();
        norm_linear(context, linear, x, norm, &mut projections);
    };
    let mut project = |outputs: &mut [(&Linear, &mut Tensor)]| multiply((hidden, norm), outputs);
    match weights {
        Recurrent::Mamba(weights) => mamba::mamba(&run, &mut multiply, (hidden, norm), scratch, weights, out),
        Recurrent::ShortConv(weights) => short_conv(&run, &mut project, scratch, weights, out),
        Recurrent::Mamba2(weights) => mamba2(&run, &mut project, scratch, weights, out),
        Recurrent::GatedDelta(weights) => gated_delta(&run, &mut multiply, (hidden, norm), scratch, weights, out),
    }
}

/// Rows, and a norm that is applied to them first.
type Input<'a> = (&'a Tensor, Option<&'a Norm>);

/// Multiplies rows by matrices.
type Multiply<'a> = &'a mut dyn FnMut(Input<'_>, &mut [(&Linear, &mut Tensor)]);

/// Multiplies the hidden state by matrices.
type Project<'a> = &'a mut dyn FnMut(&mut [(&Linear, &mut Tensor)]);

fn short_conv(run: &Run<'_>, project: Project<'_>, scratch: &mut RecurrentScratch, weights: &ShortConv, out: &mut Tensor) {
    let rows = out.rows();
    let [b, c, x, ..] = scratch.projected.each_mut().map(|buffer| buffer.rows(rows, weights.conv.num_channels));
    project(&mut [(&weights.b, &mut *b), (&weights.c, &mut *c), (&weights.x, &mut *x)]);
    multiply(run.context.isa, x.as_mut_slice(), b.as_slice());
    run.convolve(&weights.conv, 0, x, out, None);
    multiply(run.context.isa, out.as_mut_slice(), c.as_slice());
}

fn mamba2(run: &Run<'_>, project: Project<'_>, scratch: &mut RecurrentScratch, weights: &Mamba2, out: &mut Tensor) {
    let (rows, isa) = (out.rows(), run.context.isa);
    let Mamba2 { num_heads, num_groups, state_dim, scales: [z_scale, dt_scale], .. } = *weights;
    let (dim, width, channels) = (weights.head_dim(), weights.z.out_features, weights.conv.num_channels);
    let [z, xbc, dt, ..] = &mut scratch.projected;
    let (z, xbc, dt) = (z.rows(rows, width), xbc.rows(rows, channels), dt.rows(rows, num_heads));
    project(&mut [(&weights.z, &mut *z), (&weights.xbc, &mut *xbc), (&weights.dt, &mut *dt)]);
    let mixed = scratch.mixed[0].rows(rows, channels);
    run.convolve(&weights.conv, 0, xbc, mixed, Some(Activation::Silu));
    let (mixed, offset) = (&*mixed, weights.conv.state_len());
    let shared = SharedOut::new(out.as_mut_slice());
    run.for_each(num_heads, &|request, head| {
        let first = offset + head * state_dim * dim;
        // SAFETY: each head has a state of its own.
        let state = unsafe { run.state(request, first..first + state_dim * dim) };
        let group = head * num_groups / num_heads * state_dim;
        let (a, d, bias, [least, most]) = (weights.a[head], weights.d[head], weights.dt_bias[head], weights.dt_limits);
        for row in run.rows(request) {
            let (x, bc) = mixed.row(row).split_at(width);
            let (b, c) = bc.split_at(num_groups * state_dim);
            let step = softplus(dt.row(row)[head] * dt_scale + bias).clamp(least, most);
            let x = &x[head * dim..(head + 1) * dim];
            // SAFETY: each head has columns of its own.
            let out = unsafe { shared.part(row * width + head * dim, dim) };
            out.iter_mut().zip(x).for_each(|(out, x)| *out = d * x);
            scan(isa, state, (step * a).exp(), step, x, [&b[group..group + state_dim], &c[group..group + state_dim]], out);
        }
    });
    for row in 0..rows {
        let gate = z.row_mut(row);
        if z_scale != 1.0 {
            for z in &mut *gate {
                *z *= z_scale;
            }
        }
        if let Some(norm) = weights.norm.as_ref().filter(|_| !weights.gates_first) {
            norm_groups(norm, num_groups, out.row_mut(row));
        }
        // The gate becomes SiLU of itself, times what it gates.
        gate_row(isa, Activation::Silu, gate, out.row(row));
        out.row_mut(row).copy_from_slice(gate);
        if let Some(norm) = weights.norm.as_ref().filter(|_| weights.gates_first) {
            norm_groups(norm, num_groups, out.row_mut(row));
        }
    }
}

/// Norms groups of columns, each by a mean square of its own.
fn norm_groups(norm: &Norm, num_groups: usize, row: &mut [f32]) {
    let part = row.len() / num_groups;
    for (values, weight) in row.chunks_exact_mut(part).zip(norm.weight.chunks_exact(part)) {
        let scale = 1.0 / (sum(values, |x| x * x) / part as f32 + norm.eps).sqrt();
        values.iter_mut().zip(weight).for_each(|(x, w)| *x = *x * scale * w);
    }
}

fn gated_delta(
    run: &Run<'_>,
    multiply: Multiply<'_>,
    input: Input<'_>,
    scratch: &mut RecurrentScratch,
    weights: &GatedDelta,
    out: &mut Tensor,
) {
    let (rows, isa) = (out.rows(), run.context.isa);
    let GatedDelta { num_key_heads, num_value_heads, .. } = *weights;
    let (key_dim, dim, width) = (weights.key_dim(), weights.value_dim(), weights.v.out_features);
    let keys = num_key_heads * key_dim;
    let [q, k, v, z, b, dt, z_down, dt_down] = &mut scratch.projected;
    let (q, k, v, z) = (q.rows(rows, keys), k.rows(rows, keys), v.rows(rows, width), z.rows(rows, width));
    let (b, dt) = (b.rows(rows, num_value_heads), dt.rows(rows, weights.dt.out_features));
    let (of_q, of_k, of_v, of_b) = ((&weights.q, &mut *q), (&weights.k, &mut *k), (&weights.v, &mut *v), (&weights.b, &mut *b));
    let (of_z, of_dt) = ((&weights.z, &mut *z), (&weights.dt, &mut *dt));
    match &weights.down {
        None => multiply(input, &mut [of_q, of_k, of_v, of_z, of_b, of_dt]),
        Some([z_rows, dt_rows]) => {
            let z_down = z_down.rows(rows, z_rows.out_features);
            let dt_down = dt_down.rows(rows, dt_rows.out_features);
            multiply(input, &mut [of_q, of_k, of_v, (z_rows, &mut *z_down), of_b, (dt_rows, &mut *dt_down)]);
            multiply((&*z_down, None), &mut [of_z]);
            multiply((&*dt_down, None), &mut [of_dt]);
        }
    }
    let [mixed_q, mixed_k, mixed_v] = &mut scratch.mixed;
    let (mixed_q, mixed_k, mixed_v) = (mixed_q.rows(rows, keys), mixed_k.rows(rows, keys), mixed_v.rows(rows, width));
    let mut offset = 0;
    for (conv, x, mixed) in [
        (&weights.convs[0], &*q, &mut *mixed_q),
        (&weights.convs[1], &*k, &mut *mixed_k),
        (&weights.convs[2], &*v, &mut *mixed_v),
    ] {
        run.convolve(conv, offset, x, mixed, Some(Activation::Silu));
        offset += conv.state_len();
    }
    for row in 0..rows {
        for head in 0..num_key_heads {
            let columns = head * key_dim..(head + 1) * key_dim;
            for (mixed, scale) in [(&mut *mixed_q, (key_dim as f32).sqrt().recip()), (&mut *mixed_k, 1.0)] {
                let values = &mut mixed.row_mut(row)[columns.clone()];
                let scale = scale / (sum(values, |x| x * x) + 1e-6).sqrt();
                for value in values {
                    *value *= scale;
                }
            }
        }
    }
    let (mixed_q, mixed_k, mixed_v) = (&*mixed_q, &*mixed_k, &*mixed_v);
    let shared = SharedOut::new(out.as_mut_slice());
    run.for_each(num_value_heads, &|request, head| {
        let first = offset + head * key_dim * dim;
        // SAFETY: each head has a state of its own.
        let state = unsafe { run.state(request, first..first + key_dim * dim) };
        let (key_head, mut change, mut decays) = (weights.key_head(head) * key_dim, vec![0.0; dim], vec![0.0; key_dim]);
        for row in run.rows(request) {
            let [q, k] = [mixed_q, mixed_k].map(|mixed| &mixed.row(row)[key_head..key_head + key_dim]);
            let v = &mixed_v.row(row)[head * dim..(head + 1) * dim];
            let beta = weights.beta_scale / (1.0 + (-b.row(row)[head]).exp());
            if weights.decays_by_row() {
                let own = head * key_dim..(head + 1) * key_dim;
                decay_rows(isa, &dt.row(row)[own.clone()], &weights.dt_bias[own], weights.a[head], &mut decays);
            } else {
                decays.fill((softplus(dt.row(row)[head] + weights.dt_bias[head]) * weights.a[head]).exp());
            }
            // SAFETY: each head has columns of its own.
            let out = unsafe { shared.part(row * width + head * dim, dim) };
            update(isa, state, (&decays, beta), [q, k, v], &mut change, out);
            norm_in_place(isa, &weights.norm, out, &mut change);
        }
    });
    if weights.down.is_some() {
        attention_gate(isa, out.as_mut_slice(), z.as_slice(), GateActivation::Sigmoid);
        return;
    }
    for row in 0..rows {
        let gate = z.row_mut(row);
        gate_row(isa, Activation::Silu, gate, out.row(row));
        out.row_mut(row).copy_from_slice(gate);
    }
}

fn norm_in_place(isa: super::Isa, norm: &Norm, x: &mut [f32], scratch: &mut [f32]) {
    norm_row(isa, norm, x, scratch);
    x.copy_from_slice(scratch);
}

fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

#[inline(always)]
fn add_product_body(weight: &[f32], x: &[f32], out: &mut [f32]) {
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out += x * weight;
    }
}

#[inline(always)]
fn multiply_body(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x *= y;
    }
}

/// `state` is `[state_dim, head_dim]`; b and c are `[state_dim]`.
#[inline(always)]
fn scan_body(state: &mut [f32], decay: f32, step: f32, x: &[f32], [b, c]: [&[f32]; 2], out: &mut [f32]) {
    for ((state, b), c) in state.chunks_exact_mut(x.len()).zip(b).zip(c) {
        let b = step * b;
        for ((state, x), out) in state.iter_mut().zip(x).zip(&mut *out) {
            *state = *state * decay + b * x;
            *out += *state * c;
        }
    }
}

#[inline(always)]
fn decay_rows_body(dt: &[f32], bias: &[f32], a: f32, decays: &mut [f32]) {
    for ((decay, dt), bias) in decays.iter_mut().zip(dt).zip(bias) {
        *decay = elementwise::exp(elementwise::softplus(dt + bias) * a);
    }
}

/// `state` is `[key_dim, value_dim]`, decays are `[key_dim]`; `change` is overwritten.
#[inline(always)]
fn update_body(state: &mut [f32], (decays, beta): (&[f32], f32), [q, k, v]: [&[f32]; 3], change: &mut [f32], out: &mut [f32]) {
    change.fill(0.0);
    for ((state, k), decay) in state.chunks_exact_mut(v.len()).zip(k).zip(decays) {
        for (state, known) in state.iter_mut().zip(&mut *change) {
            *state *= decay;
            *known += *state * k;
        }
    }
    for (change, v) in change.iter_mut().zip(v) {
        *change = beta * (v - *change);
    }
    out.fill(0.0);
    for ((state, k), q) in state.chunks_exact_mut(v.len()).zip(k).zip(q) {
        for ((state, change), out) in state.iter_mut().zip(&*change).zip(&mut *out) {
            *state += k * change;
            *out += *state * q;
        }
    }
}

per_isa!(
    /// `out += x * weight`.
    add_product = add_product_body(weight: &[f32], x: &[f32], out: &mut [f32])
);
per_isa!(
    /// `x *= y`.
    multiply = multiply_body(x: &mut [f32], y: &[f32])
);
per_isa!(
    /// A token of a head of Mamba-2.
    scan = scan_body(state: &mut [f32], decay: f32, step: f32, x: &[f32], bc: [&[f32]; 2], out: &mut [f32])
);
per_isa!(
    /// What each row of a state is multiplied by.
    decay_rows = decay_rows_body(dt: &[f32], bias: &[f32], a: f32, decays: &mut [f32])
);
per_isa!(
    /// A token of a head of the gated delta rule.
    update = update_body(state: &mut [f32], rates: (&[f32], f32), qkv: [&[f32]; 3], change: &mut [f32], out: &mut [f32])
);

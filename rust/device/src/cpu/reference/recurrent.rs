//! Recurrent layers, plainly and in double precision.

use crate::{
    Activation, AdapterRows, Conv, GateActivation, GatedDelta, Linear, Mamba, Mamba2, Recurrent, RecurrentArgs, RecurrentPhases,
    ShortConv, StepMetadata, Tensor, recurrent::gate_group,
};

use super::{ReferenceBackend, activate, norm_part, norm_row, normed, products};

/// What goes into a layer of one request, `[rows, in_features]`, and the adapters of those rows.
#[derive(Clone, Copy)]
struct Input<'a> {
    values: &'a [f32],
    adapters: &'a [AdapterRows],
}

impl Input<'_> {
    fn product(self, linear: &Linear) -> Vec<f32> {
        products(self.values, linear, self.adapters)
    }
}

fn silu(x: f32) -> f32 {
    activate(Activation::Silu, x)
}

pub(super) fn sigmoid(x: f32) -> f64 {
    1.0 / (1.0 + (-f64::from(x)).exp())
}

fn softplus(x: f64) -> f64 {
    if x > 30.0 { x } else { x.exp().ln_1p() }
}

/// What a convolution makes of the next token, which becomes a part of its state.
fn convolve(conv: &Conv, state: &mut [f32], x: &[f32]) -> Vec<f32> {
    let channels = conv.num_channels;
    let past = state.len() / channels;
    let out = (0..channels).map(|c| {
        let own = f64::from(x[c]) * f64::from(conv.weight[past * channels + c]);
        let of_past: f64 = (0..past).map(|i| f64::from(state[i * channels + c]) * f64::from(conv.weight[i * channels + c])).sum();
        (own + of_past + conv.bias.as_ref().map_or(0.0, |bias| f64::from(bias[c]))) as f32
    });
    let out = out.collect();
    if past > 0 {
        state.copy_within(channels.., 0);
        state[(past - 1) * channels..].copy_from_slice(x);
    }
    out
}

/// A layer over one request's rows.
fn rows(weights: &Recurrent, input: Input<'_>, state: &mut [f32], out: &mut [f32]) {
    match weights {
        Recurrent::ShortConv(weights) => short_conv(weights, input, state, out),
        Recurrent::Mamba(weights) => mamba(weights, input, state, out),
        Recurrent::Mamba2(weights) => mamba2(weights, input, state, out),
        Recurrent::GatedDelta(weights) => gated_delta(weights, input, state, out),
    }
}

fn short_conv(ShortConv { b, c, x, conv }: &ShortConv, input: Input<'_>, state: &mut [f32], out: &mut [f32]) {
    let [b, c, x] = [b, c, x].map(|linear| input.product(linear));
    let width = conv.num_channels;
    for (token, out) in out.chunks_exact_mut(width).enumerate() {
        let row = token * width..(token + 1) * width;
        let gated: Vec<_> = b[row.clone()].iter().zip(&x[row.clone()]).map(|(b, x)| b * x).collect();
        let mixed = convolve(conv, state, &gated);
        out.iter_mut().zip(mixed).zip(&c[row]).for_each(|((out, mixed), c)| *out = mixed * c);
    }
}

fn mamba(weights: &Mamba, input: Input<'_>, state: &mut [f32], out: &mut [f32]) {
    let [x, z] = [&weights.x, &weights.z].map(|linear| input.product(linear));
    let (width, state_dim) = (weights.x.out_features, weights.state_dim());
    let (past, states) = state.split_at_mut(weights.conv.state_len());
    let mixed: Vec<f32> = x.chunks_exact(width).flat_map(|x| convolve(&weights.conv, past, x)).map(silu).collect();
    let mixed_input = Input { values: &mixed, ..input };
    let [mut dt, mut b, mut c] = [&weights.dt_down, &weights.b, &weights.c].map(|linear| mixed_input.product(linear));
    for (norm, values) in weights.norms.iter().flatten().zip([&mut dt, &mut b, &mut c]) {
        values.chunks_exact_mut(norm.weight.len()).for_each(|row| norm_row(norm, row));
    }
    let dt = Input { values: &dt, ..input }.product(&weights.dt);
    for (token, out) in out.chunks_exact_mut(width).enumerate() {
        for (channel, out) in out.iter_mut().enumerate() {
            let at = token * width + channel;
            let (x, step) = (f64::from(mixed[at]), softplus(f64::from(dt[at])));
            let mut sum = f64::from(weights.d[channel]) * x;
            for n in 0..state_dim {
                let place = &mut states[n * width + channel];
                let decay = (step * f64::from(weights.a[n * width + channel])).exp();
                *place = (f64::from(*place) * decay + step * x * f64::from(b[token * state_dim + n])) as f32;
                sum += f64::from(*place) * f64::from(c[token * state_dim + n]);
            }
            *out = (sum * f64::from(silu(z[at]))) as f32;
        }
    }
}

fn mamba2(weights: &Mamba2, input: Input<'_>, state: &mut [f32], out: &mut [f32]) {
    let [z, xbc, dt] = [&weights.z, &weights.xbc, &weights.dt].map(|linear| input.product(linear));
    let Mamba2 { num_heads, num_groups, state_dim, scales: [z_scale, dt_scale], .. } = *weights;
    let (dim, width) = (weights.head_dim(), weights.z.out_features);
    let (past, states) = state.split_at_mut(weights.conv.state_len());
    for (token, out) in out.chunks_exact_mut(width).enumerate() {
        let channels = weights.conv.num_channels;
        let mixed: Vec<_> = convolve(&weights.conv, past, &xbc[token * channels..][..channels]).into_iter().map(silu).collect();
        let (x, bc) = mixed.split_at(width);
        let (b, c) = bc.split_at(num_groups * state_dim);
        for head in 0..num_heads {
            let group = head * num_groups / num_heads * state_dim;
            let [least, most] = weights.dt_limits.map(f64::from);
            let step = f64::from(dt[token * num_heads + head]) * f64::from(dt_scale) + f64::from(weights.dt_bias[head]);
            let step = softplus(step).clamp(least, most);
            let decay = (step * f64::from(weights.a[head])).exp();
            for i in 0..dim {
                let value = f64::from(x[head * dim + i]);
                let mut sum = f64::from(weights.d[head]) * value;
                for n in 0..state_dim {
                    let place = &mut states[(head * state_dim + n) * dim + i];
                    *place = (f64::from(*place) * decay + step * value * f64::from(b[group + n])) as f32;
                    sum += f64::from(*place) * f64::from(c[group + n]);
                }
                out[head * dim + i] = sum as f32;
            }
        }
        let gate = |out: &mut [f32]| {
            out.iter_mut().zip(&z[token * width..]).for_each(|(out, z)| *out *= silu(z * z_scale));
        };
        if weights.gates_first {
            gate(out);
        }
        if let Some(norm) = &weights.norm {
            for (group, part) in out.chunks_exact_mut(width / num_groups).enumerate() {
                norm_part(norm, group * width / num_groups, part);
            }
        }
        if !weights.gates_first {
            gate(out);
        }
    }
}

fn gated_delta(weights: &GatedDelta, input: Input<'_>, state: &mut [f32], out: &mut [f32]) {
    let GatedDelta { q, k, v, z, b, dt, convs, num_value_heads, .. } = weights;
    let qkv = [q, k, v].map(|linear| input.product(linear));
    let b = input.product(b);
    let [z, dt] = match &weights.down {
        None => [z, dt].map(|linear| input.product(linear)),
        Some([of_z, of_dt]) => {
            [(of_z, z), (of_dt, dt)].map(|(down, up)| Input { values: &input.product(down), ..input }.product(up))
        }
    };
    let (key_dim, dim, width) = (weights.key_dim(), weights.value_dim(), v.out_features);
    let (mut past, states) = state.split_at_mut(convs.iter().map(Conv::state_len).sum());
    let mut pasts = Vec::new();
    for conv in convs {
        let (own, others) = past.split_at_mut(conv.state_len());
        pasts.push(own);
        past = others;
    }
    for (token, out) in out.chunks_exact_mut(width).enumerate() {
        let mut mixed = Vec::new();
        for ((conv, past), x) in convs.iter().zip(&mut pasts).zip(&qkv) {
            let x = &x[token * conv.num_channels..][..conv.num_channels];
            mixed.push(convolve(conv, past, x).into_iter().map(silu).collect::<Vec<_>>());
        }
        let unit = |x: &[f32], scale: f64| -> Vec<f64> {
            let length = (x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() + 1e-6).sqrt();
            x.iter().map(|x| f64::from(*x) / length * scale).collect()
        };
        for head in 0..*num_value_heads {
            let key_head = weights.key_head(head) * key_dim;
            let query = unit(&mixed[0][key_head..key_head + key_dim], (key_dim as f64).sqrt().recip());
            let key = unit(&mixed[1][key_head..key_head + key_dim], 1.0);
            let scalar = token * num_value_heads + head;
            let beta = f64::from(weights.beta_scale) * sigmoid(b[scalar]);
            let decay = |n: usize| {
                let place = if weights.decays_by_row() { head * key_dim + n } else { head };
                let step = softplus(f64::from(dt[token * weights.dt_bias.len() + place]) + f64::from(weights.dt_bias[place]));
                (step * f64::from(weights.a[head])).exp()
            };
            let decays: Vec<f64> = (0..key_dim).map(decay).collect();
            for i in 0..dim {
                let column = |n: usize| (head * key_dim + n) * dim + i;
                (0..key_dim).for_each(|n| states[column(n)] = (f64::from(states[column(n)]) * decays[n]) as f32);
                let known: f64 = key.iter().enumerate().map(|(n, k)| k * f64::from(states[column(n)])).sum();
                let change = beta * (f64::from(mixed[2][head * dim + i]) - known);
                for (n, k) in key.iter().enumerate() {
                    states[column(n)] = (f64::from(states[column(n)]) + k * change) as f32;
                }
                out[head * dim + i] = query.iter().enumerate().map(|(n, q)| q * f64::from(states[column(n)])).sum::<f64>() as f32;
            }
            let part = &mut out[head * dim..(head + 1) * dim];
            norm_row(&weights.norm, part);
            for (out, z) in part.iter_mut().zip(&z[token * width + head * dim..]) {
                *out *= if weights.down.is_some() { sigmoid(*z) as f32 } else { silu(*z) };
            }
        }
    }
}

impl RecurrentPhases for ReferenceBackend {
    fn recurrent(&self, args: RecurrentArgs<'_>, step: &StepMetadata) {
        let RecurrentArgs { hidden, norm, weights, states, layer, out } = args;
        let (input, cols, width) = (normed(hidden, norm), hidden.cols(), weights.width());
        out.set_rows(hidden.rows());
        let mut values = states.values();
        for (request, slot) in step.state_slots.iter().enumerate() {
            let range = step.query_start_loc[request] as usize..step.query_start_loc[request + 1] as usize;
            let state = &mut values.as_mut_slice()[states.range(*slot as usize, layer)];
            if step.positions[range.start] == 0 {
                state.fill(0.0);
            }
            let out = &mut out.as_mut_slice()[range.start * width..range.end * width];
            let adapters = AdapterRows::of_chosen(&step.adapters, &(range.start as u32..range.end as u32));
            let input = Input { values: &input[range.start * cols..range.end * cols], adapters: &adapters };
            rows(weights, input, state, out);
        }
    }

    fn gate(&self, x: &mut Tensor, gate: &Tensor, activation: GateActivation) {
        let group = gate_group(x, gate);
        for (head, gate) in x.as_mut_slice().chunks_exact_mut(group).zip(gate.as_slice()) {
            let by = match activation {
                GateActivation::Sigmoid => sigmoid(*gate),
                GateActivation::Softplus => softplus(f64::from(*gate)),
            };
            for x in head {
                *x = (f64::from(*x) * by) as f32;
            }
        }
    }
}

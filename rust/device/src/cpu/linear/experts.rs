//! Mixtures of experts: rows are sorted by expert, and each expert that is touched runs over its rows as a network of its own.
//! So its weights are read once a step, and a row has the bits that it has alone.

use super::{
    buffer::Buffer,
    elementwise::{add_scaled, norm_row},
    gate_up, norm_linear,
    out::SharedOut,
    phases::{LinearContext, LinearScratch},
};
use crate::{
    AdapterRows, Expert, ExpertActivation, ExpertArgs, Experts, GateUpArgs, Linear, Projection, SharedExpert, Tensor,
    WorkspaceShape,
};

/// Buffers of the phase; they grow to the largest step seen and are then reused.
#[derive(Default)]
pub struct ExpertScratch {
    /// Normalised rows, `[rows, hidden_size]`.
    normed: Buffer,
    /// `[rows, num_experts]`.
    logits: Buffer,
    /// Weights of the shared expert, `[rows, 1]`.
    shared: Buffer,
    /// The rows of one expert, `[rows, hidden_size]`.
    input: Buffer,
    /// `[rows, intermediate_size]`.
    hidden: Buffer,
    /// The same of up, where gate and up are multiplied apart.
    up: Buffer,
    /// `[rows, hidden_size]`.
    output: Buffer,
    /// `[rows, hidden_size]`.
    sum: Buffer,
    /// Expert, row and weight, in order of expert, then of row.
    slots: Vec<(usize, usize, f32)>,
}

/// Bytes of [`ExpertScratch`] once it has grown to its largest.
pub fn workspace_bytes(shape: &WorkspaceShape) -> u64 {
    if shape.num_experts == 0 {
        return 0;
    }
    let WorkspaceShape { num_tokens, hidden_size, intermediate_size, num_experts, .. } = *shape;
    (num_tokens * (4 * hidden_size + intermediate_size + num_experts) * size_of::<f32>()) as u64
}

/// [`ExpertPhases::experts`](crate::ExpertPhases::experts).
///
/// # Panics
/// When sizes disagree.
pub fn experts(context: LinearContext<'_>, linear: &mut LinearScratch, scratch: &mut ExpertScratch, args: ExpertArgs<'_>) {
    let context = context.checked();
    let ExpertArgs { hidden, norm, experts, post_norm, scale } = args;
    let (rows, cols) = (hidden.rows(), hidden.cols());
    let ExpertScratch { normed, logits, shared, input, hidden: inner, up, output, sum, slots } = scratch;
    let normed = normed.rows(rows, cols);
    write_rows(context, normed, &|row, out| match norm {
        Some(norm) => norm_row(context.isa, norm, hidden.row(row), out),
        None => out.copy_from_slice(hidden.row(row)),
    });
    let normed = &*normed;
    let product = |linear_scratch: &mut LinearScratch, x: &Tensor, linear: &Linear, out: &mut Tensor| {
        norm_linear(context, linear_scratch, x, None, &mut [Projection { linear, out }]);
    };
    let logits = logits.rows(rows, experts.experts.len());
    product(linear, normed, &experts.router, logits);
    route(context, experts, logits, slots);
    let sum = sum.rows(rows, cols);
    sum.as_mut_slice().fill(0.0);

    let mut network =
        |context: LinearContext<'_>, scratch: &mut LinearScratch, expert: &Expert, x: &Tensor, output: &mut Tensor| {
            let width = expert.up.out_features;
            let out = inner.rows(x.rows(), width);
            match experts.activation {
                ExpertActivation::Gated(activation) => {
                    let args = GateUpArgs { x, norm: None, gate: Some(&expert.gate), up: &expert.up, activation, out };
                    gate_up(context, scratch, args);
                }
                ExpertActivation::Clamped { alpha, limit } => {
                    let up = up.rows(x.rows(), width);
                    let mut projections = [(&expert.gate, &mut *out), (&expert.up, &mut *up)];
                    let mut projections = projections.each_mut().map(|(linear, out)| Projection { linear, out });
                    norm_linear(context, scratch, x, None, &mut projections);
                    ExpertActivation::clamp(alpha, limit, out.as_mut_slice(), up.as_slice());
                }
            }
            norm_linear(context, scratch, out, None, &mut [Projection { linear: &expert.down, out: output }]);
        };
    for slots in slots.chunk_by(|a, b| a.0 == b.0) {
        let input = input.rows(slots.len(), cols);
        write_rows(context, input, &|place, x| {
            let (_, row, weight) = slots[place];
            x.copy_from_slice(normed.row(row));
            if experts.scales_input {
                for x in x {
                    *x *= weight;
                }
            }
        });
        let output = output.rows(slots.len(), cols);
        let adapters = AdapterRows::of_chosen(context.adapters, &slots.iter().map(|(_, row, _)| *row as u32));
        network(LinearContext { adapters: &adapters, ..context }, linear, &experts.experts[slots[0].0], input, output);
        let (output, shared_sum) = (&*output, SharedOut::new(sum.as_mut_slice()));
        context.for_rows((slots.len(), cols), 1, &|range| {
            for place in range {
                let (_, row, weight) = slots[place];
                let weight = if experts.scales_input { 1.0 } else { weight };
                // SAFETY: an expert has each row once, and each of its rows belongs to one thread.
                let sum = unsafe { shared_sum.part(row * cols, cols) };
                add_scaled(context.isa, output.row(place), weight, sum);
            }
        });
    }
    if let Some(SharedExpert { expert, weight }) = &experts.shared {
        let output = output.rows(rows, cols);
        network(context, linear, expert, normed, output);
        let weights = weight.as_ref().map(|weight| {
            let shared = shared.rows(rows, 1);
            product(linear, normed, weight, shared);
            &*shared
        });
        for row in 0..rows {
            let weight = weights.map_or(1.0, |weights| 1.0 / (1.0 + (-weights.row(row)[0]).exp()));
            add_scaled(context.isa, output.row(row), weight, sum.row_mut(row));
        }
    }
    let output = output.rows(rows, cols);
    if let Some(norm) = post_norm {
        write_rows(context, output, &|row, out| norm_row(context.isa, norm, sum.row(row), out));
    }
    let values = if post_norm.is_some() { &*output } else { &*sum };
    write_rows(context, hidden, &|row, hidden| add_scaled(context.isa, values.row(row), scale, hidden));
}

/// Calls `body(row, out)` for all rows of a tensor, on all threads where there are many values.
fn write_rows(context: LinearContext<'_>, out: &mut Tensor, body: &(dyn Fn(usize, &mut [f32]) + Sync)) {
    let (rows, cols) = (out.rows(), out.cols());
    let out = SharedOut::new(out.as_mut_slice());
    context.for_rows((rows, cols), 1, &|range| {
        for row in range {
            // SAFETY: each row belongs to one thread.
            body(row, unsafe { out.part(row * cols, cols) });
        }
    });
}

/// Chooses the experts of every row. A row whose logits mean nothing goes to some experts all the same.
fn route(context: LinearContext<'_>, experts: &Experts, logits: &Tensor, slots: &mut Vec<(usize, usize, f32)>) {
    let correction = experts.correction.as_ref().map(|values| &values[..]);
    let num_chosen = experts.rule.num_chosen;
    slots.clear();
    slots.resize(logits.rows() * num_chosen, (0, 0, 0.0));
    let shared = SharedOut::new(slots);
    context.for_rows((logits.rows(), logits.cols() * num_chosen), 1, &|range| {
        let mut chosen = vec![(0, 0.0); num_chosen];
        for row in range {
            experts.rule.choose(logits.row(row), correction, &mut chosen);
            // SAFETY: each row belongs to one thread.
            let slots = unsafe { shared.part(row * num_chosen, num_chosen) };
            slots.iter_mut().zip(&chosen).for_each(|(slot, (expert, weight))| *slot = (*expert, row, *weight));
        }
    });
    // Stable: the rows of an expert stay in order.
    slots.sort_by_key(|(expert, ..)| *expert);
}

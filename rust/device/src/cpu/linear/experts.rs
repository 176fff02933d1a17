//! Mixtures of experts: rows are sorted by expert, and each expert that is touched runs over its rows as a network of its own.
//! So its weights are read once a step, and a row has the bits that it has alone.

use super::{
    buffer::Buffer,
    elementwise::{add_scaled, norm_row},
    gate_up, norm_linear,
    phases::{LinearContext, LinearScratch},
};
use crate::{
    Expert, ExpertActivation, ExpertArgs, Experts, GateUpArgs, Linear, Projection, SharedExpert, Tensor, WorkspaceShape,
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
    for row in 0..rows {
        match norm {
            Some(norm) => norm_row(context.isa, norm, hidden.row(row), normed.row_mut(row)),
            None => normed.row_mut(row).copy_from_slice(hidden.row(row)),
        }
    }
    let normed = &*normed;
    let product = |linear_scratch: &mut LinearScratch, x: &Tensor, linear: &Linear, out: &mut Tensor| {
        norm_linear(context, linear_scratch, x, None, &mut [Projection { linear, out }]);
    };
    let logits = logits.rows(rows, experts.experts.len());
    product(linear, normed, &experts.router, logits);
    route(experts, logits, slots);
    let sum = sum.rows(rows, cols);
    sum.as_mut_slice().fill(0.0);

    let mut network = |linear_scratch: &mut LinearScratch, expert: &Expert, x: &Tensor, output: &mut Tensor| {
        let width = expert.up.out_features;
        let out = inner.rows(x.rows(), width);
        match experts.activation {
            ExpertActivation::Gated(activation) => {
                let args = GateUpArgs { x, norm: None, gate: Some(&expert.gate), up: &expert.up, activation, out };
                gate_up(context, linear_scratch, args);
            }
            ExpertActivation::Clamped { alpha, limit } => {
                let up = up.rows(x.rows(), width);
                let mut projections = [(&expert.gate, &mut *out), (&expert.up, &mut *up)];
                let mut projections = projections.each_mut().map(|(linear, out)| Projection { linear, out });
                norm_linear(context, linear_scratch, x, None, &mut projections);
                ExpertActivation::clamp(alpha, limit, out.as_mut_slice(), up.as_slice());
            }
        }
        product(linear_scratch, out, &expert.down, output);
    };
    for slots in slots.chunk_by(|a, b| a.0 == b.0) {
        let input = input.rows(slots.len(), cols);
        for (place, (_, row, weight)) in slots.iter().enumerate() {
            let x = input.row_mut(place);
            x.copy_from_slice(normed.row(*row));
            if experts.scales_input {
                for x in x {
                    *x *= weight;
                }
            }
        }
        let output = output.rows(slots.len(), cols);
        network(linear, &experts.experts[slots[0].0], input, output);
        for (place, (_, row, weight)) in slots.iter().enumerate() {
            let weight = if experts.scales_input { 1.0 } else { *weight };
            add_scaled(context.isa, output.row(place), weight, sum.row_mut(*row));
        }
    }
    if let Some(SharedExpert { expert, weight }) = &experts.shared {
        let output = output.rows(rows, cols);
        network(linear, expert, normed, output);
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
    for row in 0..rows {
        let mut values = sum.row(row);
        if let Some(norm) = post_norm {
            norm_row(context.isa, norm, values, output.row_mut(row));
            values = output.row(row);
        }
        add_scaled(context.isa, values, scale, hidden.row_mut(row));
    }
}

/// Chooses the experts of every row. A row whose logits mean nothing goes to some experts all the same.
fn route(experts: &Experts, logits: &Tensor, slots: &mut Vec<(usize, usize, f32)>) {
    let correction = experts.correction.as_ref().map(|values| &values[..]);
    let mut chosen = vec![(0, 0.0); experts.rule.num_chosen];
    slots.clear();
    for row in 0..logits.rows() {
        experts.rule.choose(logits.row(row), correction, &mut chosen);
        slots.extend(chosen.iter().map(|(expert, weight)| (*expert, row, *weight)));
    }
    // Stable: the rows of an expert stay in order.
    slots.sort_by_key(|(expert, ..)| *expert);
}

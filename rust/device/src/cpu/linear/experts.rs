//! Mixtures of experts: rows are sorted by expert, and each expert that is touched runs over its rows as a network of its own,
//! all of them in the same phases ([`grouped`]). So its weights are read once a step, and a row has the bits that it has alone.

use super::{
    CpuLinear,
    buffer::Buffer,
    elementwise::{add_scaled, norm_row},
    gate_up,
    grouped::{self, Group},
    norm_linear,
    out::SharedOut,
    phases::{LinearContext, LinearScratch},
};
use crate::{
    AdapterRows, Expert, ExpertActivation, ExpertArgs, Experts, GateUpArgs, LatentSpace, Linear, Norm, Projection, SharedExpert,
    Tensor, WorkspaceShape,
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
    /// The rows of some experts, `[slots, hidden_size]`.
    input: Buffer,
    /// `[slots, intermediate_size]`.
    hidden: Buffer,
    /// The same of up, where gate and up are multiplied apart.
    up: Buffer,
    /// `[slots, hidden_size]`.
    output: Buffer,
    /// `[rows, hidden_size]`.
    sum: Buffer,
    /// Of experts that work in a space of their own, `[rows, latent_size]`: what they are given, their sum; and `output`.
    latent: [Buffer; 3],
    slots: Vec<Slot>,
    /// Rows of some slots and the slots' places, in this order.
    by_row: Vec<(usize, usize)>,
}

/// A row of an expert. They are in order of expert, then of row.
#[derive(Clone, Copy, Default)]
struct Slot {
    expert: usize,
    row: usize,
    weight: f32,
}

/// Rows of several experts that are computed together at most; more of them are too large for caches.
const GROUPED_ROWS: usize = 256;

/// Rows of several experts together in the largest step; none without experts.
pub(super) fn grouped_rows(shape: &WorkspaceShape) -> usize {
    GROUPED_ROWS.min(shape.num_tokens * shape.num_experts)
}

/// Bytes of [`ExpertScratch`] once it has grown to its largest.
pub fn workspace_bytes(shape: &WorkspaceShape) -> u64 {
    if shape.num_experts == 0 {
        return 0;
    }
    let WorkspaceShape { num_tokens, hidden_size, intermediate_size, num_experts, expert_latent_size, .. } = *shape;
    // Rows of several experts in what goes into them, what is within, and what comes out.
    let num_slots = num_tokens.max(grouped_rows(shape));
    let floats = num_slots * (2 * hidden_size + intermediate_size + expert_latent_size)
        + num_tokens * (2 * (hidden_size + expert_latent_size) + num_experts);
    (floats * size_of::<f32>()) as u64
}

/// [`ExpertPhases::experts`](crate::ExpertPhases::experts).
///
/// # Panics
/// When sizes disagree.
pub fn experts(context: LinearContext<'_>, linear: &mut LinearScratch, scratch: &mut ExpertScratch, args: ExpertArgs<'_>) {
    let context = context.checked();
    let ExpertArgs { hidden, norm, experts, post_norm, scale } = args;
    let (rows, cols) = (hidden.rows(), hidden.cols());
    let ExpertScratch { normed, logits, shared, input, hidden: inner, up, output, sum, latent, slots, by_row } = scratch;
    let normed = normed.rows(rows, cols);
    norm_rows(context, norm, hidden, normed);
    let normed = &*normed;
    let product = |linear_scratch: &mut LinearScratch, x: &Tensor, linear: &Linear, out: &mut Tensor| {
        norm_linear(context, linear_scratch, x, None, &mut [Projection { linear, out }]);
    };
    let logits = logits.rows(rows, experts.experts.len());
    let norms = experts.norms.as_ref();
    let for_router = norms.map(|norms| own_input(context, &norms.router, hidden, input));
    product(linear, for_router.unwrap_or(normed), &experts.router, logits);
    route(context, experts, logits, slots);
    let sum = sum.rows(rows, cols);
    let [within, sum_within, output_within] = latent;
    let (x, given) = match &experts.latent {
        Some(LatentSpace { down, .. }) => {
            let within = within.rows(rows, down.out_features);
            product(linear, normed, down, within);
            (&*within, sum_within.rows(rows, down.out_features))
        }
        None => (normed, &mut *sum),
    };
    given.as_mut_slice().fill(0.0);

    let mut rest = &slots[..];
    while !rest.is_empty() {
        let groups = next_groups(rest, experts, context.adapters);
        let (slots, behind) = rest.split_at(groups.last().map_or(rest.len(), |group| group.rows.end));
        rest = behind;
        let input = input.rows(slots.len(), x.cols());
        write_rows(context, input, &|place, own| {
            let Slot { row, weight, .. } = slots[place];
            own.copy_from_slice(x.row(row));
            if experts.scales_input {
                for x in own {
                    *x *= weight;
                }
            }
        });
        let output = if experts.latent.is_some() { &mut *output_within } else { &mut *output };
        let output = output.rows(slots.len(), x.cols());
        if let [Group { expert, .. }] = groups[..] {
            let adapters = AdapterRows::of_chosen(context.adapters, &slots.iter().map(|slot| slot.row as u32));
            let context = LinearContext { adapters: &adapters, ..context };
            network(context, linear, (expert, experts.activation), input, (inner, up), output);
        } else {
            let inner = inner.rows(slots.len(), experts.experts[0].up.out_features);
            grouped::gate_up(context, linear, &groups, input, experts.activation, inner);
            grouped::down(context, linear, &groups, inner, output);
        }
        add_slots(context, (slots, by_row), experts.scales_input, output, given);
    }
    if let Some(LatentSpace { up, .. }) = &experts.latent {
        product(linear, sum_within.rows(rows, up.in_features), up, sum);
    }
    if let Some(norms) = norms {
        normalize(context, &norms.sum, sum, output);
    }
    if let Some(SharedExpert { expert, weight }) = &experts.shared {
        let own = norms.map(|norms| own_input(context, &norms.shared, hidden, input));
        let output = output.rows(rows, cols);
        let x = own.unwrap_or(normed);
        network(context, linear, (expert, experts.activation), x, (inner, up), output);
        let weights = weight.as_ref().map(|weight| {
            let shared = shared.rows(rows, 1);
            product(linear, x, weight, shared);
            &*shared
        });
        if let Some(norms) = norms {
            normalize(context, &norms.shared_sum, output, input);
        }
        let output = &*output;
        write_rows(context, sum, &|row, sum| {
            let weight = weights.map_or(1.0, |weights| 1.0 / (1.0 + (-weights.row(row)[0]).exp()));
            add_scaled(context.isa, output.row(row), weight, sum);
        });
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

/// `out = norm(x)`, or x itself.
fn norm_rows(context: LinearContext<'_>, norm: Option<&Norm>, x: &Tensor, out: &mut Tensor) {
    write_rows(context, out, &|row, out| match norm {
        Some(norm) => norm_row(context.isa, norm, x.row(row), out),
        None => out.copy_from_slice(x.row(row)),
    });
}

/// What goes into a part that has a norm of its own, in a buffer that is free before the experts and behind them.
fn own_input<'a>(context: LinearContext<'_>, norm: &Norm, hidden: &Tensor, buffer: &'a mut Buffer) -> &'a Tensor {
    let out = buffer.rows(hidden.rows(), hidden.cols());
    norm_rows(context, Some(norm), hidden, out);
    out
}

/// Normalises the rows of `x`, by way of a buffer.
fn normalize(context: LinearContext<'_>, norm: &Norm, x: &mut Tensor, buffer: &mut Buffer) {
    let normed = own_input(context, norm, x, buffer);
    write_rows(context, x, &|row, x| x.copy_from_slice(normed.row(row)));
}

/// Of one expert `output = down(activation(gate(x), up(x)))`.
fn network(
    context: LinearContext<'_>,
    scratch: &mut LinearScratch,
    (expert, activation): (&Expert, ExpertActivation),
    x: &Tensor,
    (inner, up): (&mut Buffer, &mut Buffer),
    output: &mut Tensor,
) {
    let width = expert.up.out_features;
    let out = inner.rows(x.rows(), width);
    match activation {
        ExpertActivation::Gated(activation) | ExpertActivation::Plain(activation) => {
            let gate = expert.gate.as_ref();
            gate_up(context, scratch, GateUpArgs { x, norm: None, gate, up: &expert.up, activation, out, next: None });
        }
        ExpertActivation::Clamped { alpha, limit } => {
            let up = up.rows(x.rows(), width);
            let outputs = expert.gate.iter().zip([&mut *out]).chain([(&expert.up, &mut *up)]);
            let mut projections: Vec<_> = outputs.map(|(linear, out)| Projection { linear, out }).collect();
            norm_linear(context, scratch, x, None, &mut projections);
            ExpertActivation::clamp(alpha, limit, out.as_mut_slice(), up.as_slice());
        }
    }
    norm_linear(context, scratch, out, None, &mut [Projection { linear: &expert.down, out: output }]);
}

/// The first experts of `slots` and their rows: as many as have up to [`GROUPED_ROWS`] together; one that adapters change, or
/// that AMX computes, alone.
fn next_groups<'a>(slots: &[Slot], experts: &'a Experts, adapters: &[AdapterRows]) -> Vec<Group<'a>> {
    let (mut groups, mut start) = (Vec::new(), 0);
    for slots in slots.chunk_by(|a, b| a.expert == b.expert) {
        let expert = &experts.experts[slots[0].expert];
        let rows = start..start + slots.len();
        let is_alone = AdapterRows::touch(adapters, expert.linears())
            || expert.linears().any(|linear| linear.weight::<CpuLinear>().is_for_tiles(slots.len()));
        if !groups.is_empty() && (is_alone || rows.end > GROUPED_ROWS) {
            break;
        }
        start = rows.end;
        groups.push(Group { expert, rows });
        if is_alone {
            break;
        }
    }
    groups
}

/// Adds what the experts of slots make of their rows, in order of expert.
fn add_slots(
    context: LinearContext<'_>,
    (slots, by_row): (&[Slot], &mut Vec<(usize, usize)>),
    is_weighted: bool,
    output: &Tensor,
    sum: &mut Tensor,
) {
    by_row.clear();
    by_row.extend(slots.iter().enumerate().map(|(place, slot)| (slot.row, place)));
    by_row.sort_unstable();
    let (rows, cols, by_row) = (sum.rows(), sum.cols(), &**by_row);
    let sum = SharedOut::new(sum.as_mut_slice());
    context.for_rows((rows, cols), 1, &|range| {
        let first = by_row.partition_point(|(row, _)| *row < range.start);
        for (row, place) in by_row[first..].iter().take_while(|(row, _)| *row < range.end) {
            let weight = if is_weighted { 1.0 } else { slots[*place].weight };
            // SAFETY: each row belongs to one thread.
            add_scaled(context.isa, output.row(*place), weight, unsafe { sum.part(row * cols, cols) });
        }
    });
}

/// Chooses the experts of every row. A row whose logits mean nothing goes to some experts all the same.
fn route(context: LinearContext<'_>, experts: &Experts, logits: &Tensor, slots: &mut Vec<Slot>) {
    let correction = experts.correction.as_ref().map(|values| &values[..]);
    let num_chosen = experts.rule.num_chosen;
    slots.clear();
    slots.resize(logits.rows() * num_chosen, Slot::default());
    let shared = SharedOut::new(slots);
    context.for_rows((logits.rows(), logits.cols() * num_chosen), 1, &|range| {
        let mut chosen = vec![(0, 0.0); num_chosen];
        for row in range {
            experts.rule.choose(logits.row(row), correction, &mut chosen);
            if let Some(scales) = &experts.scales {
                for (expert, weight) in &mut chosen {
                    *weight *= scales[*expert];
                }
            }
            // SAFETY: each row belongs to one thread.
            let slots = unsafe { shared.part(row * num_chosen, num_chosen) };
            for (slot, &(expert, weight)) in slots.iter_mut().zip(&chosen) {
                *slot = Slot { expert, row, weight };
            }
        }
    });
    // Stable: the rows of an expert stay in order.
    slots.sort_by_key(|slot| slot.expert);
}

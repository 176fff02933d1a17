//! What adapters add to the products of a phase. Each thread takes some rows of one adapter through both of its factors, so there
//! is one barrier a phase; a row's sums run in one order, whatever runs beside it.

use super::{
    PANEL, ROWS,
    buffer::Buffer,
    elementwise::{add_scaled, norm_row},
    float::float_rows,
    norm_linear,
    out::SharedOut,
    phases::{LinearContext, LinearScratch, grown},
};
use crate::{AdapterRows, LinearDelta, LowRank, Norm, Projection, ResidualArgs, Tensor, WeightView, cpu::Isa};

/// Buffers for rows with adapters; they grow to the largest step seen and are then reused.
#[derive(Default)]
pub(super) struct LoraScratch {
    /// Normalised rows, `[rows, cols]`.
    normed: Vec<f32>,
    /// Rows that another weight multiplies, and what that gives.
    replaced: [Buffer; 2],
    /// A product before it is added to the residual stream, `[rows, out_features]`.
    wide: Buffer,
    /// The same, normalised.
    wide_normed: Buffer,
    /// Products of `up` before they are gated, `[rows, intermediate_size]`.
    pub up: Buffer,
}

/// Rows of one adapter that a thread takes at once.
struct Item<'a> {
    rows: &'a [u32],
    of: &'a AdapterRows,
}

/// An output that is changed.
struct Target<'a> {
    linear: &'a crate::Linear,
    out: SharedOut<'a, f32>,
}

/// Changes the outputs of [`norm_linear`] for the rows whose adapters do something to their weights.
pub(super) fn adapt(
    context: LinearContext<'_>,
    scratch: &mut LinearScratch,
    x: &Tensor,
    norm: Option<&Norm>,
    projections: &mut [Projection<'_>],
) {
    if !AdapterRows::touch(context.adapters, projections.iter().map(|p| p.linear)) {
        return;
    }
    replace(context, scratch, x, norm, projections);
    let items: Vec<_> = context.adapters.iter().flat_map(|of| of.rows.chunks(ROWS).map(move |rows| Item { rows, of })).collect();
    let targets: Vec<_> =
        projections.iter_mut().map(|p| Target { linear: p.linear, out: SharedOut::new(p.out.as_mut_slice()) }).collect();
    let (isa, cols) = (context.isa, x.cols());
    let normed = SharedOut::new(grown(&mut scratch.lora.normed, items.len() * ROWS * cols, 0.0));
    context.pool.for_each_range(items.len(), 1, &|start, end| {
        for (number, item) in (start..end).zip(&items[start..end]) {
            // SAFETY: each item has rows of its own.
            let input = unsafe { normed.part(number * ROWS * cols, item.rows.len() * cols) };
            for (&row, out) in item.rows.iter().zip(input.chunks_exact_mut(cols)) {
                match norm {
                    Some(norm) => norm_row(isa, norm, x.row(row as usize), out),
                    None => out.copy_from_slice(x.row(row as usize)),
                }
            }
            for Target { linear, out } in &targets {
                let Some(delta) = item.of.adapter.delta(linear) else { continue };
                let rows = item.rows.iter().map(|row| {
                    // SAFETY: no two adapters have a row in common, and an adapter has each row in one item.
                    unsafe { out.part(*row as usize * linear.out_features, linear.out_features) }
                });
                match delta {
                    LinearDelta::LowRank(low_rank) => add_low_rank(isa, low_rank, input, rows),
                    LinearDelta::Rows { ids, rows: weight } => replace_columns(isa, ids, weight, input, rows),
                    LinearDelta::Replaced(_) => {}
                }
            }
        }
    });
}

/// Products of up to four rows with all rows of a weight of floats: a tile has those of 32.
fn products(isa: Isa, weight: &WeightView, input: &[f32]) -> Vec<[[f32; PANEL]; ROWS]> {
    let mut tiles = vec![[[0.0; PANEL]; ROWS]; weight.rows.div_ceil(PANEL)];
    for (panel, tile) in tiles.iter_mut().enumerate() {
        let rows = panel * PANEL..weight.rows.min((panel + 1) * PANEL);
        float_rows(weight, rows.start, rows.end, &mut []).multiply(isa, input, &mut tile[..input.len() / weight.cols]);
    }
    tiles
}

/// `outs += (input @ a^T) @ b`, for up to four rows.
fn add_low_rank<'a>(isa: Isa, low_rank: &LowRank, input: &[f32], outs: impl Iterator<Item = &'a mut [f32]>) {
    let lows = products(isa, low_rank.a(), input);
    for (m, out) in outs.enumerate() {
        if let Some(magnitude) = &low_rank.magnitude {
            match &magnitude.bias {
                Some(bias) => {
                    for ((out, factor), bias) in out.iter_mut().zip(&magnitude.factors).zip(bias) {
                        *out = (*out - bias) * factor + bias;
                    }
                }
                None => out.iter_mut().zip(&magnitude.factors).for_each(|(out, factor)| *out *= factor),
            }
        }
        for k in 0..low_rank.rank() {
            add_scaled(isa, low_rank.b_row(k), lows[k / PANEL][m][k % PANEL], out);
        }
        if let Some(bias) = &low_rank.bias {
            add_scaled(isa, bias, 1.0, out);
        }
    }
}

/// Columns `ids` of the outputs become products with the rows of `weight`.
fn replace_columns<'a>(isa: Isa, ids: &[u32], weight: &WeightView, input: &[f32], outs: impl Iterator<Item = &'a mut [f32]>) {
    let products = products(isa, weight, input);
    for (m, out) in outs.enumerate() {
        for (i, id) in ids.iter().enumerate() {
            out[*id as usize] = products[i / PANEL][m][i % PANEL];
        }
    }
}

/// Outputs of rows whose adapters have another weight.
fn replace(
    context: LinearContext<'_>,
    scratch: &mut LinearScratch,
    x: &Tensor,
    norm: Option<&Norm>,
    projections: &mut [Projection<'_>],
) {
    let plain = LinearContext { adapters: &[], ..context };
    for AdapterRows { adapter, rows } in context.adapters {
        for Projection { linear, out } in &mut *projections {
            let Some(LinearDelta::Replaced(other)) = adapter.delta(linear) else { continue };
            let [mut input, mut output] = std::mem::take(&mut scratch.lora.replaced);
            let (gathered, product) = (input.rows(rows.len(), x.cols()), output.rows(rows.len(), other.out_features));
            for (i, row) in rows.iter().enumerate() {
                gathered.row_mut(i).copy_from_slice(x.row(*row as usize));
            }
            norm_linear(plain, scratch, gathered, norm, &mut [Projection { linear: other, out: &mut *product }]);
            for (i, row) in rows.iter().enumerate() {
                out.row_mut(*row as usize).copy_from_slice(product.row(i));
            }
            scratch.lora.replaced = [input, output];
        }
    }
}

/// [`linear_residual`](super::linear_residual) where adapters do something to the weight: the product stands by itself first.
pub(super) fn adapted_residual(context: LinearContext<'_>, scratch: &mut LinearScratch, args: ResidualArgs<'_>) {
    let ResidualArgs { x, linear, post_norm, scale, residual } = args;
    let (rows, cols) = (x.rows(), linear.out_features);
    let mut wide = std::mem::take(&mut scratch.lora.wide);
    let mut wide_normed = std::mem::take(&mut scratch.lora.wide_normed);
    let product = wide.rows(rows, cols);
    norm_linear(context, scratch, x, None, &mut [Projection { linear, out: &mut *product }]);
    let normed = SharedOut::new(wide_normed.rows(if post_norm.is_some() { rows } else { 0 }, cols).as_mut_slice());
    let product = &*product;
    let residual = SharedOut::new(residual.as_mut_slice());
    context.for_rows((rows, cols), 1, &|range| {
        for row in range {
            let mut values = product.row(row);
            if let Some(norm) = post_norm {
                // SAFETY: each row belongs to one thread.
                let out = unsafe { normed.part(row * cols, cols) };
                norm_row(context.isa, norm, values, out);
                values = out;
            }
            // SAFETY: as above.
            add_scaled(context.isa, values, scale, unsafe { residual.part(row * cols, cols) });
        }
    });
    (scratch.lora.wide, scratch.lora.wide_normed) = (wide, wide_normed);
}

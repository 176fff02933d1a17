//! The phase of logits where only the largest count.

use super::{
    CpuLinear, Input, PANEL, Weight,
    activations::ActBlock,
    elementwise::per_tier,
    lm_head::{LmHead, UNIT, shift},
    norm_linear,
    out::SharedOut,
    panels::Work,
    phases::{Form, LinearContext, LinearScratch, assert_in, assert_out, grown, store},
};
use crate::{Linear, Norm, Projection, Tensor};

/// A logit that is not among the largest; finite, as logits are.
const LOW: f32 = f32::MIN;
/// A row whose largest logit may be in more than one of so many panels costs more than computing all, ...
const MAX_SHARE: usize = 3;
/// ... as the next ones may: for so many all are computed.
const PAUSE: usize = 4;

/// Buffers of [`largest_logits`].
#[derive(Default)]
pub(super) struct Search {
    /// As [`shift`] makes them.
    acts: Vec<ActBlock>,
    /// Of each panel.
    bounds: Vec<Bounds>,
    /// Panels that may hold the largest product.
    candidates: Vec<usize>,
    /// Rows to come that are not searched.
    pause: usize,
}

/// Between what the largest of a row's products by a panel is.
#[derive(Clone, Copy)]
pub(super) struct Bounds {
    low: f32,
    high: f32,
}

impl Bounds {
    const NONE: Self = Self { low: LOW, high: LOW };
}

/// [`Backend::largest_logits`](crate::Backend::largest_logits): `out = norm(x) @ weight^T + bias` where the largest values of a row are, and
/// lower values elsewhere; sets out's rows. More rows than one have theirs in so many places that all is computed.
///
/// # Panics
/// When sizes disagree.
pub fn largest_logits(
    context: LinearContext<'_>,
    scratch: &mut LinearScratch,
    x: &Tensor,
    norm: Option<&Norm>,
    linear: &Linear,
    out: &mut Tensor,
) {
    let weight = linear.cpu();
    let found = match &weight.weight {
        Weight::LmHead(head) if x.rows() == 1 && weight.bias.is_none() => {
            search(context.checked(), scratch, x, norm, (weight, head), out)
        }
        _ => false,
    };
    if !found {
        norm_linear(context, scratch, x, norm, &mut [Projection { linear, out }]);
    }
}

/// False, and nothing found, where the row is not finite or in a pause.
fn search(
    context: LinearContext<'_>,
    scratch: &mut LinearScratch,
    x: &Tensor,
    norm: Option<&Norm>,
    (weight, head): (&CpuLinear, &LmHead),
    out: &mut Tensor,
) -> bool {
    assert_in(x, weight);
    assert_out(out, weight);
    let LinearScratch { normed, acts, panels: buffers, search, .. } = scratch;
    let Search { acts: shifted, bounds, candidates, pause } = search;
    if *pause > 0 {
        *pause -= 1;
        return false;
    }
    let input = context.input(x, norm, Form::Blocks, false, normed, acts);
    let shifted = grown(shifted, input.acts.len(), ActBlock::ZERO);
    let length = shift(input.acts, shifted);
    if !length.is_finite() {
        return false;
    }
    out.set_rows(1);
    let (num_panels, logits) = (weight.panels(), SharedOut::new(out.as_mut_slice()));
    let bounds = grown(bounds, num_panels, Bounds::NONE);
    let shared_bounds = SharedOut::new(&mut *bounds);
    context.for_panels(&Work::new(&input, &std::iter::once(weight)), buffers, &|panels, _, _| {
        for p in panels {
            let columns = weight.panel_rows(p);
            let mut products = [[0.0; PANEL]];
            head.estimate(p, shifted, &mut products);
            // SAFETY: each panel is visited once, and these columns belong to it.
            let (bounds, logits) = unsafe { (shared_bounds.part(p, 1), logits.part(columns.start, columns.len())) };
            bound(context.tier, &products[0][..columns.len()], &head.reaches(p), length, &mut bounds[0]);
            logits.fill(LOW);
        }
    });
    // The largest product of the panel with the best estimate is at most the row's, and panels that stay below it have no larger one.
    let best = (0..num_panels).max_by(|a, b| bounds[*a].low.total_cmp(&bounds[*b].low)).expect("a weight has rows");
    compute(context, buffers, (&input, weight), &[best], &logits);
    let columns = weight.panel_rows(best);
    // SAFETY: no thread writes now.
    let largest = unsafe { logits.part(columns.start, columns.len()) }.iter().copied().fold(LOW, f32::max);
    candidates.clear();
    candidates.extend((0..num_panels).filter(|p| *p != best && bounds[*p].high >= largest));
    compute(context, buffers, (&input, weight), candidates, &logits);
    *pause = if candidates.len() > num_panels / MAX_SHARE { PAUSE } else { 0 };
    true
}

/// Writes all products of some panels.
fn compute(
    context: LinearContext<'_>,
    buffers: &mut Vec<f32>,
    (input, weight): (&Input<'_>, &CpuLinear),
    panels: &[usize],
    logits: &SharedOut<'_, f32>,
) {
    let work = Work { panels: panels.len(), ..Work::new(input, &std::iter::once(weight)) };
    context.for_panels(&work, buffers, &|range, rows, buffer| {
        for p in &panels[range] {
            store(weight, *p, input, &rows, buffer, logits);
        }
    });
}

#[inline]
fn bound_body(products: &[f32], reaches: &[f32; PANEL], length: f32, out: &mut Bounds) {
    *out = Bounds::NONE;
    for (product, reach) in products.iter().zip(reaches) {
        let (estimate, reach) = (product * UNIT, reach * length);
        out.low = out.low.max(estimate - reach);
        out.high = out.high.max(estimate + reach);
    }
}

per_tier!(
    /// Bounds of the largest of a panel's products by a row of activations, given an eighth of their estimates.
    bound = bound_body(products: &[f32], reaches: &[f32; PANEL], length: f32, out: &mut Bounds)
);

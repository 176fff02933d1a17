//! The phase of logits where only each row's largest counts.

// A body that is not inlined would be compiled for the baseline instructions only; counted loops over registers unroll.
#![allow(clippy::inline_always, clippy::needless_range_loop)]

use std::ops::Range;

use super::{
    CpuLinear, Input, PANEL, Weight,
    act_block::{ActBlock, BLOCK},
    activations::stride,
    elementwise::per_isa,
    for_products,
    lm_head::{ErrorBounds, Lengths, LmHead, UNIT, max_searched_rows, shift},
    out::SharedOut,
    panels::Work,
    phases::{Form, LinearContext, LinearScratch, assert_in, grown},
};
use crate::{Linear, Norm, Tensor, TokenMask};

/// Where more than one in so many panels may hold a row's largest product, computing all costs no more: of one row, which waits
/// for memory, and of several, of which few are computed together ...
const MAX_SHARES: [usize; 2] = [3, 10];
/// ... and may not for the next rows: so many calls do not search, after each search in vain twice as many.
const PAUSES: [usize; 2] = [4, 64];

/// Lengths of rows that are searched: their products by weights whose scales are f16 are far from the ends of f32.
const LENGTHS: Range<f32> = 1e-20..1e20;
/// Candidates that a thread takes at once.
const STRETCH: usize = 8;

/// Buffers of [`greedy_tokens`].
#[derive(Default)]
pub(super) struct Search {
    /// As [`shift`] makes them, `[rows, stride]`.
    acts: Vec<ActBlock>,
    /// Of each row.
    lengths: Vec<Lengths>,
    /// `[panels, rows]`.
    bounds: Vec<Bounds>,
    /// By panels, then rows.
    pub(super) candidates: Vec<Candidate>,
    /// Of each row.
    best: Vec<Candidate>,
    /// Calls to come that do not search, and how many these were at first; 0 after a search that was not in vain.
    pause: usize,
    last_pause: usize,
}

#[cfg(test)]
impl Search {
    pub(super) fn bytes(&self) -> usize {
        self.acts.capacity() * size_of::<ActBlock>()
            + self.lengths.capacity() * size_of::<Lengths>()
            + self.bounds.capacity() * size_of::<Bounds>()
            + (self.candidates.capacity() + self.best.capacity()) * size_of::<Candidate>()
    }
}

/// What is known of the largest of a row's products by a panel.
#[derive(Clone, Copy)]
pub(super) struct Bounds {
    estimate: f32,
    /// It is no larger.
    high: f32,
}

impl Bounds {
    const NONE: Self = Self { estimate: f32::NEG_INFINITY, high: f32::NEG_INFINITY };
}

/// A panel that may hold a row's largest product.
#[derive(Clone, Copy)]
pub(super) struct Candidate {
    panel: u32,
    row: u32,
    /// The largest of the row's products by the panel, or its estimate.
    product: f32,
    /// Where in the row it is.
    token: u32,
}

/// Bytes of [`Search`] at most, for logits `[rows, vocab_size]` of a hidden state.
pub(super) fn search_bytes([rows, vocab_size]: [usize; 2], hidden_size: usize) -> usize {
    let panels = vocab_size.div_ceil(PANEL);
    let bounds = rows * panels;
    let candidates = (panels / MAX_SHARES[0]).max(bounds / MAX_SHARES[1]) + rows;
    let row = stride(hidden_size) * size_of::<ActBlock>() + size_of::<Lengths>() + size_of::<Candidate>();
    rows * row + bounds * size_of::<Bounds>() + candidates * size_of::<Candidate>()
}

/// Of each row, or of none.
type Masks<'a> = &'a [Option<TokenMask<'a>>];

/// Which of a panel's columns count for a row, a bit each: a panel has as many rows of the weight as a mask's word has bits.
#[inline(always)]
fn counted(masks: Masks<'_>, row: usize, panel: usize) -> u32 {
    const { assert!(PANEL == u32::BITS as usize) };
    masks.get(row).copied().flatten().map_or(u32::MAX, |mask| mask.word(panel))
}

/// [`Phases::greedy_tokens`](crate::Phases::greedy_tokens): searches the rows of `norm(x) @ weight^T + bias` for their largest
/// values.
///
/// # Panics
/// When sizes disagree.
pub fn greedy_tokens(
    context: LinearContext<'_>,
    scratch: &mut LinearScratch,
    x: &Tensor,
    norm: Option<&Norm>,
    linear: &Linear,
    masks: &[Option<TokenMask<'_>>],
    tokens: &mut Vec<u32>,
) -> bool {
    let weight = linear.weight::<CpuLinear>();
    match &weight.weight {
        // The search finds the token of the kernels of few rows.
        Weight::LmHead(_) if weight.is_for_tiles(x.rows()) => false,
        Weight::LmHead(head) if (1..=max_searched_rows(context.isa)).contains(&x.rows()) => {
            weight.bias.iter().flatten().all(|b| b.is_finite())
                && search(context.checked(), scratch, x, norm, (weight, head), masks, tokens)
        }
        _ => false,
    }
}

/// False where a row is not finite or of no such length, in a pause, where that has to begin, or where no token is allowed.
fn search(
    context: LinearContext<'_>,
    scratch: &mut LinearScratch,
    x: &Tensor,
    norm: Option<&Norm>,
    (weight, head): (&CpuLinear, &LmHead),
    masks: Masks<'_>,
    tokens: &mut Vec<u32>,
) -> bool {
    assert_in(x, weight);
    assert!(masks.is_empty() || masks.len() == x.rows(), "a mask for each of {} rows, not {}", x.rows(), masks.len());
    let vocab_size = weight.out_features;
    assert!(masks.iter().flatten().all(|mask| mask.vocab_size() == vocab_size), "a mask of other than {vocab_size} tokens");
    if !masks.iter().flatten().all(|mask| mask.allows_any()) {
        return false;
    }
    let LinearScratch { normed, acts, panels: buffers, search, .. } = scratch;
    let Search { acts: shifted, lengths, bounds, candidates, best, pause, last_pause } = search;
    if *pause > 0 {
        *pause -= 1;
        return false;
    }
    let input = context.input(x, norm, Form::Blocks, false, normed, acts);
    let (stride, blocks) = (stride(input.cols), input.cols / BLOCK);
    let shifted = grown(shifted, input.acts.len(), ActBlock::ZERO);
    let rows = input.acts.chunks_exact(stride).zip(shifted.chunks_exact_mut(stride));
    lengths.clear();
    lengths.extend(rows.map(|(acts, shifted)| shift(&acts[..blocks], &mut shifted[..blocks])));
    if !lengths.iter().all(|[rest, outliers]| LENGTHS.contains(&(rest + outliers))) {
        return false;
    }
    let (num_rows, num_panels) = (x.rows(), weight.panels());
    let bounds = grown(bounds, num_panels * num_rows, Bounds::NONE);
    let (shared, estimates) = (SharedOut::new(&mut *bounds), Input { acts: shifted, ..input });
    context.for_panels(&Work::new(&input, &std::iter::once(weight)), buffers, &|panels, rows, _| {
        for p in panels {
            // Of which no row may take a token, it is not read.
            if rows.clone().all(|row| counted(masks, row, p) == 0) {
                // SAFETY: each panel and row is visited once.
                unsafe { shared.part(p * num_rows + rows.start, rows.len()) }.fill(Bounds::NONE);
                continue;
            }
            let (columns, error_bounds) = (weight.panel_rows(p), head.error_bounds(p));
            let bias = weight.panel_bias(&columns).unwrap_or_default();
            for_products(&[weight.estimate(head, p)], &estimates, &rows, &mut |m, [products]| {
                let rows = m..m + products.len();
                if !masks.is_empty() {
                    (m..).zip(&mut *products).for_each(|(row, products)| forbid(counted(masks, row, p), products));
                }
                // SAFETY: each panel and row is visited once.
                let bounds = unsafe { shared.part(p * num_rows + m, products.len()) };
                bound(context.isa, products, (columns.len(), bias), &error_bounds, &lengths[rows], bounds);
            });
        }
    });
    // The products by the panel with the best estimate are a bound from below, ...
    let bounds = || (0..).zip(bounds.chunks_exact(num_rows));
    best.clear();
    best.extend((0..num_rows as u32).map(|row| Candidate { panel: 0, row, product: f32::NEG_INFINITY, token: 0 }));
    for (panel, bounds) in bounds() {
        for (best, bounds) in best.iter_mut().zip(bounds).filter(|(best, bounds)| bounds.estimate > best.product) {
            (best.panel, best.product) = (panel, bounds.estimate);
        }
    }
    compute(context, (&input, weight), masks, buffers, best);
    // ... and panels that stay below it have no larger ones.
    let max_candidates = num_panels * num_rows / MAX_SHARES[usize::from(num_rows > 1)];
    candidates.clear();
    candidates.reserve_exact(max_candidates + num_rows);
    for (panel, bounds) in bounds() {
        let rows = bounds.iter().zip(&*best);
        let may_be_best = rows.filter(|(bounds, best)| bounds.high >= best.product && best.panel != panel);
        candidates.extend(may_be_best.map(|(_, best)| Candidate { panel, ..*best }));
        if candidates.len() > max_candidates {
            *last_pause = (2 * *last_pause).clamp(PAUSES[0], PAUSES[1]);
            *pause = *last_pause;
            return false;
        }
    }
    *last_pause = 0;
    compute(context, (&input, weight), masks, buffers, candidates);
    for found in &*candidates {
        let best = &mut best[found.row as usize];
        if found.product > best.product || found.product == best.product && found.token < best.token {
            *best = *found;
        }
    }
    tokens.clear();
    tokens.extend(best.iter().map(|best| best.token));
    true
}

/// Takes the columns that do not count out of the running.
fn forbid(counted: u32, products: &mut [f32; PANEL]) {
    for (column, product) in products.iter_mut().enumerate() {
        *product = if counted >> column & 1 == 1 { *product } else { f32::NEG_INFINITY };
    }
}

/// Computes the products by the panels of candidates, and finds the largest that count, the first of equal ones.
fn compute(
    context: LinearContext<'_>,
    (input, weight): (&Input<'_>, &CpuLinear),
    masks: Masks<'_>,
    buffers: &mut Vec<f32>,
    candidates: &mut [Candidate],
) {
    let work = Work { panels: candidates.len(), rows: 1, stretch: STRETCH, ..Work::new(input, &std::iter::once(weight)) };
    let candidates = SharedOut::new(candidates);
    context.for_panels(&work, buffers, &|range, _, buffer| {
        // SAFETY: each candidate is visited once.
        let candidates = unsafe { candidates.part(range.start, range.len()) };
        // Neighbouring rows of a panel together.
        for candidates in candidates.chunk_by_mut(|a, b| (a.panel, a.row + 1) == (b.panel, b.row)) {
            let (p, row) = (candidates[0].panel as usize, candidates[0].row as usize);
            let columns = weight.panel_rows(p);
            let rows = row..row + candidates.len();
            for_products(&[weight.open(p, buffer)], input, &rows, &mut |m, [products]| {
                for (candidate, products) in candidates[m - row..].iter_mut().zip(products) {
                    if !masks.is_empty() {
                        forbid(counted(masks, candidate.row as usize, p), products);
                    }
                    candidate.product = f32::NEG_INFINITY;
                    for (token, product) in columns.clone().zip(products) {
                        if *product > candidate.product {
                            (candidate.product, candidate.token) = (*product, token as u32);
                        }
                    }
                }
            });
        }
    });
}

#[inline(always)]
fn bound_body(
    products: &mut [[f32; PANEL]],
    (columns, bias): (usize, &[f32]),
    error_bounds: &ErrorBounds,
    lengths: &[Lengths],
    out: &mut [Bounds],
) {
    for ((products, [rest, outliers]), out) in products.iter_mut().zip(lengths).zip(out) {
        // Of the last panel fewer columns count.
        products[columns..].fill(f32::NEG_INFINITY);
        let mut highs = [0.0; PANEL];
        for i in 0..PANEL {
            products[i] *= UNIT;
            highs[i] = products[i] + (error_bounds[0][i] * rest + error_bounds[1][i] * outliers);
        }
        // Rounding keeps order: the sum is no larger than that of the bound.
        for (i, bias) in bias.iter().enumerate() {
            products[i] += bias;
            highs[i] += bias;
        }
        *out = Bounds { estimate: max_of(products), high: max_of(&mut highs) };
    }
}

/// The largest of some values, in halves, so that it vectorises.
#[inline(always)]
fn max_of(values: &mut [f32; PANEL]) -> f32 {
    let mut len = PANEL;
    while len > 1 {
        len /= 2;
        for i in 0..len {
            values[i] = if values[i + len] > values[i] { values[i + len] } else { values[i] };
        }
    }
    values[0]
}

per_isa!(
    /// Bounds of the largest products of rows of activations by a panel of so many columns, plus the bias if there is one, given
    /// an eighth of their estimates, which are changed.
    bound = bound_body(
        products: &mut [[f32; PANEL]],
        columns: (usize, &[f32]),
        error_bounds: &ErrorBounds,
        lengths: &[Lengths],
        out: &mut [Bounds]
    )
);

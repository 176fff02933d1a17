//! What happens to one item: scores, online softmax, weighted sum of values, merge of splits.
#![allow(unsafe_op_in_unsafe_fn)] // One contract for all, stated on `attend` and `merge_rows`.
#![allow(clippy::inline_always, clippy::needless_range_loop)] // Tier code must be inlined; counted loops over registers unroll.

use std::ops::Range;

use crate::cpu::simd::{Simd, exp, tanh};

use super::{
    Problem, SPLIT_KEYS, TILE_KEYS,
    plan::{Item, Merge, PARTIAL_HEADER, padded_dim, partial_stride},
    tile::{Rows, Scales},
    weigh::{Loaded, weigh_rows},
};

/// Query rows that are computed together, sharing loads of keys and values.
pub(super) const ROW_BLOCK: usize = 6;

/// A worker's buffers, cut for one item of `rows` query rows.
pub(super) struct Scratch {
    /// `[head_dim, TILE_KEYS]`.
    keys: *mut f32,
    /// `[TILE_KEYS, padded]`.
    values: *mut f32,
    /// Scores, then softmax weights, `[rows, TILE_KEYS]`.
    pub(super) scores: *mut f32,
    /// Weighted values of the split so far, `[rows, padded]`.
    pub(super) acc: *mut f32,
    /// Those of all splits before, `[rows, padded]`.
    total: *mut f32,
    /// Sum of weights of the split so far, lane by lane, `[rows, 16]`.
    sum: *mut f32,
    /// Maximum, factor of the accumulator, total maximum, total sum: each `[rows]`.
    max: *mut f32,
    pub(super) factor: *mut f32,
    total_max: *mut f32,
    total_sum: *mut f32,
}

impl Scratch {
    /// Floats that the buffers take.
    pub(super) fn len(rows: usize, dim: usize) -> usize {
        let padded = padded_dim(dim);
        padded * TILE_KEYS * 2 + rows * (TILE_KEYS + 2 * padded + 16) + 4 * rows.next_multiple_of(16)
    }

    unsafe fn cut(mut floats: *mut f32, rows: usize, dim: usize) -> Self {
        let padded = padded_dim(dim);
        let mut take = |len: usize| {
            let start = floats;
            floats = floats.add(len.next_multiple_of(16));
            start
        };
        Self {
            keys: take(padded * TILE_KEYS),
            values: take(padded * TILE_KEYS),
            scores: take(rows * TILE_KEYS),
            acc: take(rows * padded),
            total: take(rows * padded),
            sum: take(rows * 16),
            max: take(rows),
            factor: take(rows),
            total_max: take(rows),
            total_sum: take(rows),
        }
    }
}

/// Computes an item.
///
/// # Safety
/// The machine has `S`, the sizes of `problem` were checked, and `scratch` is good for [`Scratch::len`] floats.
#[inline(always)]
pub(super) unsafe fn attend<S: Simd>(problem: &Problem<'_>, item: &Item, scratch: *mut f32) {
    let (group, dim, padded) = (problem.heads_per_kv_head(), problem.params.head_dim, padded_dim(problem.params.head_dim));
    let rows = item.num_tokens * group;
    let s = Scratch::cut(scratch, rows, dim);
    let (low, high) = (problem.first_key(item.position), item.position + item.num_tokens);
    for split in item.first_split..item.end_split {
        for i in 0..rows {
            s.max.add(i).write(f32::NEG_INFINITY);
        }
        std::ptr::write_bytes(s.sum, 0, rows * 16);
        std::ptr::write_bytes(s.acc, 0, rows * padded);
        let range = low.max(split * SPLIT_KEYS)..high.min((split + 1) * SPLIT_KEYS);
        attend_split::<S>(problem, item, &s, range);
        if let Some(partial) = item.partial {
            let place = problem.partials.add(partial + (split - item.first_split) * partial_stride(rows, dim));
            save_partial::<S>(&s, place, rows, padded);
            continue;
        }
        for row in 0..rows {
            let position = item.position + row / group;
            let part =
                State { max: *s.max.add(row), sum: S::reduce_add(S::load(s.sum.add(row * 16))), acc: s.acc.add(row * padded) };
            let total = Total { max: s.total_max.add(row), sum: s.total_sum.add(row), acc: s.total.add(row * padded) };
            merge::<S>(problem, position, split, &part, &total, padded);
        }
    }
    if item.partial.is_none() {
        for row in 0..rows {
            let out = problem.out.add(row_offset(problem, item.kv_head, item.first_row, row));
            write_out::<S>(out, s.total.add(row * padded), *s.total_sum.add(row), dim);
        }
    }
}

/// Elements from the start of q or of the output to head `row % group` of token `row / group`.
#[inline(always)]
fn row_offset(problem: &Problem<'_>, kv_head: usize, first_row: usize, row: usize) -> usize {
    let group = problem.heads_per_kv_head();
    ((first_row + row / group) * problem.params.num_heads + kv_head * group + row % group) * problem.params.head_dim
}

/// Updates the state of all rows by the keys at `range`, which lie in one split.
#[inline(always)]
unsafe fn attend_split<S: Simd>(problem: &Problem<'_>, item: &Item, s: &Scratch, range: Range<usize>) {
    let (group, dim) = (problem.heads_per_kv_head(), problem.params.head_dim);
    for start in (range.start / TILE_KEYS * TILE_KEYS..range.end).step_by(TILE_KEYS) {
        let end_of_tile = start + TILE_KEYS;
        let tile = Rows::look_up(problem, item, start, range.start.max(start)..range.end.min(end_of_tile));
        tile.load_keys::<S>(problem.spec.dtype, dim, s.keys);
        Rows::prefetch(problem, item, end_of_tile..range.end.min(end_of_tile + TILE_KEYS));
        // Tokens that see a key of this tile are contiguous.
        let first = start.saturating_sub(item.position);
        let end = problem
            .params
            .window
            .map_or(item.num_tokens, |window| (end_of_tile + window - 1).saturating_sub(item.position).min(item.num_tokens));
        if first < end {
            // A single block of rows loads each value once, where it lies; whole vectors only.
            let direct = (end - first) * group <= ROW_BLOCK && dim.is_multiple_of(16);
            if !direct {
                tile.load_values::<S>(problem.spec.dtype, dim, s.values);
            }
            score_rows::<S>(problem, item, s, first * group..end * group);
            for row in first * group..end * group {
                soften::<S>(problem, s, row, tile.scales.as_ref(), &visible(problem, item.position + row / group, start));
            }
            let mut token = first;
            while token < end {
                let lanes = visible(problem, item.position + token, start);
                let mut stop = token + 1;
                while stop < end && visible(problem, item.position + stop, start) == lanes {
                    stop += 1;
                }
                let rows = token * group..stop * group;
                if direct {
                    tile.weigh_direct::<S>(problem.spec.dtype, s, rows, &lanes, dim);
                } else {
                    let values = Loaded { values: s.values, padded: padded_dim(dim) };
                    weigh_rows::<S, _>(s, &values, rows, &lanes, padded_dim(dim));
                }
                token = stop;
            }
        }
    }
}

/// Lanes of the tile at `start` that the query at `position` sees.
#[inline(always)]
fn visible(problem: &Problem<'_>, position: usize, start: usize) -> Range<usize> {
    problem.first_key(position).max(start) - start..(position + 1).min(start + TILE_KEYS) - start
}

/// How many of `left` rows the next block takes: at most [`ROW_BLOCK`], and no tiny last block.
#[inline(always)]
pub(super) fn block_rows(left: usize) -> usize {
    if left > ROW_BLOCK && left < 2 * ROW_BLOCK { left.div_ceil(2) } else { left.min(ROW_BLOCK) }
}

/// `scores[row, key] = q[row] · k[key]`, each summed over the dimensions in order.
#[inline(always)]
unsafe fn score_rows<S: Simd>(problem: &Problem<'_>, item: &Item, s: &Scratch, rows: Range<usize>) {
    let mut row = rows.start;
    while row < rows.end {
        let n = block_rows(rows.end - row);
        match n {
            1 => score_block::<S, 1>(problem, item, s, row),
            2 => score_block::<S, 2>(problem, item, s, row),
            3 => score_block::<S, 3>(problem, item, s, row),
            4 => score_block::<S, 4>(problem, item, s, row),
            5 => score_block::<S, 5>(problem, item, s, row),
            _ => score_block::<S, 6>(problem, item, s, row),
        }
        row += n;
    }
}

#[inline(always)]
unsafe fn score_block<S: Simd, const R: usize>(problem: &Problem<'_>, item: &Item, s: &Scratch, row: usize) {
    let mut q = [problem.q; R];
    for (r, q) in q.iter_mut().enumerate() {
        *q = problem.q.add(row_offset(problem, item.kv_head, item.first_row, row + r));
    }
    for lane in (0..TILE_KEYS).step_by(2 * S::LANES) {
        let mut acc = [[S::splat(0.0); 2]; R];
        for d in 0..problem.params.head_dim {
            let k = s.keys.add(d * TILE_KEYS + lane);
            let (k0, k1) = (S::load(k), S::load(k.add(S::LANES)));
            for r in 0..R {
                let x = S::splat(*q[r].add(d));
                acc[r] = [S::fma(x, k0, acc[r][0]), S::fma(x, k1, acc[r][1])];
            }
        }
        for (r, acc) in acc.into_iter().enumerate() {
            let out = s.scores.add((row + r) * TILE_KEYS + lane);
            S::store(out, acc[0]);
            S::store(out.add(S::LANES), acc[1]);
        }
    }
}

/// Turns the scores of a row into weights of the values as they were loaded, and updates its maximum, sum and factor. Lanes that are
/// not visible weigh 0, or anything where there are scales.
#[inline(always)]
unsafe fn soften<S: Simd>(problem: &Problem<'_>, s: &Scratch, row: usize, scales: Option<&Scales>, lanes: &Range<usize>) {
    let scores = s.scores.add(row * TILE_KEYS);
    let vectors = TILE_KEYS / S::LANES;
    let mut v = [S::splat(0.0); 4];
    for c in 0..vectors {
        v[c] = S::mul(S::load(scores.add(c * S::LANES)), S::splat(problem.params.scale));
        if let Some(scales) = scales {
            v[c] = S::mul(v[c], S::load(scales.keys.as_ptr().add(c * S::LANES)));
        }
        if let Some(cap) = problem.params.softcap {
            v[c] = S::mul(S::splat(cap), tanh::<S>(S::mul(v[c], S::splat(cap.recip()))));
        }
    }
    if lanes.len() < TILE_KEYS {
        for c in 0..vectors {
            S::store(scores.add(c * S::LANES), v[c]);
        }
        for lane in (0..lanes.start).chain(lanes.end..TILE_KEYS) {
            scores.add(lane).write(f32::NEG_INFINITY);
        }
        for c in 0..vectors {
            v[c] = S::load(scores.add(c * S::LANES));
        }
    }
    let mut highest = v[0];
    for c in 1..vectors {
        highest = S::max(highest, v[c]);
    }
    let old = *s.max.add(row);
    let highest = S::reduce_max(highest);
    let mut new = old;
    let sum = s.sum.add(row * 16);
    let mut total = S::load(sum);
    let mut factor = 1.0;
    if highest > old {
        new = highest;
        let factors = exp::<S>(S::splat(old - new));
        total = S::mul(total, factors);
        factor = S::reduce_max(factors);
        s.max.add(row).write(new);
    }
    s.factor.add(row).write(factor);
    for c in 0..vectors {
        let weight = exp::<S>(S::sub(v[c], S::splat(new)));
        total = S::add(total, weight);
        let weight = match scales {
            Some(scales) => S::mul(weight, S::load(scales.values.as_ptr().add(c * S::LANES))),
            None => weight,
        };
        S::store(scores.add(c * S::LANES), weight);
    }
    S::store(sum, total);
}

/// The softmax state of one row in one split.
struct State {
    max: f32,
    sum: f32,
    acc: *const f32,
}

/// That of all splits so far.
struct Total {
    max: *mut f32,
    sum: *mut f32,
    acc: *mut f32,
}

/// Adds a split to the total of the row at `position`, if the row sees any key of the split.
#[inline(always)]
unsafe fn merge<S: Simd>(problem: &Problem<'_>, position: usize, split: usize, part: &State, total: &Total, padded: usize) {
    let first = problem.first_key(position) / SPLIT_KEYS;
    if split < first || split > position / SPLIT_KEYS {
        return;
    }
    if split == first {
        total.max.write(part.max);
        total.sum.write(part.sum);
        std::ptr::copy_nonoverlapping(part.acc, total.acc, padded);
        return;
    }
    let max = if part.max > *total.max { part.max } else { *total.max };
    let (old, new) = (exp::<S>(S::splat(*total.max - max)), exp::<S>(S::splat(part.max - max)));
    total.max.write(max);
    total.sum.write(*total.sum * S::reduce_max(old) + part.sum * S::reduce_max(new));
    for c in (0..padded).step_by(S::LANES) {
        let sum = S::fma(S::load(part.acc.add(c)), new, S::mul(S::load(total.acc.add(c)), old));
        S::store(total.acc.add(c), sum);
    }
}

#[inline(always)]
unsafe fn write_out<S: Simd>(out: *mut f32, acc: *const f32, sum: f32, dim: usize) {
    let inverse = sum.recip();
    let whole = dim / S::LANES * S::LANES;
    for c in (0..whole).step_by(S::LANES) {
        S::store(out.add(c), S::mul(S::load(acc.add(c)), S::splat(inverse)));
    }
    for c in whole..dim {
        out.add(c).write(*acc.add(c) * inverse);
    }
}

/// A partial result: for each row maximum, sum (from [`PARTIAL_HEADER`] floats), accumulator.
#[inline(always)]
unsafe fn save_partial<S: Simd>(s: &Scratch, place: *mut f32, rows: usize, padded: usize) {
    for row in 0..rows {
        let place = place.add(row * (PARTIAL_HEADER + padded));
        place.write(*s.max.add(row));
        place.add(1).write(S::reduce_add(S::load(s.sum.add(row * 16))));
        std::ptr::copy_nonoverlapping(s.acc.add(row * padded), place.add(PARTIAL_HEADER), padded);
    }
}

/// Merges the partial results of a divided item in order, and writes the output. The first one that a row sees is its total.
///
/// # Safety
/// The machine has `S`, the sizes of `problem` were checked, and all partial results of the merge were written.
#[inline(always)]
pub(super) unsafe fn merge_rows<S: Simd>(problem: &Problem<'_>, merge_of: &Merge) {
    let (group, dim, padded) = (problem.heads_per_kv_head(), problem.params.head_dim, padded_dim(problem.params.head_dim));
    let rows = merge_of.num_tokens * group;
    for row in 0..rows {
        let place = |split: usize| {
            let split = split - merge_of.first_split;
            problem.partials.add(merge_of.partial + split * partial_stride(rows, dim) + row * (PARTIAL_HEADER + padded))
        };
        let position = merge_of.position + row / group;
        let first = place(problem.first_key(position) / SPLIT_KEYS);
        let total = Total { max: first, sum: first.add(1), acc: first.add(PARTIAL_HEADER) };
        for split in problem.first_key(position) / SPLIT_KEYS + 1..merge_of.end_split {
            let part = place(split);
            let part = State { max: *part, sum: *part.add(1), acc: part.add(PARTIAL_HEADER) };
            merge::<S>(problem, position, split, &part, &total, padded);
        }
        let out = problem.out.add(row_offset(problem, merge_of.kv_head, merge_of.first_row, row));
        write_out::<S>(out, total.acc, *total.sum, dim);
    }
}

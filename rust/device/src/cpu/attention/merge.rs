//! Merging the results of splits, and writing the output.
#![allow(unsafe_op_in_unsafe_fn)] // One contract for all, stated on `kernel::attend` and `merge_rows`.
#![allow(clippy::inline_always)] // ISA code must be inlined.

use crate::cpu::simd::{Simd, exp};

use super::{
    Problem, SPLIT_KEYS,
    plan::{Merge, PARTIAL_HEADER, padded_dim, partial_stride},
    row_offset,
    scratch::Scratch,
};

/// The softmax state of one row in one split.
pub(super) struct State {
    pub(super) max: f32,
    pub(super) sum: f32,
    pub(super) acc: *const f32,
}

/// That of all splits so far.
pub(super) struct Total {
    pub(super) max: *mut f32,
    pub(super) sum: *mut f32,
    pub(super) acc: *mut f32,
}

/// Adds a split to the total of a query (row and position) of a request with `seq_len` keys, if it sees any key of the split.
#[inline(always)]
pub(super) unsafe fn merge<S: Simd>(
    problem: &Problem<'_>,
    (query, seq_len): ((usize, usize), usize),
    split: usize,
    part: &State,
    total: &Total,
    padded: usize,
) {
    let first = problem.first_key(query.1) / SPLIT_KEYS;
    if split < first || split > (problem.end_key(query, seq_len) - 1) / SPLIT_KEYS {
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

/// Writes the output of a row, which is one of the query heads of `kv_head`.
#[inline(always)]
pub(super) unsafe fn write_out<S: Simd>(problem: &Problem<'_>, (kv_head, first_row, row): (usize, usize, usize), total: &Total) {
    let Total { max, sum, acc } = *total;
    let (out, dim) = (problem.out.add(row_offset(problem, kv_head, first_row, row)), problem.params.head_dim);
    let sink = problem.sinks.map_or(0.0, |sinks| {
        let queries_per_kv = problem.queries_per_kv();
        // A sink that outweighs everything makes it infinite, and the output 0.
        (sinks[kv_head * queries_per_kv + row % queries_per_kv] - *max).exp()
    });
    let inverse = (*sum + sink).recip();
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
pub(super) unsafe fn save_partial<S: Simd>(s: &Scratch, place: *mut f32, rows: usize, padded: usize) {
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
    let (queries_per_kv, dim, padded) = (problem.queries_per_kv(), problem.params.head_dim, padded_dim(problem.params.head_dim));
    let head_rows = merge_of.num_tokens * queries_per_kv;
    let rows = merge_of.kv_heads.len() * head_rows;
    for row in 0..rows {
        let place = |split: usize| {
            let split = split - merge_of.first_split;
            problem.partials.add(merge_of.partial + split * partial_stride(rows, dim) + row * (PARTIAL_HEADER + padded))
        };
        let token = row % head_rows / queries_per_kv;
        let query = (merge_of.first_row + token, merge_of.position + token);
        let first_split = problem.first_key(query.1) / SPLIT_KEYS;
        let first = place(first_split);
        let total = Total { max: first, sum: first.add(1), acc: first.add(PARTIAL_HEADER) };
        for split in first_split + 1..merge_of.end_split {
            let part = place(split);
            let part = State { max: *part, sum: *part.add(1), acc: part.add(PARTIAL_HEADER) };
            merge::<S>(problem, (query, merge_of.seq_len), split, &part, &total, padded);
        }
        let kv_head = merge_of.kv_heads.start + row / head_rows;
        write_out::<S>(problem, (kv_head, merge_of.first_row, row % head_rows), &total);
    }
}

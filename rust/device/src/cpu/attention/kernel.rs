//! What happens to one item.
//!
//! For each tile of keys, and each block of query rows: scores, softmax, weighted sum of values.
#![allow(unsafe_op_in_unsafe_fn)] // One contract for all, stated on `attend`.
#![allow(clippy::inline_always)] // ISA code must be inlined.

use std::{marker::PhantomData, ops::Range};

use crate::cpu::simd::{Simd, prefetch};

use super::{
    MAX_ROW_BLOCK, Problem, SPLIT_KEYS, STRIP_KEYS, TILE_KEYS,
    accumulate::{Loaded, RowBlock},
    cached::Cached,
    merge::{State, Total, merge, save_partial, write_out},
    plan::{Item, padded_dim, partial_stride},
    product::Product,
    row_offset,
    score::{Keys, Softmax, online_softmax_update},
    scratch::Scratch,
    tile::Tiles,
};

/// The blocks of `rows` query rows: of equal size or nearly, as many rows as the registers have room for.
#[inline(always)]
fn row_blocks<S: Simd>(rows: usize) -> impl Iterator<Item = Range<usize>> {
    const { assert!(S::ROWS <= MAX_ROW_BLOCK) };
    let blocks = rows.div_ceil(S::ROWS);
    (0..blocks).map(move |block| block * rows / blocks..(block + 1) * rows / blocks)
}

/// What multiplies queries by keys and weights by values.
pub(super) trait Method {
    /// Makes the queries of a head ready.
    unsafe fn pack_queries(&mut self, problem: &Problem<'_>, item: &Item, kv_head: usize, s: &Scratch);
    /// Begins a split with no sums.
    unsafe fn begin_split(&mut self, _s: &Scratch) {}
    /// Updates the state of all rows of a head by a tile of keys.
    unsafe fn attend_tile(&mut self, problem: &Problem<'_>, item: &Item, s: &Scratch, tile: &Tiles<'_>);
    /// Leaves the sums of all rows in `s.acc`.
    unsafe fn end_split(&mut self, _s: &Scratch, _padded: usize) {}
}

/// By vectors.
pub(super) struct Vectors<S, C>(PhantomData<(S, C)>);

impl<S: Simd, C: Cached> Vectors<S, C> {
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self(PhantomData)
    }
}

impl<S: Simd, C: Cached> Method for Vectors<S, C> {
    #[inline(always)]
    unsafe fn pack_queries(&mut self, problem: &Problem<'_>, item: &Item, kv_head: usize, s: &Scratch) {
        pack_queries::<S, C::Product>(problem, item, kv_head, s);
    }

    #[inline(always)]
    unsafe fn attend_tile(&mut self, problem: &Problem<'_>, item: &Item, s: &Scratch, tile: &Tiles<'_>) {
        attend_tile::<S, C>(problem, item, s, tile);
    }
}

/// Computes an item.
///
/// # Safety
/// The machine has `S`, the sizes of `problem` were checked, and `scratch` is good for [`Scratch::len`] floats.
#[inline(always)]
pub(super) unsafe fn attend<S: Simd, M: Method>(problem: &Problem<'_>, item: &Item, scratch: *mut f32, method: &mut M) {
    let (queries_per_kv, dim, padded) = (problem.queries_per_kv(), problem.params.head_dim, padded_dim(problem.params.head_dim));
    let (heads, head_rows) = (item.kv_heads.len(), item.num_tokens * queries_per_kv);
    let rows = heads * head_rows;
    let s = Scratch::cut(scratch, rows, dim);
    for head in 0..heads {
        method.pack_queries(problem, item, item.kv_heads.start + head, &s.of_head(head, head_rows, padded));
    }
    let low = problem.first_key(item.position).max(item.first_split * SPLIT_KEYS);
    let high = problem.end_key(item.query(item.num_tokens - 1), item.seq_len).min(item.end_split * SPLIT_KEYS);
    let mut tiles = Tiles::new(problem, item, low..high);
    for split in item.first_split..item.end_split {
        for i in 0..rows {
            s.max.add(i).write(f32::NEG_INFINITY);
        }
        std::ptr::write_bytes(s.sum, 0, rows * 16);
        std::ptr::write_bytes(s.acc, 0, rows * padded);
        method.begin_split(&s);
        while tiles.advance((split + 1) * SPLIT_KEYS) {
            for head in 0..heads {
                tiles.turn_to(head);
                method.attend_tile(problem, item, &s.of_head(head, head_rows, padded), &tiles);
            }
        }
        method.end_split(&s, padded);
        if let Some(partial) = item.partial {
            let place = problem.partials.add(partial + (split - item.first_split) * partial_stride(rows, dim));
            save_partial::<S>(&s, place, rows, padded);
            continue;
        }
        for row in 0..rows {
            let query = item.query(row % head_rows / queries_per_kv);
            let part =
                State { max: *s.max.add(row), sum: S::reduce_add(S::load(s.sum.add(row * 16))), acc: s.acc.add(row * padded) };
            let total = Total { max: s.total_max.add(row), sum: s.total_sum.add(row), acc: s.total.add(row * padded) };
            merge::<S>(problem, (query, item.seq_len), split, &part, &total, padded);
        }
    }
    if item.partial.is_none() {
        for row in 0..rows {
            let kv_head = item.kv_heads.start + row / head_rows;
            let total = Total { max: s.total_max.add(row), sum: s.total_sum.add(row), acc: s.total.add(row * padded) };
            write_out::<S>(problem, (kv_head, item.first_row, row % head_rows), &total);
        }
    }
}

/// [`attend`] by vectors.
///
/// # Safety
/// As there; the cache is of the type `C`.
#[inline(always)]
pub(super) unsafe fn attend_by_vectors<S: Simd, C: Cached>(problem: &Problem<'_>, item: &Item, scratch: *mut f32) {
    attend::<S, _>(problem, item, scratch, &mut Vectors::<S, C>::new());
}

/// Puts the queries of a block of rows side by side, step by step.
#[inline(always)]
unsafe fn pack_queries<S: Simd, P: Product>(problem: &Problem<'_>, item: &Item, kv_head: usize, s: &Scratch) {
    let (steps, rows) = (problem.params.head_dim / P::PACKED, item.num_tokens * problem.queries_per_kv());
    // A row is short, and far from the next one.
    for row in 0..rows {
        let q = problem.q.wrapping_add(row_offset(problem, kv_head, item.first_row, row));
        for line in (0..problem.params.head_dim).step_by(16) {
            prefetch(q.wrapping_add(line).cast());
        }
    }
    for block in row_blocks::<S>(rows) {
        for (r, row) in block.clone().enumerate() {
            let mut q = problem.q.add(row_offset(problem, kv_head, item.first_row, row));
            if P::PACKED == 2 {
                for d in (0..problem.params.head_dim).step_by(S::LANES) {
                    S::store_bf16(s.keys.cast::<u16>().add(d), S::load(q.add(d)));
                }
                q = s.keys;
            }
            for step in 0..steps {
                s.q.add(block.start * steps + step * block.len() + r).write(*q.add(step));
            }
        }
    }
}

/// Updates the state of all rows by a tile of keys.
#[inline(always)]
unsafe fn attend_tile<S: Simd, C: Cached>(problem: &Problem<'_>, item: &Item, s: &Scratch, tile: &Tiles<'_>) {
    let (queries_per_kv, dim, padded) = (problem.queries_per_kv(), problem.params.head_dim, padded_dim(problem.params.head_dim));
    let steps = dim / C::Product::PACKED;
    let rows = item.num_tokens * queries_per_kv;
    // A single block of rows loads each key and each value once, where it lies; of values whole vectors only.
    let single = row_blocks::<S>(rows).nth(1).is_none() && !problem.is_latent;
    let direct = single && dim.is_multiple_of(16);
    if !single {
        tile.load_keys::<S, C>(s.keys, s.values);
    }
    if problem.is_latent {
        tile.transpose_keys(s.keys, s.values);
    } else if !direct {
        C::load_values::<S>(tile, s.values);
    }
    let loaded = Keys {
        strips: std::array::from_fn(|i| s.keys.wrapping_add(i * STRIP_KEYS).cast::<u8>().cast_const()),
        unit_bytes: size_of::<f32>(),
        stride: TILE_KEYS * size_of::<f32>(),
        units: steps,
        ahead: None,
    };
    let visible = |token: usize| visible(problem, (item.query(token), item.seq_len), tile.start());
    for block in row_blocks::<S>(rows) {
        let tokens = block.start / queries_per_kv..(block.end - 1) / queries_per_kv + 1;
        if tokens.clone().all(|token| visible(token).is_empty()) {
            continue;
        }
        let q = s.q.add(block.start * steps);
        if single {
            tile.score_direct::<S, C>(block.len(), q, s.keys, s.scores);
        } else {
            C::score_loaded::<S>(block.len(), q, &loaded, &tile.lanes(), s.scores);
        }
        for (r, row) in block.clone().enumerate() {
            let lanes = visible(row / queries_per_kv);
            if lanes.is_empty() && C::Product::PACKED == 2 {
                std::ptr::write_bytes(s.scores.add(r * TILE_KEYS), 0, TILE_KEYS);
                s.factors.add(r).write(1.0);
            } else if !lanes.is_empty() {
                let softmax = Softmax { max: s.max.add(row), sum: s.sum.add(row * 16) };
                let factor = online_softmax_update::<S, C::Product>(
                    &problem.params,
                    s.scores.add(r * TILE_KEYS),
                    &softmax,
                    tile.scales(),
                    &lanes,
                );
                s.factors.add(r).write(factor);
            }
        }
        let state =
            RowBlock { rows: block.len(), weights: s.scores, factors: s.factors, acc: s.acc.add(block.start * padded), padded };
        // Of the tokens those together that see the same lanes: all, or each alone. Lanes that a row does not see weigh 0 in
        // pairs, which changes no sum of finite values, so there all are together.
        let all = visible(tokens.start).start..visible(tokens.end - 1).end;
        let together = C::Product::PACKED == 2 || visible(tokens.start) == visible(tokens.end - 1);
        for token in tokens.clone().step_by(if together { tokens.len() } else { 1 }) {
            let (lanes, end) = if together { (all.clone(), tokens.end) } else { (visible(token), token + 1) };
            if lanes.is_empty() {
                continue;
            }
            let rows = (token * queries_per_kv).max(block.start)..(end * queries_per_kv).min(block.end);
            let part = state.part(rows.start - block.start..rows.end - block.start);
            if direct {
                tile.accumulate_direct::<S, C>(&part, &lanes);
            } else {
                C::accumulate_loaded::<S>(&part, &Loaded { values: s.values, padded, product: PhantomData }, &lanes);
            }
        }
    }
}

/// Lanes of the tile at `start` that the query sees, of a request with `seq_len` keys.
#[inline(always)]
pub(super) fn visible(problem: &Problem<'_>, (query, seq_len): ((usize, usize), usize), start: usize) -> Range<usize> {
    let lane = |key: usize| key.saturating_sub(start).min(TILE_KEYS);
    lane(problem.first_key(query.1))..lane(problem.end_key(query, seq_len))
}

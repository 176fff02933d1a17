//! How the work of a call is cut into items.

use std::ops::Range;

use crate::{AttentionParams, StepMetadata};

use super::{MAX_ROW_BLOCK, SPLIT_KEYS, TILE_KEYS};

/// Query rows (tokens times the query heads of a KV head) that an item aims at: enough to pay for converting a tile, few enough
/// for the caches.
pub(super) const ROWS_PER_ITEM: usize = 96;
/// Floats before the accumulator in a partial result: maximum and sum, and the rest of their cache line.
pub(super) const PARTIAL_HEADER: usize = 16;

/// Queries of one request over one KV head, or over all of them, tile by tile of keys: so a few queries read blocks from end to
/// end.
#[derive(Clone)]
pub(super) struct Item {
    pub(super) request: usize,
    pub(super) kv_heads: Range<usize>,
    /// Row of the first query token.
    pub(super) first_row: usize,
    pub(super) num_tokens: usize,
    /// Position of the first query token.
    pub(super) position: usize,
    /// Keys of the request.
    pub(super) seq_len: usize,
    pub(super) first_split: usize,
    pub(super) end_split: usize,
    /// Where the partial result of `first_split` goes, in floats; `None` when the item covers all splits and writes the output
    /// itself.
    pub(super) partial: Option<usize>,
    cycles: usize,
}

impl Item {
    /// Row and position of one of its query tokens.
    pub(super) fn query(&self, token: usize) -> (usize, usize) {
        (self.first_row + token, self.position + token)
    }

    /// Its query rows, where `queries_per_kv` heads share a KV head.
    pub(super) fn rows(&self, queries_per_kv: usize) -> usize {
        self.kv_heads.len() * self.num_tokens * queries_per_kv
    }
}

/// Partial results to be merged into the output, one a split.
pub(super) struct Merge {
    pub(super) kv_heads: Range<usize>,
    pub(super) first_row: usize,
    pub(super) num_tokens: usize,
    pub(super) position: usize,
    pub(super) seq_len: usize,
    pub(super) first_split: usize,
    pub(super) end_split: usize,
    pub(super) partial: usize,
}

/// The items of a call, costliest first.
#[derive(Default)]
pub(super) struct Plan {
    pub(super) items: Vec<Item>,
    pub(super) merges: Vec<Merge>,
    /// Floats that all partial results take.
    pub(super) partial_len: usize,
    /// Query rows of the largest item.
    pub(super) max_rows: usize,
    /// Estimate of the whole cost.
    pub(super) cycles: usize,
}

/// `head_dim` rounded up to whole vectors of every ISA.
pub(super) fn padded_dim(head_dim: usize) -> usize {
    head_dim.next_multiple_of(16)
}

/// Floats of the partial result of one split of `rows` rows.
pub(super) fn partial_stride(rows: usize, head_dim: usize) -> usize {
    rows * (PARTIAL_HEADER + padded_dim(head_dim))
}

impl Plan {
    /// Plans a call for `num_threads` workers.
    pub(super) fn make(&mut self, params: &AttentionParams, step: &StepMetadata, num_threads: usize) {
        self.items.clear();
        self.merges.clear();
        self.partial_len = 0;
        let queries_per_kv = params.num_heads / params.num_kv_heads;
        let num_tokens = step.query_start_loc.last().map_or(0, |&n| n as usize);
        let share = (num_tokens * params.num_kv_heads).div_ceil(4 * num_threads);
        let tile_tokens = (ROWS_PER_ITEM / queries_per_kv).min(share).max(1);
        // Heads stay together while there is enough to divide among threads without parting them.
        let num_splits: usize = step.seq_lens.iter().map(|&len| len.div_ceil(SPLIT_KEYS as u32) as usize).sum();
        let together = num_threads == 1 || num_splits >= 4 * num_threads;
        for request in 0..step.num_reqs() {
            let rows = step.query_start_loc[request] as usize..step.query_start_loc[request + 1] as usize;
            let seq_len = step.seq_lens[request] as usize;
            let end_key = |row: usize, position: usize| params.end_key((row, position), seq_len, &step.span_ends);
            for first_row in rows.clone().step_by(tile_tokens) {
                let num_tokens = tile_tokens.min(rows.end - first_row);
                let position = step.positions[rows.start] as usize + (first_row - rows.start);
                let (low, high) = (params.first_key(position), end_key(first_row + num_tokens - 1, position + num_tokens - 1));
                let tiles = high.div_ceil(TILE_KEYS) - low / TILE_KEYS;
                let cycles = tiles * params.head_dim * (16 + 5 * num_tokens * queries_per_kv);
                let (first_split, end_split) = (low / SPLIT_KEYS, high.div_ceil(SPLIT_KEYS));
                let heads = if together && num_tokens * queries_per_kv <= MAX_ROW_BLOCK { params.num_kv_heads } else { 1 };
                for first in (0..params.num_kv_heads).step_by(heads) {
                    let (kv_heads, cycles) = (first..first + heads, heads * cycles);
                    let (partial, position) = (None, position);
                    #[rustfmt::skip]
                    self.items.push(Item { request, kv_heads, first_row, num_tokens, position, seq_len, first_split, end_split, partial, cycles });
                }
            }
        }
        self.max_rows = self.items.iter().map(|i| i.rows(queries_per_kv)).max().unwrap_or(0);
        self.cycles = self.items.iter().map(|i| i.cycles).sum();
        if num_threads > 1 {
            self.divide(num_threads, queries_per_kv, params.head_dim);
        }
        self.items.sort_unstable_by_key(|item| std::cmp::Reverse(item.cycles));
    }

    /// Divides items that cost more than a quarter of a thread's share, at splits, into parts of a sixteenth of it or so: no
    /// worker then waits long for the last one.
    fn divide(&mut self, num_threads: usize, queries_per_kv: usize, head_dim: usize) {
        let total = self.cycles.max(1);
        for i in 0..self.items.len() {
            let item = &self.items[i];
            let splits = item.end_split - item.first_split;
            let parts = (16 * num_threads * item.cycles).div_ceil(total).min(splits);
            if 4 * num_threads * item.cycles <= total || parts < 2 {
                continue;
            }
            let item = item.clone();
            let (stride, partial) = (partial_stride(item.rows(queries_per_kv), head_dim), self.partial_len);
            self.partial_len += splits * stride;
            let Item { first_row, num_tokens, position, seq_len, first_split, end_split, .. } = item;
            let kv_heads = item.kv_heads.clone();
            self.merges.push(Merge { kv_heads, first_row, num_tokens, position, seq_len, first_split, end_split, partial });
            let bound = |part: usize| item.first_split + part * splits / parts;
            for part in 0..parts {
                let (first_split, end_split) = (bound(part), bound(part + 1));
                let partial = Some(partial + (first_split - item.first_split) * stride);
                let cycles = item.cycles * (end_split - first_split) / splits;
                let divided = Item { first_split, end_split, partial, cycles, ..item.clone() };
                if part == 0 { self.items[i] = divided } else { self.items.push(divided) }
            }
        }
    }
}

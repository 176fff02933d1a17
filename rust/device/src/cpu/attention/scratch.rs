//! The buffers of a worker.
#![allow(unsafe_op_in_unsafe_fn)] // One contract for all, stated on `kernel::attend`.

use super::{MAX_ROW_BLOCK, TILE_KEYS, plan::padded_dim};

/// A worker's buffers, cut for one item of `rows` query rows.
pub(super) struct Scratch {
    /// Of each block of rows, one after the other, `[steps, rows of the block]`.
    pub(super) q: *mut f32,
    /// `[steps, TILE_KEYS]`; or, of blocks shorter than a vector, keys as they are stored.
    pub(super) keys: *mut f32,
    /// `[steps, padded]`; before that, where keys are loaded from blocks shorter than a vector, keys as they are stored.
    pub(super) values: *mut f32,
    /// Scores of a block of rows, then softmax weights, `[MAX_ROW_BLOCK, TILE_KEYS]`.
    pub(super) scores: *mut f32,
    /// Factors of the accumulators of a block, `[MAX_ROW_BLOCK]`.
    pub(super) factors: *mut f32,
    /// Weighted values of the split so far, `[rows, padded]`.
    pub(super) acc: *mut f32,
    /// Those of all splits before, `[rows, padded]`.
    pub(super) total: *mut f32,
    /// Sum of weights of the split so far, lane by lane, `[rows, 16]`.
    pub(super) sum: *mut f32,
    /// Maximum, total maximum, total sum: each `[rows]`.
    pub(super) max: *mut f32,
    pub(super) total_max: *mut f32,
    pub(super) total_sum: *mut f32,
}

impl Scratch {
    /// Floats that the buffers take.
    pub(super) fn len(rows: usize, dim: usize) -> usize {
        let padded = padded_dim(dim);
        padded * TILE_KEYS * 2 + MAX_ROW_BLOCK * TILE_KEYS + 16 + rows * (3 * padded + 16) + 3 * rows.next_multiple_of(16)
    }

    pub(super) unsafe fn cut(mut floats: *mut f32, rows: usize, dim: usize) -> Self {
        let padded = padded_dim(dim);
        let mut take = |len: usize| {
            let start = floats;
            floats = floats.add(len.next_multiple_of(16));
            start
        };
        Self {
            q: take(rows * padded),
            keys: take(padded * TILE_KEYS),
            values: take(padded * TILE_KEYS),
            scores: take(MAX_ROW_BLOCK * TILE_KEYS),
            factors: take(MAX_ROW_BLOCK),
            acc: take(rows * padded),
            total: take(rows * padded),
            sum: take(rows * 16),
            max: take(rows),
            total_max: take(rows),
            total_sum: take(rows),
        }
    }

    /// That of the KV head `head` of an item, of `rows` rows of `padded` elements.
    pub(super) fn of_head(&self, head: usize, rows: usize, padded: usize) -> Self {
        let (rows, elements) = (head * rows, head * rows * padded);
        Self {
            q: self.q.wrapping_add(elements),
            acc: self.acc.wrapping_add(elements),
            total: self.total.wrapping_add(elements),
            sum: self.sum.wrapping_add(16 * rows),
            max: self.max.wrapping_add(rows),
            total_max: self.total_max.wrapping_add(rows),
            total_sum: self.total_sum.wrapping_add(rows),
            ..*self
        }
    }
}

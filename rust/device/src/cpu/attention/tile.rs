//! The keys and values of a tile, found through a block table and read as they are multiplied.
#![allow(clippy::cast_ptr_alignment)] // Offsets are multiples of the element's size.
#![allow(unsafe_op_in_unsafe_fn)] // One contract for all: the machine has the ISA, the pointers are those of `Tiles`.
#![allow(clippy::inline_always, clippy::needless_range_loop)] // ISA code must be inlined; counted loops over registers unroll.

use std::{marker::PhantomData, ops::Range};

use crate::{
    KvDType,
    cpu::simd::{Simd, prefetch},
};

use super::{
    Problem, STRIP_KEYS, STRIPS, TILE_KEYS,
    accumulate::{RowBlock, Values, accumulate_values},
    ahead::{Ahead, Lines},
    cached::Cached,
    element::{BF16, Element},
    plan::{Item, padded_dim},
    product::{Pairs, Product, Single},
    score::{Keys, Scales, score_rows},
};

/// The tiles of an item, one after the other, and the item's heads within each.
pub(super) struct Tiles<'a> {
    problem: &'a Problem<'a>,
    item: &'a Item,
    /// Keys of the item.
    keys: Range<usize>,
    /// Position of the tile's first lane.
    start: usize,
    /// Lanes that hold keys of the item.
    lanes: Range<usize>,
    /// Where in a plane the item's first head starts in the block of each strip of keys of this tile, and of the next one. Strips
    /// without keys of the item repeat another's.
    blocks: [usize; 2 * STRIPS],
    /// The head, counted from the item's first.
    head: usize,
    /// What is to be added to offsets for this head.
    shift: usize,
    /// The same for what comes after this head of this tile: another one, or the next tile's first.
    next_shift: usize,
    /// Scales of the head.
    scales: Option<Scales>,
}

impl<'a> Tiles<'a> {
    /// The tiles that hold `keys`, which are not empty; [`Self::advance`] comes to the first.
    #[inline(always)]
    pub(super) fn new(problem: &'a Problem<'a>, item: &'a Item, keys: Range<usize>) -> Self {
        let scales = element_factor(problem.spec.dtype).map(|_| Scales { keys: [0.0; TILE_KEYS], values: [0.0; TILE_KEYS] });
        let start = keys.start / TILE_KEYS * TILE_KEYS;
        let blocks = [0; 2 * STRIPS];
        let mut tiles = Self { problem, item, keys, start, lanes: 0..0, blocks, head: 0, shift: 0, next_shift: 0, scales };
        tiles.look_up(start);
        // So that `advance` comes to it.
        tiles.start = start.wrapping_sub(TILE_KEYS);
        tiles
    }

    /// Goes on to the next tile, if it starts before `end`.
    #[inline(always)]
    pub(super) fn advance(&mut self, end: usize) -> bool {
        let start = self.start.wrapping_add(TILE_KEYS);
        if start >= end.min(self.keys.end) {
            return false;
        }
        self.start = start;
        self.lanes = self.keys.start.max(start) - start..self.keys.end.min(start + TILE_KEYS) - start;
        self.blocks.copy_within(STRIPS.., 0);
        self.look_up(start + TILE_KEYS);
        true
    }

    /// Turns to a head of the item, counted from its first; [`Self::advance`] leaves that to be done.
    #[inline(always)]
    pub(super) fn turn_to(&mut self, head: usize) {
        let head_bytes = self.problem.spec.block_size * self.problem.layout.vector_bytes;
        (self.head, self.shift) = (head, head * head_bytes);
        self.next_shift = if head + 1 < self.item.kv_heads.len() { self.shift + head_bytes } else { 0 };
        self.read_scales();
    }

    /// Where the first of each strip's keys or values lies in `plane`; `distance` is that from one to the next.
    #[inline(always)]
    fn strips(&self, plane: *const u8, distance: usize) -> [*const u8; STRIPS] {
        let first = |strip: usize| strip * STRIP_KEYS % self.problem.spec.block_size;
        std::array::from_fn(|i| plane.wrapping_add(self.blocks[i] + self.shift + first(i) * distance))
    }

    /// The lines of this head of this tile in `plane`, or of what comes after it.
    #[inline(always)]
    fn lines(&self, plane: *const u8, after: bool) -> Lines {
        let Problem { spec, layout, .. } = self.problem;
        let shift = if after { self.next_shift } else { self.shift };
        let first = if after && self.next_shift == 0 { STRIPS } else { 0 };
        let strip = |run: usize| first + run * spec.block_size / STRIP_KEYS % STRIPS;
        let runs = std::array::from_fn(|run| plane.wrapping_add(self.blocks[strip(run)] + shift));
        Lines::new(runs, spec.block_size * layout.vector_bytes)
    }

    /// What to prefetch while keys are read: after them come values.
    #[inline(always)]
    fn ahead_of_keys(&self) -> Ahead {
        let Problem { keys, values, to_l2, .. } = *self.problem;
        Ahead { later: self.lines(keys, true), next: self.lines(values, false), to_l2 }
    }

    /// What to prefetch while values are read.
    #[inline(always)]
    fn ahead_of_values(&self) -> Ahead {
        let Problem { keys, values, to_l2, .. } = *self.problem;
        Ahead { later: self.lines(values, true), next: self.lines(keys, true), to_l2 }
    }

    /// Position of the tile's first lane.
    pub(super) fn start(&self) -> usize {
        self.start
    }

    /// Lanes that hold keys of the item.
    pub(super) fn lanes(&self) -> Range<usize> {
        self.lanes.clone()
    }

    /// For types with scales, those of the tile.
    pub(super) fn scales(&self) -> Option<&Scales> {
        self.scales.as_ref()
    }

    /// Calls `body(lane, block, offset, len)` for each run of keys of one block in the tile that starts at `start`.
    #[inline(always)]
    fn runs(&self, start: usize, mut body: impl FnMut(usize, usize, usize, usize)) {
        let (spec, group) = (self.problem.spec, self.problem.group);
        let table = &group.block_tables[self.item.request * group.max_blocks..][..group.max_blocks];
        let (mut key, end) = (start.max(self.keys.start), self.keys.end.min(start + TILE_KEYS));
        while key < end {
            let (block, offset) = (table[key / spec.block_size] as usize, key % spec.block_size);
            assert!(block < spec.num_blocks, "block {block} of {} at position {key}", spec.num_blocks);
            let len = (spec.block_size - offset).min(end - key);
            body(key - start, block, offset, len);
            key += len;
        }
    }

    /// Finds where the tile that starts at `start` lies, if the item has it, and prefetches its scales.
    #[inline(always)]
    fn look_up(&mut self, start: usize) {
        let Problem { layout, keys, values, spec, .. } = self.problem;
        let (mut blocks, mut any) = ([usize::MAX; STRIPS], self.blocks[0]);
        self.runs(start, |lane, block, offset, _| {
            any = layout.head(block, self.item.kv_heads.start);
            // All strips of the block, since a vector of keys may start before those of the item.
            let first = (lane - offset) / STRIP_KEYS;
            blocks[first..first + spec.block_size / STRIP_KEYS].fill(any);
            if self.scales.is_some() {
                for head in self.item.kv_heads.clone() {
                    let scale = layout.scale(block, head, offset);
                    prefetch(keys.wrapping_add(scale));
                    prefetch(values.wrapping_add(scale));
                }
            }
        });
        blocks.iter_mut().filter(|block| **block == usize::MAX).for_each(|block| *block = any);
        self.blocks[STRIPS..].copy_from_slice(&blocks);
    }

    #[inline(always)]
    fn read_scales(&mut self) {
        let (Some(mut scales), Some(factor)) = (self.scales.take(), element_factor(self.problem.spec.dtype)) else { return };
        self.runs(self.start, |lane, block, offset, len| {
            let first = self.problem.layout.scale(block, self.item.kv_heads.start + self.head, offset);
            let values = if self.problem.is_latent { self.problem.keys } else { self.problem.values };
            for (plane, scales) in [(self.problem.keys, &mut scales.keys), (values, &mut scales.values)] {
                // SAFETY: the run is within the plane; a type with a factor has scales, which are aligned: the layout says so.
                let stored = unsafe { std::slice::from_raw_parts(plane.add(first).cast::<u16>(), len) };
                for (scale, &bits) in scales[lane..lane + len].iter_mut().zip(stored) {
                    *scale = f32::from_bits(u32::from(bits) << 16) * factor;
                }
            }
        });
        self.scales = Some(scales);
    }

    /// The keys where they lie; or, where a vector is longer than a block, a copy of them at `copy`, `[units, TILE_KEYS]`.
    #[inline(always)]
    unsafe fn keys<S: Simd>(&self, copy: *mut f32) -> Keys {
        let Problem { layout, keys: plane, spec, .. } = *self.problem;
        let unit_bytes = layout.key_unit_bytes;
        let mut keys = Keys {
            strips: self.strips(plane, unit_bytes),
            unit_bytes,
            stride: layout.key_stride(),
            units: layout.vector_bytes / unit_bytes,
            ahead: Some(self.ahead_of_keys()),
        };
        if spec.block_size < S::LANES {
            let (copy, bytes) = (copy.cast::<u8>(), STRIP_KEYS * unit_bytes);
            for unit in 0..keys.units {
                for (i, strip) in keys.strips.iter().enumerate() {
                    let place = copy.add((unit * STRIPS + i) * bytes);
                    std::ptr::copy_nonoverlapping(strip.add(unit * keys.stride), place, bytes);
                }
            }
            keys.strips = std::array::from_fn(|i| copy.wrapping_add(i * bytes).cast_const());
            keys.stride = STRIPS * bytes;
        }
        keys
    }

    /// Writes the keys, `[steps, TILE_KEYS]`, without their scales. Lanes that are not read hold anything. `copy` is as long as
    /// `keys`.
    #[inline(always)]
    pub(super) unsafe fn load_keys<S: Simd, C: Cached>(&self, keys: *mut f32, copy: *mut f32) {
        self.keys::<S>(copy).widen::<S, C::Unit>(&self.lanes, keys);
    }

    /// [`score_rows`] over the keys where they lie.
    #[inline(always)]
    pub(super) unsafe fn score_direct<S: Simd, C: Cached>(&self, rows: usize, q: *const f32, copy: *mut f32, scores: *mut f32) {
        score_rows::<S, C::Product, C::Unit>(rows, q, &self.keys::<S>(copy), &self.lanes, scores);
    }

    /// Writes the keys that [`Self::load_keys`] wrote as values, `[lanes, padded]`.
    #[inline(always)]
    pub(super) unsafe fn transpose_keys(&self, keys: *const f32, values: *mut f32) {
        let dim = self.problem.params.head_dim;
        let padded = padded_dim(dim);
        for first in (0..padded).step_by(16) {
            for lane in self.lanes.clone() {
                let out = values.add(lane * padded + first);
                for c in 0..16 {
                    out.add(c).write(if first + c < dim { *keys.add((first + c) * TILE_KEYS + lane) } else { 0.0 });
                }
            }
        }
    }

    /// Writes the values, `[lanes, padded]`, without their scales. Lanes that are not read hold anything.
    #[inline(always)]
    pub(super) unsafe fn load_floats<S: Simd, E: Element>(&self, values: *mut f32) {
        let dim = self.problem.params.head_dim;
        let (padded, stored) = (padded_dim(dim), Stored::<E>::new(self));
        for lane in self.lanes.clone() {
            stored.ahead.prefetch(stored.vector_bytes, false);
            let row = stored.run(lane / STRIP_KEYS).add(lane % STRIP_KEYS * stored.vector_bytes);
            for c in (0..dim).step_by(S::LANES) {
                S::store(values.add(lane * padded + c), vector::<S, E>(row, c, dim));
            }
        }
    }

    /// The same of BF16 in pairs, `[steps, padded]`.
    #[inline(always)]
    pub(super) unsafe fn load_pairs<S: Simd>(&self, values: *mut f32) {
        let dim = self.problem.params.head_dim;
        let stored = StoredPairs::new(self);
        for step in self.lanes.start / 2..self.lanes.end.div_ceil(2) {
            stored.values.ahead.prefetch(2 * stored.values.vector_bytes, false);
            let strip = 2 * step / STRIP_KEYS;
            let place = (strip, stored.run(strip));
            for c in (0..dim).step_by(S::LANES) {
                let [pair] = stored.columns::<S, 1>(place, step % (STRIP_KEYS / 2), c);
                S::store(values.add(step * dim + c), pair);
            }
        }
    }

    /// [`accumulate_values`] over the values where they lie; `head_dim` is a multiple of 16.
    #[inline(always)]
    pub(super) unsafe fn accumulate_direct<S: Simd, C: Cached>(&self, block: &RowBlock, lanes: &Range<usize>) {
        accumulate_values::<S, _>(block, &C::values(self), lanes);
    }
}

/// Values where they lie.
pub(super) struct Stored<E> {
    strips: [*const u8; STRIPS],
    vector_bytes: usize,
    ahead: Ahead,
    element: PhantomData<E>,
}

impl<E: Element> Stored<E> {
    #[inline(always)]
    pub(super) fn new(tiles: &Tiles<'_>) -> Self {
        let Problem { values, layout, .. } = *tiles.problem;
        let vector_bytes = layout.vector_bytes;
        Self { strips: tiles.strips(values, vector_bytes), vector_bytes, ahead: tiles.ahead_of_values(), element: PhantomData }
    }
}

impl<E: Element> Values for Stored<E> {
    type Product = Single;
    const RUN: usize = STRIP_KEYS;
    #[inline(always)]
    fn prefetch_next(&self, columns: usize) {
        self.ahead.prefetch(Self::RUN * columns * E::BYTES, false);
    }
    #[inline(always)]
    unsafe fn run(&self, strip: usize) -> *const u8 {
        *self.strips.get_unchecked(strip)
    }
    #[inline(always)]
    unsafe fn columns<S: Simd, const C: usize>(&self, (_, first): (usize, *const u8), step: usize, c: usize) -> [S::V; C] {
        let row = first.add(step * self.vector_bytes + c * E::BYTES);
        let mut columns = [S::splat(0.0); C];
        for i in 0..C {
            columns[i] = E::load::<S>(row.add(i * S::LANES * E::BYTES));
        }
        columns
    }
}

/// Values of two keys side by side.
pub(super) struct StoredPairs {
    values: Stored<BF16>,
    /// Those that the item sees. Beside one of them another counts as the same, for it may be anything, and not a number.
    lanes: Range<usize>,
}

impl StoredPairs {
    #[inline(always)]
    pub(super) fn new(tiles: &Tiles<'_>) -> Self {
        Self { values: Stored::new(tiles), lanes: tiles.lanes() }
    }
}

impl Values for StoredPairs {
    type Product = Pairs;
    const RUN: usize = STRIP_KEYS;
    #[inline(always)]
    fn prefetch_next(&self, columns: usize) {
        self.values.ahead.prefetch(Pairs::PACKED * columns * BF16::BYTES, true);
    }
    #[inline(always)]
    unsafe fn run(&self, strip: usize) -> *const u8 {
        self.values.run(strip)
    }
    #[inline(always)]
    unsafe fn columns<S: Simd, const C: usize>(&self, (strip, first): (usize, *const u8), step: usize, c: usize) -> [S::V; C] {
        let lane = strip * STRIP_KEYS + 2 * step;
        let lanes = [lane.max(self.lanes.start), (lane + 1).min(self.lanes.end - 1)];
        let row = |lane: usize| first.add(lane % STRIP_KEYS * self.values.vector_bytes).cast::<u16>().add(c);
        let [first, second] = lanes.map(row);
        let mut columns = [S::splat(0.0); C];
        for i in 0..C {
            columns[i] = S::interleave_bf16(first.add(i * S::LANES), second.add(i * S::LANES));
        }
        columns
    }
}

/// What a type's scales are multiplied by, because its elements are loaded divided by it; `None` for types without scales.
fn element_factor(dtype: KvDType) -> Option<f32> {
    match dtype {
        KvDType::F32 | KvDType::F16 | KvDType::BF16 => None,
        KvDType::F8E4M3 => Some(256.0),
        KvDType::Int8 => Some(1.0),
    }
}

/// Elements `c..c + LANES` of a row of `dim`; 0 beyond its end.
#[inline(always)]
unsafe fn vector<S: Simd, E: Element>(row: *const u8, c: usize, dim: usize) -> S::V {
    if c + S::LANES <= dim {
        return E::load::<S>(row.add(c * E::BYTES));
    }
    E::load::<S>(tail::<E>(row, c, dim).as_ptr())
}

/// The bytes from element `c` on of a row of `dim`, fewer than 64; 0 beyond its end.
unsafe fn tail<E: Element>(row: *const u8, c: usize, dim: usize) -> [u8; 64] {
    let mut tail = [0u8; 64];
    std::ptr::copy_nonoverlapping(row.add(c * E::BYTES), tail.as_mut_ptr(), (dim - c) * E::BYTES);
    tail
}

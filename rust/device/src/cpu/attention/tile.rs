//! The keys and values of a tile, found through a block table and read as f32.
#![allow(unsafe_op_in_unsafe_fn)] // One contract for all: the machine has the tier, the pointers are those of `Tiles`.
#![allow(clippy::inline_always, clippy::needless_range_loop)] // Tier code must be inlined; counted loops over registers unroll.

use std::ops::Range;

use crate::{
    KvDType,
    cpu::simd::{Simd, prefetch},
};

use super::{
    Problem, TILE_KEYS,
    element::{BF16, Element, F8E4M3, F16, F32, Int8},
    plan::{Item, padded_dim},
    product::{Pairs, Product, Single},
    weigh::{RowBlock, Values, weigh_rows},
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
    /// Where in a plane the vectors of this tile lie, and those of the next one, of the item's first head. Lanes out of `lanes` repeat
    /// one within.
    offsets: [usize; 2 * TILE_KEYS],
    /// The head, counted from the item's first.
    head: usize,
    /// What is to be added to offsets for this head.
    shift: usize,
    /// The same for what comes after this head of this tile: another one, or the next tile's first.
    next_shift: usize,
    /// Scales of the head.
    scales: Option<Scales>,
}

/// Scales of a tile, times what the elements are loaded divided by. Lanes that are not read hold anything.
pub(super) struct Scales {
    pub(super) keys: [f32; TILE_KEYS],
    pub(super) values: [f32; TILE_KEYS],
}

impl<'a> Tiles<'a> {
    /// The tiles that hold `keys`, which are not empty; [`Self::advance`] comes to the first.
    #[inline(always)]
    pub(super) fn new(problem: &'a Problem<'a>, item: &'a Item, keys: Range<usize>) -> Self {
        let scales = element_factor(problem.spec.dtype).map(|_| Scales { keys: [0.0; TILE_KEYS], values: [0.0; TILE_KEYS] });
        let start = keys.start / TILE_KEYS * TILE_KEYS;
        let offsets = [0; 2 * TILE_KEYS];
        let mut tiles = Self { problem, item, keys, start, lanes: 0..0, offsets, head: 0, shift: 0, next_shift: 0, scales };
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
        self.offsets.copy_within(TILE_KEYS.., 0);
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

    /// Where the vectors lie of what comes after this head of this tile.
    #[inline(always)]
    fn next_offsets(&self) -> &[usize] {
        let first = if self.next_shift == 0 { TILE_KEYS } else { 0 };
        &self.offsets[first..first + TILE_KEYS]
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

    /// Finds where the tile that starts at `start` lies, if the item has it, and asks for its scales.
    #[inline(always)]
    fn look_up(&mut self, start: usize) {
        let (mut offsets, Problem { layout, keys, values, .. }) = ([usize::MAX; TILE_KEYS], self.problem);
        let mut any = self.offsets[0];
        self.runs(start, |lane, block, offset, len| {
            any = layout.vector(block, self.item.kv_heads.start, offset);
            for (i, place) in offsets[lane..lane + len].iter_mut().enumerate() {
                *place = any + i * layout.vector_bytes;
            }
            if self.scales.is_some() {
                for head in self.item.kv_heads.clone() {
                    let scale = layout.scale(block, head, offset);
                    prefetch(keys.wrapping_add(scale));
                    prefetch(values.wrapping_add(scale));
                }
            }
        });
        if start < self.keys.start || start + TILE_KEYS > self.keys.end {
            for place in offsets.iter_mut().filter(|place| **place == usize::MAX) {
                *place = any;
            }
        }
        self.offsets[TILE_KEYS..].copy_from_slice(&offsets);
    }

    #[inline(always)]
    fn read_scales(&mut self) {
        let (Some(mut scales), Some(factor)) = (self.scales.take(), element_factor(self.problem.spec.dtype)) else { return };
        self.runs(self.start, |lane, block, offset, len| {
            let first = self.problem.layout.scale(block, self.item.kv_heads.start + self.head, offset);
            for (plane, scales) in [(self.problem.keys, &mut scales.keys), (self.problem.values, &mut scales.values)] {
                // SAFETY: the run is within the plane; a type with a factor has scales, which are aligned: the layout says so.
                #[allow(clippy::cast_ptr_alignment)]
                let stored = unsafe { std::slice::from_raw_parts(plane.add(first).cast::<u16>(), len) };
                for (scale, &bits) in scales[lane..lane + len].iter_mut().zip(stored) {
                    *scale = f32::from_bits(u32::from(bits) << 16) * factor;
                }
            }
        });
        self.scales = Some(scales);
    }

    /// Writes the keys transposed, `[steps, TILE_KEYS]`, without their scales. Lanes that are not read hold anything.
    #[inline(always)]
    pub(super) unsafe fn load_keys<S: Simd, P: Product>(&self, keys: *mut f32) {
        let dim = self.problem.params.head_dim;
        match self.problem.spec.dtype {
            // Pairs stay together, as elements of 32 bits.
            KvDType::BF16 if P::PACKED == 2 => self.load_keys_as::<S, F32>(dim / 2, keys),
            other if P::PACKED == 2 => not_in_pairs(other),
            KvDType::F32 => self.load_keys_as::<S, F32>(dim, keys),
            KvDType::F16 => self.load_keys_as::<S, F16>(dim, keys),
            KvDType::BF16 => self.load_keys_as::<S, BF16>(dim, keys),
            KvDType::F8E4M3 => self.load_keys_as::<S, F8E4M3>(dim, keys),
            KvDType::Int8 => self.load_keys_as::<S, Int8>(dim, keys),
        }
    }

    #[inline(always)]
    unsafe fn load_keys_as<S: Simd, E: Element>(&self, dim: usize, keys: *mut f32) {
        let plane = self.problem.keys.add(self.shift);
        let (next_plane, next) = (self.problem.keys.wrapping_add(self.next_shift), self.next_offsets());
        let columns = E::columns::<S>();
        let chunks = dim.div_ceil(columns) as u32;
        let first = self.lanes.start / S::LANES * S::LANES;
        for lane in (first..self.lanes.end).step_by(S::LANES) {
            for c in (0..dim).step_by(columns) {
                let mut rows = [S::splat(0.0); 16];
                for j in 0..S::LANES {
                    rows[j] = row::<S, E>(plane.add(*self.offsets.get_unchecked(lane + j)), c, dim);
                    // In the order in which they lie, which the processor's own prefetchers follow.
                    let place = (c / columns * S::LANES + j) as u32;
                    let (ahead, part) = (place / chunks, place % chunks);
                    let next =
                        next_plane.wrapping_add(next.get_unchecked(lane + ahead as usize) + part as usize * columns * E::BYTES);
                    for line in (0..columns * E::BYTES).step_by(64) {
                        prefetch(next.wrapping_add(line));
                    }
                }
                E::store_columns::<S>(&mut rows, dim - c, keys.add(c * TILE_KEYS + lane), TILE_KEYS);
            }
        }
    }

    /// Writes the values, `[steps, padded]`, without their scales. Lanes that are not read hold anything.
    #[inline(always)]
    pub(super) unsafe fn load_values<S: Simd, P: Product>(&self, values: *mut f32) {
        match self.problem.spec.dtype {
            KvDType::BF16 if P::PACKED == 2 => self.load_value_pairs::<S>(values),
            other if P::PACKED == 2 => not_in_pairs(other),
            KvDType::F32 => self.load_values_as::<S, F32>(values),
            KvDType::F16 => self.load_values_as::<S, F16>(values),
            KvDType::BF16 => self.load_values_as::<S, BF16>(values),
            KvDType::F8E4M3 => self.load_values_as::<S, F8E4M3>(values),
            KvDType::Int8 => self.load_values_as::<S, Int8>(values),
        }
    }

    #[inline(always)]
    unsafe fn load_values_as<S: Simd, E: Element>(&self, values: *mut f32) {
        let dim = self.problem.params.head_dim;
        let padded = padded_dim(dim);
        for lane in self.lanes.clone() {
            let row = self.problem.values.add(self.offsets[lane] + self.shift);
            for c in (0..dim).step_by(S::LANES) {
                S::store(values.add(lane * padded + c), vector::<S, E>(row, c, dim));
            }
        }
    }

    #[inline(always)]
    unsafe fn load_value_pairs<S: Simd>(&self, values: *mut f32) {
        let dim = self.problem.params.head_dim;
        let plane = self.problem.values.wrapping_add(self.shift);
        let (next_plane, next) = (self.problem.values.wrapping_add(self.next_shift), self.next_offsets());
        for step in self.lanes.start / 2..self.lanes.end.div_ceil(2) {
            for lane in 2 * step..2 * step + 2 {
                for line in (0..2 * dim).step_by(64) {
                    prefetch(next_plane.wrapping_add(next[lane] + line));
                }
            }
            let [first, second] = [0, 1].map(|i| plane.wrapping_add(self.offsets[2 * step + i]));
            for c in (0..dim).step_by(S::LANES) {
                S::store(values.add(step * dim + c), S::interleave_bf16(first.add(2 * c).cast(), second.add(2 * c).cast()));
            }
        }
    }

    /// [`weigh_rows`] over the values where they lie; `head_dim` is a multiple of 16.
    #[inline(always)]
    pub(super) unsafe fn weigh_direct<S: Simd, P: Product>(&self, block: &RowBlock, lanes: &Range<usize>) {
        match self.problem.spec.dtype {
            KvDType::BF16 if P::PACKED == 2 => weigh_rows::<S, _>(block, &StoredPairs(Stored::new(self)), lanes),
            other if P::PACKED == 2 => not_in_pairs(other),
            KvDType::F32 => weigh_rows::<S, _>(block, &Stored::<F32>::new(self), lanes),
            KvDType::F16 => weigh_rows::<S, _>(block, &Stored::<F16>::new(self), lanes),
            KvDType::BF16 => weigh_rows::<S, _>(block, &Stored::<BF16>::new(self), lanes),
            KvDType::F8E4M3 => weigh_rows::<S, _>(block, &Stored::<F8E4M3>::new(self), lanes),
            KvDType::Int8 => weigh_rows::<S, _>(block, &Stored::<Int8>::new(self), lanes),
        }
    }
}

/// No kernel of pairs is compiled for types other than BF16.
#[cold]
fn not_in_pairs(dtype: KvDType) -> ! {
    unreachable!("{dtype:?} is not multiplied in pairs")
}

/// Values where they lie.
struct Stored<'a, E> {
    plane: *const u8,
    offsets: &'a [usize],
    /// The same for what comes after these.
    next_plane: *const u8,
    next_offsets: &'a [usize],
    vector_bytes: u32,
    element: std::marker::PhantomData<E>,
}

impl<'a, E> Stored<'a, E> {
    #[inline(always)]
    fn new(tiles: &'a Tiles<'_>) -> Self {
        let values = tiles.problem.values;
        Self {
            plane: values.wrapping_add(tiles.shift),
            offsets: &tiles.offsets[..TILE_KEYS],
            next_plane: values.wrapping_add(tiles.next_shift),
            next_offsets: tiles.next_offsets(),
            vector_bytes: tiles.problem.layout.vector_bytes as u32,
            element: std::marker::PhantomData,
        }
    }
}

impl<E: Element> Stored<'_, E> {
    /// Where column `c` of the value at `lane` lies; asks for as much of what comes next as `columns` take.
    #[inline(always)]
    unsafe fn at(&self, lane: usize, c: usize, columns: usize) -> *const u8 {
        let ahead = ((c / columns * TILE_KEYS + lane) * columns * E::BYTES) as u32;
        let next = self.next_offsets.get_unchecked((ahead / self.vector_bytes) as usize % TILE_KEYS);
        let next = self.next_plane.wrapping_add(next + (ahead % self.vector_bytes) as usize);
        for line in (0..columns * E::BYTES).step_by(64) {
            prefetch(next.wrapping_add(line));
        }
        self.plane.add(self.offsets.get_unchecked(lane) + c * E::BYTES)
    }
}

impl<E: Element> Values for Stored<'_, E> {
    type Product = Single;
    #[inline(always)]
    unsafe fn columns<S: Simd, const C: usize>(&self, lane: usize, c: usize) -> [S::V; C] {
        let row = self.at(lane, c, C * S::LANES);
        let mut columns = [S::splat(0.0); C];
        for i in 0..C {
            columns[i] = E::load::<S>(row.add(i * S::LANES * E::BYTES));
        }
        columns
    }
}

/// Values of two keys side by side.
struct StoredPairs<'a>(Stored<'a, BF16>);

impl Values for StoredPairs<'_> {
    type Product = Pairs;
    #[inline(always)]
    unsafe fn columns<S: Simd, const C: usize>(&self, step: usize, c: usize) -> [S::V; C] {
        let [first, second]: [*const u16; 2] = [0, 1].map(|i| self.0.at(2 * step + i, c, C * S::LANES).cast());
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

/// Elements of a row of `dim` from `c` on, as [`Element::load_row`] loads them; 0 beyond its end.
#[inline(always)]
unsafe fn row<S: Simd, E: Element>(row: *const u8, c: usize, dim: usize) -> S::V {
    if c + E::columns::<S>() <= dim {
        return E::load_row::<S>(row.add(c * E::BYTES));
    }
    E::load_row::<S>(tail::<E>(row, c, dim).as_ptr())
}

/// The bytes from element `c` on of a row of `dim`, fewer than 64; 0 beyond its end.
unsafe fn tail<E: Element>(row: *const u8, c: usize, dim: usize) -> [u8; 64] {
    let mut tail = [0u8; 64];
    std::ptr::copy_nonoverlapping(row.add(c * E::BYTES), tail.as_mut_ptr(), (dim - c) * E::BYTES);
    tail
}

//! Reading a tile of keys and values through a block table into f32.
#![allow(unsafe_op_in_unsafe_fn)] // One contract for all: the machine has the tier, the pointers are those of `Rows`.
#![allow(clippy::inline_always, clippy::needless_range_loop)] // Tier code must be inlined; counted loops over registers unroll.

use std::ops::Range;

use crate::{KvDType, cpu::simd::Simd};

use super::{Problem, TILE_KEYS, plan::Item};

/// Where the keys and values of a tile lie.
pub(super) struct Rows {
    keys: [*const u8; TILE_KEYS],
    values: [*const u8; TILE_KEYS],
    /// Which of them are read.
    lanes: Range<usize>,
}

impl Rows {
    /// Looks up the keys at positions `range`, which lie in the tile that starts at `start`.
    pub(super) fn look_up(problem: &Problem<'_>, item: &Item, start: usize, range: Range<usize>) -> Self {
        let (spec, group) = (problem.spec, problem.group);
        let table = &group.block_tables[item.request * group.max_blocks..][..group.max_blocks];
        let row_bytes = spec.head_dim * spec.dtype.size_bytes();
        let lanes = range.start - start..range.end - start;
        let mut rows = Self { keys: [problem.keys; TILE_KEYS], values: [problem.values; TILE_KEYS], lanes };
        let mut key = range.start;
        while key < range.end {
            let (block, offset) = (table[key / spec.block_size] as usize, key % spec.block_size);
            assert!(block < spec.num_blocks, "block {block} of {} at position {key}", spec.num_blocks);
            let first = ((block * spec.num_kv_heads + item.kv_head) * spec.block_size + offset) * row_bytes;
            let run = (spec.block_size - offset).min(range.end - key);
            for i in 0..run {
                // SAFETY: `block` and `kv_head` are within the plane, `offset + i` within the block.
                unsafe {
                    rows.keys[key - start + i] = problem.keys.add(first + i * row_bytes);
                    rows.values[key - start + i] = problem.values.add(first + i * row_bytes);
                }
            }
            key += run;
        }
        // Vectors of keys are loaded whole: lanes out of the range repeat one within.
        let any = rows.keys[rows.lanes.start];
        rows.keys[..rows.lanes.start].fill(any);
        rows.keys[rows.lanes.end..].fill(any);
        rows
    }

    /// Writes the keys transposed, `[head_dim, TILE_KEYS]`, and the values, `[TILE_KEYS, padded]`. Lanes that are not read hold
    /// anything.
    #[inline(always)]
    pub(super) unsafe fn load<S: Simd>(&self, dtype: KvDType, dim: usize, keys: *mut f32, values: *mut f32) {
        match dtype {
            KvDType::F32 => self.load_as::<S, F32>(dim, keys, values),
            KvDType::F16 => self.load_as::<S, F16>(dim, keys, values),
            KvDType::BF16 => self.load_as::<S, BF16>(dim, keys, values),
        }
    }

    #[inline(always)]
    unsafe fn load_as<S: Simd, E: Element>(&self, dim: usize, keys: *mut f32, values: *mut f32) {
        let padded = super::plan::padded_dim(dim);
        let first = self.lanes.start / S::LANES * S::LANES;
        for lane in (first..self.lanes.end).step_by(S::LANES) {
            for c in (0..dim).step_by(S::LANES) {
                let mut block = [S::splat(0.0); 16];
                for j in 0..S::LANES {
                    block[j] = load::<S, E>(self.keys[lane + j], c, dim);
                }
                S::transpose(block.as_mut_ptr());
                // A constant number of stores keeps the block in registers.
                let out = keys.add(c * TILE_KEYS + lane);
                if c + S::LANES <= dim {
                    for j in 0..S::LANES {
                        S::store(out.add(j * TILE_KEYS), block[j]);
                    }
                } else {
                    for j in 0..dim - c {
                        S::store(out.add(j * TILE_KEYS), block[j]);
                    }
                }
            }
        }
        for lane in self.lanes.clone() {
            for c in (0..dim).step_by(S::LANES) {
                S::store(values.add(lane * padded + c), load::<S, E>(self.values[lane], c, dim));
            }
        }
    }
}

/// Elements `c..c + LANES` of a row of `dim`; 0 beyond its end.
#[inline(always)]
unsafe fn load<S: Simd, E: Element>(row: *const u8, c: usize, dim: usize) -> S::V {
    if c + S::LANES <= dim {
        return E::load::<S>(row.add(c * E::BYTES));
    }
    let mut tail = [0u8; 64];
    std::ptr::copy_nonoverlapping(row.add(c * E::BYTES), tail.as_mut_ptr(), (dim - c) * E::BYTES);
    E::load::<S>(tail.as_ptr())
}

/// How an element of the KV cache becomes f32.
trait Element {
    const BYTES: usize;
    /// Loads `LANES` elements.
    unsafe fn load<S: Simd>(p: *const u8) -> S::V;
}

struct F32;
struct F16;
struct BF16;

impl Element for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::V {
        S::load(p.cast())
    }
}

impl Element for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::V {
        S::load_f16(p.cast())
    }
}

impl Element for BF16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::V {
        S::load_bf16(p.cast())
    }
}

//! Reading a tile of keys and values through a block table into f32.
#![allow(unsafe_op_in_unsafe_fn)] // One contract for all: the machine has the tier, the pointers are those of `Rows`.
#![allow(clippy::cast_ptr_alignment)] // Scales are aligned: the layout says so.
#![allow(clippy::inline_always, clippy::needless_range_loop)] // Tier code must be inlined; counted loops over registers unroll.

use std::{marker::PhantomData, ops::Range};

use half::bf16;

use crate::{KvDType, cpu::simd::Simd};

use super::{
    Problem, TILE_KEYS,
    kernel::Scratch,
    plan::Item,
    weigh::{Values, weigh_rows},
};

/// Where the keys and values of a tile lie.
pub(super) struct Rows {
    keys: [*const u8; TILE_KEYS],
    values: [*const u8; TILE_KEYS],
    /// What the elements of each are multiplied by, for types with scales.
    pub(super) scales: Option<Scales>,
    /// Which of them are read.
    lanes: Range<usize>,
}

/// Scales of a tile, `[TILE_KEYS]` each; 0 for lanes that are not read.
pub(super) struct Scales {
    pub(super) keys: [f32; TILE_KEYS],
    pub(super) values: [f32; TILE_KEYS],
}

impl Rows {
    /// Looks up the keys at positions `range`, which lie in the tile that starts at `start`.
    pub(super) fn look_up(problem: &Problem<'_>, item: &Item, start: usize, range: Range<usize>) -> Self {
        let (spec, group) = (problem.spec, problem.group);
        let table = &group.block_tables[item.request * group.max_blocks..][..group.max_blocks];
        let layout = problem.layout;
        let factor = element_factor(spec.dtype);
        let lanes = range.start - start..range.end - start;
        let scales = factor.map(|_| Scales { keys: [0.0; TILE_KEYS], values: [0.0; TILE_KEYS] });
        let mut rows = Self { keys: [problem.keys; TILE_KEYS], values: [problem.values; TILE_KEYS], scales, lanes };
        let mut key = range.start;
        while key < range.end {
            let (block, offset) = (table[key / spec.block_size] as usize, key % spec.block_size);
            assert!(block < spec.num_blocks, "block {block} of {} at position {key}", spec.num_blocks);
            let (first, first_scale) = (layout.vector(block, item.kv_head, offset), layout.scale(block, item.kv_head, offset));
            let run = (spec.block_size - offset).min(range.end - key);
            for i in 0..run {
                // SAFETY: `block` and `kv_head` are within the plane, `offset + i` within the block.
                unsafe {
                    rows.keys[key - start + i] = problem.keys.add(first + i * layout.vector_bytes);
                    rows.values[key - start + i] = problem.values.add(first + i * layout.vector_bytes);
                }
            }
            if let (Some(scales), Some(factor)) = (&mut rows.scales, factor) {
                for i in 0..run {
                    // SAFETY: as above; a type with a factor has scales, which are aligned.
                    let scale = |plane: *const u8| unsafe { plane.add(first_scale + 2 * i).cast::<bf16>().read() };
                    scales.keys[key - start + i] = scale(problem.keys).to_f32() * factor;
                    scales.values[key - start + i] = scale(problem.values).to_f32() * factor;
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

    /// Asks for the keys and values at positions `range`, which are needed next.
    #[inline(always)]
    pub(super) unsafe fn prefetch(problem: &Problem<'_>, item: &Item, range: Range<usize>) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            let (spec, group, layout) = (problem.spec, problem.group, problem.layout);
            let table = &group.block_tables[item.request * group.max_blocks..][..group.max_blocks];
            let mut key = range.start;
            while key < range.end {
                let (block, offset) = (table[key / spec.block_size] as usize, key % spec.block_size);
                let run = (spec.block_size - offset).min(range.end - key);
                let first = layout.vector(block, item.kv_head, offset);
                for line in (first..first + run * layout.vector_bytes).step_by(64) {
                    // A prefetch may be of any address.
                    _mm_prefetch::<_MM_HINT_T0>(problem.keys.wrapping_add(line).cast());
                    _mm_prefetch::<_MM_HINT_T0>(problem.values.wrapping_add(line).cast());
                }
                key += run;
            }
        }
    }

    /// Writes the keys transposed, `[head_dim, TILE_KEYS]`, without their scales. Lanes that are not read hold anything.
    #[inline(always)]
    pub(super) unsafe fn load_keys<S: Simd>(&self, dtype: KvDType, dim: usize, keys: *mut f32) {
        match dtype {
            KvDType::F32 => self.load_keys_as::<S, F32>(dim, keys),
            KvDType::F16 => self.load_keys_as::<S, F16>(dim, keys),
            KvDType::BF16 => self.load_keys_as::<S, BF16>(dim, keys),
            KvDType::F8E4M3 => self.load_keys_as::<S, F8E4M3>(dim, keys),
            KvDType::Int8 => self.load_keys_as::<S, Int8>(dim, keys),
        }
    }

    #[inline(always)]
    unsafe fn load_keys_as<S: Simd, E: Element>(&self, dim: usize, keys: *mut f32) {
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
    }

    /// Writes the values, `[TILE_KEYS, padded]`, without their scales. Lanes that are not read hold anything.
    #[inline(always)]
    pub(super) unsafe fn load_values<S: Simd>(&self, dtype: KvDType, dim: usize, values: *mut f32) {
        match dtype {
            KvDType::F32 => self.load_values_as::<S, F32>(dim, values),
            KvDType::F16 => self.load_values_as::<S, F16>(dim, values),
            KvDType::BF16 => self.load_values_as::<S, BF16>(dim, values),
            KvDType::F8E4M3 => self.load_values_as::<S, F8E4M3>(dim, values),
            KvDType::Int8 => self.load_values_as::<S, Int8>(dim, values),
        }
    }

    #[inline(always)]
    unsafe fn load_values_as<S: Simd, E: Element>(&self, dim: usize, values: *mut f32) {
        let padded = super::plan::padded_dim(dim);
        for lane in self.lanes.clone() {
            for c in (0..dim).step_by(S::LANES) {
                S::store(values.add(lane * padded + c), load::<S, E>(self.values[lane], c, dim));
            }
        }
    }

    /// [`weigh_rows`] over the values where they lie; `dim` is a multiple of 16.
    #[inline(always)]
    pub(super) unsafe fn weigh_direct<S: Simd>(
        &self,
        dtype: KvDType,
        s: &Scratch,
        rows: Range<usize>,
        lanes: &Range<usize>,
        dim: usize,
    ) {
        let values = &self.values;
        match dtype {
            KvDType::F32 => weigh_rows::<S, _>(s, &Stored::<F32>(values, PhantomData), rows, lanes, dim),
            KvDType::F16 => weigh_rows::<S, _>(s, &Stored::<F16>(values, PhantomData), rows, lanes, dim),
            KvDType::BF16 => weigh_rows::<S, _>(s, &Stored::<BF16>(values, PhantomData), rows, lanes, dim),
            KvDType::F8E4M3 => weigh_rows::<S, _>(s, &Stored::<F8E4M3>(values, PhantomData), rows, lanes, dim),
            KvDType::Int8 => weigh_rows::<S, _>(s, &Stored::<Int8>(values, PhantomData), rows, lanes, dim),
        }
    }
}

/// Values where they lie.
struct Stored<'a, E>(&'a [*const u8; TILE_KEYS], PhantomData<E>);

impl<E: Element> Values for Stored<'_, E> {
    #[inline(always)]
    unsafe fn at<S: Simd>(&self, lane: usize, c: usize) -> S::V {
        E::load::<S>(self.0.get_unchecked(lane).add(c * E::BYTES))
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
struct F8E4M3;
struct Int8;

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

impl Element for F8E4M3 {
    const BYTES: usize = 1;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::V {
        S::load_e4m3(p)
    }
}

impl Element for Int8 {
    const BYTES: usize = 1;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::V {
        S::load_i8(p.cast())
    }
}

//! How the elements of each cache type become f32.
#![allow(unsafe_op_in_unsafe_fn)] // One contract for all: that of `Simd`.
#![allow(clippy::inline_always, clippy::needless_range_loop)] // Tier code must be inlined; counted loops over registers unroll.

use crate::cpu::simd::Simd;

/// How an element of the KV cache becomes f32.
pub(super) trait Element {
    const BYTES: usize;
    /// Elements that are transposed together as 32 bits, where a row is loaded as it is stored; 1: a row is loaded as f32.
    const PACKED: usize = 1;
    /// Of each 32 bits element `i`, as f32.
    #[inline(always)]
    unsafe fn unpack<S: Simd>(v: S::V, _i: usize) -> S::V {
        v
    }
    /// Loads `LANES` elements.
    unsafe fn load<S: Simd>(p: *const u8) -> S::V;
    /// Elements of a row that are transposed at once, as [`Self::load_row`] loads them: as many as a vector holds where that takes
    /// fewer steps than to transpose them as f32.
    #[inline(always)]
    fn columns<S: Simd>() -> usize {
        Self::PACKED * S::LANES
    }
    /// Loads [`Self::columns`] elements.
    #[inline(always)]
    unsafe fn load_row<S: Simd>(p: *const u8) -> S::V {
        if Self::PACKED == 1 { Self::load::<S>(p) } else { S::load(p.cast()) }
    }
    /// Stores `LANES` rows as columns, the first `columns` of them, at a distance of `stride` floats.
    #[inline(always)]
    unsafe fn store_columns<S: Simd>(rows: &mut [S::V; 16], columns: usize, out: *mut f32, stride: usize) {
        S::transpose(rows.as_mut_ptr());
        // Counted and compared like this, here and below, the rows stay in registers.
        for j in 0..Self::PACKED * S::LANES {
            if j < columns {
                S::store(out.add(j * stride), Self::unpack::<S>(rows[j / Self::PACKED], j % Self::PACKED));
            }
        }
    }
}

pub(super) struct F32;
pub(super) struct F16;
pub(super) struct BF16;
pub(super) struct F8E4M3;
pub(super) struct Int8;

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
    #[inline(always)]
    fn columns<S: Simd>() -> usize {
        if S::TRANSPOSES_F16 { 2 * S::LANES } else { S::LANES }
    }
    #[inline(always)]
    unsafe fn load_row<S: Simd>(p: *const u8) -> S::V {
        if S::TRANSPOSES_F16 { S::load(p.cast()) } else { Self::load::<S>(p) }
    }
    #[inline(always)]
    unsafe fn store_columns<S: Simd>(rows: &mut [S::V; 16], columns: usize, out: *mut f32, stride: usize) {
        if S::TRANSPOSES_F16 {
            S::transpose_f16(rows.as_mut_ptr());
        } else {
            S::transpose(rows.as_mut_ptr());
        }
        for j in 0..Self::columns::<S>() {
            if j < columns {
                let column = if S::TRANSPOSES_F16 { S::f16_half(rows[j / 16 * 8 + j % 8], j / 8 % 2) } else { rows[j] };
                S::store(out.add(j * stride), column);
            }
        }
    }
}

impl Element for BF16 {
    const BYTES: usize = 2;
    const PACKED: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::V {
        S::load_bf16(p.cast())
    }
    #[inline(always)]
    unsafe fn unpack<S: Simd>(v: S::V, i: usize) -> S::V {
        S::unpack_bf16(v, i)
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
    const PACKED: usize = 4;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::V {
        S::load_i8(p.cast())
    }
    #[inline(always)]
    unsafe fn unpack<S: Simd>(v: S::V, i: usize) -> S::V {
        S::unpack_i8(v, i)
    }
}

//! How the elements of each cache type become f32.
#![allow(unsafe_op_in_unsafe_fn)] // One contract for all: that of `Simd`.
#![allow(clippy::inline_always, clippy::needless_range_loop)] // Tier code must be inlined; counted loops over registers unroll.

use crate::cpu::simd::Simd;

/// How an element of the KV cache becomes f32.
pub(super) trait Element {
    const BYTES: usize;
    /// Loads `LANES` elements.
    unsafe fn load<S: Simd>(p: *const u8) -> S::V;
    /// Elements of a row that are transposed at once, as [`Self::load_row`] loads them: as many as a vector holds where that takes
    /// fewer steps than to transpose them as f32.
    #[inline(always)]
    fn columns<S: Simd>() -> usize {
        S::LANES
    }
    /// Loads [`Self::columns`] elements.
    #[inline(always)]
    unsafe fn load_row<S: Simd>(p: *const u8) -> S::V {
        Self::load::<S>(p)
    }
    /// Stores `LANES` rows as columns, the first `columns` of them, at a distance of `stride` floats.
    #[inline(always)]
    unsafe fn store_columns<S: Simd>(rows: &mut [S::V; 16], columns: usize, out: *mut f32, stride: usize) {
        S::transpose(rows.as_mut_ptr());
        // Counted and compared like this, here and below, the rows stay in registers.
        for j in 0..S::LANES {
            if j < columns {
                S::store(out.add(j * stride), rows[j]);
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
        let half = S::LANES / 2;
        for j in 0..Self::columns::<S>() {
            if j < columns {
                let pair = j / S::LANES * half + j % half;
                let column = if S::TRANSPOSES_F16 { S::f16_half(rows[pair], j / half % 2) } else { rows[j] };
                S::store(out.add(j * stride), column);
            }
        }
    }
}

impl Element for BF16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::V {
        S::load_bf16(p.cast())
    }
    #[inline(always)]
    fn columns<S: Simd>() -> usize {
        2 * S::LANES
    }
    #[inline(always)]
    unsafe fn load_row<S: Simd>(p: *const u8) -> S::V {
        S::load(p.cast())
    }
    #[inline(always)]
    unsafe fn store_columns<S: Simd>(rows: &mut [S::V; 16], columns: usize, out: *mut f32, stride: usize) {
        S::transpose(rows.as_mut_ptr());
        for j in 0..2 * S::LANES {
            if j < columns {
                S::store(out.add(j * stride), S::unpack_bf16(rows[j / 2], j % 2));
            }
        }
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
    #[inline(always)]
    fn columns<S: Simd>() -> usize {
        4 * S::LANES
    }
    #[inline(always)]
    unsafe fn load_row<S: Simd>(p: *const u8) -> S::V {
        S::load(p.cast())
    }
    #[inline(always)]
    unsafe fn store_columns<S: Simd>(rows: &mut [S::V; 16], columns: usize, out: *mut f32, stride: usize) {
        S::transpose(rows.as_mut_ptr());
        for j in 0..4 * S::LANES {
            if j < columns {
                S::store(out.add(j * stride), S::unpack_i8(rows[j / 4], j % 4));
            }
        }
    }
}

//! How the elements of each cache type become f32.
#![allow(unsafe_op_in_unsafe_fn)] // One contract for all: that of `Simd`.
#![allow(clippy::inline_always)] // ISA code must be inlined.

use crate::cpu::simd::Simd;

/// How an element of the KV cache becomes f32.
pub(super) trait Element {
    const BYTES: usize;
    /// Loads `LANES` elements.
    unsafe fn load<S: Simd>(p: *const u8) -> S::V;
}

/// How the units of `LANES` keys become f32.
pub(super) trait KeyUnit {
    /// Dimensions of a unit, a vector each.
    const DIMS: usize;
    /// Loads units as they are unpacked.
    unsafe fn load_units<S: Simd>(p: *const u8) -> S::V;
    /// Dimension `i` of loaded units.
    #[inline(always)]
    unsafe fn unpack<S: Simd>(v: S::V, _i: usize) -> S::V {
        v
    }
}

impl<E: Element> KeyUnit for E {
    const DIMS: usize = 1;
    #[inline(always)]
    unsafe fn load_units<S: Simd>(p: *const u8) -> S::V {
        E::load::<S>(p)
    }
}

pub(super) struct F32;
pub(super) struct F16;
pub(super) struct BF16;
/// Two dimensions of a key.
pub(super) struct BF16Pair;
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
}

impl Element for BF16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::V {
        S::load_bf16(p.cast())
    }
}

impl KeyUnit for BF16Pair {
    const DIMS: usize = 2;
    #[inline(always)]
    unsafe fn load_units<S: Simd>(p: *const u8) -> S::V {
        S::load(p.cast())
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
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::V {
        S::load_i8(p.cast())
    }
}

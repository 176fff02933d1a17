//! What queries and keys, and weights and values, are multiplied as.
#![allow(unsafe_op_in_unsafe_fn)] // One contract for all: that of `Simd`.
#![allow(clippy::inline_always)] // ISA code must be inlined.

use crate::cpu::simd::{Simd, exp};

/// Products of elements that lie `PACKED` to a lane of 32 bits: neighbours along what is summed over.
pub(super) trait Product {
    const PACKED: usize;
    /// Whether they are so fast that lines are prefetched after each unit of keys and step of values, each of them twice.
    const FAST: bool;
    /// `acc` and the products of each lane.
    unsafe fn add<S: Simd>(acc: S::V, x: S::V, y: S::V) -> S::V;
    /// What an element, or each of several, is multiplied by to be summed itself.
    unsafe fn one<S: Simd>() -> S::V;
    /// e^x as precisely as it is then multiplied; 0 for minus infinity.
    unsafe fn exp<S: Simd>(x: S::V) -> S::V;
    /// Packs `LANES` elements of one row, from each of `PACKED` vectors on; returns how many vectors that makes of 8.
    unsafe fn pack<S: Simd>(v: &mut [S::V; 8], vectors: usize) -> usize;
}

/// Of f32.
pub(super) struct Single;

impl Product for Single {
    const PACKED: usize = 1;
    const FAST: bool = false;
    #[inline(always)]
    unsafe fn add<S: Simd>(acc: S::V, x: S::V, y: S::V) -> S::V {
        S::fma(x, y, acc)
    }
    #[inline(always)]
    unsafe fn one<S: Simd>() -> S::V {
        S::splat(1.0)
    }
    #[inline(always)]
    unsafe fn exp<S: Simd>(x: S::V) -> S::V {
        exp::<S>(x)
    }
    #[inline(always)]
    unsafe fn pack<S: Simd>(_: &mut [S::V; 8], vectors: usize) -> usize {
        vectors
    }
}

/// Of bfloat16.
pub(super) struct Pairs;

impl Product for Pairs {
    const PACKED: usize = 2;
    const FAST: bool = true;
    #[inline(always)]
    unsafe fn add<S: Simd>(acc: S::V, x: S::V, y: S::V) -> S::V {
        S::dot_bf16(acc, x, y)
    }
    #[inline(always)]
    unsafe fn one<S: Simd>() -> S::V {
        S::splat(f32::from_bits(0x3f80_3f80))
    }
    #[inline(always)]
    unsafe fn exp<S: Simd>(x: S::V) -> S::V {
        S::exp_bf16(x)
    }
    #[inline(always)]
    unsafe fn pack<S: Simd>(v: &mut [S::V; 8], vectors: usize) -> usize {
        for i in 0..vectors / 2 {
            v[i] = S::pack_bf16(v[2 * i], v[2 * i + 1]);
        }
        vectors / 2
    }
}

//! What a cache holds, as it is multiplied where it lies: one type for each kernel, and a function for each type and ISA. All
//! types in one function would be a function that takes a compiler minutes.
#![allow(unsafe_op_in_unsafe_fn)] // One contract for all, stated on `kernel::attend`.
#![allow(clippy::inline_always)] // ISA code must be inlined.

use std::ops::Range;

use crate::cpu::simd::{Simd, isa_entry};

use super::{
    accumulate::{Loaded, RowBlock, Values, accumulate_values},
    element::{BF16, BF16Pair, Element, F32, KeyUnit},
    product::{Pairs, Product, Single},
    score::{Keys, score_rows},
    tile::{Stored, StoredPairs, Tiles},
};

/// A kernel's view of a cache.
pub(super) trait Cached {
    type Product: Product;
    /// What its keys consist of.
    type Unit: KeyUnit;
    type Values: Values;
    /// Those of a tile.
    fn values(tiles: &Tiles<'_>) -> Self::Values;
    /// [`score_rows`] over keys that were loaded before. As floats they are alike for all types, which share one function.
    #[inline(always)]
    unsafe fn score_loaded<S: Simd>(rows: usize, q: *const f32, keys: &Keys, lanes: &Range<usize>, scores: *mut f32) {
        score_loaded_isa(S::ISA, rows, q, keys, lanes, scores);
    }
    /// [`accumulate_values`] over values that were loaded before, likewise.
    unsafe fn accumulate_loaded<S: Simd>(block: &RowBlock, values: &Loaded<Self::Product>, lanes: &Range<usize>);
}

impl<E: Element> Cached for E {
    type Product = Single;
    type Unit = E;
    type Values = Stored<E>;
    #[inline(always)]
    fn values(tiles: &Tiles<'_>) -> Stored<E> {
        Stored::new(tiles)
    }
    #[inline(always)]
    unsafe fn accumulate_loaded<S: Simd>(block: &RowBlock, values: &Loaded<Single>, lanes: &Range<usize>) {
        accumulate_loaded_isa(S::ISA, block, values, lanes);
    }
}

/// BF16 where two dimensions of a key lie together.
impl Cached for BF16Pair {
    type Product = Single;
    type Unit = Self;
    type Values = Stored<BF16>;
    #[inline(always)]
    fn values(tiles: &Tiles<'_>) -> Stored<BF16> {
        Stored::new(tiles)
    }
    #[inline(always)]
    unsafe fn accumulate_loaded<S: Simd>(block: &RowBlock, values: &Loaded<Single>, lanes: &Range<usize>) {
        accumulate_loaded_isa(S::ISA, block, values, lanes);
    }
}

/// The same, multiplied in pairs: those of keys are elements of 32 bits.
impl Cached for Pairs {
    type Product = Self;
    type Unit = F32;
    type Values = StoredPairs;
    #[inline(always)]
    fn values(tiles: &Tiles<'_>) -> StoredPairs {
        StoredPairs::new(tiles)
    }
    #[inline(always)]
    unsafe fn score_loaded<S: Simd>(rows: usize, q: *const f32, keys: &Keys, lanes: &Range<usize>, scores: *mut f32) {
        score_rows::<S, Self, F32>(rows, q, keys, lanes, scores);
    }
    #[inline(always)]
    unsafe fn accumulate_loaded<S: Simd>(block: &RowBlock, values: &Loaded<Self>, lanes: &Range<usize>) {
        accumulate_values::<S, _>(block, values, lanes);
    }
}

#[inline(always)]
unsafe fn score_floats<S: Simd>(rows: usize, q: *const f32, keys: &Keys, lanes: &Range<usize>, scores: *mut f32) {
    score_rows::<S, Single, F32>(rows, q, keys, lanes, scores);
}

#[inline(always)]
unsafe fn accumulate_floats<S: Simd>(block: &RowBlock, values: &Loaded<Single>, lanes: &Range<usize>) {
    accumulate_values::<S, _>(block, values, lanes);
}

isa_entry! {
    fn score_loaded_isa => score_floats(rows: usize, q: *const f32, keys: &Keys, lanes: &Range<usize>, scores: *mut f32)
}
isa_entry! { fn accumulate_loaded_isa => accumulate_floats(block: &RowBlock, values: &Loaded<Single>, lanes: &Range<usize>) }

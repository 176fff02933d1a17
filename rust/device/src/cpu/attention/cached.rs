//! What a cache holds, as it is multiplied where it lies: one type for each kernel, and a function for each type and ISA. All
//! types in one function would be a function that takes a compiler minutes.
#![allow(unsafe_op_in_unsafe_fn)] // One contract for all, stated on `kernel::attend`.
#![allow(clippy::inline_always)] // ISA code must be inlined.

use std::{marker::PhantomData, ops::Range};

use crate::cpu::simd::{Simd, isa_entry};

use super::{
    accumulate::{Loaded, RowBlock, Values, accumulate_values},
    element::{Element, F32, KeyUnit},
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
    /// Writes the values, `[steps, padded]`, without their scales. Lanes that are not read hold anything.
    unsafe fn load_values<S: Simd>(tiles: &Tiles<'_>, values: *mut f32);
    /// [`score_rows`] over keys that were loaded before.
    unsafe fn score_loaded<S: Simd>(rows: usize, q: *const f32, keys: &Keys, lanes: &Range<usize>, scores: *mut f32);
    /// [`accumulate_values`] over values that were loaded before.
    unsafe fn accumulate_loaded<S: Simd>(block: &RowBlock, values: &Loaded<Self::Product>, lanes: &Range<usize>);
}

/// Elements that are multiplied as f32, those of keys in units `U`.
pub(super) struct AsFloats<E, U = E>(PhantomData<(E, U)>);

/// Once loaded, elements are alike for all types, which share one function an ISA.
impl<E: Element, U: KeyUnit> Cached for AsFloats<E, U> {
    type Product = Single;
    type Unit = U;
    type Values = Stored<E>;
    #[inline(always)]
    fn values(tiles: &Tiles<'_>) -> Stored<E> {
        Stored::new(tiles)
    }
    #[inline(always)]
    unsafe fn load_values<S: Simd>(tiles: &Tiles<'_>, values: *mut f32) {
        tiles.load_floats::<S, E>(values);
    }
    #[inline(always)]
    unsafe fn score_loaded<S: Simd>(rows: usize, q: *const f32, keys: &Keys, lanes: &Range<usize>, scores: *mut f32) {
        score_floats_isa(S::ISA, rows, q, keys, lanes, scores);
    }
    #[inline(always)]
    unsafe fn accumulate_loaded<S: Simd>(block: &RowBlock, values: &Loaded<Single>, lanes: &Range<usize>) {
        accumulate_floats_isa(S::ISA, block, values, lanes);
    }
}

/// BF16 in pairs: those of keys stay together, as elements of 32 bits.
impl Cached for Pairs {
    type Product = Self;
    type Unit = F32;
    type Values = StoredPairs;
    #[inline(always)]
    fn values(tiles: &Tiles<'_>) -> StoredPairs {
        StoredPairs::new(tiles)
    }
    #[inline(always)]
    unsafe fn load_values<S: Simd>(tiles: &Tiles<'_>, values: *mut f32) {
        tiles.load_pairs::<S>(values);
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
    fn score_floats_isa => score_floats(rows: usize, q: *const f32, keys: &Keys, lanes: &Range<usize>, scores: *mut f32)
}
isa_entry! { fn accumulate_floats_isa => accumulate_floats(block: &RowBlock, values: &Loaded<Single>, lanes: &Range<usize>) }

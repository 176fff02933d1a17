//! The left operand: activations rounded to bf16, in tiles.

use std::{
    arch::x86_64::{__m512bh, __m512i, _mm512_cvtne2ps_pbh, _mm512_loadu_ps, _mm512_storeu_si512},
    sync::atomic::{AtomicUsize, Ordering},
};

use super::{Amx, K_TILE, KBlocks, MAX_K, PANEL, TILE_ELEMENTS, Workspace};
use crate::{DeviceError, cpu::ThreadPool, mmap::Pages};

/// Rows of half a block; what workers claim.
const HALF: usize = 16;
/// Below this many values one thread packs them.
const MIN_PARALLEL: usize = 1 << 13;

/// `[M, K]` as `[K block][block of 32 rows][k tile][32 rows][32 columns]`, rows padded with zeros to a multiple of 16; reused
/// from product to product.
pub struct ActTiles {
    data: Pages<u16>,
    rows: usize,
    k: usize,
}

impl ActTiles {
    /// An empty one.
    pub fn new() -> Result<Self, DeviceError> {
        Ok(Self { data: Pages::zeroed(0)?, rows: 0, k: 0 })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Packs `rows` rows of `k` columns: `row(i, x)` writes row i to `x`, `[k]`. Workers keep a row in their scratch.
    ///
    /// # Panics
    /// When `k` is not a multiple of 32 or above [`MAX_K`], or the workspace has fewer workers than the pool.
    pub fn pack(
        &mut self,
        _proof: Amx,
        pool: &ThreadPool,
        workspace: &Workspace,
        (rows, k): (usize, usize),
        row: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) -> Result<(), DeviceError> {
        assert!(k.is_multiple_of(K_TILE) && k <= MAX_K, "{k} columns: not a multiple of {K_TILE} up to {MAX_K}");
        let blocks = rows.div_ceil(PANEL);
        let needed = blocks * PANEL * k;
        if self.data.as_slice().len() < needed {
            self.data = Pages::zeroed(needed)?;
            self.data.advise_huge();
        }
        (self.rows, self.k) = (rows, k);
        let out = Lines(self.data.as_mut_slice().as_mut_ptr());
        let padded = rows.next_multiple_of(HALF);
        let next = AtomicUsize::new(0);
        let worker = |id: usize| {
            let mut scratch = workspace.scratch(id);
            let x = &mut scratch.c.as_mut_slice()[..k];
            loop {
                let start = next.fetch_add(HALF, Ordering::Relaxed);
                if start >= padded {
                    break;
                }
                for r in start..start + HALF {
                    if r < rows {
                        row(r, x);
                    } else {
                        x.fill(0.0);
                    }
                    for (first, len) in KBlocks::of(k).iter() {
                        let line = (first * blocks + r / PANEL * len) * TILE_ELEMENTS + r % PANEL * K_TILE;
                        for (t, x) in x[first * K_TILE..(first + len) * K_TILE].as_chunks().0.iter().enumerate() {
                            // SAFETY: the processor has AVX-512 BF16 (`_proof`); the line lies within `needed` and belongs to row
                            // r alone, which one worker packs.
                            unsafe { round_line(x, out.at(line + t * TILE_ELEMENTS)) }
                        }
                    }
                }
            }
        };
        if padded * k < MIN_PARALLEL {
            worker(0);
        } else {
            pool.run_available(&worker);
        }
        Ok(())
    }

    /// Rows `32 * block..` of the K block that starts at k tile `first` and has `len`: `[len][32][32]`.
    pub(super) fn block(&self, (first, len): (usize, usize), block: usize) -> &[u16] {
        let blocks = self.rows.div_ceil(PANEL);
        let start = (first * blocks + block * len) * TILE_ELEMENTS;
        &self.data.as_slice()[start..start + len * TILE_ELEMENTS]
    }
}

/// The start of a buffer that threads write disjoint lines of.
struct Lines(*mut u16);
// SAFETY: `at` only computes an address; whoever writes there promises to be alone.
unsafe impl Sync for Lines {}

impl Lines {
    fn at(&self, i: usize) -> *mut u16 {
        self.0.wrapping_add(i)
    }
}

/// Rounds 32 values to bf16 (to nearest, ties to even).
///
/// # Safety
/// `out` is valid for 64 bytes.
#[target_feature(enable = "avx512f,avx512bf16")]
pub unsafe fn round_line(x: &[f32; K_TILE], out: *mut u16) {
    // SAFETY: x has 32 values; `out` is the caller's promise. A __m512bh is 64 plain bytes.
    unsafe {
        let (low, high) = (_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(x.as_ptr().add(16)));
        _mm512_storeu_si512(out.cast(), std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low)));
    }
}

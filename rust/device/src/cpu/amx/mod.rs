//! Matrix products of many rows by Intel AMX (bf16).
//!
//! `C[M, N] = A[M, K] * W[N, K]^T` in f32, from operands rounded to bf16. One step of the inner loop multiplies 32 rows of A by a
//! panel of 32 rows of W over 32 columns, with all eight tile registers:
//!
//! ```text
//!                      tmm6    tmm7       panel, a k tile: [2 tiles of 16 rows of W][16 column pairs][16 rows][2 columns], 2 KiB
//!      A, a k tile:   -------------
//!      [2][16 rows]   tmm4 | tmm0 | tmm1   C scratch: [32 rows][32], 4 KiB
//!      [32 columns]   tmm5 | tmm2 | tmm3
//! ```
//!
//! - [`ActTiles`]: A, rounded and laid out in tiles once for all products that share it.
//! - [`multiply`]: workers claim several panels at a time; a claim's C stays in the worker's scratch until K is done, then goes
//!   to its epilogue.
//!
//! Every output is the sum over k tiles in order, each tile one `tdpbf16ps`, carried in f32. A carried sum is stored and loaded
//! exactly, so the bits of a row depend on neither the number of rows nor on blocks, claims and threads.
//!
//! Cost, a k tile step (65,536 operations): 64 cycles of AMX, 4 tile loads (2 KiB of panel from L1, 2 KiB of A from L2,
//! prefetched).
//!
//! Measured by `examples/bench_amx.rs` on two cores of a Granite Rapids in moments when no other program used them, 2048 x 8192,
//! TFLOP/s: BF16 0.8 at 16, 1.3 at 32, 1.8 at 64, 2.1 to 2.3 from 128 to 512 (f32 kernels 0.23). AMX alone reaches 5.4.

mod acts;
mod detect;
mod gemm;
#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
mod tiles;

pub use acts::{ActTiles, round_line};
pub use detect::Amx;
pub use gemm::{MAX_K, PanelWork, Workspace, multiply};

/// Rows of W of a panel, and of A of a block.
pub const PANEL: usize = 32;
/// Columns of a k tile.
pub const K_TILE: usize = 32;
/// The most k tiles of a block of K: a panel's are then in the level 1 cache while rows pass.
pub const K_TILES: usize = 20;
/// Elements of a k tile of a panel, and of A: 32 rows by 32 columns.
pub const TILE_ELEMENTS: usize = PANEL * K_TILE;

/// How K is cut into blocks of k tiles, as even as can be.
#[derive(Clone, Copy, Debug)]
struct KBlocks {
    tiles: usize,
    blocks: usize,
}

impl KBlocks {
    fn of(k: usize) -> Self {
        let tiles = k / K_TILE;
        Self { tiles, blocks: tiles.div_ceil(K_TILES) }
    }

    /// First k tile of block `b`; that of the last block's successor is the number of tiles.
    fn start(self, b: usize) -> usize {
        b * self.tiles / self.blocks
    }

    /// `(first k tile, number of k tiles)` of each block.
    fn iter(self) -> impl Iterator<Item = (usize, usize)> {
        (0..self.blocks).map(move |b| (self.start(b), self.start(b + 1) - self.start(b)))
    }
}

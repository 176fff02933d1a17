//! The tile registers of Intel AMX.
//!
//! One step multiplies up to 32 rows of A by 32 rows of W over 32 columns of 16 bits, with all eight registers:
//!
//! ```text
//!                       tmm6    tmm7        W, a k tile: [2 tiles of 16 rows][16 column pairs][16 rows][2 columns], 2 KiB
//!      A, two tiles:   -------------
//!      [16 rows]       tmm4 | tmm0 | tmm1   C: [32 rows][32] f32, 4 KiB
//!      [32 columns]    tmm5 | tmm2 | tmm3
//! ```
//!
//! - [`Tiles`]: the instructions, in a few small blocks of assembly. [`model`] has the same in plain Rust and stands in for them
//!   in tests on machines without AMX, those of this crate and those of an engine built with `--cfg amx_model` (`make test-amx`).
//! - [`scale_codes`]: the one operation on vectors of f16 that kernels around the tiles need.
//!
//! Cost of a step of 32 rows (65,536 operations): 4 products of 16 cycles, and 4 loads of 16 lines.

mod detect;
mod f16_vectors;
#[cfg(any(test, amx_model))]
mod model;
#[cfg(test)]
mod tests;
mod tiles;

pub use detect::Amx;
pub(super) use f16_vectors::scale_codes;
pub(super) use tiles::Tiles;

/// Rows of a tile.
pub const TILE_ROWS: usize = 16;
/// Rows of W of a panel, and of A of a step.
pub const PANEL: usize = 32;
/// Columns of a k tile.
pub const K_TILE: usize = 32;
/// A tile of A: 16 rows of 32 columns.
pub type ActTile = [u16; TILE_ROWS * K_TILE];
/// A k tile of a panel: `[2][16 column pairs][16 rows][2 columns]`.
pub type WeightTile = [u16; PANEL * K_TILE];

//! How quantized weights are packed for int8 kernels.
//!
//! Rows are taken 32 at a time, a panel, padded with zero rows: two tiles of 16. A panel is a list of blocks of 32 columns, one
//! contiguous stream of whole cache lines. A block begins with its codes, all tiles of a part before the next part:
//!
//! - [`Codes::U4`]: of each tile 4 lines. Line g, byte 4 r + j: column 4 g + j of row r in the low half, column 16 + 4 g + j in
//!   the high one.
//! - [`Codes::T4`]: the same, but what the four bits count are codes of the format's table.
//! - [`Codes::U5`]: the nibbles, then of each tile a line of fifth bits. Byte 4 r + j: bit g of column 4 g + j, bit 4 + g of
//!   column 16 + 4 g + j.
//! - [`Codes::U6`]: the nibbles, then of each tile two lines of fifth and sixth bits. Byte 4 r + j, bits 2 g and 2 g + 1: those
//!   of column 4 g + j in the first line, of column 16 + 4 g + j in the second.
//! - [`Codes::U8`]: of each tile 8 lines. Line g, byte 4 r + j: column 4 g + j of row r.
//!
//! Then come the scales of each of its sub-blocks (one of 32 columns or two of 16), a line of 32 f16, one a row; and the minima,
//! likewise, where the format has them. In K formats a super-block is 8 blocks. It ends with one line of super-block scales, and
//! one of super-block minima. After each block's codes are the scales and minima of its sub-blocks, 32 i8 each, which those
//! multiply:
//!
//! ```text
//! Q4_1  | codes 512 | scales 64 | minima 64 |                                      bytes, 32 columns of 32 rows
//! Q4_K  | codes 512 | sub-block scales 32, minima 32 | .. 8 times .. | scales 64 | minima 64 |      256 columns
//! ```
//!
//! Code that serves both counts a block of the other formats as a super-block of one.
//!
//! A value is `scale * code + min`, or `scale * (code - zero)` where there are no minima, with `zero` the middle of the code's
//! range. Kernels look codes of a table up before they multiply, and add [`TABLE_ZERO`] to them.

use super::{PANEL, act_block::ActBlock};
use crate::{
    GgmlType,
    quant::{Format, Table},
};

/// Rows of a tile.
pub(super) const TILE: usize = 16;
/// Columns of a block.
pub(super) const COLS: usize = 32;

/// How codes are stored; the numbers are what kernels are generic over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Codes {
    U4 = 4,
    U5 = 5,
    U6 = 6,
    U8 = 8,
    T4 = T4,
}

/// [`Codes::T4`] where kernels are generic over it.
pub(super) const T4: u8 = 14;
/// What kernels take a table's codes plus, to have none below 0.
pub(super) const TABLE_ZERO: u8 = 128;

/// The codes of a table as kernels take them, and the unit of scales; of the other layouts nothing is looked up, and the unit is
/// 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Lookup {
    pub codes: [u8; 16],
    pub unit: f32,
}

/// How a format is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub codes: Codes,
    /// Two sub-blocks of 16 columns a block, not one of 32.
    pub halves: bool,
    pub min: bool,
    /// Scales and minima are those of a super-block times those of its sub-blocks.
    pub super_blocks: bool,
    /// Of [`Codes::T4`].
    pub table: Option<&'static Table>,
}

/// Bytes of the codes of a block, both tiles.
pub(super) const fn codes_bytes(codes: u8) -> usize {
    match codes {
        4 | T4 => 512,
        5 => 640,
        6 => 768,
        _ => 1024,
    }
}

/// Sub-blocks of a block, times two where they have minima.
const fn num_scales(halves: bool, min: bool) -> usize {
    (1 + halves as usize) * (1 + min as usize)
}

/// Bytes of a block of a panel: its codes, and the scales of its sub-blocks in a super-block.
pub(super) const fn block_bytes(codes: u8, halves: bool, min: bool, super_blocks: bool) -> usize {
    codes_bytes(codes) + if super_blocks { PANEL * num_scales(halves, min) } else { 0 }
}

/// Blocks of a super-block.
pub(super) const fn super_block_len(super_blocks: bool) -> usize {
    if super_blocks { 8 } else { 1 }
}

/// Bytes of the blocks of a super-block.
pub(super) const fn super_block_body_bytes(codes: u8, halves: bool, min: bool, super_blocks: bool) -> usize {
    super_block_len(super_blocks) * block_bytes(codes, halves, min, super_blocks)
}

/// Bytes of a super-block: its blocks, then lines of f16.
pub(super) const fn super_block_bytes(codes: u8, halves: bool, min: bool, super_blocks: bool) -> usize {
    let lines = if super_blocks { 1 + min as usize } else { num_scales(halves, min) };
    super_block_body_bytes(codes, halves, min, super_blocks) + 64 * lines
}

/// The code of zero: the middle of the range where there are no minima.
pub(super) const fn zero_point(codes: u8, min: bool) -> i32 {
    match codes {
        _ if min => 0,
        T4 => TABLE_ZERO as i32,
        _ => 1 << (codes - 1),
    }
}

/// Whether codes have 8 bits when they are multiplied.
pub(super) const fn is_wide(codes: u8) -> bool {
    matches!(codes, 8 | T4)
}

impl Layout {
    pub(super) const fn of(format: GgmlType) -> Self {
        let &Format { sub_block_len, has_min, has_super_blocks, code_bits, table, .. } = format.format();
        let codes = match (code_bits, table) {
            (_, Some(_)) => Codes::T4,
            (4, None) => Codes::U4,
            (5, None) => Codes::U5,
            (6, None) => Codes::U6,
            _ => Codes::U8,
        };
        Self { codes, halves: sub_block_len == 16, min: has_min, super_blocks: has_super_blocks, table }
    }

    pub(super) fn lookup(self) -> Lookup {
        match self.table {
            Some(table) => {
                Lookup { codes: table.codes.map(|code| code.cast_unsigned().wrapping_add(TABLE_ZERO)), unit: table.unit() }
            }
            None => Lookup { codes: [0; 16], unit: 1.0 },
        }
    }

    pub(super) const fn super_block_bytes(self) -> usize {
        super_block_bytes(self.codes as u8, self.halves, self.min, self.super_blocks)
    }
}

/// Picks the instance of a kernel that is generic over (codes, halves, min, super_blocks); these are all that formats use.
macro_rules! select {
    ($layout:expr, $kernel:ident) => {{
        let l = $layout;
        match (l.codes, l.halves, l.min, l.super_blocks) {
            (Codes::U4, false, false, _) => $kernel::<4, false, false, false>,
            (Codes::U4, false, true, false) => $kernel::<4, false, true, false>,
            (Codes::U4, false, true, true) => $kernel::<4, false, true, true>,
            (Codes::U4, true, false, _) => $kernel::<4, true, false, true>,
            (Codes::U4, true, true, _) => $kernel::<4, true, true, true>,
            (Codes::U5, _, false, _) => $kernel::<5, false, false, false>,
            (Codes::U5, _, true, false) => $kernel::<5, false, true, false>,
            (Codes::U5, _, true, true) => $kernel::<5, false, true, true>,
            (Codes::U6, ..) => $kernel::<6, true, false, true>,
            (Codes::U8, ..) => $kernel::<8, false, false, false>,
            (Codes::T4, false, _, false) => $kernel::<T4, false, false, false>,
            (Codes::T4, false, _, true) => $kernel::<T4, false, false, true>,
            (Codes::T4, true, _, false) => $kernel::<T4, true, false, false>,
            (Codes::T4, true, _, true) => $kernel::<T4, true, false, true>,
        }
    }};
}
pub(super) use select;

/// Multiplies one panel by as many rows of activations, `[rows, stride]`, as `out` has, 1 to 64:
/// `out[row][n] = sum over k of weight[n, k] * x[row, k]`. A kernel of an ISA above the machine's must not be called.
pub(super) type Kernel = unsafe fn(panel: &[u8], lookup: &Lookup, acts: &[ActBlock], out: &mut [[f32; PANEL]]);

/// The blocks of a panel, each with the lines of f16 of its super-block.
pub(super) fn blocks_of<const CODES: u8, const HALVES: bool, const MIN: bool, const SUPER: bool>(
    panel: &[u8],
) -> impl Iterator<Item = (&[u8], &[u8])> {
    panel.chunks_exact(const { super_block_bytes(CODES, HALVES, MIN, SUPER) }).flat_map(|super_block| {
        let (blocks, floats) = super_block.split_at(const { super_block_body_bytes(CODES, HALVES, MIN, SUPER) });
        blocks.chunks_exact(const { block_bytes(CODES, HALVES, MIN, SUPER) }).map(move |block| (block, floats))
    })
}

/// Bytes of a block of 8-bit codes in each plane; see [`lm_head`](super::lm_head).
pub(super) const UPPER_BYTES: usize = super_block_bytes(Codes::U4 as u8, false, false, false);
pub(super) const FIFTH_BYTES: usize = codes_bytes(Codes::U5 as u8) - codes_bytes(Codes::U4 as u8);
pub(super) const LOWER_BYTES: usize = codes_bytes(Codes::U4 as u8);

/// Multiplies a panel, its blocks of the upper and of another plane, by rows of activations; see [`Kernel`].
pub(super) type PlanesKernel = unsafe fn(upper: &[u8], other: &[u8], acts: &[ActBlock], out: &mut [[f32; PANEL]]);

/// Those of upper and fifth plane, and of upper and lower one.
#[derive(Clone, Copy)]
pub(super) struct PlanesKernels {
    pub estimate: PlanesKernel,
    pub multiply: PlanesKernel,
}

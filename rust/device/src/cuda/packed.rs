//! Quantized weights in the order in which tensor cores take them: what `kernels/packed.cuh` reads.
//!
//! A weight is a list of panels of 64 rows, of which the last one may lack some; those are zeros. A panel is a list of blocks of
//! 32 columns. `docs/packed-layouts.md` shows one. Nothing is rounded: codes and scales are those of the file.

use std::thread;

use half::{bf16, f16};

use crate::{
    DType, GgmlType, Precision, WeightView,
    quant::{BlockCodes, Format},
};

/// Rows of a panel.
pub const PANEL_ROWS: usize = 64;
/// Columns of a block.
pub const BLOCK_COLUMNS: usize = 32;
/// Bytes from scales to minima, where both are f16.
const SCALE_LINE: usize = 2 * PANEL_ROWS;

/// How a format is packed.
#[derive(Clone, Copy)]
pub struct PackedFormat {
    format: &'static Format,
}

impl PackedFormat {
    /// How the backend packs a weight of that type; `None`: it lies as in its file, as all do that are loaded for
    /// [`Precision::Exact`].
    pub fn of(dtype: DType, precision: Precision) -> Option<Self> {
        use GgmlType::{Mxfp4, Q4_0, Q4_1, Q4K, Q5K, Q6K, Q8_0};
        match dtype {
            DType::Ggml(format @ (Q4_0 | Q4_1 | Q8_0 | Q4K | Q5K | Q6K | Mxfp4)) if precision != Precision::Exact => {
                Some(Self { format: format.format() })
            }
            _ => None,
        }
    }

    const fn code_bytes(self) -> usize {
        PANEL_ROWS * BLOCK_COLUMNS / 8 * self.format.code_bits as usize
    }

    const fn block_bytes(self) -> usize {
        let lines = if self.format.has_min && !self.format.has_super_blocks { 2 } else { 1 };
        self.code_bytes() + lines * SCALE_LINE
    }

    const fn super_block_bytes(self) -> usize {
        match self.format {
            Format { has_super_blocks: false, .. } => 0,
            Format { has_min: true, .. } => 2 * SCALE_LINE,
            _ => SCALE_LINE,
        }
    }

    /// Blocks of a stage, behind which the scales of their super-blocks lie.
    const fn stage_blocks(self) -> usize {
        if self.format.code_bits == 8 { 4 } else { 8 }
    }

    /// Columns of a stage.
    pub const fn stage_columns(self) -> usize {
        self.stage_blocks() * BLOCK_COLUMNS
    }

    /// Bytes of a panel of so many columns, whole blocks of the format.
    pub const fn panel_bytes(self, cols: usize) -> usize {
        let blocks = cols / BLOCK_COLUMNS;
        blocks * self.block_bytes() + blocks / self.stage_blocks() * self.super_block_bytes()
    }

    /// Bytes of a weight `[rows, cols]`.
    pub const fn bytes(self, [rows, cols]: [usize; 2]) -> usize {
        rows.div_ceil(PANEL_ROWS) * self.panel_bytes(cols)
    }

    /// The packed weight, made by so many threads.
    pub fn pack(self, weight: &WeightView, num_threads: usize) -> Vec<u8> {
        let panel_bytes = self.panel_bytes(weight.cols);
        let mut packed = vec![0; self.bytes([weight.rows, weight.cols])];
        let share = weight.rows.div_ceil(PANEL_ROWS).div_ceil(num_threads.max(1)).max(1);
        thread::scope(|scope| {
            for (i, panels) in packed.chunks_mut(share * panel_bytes).enumerate() {
                scope.spawn(move || {
                    for (j, panel) in panels.chunks_exact_mut(panel_bytes).enumerate() {
                        self.pack_panel(weight, (i * share + j) * PANEL_ROWS, panel);
                    }
                });
            }
        });
        packed
    }

    fn pack_panel(self, weight: &WeightView, first_row: usize, panel: &mut [u8]) {
        let Format { block_len, block_bytes, .. } = *self.format;
        let mut block = BlockCodes::new();
        for row in first_row..weight.rows.min(first_row + PANEL_ROWS) {
            let place = RowPlace::of(row - first_row);
            for (i, bytes) in weight.row(row).chunks_exact(block_bytes).enumerate() {
                (self.format.unpack)(bytes, &mut block);
                for j in 0..block_len / BLOCK_COLUMNS {
                    let at = i * (block_len / BLOCK_COLUMNS) + j;
                    let before = at / self.stage_blocks() * self.super_block_bytes();
                    let packed = &mut panel[at * self.block_bytes() + before..][..self.block_bytes()];
                    let (codes, scales) = packed.split_at_mut(self.code_bytes());
                    self.put_codes(&block.codes[j * BLOCK_COLUMNS..][..BLOCK_COLUMNS], place, codes);
                    self.put_scales(&block, j, place, scales);
                }
                if self.format.has_super_blocks {
                    let end = (i + 1) * (self.stage_blocks() * self.block_bytes() + self.super_block_bytes());
                    let lines = &mut panel[end - self.super_block_bytes()..end];
                    let [scale, min] = block.super_block_scales;
                    put_f16(lines, place.of_f16(), scale);
                    if self.format.has_min {
                        put_f16(lines, SCALE_LINE + place.of_f16(), -min);
                    }
                }
            }
        }
    }

    /// Adds the codes of a row to those of its block, which are zeros.
    fn put_codes(self, row: &[i8], place: RowPlace, codes: &mut [u8]) {
        let RowPlace { tile, half, g } = place;
        let bits = self.format.code_bits;
        let zero = if self.format.has_min { 0 } else { 1 << (bits - 1) };
        let mut or = |byte: usize, bit: usize, value: u8| codes[byte + bit / 8] |= value << (bit % 8);
        for (k, &code) in row.iter().enumerate() {
            // Of the fragment: lane, register and half of it.
            let (step, lane, register, upper) = (k / 16, 4 * g + k % 16 / 4, k % 4 / 2 * 2 + half, 16 * (k % 2));
            if bits == 8 {
                or(tile * 512 + lane * 16 + step * 8 + register / 2 * 4, register % 2 * 8 + upper, code as u8);
                continue;
            }
            let code = match self.format.table {
                None => (i16::from(code) + zero) as u8,
                Some(table) => table.codes.iter().position(|value| *value == code).expect("a code of the table") as u8,
            };
            or(tile / 2 * 512 + lane * 16 + tile % 2 * 8 + step * 4, register * 4 + upper, code & 15);
            match bits {
                5 => or(1024 + lane * 8 + tile / 2 * 4, tile % 2 * 8 + step * 4 + register + upper, code >> 4),
                6 => or(1024 + lane * 16 + tile * 4, (step * 4 + register) * 2 + upper, code >> 4),
                _ => {}
            }
        }
    }

    /// Puts what scales the row's codes of sub-block `j`, or of the two in it.
    fn put_scales(self, block: &BlockCodes, j: usize, place: RowPlace, scales: &mut [u8]) {
        let Format { has_min, has_super_blocks, sub_block_len, .. } = *self.format;
        if !has_super_blocks {
            if self.format.table.is_some() {
                // A power of two.
                let at = place.of_f16();
                scales[at..at + 2].copy_from_slice(&bf16::from_f32(block.scales[j]).to_le_bytes());
                return;
            }
            put_f16(scales, place.of_f16(), block.scales[j]);
            if has_min {
                put_f16(scales, SCALE_LINE + place.of_f16(), block.mins[j]);
            }
            return;
        }
        let [sub_scales, sub_mins] = &block.sub_block_scales;
        let [first, second] =
            if sub_block_len == 16 { [sub_scales[2 * j], sub_scales[2 * j + 1]] } else { [sub_scales[j], sub_mins[j]] };
        let at = place.g * 16 + place.tile * 2 + place.half;
        (scales[at], scales[at + 8]) = (first as u8, second as u8);
    }
}

/// Where a row of a panel is in the fragments of its tile of 16: row `g` or `g + 8`.
#[derive(Clone, Copy)]
struct RowPlace {
    tile: usize,
    half: usize,
    g: usize,
}

impl RowPlace {
    const fn of(row: usize) -> Self {
        Self { tile: row / 16, half: row % 16 / 8, g: row % 8 }
    }

    /// Of its value in a line of f16.
    const fn of_f16(self) -> usize {
        self.g * 16 + self.tile * 4 + self.half * 2
    }
}

/// Puts a value that f16 holds.
fn put_f16(line: &mut [u8], at: usize, value: f32) {
    line[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
}

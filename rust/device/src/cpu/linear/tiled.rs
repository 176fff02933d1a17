//! Float weights in panels of 32 rows, each one stream of whole cache lines, rows padded with zeros:
//!
//! ```text
//! BF16        [k tile of 32 columns][2 tiles of 16 rows][16 column pairs][16 rows][2 columns], as AMX reads them
//! F16, F32    [column][32 rows]
//! ```
//!
//! Where an ISA multiplies bf16 faster than f32 ([`Isa::multiplies_bf16`]), every weight is laid out as BF16 and activations are
//! rounded to bf16, for any number of rows: [`tiled_bf16`](super::tiled_bf16), and from some number on AMX
//! ([`tiles`](super::tiles)). Elsewhere a weight keeps its type and activations are f32: [`tiled_f32`](super::tiled_f32).

use half::bf16;

use super::{Input, PANEL, float, out::SharedOut, slab::SlabBytes, tiled_f32};
use crate::{
    DType, DeviceError, WeightView,
    cpu::{Isa, ThreadPool},
    quant::dequantize_row,
};

/// Columns of a k tile.
pub(super) const K_TILE: usize = 32;
/// Elements of a k tile of a panel.
pub(super) const TILE_ELEMENTS: usize = PANEL * K_TILE;
/// Rows of a tile.
pub(super) const TILE: usize = PANEL / 2;

/// The type that a float weight of `cols` columns is laid out in; `None` when it is not: quantized, or columns that are no
/// multiple of 32.
pub(super) fn panel_dtype(dtype: DType, cols: usize, isa: Isa) -> Option<DType> {
    let float = matches!(dtype, DType::F32 | DType::F16 | DType::BF16) && cols.is_multiple_of(K_TILE);
    float.then(|| if isa.multiplies_bf16() { DType::BF16 } else { dtype })
}

/// Bytes of a panel.
pub(super) fn panel_bytes(panel_dtype: DType, cols: usize) -> usize {
    PANEL * cols * element_bytes(panel_dtype)
}

fn element_bytes(dtype: DType) -> usize {
    float::element_bytes(if dtype == DType::F32 { float::F32 } else { float::BF16 })
}

/// A float weight in panels.
pub(super) struct Tiled {
    data: SlabBytes,
    dtype: DType,
    cols: usize,
    isa: Isa,
    /// Bytes of a panel.
    pub panel_bytes: usize,
}

impl Tiled {
    /// Lays out `weight`; `None` when [`panel_dtype`] has none for it.
    pub(super) fn new(weight: &WeightView, isa: Isa, pool: &ThreadPool) -> Result<Option<Self>, DeviceError> {
        let Some(dtype) = panel_dtype(weight.dtype, weight.cols, isa) else { return Ok(None) };
        let panels = weight.rows.div_ceil(PANEL);
        let panel_bytes = panel_bytes(dtype, weight.cols);
        let mut data = SlabBytes::zeroed(panels * panel_bytes)?;
        let out = SharedOut::new(data.as_mut_slice());
        pool.for_each_range(panels, 4, &|start, end| {
            let mut rows = vec![0; panel_bytes];
            for p in start..end {
                gather(weight, p, dtype, &mut rows);
                // SAFETY: each panel is written by one thread.
                let panel = unsafe { out.part(p * panel_bytes, panel_bytes) };
                match dtype {
                    DType::F32 => lay_out::<4, PANEL>(&rows, panel),
                    DType::F16 => lay_out::<2, PANEL>(&rows, panel),
                    _ => lay_out::<4, TILE>(&rows, panel),
                }
            }
        });
        Ok(Some(Self { data, dtype, cols: weight.cols, isa, panel_bytes }))
    }

    /// Whether it is multiplied by activations rounded to bf16.
    pub(super) fn takes_pairs(&self) -> bool {
        self.isa.multiplies_bf16()
    }

    /// Row `r` of the weight, `[cols]`.
    pub(super) fn row(&self, r: usize, out: &mut [f32]) {
        let (panel, row, size) = (self.panel(r / PANEL), r % PANEL, element_bytes(self.dtype));
        let mut bytes = [0; K_TILE * 4];
        for (tile, out) in panel.chunks_exact(TILE_ELEMENTS * size).zip(out.chunks_exact_mut(K_TILE)) {
            for (k, bytes) in bytes.chunks_exact_mut(size).take(K_TILE).enumerate() {
                let at = match self.dtype {
                    DType::BF16 => (row / TILE * TILE + k / 2) * K_TILE + row % TILE * 2 + k % 2,
                    _ => k * PANEL + row,
                };
                bytes.copy_from_slice(&tile[at * size..][..size]);
            }
            dequantize_row(self.dtype, &bytes[..K_TILE * size], out);
        }
    }

    /// Where the first panel lies.
    pub(super) fn address(&self) -> usize {
        self.data.as_slice().as_ptr().addr()
    }

    /// Bytes of the panels.
    pub(super) fn bytes(&self) -> usize {
        self.data.as_slice().len()
    }

    fn panel(&self, p: usize) -> &[u8] {
        &self.data.as_slice()[p * self.panel_bytes..(p + 1) * self.panel_bytes]
    }

    /// Whether it is laid out as AMX reads it.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn is_in_tiles(&self) -> bool {
        self.dtype == DType::BF16 && self.isa.multiplies_bf16()
    }

    /// Panel `p` of a BF16 layout.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn tiles(&self, p: usize) -> &[[u16; TILE_ELEMENTS]] {
        debug_assert!(self.is_in_tiles());
        // SAFETY: slabs are cut on cache lines, and a panel is whole lines; any bits are a u16.
        let (_, panel, _) = unsafe { self.panel(p).align_to::<u16>() };
        panel.as_chunks().0
    }

    /// `out[m][n] = dot(weight row 32 p + n, row first + m of input)`.
    pub(super) fn multiply(&self, p: usize, input: &Input<'_>, first: usize, out: &mut [[f32; PANEL]]) {
        #[cfg(target_arch = "x86_64")]
        if self.takes_pairs() {
            let pairs = &input.pairs[first * self.cols / 2..][..out.len() * self.cols / 2];
            // SAFETY: ISAs that multiply bf16 have AVX-512 BF16, and `CpuLinear::new` refuses an ISA above the machine's.
            return unsafe { super::tiled_bf16::multiply(self.tiles(p), pairs, out) };
        }
        let x = &input.values[first * self.cols..][..out.len() * self.cols];
        let kernel = match self.dtype {
            DType::F32 => tiled_f32::multiply_f32,
            DType::F16 => tiled_f32::multiply_f16,
            _ => tiled_f32::multiply_bf16,
        };
        // SAFETY: `CpuLinear::new` refuses an ISA above the machine's.
        unsafe { kernel(self.isa, self.panel(p), x, out) }
    }
}

/// Rounds a row of whole k tiles to bf16, in pairs, `[cols / 2]`, for weights that take pairs.
///
/// # Safety
/// An ISA of this machine multiplies bf16.
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
pub(super) unsafe fn round_row(row: &[f32], pairs: &mut [u32]) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: ISAs that multiply bf16 have AVX-512 BF16.
    unsafe {
        super::tiled_bf16::round_row(row, pairs);
    }
}

/// The rows of panel `p`, in `dtype`; zeros after the last.
fn gather(weight: &WeightView, p: usize, dtype: DType, out: &mut [u8]) {
    let mut values = vec![0.0; if weight.dtype == dtype { 0 } else { weight.cols }];
    for (row, out) in (p * PANEL..).zip(out.chunks_exact_mut(out.len() / PANEL)) {
        if row >= weight.rows {
            out.fill(0);
        } else if weight.dtype == dtype {
            out.copy_from_slice(weight.row(row));
        } else {
            dequantize_row(weight.dtype, weight.row(row), &mut values);
            for (v, out) in values.iter().zip(out.as_chunks_mut().0) {
                *out = bf16::from_f32(*v).to_le_bytes();
            }
        }
    }
}

/// Lays out 32 `rows` in lines of `LANES` cells, one of each row; a cell is a pair of columns or a column.
fn lay_out<const CELL: usize, const LANES: usize>(rows: &[u8], panel: &mut [u8]) {
    let rows = rows.as_chunks::<CELL>().0;
    let row_cells = rows.len() / PANEL;
    for (i, line) in panel.as_chunks_mut::<CELL>().0.chunks_exact_mut(LANES).enumerate() {
        let (row, cell) = if LANES == TILE { (i / TILE % 2 * TILE, i / PANEL * TILE + i % TILE) } else { (0, i) };
        for (lane, out) in line.iter_mut().enumerate() {
            *out = rows[(row + lane) * row_cells + cell];
        }
    }
}

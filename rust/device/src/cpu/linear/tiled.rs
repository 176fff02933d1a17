//! Float weights in panels of 32 rows, each one stream of whole cache lines, rows padded with zeros:
//!
//! ```text
//! BF16, or F16 for AMX-FP16   [k tile of 32 columns][2 tiles of 16 rows][16 column pairs][16 rows][2 columns], as AMX reads them
//! F16, F32                    [column][32 rows]
//! ```
//!
//! - With AMX-FP16 ([`Isa::multiplies_f16`]) every weight becomes F16, each panel scaled by a power of two that brings its
//!   largest value to 2^13..2^14: BF16 and F16 lose nothing but of what is 2^27 times smaller than that. Many rows go by
//!   [`tiles`](super::tiles), with activations rounded to f16 too, few by [`tiled_f32`](super::tiled_f32).
//! - Where an ISA multiplies bf16 faster than f32 ([`Isa::multiplies_bf16`]), every weight becomes BF16 and activations are
//!   rounded to bf16, for any number of rows: [`tiled_bf16`](super::tiled_bf16), and many with AMX by [`tiles`](super::tiles).
//! - Elsewhere a weight keeps its type and activations are f32: [`tiled_f32`](super::tiled_f32).

use std::sync::atomic::{AtomicBool, Ordering};

use half::{bf16, f16, slice::HalfFloatSliceExt};

use super::{Input, PANEL, out::SharedOut, slab::SlabBytes, tiled_f32};
use crate::{
    DType, DeviceError, WeightView,
    cpu::{Isa, ThreadPool, simd::power_to_f16},
    quant::dequantize_row,
};

/// Columns of a k tile.
pub(super) const K_TILE: usize = 32;
/// Elements of a k tile of a panel.
pub(super) const TILE_ELEMENTS: usize = PANEL * K_TILE;
/// Rows of a tile.
pub(super) const TILE: usize = PANEL / 2;

/// What lies in panels, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PanelForm {
    /// Columns.
    F32,
    /// Columns.
    F16,
    /// Column pairs.
    Bf16Pairs,
    /// Column pairs, scaled.
    F16Pairs,
}

impl PanelForm {
    /// The form of a float weight of `cols` columns; `None` when it is not laid out: quantized, or columns that are no multiple
    /// of 32.
    pub(super) fn of(dtype: DType, cols: usize, isa: Isa) -> Option<Self> {
        let own = match dtype {
            DType::F32 => Self::F32,
            DType::F16 => Self::F16,
            DType::BF16 => Self::Bf16Pairs,
            DType::Ggml(_) => return None,
        };
        let form = if isa.multiplies_f16() {
            Self::F16Pairs
        } else if isa.multiplies_bf16() {
            Self::Bf16Pairs
        } else {
            own
        };
        cols.is_multiple_of(K_TILE).then_some(form)
    }

    /// Bytes of a panel.
    pub(super) fn panel_bytes(self, cols: usize) -> usize {
        PANEL * cols * self.element_bytes()
    }

    fn element_bytes(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }

    fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F16 | Self::F16Pairs => DType::F16,
            Self::Bf16Pairs => DType::BF16,
        }
    }
}

/// A float weight in panels.
pub(super) struct Tiled {
    data: SlabBytes,
    form: PanelForm,
    /// Of [`PanelForm::F16Pairs`]: what the values of each panel are multiplied by, powers of two.
    units: Vec<f32>,
    cols: usize,
    isa: Isa,
    /// Bytes of a panel.
    pub panel_bytes: usize,
}

impl Tiled {
    /// Lays out `weight`; `None` when [`PanelForm::of`] has none for it, or it is to be scaled and has infinities or NaN.
    pub(super) fn new(weight: &WeightView, isa: Isa, pool: &ThreadPool) -> Result<Option<Self>, DeviceError> {
        match PanelForm::of(weight.dtype, weight.cols, isa) {
            Some(form) => Self::in_form(form, weight, isa, pool),
            None => Ok(None),
        }
    }

    /// The same in a form.
    pub(super) fn in_form(
        form: PanelForm,
        weight: &WeightView,
        isa: Isa,
        pool: &ThreadPool,
    ) -> Result<Option<Self>, DeviceError> {
        let panels = weight.rows.div_ceil(PANEL);
        let panel_bytes = form.panel_bytes(weight.cols);
        let mut data = SlabBytes::zeroed(panels * panel_bytes)?;
        let mut units = vec![1.0; if form == PanelForm::F16Pairs { panels } else { 0 }];
        let finite = AtomicBool::new(true);
        let (out, shared_units) = (SharedOut::new(data.as_mut_slice()), SharedOut::new(&mut units));
        pool.for_each_range(panels, 4, &|start, end| {
            let (mut rows, mut values) = (vec![0; panel_bytes], Vec::new());
            for p in start..end {
                if form == PanelForm::F16Pairs {
                    match gather_scaled(weight, p, &mut values, &mut rows) {
                        // SAFETY: each panel is written by one thread.
                        Some(unit) => unsafe { shared_units.part(p, 1)[0] = unit },
                        None => finite.store(false, Ordering::Relaxed),
                    }
                } else {
                    gather(weight, p, form.dtype(), &mut rows);
                }
                // SAFETY: as above.
                let panel = unsafe { out.part(p * panel_bytes, panel_bytes) };
                match form {
                    PanelForm::F32 => lay_out::<4, PANEL>(&rows, panel),
                    PanelForm::F16 => lay_out::<2, PANEL>(&rows, panel),
                    PanelForm::Bf16Pairs | PanelForm::F16Pairs => lay_out::<4, TILE>(&rows, panel),
                }
            }
        });
        Ok(finite.into_inner().then(|| Self { data, form, units, cols: weight.cols, isa, panel_bytes }))
    }

    /// Whether it is multiplied by activations rounded to bf16.
    pub(super) fn takes_pairs(&self) -> bool {
        self.form == PanelForm::Bf16Pairs && self.isa.multiplies_bf16()
    }

    /// Row `r` of the weight, `[cols]`.
    pub(super) fn row(&self, r: usize, out: &mut [f32]) {
        let (panel, row, size) = (self.panel(r / PANEL), r % PANEL, self.form.element_bytes());
        let mut bytes = [0; K_TILE * 4];
        for (tile, out) in panel.chunks_exact(TILE_ELEMENTS * size).zip(out.chunks_exact_mut(K_TILE)) {
            for (k, bytes) in bytes.chunks_exact_mut(size).take(K_TILE).enumerate() {
                let at = match self.form {
                    PanelForm::Bf16Pairs | PanelForm::F16Pairs => (row / TILE * TILE + k / 2) * K_TILE + row % TILE * 2 + k % 2,
                    PanelForm::F16 | PanelForm::F32 => k * PANEL + row,
                };
                bytes.copy_from_slice(&tile[at * size..][..size]);
            }
            dequantize_row(self.form.dtype(), &bytes[..K_TILE * size], out);
        }
        if let Some(unit) = self.units.get(r / PANEL) {
            scale(out, 1.0 / unit);
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

    /// Whether it is laid out as AMX reads it: its form is of pairs, and no other kernel is to multiply many rows by it.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn is_in_tiles(&self) -> bool {
        self.form == PanelForm::F16Pairs || self.takes_pairs()
    }

    /// Panel `p` of column pairs.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn tiles(&self, p: usize) -> &[[u16; TILE_ELEMENTS]] {
        debug_assert!(self.is_in_tiles());
        // SAFETY: slabs are cut on cache lines, and a panel is whole lines; any bits are a u16.
        let (_, panel, _) = unsafe { self.panel(p).align_to::<u16>() };
        panel.as_chunks().0
    }

    /// Whether it is multiplied by activations rounded to f16 where it is by tiles, to bf16 otherwise.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn is_f16_pairs(&self) -> bool {
        self.form == PanelForm::F16Pairs
    }

    /// What the values of panel `p` are multiplied by where they are f16 in pairs; `None` of bf16.
    pub(super) fn unit(&self, p: usize) -> Option<f32> {
        self.units.get(p).copied()
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
        let kernel = match self.form {
            PanelForm::F32 => tiled_f32::multiply_f32,
            PanelForm::F16 => tiled_f32::multiply_f16,
            PanelForm::Bf16Pairs => tiled_f32::multiply_bf16,
            PanelForm::F16Pairs => tiled_f32::multiply_f16_pairs,
        };
        // SAFETY: `CpuLinear::new` refuses an ISA above the machine's.
        unsafe { kernel(self.isa, self.panel(p), x, out) }
        if let Some(unit) = self.unit(p) {
            scale(out.as_flattened_mut(), 1.0 / unit);
        }
    }
}

fn scale(values: &mut [f32], factor: f32) {
    for value in values {
        *value *= factor;
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

/// The rows of panel `p` in F16, scaled by the power of two that is returned; `None` when a value is no number.
fn gather_scaled(weight: &WeightView, p: usize, values: &mut Vec<f32>, out: &mut [u8]) -> Option<f32> {
    let rows = p * PANEL..weight.rows.min((p + 1) * PANEL);
    values.clear();
    values.resize(PANEL * weight.cols, 0.0);
    for (row, values) in rows.zip(values.chunks_exact_mut(weight.cols)) {
        dequantize_row(weight.dtype, weight.row(row), values);
    }
    let largest = values.iter().fold(0, |largest, v| largest.max(v.abs().to_bits()));
    if !f32::from_bits(largest).is_finite() {
        return None;
    }
    let unit = power_to_f16(largest);
    scale(values, unit);
    let (mut line, out) = ([f16::ZERO; K_TILE], out.as_chunks_mut::<2>().0);
    for (values, out) in values.as_chunks::<K_TILE>().0.iter().zip(out.as_chunks_mut::<K_TILE>().0) {
        line.convert_from_f32_slice(values);
        *out = line.map(f16::to_le_bytes);
    }
    Some(unit)
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

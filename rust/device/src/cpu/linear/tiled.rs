//! BF16 weights in the order that the tile units read: `[panel of 32 rows][k tile of 32 columns][2 tiles of 16 rows][16 column pairs]
//! [16 rows][2 columns]`, rows padded with zeros. The tile units multiply many rows by a panel where it lies; here are the kernels of few
//! rows, which read a panel as one stream: for each line of 64 bytes 2 conversions, and 2 fused operations a row of activations.

#[allow(clippy::wildcard_imports)] // Intrinsics.
use std::arch::x86_64::*;

use super::{PANEL, ROWS, Tile, out::SharedOut, slab::SlabBytes};
use crate::{
    DType, DeviceError, WeightView,
    cpu::{
        Amx, ThreadPool,
        amx::{FloatPanels, PanelSource},
    },
};

/// Columns of a k tile.
const K_TILE: usize = 32;
/// Bytes ahead of use that weights are prefetched.
const AHEAD: usize = 1280;

/// A BF16 weight in panels.
pub(super) struct Tiled {
    data: SlabBytes,
    /// Bytes of a panel.
    pub panel_bytes: usize,
}

impl Tiled {
    /// Lays out `weight`; `None` when it is not BF16 or its columns are not a multiple of 32.
    pub(super) fn new(amx: Amx, weight: &WeightView, pool: &ThreadPool) -> Result<Option<Self>, DeviceError> {
        if weight.dtype != DType::BF16 {
            return Ok(None);
        }
        let Some(source) = FloatPanels::new(amx, weight) else { return Ok(None) };
        let panels = weight.rows.div_ceil(PANEL);
        let panel_bytes = PANEL * weight.cols * 2;
        let mut data = SlabBytes::zeroed(panels * panel_bytes)?;
        let out = SharedOut::new(data.as_mut_slice());
        pool.for_each_range(panels, 1, &|start, end| {
            for p in start..end {
                // SAFETY: each panel is written by one thread.
                let panel = unsafe { out.part(p * panel_bytes, panel_bytes) };
                // SAFETY: slabs are cut on cache lines, and a panel is whole lines; any bits are a u16.
                let (_, panel, _) = unsafe { panel.align_to_mut::<u16>() };
                source.fill(p * PANEL, 0, weight.cols, panel);
            }
        });
        Ok(Some(Self { data, panel_bytes }))
    }

    /// Row `r` of the weight, `[cols]`.
    pub(super) fn row(&self, r: usize, out: &mut [f32]) {
        let columns = self.columns(r / PANEL, (0, out.len()));
        let (tile, lane) = (r % PANEL / (PANEL / 2), r % (PANEL / 2));
        for (k, out) in out.iter_mut().enumerate() {
            let pair = k / K_TILE * K_TILE + tile * K_TILE / 2 + k % K_TILE / 2;
            *out = f32::from_bits(u32::from(columns[pair * PANEL + 2 * lane + k % 2]) << 16);
        }
    }

    /// Bytes of the panels.
    pub(super) fn bytes(&self) -> usize {
        self.data.as_slice().len()
    }

    /// Columns `k0..k0 + k_len` of panel `p`; see [`PanelSource`].
    pub(super) fn columns(&self, p: usize, (k0, k_len): (usize, usize)) -> &[u16] {
        let panel = &self.data.as_slice()[p * self.panel_bytes..(p + 1) * self.panel_bytes];
        // SAFETY: as in `new`.
        let (_, panel, _) = unsafe { panel.align_to::<u16>() };
        &panel[k0 * PANEL..(k0 + k_len) * PANEL]
    }

    /// `out[m][n] = dot(weight row 32 p + n, x row m)`, `x` being `[num_rows, cols]` with 1 to 4 rows.
    pub(super) fn multiply(&self, p: usize, x: &[f32], num_rows: usize, out: &mut Tile) {
        let cols = self.panel_bytes / (2 * PANEL);
        let panel = self.columns(p, (0, cols));
        // SAFETY: a `Tiled` exists only where `Amx` proved that the processor has AVX-512.
        unsafe {
            match num_rows {
                1 => rows_of::<1>(panel, x, cols, out),
                2 => rows_of::<2>(panel, x, cols, out),
                3 => rows_of::<3>(panel, x, cols, out),
                _ => rows_of::<ROWS>(panel, x, cols, out),
            }
        }
    }
}

/// Sums of even and of odd columns, each by increasing column, added at the end.
#[target_feature(enable = "avx512f")]
fn rows_of<const R: usize>(panel: &[u16], x: &[f32], cols: usize, out: &mut Tile) {
    assert!(x.len() >= R * cols && panel.len() == PANEL * cols && cols.is_multiple_of(K_TILE));
    let odd_half = _mm512_set1_epi32(0xffff_0000_u32 as i32);
    let mut acc = [[[_mm512_setzero_ps(); 2]; 2]; R];
    for (t, lines) in panel.chunks_exact(PANEL * K_TILE).enumerate() {
        for pair in 0..K_TILE / 2 {
            for tile in 0..2 {
                // SAFETY: `lines` is 32 lines of 32 elements.
                let line = unsafe { lines.as_ptr().add((tile * K_TILE / 2 + pair) * K_TILE) };
                // A prefetch may be of any address.
                _mm_prefetch::<_MM_HINT_T0>(line.wrapping_byte_add(AHEAD).cast());
                // SAFETY: a line is 64 bytes.
                let line = unsafe { _mm512_loadu_si512(line.cast()) };
                let even = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(line));
                let odd = _mm512_castsi512_ps(_mm512_and_si512(line, odd_half));
                for (m, acc) in acc.iter_mut().enumerate() {
                    let k = m * cols + t * K_TILE + 2 * pair;
                    // SAFETY: m < R and the column is below `cols`; see the assertion.
                    let (x0, x1) = unsafe { (*x.get_unchecked(k), *x.get_unchecked(k + 1)) };
                    acc[tile][0] = _mm512_fmadd_ps(even, _mm512_set1_ps(x0), acc[tile][0]);
                    acc[tile][1] = _mm512_fmadd_ps(odd, _mm512_set1_ps(x1), acc[tile][1]);
                }
            }
        }
    }
    for (acc, out) in acc.iter().zip(out.iter_mut()) {
        for (acc, out) in acc.iter().zip(out.chunks_exact_mut(PANEL / 2)) {
            // SAFETY: half a row of the tile is 16 f32.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), _mm512_add_ps(acc[0], acc[1])) }
        }
    }
}

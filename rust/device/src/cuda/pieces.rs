//! Products of weights that CTAs share by pieces, of `gemm_*`: up to 32 rows for one reading, or tiles of many rows.
//!
//! The stages of all panels of a weight, which are twice as many features for tiles, are one sequence. It is cut into pieces, a
//! CTA each. Pieces that share a panel are summed in an order that the weight's shape decides. Several weights in a launch are
//! cut each by itself.

use std::sync::Arc;

use crate::kernel_args::{DevicePtr, GemmArgs, GemmTarget, MAX_TARGETS};

use super::{
    CudaError,
    dense::Product,
    driver::{DeviceMemory, Driver},
    kernels::{GEMM_ROWS, Kernel, TILE_ROWS, launch},
    linear::Rows,
    memory::Scratch,
    packed::PANEL_ROWS,
};

/// Rows that one reading of a weight serves.
pub const MAX_ROWS: usize = GEMM_ROWS[GEMM_ROWS.len() - 1];
/// Rows whose x is read as it is, in f32; of more it is rounded before.
pub const F32_ROWS: usize = GEMM_ROWS[0];
/// Pieces of a weight at most: two for each multiprocessor of an H100. It must not depend on the GPU that is there, or bits
/// would.
pub const MAX_PIECES: usize = 2 * 132;
/// The same for tiles of rows, whose CTAs have a multiprocessor to themselves until there are two tiles.
pub const MAX_TILE_PIECES: usize = MAX_PIECES / 2;
/// Features of a tile of rows.
pub const TILE_FEATURES: usize = 2 * PANEL_ROWS;
/// Rows of a launch of tiles at most: more would need as much more memory for parts.
pub const MAX_TILED_ROWS: usize = 2 * TILE_ROWS[TILE_ROWS.len() - 1];
/// Stages of a piece at least: of fewer, the end takes as long as they do.
pub const MIN_STAGES: usize = 4;

/// How a weight is cut: into pieces of the sequence of the stages of all its panels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Stages of a piece, all but the last one.
    pub part_stages: usize,
    /// Pieces.
    pub num_pieces: usize,
}

impl Cut {
    /// Of so many stages, into so many pieces at most.
    pub fn of(num_stages: usize, most_pieces: usize) -> Self {
        let part_stages = num_stages.div_ceil(most_pieces).max(MIN_STAGES);
        Self { part_stages, num_pieces: num_stages.div_ceil(part_stages) }
    }
}

/// How weights of one format and width lie and are cut.
#[derive(Clone, Copy)]
pub struct Layout {
    /// See `GemmArgs`.
    pub w_stride: u64,
    /// Columns of a stage.
    pub stage_columns: usize,
    /// Of a weight `[out_features, in_features]` in stages of so many columns, whatever the rows and the weights beside it.
    pub cut: fn([usize; 2], usize) -> Cut,
}

/// How few rows are multiplied by weights of one format and width.
#[derive(Clone, Copy)]
pub struct Way {
    /// By the rows that they are for.
    pub kernels: [Kernel; GEMM_ROWS.len()],
    /// The weights.
    pub layout: Layout,
}

/// The same of many.
#[derive(Clone, Copy)]
pub struct TileWay {
    /// By the rows of a tile.
    pub kernels: [Kernel; TILE_ROWS.len()],
    /// The weights.
    pub layout: Layout,
}

/// What the products work in.
#[derive(Default)]
pub struct PieceProducts {
    /// What parts have summed.
    parts: Scratch,
    /// How many pieces are done with a panel they share: zeros between launches.
    arrivals: Option<DeviceMemory>,
}

impl PieceProducts {
    /// Multiplies by weights, 32 rows at a time. `rounded`: x as kernels for more than [`F32_ROWS`] rows read it, if it has more,
    /// and only then.
    ///
    /// # Safety
    /// `x`, `rounded` and the outputs are memory of `driver` of these shapes. All weights are of the
    /// way's format and width, at most [`MAX_TARGETS`], and scale and `accumulate` are the same for all.
    pub unsafe fn multiply(
        &mut self,
        driver: &Arc<dyn Driver>,
        way: Way,
        (x, rounded): (Rows, Option<DevicePtr>),
        products: &[Product<'_>],
    ) -> Result<(), CudaError> {
        for first in (0..x.count).step_by(MAX_ROWS) {
            let count = MAX_ROWS.min(x.count - first);
            // Kernels for more rows read what is rounded.
            let fits = |rows: usize| count <= rows && (rounded.is_none() || rows > F32_ROWS);
            let i = GEMM_ROWS.iter().position(|&rows| fits(rows)).expect("at most the largest");
            let (from, value_bytes) = rounded.map_or((x.at, size_of::<f32>()), |rounded| (rounded, 2));
            let part = Rows { at: from + (first * x.cols * value_bytes) as u64, count, ..x };
            let parts = self.parts.floats(driver, planned_floats(GEMM_ROWS[i]))?;
            // SAFETY: the caller's promise; these are some of the rows.
            unsafe { self.launch(driver, (way.kernels[i], 1), way.layout, parts, (part, first), products)? };
        }
        Ok(())
    }

    /// Multiplies tiles of rows by weights. `x`: rows in 16 bits; `parts`: what takes [`tile_part_bytes`] for so many rows.
    ///
    /// # Safety
    /// As of [`multiply`](Self::multiply).
    pub unsafe fn multiply_tiles(
        &mut self,
        driver: &Arc<dyn Driver>,
        way: TileWay,
        x: Rows,
        parts: DevicePtr,
        products: &[Product<'_>],
    ) -> Result<(), CudaError> {
        for first in (0..x.count).step_by(MAX_TILED_ROWS) {
            let count = MAX_TILED_ROWS.min(x.count - first);
            let i = tile_of(count);
            let part = Rows { at: x.at + (first * x.cols * 2) as u64, count, ..x };
            let kernel = (way.kernels[i], count.div_ceil(TILE_ROWS[i]));
            // SAFETY: the caller's promise; these are some of the rows.
            unsafe { self.launch(driver, kernel, way.layout, parts, (part, first), products)? };
        }
        Ok(())
    }

    /// `first`: the place of the first one of these rows in the outputs.
    unsafe fn launch(
        &mut self,
        driver: &Arc<dyn Driver>,
        (kernel, row_tiles): (Kernel, usize),
        layout: Layout,
        parts: DevicePtr,
        (x, first): (Rows, usize),
        products: &[Product<'_>],
    ) -> Result<(), CudaError> {
        let [Product { scale, accumulate, .. }, ..] = products else { return Ok(()) };
        let (mut targets, mut pieces) = ([GemmTarget::default(); MAX_TARGETS], 0);
        for (target, Product { linear, out, .. }) in targets.iter_mut().zip(products) {
            let out_features = linear.out_features();
            let cut = (layout.cut)([out_features, x.cols], layout.stage_columns);
            *target = GemmTarget {
                w: linear.weight(),
                bias: linear.bias().unwrap_or(0),
                out: out + (first * out_features * size_of::<f32>()) as u64,
                out_features: out_features as u32,
                out_stride: out_features as u32,
                first_piece: pieces as u32,
                part_stages: cut.part_stages as u32,
            };
            pieces += cut.num_pieces;
        }
        let arrivals = match &self.arrivals {
            Some(memory) => memory.at(),
            None => self.arrivals.insert(DeviceMemory::zeroed(driver, ARRIVAL_BYTES)?).at(),
        };
        let args = GemmArgs {
            x: x.at,
            targets,
            parts,
            arrivals,
            w_stride: layout.w_stride,
            num_rows: x.count as u32,
            in_features: x.cols as u32,
            x_stride: x.cols as u32,
            accumulate: (*accumulate).into(),
            scale: *scale,
            reserved: 0,
        };
        // SAFETY: the caller's promise; weights and biases have these shapes and live as long as the products, the parts have
        // room, and there is a number of arrivals for each piece and tile of rows.
        unsafe { launch(driver, kernel, [pieces, row_tiles, 1], &args) }
    }

    /// Addresses that graphs know.
    pub fn buffers(&self) -> [DevicePtr; 2] {
        [self.parts.at(), self.arrivals.as_ref().map_or(0, DeviceMemory::at)]
    }

    /// So many bytes will be asked of the parts at most.
    pub fn plan(&mut self, bytes: usize) {
        self.parts.plan(bytes);
    }
}

/// A number for each piece of a launch, which are half as many of either of two tiles of rows.
const ARRIVAL_BYTES: usize = MAX_TARGETS * MAX_PIECES * size_of::<u32>();
const _: () = assert!(MAX_TILED_ROWS / TILE_ROWS[TILE_ROWS.len() - 1] * MAX_TILE_PIECES <= MAX_PIECES);

/// Which tiles so many rows are multiplied in, of [`TILE_ROWS`].
fn tile_of(num_rows: usize) -> usize {
    TILE_ROWS.iter().position(|&rows| num_rows <= rows).unwrap_or(TILE_ROWS.len() - 1)
}

/// Bytes of the parts of any weights that tiles of so many rows are multiplied by.
pub fn tile_part_bytes(num_rows: usize) -> usize {
    let num_rows = num_rows.min(MAX_TILED_ROWS);
    MAX_TARGETS * MAX_TILE_PIECES * 2 * TILE_FEATURES * num_rows.next_multiple_of(TILE_ROWS[tile_of(num_rows)]) * size_of::<f32>()
}

/// Floats of the parts: a piece may begin with a part of one panel and end with a part of another one.
fn planned_floats(capacity: usize) -> usize {
    MAX_TARGETS * MAX_PIECES * 2 * PANEL_ROWS * capacity
}

/// Bytes that the parts of any weight take, for so many rows.
pub fn planned_part_bytes(num_rows: usize) -> usize {
    planned_floats(GEMM_ROWS.into_iter().find(|&rows| num_rows <= rows).unwrap_or(MAX_ROWS)) * size_of::<f32>()
}

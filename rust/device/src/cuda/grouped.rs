//! Products of groups of rows with a weight each, by `grouped_gemv_*` and `grouped_gemm_*`: the experts that rows chose, and the
//! heads of latent attention. A row gets the same bits beside any others, but for tiles of 64 rows, which round packed weights.

use std::{any::Any, sync::Arc};

use crate::{
    Linear, Precision,
    kernel_args::{DevicePtr, GroupedArgs, GroupedTarget, MAX_TARGETS},
};

use super::{
    CudaError,
    driver::{DeviceMemory, Driver},
    gemm::PackedKernels,
    gemm_floats,
    kernels::{GROUPED_ROWS, Kernel, MAX_GRID_Y, TILE_ROWS, launch, weight_suffix},
    linear::{CudaLinear, FEATURES_PER_CTA, Form, StoredKernels},
    memory::Made,
    packed::PANEL_ROWS,
    pieces::TILE_FEATURES,
};

/// Weights of one shape and format, one for each group, as kernels find them. It holds addresses: the weights outlive it.
#[derive(Clone, Copy)]
pub struct Group<'a> {
    /// The first: of the shape and format of all.
    pub first: &'a CudaLinear,
    /// Addresses of the weights, `[num_groups]`.
    pub w: DevicePtr,
    /// Addresses of biases, `[num_groups]`; 0: there are none.
    pub bias: DevicePtr,
    /// Their numbers to adapters, `[num_groups]`.
    pub sites: DevicePtr,
}

/// Lists of addresses of weights that belong together, of their biases, and of their sites, on the device, by the first weight.
#[derive(Default)]
pub struct Groups(Made<dyn Any + Send + Sync, [DeviceMemory; 3]>);

impl Groups {
    /// The list of these weights, made when it is first asked for.
    ///
    /// # Panics
    /// When they are not of one shape and format, or there are none.
    pub fn of<'a>(
        &mut self,
        driver: &Arc<dyn Driver>,
        linears: impl IntoIterator<Item = &'a Linear>,
    ) -> Result<Group<'a>, CudaError> {
        let mut linears = linears.into_iter().peekable();
        let head: &'a Linear = linears.peek().copied().expect("a weight at least");
        let first: &'a CudaLinear = head.weight();
        let [w, bias, sites] = self.0.of(head.shared(), || {
            let kind = |linear: &CudaLinear| {
                (linear.dtype(), linear.precision(), linear.out_features(), linear.in_features(), linear.bias().is_some())
            };
            let (mut weights, mut biases, mut sites) = (Vec::new(), Vec::new(), Vec::new());
            for linear in linears {
                sites.push(linear.site.unwrap_or(u32::MAX));
                let linear: &CudaLinear = linear.weight();
                assert!(kind(linear) == kind(first), "weights of a group have one shape and format");
                weights.push(linear.weight());
                biases.push(linear.bias().unwrap_or(0));
            }
            Ok([DeviceMemory::of(driver, &weights)?, DeviceMemory::of(driver, &biases)?, DeviceMemory::of(driver, &sites)?])
        })?;
        let bias = if first.bias().is_some() { bias.at() } else { 0 };
        Ok(Group { first, w: w.at(), bias, sites: sites.at() })
    }

    /// See [`Made::mark_recorded`].
    pub fn mark_recorded(&mut self) {
        self.0.mark_recorded();
    }

    /// See [`Made::clear_lost`].
    pub fn clear_lost(&mut self) -> u64 {
        self.0.clear_lost()
    }
}

/// Which rows a group has.
#[derive(Clone, Copy)]
pub enum GroupedRows {
    /// `GroupTile`s on the device, with the rows of x and of the outputs that they name.
    Tiles {
        /// The first.
        tiles: DevicePtr,
        /// How many.
        num_tiles: usize,
        /// Rows of x, in the order of tiles.
        x_rows: DevicePtr,
        /// Rows of the outputs, likewise.
        out_rows: DevicePtr,
    },
    /// Each group has all rows, and columns of its own: so many from one group's to the next one's.
    All {
        /// Rows.
        num_rows: usize,
        /// Groups.
        num_groups: usize,
        /// Columns of x from a group to the next one.
        x_stride: usize,
        /// The same of the outputs.
        out_stride: usize,
    },
}

/// What groups of rows are multiplied with, `x_stride` columns from a row to the next one.
#[derive(Clone, Copy)]
pub struct GroupedInput {
    /// f32 for kernels of 8 rows; for more rounded as the format's products read it.
    pub x: DevicePtr,
    /// Columns from a row of x to the next one.
    pub x_stride: usize,
    /// Rows of the groups.
    pub rows: GroupedRows,
    /// Rows that a tile has at most: one of [`GROUPED_ROWS`].
    pub tile_rows: usize,
}

/// Whether kernels for 32 rows of a group multiply by such weights; all have them for 8.
pub fn has_many_rows(linear: &CudaLinear) -> bool {
    match linear.form() {
        Form::Packed(_) => true,
        Form::Stored(_) => gemm_floats::takes(linear.dtype(), linear.precision()),
    }
}

/// Whether kernels for tiles of 64 rows multiply by such weights.
pub fn has_tiles(linear: &CudaLinear) -> bool {
    matches!(linear.form(), Form::Packed(_)) && linear.precision() == Precision::Fast
}

/// `out = x @ weight^T + bias` of each group's rows, for weights of one format and width; `out_stride` columns from a row to the
/// next one.
///
/// # Safety
/// The input and the outputs are memory of `driver` with the rows that the tiles name, or all; tiles are at most as long as said.
///
/// # Panics
/// When weights differ in format or width, or are more than [`MAX_TARGETS`].
pub unsafe fn multiply(
    driver: &Arc<dyn Driver>,
    input: &GroupedInput,
    products: &[(Group<'_>, DevicePtr, usize)],
) -> Result<(), CudaError> {
    let [(Group { first, .. }, ..), ..] = products else { return Ok(()) };
    assert!(products.len() <= MAX_TARGETS, "weights of a launch");
    let kind = |linear: &CudaLinear| (linear.dtype(), linear.precision(), linear.in_features());
    assert!(products.iter().all(|(group, ..)| kind(group.first) == kind(first)), "weights of one format and width");
    let (kernel, w_stride, features) = kernel(first, input.tile_rows)?;
    let (mut targets, mut ctas) = ([GroupedTarget::default(); MAX_TARGETS], 0);
    for (target, (group, out, out_stride)) in targets.iter_mut().zip(products) {
        let out_features = group.first.out_features();
        *target = GroupedTarget {
            w: group.w,
            bias: group.bias,
            out: *out,
            out_features: out_features as u32,
            out_stride: *out_stride as u32,
            first_cta: ctas as u32,
            reserved: 0,
        };
        ctas += out_features.div_ceil(features);
    }
    let mut args = GroupedArgs {
        x: input.x,
        targets,
        w_stride,
        in_features: first.in_features() as u32,
        x_stride: input.x_stride as u32,
        ..GroupedArgs::default()
    };
    let num_tiles = match input.rows {
        GroupedRows::Tiles { tiles, num_tiles, x_rows, out_rows } => {
            args = GroupedArgs { tiles, x_rows, out_rows, ..args };
            num_tiles
        }
        GroupedRows::All { num_rows, num_groups, x_stride, out_stride } => {
            args = GroupedArgs {
                num_rows: num_rows as u32,
                num_groups: num_groups as u32,
                x_group_stride: x_stride as u32,
                out_group_stride: out_stride as u32,
                ..args
            };
            num_groups * num_rows.div_ceil(input.tile_rows)
        }
    };
    assert!(num_tiles <= MAX_GRID_Y, "{num_tiles} tiles");
    // SAFETY: the caller's promise; the weights have these shapes and live as long as the products.
    unsafe { launch(driver, kernel, [ctas, num_tiles, 1], &args) }
}

/// The kernel, its `w_stride`, and the features that a CTA computes.
fn kernel(linear: &CudaLinear, tile_rows: usize) -> Result<(Kernel, u64, usize), CudaError> {
    assert!(GROUPED_ROWS.contains(&tile_rows), "rows of a tile");
    let format = weight_suffix(linear.dtype()).expect("a format that was loaded");
    let gemm = || Kernel::named(&format!("grouped_gemm_{format}_r{tile_rows}"));
    match linear.form() {
        Form::Packed(PackedKernels { format, .. }) => {
            let features = if tile_rows == TILE_ROWS[0] { TILE_FEATURES } else { PANEL_ROWS };
            Ok((gemm()?, format.panel_bytes(linear.in_features()) as u64, features))
        }
        Form::Stored(StoredKernels { row_bytes, .. }) if has_many_rows(linear) => Ok((gemm()?, *row_bytes as u64, PANEL_ROWS)),
        Form::Stored(StoredKernels { row_bytes, .. }) => {
            assert_eq!(tile_rows, GROUPED_ROWS[0], "rows of a tile");
            Ok((Kernel::named(&format!("grouped_gemv_{format}_r8"))?, *row_bytes as u64, FEATURES_PER_CTA))
        }
    }
}

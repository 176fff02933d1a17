//! Products of packed weights and many rows, by `tiled_gemm_*`: weights are taken apart in registers, so 16 bits of them are never
//! written. Where a product has few tiles, its columns are cut into parts.

use std::sync::Arc;

use crate::kernel_args::{DevicePtr, GemmArgs, GemmTarget, MAX_TARGETS};

use super::{
    CudaError,
    dense::Product,
    driver::Driver,
    gemm::PackedKernels,
    kernels::launch,
    packed::PANEL_ROWS,
    pieces::{MAX_PIECES, PieceProducts},
};

/// Rows of a tile.
const TILE_ROWS: usize = 128;
/// Features of a tile.
const TILE_FEATURES: usize = 2 * PANEL_ROWS;
/// Columns of a stage; weights have a multiple of it.
pub const STAGE_COLUMNS: usize = 64;
/// Stages of a part at least: what parts have summed is written and read.
const MIN_STAGES: usize = 16;

/// Stages of each part of the columns, for so many tiles: parts are as many as leave no more than two CTAs for each multiprocessor.
fn part_stages(num_tiles: usize, in_features: usize) -> usize {
    let num_stages = in_features.div_ceil(STAGE_COLUMNS);
    let num_parts = (MAX_PIECES / num_tiles.max(1)).min(num_stages / MIN_STAGES).max(1);
    num_stages.div_ceil(num_parts)
}

/// Multiplies rows that are rounded to bf16 by weights.
///
/// # Safety
/// `x` (`[num_rows, in_features]`) and the outputs are memory of `driver` of these shapes. All weights are of the format of
/// `kernels` and of one width, at most [`MAX_TARGETS`], and scale and `accumulate` are the same for all.
pub unsafe fn multiply(
    pieces: &mut PieceProducts,
    driver: &Arc<dyn Driver>,
    kernels: &PackedKernels,
    (x, num_rows): (DevicePtr, usize),
    products: &[Product<'_>],
) -> Result<(), CudaError> {
    let [Product { linear, scale, accumulate, .. }, ..] = products else { return Ok(()) };
    let (in_features, row_tiles) = (linear.in_features(), num_rows.div_ceil(TILE_ROWS));
    let feature_tiles = |product: &Product<'_>| product.linear.out_features().div_ceil(TILE_FEATURES);
    let part_stages = part_stages(row_tiles * products.iter().map(feature_tiles).sum::<usize>(), in_features);
    let num_parts = in_features.div_ceil(STAGE_COLUMNS).div_ceil(part_stages);
    let (mut targets, mut ctas) = ([GemmTarget::default(); MAX_TARGETS], 0);
    for (target, product) in targets.iter_mut().zip(products) {
        let Product { linear, out, .. } = product;
        *target = GemmTarget {
            w: linear.weight(),
            bias: linear.bias().unwrap_or(0),
            out: *out,
            out_features: linear.out_features() as u32,
            out_stride: linear.out_features() as u32,
            first_piece: ctas as u32,
            part_stages: part_stages as u32,
        };
        ctas += feature_tiles(product) * num_parts * row_tiles;
    }
    let num_slots = if num_parts > 1 { ctas } else { 0 };
    let (parts, arrivals) = pieces.memory(driver, num_slots * TILE_FEATURES * TILE_ROWS)?;
    let args = GemmArgs {
        x,
        targets,
        parts,
        arrivals,
        w_stride: kernels.format.panel_bytes(in_features) as u64,
        num_rows: num_rows as u32,
        in_features: in_features as u32,
        x_stride: in_features as u32,
        accumulate: (*accumulate).into(),
        scale: *scale,
        reserved: 0,
    };
    // SAFETY: the caller's promise; weights and biases have these shapes and live as long as the products, the parts have room,
    // and there is a number of arrivals for each CTA where there are parts.
    unsafe { launch(driver, kernels.tiled, [ctas, 1, 1], &args) }
}

/// Bytes that the parts of any weights take.
pub const PLANNED_PART_BYTES: usize = MAX_PIECES * TILE_FEATURES * TILE_ROWS * size_of::<f32>();

#[cfg(test)]
mod tests {
    use super::{MAX_PIECES, MIN_STAGES, STAGE_COLUMNS, part_stages};

    #[test]
    fn parts_leave_two_ctas_for_each_multiprocessor_and_are_long_enough() {
        for in_features in [32, 576, 4096, 14_336] {
            for num_tiles in [1, 2, 16, 32, 48, 131, 132, 133, 300, 5000] {
                let (own, stages) = (part_stages(num_tiles, in_features), in_features.div_ceil(STAGE_COLUMNS));
                let num_parts = stages.div_ceil(own);
                let what = format!("{num_tiles} tiles of {in_features} columns: {num_parts} parts of {own} stages");
                assert!(num_parts == 1 || num_tiles * num_parts <= MAX_PIECES && own >= MIN_STAGES, "{what}");
            }
        }
        assert_eq!(part_stages(32, 4096), 16, "4096 features of 128 rows");
        assert_eq!(part_stages(224, 4096), 64, "28672 features of 128 rows");
    }
}

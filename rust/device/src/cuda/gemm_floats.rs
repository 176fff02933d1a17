//! Products of weights in bf16 and f16, by `gemm_bf16_*` and `gemm_f16_*`: up to 32 rows for one reading, of weights that lie as
//! in their file. A row gets the same bits beside any others.
//!
//! CTAs share a weight by its stages, of 64 features and 256 columns; features whose columns several share are summed in an order
//! that the weight's shape decides.

use std::sync::Arc;

use crate::{
    DType, Precision,
    kernel_args::{DevicePtr, GemmFloatsArgs, GemmFloatsTarget, MAX_TARGETS},
};

use super::{
    CudaError,
    dense::Product,
    driver::{DeviceMemory, Driver},
    kernels::{GEMM_ROWS, Kernel, launch},
    linear::{CudaLinear, Form, Rows},
    memory::Scratch,
};

/// Rows that one reading of a weight serves.
pub const MAX_ROWS: usize = GEMM_ROWS[GEMM_ROWS.len() - 1];
/// Rows whose x is read as it is, in f32; of more it is rounded to the weight's type before.
pub const F32_ROWS: usize = GEMM_ROWS[0];
/// Features of a panel, and columns of its stages.
const STAGE: [usize; 2] = [64, 256];
/// Pieces that a weight is cut into at most: the CTAs that an H100 has at once. It must not depend on the GPU that is there, or
/// bits would.
const MAX_PIECES: usize = 2 * 132;
/// Stages of a piece at least: a CTA begins with two of them on their way, and what pieces share is written and read again.
const MIN_STAGES: usize = 4;

/// The kernels of a format, by the rows that they are for; `None` for formats that have none.
pub fn kernels(format: &str) -> Option<[Kernel; GEMM_ROWS.len()]> {
    let kernel = |rows: usize| Kernel::named(&format!("gemm_{format}_r{rows}"));
    matches!(format, "bf16" | "f16")
        .then(|| Some([kernel(GEMM_ROWS[0]).ok()?, kernel(GEMM_ROWS[1]).ok()?, kernel(GEMM_ROWS[2]).ok()?]))
        .flatten()
}

/// Whether these kernels multiply by a weight of that type, where products of matrices are not worth it or not to be had.
pub fn takes(dtype: DType, precision: Precision) -> bool {
    matches!(dtype, DType::BF16 | DType::F16) && precision == Precision::Fast
}

/// How a weight is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    /// Stages of a piece, all but the last one.
    part_stages: usize,
    num_pieces: usize,
}

impl Cut {
    /// Of a weight `[out_features, in_features]`, whatever the rows and the other weights of a launch.
    fn of(shape: [usize; 2]) -> Self {
        let num_stages = shape[0].div_ceil(STAGE[0]) * shape[1].div_ceil(STAGE[1]);
        let part_stages = num_stages.div_ceil(MAX_PIECES).max(MIN_STAGES);
        Self { part_stages, num_pieces: num_stages.div_ceil(part_stages) }
    }
}

/// What the products work in.
#[derive(Default)]
pub struct FloatProducts {
    /// What pieces have summed.
    parts: Scratch,
    /// How many pieces are done with a panel that they share: zeros between launches.
    arrivals: Option<DeviceMemory>,
}

impl FloatProducts {
    /// Multiplies by weights, 32 rows at a time. `rounded`: x in their type, if it has more than [`F32_ROWS`] rows, and only
    /// then.
    ///
    /// # Safety
    /// `x`, `rounded` and the outputs are memory of `driver` of these shapes. The weights are of one format that has such
    /// kernels, and of one width, at most [`MAX_TARGETS`]; scale and `accumulate` are the same for all.
    pub unsafe fn multiply(
        &mut self,
        driver: &Arc<dyn Driver>,
        (x, rounded): (Rows, Option<DevicePtr>),
        products: &[Product<'_>],
    ) -> Result<(), CudaError> {
        for first in (0..x.count).step_by(MAX_ROWS) {
            let count = MAX_ROWS.min(x.count - first);
            // Kernels for more rows read what is rounded.
            let fits = |rows: usize| count <= rows && (rounded.is_none() || rows > F32_ROWS);
            let size = GEMM_ROWS.iter().position(|&rows| fits(rows)).expect("at most the largest");
            let (from, value_bytes) = rounded.map_or((x.at, size_of::<f32>()), |rounded| (rounded, 2));
            let rows = Rows { at: from + (first * x.cols * value_bytes) as u64, count, ..x };
            // SAFETY: the caller's promise; these are some of the rows.
            unsafe { self.launch(driver, size, (first, rows), products)? };
        }
        Ok(())
    }

    unsafe fn launch(
        &mut self,
        driver: &Arc<dyn Driver>,
        size: usize,
        (first, x): (usize, Rows),
        products: &[Product<'_>],
    ) -> Result<(), CudaError> {
        let [Product { linear, scale, accumulate, .. }, ..] = products else { return Ok(()) };
        let Form::Stored(stored) = linear.form() else { unreachable!("the caller looked") };
        let kernel = stored.gemm.expect("the caller looked")[size];
        let (targets, num_pieces) = targets(first, products);
        let parts = self.parts.floats(driver, num_pieces * part_floats(GEMM_ROWS[size]))?;
        let arrivals = match &self.arrivals {
            Some(memory) => memory.at(),
            None => self.arrivals.insert(DeviceMemory::zeroed(driver, ARRIVAL_BYTES)?).at(),
        };
        let args = GemmFloatsArgs {
            x: x.at,
            targets,
            parts,
            arrivals,
            row_bytes: stored.row_bytes as u64,
            num_rows: x.count as u32,
            in_features: x.cols as u32,
            x_stride: x.cols as u32,
            accumulate: (*accumulate).into(),
            scale: *scale,
            reserved: 0,
        };
        // SAFETY: the caller's promise; weights and biases have these shapes and live as long as the products, the parts have
        // room, and there is a number of arrivals for each piece.
        unsafe { launch(driver, kernel, [num_pieces, 1, 1], &args) }
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

/// The weights, and where their products with the rows from `first` on go; and the pieces of all.
fn targets(first: usize, products: &[Product<'_>]) -> ([GemmFloatsTarget; MAX_TARGETS], usize) {
    let (mut targets, mut pieces) = ([GemmFloatsTarget::default(); MAX_TARGETS], 0);
    for (target, Product { linear, out, .. }) in targets.iter_mut().zip(products) {
        let linear: &CudaLinear = linear;
        let Cut { part_stages, num_pieces } = Cut::of([linear.out_features(), linear.in_features()]);
        *target = GemmFloatsTarget {
            w: linear.weight(),
            bias: linear.bias().unwrap_or(0),
            out: out + (first * linear.out_features() * size_of::<f32>()) as u64,
            out_features: linear.out_features() as u32,
            out_stride: linear.out_features() as u32,
            first_piece: pieces as u32,
            part_stages: part_stages as u32,
        };
        pieces += num_pieces;
    }
    (targets, pieces)
}

/// Numbers for the pieces of a launch.
const ARRIVAL_BYTES: usize = MAX_TARGETS * MAX_PIECES * size_of::<u32>();

/// Values that a piece keeps of panels that it shares: one that began before it, one that goes on behind it.
const fn part_floats(capacity: usize) -> usize {
    2 * STAGE[0] * capacity
}

/// Bytes that the parts of any weights take, for so many rows.
pub fn planned_part_bytes(num_rows: usize) -> usize {
    let capacity = GEMM_ROWS.into_iter().find(|&rows| num_rows <= rows).unwrap_or(MAX_ROWS);
    MAX_TARGETS * MAX_PIECES * part_floats(capacity) * size_of::<f32>()
}

#[cfg(test)]
mod tests {
    use super::{Cut, MAX_PIECES, MIN_STAGES, STAGE, kernels};

    #[test]
    fn pieces_have_all_stages_and_are_at_most_as_many_as_there_is_room_for() {
        for in_features in (8..20_000).step_by(488) {
            for out_features in [1, 64, 129, 576, 4096, 14_336, 67_000, 128_256, 1 << 20] {
                let Cut { part_stages, num_pieces } = Cut::of([out_features, in_features]);
                let num_stages = out_features.div_ceil(STAGE[0]) * in_features.div_ceil(STAGE[1]);
                let what = format!("{out_features} x {in_features}: {num_pieces} pieces of {part_stages} stages");
                assert!(num_pieces * part_stages >= num_stages && (num_pieces - 1) * part_stages < num_stages, "{what}");
                assert!(num_pieces <= MAX_PIECES && part_stages >= MIN_STAGES, "{what}");
            }
        }
    }

    #[test]
    fn large_weights_are_cut_into_pieces_for_most_multiprocessors() {
        // Llama-3-8B.
        for shape in [[4096, 4096], [6144, 4096], [14_336, 4096], [28_672, 4096], [4096, 14_336], [128_256, 4096]] {
            let pieces = Cut::of(shape).num_pieces;
            assert!((250..=264).contains(&pieces), "{shape:?}: {pieces}");
        }
    }

    #[test]
    fn both_formats_of_16_bits_have_kernels() {
        for (format, there) in [("bf16", true), ("f16", true), ("f32", false), ("q4_0", false)] {
            assert_eq!(kernels(format).is_some(), there, "{format}");
        }
    }
}

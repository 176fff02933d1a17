//! Products of packed weights, by `gemm_*`: up to 32 rows for one reading. A row gets the same bits beside any others, and a
//! weight beside any others.
//!
//! The stages of all panels of a weight are one sequence, which is cut into pieces, a CTA each. Pieces that share a panel are
//! summed in an order that the weight's shape decides. Several weights in a launch are cut each by itself.

use std::sync::Arc;

use crate::kernel_args::{DevicePtr, GemmArgs, GemmTarget, MAX_TARGETS};

use super::{
    CudaError,
    dense::Product,
    driver::{DeviceMemory, Driver},
    kernels::{GEMM_ROWS, Kernel, launch},
    linear::Rows,
    memory::Scratch,
    packed::{PANEL_ROWS, PackedFormat},
};

/// Rows that one reading of a packed weight serves.
pub const MAX_ROWS: usize = GEMM_ROWS[GEMM_ROWS.len() - 1];
/// Rows whose x is read as it is, in f32; of more it is rounded to bf16 before.
pub const F32_ROWS: usize = GEMM_ROWS[0];
/// Pieces of a weight at most: two for each multiprocessor of an H100. It must not depend on the GPU that is there, or bits
/// would.
const MAX_PIECES: usize = 2 * 132;
/// Pieces of a weight with twice as many features as columns, unless they are very many: gate and up, which a launch multiplies
/// by together. Measured on an H100, 2 x 14336 x 4096 of Q4_K: 27 us, and 31 us cut into as many as others.
const WIDE_PIECES: usize = MAX_PIECES / 2;
/// Panels of a weight that no other is beside, such as the output projection.
const MANY_PANELS: usize = 1024;
/// Stages of a piece at least: of fewer, the end takes as long as they do.
const MIN_STAGES: usize = 4;

/// The kernels of a packed format.
pub struct PackedKernels {
    /// How weights lie.
    pub format: PackedFormat,
    gemm: [Kernel; GEMM_ROWS.len()],
    /// `packed_dequantize_*`.
    pub dequantize: Kernel,
    /// `packed_embed_*`.
    pub embed: Kernel,
}

impl PackedKernels {
    /// `suffix`: the format's part of kernels' names.
    ///
    /// Errors: [`CudaError::NoSuchKernel`].
    pub fn new(format: PackedFormat, suffix: &str) -> Result<Self, CudaError> {
        let gemm = |rows: usize| Kernel::named(&format!("gemm_{suffix}_r{rows}"));
        Ok(Self {
            format,
            gemm: [gemm(GEMM_ROWS[0])?, gemm(GEMM_ROWS[1])?, gemm(GEMM_ROWS[2])?],
            dequantize: Kernel::named(&format!("packed_dequantize_{suffix}"))?,
            embed: Kernel::named(&format!("packed_embed_{suffix}"))?,
        })
    }
}

/// How a weight is cut: into pieces of the sequence of the stages of all its panels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Stages of a piece, all but the last one.
    pub part_stages: usize,
    /// Pieces.
    pub num_pieces: usize,
}

impl Cut {
    /// Of a weight `[out_features, in_features]`, whatever the rows and the weights beside it.
    pub fn of([out_features, in_features]: [usize; 2], stage_columns: usize) -> Self {
        let num_panels = out_features.div_ceil(PANEL_ROWS);
        let num_stages = (num_panels * in_features.div_ceil(stage_columns)).max(1);
        let is_wide = out_features >= 2 * in_features && num_panels < MANY_PANELS;
        let part_stages = num_stages.div_ceil(if is_wide { WIDE_PIECES } else { MAX_PIECES }).max(MIN_STAGES);
        Self { part_stages, num_pieces: num_stages.div_ceil(part_stages) }
    }
}

/// What the products work in.
#[derive(Default)]
pub struct PackedProducts {
    /// What parts have summed.
    parts: Scratch,
    /// How many pieces are done with a panel they share: zeros between launches.
    arrivals: Option<DeviceMemory>,
}

impl PackedProducts {
    /// Multiplies by packed weights, 32 rows at a time. `rounded`: x in bf16, if it has more than [`F32_ROWS`] rows, and only
    /// then.
    ///
    /// # Safety
    /// `x`, `rounded` and the outputs are memory of `driver` of these shapes. All weights are packed, of one format and width, at
    /// most [`MAX_TARGETS`], and scale and `accumulate` are the same for all.
    pub unsafe fn multiply(
        &mut self,
        driver: &Arc<dyn Driver>,
        kernels: &PackedKernels,
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
            // SAFETY: the caller's promise; these are some of the rows.
            unsafe { self.launch(driver, kernels, i, (part, first), products)? };
        }
        Ok(())
    }

    /// `first`: the place of the first one of these rows in the outputs.
    unsafe fn launch(
        &mut self,
        driver: &Arc<dyn Driver>,
        kernels: &PackedKernels,
        capacity: usize,
        (x, first): (Rows, usize),
        products: &[Product<'_>],
    ) -> Result<(), CudaError> {
        let [Product { scale, accumulate, .. }, ..] = products else { return Ok(()) };
        let (mut targets, mut pieces) = ([GemmTarget::default(); MAX_TARGETS], 0);
        for (target, Product { linear, out, .. }) in targets.iter_mut().zip(products) {
            let out_features = linear.out_features();
            let cut = Cut::of([out_features, x.cols], kernels.format.stage_columns());
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
        let parts = self.parts.floats(driver, planned_floats(GEMM_ROWS[capacity]))?;
        let arrivals = match &self.arrivals {
            Some(memory) => memory.at(),
            None => self.arrivals.insert(DeviceMemory::zeroed(driver, ARRIVAL_BYTES)?).at(),
        };
        let args = GemmArgs {
            x: x.at,
            targets,
            parts,
            arrivals,
            panel_bytes: kernels.format.panel_bytes(x.cols) as u64,
            num_rows: x.count as u32,
            in_features: x.cols as u32,
            x_stride: x.cols as u32,
            accumulate: (*accumulate).into(),
            scale: *scale,
            reserved: 0,
        };
        // SAFETY: the caller's promise; weights and biases have these shapes and live as long as the products, the parts have
        // room, and there is a number of arrivals for each piece.
        unsafe { launch(driver, kernels.gemm[capacity], [pieces, 1, 1], &args) }
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

/// A number for each piece of a launch.
const ARRIVAL_BYTES: usize = MAX_TARGETS * MAX_PIECES * size_of::<u32>();

/// Floats of the parts: a piece may begin with a part of one panel and end with a part of another one.
fn planned_floats(capacity: usize) -> usize {
    MAX_TARGETS * MAX_PIECES * 2 * PANEL_ROWS * capacity
}

/// Bytes that the parts of any weight take, for so many rows.
pub fn planned_part_bytes(num_rows: usize) -> usize {
    planned_floats(GEMM_ROWS.into_iter().find(|&rows| num_rows <= rows).unwrap_or(MAX_ROWS)) * size_of::<f32>()
}

#[cfg(test)]
mod tests {
    use super::{Cut, MAX_PIECES, MIN_STAGES, PANEL_ROWS, WIDE_PIECES};

    #[test]
    fn pieces_have_all_stages() {
        for in_features in (32..20_000).step_by(480) {
            for out_features in [1, 64, 129, 576, 4096, 14_336, 67_000, 128_256] {
                for stage_columns in [128, 256] {
                    let Cut { part_stages, num_pieces } = Cut::of([out_features, in_features], stage_columns);
                    let num_stages = out_features.div_ceil(PANEL_ROWS) * in_features.div_ceil(stage_columns);
                    let what = format!("{out_features} x {in_features}, {num_pieces} pieces of {part_stages} stages");
                    assert!(num_pieces * part_stages >= num_stages && (num_pieces - 1) * part_stages < num_stages, "{what}");
                    assert!(num_pieces <= MAX_PIECES && part_stages >= MIN_STAGES, "{what}");
                }
            }
        }
    }

    #[test]
    fn large_weights_are_cut_into_nearly_two_pieces_for_each_multiprocessor() {
        // Llama-3-8B.
        for shape in [[4096_usize, 4096], [6144, 4096], [4096, 14_336], [128_256, 4096]] {
            let Cut { num_pieces, .. } = Cut::of(shape, 256);
            assert!((250..=MAX_PIECES).contains(&num_pieces), "{shape:?}: {num_pieces}");
        }
        // Beside another such.
        let Cut { num_pieces, .. } = Cut::of([14_336, 4096], 256);
        assert!((125..=WIDE_PIECES).contains(&num_pieces), "{num_pieces}");
        assert_eq!(Cut::of([1024, 4096], 256), Cut { part_stages: 4, num_pieces: 64 });
    }
}

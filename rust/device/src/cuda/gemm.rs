//! Products of packed weights, by `gemm_*`: up to 32 rows for one reading. A row gets the same bits beside any others.
//!
//! CTAs share a weight by its features, and by its columns where there are too few of them. Such parts are summed in an order
//! that the weight's shape decides.

use std::sync::Arc;

use crate::kernel_args::{DevicePtr, GemmArgs};

use super::{
    CudaError,
    dense::Product,
    driver::{DeviceMemory, Driver},
    kernels::{GEMM_ROWS, Kernel, launch},
    linear::{CudaLinear, Rows},
    memory::Scratch,
    packed::{PANEL_ROWS, PackedFormat},
};

/// Rows that one reading of a packed weight serves.
pub const MAX_ROWS: usize = GEMM_ROWS[GEMM_ROWS.len() - 1];
/// Rows whose x is read as it is, in f32; of more it is rounded to bf16 before.
pub const F32_ROWS: usize = GEMM_ROWS[0];
/// Threads that compute a panel.
const PANEL_THREADS: usize = 128;
/// Features that count as one CTA's when a weight is cut.
const CUT_FEATURES: usize = 2 * PANEL_ROWS;
/// CTAs that a weight is cut into at least, if it has the columns for it: four for each multiprocessor of an H100. It must not
/// depend on the GPU that is there, or bits would.
const CUT_CTAS: usize = 4 * 132;
/// Columns of a part at least.
const PART_COLUMNS: usize = 512;

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

/// How the columns of a weight are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Stages of a part, all but the last one.
    pub part_stages: usize,
    /// Parts.
    pub num_parts: usize,
}

impl Cut {
    /// Of a weight `[out_features, in_features]`, whatever the rows.
    pub fn of([out_features, in_features]: [usize; 2], stage_columns: usize) -> Self {
        let ctas = out_features.div_ceil(CUT_FEATURES).max(1);
        let num_stages = in_features.div_ceil(stage_columns).max(1);
        let parts = CUT_CTAS.div_ceil(ctas).min(in_features / PART_COLUMNS).clamp(1, num_stages);
        let part_stages = num_stages.div_ceil(parts);
        Self { part_stages, num_parts: num_stages.div_ceil(part_stages) }
    }
}

/// What the products work in.
#[derive(Default)]
pub struct PackedProducts {
    /// What parts have summed.
    parts: Scratch,
    /// How many parts of a CTA's features are done: zeros between launches.
    arrivals: Option<DeviceMemory>,
}

impl PackedProducts {
    /// Multiplies by a packed weight, 32 rows at a time. `rounded`: x in bf16, if it has more than [`F32_ROWS`] rows, and only then.
    ///
    /// # Safety
    /// `x`, `rounded` and the output are memory of `driver` of these shapes.
    pub unsafe fn multiply(
        &mut self,
        driver: &Arc<dyn Driver>,
        kernels: &PackedKernels,
        (x, rounded): (Rows, Option<DevicePtr>),
        product: &Product<'_>,
    ) -> Result<(), CudaError> {
        for first in (0..x.count).step_by(MAX_ROWS) {
            let count = MAX_ROWS.min(x.count - first);
            // Kernels for more rows read what is rounded.
            let fits = |rows: usize| count <= rows && (rounded.is_none() || rows > F32_ROWS);
            let i = GEMM_ROWS.iter().position(|&rows| fits(rows)).expect("at most the largest");
            let (from, value_bytes) = rounded.map_or((x.at, size_of::<f32>()), |rounded| (rounded, 2));
            let part = Rows { at: from + (first * x.cols * value_bytes) as u64, count, ..x };
            let out = product.out + (first * product.linear.out_features() * size_of::<f32>()) as u64;
            // SAFETY: the caller's promise; these are some of the rows.
            unsafe { self.launch(driver, kernels, i, part, &Product { out, ..*product })? };
        }
        Ok(())
    }

    unsafe fn launch(
        &mut self,
        driver: &Arc<dyn Driver>,
        kernels: &PackedKernels,
        capacity: usize,
        x: Rows,
        product: &Product<'_>,
    ) -> Result<(), CudaError> {
        let linear: &CudaLinear = product.linear;
        let (kernel, out_features) = (kernels.gemm[capacity], linear.out_features());
        let features = kernel.threads as usize / PANEL_THREADS * PANEL_ROWS;
        let ctas = out_features.div_ceil(features);
        let Cut { part_stages, num_parts } = Cut::of([out_features, x.cols], kernels.format.stage_columns());
        let (mut parts, mut arrivals) = (0, 0);
        if num_parts > 1 {
            parts = self.parts.floats(driver, ctas * num_parts * features * GEMM_ROWS[capacity])?;
            arrivals = match &self.arrivals {
                Some(memory) => memory.at(),
                None => self.arrivals.insert(DeviceMemory::zeroed(driver, ARRIVAL_BYTES)?).at(),
            };
        }
        let args = GemmArgs {
            x: x.at,
            w: linear.weight(),
            bias: linear.bias().unwrap_or(0),
            out: product.out,
            parts,
            arrivals,
            panel_bytes: kernels.format.panel_bytes(x.cols) as u64,
            num_rows: x.count as u32,
            in_features: x.cols as u32,
            out_features: out_features as u32,
            x_stride: x.cols as u32,
            out_stride: out_features as u32,
            part_stages: part_stages as u32,
            accumulate: product.accumulate.into(),
            scale: product.scale,
        };
        // SAFETY: the caller's promise; weight and bias have these shapes and live as long as `linear`, the parts have room, and
        // there is a number of arrivals for each CTA in x.
        unsafe { launch(driver, kernel, [ctas, num_parts, 1], &args) }
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

/// Numbers for the CTAs in x of any weight that is cut: fewer than [`CUT_CTAS`] pairs of panels.
const ARRIVAL_BYTES: usize = 2 * CUT_CTAS * size_of::<u32>();

/// Bytes that the parts of weights of up to so many columns take, for so many rows.
pub fn planned_part_bytes(num_rows: usize, in_features: usize) -> usize {
    let capacity = GEMM_ROWS.into_iter().find(|&rows| num_rows <= rows).unwrap_or(MAX_ROWS);
    // Parts times CTAs are fewer than twice the CTAs of the cut, and fewer than there are columns for.
    let ctas = match in_features / PART_COLUMNS {
        0 | 1 => return 0,
        _ => 2 * CUT_CTAS,
    };
    ctas * CUT_FEATURES * capacity * size_of::<f32>()
}

#[cfg(test)]
mod tests {
    use super::{CUT_CTAS, CUT_FEATURES, Cut, MAX_ROWS, planned_part_bytes};

    #[test]
    fn parts_have_all_stages_and_the_room_that_was_planned() {
        for in_features in (32..20_000).step_by(480) {
            for out_features in [1, 64, 129, 576, 4096, 14_336, 67_000, 128_256] {
                for stage_columns in [128, 256] {
                    let Cut { part_stages, num_parts } = Cut::of([out_features, in_features], stage_columns);
                    let num_stages = in_features.div_ceil(stage_columns);
                    let what = format!("{out_features} x {in_features}, {part_stages} stages of {num_parts} parts");
                    assert!(num_parts * part_stages >= num_stages && (num_parts - 1) * part_stages < num_stages, "{what}");
                    let ctas = out_features.div_ceil(CUT_FEATURES);
                    let bytes = ctas * num_parts * CUT_FEATURES * MAX_ROWS * 4;
                    assert!(num_parts == 1 || bytes <= planned_part_bytes(MAX_ROWS, in_features), "{what}");
                    assert!(num_parts == 1 || ctas < CUT_CTAS, "{what}");
                }
            }
        }
    }

    #[test]
    fn large_weights_are_cut_into_some_ctas_for_each_multiprocessor() {
        // Llama-3-8B.
        for shape in [[4096_usize, 4096], [14_336, 4096], [4096, 14_336], [128_256, 4096]] {
            let ctas = shape[0].div_ceil(CUT_FEATURES) * Cut::of(shape, 256).num_parts;
            assert!((256..=1002).contains(&ctas), "{shape:?}: {ctas}");
        }
    }
}

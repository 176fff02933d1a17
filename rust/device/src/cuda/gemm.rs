//! Products of packed weights, by `gemm_*`. A row gets the same bits beside any others, and a weight beside any others.

use super::{
    CudaError,
    kernels::{GEMM_ROWS, Kernel},
    packed::{PANEL_ROWS, PackedFormat},
    pieces::{Cut, MAX_PIECES, Way},
};

/// Pieces of a weight with twice as many features as columns, unless they are very many: gate and up, which a launch multiplies
/// by together. Measured on an H100, 2 x 14336 x 4096 of Q4_K: 27 us, and 31 us cut into as many as others.
const WIDE_PIECES: usize = MAX_PIECES / 2;
/// Panels of a weight that no other is beside, such as the output projection.
const MANY_PANELS: usize = 1024;
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

    /// How weights of so many columns are multiplied.
    pub fn way(&self, in_features: usize) -> Way {
        let Self { format, gemm: kernels, .. } = *self;
        Way { kernels, w_stride: format.panel_bytes(in_features) as u64, stage_columns: format.stage_columns(), cut }
    }
}

/// Of a weight `[out_features, in_features]`.
fn cut([out_features, in_features]: [usize; 2], stage_columns: usize) -> Cut {
    let num_panels = out_features.div_ceil(PANEL_ROWS);
    let is_wide = out_features >= 2 * in_features && num_panels < MANY_PANELS;
    let num_stages = (num_panels * in_features.div_ceil(stage_columns)).max(1);
    Cut::of(num_stages, if is_wide { WIDE_PIECES } else { MAX_PIECES })
}

#[cfg(test)]
mod tests {
    use super::{Cut, MAX_PIECES, PANEL_ROWS, WIDE_PIECES, cut};
    use crate::cuda::pieces::MIN_STAGES;

    #[test]
    fn pieces_have_all_stages() {
        for in_features in (32..20_000).step_by(480) {
            for out_features in [1, 64, 129, 576, 4096, 14_336, 67_000, 128_256] {
                for stage_columns in [128, 256] {
                    let Cut { part_stages, num_pieces } = cut([out_features, in_features], stage_columns);
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
            let Cut { num_pieces, .. } = cut(shape, 256);
            assert!((250..=MAX_PIECES).contains(&num_pieces), "{shape:?}: {num_pieces}");
        }
        // Beside another such.
        let Cut { num_pieces, .. } = cut([14_336, 4096], 256);
        assert!((125..=WIDE_PIECES).contains(&num_pieces), "{num_pieces}");
        assert_eq!(cut([1024, 4096], 256), Cut { part_stages: 4, num_pieces: 64 });
    }
}

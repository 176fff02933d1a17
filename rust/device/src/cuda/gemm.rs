//! Products of packed weights, by `gemm_*`. A row gets the same bits beside any others, and a weight beside any others.

use super::{
    CudaError,
    kernels::{GEMM_ROWS, Kernel, TILE_ROWS},
    packed::{PANEL_ROWS, PackedFormat},
    pieces::{Cut, Layout, MAX_PIECES, MAX_TILE_PIECES, TILE_FEATURES, TileWay, Way},
};

/// A weight with twice as many features as columns has as many pieces as others by this, unless they are very many: gate and up,
/// which a launch multiplies by together. Measured on an H100, 2 x 14336 x 4096 of Q4_K: 27 us, and 31 us cut into as many.
const WIDE_SHARE: usize = 2;
/// Panels of a weight that no other is beside, such as the output projection.
const MANY_PANELS: usize = 1024;

/// The kernels of a packed format.
pub struct PackedKernels {
    /// How weights lie.
    pub format: PackedFormat,
    gemm: [Kernel; GEMM_ROWS.len()],
    tiles: [Kernel; TILE_ROWS.len()],
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
            tiles: [gemm(TILE_ROWS[0])?, gemm(TILE_ROWS[1])?],
            dequantize: Kernel::named(&format!("packed_dequantize_{suffix}"))?,
            embed: Kernel::named(&format!("packed_embed_{suffix}"))?,
        })
    }

    /// How few rows are multiplied by weights of so many columns.
    pub fn way(&self, in_features: usize) -> Way {
        Way { kernels: self.gemm, layout: self.layout(in_features, cut) }
    }

    /// How many rows are.
    pub fn tile_way(&self, in_features: usize) -> TileWay {
        TileWay { kernels: self.tiles, layout: self.layout(in_features, cut_tiles) }
    }

    fn layout(&self, in_features: usize, cut: fn([usize; 2], usize) -> Cut) -> Layout {
        Layout { w_stride: self.format.panel_bytes(in_features) as u64, stage_columns: self.format.stage_columns(), cut }
    }
}

/// Of a weight `[out_features, in_features]`.
fn cut(shape: [usize; 2], stage_columns: usize) -> Cut {
    cut_panels(shape, stage_columns, PANEL_ROWS, MAX_PIECES)
}

/// Likewise, for many rows.
fn cut_tiles(shape: [usize; 2], stage_columns: usize) -> Cut {
    cut_panels(shape, stage_columns, TILE_FEATURES, MAX_TILE_PIECES)
}

/// `panel_rows`: features that share a sequence of stages.
fn cut_panels([out_features, in_features]: [usize; 2], stage_columns: usize, panel_rows: usize, most_pieces: usize) -> Cut {
    let is_wide = out_features >= 2 * in_features && out_features.div_ceil(PANEL_ROWS) < MANY_PANELS;
    let num_stages = (out_features.div_ceil(panel_rows) * in_features.div_ceil(stage_columns)).max(1);
    Cut::of(num_stages, if is_wide { most_pieces / WIDE_SHARE } else { most_pieces })
}

#[cfg(test)]
mod tests {
    use super::{Cut, MAX_PIECES, MAX_TILE_PIECES, PANEL_ROWS, TILE_FEATURES, cut, cut_tiles};
    use crate::cuda::pieces::MIN_STAGES;

    #[test]
    fn pieces_have_all_stages() {
        for in_features in (32..20_000).step_by(480) {
            for out_features in [1, 64, 129, 576, 4096, 14_336, 67_000, 128_256] {
                for stage_columns in [128, 256] {
                    for (cut, panel_rows, most) in
                        [(cut as fn(_, _) -> _, PANEL_ROWS, MAX_PIECES), (cut_tiles, TILE_FEATURES, MAX_TILE_PIECES)]
                    {
                        let Cut { part_stages, num_pieces } = cut([out_features, in_features], stage_columns);
                        let num_stages = out_features.div_ceil(panel_rows) * in_features.div_ceil(stage_columns);
                        let what = format!("{out_features} x {in_features}, {num_pieces} pieces of {part_stages} stages");
                        assert!(num_pieces * part_stages >= num_stages && (num_pieces - 1) * part_stages < num_stages, "{what}");
                        assert!(num_pieces <= most && part_stages >= MIN_STAGES, "{what}");
                    }
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
        assert!((125..=MAX_PIECES / 2).contains(&num_pieces), "{num_pieces}");
        assert_eq!(cut([1024, 4096], 256), Cut { part_stages: 4, num_pieces: 64 });
    }

    #[test]
    fn for_many_rows_into_nearly_one() {
        for shape in [[4096_usize, 4096], [4096, 14_336], [128_256, 4096]] {
            let Cut { num_pieces, .. } = cut_tiles(shape, 256);
            assert!((120..=MAX_TILE_PIECES).contains(&num_pieces), "{shape:?}: {num_pieces}");
        }
        let Cut { num_pieces, .. } = cut_tiles([14_336, 4096], 256);
        assert!((60..=MAX_TILE_PIECES / 2).contains(&num_pieces), "{num_pieces}");
    }
}

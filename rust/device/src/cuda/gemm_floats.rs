//! Products of weights in bf16 and f16, by `gemm_bf16_*` and `gemm_f16_*`, of weights that lie as in their file. A row gets the
//! same bits beside any others.

use crate::{DType, Precision};

use super::{
    kernels::{GEMM_ROWS, Kernel},
    packed::PANEL_ROWS,
    pieces::{Cut, Layout, MAX_PIECES, Way},
};

/// Columns of a stage.
const STAGE_COLUMNS: usize = 256;

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

/// Of a weight `[out_features, in_features]`.
fn cut([out_features, in_features]: [usize; 2], stage_columns: usize) -> Cut {
    Cut::of(out_features.div_ceil(PANEL_ROWS) * in_features.div_ceil(stage_columns), MAX_PIECES)
}

/// How weights with rows of so many bytes are multiplied.
pub fn way(kernels: [Kernel; GEMM_ROWS.len()], row_bytes: usize) -> Way {
    Way { kernels, layout: Layout { w_stride: row_bytes as u64, stage_columns: STAGE_COLUMNS, cut } }
}

#[cfg(test)]
mod tests {
    use super::{Cut, MAX_PIECES, PANEL_ROWS, STAGE_COLUMNS, cut, kernels};
    use crate::cuda::pieces::MIN_STAGES;

    #[test]
    fn pieces_have_all_stages_and_are_at_most_as_many_as_there_is_room_for() {
        for in_features in (8..20_000).step_by(488) {
            for out_features in [1, 64, 129, 576, 4096, 14_336, 67_000, 128_256, 1 << 20] {
                let Cut { part_stages, num_pieces } = cut([out_features, in_features], STAGE_COLUMNS);
                let num_stages = out_features.div_ceil(PANEL_ROWS) * in_features.div_ceil(STAGE_COLUMNS);
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
            let pieces = cut(shape, STAGE_COLUMNS).num_pieces;
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

//! What linear layers take of memory, known before they are loaded.

use super::{
    PANEL,
    act_block::ActBlock,
    activations::stride,
    experts::grouped_rows,
    largest::search_bytes,
    lm_head, packed,
    tiled::PanelForm,
    tiles::{WORKER_BYTES, min_rows},
};
use crate::{DType, Precision, WorkspaceShape, cpu::Isa};

/// Bytes of a weight `[rows, cols]` in the form that [`CpuLinear`](super::CpuLinear) gives it; those of its file where it stays
/// there. A float weight with infinities or NaN stays there too where the form is scaled, which is known once it is read.
pub fn resident_bytes(dtype: DType, [rows, cols]: [usize; 2], precision: Precision, isa: Isa) -> u64 {
    let panel = match (precision, dtype) {
        (Precision::Exact, _) => None,
        (_, DType::Ggml(format)) => Some(packed::panel_bytes(format, cols)),
        _ => PanelForm::of(dtype, cols, isa).map(|form| form.panel_bytes(cols)),
    };
    match panel {
        Some(bytes) => rows.div_ceil(PANEL) as u64 * bytes as u64,
        None => dtype.row_bytes(cols).unwrap_or(0) as u64 * rows as u64,
    }
}

/// The same of a weight as [`CpuLinear::lm_head`](super::CpuLinear::lm_head) loads it.
pub fn lm_head_bytes(dtype: DType, shape: [usize; 2], precision: Precision, isa: Isa) -> u64 {
    if is_split(dtype, precision, isa) {
        (shape[0].div_ceil(PANEL) * lm_head::resident_panel_bytes(shape[1])) as u64
    } else {
        resident_bytes(dtype, shape, precision, isa)
    }
}

fn is_split(lm_head: DType, precision: Precision, isa: Isa) -> bool {
    precision != Precision::Exact && lm_head::is_split(lm_head, isa)
}

/// Bytes of [`LinearScratch`](super::LinearScratch) once it has grown to its largest.
pub fn workspace_bytes(shape: &WorkspaceShape, isa: Isa, num_threads: usize) -> u64 {
    let WorkspaceShape { num_tokens, hidden_size, intermediate_size, num_heads, head_dim, .. } = *shape;
    // What a recurrent layer gives is no wider than half of its projections: there is a gate for each column.
    let widest = hidden_size.max(intermediate_size).max(num_heads * head_dim).max(shape.recurrent_width / 2);
    let float_bytes = |len: usize| (len * size_of::<f32>()) as u64;
    let normed = float_bytes(num_tokens * hidden_size);
    let wide = if shape.post_norms { normed } else { 0 };
    let quantized = matches!(shape.dtype, DType::Ggml(_));
    let inputs = match (shape.precision, quantized) {
        (Precision::Fast | Precision::Deterministic, true) => {
            // Tiles take the others, but for those of several experts together.
            let rows = min_rows(isa).map_or(num_tokens, |min| num_tokens.min(min - 1).max(grouped_rows(shape)));
            (rows * stride(widest) * size_of::<ActBlock>()) as u64
        }
        (Precision::Exact, true) => float_bytes((1 + usize::from(shape.gated)) * num_threads * PANEL * widest),
        (Precision::Fast | Precision::Deterministic, false) if isa.dots_bf16() => (num_tokens * widest * size_of::<u16>()) as u64,
        _ => 0,
    };
    let tiles = if isa == Isa::Amx && shape.precision != Precision::Exact {
        let workers = num_threads * (WORKER_BYTES + widest * size_of::<f32>());
        (num_tokens.next_multiple_of(PANEL) * widest * size_of::<u16>() + num_tokens * size_of::<f32>() + workers) as u64
    } else {
        0
    };
    let search = if is_split(shape.lm_head_dtype, shape.precision, isa) {
        let rows = shape.num_sampled_rows.min(lm_head::max_searched_rows(isa));
        // Float layers have no blocks of their own.
        let acts = if quantized { 0 } else { shape.num_logit_rows * stride(hidden_size) * size_of::<ActBlock>() };
        (acts + search_bytes([rows, shape.vocab_size], hidden_size)) as u64
    } else {
        0
    };
    normed + wide + inputs + tiles + search
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        GgmlType, LinearOptions, WeightView,
        cpu::{CpuLinear, ThreadPool},
        mmap::Bytes,
    };

    #[test]
    fn the_bytes_that_are_foretold_are_those_that_are_packed() {
        let pool = ThreadPool::new(1).unwrap();
        let formats = GgmlType::ALL.map(DType::Ggml);
        for dtype in formats.into_iter().chain([DType::F32, DType::F16, DType::BF16]) {
            for (rows, cols) in [(32, 256), (33, 512), (7, 768)] {
                for precision in [Precision::Fast, Precision::Deterministic, Precision::Exact] {
                    let isa = Isa::detect();
                    let bytes = Bytes::from_vec(vec![0; dtype.row_bytes(cols).unwrap() * rows]);
                    let view = WeightView::new(dtype, rows, cols, bytes).unwrap();
                    let options = LinearOptions { name: "w".into(), precision, bias: None };
                    let linear = CpuLinear::new(&view, &options, isa, &pool).unwrap();
                    let foretold = resident_bytes(dtype, [rows, cols], precision, isa);
                    assert_eq!(linear.bytes() as u64, foretold, "{dtype} [{rows}, {cols}] {precision:?}");
                    let lm_head = CpuLinear::lm_head(&view, &options, isa, &pool).unwrap();
                    let foretold = lm_head_bytes(dtype, [rows, cols], precision, isa);
                    assert_eq!(lm_head.bytes() as u64, foretold, "{dtype} [{rows}, {cols}] {precision:?} of logits");
                }
            }
        }
    }
}

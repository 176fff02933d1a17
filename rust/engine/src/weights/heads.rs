//! What makes keys and values of latent vectors, where both lie in one matrix, head after head: keys are brought into the
//! transposed form that the absorbed computation multiplies by.

use device::{DType, WeightView, mmap::Bytes, quant::dequantize_row};

use super::{ExpertIndex, Matrix, Role, WeightSource};
use crate::EngineError;

impl WeightSource {
    /// Whether the matrix of a head is a part of the one for all of them.
    pub(super) fn is_of_all_heads(&self, matrix: &Matrix) -> bool {
        matches!(matrix.id.role, Role::AttnKeyUp | Role::AttnValueUp) && !self.contains(matrix.id)
    }

    /// How such a matrix is stored once it is read.
    pub(super) fn dtype_of_head(&self, matrix: &Matrix) -> Result<DType, EngineError> {
        let dtype = self.all_heads(matrix)?.dtype;
        // Blocks run along what becomes a column.
        let is_turned = matrix.id.role == Role::AttnKeyUp && matches!(dtype, DType::Ggml(_));
        Ok(if is_turned { DType::F32 } else { dtype })
    }

    /// The matrix of a head.
    pub(super) fn of_head(&self, matrix: &Matrix) -> Result<WeightView, EngineError> {
        let all = self.all_heads(matrix)?;
        let is_key = matrix.id.role == Role::AttnKeyUp;
        let [rows, cols] = matrix.shape;
        let (own_rows, rank) = if is_key { (cols, rows) } else { (rows, cols) };
        let ExpertIndex { index, count } =
            matrix.expert.ok_or_else(|| EngineError::Internal("a head without a number".into()))?;
        let of_head = all.rows / count;
        if all.cols != rank || !all.rows.is_multiple_of(count) || own_rows > of_head {
            return Err(self.error(&format!(
                "tensor `{}` has shape [{}, {}]; the configuration asks for {count} heads of over {own_rows} rows of {rank}",
                self.name(matrix.id.with_role(Role::AttnKvUp)),
                all.rows,
                all.cols
            )));
        }
        let first = index * of_head;
        if !is_key {
            return Ok(all.slice_rows(first + of_head - own_rows, first + of_head)?);
        }
        let own = all.slice_rows(first, first + own_rows)?;
        let (dtype, size, stored) = match own.dtype {
            DType::Ggml(_) => {
                let mut values = vec![0.0_f32; own_rows * rank];
                for (row, values) in values.chunks_exact_mut(rank).enumerate() {
                    dequantize_row(own.dtype, own.row(row), values);
                }
                (DType::F32, size_of::<f32>(), values.iter().flat_map(|value| value.to_le_bytes()).collect())
            }
            dtype => (dtype, own.row_bytes() / rank.max(1), own.bytes().to_vec()),
        };
        let element = |row: usize, col: usize| &stored[(row * rank + col) * size..][..size];
        let bytes = (0..rank).flat_map(|col| (0..own_rows).flat_map(move |row| element(row, col))).copied().collect();
        Ok(WeightView::new(dtype, rank, own_rows, Bytes::from_vec(bytes))?)
    }

    fn all_heads(&self, matrix: &Matrix) -> Result<WeightView, EngineError> {
        Ok(self.tensor(&self.name(matrix.id.with_role(Role::AttnKvUp)))?.0)
    }
}

//! Experts as some checkpoints of the hub stack them in one tensor: transposed, rows of gate and up in turn, or as MXFP4 whose
//! codes and scales are tensors of their own. They are brought into the common form one expert at a time.

use device::{DType, GgmlType, WeightView, mmap::Bytes};

use super::{ExpertIndex, SafetensorsFiles, names::Place};
use crate::EngineError;

/// Codes of a block of MXFP4, in bytes.
const CODE_BYTES: usize = 16;
/// Values of one.
const BLOCK: usize = 2 * CODE_BYTES;

/// The tensors that hold MXFP4 in place of the one of this name.
pub fn mxfp4_names(name: &str) -> [String; 2] {
    ["blocks", "scales"].map(|part| format!("{name}_{part}"))
}

/// Whether MXFP4 stands for the tensor.
pub fn is_mxfp4(files: &SafetensorsFiles, name: &str) -> bool {
    files.contains(&mxfp4_names(name)[0])
}

/// Whether the matrices of a stack lie one below the other in one matrix, as DBRX's do.
pub fn is_flat(stored: &[usize], stack: &[usize]) -> bool {
    matches!((stored, stack), ([rows, cols], [count, own, width]) if count.checked_mul(*own) == Some(*rows) && cols == width)
}

/// How an expert's matrix of the tensor is stored once it is read.
pub fn dtype(files: &SafetensorsFiles, name: &str) -> Result<DType, EngineError> {
    if is_mxfp4(files, name) { Ok(DType::Ggml(GgmlType::Mxfp4)) } else { Ok(files.tensor(name)?.0.dtype) }
}

/// An expert's matrix or vector of this shape, copied.
pub fn read(
    files: &SafetensorsFiles,
    name: &str,
    place: Place,
    ExpertIndex { index, count }: ExpertIndex,
    shape: &[usize],
) -> Result<WeightView, EngineError> {
    let Some((&cols, &[rows])) = shape.split_last().map(|(cols, rows)| (cols, if rows.is_empty() { &[1][..] } else { rows }))
    else {
        return Err(EngineError::Internal(format!("an expert's tensor `{name}` of shape {shape:?}")));
    };
    let stored_rows = rows.saturating_mul(place.step);
    let is_vector = shape.len() == 1;
    if is_mxfp4(files, name) && !is_vector {
        return read_mxfp4(files, name, place, (index, count), [rows, cols]);
    }
    let (view, stored) = files.tensor(name)?;
    let is_transposed = place.is_transposed && !(place.or_plain && stored == [count, stored_rows, cols]);
    let expected = match (is_vector, is_transposed) {
        // Of a bias, what is a row of the matrix is an element.
        (true, _) => vec![count, cols.saturating_mul(place.step)],
        (false, true) => vec![count, cols, stored_rows],
        (false, false) => vec![count, stored_rows, cols],
    };
    if stored != expected && !is_flat(&stored, &expected) {
        return Err(files.error(&format!("tensor `{name}` has shape {stored:?}; the configuration asks for {expected:?}")));
    }
    let size = view.row_bytes() / view.cols.max(1);
    let own_rows = view.rows / count;
    let own = view.slice_rows(index * own_rows, (index + 1) * own_rows)?;
    // Element `place` of stored row `row`.
    let element = |row: usize, place: usize| &own.row(row)[place * size..(place + 1) * size];
    let mut bytes = Vec::with_capacity(rows * cols * size);
    for row in 0..rows {
        for col in 0..cols {
            let (row, col) = if is_vector { (0, place.first + col * place.step) } else { (place.first + row * place.step, col) };
            bytes.extend_from_slice(if is_transposed && !is_vector { element(col, row) } else { element(row, col) });
        }
    }
    own.release();
    Ok(WeightView::new(own.dtype, rows, cols, Bytes::from_vec(bytes))?)
}

/// MXFP4 as the hub stores it, `[count, rows, blocks, 16]` and `[count, rows, blocks]`, with neighbours in a byte; ggml's blocks
/// have the scale first, and in a byte the values `i` and `i + 16`.
fn read_mxfp4(
    files: &SafetensorsFiles,
    name: &str,
    place: Place,
    (index, count): (usize, usize),
    [rows, cols]: [usize; 2],
) -> Result<WeightView, EngineError> {
    let [blocks_name, scales_name] = mxfp4_names(name);
    let num_blocks = cols.div_ceil(BLOCK);
    let stored_rows = rows.saturating_mul(place.step);
    let codes = files.bytes_of(&blocks_name, &[count, stored_rows, num_blocks, CODE_BYTES])?;
    let scales = files.bytes_of(&scales_name, &[count, stored_rows, num_blocks])?;
    let (codes, scales) = (codes.as_slice(), scales.as_slice());
    let mut bytes = Vec::with_capacity(rows * num_blocks * (CODE_BYTES + 1));
    for row in 0..rows {
        let first = (index * stored_rows + place.first + row * place.step) * num_blocks;
        for block in first..first + num_blocks {
            let codes = &codes[block * CODE_BYTES..(block + 1) * CODE_BYTES];
            let value = |i: usize| codes[i / 2] >> (4 * (i % 2)) & 15;
            bytes.push(scales[block]);
            bytes.extend((0..CODE_BYTES).map(|i| value(i) | value(i + CODE_BYTES) << 4));
        }
    }
    Ok(WeightView::new(DType::Ggml(GgmlType::Mxfp4), rows, cols, Bytes::from_vec(bytes))?)
}

//! Tensors, wherever a backend has them.

use device::{Backend, Tensor};

/// A tensor of these rows of `cols` values.
///
/// # Panics
/// When there is no memory for it.
pub fn tensor(backend: &dyn Backend, values: &[f32], cols: usize) -> Tensor {
    let rows = values.len() / cols;
    let mut tensor = backend.alloc(rows, cols).expect("memory for a tensor");
    tensor.set_rows(rows);
    tensor.as_mut_slice().copy_from_slice(values);
    backend.store(&mut tensor);
    tensor
}

/// The values of its rows.
pub fn fetched(backend: &dyn Backend, mut tensor: Tensor) -> Vec<f32> {
    backend.fetch(&mut tensor);
    tensor.as_slice().to_vec()
}

//! Tensors that live from step to step.

use crate::Tensor;

/// A tensor that grows to the largest size ever asked for.
#[derive(Default)]
pub struct Buffer(Option<Tensor>, usize);

impl Buffer {
    /// The tensor with so many rows; their values are any.
    pub fn rows(&mut self, rows: usize, cols: usize) -> &mut Tensor {
        let Self(tensor, capacity) = self;
        if tensor.as_ref().is_none_or(|tensor| tensor.cols() != cols || *capacity < rows) {
            // Freed before the next one is taken.
            *tensor = None;
            *capacity = rows.next_power_of_two();
            *tensor = Some(Tensor::new(*capacity, cols).expect("address space for buffers"));
        }
        let tensor = tensor.as_mut().expect("made above");
        tensor.set_rows(rows);
        tensor
    }
}

//! Activations, and weights as they lie in their files.

use std::any::Any;

use crate::{DType, DeviceError, kernel_args::ElementType, mmap::Bytes};

/// A dense row-major matrix of f32 activations: capacity for `max_rows`, of which `rows` are in use.
pub struct Tensor {
    data: crate::mmap::Pages<f32>,
    /// A device's own memory with the values, if they are there; `data` then has what was last copied from it.
    device: Option<Box<dyn Any + Send + Sync>>,
    rows: usize,
    max_rows: usize,
    cols: usize,
    max_cols: usize,
    element: ElementType,
}

impl Tensor {
    /// A zeroed tensor; pages are committed as they are first written.
    pub fn new(max_rows: usize, cols: usize) -> Result<Self, DeviceError> {
        let len =
            max_rows.checked_mul(cols).ok_or_else(|| DeviceError::Shape(format!("[{max_rows}, {cols}] values overflow")))?;
        Ok(Self {
            data: crate::mmap::Pages::zeroed(len)?,
            device: None,
            rows: 0,
            max_rows,
            cols,
            max_cols: cols,
            element: ElementType::F32,
        })
    }

    /// A tensor in `memory` of a device, which holds `max_rows * cols` zeros.
    pub fn on_device(max_rows: usize, cols: usize, memory: Box<dyn Any + Send + Sync>) -> Result<Self, DeviceError> {
        Ok(Self { device: Some(memory), ..Self::new(max_rows, cols)? })
    }

    /// Its memory on a device; `None` for a tensor of the host, and for memory that is no `T`.
    pub fn device<T: Any>(&self) -> Option<&T> {
        self.device.as_ref()?.downcast_ref()
    }

    /// The same, and the host's copy of the rows in use, `[rows * cols]`.
    pub fn device_and_copy<T: Any>(&mut self) -> Option<(&T, &mut [f32])> {
        let copy = &mut self.data.as_mut_slice()[..self.rows * self.cols];
        Some((self.device.as_ref()?.downcast_ref()?, copy))
    }

    /// Rows in use.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// How values lie in a device's memory: f32, but where the last phase that wrote the rows was told who reads them.
    pub(crate) fn element(&self) -> ElementType {
        self.element
    }

    /// What the rows that were set last are written as.
    pub(crate) fn set_element(&mut self, element: ElementType) {
        self.element = element;
    }

    /// Sets the rows in use; their values are whatever was last written.
    ///
    /// # Panics
    /// When `rows` is over the capacity.
    pub fn set_rows(&mut self, rows: usize) {
        assert!(rows <= self.max_rows, "{rows} rows in a tensor of {}", self.max_rows);
        self.rows = rows;
        self.element = ElementType::F32;
    }

    /// Makes it a tensor of fewer columns, or of as many again as it was made with; its values mean nothing then.
    ///
    /// # Panics
    /// When `cols` is over the capacity.
    pub fn set_cols(&mut self, cols: usize) {
        assert!(cols <= self.max_cols, "{cols} columns in a tensor of {}", self.max_cols);
        self.cols = cols;
    }

    /// The rows in use, `[rows * cols]`; of a tensor on a GPU, as [`Phases::fetch`](crate::Phases::fetch) left them.
    pub fn as_slice(&self) -> &[f32] {
        &self.data.as_slice()[..self.rows * self.cols]
    }

    /// The rows in use, `[rows * cols]`.
    pub fn as_mut_slice(&mut self) -> &mut [f32] {
        &mut self.data.as_mut_slice()[..self.rows * self.cols]
    }

    /// Row `i`, `[cols]`.
    pub fn row_mut(&mut self, i: usize) -> &mut [f32] {
        let cols = self.cols;
        &mut self.as_mut_slice()[i * cols..(i + 1) * cols]
    }

    /// Row `i`, `[cols]`.
    pub fn row(&self, i: usize) -> &[f32] {
        &self.as_slice()[i * self.cols..(i + 1) * self.cols]
    }
}

/// A weight matrix `[rows, cols]` as it lies in its file: whole rows of one type.
#[derive(Clone)]
pub struct WeightView {
    /// How the values are stored.
    pub dtype: DType,
    /// Number of rows (output features).
    pub rows: usize,
    /// Values of a row (input features).
    pub cols: usize,
    bytes: Bytes,
}

impl WeightView {
    /// Checks that `bytes` holds exactly `rows` rows.
    pub fn new(dtype: DType, rows: usize, cols: usize, bytes: Bytes) -> Result<Self, DeviceError> {
        let needed = dtype
            .row_bytes(cols)
            .and_then(|b| b.checked_mul(rows))
            .ok_or_else(|| DeviceError::Shape(format!("a {dtype} tensor cannot have the shape [{rows}, {cols}]")))?;
        if needed != bytes.len() {
            return Err(DeviceError::Shape(format!(
                "a {dtype} tensor of shape [{rows}, {cols}] takes {needed} bytes, the file holds {}",
                bytes.len()
            )));
        }
        Ok(Self { dtype, rows, cols, bytes })
    }

    /// The raw bytes, `rows` rows of equal length.
    pub fn bytes(&self) -> &[u8] {
        self.bytes.as_slice()
    }

    /// See [`Bytes::release`].
    pub fn release(&self) {
        self.bytes.release();
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.bytes.len().checked_div(self.rows).unwrap_or(0)
    }

    /// The raw bytes of row `i`.
    pub fn row(&self, i: usize) -> &[u8] {
        let n = self.row_bytes();
        &self.bytes()[i * n..(i + 1) * n]
    }

    /// Rows `start..end` as a view of the same bytes (fused q, k, v or gate and up weights).
    pub fn slice_rows(&self, start: usize, end: usize) -> Result<Self, DeviceError> {
        if start > end || end > self.rows {
            return Err(DeviceError::Shape(format!("rows {start}..{end} of a weight with {} rows", self.rows)));
        }
        let n = self.row_bytes();
        Self::new(self.dtype, end - start, self.cols, self.bytes.slice(start * n, end * n))
    }
}

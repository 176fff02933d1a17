//! Activations, and weights as they lie in their files.

use std::sync::Arc;

use crate::{
    DType, DeviceError,
    cuda::{CudaError, Driver, driver::DeviceMemory},
    mmap::Bytes,
};

/// A dense row-major matrix of f32 activations: capacity for `max_rows`, of which `rows` are in use.
pub struct Tensor {
    data: crate::mmap::Pages<f32>,
    /// Where the values are, if they are on a GPU; `data` then has what was last copied from there.
    device: Option<DeviceMemory>,
    rows: usize,
    max_rows: usize,
    cols: usize,
}

impl Tensor {
    /// A zeroed tensor; pages are committed as they are first written.
    pub fn new(max_rows: usize, cols: usize) -> Result<Self, DeviceError> {
        let len =
            max_rows.checked_mul(cols).ok_or_else(|| DeviceError::Shape(format!("[{max_rows}, {cols}] values overflow")))?;
        Ok(Self { data: crate::mmap::Pages::zeroed(len)?, device: None, rows: 0, max_rows, cols })
    }

    /// A zeroed tensor in a GPU's memory.
    pub(crate) fn on_device(driver: &Arc<dyn Driver>, max_rows: usize, cols: usize) -> Result<Self, DeviceError> {
        let tensor = Self::new(max_rows, cols)?;
        let device = DeviceMemory::zeroed(driver, max_rows * cols * size_of::<f32>())?;
        Ok(Self { device: Some(device), ..tensor })
    }

    /// Its memory on a GPU, if it is there.
    pub(crate) fn device(&self) -> Option<&DeviceMemory> {
        self.device.as_ref()
    }

    /// Copies the rows in use from the GPU; nothing for a tensor of the host.
    pub(crate) fn download(&mut self) -> Result<(), CudaError> {
        let values = &mut self.data.as_mut_slice()[..self.rows * self.cols];
        self.device.as_ref().map_or(Ok(()), |device| device.download(0, values))
    }

    /// The same for some of the rows.
    pub(crate) fn download_rows(&mut self, rows: &[usize]) -> Result<(), CudaError> {
        let Some(device) = &self.device else { return Ok(()) };
        let cols = self.cols;
        for &row in rows {
            let values = &mut self.data.as_mut_slice()[row * cols..(row + 1) * cols];
            device.download(row * cols * size_of::<f32>(), values)?;
        }
        Ok(())
    }

    /// Rows in use.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Sets the rows in use; their values are whatever was last written.
    ///
    /// # Panics
    /// When `rows` is over the capacity.
    pub fn set_rows(&mut self, rows: usize) {
        assert!(rows <= self.max_rows, "{rows} rows in a tensor of {}", self.max_rows);
        self.rows = rows;
    }

    /// The rows in use, `[rows * cols]`; of a tensor on a GPU, as [`Backend::fetch`](crate::Backend::fetch) left them.
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

//! Weights on a GPU, as they lie in their file, and products with them.

use std::sync::Arc;

use crate::{
    DType, DeviceError, LinearOptions, Precision, WeightView,
    backend::check_bias,
    kernel_args::{DevicePtr, EmbedArgs, GemvArgs},
};

use super::{
    CudaError,
    driver::{DeviceMemory, Driver},
    kernels::{GEMV_ROWS, Kernel, launch, weight_suffix},
};

/// Output features that a CTA of `gemv_*` computes.
const FEATURES_PER_CTA: usize = 4;

/// Columns that `gemv_*` takes at once.
const COLUMNS: usize = 8;

/// A weight `[out_features, in_features]` and its bias.
pub struct CudaLinear {
    weight: DeviceMemory,
    bias: Option<DeviceMemory>,
    row_bytes: usize,
    out_features: usize,
    in_features: usize,
    dtype: DType,
    precision: Precision,
    gemv: [Kernel; GEMV_ROWS.len()],
    dequantize: Kernel,
    embed: Kernel,
}

/// Rows of f32 on the device.
#[derive(Clone, Copy)]
pub struct Rows {
    /// The first.
    pub at: DevicePtr,
    /// How many.
    pub count: usize,
    /// Values of one.
    pub cols: usize,
}

impl CudaLinear {
    /// Copies a weight to the device.
    ///
    /// Errors: [`DeviceError::UnsupportedType`], [`DeviceError::Shape`] for a bias of another length, and the driver's.
    pub fn new(driver: &Arc<dyn Driver>, weight: &WeightView, options: &LinearOptions) -> Result<Self, DeviceError> {
        check_bias(weight, options)?;
        if !weight.cols.is_multiple_of(COLUMNS) {
            let (name, cols) = (&options.name, weight.cols);
            return Err(DeviceError::Unsupported(format!(
                "tensor `{name}` has {cols} columns, and a GPU multiplies multiples of {COLUMNS}; use device=\"cpu\""
            )));
        }
        let format = weight_suffix(weight.dtype).ok_or_else(|| unsupported(&options.name, weight.dtype))?;
        let gemv = |rows: usize| Kernel::named(&format!("gemv_{format}_r{rows}"));
        Ok(Self {
            gemv: [gemv(GEMV_ROWS[0])?, gemv(GEMV_ROWS[1])?, gemv(GEMV_ROWS[2])?, gemv(GEMV_ROWS[3])?],
            dequantize: Kernel::named(&format!("dequantize_{format}"))?,
            embed: Kernel::named(&format!("embed_{format}"))?,
            weight: DeviceMemory::of(driver, weight.bytes())?,
            bias: options.bias.as_ref().map(|bias| DeviceMemory::of(driver, bias)).transpose()?,
            row_bytes: weight.row_bytes(),
            out_features: weight.rows,
            in_features: weight.cols,
            dtype: weight.dtype,
            precision: options.precision,
        })
    }

    /// The address of the weight's first row.
    pub fn weight(&self) -> DevicePtr {
        self.weight.at()
    }

    /// The address of the bias.
    pub fn bias(&self) -> Option<DevicePtr> {
        self.bias.as_ref().map(DeviceMemory::at)
    }

    /// Bytes of a row of the weight.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Rows of the weight.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Columns of the weight.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// How the weight is stored.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// What it was loaded for.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// The kernel that takes the weight apart.
    pub fn dequantize(&self) -> Kernel {
        self.dequantize
    }

    /// Bytes of weight and bias on the device.
    pub fn bytes(&self) -> usize {
        self.weight.bytes() + self.bias.as_ref().map_or(0, DeviceMemory::bytes)
    }

    /// `out = (x @ weight^T + bias) * scale`, or that added to `out` (`[x.count, out_features]`), 8 rows at a time; a row gets
    /// the same bits beside any others.
    ///
    /// # Safety
    /// Both are memory of `driver` of these shapes.
    pub unsafe fn multiply(
        &self,
        driver: &Arc<dyn Driver>,
        x: Rows,
        out: DevicePtr,
        scale: f32,
        accumulate: bool,
    ) -> Result<(), CudaError> {
        let most = GEMV_ROWS[GEMV_ROWS.len() - 1];
        for first in (0..x.count).step_by(most) {
            let rows = most.min(x.count - first);
            let kernel = self.gemv[GEMV_ROWS.iter().position(|&n| rows <= n).expect("at most the largest")];
            let args = GemvArgs {
                x: x.at + (first * self.in_features * size_of::<f32>()) as u64,
                w: self.weight.at(),
                bias: self.bias().unwrap_or(0),
                out: out + (first * self.out_features * size_of::<f32>()) as u64,
                row_bytes: self.row_bytes as u64,
                num_rows: rows as u32,
                in_features: self.in_features as u32,
                out_features: self.out_features as u32,
                x_stride: self.in_features as u32,
                out_stride: self.out_features as u32,
                accumulate: accumulate.into(),
                scale,
                reserved: 0,
            };
            // SAFETY: the caller's promise; weight and bias have these shapes and live as long as this.
            unsafe { launch(driver, kernel, [self.out_features.div_ceil(FEATURES_PER_CTA), 1, 1], &args)? };
        }
        Ok(())
    }

    /// `out[i] = weight[ids[i]] * scale`, `[count, in_features]`.
    ///
    /// # Safety
    /// `ids` and `out` are memory of `driver` of these shapes, and every id is below `out_features`.
    pub unsafe fn embed(
        &self,
        driver: &Arc<dyn Driver>,
        ids: DevicePtr,
        count: usize,
        out: DevicePtr,
        scale: f32,
    ) -> Result<(), CudaError> {
        let args = EmbedArgs {
            table: self.weight.at(),
            token_ids: ids,
            out,
            row_bytes: self.row_bytes as u64,
            num_tokens: count as u32,
            cols: self.in_features as u32,
            scale,
            reserved: 0,
        };
        // SAFETY: the caller's promise; the table lives as long as this.
        unsafe { launch(driver, self.embed, [count, 1, 1], &args) }
    }
}

fn unsupported(name: &str, dtype: DType) -> DeviceError {
    let formats = Kernel::all().keys().filter_map(|kernel| kernel.strip_prefix("embed_"));
    let supported = formats.map(str::to_uppercase).collect::<Vec<_>>().join(", ");
    DeviceError::UnsupportedType { name: name.into(), dtype: format!("{dtype} (on a GPU)"), supported }
}

//! Weights on a GPU, packed or as they lie in their file, and products with the latter.

use std::sync::Arc;

use crate::{
    DType, DeviceError, LinearOptions, Precision, WeightView,
    backend::check_bias,
    kernel_args::{DevicePtr, ElementType, EmbedArgs, GemvArgs, GemvTarget, MAX_TARGETS, PackedEmbedArgs},
};

use super::{
    CudaError,
    dense::Product,
    driver::{DeviceMemory, Driver},
    gemm::PackedKernels,
    gemm_floats,
    kernels::{GEMM_ROWS, GEMV_ROWS, Kernel, launch, weight_suffix},
    packed::PackedFormat,
};

/// Output features that a CTA of `gemv_*` computes.
pub const FEATURES_PER_CTA: usize = 4;

/// Columns that `gemv_*` takes at once.
const COLUMNS: usize = 8;

/// A weight `[out_features, in_features]` and its bias.
pub struct CudaLinear {
    weight: DeviceMemory,
    bias: Option<DeviceMemory>,
    out_features: usize,
    in_features: usize,
    dtype: DType,
    precision: Precision,
    form: Form,
}

/// How a weight lies.
pub enum Form {
    /// As in its file.
    Stored(StoredKernels),
    /// For tensor cores.
    Packed(PackedKernels),
}

/// The kernels of weights that lie as in their file.
pub struct StoredKernels {
    /// Bytes of a row of the weight.
    pub row_bytes: usize,
    gemv: [Kernel; GEMV_ROWS.len()],
    /// The kernels for a few more rows, of formats that have them.
    pub gemm: Option<[Kernel; GEMM_ROWS.len()]>,
    /// The kernel that takes the weight apart; `None` where that is done of packed ones alone.
    pub dequantize: Option<Kernel>,
    embed: Kernel,
}

impl StoredKernels {
    fn new(format: &str, row_bytes: usize) -> Result<Self, CudaError> {
        let gemv = |rows: usize| Kernel::named(&format!("gemv_{format}_r{rows}"));
        Ok(Self {
            row_bytes,
            gemv: [gemv(GEMV_ROWS[0])?, gemv(GEMV_ROWS[1])?, gemv(GEMV_ROWS[2])?, gemv(GEMV_ROWS[3])?],
            gemm: gemm_floats::kernels(format),
            dequantize: Kernel::named(&format!("dequantize_{format}")).ok(),
            embed: Kernel::named(&format!("embed_{format}"))?,
        })
    }
}

/// Rows on the device.
#[derive(Clone, Copy)]
pub struct Rows {
    /// The first.
    pub at: DevicePtr,
    /// How many.
    pub count: usize,
    /// Values of one.
    pub cols: usize,
    /// How values are stored: f32, but for what feeds products that read 16 bits.
    pub element: ElementType,
}

/// Multiplies weights that lie as in their file, which are read once for 8 rows; a row gets the same bits beside any others.
///
/// # Safety
/// Rows and outputs are memory of `driver` of these shapes. All weights are of one format and width, all lie as in their file, at
/// most [`MAX_TARGETS`], and scale and `accumulate` are the same for all.
pub unsafe fn multiply_stored(driver: &Arc<dyn Driver>, x: Rows, products: &[Product<'_>]) -> Result<(), CudaError> {
    let [Product { linear, scale, accumulate, .. }, ..] = products else { return Ok(()) };
    let Form::Stored(stored) = &linear.form else { unreachable!("the caller looked") };
    assert_eq!(x.element, ElementType::F32, "rows of `gemv_*`");
    let most = GEMV_ROWS[GEMV_ROWS.len() - 1];
    let i = GEMV_ROWS.iter().position(|&rows| x.count.min(most) <= rows).expect("at most the largest");
    let (mut targets, mut ctas) = ([GemvTarget::default(); MAX_TARGETS], 0);
    for (target, Product { linear, out, .. }) in targets.iter_mut().zip(products) {
        *target = GemvTarget {
            w: linear.weight.at(),
            bias: linear.bias().unwrap_or(0),
            out: *out,
            out_features: linear.out_features as u32,
            out_stride: linear.out_features as u32,
            first_cta: ctas as u32,
            reserved: 0,
        };
        ctas += linear.out_features.div_ceil(FEATURES_PER_CTA);
    }
    let args = GemvArgs {
        x: x.at,
        targets,
        w_stride: stored.row_bytes as u64,
        num_rows: x.count as u32,
        in_features: x.cols as u32,
        x_stride: x.cols as u32,
        accumulate: (*accumulate).into(),
        scale: *scale,
        reserved: 0,
    };
    // SAFETY: the caller's promise; weights and biases have these shapes and live as long as the products.
    unsafe { launch(driver, stored.gemv[i], [ctas, x.count.div_ceil(GEMV_ROWS[i]), 1], &args) }
}

impl CudaLinear {
    /// Copies a weight to the device. So many threads pack it, if it is of a format that is packed ([`PackedFormat::of`]).
    ///
    /// Errors: [`DeviceError::UnsupportedType`], [`DeviceError::Shape`] for a bias of another length, and the driver's.
    pub fn new(
        driver: &Arc<dyn Driver>,
        weight: &WeightView,
        options: &LinearOptions,
        num_threads: usize,
    ) -> Result<Self, DeviceError> {
        check_bias(weight, options)?;
        if !weight.cols.is_multiple_of(COLUMNS) {
            let (name, cols) = (&options.name, weight.cols);
            return Err(DeviceError::Unsupported(format!(
                "tensor `{name}` has {cols} columns, and a GPU multiplies multiples of {COLUMNS}; use device=\"cpu\""
            )));
        }
        let format = weight_suffix(weight.dtype).ok_or_else(|| unsupported(&options.name, weight.dtype))?;
        let (memory, form) = if let Some(packed) = PackedFormat::of(weight.dtype, options.precision) {
            let kernels = PackedKernels::new(packed, &format)?;
            (DeviceMemory::of(driver, &packed.pack(weight, num_threads))?, Form::Packed(kernels))
        } else {
            let kernels = StoredKernels::new(&format, weight.row_bytes())?;
            (DeviceMemory::of(driver, weight.bytes())?, Form::Stored(kernels))
        };
        Ok(Self {
            weight: memory,
            form,
            bias: options.bias.as_ref().map(|bias| DeviceMemory::of(driver, bias)).transpose()?,
            out_features: weight.rows,
            in_features: weight.cols,
            dtype: weight.dtype,
            precision: options.precision,
        })
    }

    /// How the weight lies.
    pub fn form(&self) -> &Form {
        &self.form
    }

    /// The address of the weight.
    pub fn weight(&self) -> DevicePtr {
        self.weight.at()
    }

    /// The address of the bias.
    pub fn bias(&self) -> Option<DevicePtr> {
        self.bias.as_ref().map(DeviceMemory::at)
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

    /// Bytes of weight and bias on the device.
    pub fn bytes(&self) -> usize {
        self.weight.bytes() + self.bias.as_ref().map_or(0, DeviceMemory::bytes)
    }

    /// `out[i] = weight[ids[i]] * scale`, `[count, in_features]`.
    ///
    /// # Safety
    /// `ids` and `out` are memory of `driver` of these shapes, and `beyond`, which is read in the place of ids of `out_features`
    /// and more, is below it.
    pub unsafe fn embed(
        &self,
        driver: &Arc<dyn Driver>,
        (ids, count): (DevicePtr, usize),
        beyond: u32,
        out: DevicePtr,
        scale: f32,
    ) -> Result<(), CudaError> {
        let (num_tokens, cols, vocab_size) = (count as u32, self.in_features as u32, self.out_features as u32);
        match &self.form {
            Form::Stored(StoredKernels { row_bytes, embed, .. }) => {
                let (table, row_bytes) = (self.weight.at(), *row_bytes as u64);
                let token_ids = ids;
                let args =
                    EmbedArgs { table, token_ids, out, row_bytes, num_tokens, cols, vocab_size, beyond, scale, reserved: 0 };
                // SAFETY: the caller's promise; the table lives as long as this.
                unsafe { launch(driver, *embed, [count, 1, 1], &args) }
            }
            Form::Packed(PackedKernels { format, embed, .. }) => {
                let (table, panel_bytes) = (self.weight.at(), format.panel_bytes(self.in_features) as u64);
                let args = PackedEmbedArgs {
                    table,
                    token_ids: ids,
                    out,
                    panel_bytes,
                    num_tokens,
                    cols,
                    vocab_size,
                    beyond,
                    scale,
                    reserved: 0,
                };
                // SAFETY: likewise.
                unsafe { launch(driver, *embed, [count, 1, 1], &args) }
            }
        }
    }
}

impl CudaLinear {
    /// Copies rows of the weight to the host as floats, from `first` on as many as `out` has, `[rows, in_features]`.
    ///
    /// # Panics
    /// When the weight has not as many.
    pub fn read_rows(&self, driver: &Arc<dyn Driver>, first: usize, out: &mut [f32]) -> Result<(), CudaError> {
        let count = out.len() / self.in_features;
        assert!(first + count <= self.out_features && out.len() == count * self.in_features, "rows of the weight");
        let ids: Vec<u32> = (first as u32..).take(count).collect();
        let ids = DeviceMemory::of(driver, &ids)?;
        let rows = DeviceMemory::new(driver, size_of_val(out))?;
        // SAFETY: the ids are below `out_features`; both lists were just made.
        unsafe { self.embed(driver, (ids.at(), count), 0, rows.at(), 1.0)? };
        rows.download(0, out)
    }
}

fn unsupported(name: &str, dtype: DType) -> DeviceError {
    let formats = Kernel::all().keys().filter_map(|kernel| kernel.strip_prefix("embed_"));
    let supported = formats.map(str::to_uppercase).collect::<Vec<_>>().join(", ");
    DeviceError::UnsupportedType { name: name.into(), dtype: format!("{dtype} (on a GPU)"), supported }
}

//! Products of weights and the rows of a step: few rows by `gemv_*` and, of packed weights and those of 16 bits, `gemm_*`; more,
//! of packed weights, in tiles by `gemm_*`; many by the driver's products of matrices.
//!
//! A product of matrices reads 16 bits: activations are rounded to the weight's type, bf16 for quantized ones, which are taken
//! apart a slice of their features at a time. Tiles round activations likewise, and weights as they go. Weights in f32 keep f32.
//! What must give the same bits whatever the rows stays with `gemv_*` and `gemm_*` for few.

use std::sync::Arc;

use crate::{
    DType, Precision, WorkspaceShape,
    kernel_args::{DequantizeArgs, DevicePtr, ElementType, FillBiasArgs, MAX_TARGETS, PackedDequantizeArgs, RoundValuesArgs},
};

use super::{
    CudaError,
    driver::{Driver, MATMUL_WORKSPACE, Matmul},
    gemm::PackedKernels,
    gemm_floats,
    kernels::{GEMV_ROWS, Kernel, launch},
    linear::{self, CudaLinear, Form, Rows, StoredKernels},
    memory::Scratch,
    packed::{BLOCK_COLUMNS, PANEL_ROWS, PackedFormat},
    pieces::{self, PieceProducts, TileWay, Way},
};

/// Rows up to which a weight in f32 is multiplied by `gemv_*`.
const FEW_ROWS: usize = GEMV_ROWS[GEMV_ROWS.len() - 1];
/// Values of several such rows at most: each CTA reads them again, and from more than L1 that takes longer than products of
/// matrices do.
const FEW_VALUES: usize = 16 << 10;
/// Rows up to which a quantized weight is multiplied by `gemv_*`, if it is not packed: its bytes are read once for 8 rows, and
/// taken apart they would be written and read in 16 bits.
const FEW_STORED_ROWS: usize = 32;
/// Rows up to which packed weights are multiplied by tiles of rows: as many as one launch takes. What more rows need of them is
/// worth their being taken apart once.
const TILED_ROWS: usize = pieces::MAX_TILED_ROWS;
/// Bytes of a slice of a quantized weight in bf16. A larger one than L2 holds is read from memory again, but a product of few
/// features leaves multiprocessors idle: Llama-3-8B's layers in Q4_K take 15 % longer for 256 rows on an H200 in slices of 32 MB.
pub const SLICE_BYTES: usize = 128 << 20;
/// A slice begins at a multiple of so many features: with a panel, and its columns of the output are aligned to 256 bytes.
const SLICE_FEATURES: usize = PANEL_ROWS;
/// Values that a CTA of `round_values` takes.
const ROUNDED_VALUES: usize = 1024;
/// Values that a CTA of `dequantize_*` writes.
const DEQUANTIZED_VALUES: usize = 4096;
/// Blocks that a CTA of `packed_dequantize_*` writes.
const DEQUANTIZED_BLOCKS: usize = 4;

/// `out = (x @ weight^T + bias) * scale`, or that added to `out`.
#[derive(Clone, Copy)]
pub struct Product<'a> {
    /// The weight, with its bias.
    pub linear: &'a CudaLinear,
    /// `[x.count, out_features]`.
    pub out: DevicePtr,
    /// See above.
    pub scale: f32,
    /// Whether `out` is added to.
    pub accumulate: bool,
    /// Which of a model's layers it is to adapters ([`Linear::site`](crate::Linear::site)).
    pub site: Option<u32>,
}

/// What products need beside weights.
pub struct Dense {
    driver: Arc<dyn Driver>,
    round_values: Kernel,
    fill_bias: Kernel,
    /// Whether the driver multiplies matrices.
    has_matmul: bool,
    pieces: PieceProducts,
    rounded: Scratch,
    /// A slice of a weight, or the parts of tiles.
    slice: Scratch,
    slice_bytes: usize,
    workspace: Scratch,
}

impl Dense {
    /// `slice_bytes`: see [`super::CudaOptions`].
    ///
    /// Errors: [`CudaError::NoSuchKernel`].
    pub fn new(driver: &Arc<dyn Driver>, slice_bytes: usize) -> Result<Self, CudaError> {
        let has_matmul = driver.check_matmul().inspect_err(|error| {
            tracing::warn!("prompts are computed a few rows at a time, which is slow: {error}");
        });
        Ok(Self {
            driver: Arc::clone(driver),
            round_values: Kernel::named("round_values")?,
            fill_bias: Kernel::named("fill_bias")?,
            has_matmul: has_matmul.is_ok(),
            pieces: PieceProducts::default(),
            rounded: Scratch::default(),
            slice: Scratch::default(),
            slice_bytes,
            workspace: Scratch::default(),
        })
    }

    /// Multiplies the rows by every weight.
    ///
    /// # Safety
    /// `x` and every `out` are memory of the driver of these shapes.
    pub unsafe fn multiply(&mut self, x: Rows, products: &[Product<'_>]) -> Result<(), CudaError> {
        let mut rounded = None;
        let mut left = products;
        while let [product, ..] = *left {
            let linear = product.linear;
            assert_eq!(x.cols, linear.in_features(), "columns of the input");
            let is_few = self.is_few(x.count, linear);
            let tiles = self.tiles(x.count, linear);
            let most = if is_few || tiles.is_some() { MAX_TARGETS } else { 1 };
            let (alike, rest) = left.split_at(left.iter().take(most).take_while(|other| is_alike(&product, other)).count());
            left = rest;
            let element = operand(linear.dtype());
            if let Some(way) = way(linear).filter(|_| is_few) {
                let input = if x.count > pieces::F32_ROWS { Some(self.input(x, element, &mut rounded)?) } else { None };
                // SAFETY: the caller's promise; these are alike, and what is rounded is of the same shape.
                unsafe { self.pieces.multiply(&self.driver, way, (x, input), alike)? };
                continue;
            }
            if is_few {
                // SAFETY: likewise.
                unsafe { linear::multiply_stored(&self.driver, x, alike)? };
                continue;
            }
            let input = self.input(x, element, &mut rounded)?;
            if let Some(way) = tiles {
                let parts = self.slice.bytes(&self.driver, pieces::tile_part_bytes(x.count))?;
                let rows = Rows { at: input, element, ..x };
                // SAFETY: the caller's promise; these are alike, and the rows were rounded above.
                unsafe { self.pieces.multiply_tiles(&self.driver, way, rows, parts, alike)? };
                continue;
            }
            self.add_bias(x.count, product)?;
            let matmul = Matmul {
                x: input,
                weight: linear.weight(),
                out: product.out,
                element,
                rows: x.count,
                out_features: linear.out_features(),
                in_features: x.cols,
                out_stride: linear.out_features(),
                scale: product.scale,
                accumulate: product.accumulate || linear.bias().is_some(),
                workspace: self.workspace.bytes(&self.driver, MATMUL_WORKSPACE)?,
            };
            if is_quantized(linear.dtype()) {
                self.multiply_slices(linear, matmul)?;
            } else {
                // SAFETY: the caller's promise; the rows were rounded above.
                unsafe { self.driver.matmul(&matmul)? };
            }
        }
        Ok(())
    }

    /// The type that every product with so many rows reads, or f32, from which each takes what it reads.
    pub fn input_element<'a>(&self, rows: usize, linears: impl IntoIterator<Item = &'a CudaLinear>) -> ElementType {
        let mut elements = linears.into_iter().map(|linear| {
            let reads_f32 = self.is_few(rows, linear) && (rows <= pieces::F32_ROWS || way(linear).is_none());
            if reads_f32 { ElementType::F32 } else { operand(linear.dtype()) }
        });
        let first = elements.next().unwrap_or(ElementType::F32);
        // What f16 does not reach is for `round_values`.
        if first == ElementType::BF16 && elements.all(|element| element == first) { first } else { ElementType::F32 }
    }

    /// Whether `gemv_*` or `gemm_*` for few rows multiply by a weight.
    fn is_few(&self, rows: usize, linear: &CudaLinear) -> bool {
        let has_others = match linear.form() {
            Form::Packed(_) => true,
            Form::Stored(_) => self.has_matmul,
        };
        !has_others || linear.precision() != Precision::Fast || is_few(linear.dtype(), rows, linear.in_features())
    }

    /// How tiles of rows are multiplied by a weight; `None` where they are not.
    fn tiles(&self, rows: usize, linear: &CudaLinear) -> Option<TileWay> {
        let Form::Packed(kernels) = linear.form() else { return None };
        let is_tiled = !self.is_few(rows, linear) && (rows <= TILED_ROWS || !self.has_matmul);
        is_tiled.then(|| kernels.tile_way(linear.in_features()))
    }

    /// The rows as products of a weight read them that do not read f32.
    pub fn rounded_for(&mut self, x: Rows, linear: &CudaLinear) -> Result<DevicePtr, CudaError> {
        self.rounded(x, operand(linear.dtype()))
    }

    /// The rows as products read them that read `element`; `rounded`: those that were last rounded.
    fn input(
        &mut self,
        x: Rows,
        element: ElementType,
        rounded: &mut Option<(ElementType, DevicePtr)>,
    ) -> Result<DevicePtr, CudaError> {
        let input = match rounded.filter(|&(of, _)| of == element) {
            Some((_, at)) => at,
            None if x.element == element => x.at,
            None => self.rounded(x, element)?,
        };
        *rounded = Some((element, input));
        Ok(input)
    }

    fn rounded(&mut self, x: Rows, element: ElementType) -> Result<DevicePtr, CudaError> {
        assert_eq!(x.element, ElementType::F32, "rows that are rounded once");
        let count = x.count * x.cols;
        let out = self.rounded.bytes(&self.driver, count * 2)?;
        let args = RoundValuesArgs { x: x.at, out, count: count as u64, out_type: element as u32, reserved: 0 };
        // SAFETY: the rows are the caller's, the output has room for as many values.
        unsafe { launch(&self.driver, self.round_values, [count.div_ceil(ROUNDED_VALUES), 1, 1], &args)? };
        Ok(out)
    }

    /// What the product is then added to.
    fn add_bias(&self, rows: usize, product: Product<'_>) -> Result<(), CudaError> {
        let Some(bias) = product.linear.bias() else { return Ok(()) };
        let args = FillBiasArgs {
            bias,
            out: product.out,
            num_rows: rows as u32,
            cols: product.linear.out_features() as u32,
            accumulate: product.accumulate.into(),
            scale: product.scale,
        };
        // SAFETY: the output has these rows, the bias a value for each column.
        unsafe { launch(&self.driver, self.fill_bias, [rows, 1, 1], &args) }
    }

    fn multiply_slices(&mut self, linear: &CudaLinear, matmul: Matmul) -> Result<(), CudaError> {
        // Packed weights are taken apart by whole panels.
        let features = slice_features(self.slice_bytes, matmul.in_features).min(matmul.out_features.next_multiple_of(PANEL_ROWS));
        let memory = self.slice.bytes(&self.driver, features * matmul.in_features * 2)?;
        for first in (0..matmul.out_features).step_by(features) {
            let out_features = features.min(matmul.out_features - first);
            let out = matmul.out + (first * size_of::<f32>()) as u64;
            // SAFETY: the slice lies in the weight, the memory has room for it, and `out` has the columns from `first` on.
            unsafe {
                self.dequantize(linear, first, &Matmul { weight: memory, out_features, ..matmul })?;
                self.driver.matmul(&Matmul { weight: memory, out, out_features, ..matmul })?;
            }
        }
        Ok(())
    }

    /// Takes the features of `slice` apart, from `first` on.
    ///
    /// # Safety
    /// The weight has them, and `slice.weight` has room for them.
    unsafe fn dequantize(&self, linear: &CudaLinear, first: usize, slice: &Matmul) -> Result<(), CudaError> {
        let &Matmul { weight: out, element, out_features, in_features, .. } = slice;
        let (cols, out_type) = (in_features as u32, element as u32);
        match linear.form() {
            Form::Stored(StoredKernels { row_bytes, dequantize, .. }) => {
                let w = linear.weight() + (first * row_bytes) as u64;
                let (row_bytes, num_rows) = (*row_bytes as u64, out_features as u32);
                let args = DequantizeArgs { w, out, row_bytes, num_rows, cols, out_type, reserved: 0 };
                let grid = [(out_features * in_features).div_ceil(DEQUANTIZED_VALUES), 1, 1];
                let kernel = dequantize.expect("a format that is not packed");
                // SAFETY: the caller's promise.
                unsafe { launch(&self.driver, kernel, grid, &args) }
            }
            Form::Packed(PackedKernels { format, dequantize, .. }) => {
                let panel_bytes = format.panel_bytes(in_features);
                // A slice begins with a panel.
                let w = linear.weight() + (first / PANEL_ROWS * panel_bytes) as u64;
                let panel_bytes = panel_bytes as u64;
                let args = PackedDequantizeArgs { w, out, panel_bytes, cols, out_type };
                let blocks = in_features / BLOCK_COLUMNS;
                let grid = [blocks.div_ceil(DEQUANTIZED_BLOCKS), out_features.div_ceil(PANEL_ROWS), 1];
                // SAFETY: the caller's promise.
                unsafe { launch(&self.driver, *dequantize, grid, &args) }
            }
        }
    }

    /// Addresses that graphs know.
    pub fn buffers(&self) -> [DevicePtr; 5] {
        let [parts, arrivals] = self.pieces.buffers();
        [self.rounded.at(), self.slice.at(), self.workspace.at(), parts, arrivals]
    }

    /// Bytes of the buffers once the largest step has run.
    pub fn workspace_bytes(&self, shape: &WorkspaceShape) -> u64 {
        self.planned_bytes(shape).iter().sum::<usize>() as u64
    }

    /// Steps of that shape are the largest.
    pub fn plan(&mut self, shape: &WorkspaceShape) {
        let [rounded, slice, workspace, parts] = self.planned_bytes(shape);
        self.rounded.plan(rounded);
        self.slice.plan(slice);
        self.workspace.plan(workspace);
        self.pieces.plan(parts);
    }

    /// Bytes of each of the buffers.
    fn planned_bytes(&self, shape: &WorkspaceShape) -> [usize; 4] {
        let &WorkspaceShape { num_tokens, dtype, precision, .. } = shape;
        // What a recurrent layer gives is no wider than half of its projections: there is a gate for each column.
        let widest = shape.hidden_size.max(shape.intermediate_size).max(shape.num_heads * shape.head_dim);
        let widest = widest.max(shape.recurrent_width / 2);
        let is_by_pieces = PackedFormat::of(dtype, precision).is_some() || gemm_floats::takes(dtype, precision);
        let has_more = precision == Precision::Fast && !is_few(dtype, num_tokens, widest);
        let is_tiled = PackedFormat::of(dtype, precision).is_some();
        // The type is that of one weight; others may be of types that have no tiles.
        let has_many = self.has_matmul && has_more;
        let slice = if has_many && is_quantized(dtype) { slice_features(self.slice_bytes, widest) * widest * 2 } else { 0 };
        let is_rounded =
            if is_by_pieces { num_tokens > pieces::F32_ROWS } else { has_many && operand(dtype) != ElementType::F32 };
        [
            if is_rounded { num_tokens * widest * 2 } else { 0 },
            slice.max(if has_more && is_tiled { pieces::tile_part_bytes(num_tokens) } else { 0 }),
            if has_many { MATMUL_WORKSPACE } else { 0 },
            if is_by_pieces { pieces::planned_part_bytes(num_tokens) } else { 0 },
        ]
    }
}

/// How `gemm_*` multiply by a weight; `None` where they do not.
fn way(linear: &CudaLinear) -> Option<Way> {
    match linear.form() {
        Form::Packed(kernels) => Some(kernels.way(linear.in_features())),
        Form::Stored(StoredKernels { gemm: Some(gemm), row_bytes, .. })
            if gemm_floats::takes(linear.dtype(), linear.precision()) =>
        {
            Some(gemm_floats::way(*gemm, *row_bytes))
        }
        Form::Stored(_) => None,
    }
}

/// Whether one launch computes both: products of the same rows with weights of one format, that are used alike.
fn is_alike(one: &Product<'_>, other: &Product<'_>) -> bool {
    let of = |product: &Product<'_>| {
        let linear = product.linear;
        (linear.dtype(), linear.precision(), linear.in_features(), product.scale.to_bits(), product.accumulate)
    };
    of(one) == of(other)
}

/// Features of a slice of a quantized weight at most.
fn slice_features(slice_bytes: usize, in_features: usize) -> usize {
    (slice_bytes / (in_features * 2) / SLICE_FEATURES).max(1) * SLICE_FEATURES
}

/// Whether products of matrices are not worth it for so many rows.
fn is_few(dtype: DType, rows: usize, in_features: usize) -> bool {
    match dtype {
        DType::BF16 | DType::F16 => rows <= pieces::MAX_ROWS,
        _ if PackedFormat::of(dtype, Precision::Fast).is_some() => rows <= pieces::MAX_ROWS,
        _ if is_quantized(dtype) => rows <= FEW_STORED_ROWS,
        _ => rows == 1 || rows <= FEW_ROWS && rows * in_features <= FEW_VALUES,
    }
}

/// What a product of matrices reads for such a weight.
fn operand(dtype: DType) -> ElementType {
    match dtype {
        DType::F32 => ElementType::F32,
        DType::F16 => ElementType::F16,
        _ => ElementType::BF16,
    }
}

fn is_quantized(dtype: DType) -> bool {
    matches!(dtype, DType::Ggml(_))
}

//! Norms and activations: a launch each over rows.

use crate::{
    Activation, Constant, ElementwisePhases, EmbeddingTable, LayerInputArgs, Norm, NormKind, StepMetadata, Tensor, Xielu,
    kernel_args::{ActivationKind, DevicePtr, ElementType, GatedActivationArgs, LayerInputsArgs, NormArgs, ScaleAndClampArgs},
};

use super::{
    CudaBackend, CudaError, attention,
    backend::{State, cuda, device, done, rows},
    kernels::{MAX_GRID_Y, launch},
    linear::Rows,
    memory::Constants,
};

/// Columns that a CTA of `gated_activation` computes.
const ACTIVATION_COLS: usize = 1024;
/// Values of a CTA of `scale_and_clamp`.
const CLAMPED_VALUES: usize = 1024;
/// Parts of rows of a CTA of `layer_inputs`.
const LAYER_INPUT_PARTS: usize = 8;

/// What `rms_norm` or `layer_norm` is to do; see `NormArgs`.
#[derive(Default)]
pub struct NormPass<'a> {
    pub add: Option<DevicePtr>,
    pub post_norm: Option<&'a Norm>,
    pub scale: f32,
    pub norm: Option<&'a Norm>,
    pub out: DevicePtr,
    pub element: ElementType,
}

/// How a gate is applied; see `GatedActivationArgs`.
#[derive(Clone, Copy, Default)]
pub struct Gating {
    pub activation: u32,
    /// 0: rows have no weights.
    pub weights: DevicePtr,
    pub alpha: f32,
    pub limit: f32,
    pub xielu: Xielu,
}

impl Gating {
    pub fn of(activation: Activation) -> Self {
        let xielu = if let Activation::Xielu(xielu) = activation { xielu } else { Xielu::default() };
        let alpha = if let Activation::Swish(beta) = activation { beta } else { 0.0 };
        Self { activation: attention::activation_kind(activation), alpha, xielu, ..Self::default() }
    }
}

impl CudaBackend {
    /// Adds to rows and norms them, as the pass says.
    pub(super) fn norm_pass(&self, constants: &mut Constants, x: Rows, pass: &NormPass<'_>) -> Result<(), CudaError> {
        let mut constant = |values: Option<&Constant>| values.map_or(Ok(0), |values| constants.of(self.driver(), values));
        let mut affine = |norm: Option<&Norm>| -> Result<_, CudaError> {
            Ok((constant(norm.map(|norm| &norm.weight))?, constant(norm.and_then(|norm| norm.bias.as_ref()))?))
        };
        let (post_weight, post_bias) = affine(pass.post_norm)?;
        let (weight, bias) = affine(pass.norm)?;
        let kinds = [pass.post_norm, pass.norm].map(|norm| norm.map(|norm| norm.kind));
        let kernel = match kinds {
            [Some(a), Some(b)] if a != b => panic!("two kinds of norms in one pass"),
            [Some(NormKind::Layer), _] | [_, Some(NormKind::Layer)] => self.kernels.layer_norm,
            _ => self.kernels.rms_norm,
        };
        let args = NormArgs {
            x: x.at,
            y: pass.add.unwrap_or(0),
            post_weight,
            post_bias,
            weight,
            bias,
            out: pass.out,
            num_rows: x.count as u32,
            cols: x.cols as u32,
            out_type: pass.element as u32,
            eps: pass.norm.map_or(0.0, |norm| norm.eps),
            post_eps: pass.post_norm.map_or(0.0, |norm| norm.eps),
            y_scale: pass.scale,
        };
        // SAFETY: rows, the addition and the output are buffers of these shapes; weights and biases have as many values as a row.
        unsafe { launch(self.driver(), kernel, [x.count, 1, 1], &args) }
    }

    /// `out = activation(gate) * up`, or `activation(gate)` where `up` is 0.
    pub(super) fn activate(
        &self,
        gate: Rows,
        up: DevicePtr,
        out: (DevicePtr, ElementType),
        gating: Gating,
    ) -> Result<(), CudaError> {
        self.activate_part(gate, (up, gate.cols), out, gating)
    }

    /// The same with rows of `up` that begin so many columns behind each other.
    fn activate_part(
        &self,
        gate: Rows,
        (up, up_stride): (DevicePtr, usize),
        (out, element): (DevicePtr, ElementType),
        gating: Gating,
    ) -> Result<(), CudaError> {
        let value_bytes = if element == ElementType::F32 { size_of::<f32>() } else { 2 };
        let bytes = |cols: usize| (cols * size_of::<f32>()) as u64;
        let Gating { activation, weights, alpha, limit, xielu: Xielu { positive, negative, linear, eps } } = gating;
        for first in (0..gate.count).step_by(MAX_GRID_Y) {
            let num_rows = MAX_GRID_Y.min(gate.count - first);
            let args = GatedActivationArgs {
                gate: gate.at + bytes(first * gate.cols),
                up: if up == 0 { 0 } else { up + bytes(first * up_stride) },
                weights: if weights == 0 { 0 } else { weights + (first * size_of::<f32>()) as u64 },
                out: out + (first * gate.cols * value_bytes) as u64,
                num_rows: num_rows as u32,
                cols: gate.cols as u32,
                gate_stride: gate.cols as u32,
                up_stride: up_stride as u32,
                activation,
                out_type: element as u32,
                alpha,
                limit,
                positive,
                negative,
                linear,
                eps,
            };
            let grid = [gate.cols.div_ceil(ACTIVATION_COLS), num_rows, 1];
            // SAFETY: each is a buffer of `gate.count` rows of this width, or no buffer.
            unsafe { launch(self.driver(), self.kernels.gated_activation, grid, &args)? };
        }
        Ok(())
    }

    fn try_layer_inputs(&self, args: &LayerInputArgs<'_>) -> Result<(), CudaError> {
        let LayerInputArgs { x, tokens, norm, scale } = args;
        assert_eq!([x.rows(), x.cols()], [tokens.rows(), tokens.cols()], "inputs of layers beside what was looked up");
        assert!(norm.kind == NormKind::Rms && norm.bias.is_none(), "an RMS norm of inputs of layers");
        let width = norm.weight.len();
        assert!(x.cols().is_multiple_of(width), "parts of {} columns", x.cols());
        let num_parts = x.rows() * x.cols() / width;
        let args = LayerInputsArgs {
            x: device(x).at(),
            tokens: device(tokens).at(),
            weight: self.state().constants.of(self.driver(), &norm.weight)?,
            num_parts: num_parts as u32,
            width: width as u32,
            eps: norm.eps,
            scale: *scale,
        };
        // SAFETY: both are tensors of these parts, and the weight has a part's width.
        unsafe { launch(self.driver(), self.kernels.layer_inputs, [num_parts.div_ceil(LAYER_INPUT_PARTS), 1, 1], &args) }
    }

    fn try_add_positions(&self, x: &Tensor, table: EmbeddingTable<'_>, step: &StepMetadata) -> Result<(), CudaError> {
        let EmbeddingTable::Loaded(table) = table else { panic!("a table of positions that lies in its file") };
        let x = rows(x);
        assert_eq!(table.in_features, x.cols, "columns of a table of positions");
        let are_there = step.rope_positions.iter().all(|position| (*position as usize) < table.out_features);
        assert!(are_there && step.rope_positions.len() == x.count, "positions of the table, one a row");
        let (added, positions) = {
            let State { lists, projected, .. } = &mut *self.state();
            (projected.floats(self.driver(), x.count * x.cols)?, lists.positions()[1])
        };
        // SAFETY: the step's positions are checked, and `added` has a row for each of the width of the table.
        unsafe { cuda(table).embed(self.driver(), (positions, x.count), 0, added, 1.0)? };
        self.launch_on_rows("add_rows", x, added, 1.0)
    }

    fn scale_and_clamp(&self, x: &Tensor, scale: f32, [least, most]: [f32; 2]) -> Result<(), CudaError> {
        let count = x.rows() * x.cols();
        let args = ScaleAndClampArgs { x: device(x).at(), count: count as u64, scale, least, most, reserved: 0 };
        // SAFETY: the tensor has so many values.
        unsafe { launch(self.driver(), self.kernels.scale_and_clamp, [count.div_ceil(CLAMPED_VALUES), 1, 1], &args) }
    }
}

impl ElementwisePhases for CudaBackend {
    fn layer_inputs(&self, args: LayerInputArgs<'_>) {
        done(self.try_layer_inputs(&args));
    }

    fn multiply(&self, x: &mut Tensor, by: &Tensor, first: usize) {
        assert!(x.rows() == by.rows() && first + x.cols() <= by.cols(), "rows and columns that are multiplied");
        let (x, part) = (rows(x), device(by).at() + (first * size_of::<f32>()) as u64);
        let gating = Gating { activation: ActivationKind::Identity as u32, ..Gating::default() };
        done(self.activate_part(x, (part, by.cols()), (x.at, x.element), gating));
    }

    fn scale(&self, x: &mut Tensor, factor: f32) {
        done(self.scale_and_clamp(x, factor, [f32::NEG_INFINITY, f32::INFINITY]));
    }

    fn clamp(&self, x: &mut Tensor, bounds: [f32; 2]) {
        done(self.scale_and_clamp(x, 1.0, bounds));
    }

    fn normed(&self, x: &mut Tensor, norm: &Norm, activation: Option<Activation>) {
        let x = rows(x);
        let pass = NormPass { norm: Some(norm), out: x.at, ..NormPass::default() };
        done(self.norm_pass(&mut self.state().constants, x, &pass));
        if let Some(activation) = activation {
            done(self.activate(x, 0, (x.at, x.element), Gating::of(activation)));
        }
    }

    fn add_positions(&self, x: &mut Tensor, table: EmbeddingTable<'_>, step: &StepMetadata) {
        done(self.try_add_positions(x, table, step));
    }

    fn gated(&self, activation: Activation, gate: &mut Tensor, up: &Tensor) {
        assert_eq!([gate.rows(), gate.cols()], [up.rows(), up.cols()], "rows and columns of a gate and what it gates");
        let gate = rows(gate);
        done(self.activate(gate, device(up).at(), (gate.at, gate.element), Gating::of(activation)));
    }
}

//! Several residual streams, and gates that keep the largest values (`kernels/streams.cu`): a launch a phase.

use crate::{
    Constant, MAX_STREAMS, Norm, StreamArgs, StreamPhases, Tensor,
    kernel_args::{DevicePtr, ElementType, StreamRowsArgs, StreamsArgs},
};

use super::{
    CudaBackend, CudaError,
    backend::{device, done, rows},
    elementwise::NormPass,
    kernels::{Kernel, launch},
    linear::Rows,
};

/// Columns that a CTA of `streams_*` computes.
const STREAM_COLS: usize = 1024;
/// Values of a CTA of `add_rows`.
const ADDED_VALUES: usize = 1024;

impl CudaBackend {
    /// Launches `streams_predict` or `streams_correct`, with as many factors.
    fn mix_streams(
        &self,
        kernel: &str,
        args: &StreamArgs<'_>,
        factors: usize,
        scale: Option<&Constant>,
    ) -> Result<(), CudaError> {
        let StreamArgs { routed, coefficients, streams, active, hidden } = args;
        let (num_rows, num_streams, cols) = (routed.rows(), streams.len(), hidden.cols());
        assert!(num_streams <= MAX_STREAMS && *active < num_streams, "{num_streams} streams");
        assert_eq!((routed.cols(), coefficients.len()), (num_streams, factors * num_streams), "what a router made of the row");
        let is_like = |tensor: &Tensor| (tensor.rows(), tensor.cols()) == (num_rows, cols);
        assert!(is_like(hidden) && streams.iter().all(is_like), "rows and columns of streams");
        assert!(cols.is_multiple_of(4) && scale.is_none_or(|scale| scale.len() == cols), "columns of streams");
        let mut addresses = [0; MAX_STREAMS];
        for (address, stream) in addresses.iter_mut().zip(&**streams) {
            *address = device(stream).at();
        }
        let constants = &mut self.state().constants;
        let args = StreamsArgs {
            streams: addresses,
            routed: device(routed).at(),
            coefficients: constants.of(self.driver(), coefficients)?,
            scale: scale.map_or(Ok(0), |scale| constants.of(self.driver(), scale))?,
            hidden: device(hidden).at(),
            num_rows: num_rows as u32,
            cols: cols as u32,
            num_streams: num_streams as u32,
            active: *active as u32,
        };
        // SAFETY: all are buffers of these shapes, which were checked.
        unsafe { launch(self.driver(), Kernel::named(kernel)?, [num_rows, cols.div_ceil(STREAM_COLS), 1], &args) }
    }

    fn change_rows(&self, kernel: &str, x: &Tensor, other: Option<&Tensor>, value: f32) -> Result<(), CudaError> {
        assert!(other.is_none_or(|other| [other.rows(), other.cols()] == [x.rows(), x.cols()]), "rows and columns beside others");
        self.launch_on_rows(kernel, rows(x), other.map_or(0, |other| device(other).at()), value)
    }

    /// Launches `add_rows`, `match_size` or `keep_largest`; `other`, where it is not 0, has rows and columns like `x`.
    pub(super) fn launch_on_rows(&self, kernel: &str, x: Rows, other: DevicePtr, value: f32) -> Result<(), CudaError> {
        let args = StreamRowsArgs { x: x.at, other, num_rows: x.count as u32, cols: x.cols as u32, value, reserved: 0 };
        let ctas = if kernel == "add_rows" { (x.count * x.cols).div_ceil(ADDED_VALUES) } else { x.count };
        // SAFETY: both are buffers of this shape.
        unsafe { launch(self.driver(), Kernel::named(kernel)?, [ctas, 1, 1], &args) }
    }

    fn copy_rows(&self, x: &Tensor, norm: Option<&Norm>, out: &mut Tensor) -> Result<(), CudaError> {
        assert_eq!(x.cols(), out.cols(), "columns of a copy");
        out.set_rows(x.rows());
        let (from, out) = (rows(x), device(out).at());
        if norm.is_none() {
            return self.driver().copy(out, from.at, from.count * from.cols * size_of::<f32>());
        }
        let pass = NormPass { norm, out, element: ElementType::F32, ..NormPass::default() };
        self.norm_pass(&mut self.state().constants, from, &pass)
    }
}

impl StreamPhases for CudaBackend {
    fn predict(&self, args: StreamArgs<'_>) {
        args.hidden.set_rows(args.routed.rows());
        let factors = args.streams.len().pow(2);
        done(self.mix_streams("streams_predict", &args, factors, None));
    }

    fn correct(&self, args: StreamArgs<'_>, scale: Option<&Constant>) {
        let factors = args.streams.len();
        done(self.mix_streams("streams_correct", &args, factors, scale));
    }

    fn copy(&self, x: &Tensor, norm: Option<&Norm>, out: &mut Tensor) {
        done(self.copy_rows(x, norm, out));
    }

    fn add(&self, x: &mut Tensor, added: &Tensor, scale: f32) {
        done(self.change_rows("add_rows", x, Some(added), scale));
    }

    fn match_size(&self, x: &mut Tensor, like: &Tensor) {
        done(self.change_rows("match_size", x, Some(like), 0.0));
    }

    fn keep_largest(&self, x: &mut Tensor, deviations: f32) {
        done(self.change_rows("keep_largest", x, None, deviations));
    }
}

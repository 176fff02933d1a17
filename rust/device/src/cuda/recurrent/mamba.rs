//! Mamba, whose channels have states of their own: what the scan takes beside the convolution's result is a product with that.

use crate::{
    Mamba,
    kernel_args::{DevicePtr, ElementType, MambaArgs},
};

use super::{
    super::{
        CudaBackend, CudaError,
        backend::State,
        dense::Product,
        kernels::{Kernel, launch},
        linear::Rows,
    },
    CHANNEL_STATE_ROWS, COLUMNS_PER_CTA, Convolved, Run,
};

/// How many of its products are with the hidden state, the first ones.
pub const OF_HIDDEN: usize = 2;

/// The scans.
///
/// Errors: [`CudaError::NoSuchKernel`].
pub fn kernels() -> Result<[Kernel; CHANNEL_STATE_ROWS.len()], CudaError> {
    let [few, more, many] = CHANNEL_STATE_ROWS.map(|rows| Kernel::named(&format!("mamba_{rows}")));
    Ok([few?, more?, many?])
}

impl Run<'_> {
    pub(super) fn convolve_mamba(&mut self, weights: &Mamba, x: DevicePtr, out: DevicePtr) -> Result<(), CudaError> {
        let conv = &weights.conv;
        assert_eq!(conv.num_channels, weights.x.out_features, "channels of x");
        self.convolve(&[Convolved { conv, x, out, gates: [0; 2], activates: true }]).map(drop)
    }

    /// The scan, of the products in the order of their fields.
    pub(super) fn mamba(
        &mut self,
        weights: &Mamba,
        [_, z, _, b, c, dt, ..]: [DevicePtr; 8],
        mixed: DevicePtr,
    ) -> Result<(), CudaError> {
        let (width, state_dim) = (weights.x.out_features, weights.state_dim());
        let norms = weights.norms.as_ref().map(|[_, b, c]| [b, c]);
        let [b_norm, c_norm] = match norms {
            None => [0; 2],
            Some([b, c]) => [self.constant(&b.weight, state_dim)?, self.constant(&c.weight, state_dim)?],
        };
        let [b_eps, c_eps] = norms.map_or([0.0; 2], |norms| norms.map(|norm| norm.eps));
        let args = MambaArgs {
            x: mixed,
            z,
            dt,
            b,
            c,
            b_norm,
            c_norm,
            a: self.constant(&weights.a, state_dim * width)?,
            d: self.constant(&weights.d, width)?,
            out: self.out,
            states: self.states(weights.conv.state_len(), width * state_dim),
            requests: self.lists.requests,
            slot_stride: self.slot_stride,
            num_channels: width as u32,
            state_dim: state_dim as u32,
            b_eps,
            c_eps,
        };
        let kernel = Self::scan(self.kernels.mamba, CHANNEL_STATE_ROWS, state_dim);
        // SAFETY: as for the convolution.
        unsafe { launch(self.driver, kernel, [width.div_ceil(COLUMNS_PER_CTA), self.num_reqs, 1], &args) }
    }
}

impl CudaBackend {
    /// What the scan takes of so many rows behind the convolution: products with them, and the steps, of what the first of those
    /// gives, at `dt_down`.
    ///
    /// # Safety
    /// Rows and outputs are memory of the driver of these shapes.
    pub(super) unsafe fn multiply_mixed(
        &self,
        state: &mut State,
        weights: &Mamba,
        (count, mixed, dt_down): (usize, DevicePtr, DevicePtr),
        products: &[Product<'_>],
    ) -> Result<(), CudaError> {
        let rows = |at, cols| Rows { at, count, cols, element: ElementType::F32 };
        let (of_mixed, of_steps) = products.split_at(products.len() - 1);
        let norm = weights.norms.as_ref().map(|[norm, ..]| norm);
        // SAFETY: the caller's promise.
        unsafe {
            self.multiply(state, rows(mixed, weights.x.out_features), None, of_mixed)?;
            self.multiply(state, rows(dt_down, weights.dt_down.out_features), norm, of_steps)
        }
    }
}

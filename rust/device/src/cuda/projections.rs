//! Products of rows with a norm before them, and with a gate or an addition behind them.

use crate::{GateUpArgs, Linear, Norm, Projection, ResidualArgs, Tensor, kernel_args::ElementType};

use super::{
    CudaBackend, CudaError,
    backend::{State, cuda, device, plain, rows},
    dense::Product,
    elementwise::{Gating, NormPass},
    linear::Rows,
};

impl State {
    /// What rows are left as that only one product reads.
    pub(super) fn next_element(&self, next: Option<&Linear>, rows: usize) -> ElementType {
        // Adapters read f32.
        let next = next.filter(|next| !self.lora.touches(&[plain(next, 0)]));
        next.map_or(ElementType::F32, |next| self.dense.input_element(rows, [cuda(next)]))
    }
}

impl CudaBackend {
    /// Multiplies rows, normed if there is a norm, by every weight.
    ///
    /// # Safety
    /// Rows and outputs are memory of the driver of these shapes.
    pub(super) unsafe fn multiply(
        &self,
        state: &mut State,
        rows: Rows,
        norm: Option<&Norm>,
        products: &[Product<'_>],
    ) -> Result<(), CudaError> {
        let Some(norm) = norm else {
            // SAFETY: the caller's promise.
            return unsafe { self.products(state, rows, products) };
        };
        let linears = products.iter().map(|product| product.linear);
        // Adapters read f32.
        let is_f32 = state.lora.touches(products);
        let element = if is_f32 { ElementType::F32 } else { state.dense.input_element(rows.count, linears) };
        let out = state.normed.floats(self.driver(), rows.count * rows.cols)?;
        let pass = NormPass { norm: Some(norm), out, element, ..NormPass::default() };
        self.norm_pass(&mut state.constants, rows, &pass)?;
        // SAFETY: as above; what is normed has the same shape.
        unsafe { self.products(state, Rows { at: out, element, ..rows }, products) }
    }

    /// Multiplies rows by every weight, and changes what comes of it for those with adapters.
    ///
    /// # Safety
    /// Rows and outputs are memory of the driver of these shapes.
    pub(super) unsafe fn products(&self, state: &mut State, x: Rows, products: &[Product<'_>]) -> Result<(), CudaError> {
        let State { dense, lora, .. } = state;
        // SAFETY: the caller's promise.
        unsafe {
            let kept = if let [product] = products { lora.keep(self.driver(), product)? } else { 0 };
            dense.multiply(x, products)?;
            lora.adapt(self.driver(), x, products, kept)
        }
    }

    pub(super) fn try_norm_linear(
        &self,
        x: &Tensor,
        norm: Option<&Norm>,
        projections: &mut [Projection<'_>],
    ) -> Result<(), CudaError> {
        let products: Vec<_> = projections
            .iter_mut()
            .map(|projection| {
                projection.out.set_rows(x.rows());
                assert_eq!(projection.out.cols(), projection.linear.out_features, "columns of the output");
                plain(projection.linear, device(projection.out).at())
            })
            .collect();
        // SAFETY: the outputs have the rows of the input and the checked widths.
        unsafe { self.multiply(&mut self.state(), rows(x), norm, &products) }
    }

    pub(super) fn try_linear_residual(&self, args: &ResidualArgs<'_>) -> Result<(), CudaError> {
        let (x, residual) = (rows(args.x), rows(args.residual));
        let mut state = self.state();
        assert_eq!((x.count, args.linear.out_features), (residual.count, residual.cols), "rows and columns of the residual");
        if args.post_norm.is_none() {
            let product = Product { scale: args.scale, accumulate: true, ..plain(args.linear, residual.at) };
            // SAFETY: both are buffers of the checked shapes.
            return unsafe { self.products(&mut state, x, &[product]) };
        }
        let y = state.projected.floats(self.driver(), residual.count * residual.cols)?;
        // SAFETY: as above; `y` was made for the product.
        unsafe { self.products(&mut state, x, &[plain(args.linear, y)])? };
        let pass = NormPass { add: Some(y), post_norm: args.post_norm, scale: args.scale, ..NormPass::default() };
        self.norm_pass(&mut state.constants, residual, &pass)
    }

    pub(super) fn try_gate_up(&self, args: &mut GateUpArgs<'_>) -> Result<(), CudaError> {
        let state = &mut *self.state();
        let count = args.x.rows();
        args.out.set_rows(count);
        let (cols, element) = (args.out.cols(), state.next_element(args.next, count));
        assert_eq!(args.up.out_features, cols, "columns of the output");
        let (out, activation) = (device(args.out).at(), Gating::of(args.activation));
        let Some(gate) = args.gate else {
            // SAFETY: the output has the rows of the input and the checked width.
            unsafe { self.multiply(state, rows(args.x), args.norm, &[plain(args.up, out)])? };
            let gated = Rows { at: out, count, cols, element: ElementType::F32 };
            // In place, where values are as wide as before.
            return self.activate(gated, 0, (out, ElementType::F32), activation);
        };
        args.out.set_element(element);
        assert_eq!(gate.out_features, cols, "columns of the output");
        let gated = state.projected.floats(self.driver(), count * cols)?;
        let up = state.up.floats(self.driver(), count * cols)?;
        // SAFETY: both buffers were made for the products.
        unsafe { self.multiply(state, rows(args.x), args.norm, &[plain(gate, gated), plain(args.up, up)])? };
        let gated = Rows { at: gated, count, cols, element: ElementType::F32 };
        self.activate(gated, up, (out, element), activation)
    }
}

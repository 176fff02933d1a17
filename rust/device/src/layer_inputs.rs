//! What some decoders give each layer besides the residual stream: a vector of a token and layer, looked up and computed before
//! the first layer, and a factor behind each (Gemma 3n and Gemma 4, which call the vectors per-layer embeddings).

use crate::{Norm, Tensor};

/// Arguments of [`LayerInputPhases::layer_inputs`]: `x = (norm(x) + tokens) * scale`, the norm over each layer's part.
pub struct LayerInputArgs<'a> {
    /// `[num_tokens, num_layers * width]`: what a projection made of the token embeddings, and then the inputs.
    pub x: &'a mut Tensor,
    /// `[num_tokens, num_layers * width]`: what was looked up.
    pub tokens: &'a Tensor,
    /// `[width]`, the same for all layers.
    pub norm: &'a Norm,
    /// Multiplied into the sum.
    pub scale: f32,
}

/// Inputs of layers, and factors behind them.
pub trait LayerInputPhases {
    /// Makes the inputs of all layers.
    fn layer_inputs(&self, args: LayerInputArgs<'_>);

    /// `x[i][j] *= inputs[i][first + j]`: those of one layer, `x` being as wide as they are.
    fn multiply_input(&self, x: &mut Tensor, inputs: &Tensor, first: usize);

    /// `x *= factor`.
    fn scale(&self, x: &mut Tensor, factor: f32);
}

/// The phases as plain loops over rows of the host; see [`LayerInputPhases::layer_inputs`].
pub(crate) fn layer_inputs(args: LayerInputArgs<'_>) {
    let LayerInputArgs { x, tokens, norm, scale } = args;
    assert_eq!([x.rows(), x.cols()], [tokens.rows(), tokens.cols()], "inputs of layers beside what was looked up");
    let width = norm.weight.len();
    for (x, tokens) in x.as_mut_slice().chunks_exact_mut(width).zip(tokens.as_slice().chunks_exact(width)) {
        norm.apply(x);
        x.iter_mut().zip(tokens).for_each(|(x, token)| *x = (*x + token) * scale);
    }
}

/// See [`LayerInputPhases::multiply_input`].
pub(crate) fn multiply_input(x: &mut Tensor, inputs: &Tensor, first: usize) {
    assert_eq!(x.rows(), inputs.rows(), "rows of the inputs of layers");
    for row in 0..x.rows() {
        let inputs = &inputs.row(row)[first..first + x.cols()];
        x.row_mut(row).iter_mut().zip(inputs).for_each(|(x, input)| *x *= input);
    }
}

/// See [`LayerInputPhases::scale`].
pub(crate) fn scale(x: &mut Tensor, factor: f32) {
    x.as_mut_slice().iter_mut().for_each(|x| *x *= factor);
}

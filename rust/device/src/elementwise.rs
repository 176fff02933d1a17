//! What some models do with rows between products, element by element. Gemma 4 gives each layer a vector of a token and layer
//! besides the residual stream (per-layer embeddings, looked up and computed before the first layer) and has a factor behind
//! each; its image encoder bounds what goes into products and what comes out. GPT-2 adds a vector of each position.

use crate::{Activation, EmbeddingTable, Norm, StepMetadata, Tensor};

/// Arguments of [`ElementwisePhases::layer_inputs`]: `x = (norm(x) + tokens) * scale`, the norm over each layer's part.
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

/// Phases that only some models need. What is given here are plain loops, for a backend whose tensors lie on the host.
pub trait ElementwisePhases {
    /// Makes the inputs of all layers.
    fn layer_inputs(&self, args: LayerInputArgs<'_>) {
        let LayerInputArgs { x, tokens, norm, scale } = args;
        assert_eq!([x.rows(), x.cols()], [tokens.rows(), tokens.cols()], "inputs of layers beside what was looked up");
        let width = norm.weight.len();
        for (x, tokens) in x.as_mut_slice().chunks_exact_mut(width).zip(tokens.as_slice().chunks_exact(width)) {
            norm.apply(x);
            x.iter_mut().zip(tokens).for_each(|(x, token)| *x = (*x + token) * scale);
        }
    }

    /// `x[i][j] *= by[i][first + j]`.
    fn multiply(&self, x: &mut Tensor, by: &Tensor, first: usize) {
        assert_eq!(x.rows(), by.rows(), "rows that are multiplied");
        for row in 0..x.rows() {
            let by = &by.row(row)[first..first + x.cols()];
            x.row_mut(row).iter_mut().zip(by).for_each(|(x, by)| *x *= by);
        }
    }

    /// `x *= factor`.
    fn scale(&self, x: &mut Tensor, factor: f32) {
        x.as_mut_slice().iter_mut().for_each(|x| *x *= factor);
    }

    /// What is less than the first bound becomes that, and what is more than the second, the second; what is no number stays so.
    fn clamp(&self, x: &mut Tensor, [least, most]: [f32; 2]) {
        for x in x.as_mut_slice() {
            *x = if *x < least { least } else { *x };
            *x = if *x > most { most } else { *x };
        }
    }

    /// `x = activation(norm(x))`, or `norm(x)`.
    fn normed(&self, x: &mut Tensor, norm: &Norm, activation: Option<Activation>) {
        let cols = x.cols();
        for row in x.as_mut_slice().chunks_exact_mut(cols) {
            norm.apply(row);
            if let Some(activation) = activation {
                for x in row {
                    *x = activation.apply(*x);
                }
            }
        }
    }

    /// `x[i] += table[rope_positions[i]]`, of each row's place in tables of positions, which the table, `[num_positions, cols]`,
    /// has.
    fn add_positions(&self, x: &mut Tensor, table: EmbeddingTable<'_>, step: &StepMetadata);

    /// `gate = activation(gate) * up`.
    fn gated(&self, activation: Activation, gate: &mut Tensor, up: &Tensor);
}

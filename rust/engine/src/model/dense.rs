//! A feed-forward network that all tokens pass.

use device::{Activation, GateUpArgs, Linear, Norm, Tensor, Xielu};

use super::{
    config::DenseConfig,
    part::{Buffers, Context, Weights},
};
use crate::{
    EngineError,
    weights::{Matrix, Role, WeightId},
};

pub(crate) struct Dense {
    activation: Activation,
    /// `None`: the activation is of `up`.
    gate: Option<Linear>,
    up: Linear,
    down: Linear,
}

impl Dense {
    pub(crate) fn new(weights: &mut dyn Weights, config: &DenseConfig, layer: usize, hidden: usize) -> Result<Self, EngineError> {
        let id = |role| WeightId::layer(layer, role);
        let (rows, bias) = (config.intermediate_size, config.bias);
        let (gate, up) = if config.is_gated {
            let parts = [(Role::FfnGate, rows), (Role::FfnUp, rows)];
            let [gate, up] = Matrix::fused(id(Role::FfnGateUp), parts, hidden, bias);
            (Some(weights.linear(&gate)?), weights.linear(&up)?)
        } else {
            (None, weights.linear(&Matrix::new(id(Role::FfnUp), [rows, hidden], bias))?)
        };
        let down = weights.linear(&Matrix::new(id(Role::FfnDown), [hidden, rows], bias))?;
        let activation = match config.activation {
            Activation::Xielu(own) if own == Xielu::default() => Activation::Xielu(xielu(weights, layer)?),
            other => other,
        };
        Ok(Self { activation, gate, up, down })
    }

    pub(crate) fn buffers(config: &DenseConfig) -> Buffers<usize> {
        [0, 0, 0, 0, 0, config.intermediate_size]
    }

    /// The phase that reads the hidden state.
    pub(crate) fn open(&self, norm: Option<&Norm>, cx: &mut Context<'_>) {
        let [.., out] = &mut *cx.buffers;
        let (gate, up, activation) = (self.gate.as_ref(), &self.up, self.activation);
        cx.run.backend.gate_up(GateUpArgs { x: cx.hidden, norm, gate, up, activation, out }, cx.step);
    }

    /// What is added to the hidden state: a product.
    pub(crate) fn output<'a>(&'a self, [.., out]: &'a Buffers<Tensor>) -> (&'a Tensor, &'a Linear) {
        (out, &self.down)
    }
}

/// The numbers of a layer's activation among its weights.
fn xielu(weights: &mut dyn Weights, layer: usize) -> Result<Xielu, EngineError> {
    let mut number = |role| {
        let values = weights.values(WeightId::layer(layer, role), 1)?;
        Ok::<_, EngineError>(values.first().copied().unwrap_or_default())
    };
    let (positive, negative) = (number(Role::XieluPositive)?, number(Role::XieluNegative)?);
    Ok(xielu_of([positive, negative, number(Role::XieluLinear)?, number(Role::XieluEps)?]))
}

/// xIELU of numbers as they are stored: both factors so that softplus makes them positive, and that of the negative side without
/// the linear one.
pub(super) fn xielu_of([positive, negative, linear, eps]: [f32; 4]) -> Xielu {
    let softplus = |x: f32| f64::from(x).max(0.0) + (-f64::from(x).abs()).exp().ln_1p();
    Xielu { positive: softplus(positive) as f32, negative: (f64::from(linear) + softplus(negative)) as f32, linear, eps }
}

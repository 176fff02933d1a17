//! A feed-forward network that all tokens pass.

use device::{Activation, GateUpArgs, Linear, Norm, Tensor};

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
        Ok(Self { activation: config.activation, gate, up, down })
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

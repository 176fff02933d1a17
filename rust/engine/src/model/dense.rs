//! A network that all tokens pass.

use device::{Activation, GateUpArgs, Linear, Norm};

use super::{
    config::DenseConfig,
    part::{Buffers, Context, Join, Part, Weights},
};
use crate::{
    EngineError,
    weights::{Matrix, Role, WeightId},
};

pub(crate) struct Dense<L = Linear> {
    activation: Activation,
    /// `None`: the activation is of `up`.
    gate: Option<L>,
    up: L,
    down: L,
}

impl<L> Dense<L> {
    pub(crate) fn new(
        weights: &mut impl Weights<Linear = L>,
        config: &DenseConfig,
        layer: usize,
        hidden_size: usize,
    ) -> Result<Self, EngineError> {
        let id = |role| WeightId::layer(layer, role);
        let (rows, bias) = (config.intermediate_size, config.bias);
        let (gate, up) = if config.is_gated {
            let parts = [(Role::FfnGate, rows), (Role::FfnUp, rows)];
            let [gate, up] = Matrix::fused(id(Role::FfnGateUp), parts, hidden_size, bias);
            (Some(weights.linear(&gate)?), weights.linear(&up)?)
        } else {
            (None, weights.linear(&Matrix::new(id(Role::FfnUp), [rows, hidden_size], bias))?)
        };
        let down = weights.linear(&Matrix::new(id(Role::FfnDown), [hidden_size, rows], bias))?;
        Ok(Self { activation: config.activation, gate, up, down })
    }
}

impl Dense {
    pub(crate) fn buffers(config: &DenseConfig) -> Buffers<usize> {
        Buffers { ffn: config.intermediate_size, ..Buffers::default() }
    }
}

impl Part for Dense {
    fn open(&self, norm: Option<&Norm>, cx: &mut Context<'_>) {
        let args = GateUpArgs {
            x: cx.hidden,
            norm,
            gate: self.gate.as_ref(),
            up: &self.up,
            activation: self.activation,
            out: &mut cx.buffers.ffn,
        };
        cx.run.backend.gate_up(args, cx.step);
    }

    fn close(&self, join: Join<'_>, cx: &mut Context<'_>) {
        join.add((&cx.run, cx.step), &cx.buffers.ffn, &self.down, cx.hidden);
    }
}

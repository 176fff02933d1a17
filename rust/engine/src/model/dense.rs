//! A feed-forward network that all tokens pass.

use device::{Activation, GateUpArgs, Linear, Norm, Projection, Tensor, Xielu};

use super::{
    config::DenseConfig,
    part::{Buffers, Context, Weights},
};
use crate::{
    EngineError,
    weights::{Matrix, Role, WeightId, XieluRole},
};

pub(crate) struct Dense {
    activation: Activation,
    /// `None`: the activation is of `up`.
    gate: Option<Linear>,
    up: Linear,
    down: Linear,
    cutoff: Option<f32>,
}

impl Dense {
    pub(crate) fn new(weights: &mut dyn Weights, config: &DenseConfig, layer: usize, hidden: usize) -> Result<Self, EngineError> {
        let id = |role| WeightId::layer(layer, role);
        let (rows, bias) = (config.intermediate_size, config.bias);
        let (gate, up) = if config.is_gated {
            let mut parts = [(Role::FfnGate, rows), (Role::FfnUp, rows)];
            let whole = id(Role::FfnGateUp);
            let [gate, up] = if config.is_up_first {
                parts.reverse();
                let [up, gate] = Matrix::fused(whole, parts, hidden, bias);
                [gate, up]
            } else {
                Matrix::fused(whole, parts, hidden, bias)
            };
            (Some(weights.linear(&gate)?), weights.linear(&up)?)
        } else {
            (None, weights.linear(&Matrix::new(id(Role::FfnUp), [rows, hidden], bias))?)
        };
        let down = weights.linear(&Matrix::new(id(Role::FfnDown), [hidden, rows], bias))?;
        let activation = match config.activation {
            Activation::Xielu(own) if own == Xielu::default() => Activation::Xielu(xielu(weights, layer)?),
            other => other,
        };
        Ok(Self { activation, gate, up, down, cutoff: config.cutoff })
    }

    pub(crate) fn buffers(config: &DenseConfig) -> Buffers<usize> {
        let of_up = if config.cutoff.is_some() { config.intermediate_size } else { 0 };
        [0, 0, 0, 0, of_up, config.intermediate_size]
    }

    /// The phase that reads the hidden state.
    pub(crate) fn open(&self, norm: Option<&Norm>, cx: &mut Context<'_>) {
        let [.., of_up, out] = &mut *cx.buffers;
        let (backend, gate, up, activation) = (cx.run.backend, self.gate.as_ref(), &self.up, self.activation);
        out.set_cols(up.out_features);
        if let (Some(deviations), Some(gate)) = (self.cutoff, gate) {
            of_up.set_cols(up.out_features);
            let both = &mut [Projection { linear: gate, out: &mut *out }, Projection { linear: up, out: &mut *of_up }];
            backend.norm_linear(cx.hidden, norm, both, cx.step);
            backend.stream_phases().expect("the plan was refused where nothing cuts gates off").keep_largest(out, deviations);
            let phases = backend.elementwise_phases().expect("the plan was refused where nothing gates rows");
            phases.gated(activation, out, of_up);
            return;
        }
        backend.gate_up(GateUpArgs { x: cx.hidden, norm, gate, up, activation, out, next: Some(&self.down) }, cx.step);
    }

    /// What is added to the hidden state: a product.
    pub(crate) fn output<'a>(&'a self, [.., out]: &'a Buffers<Tensor>) -> (&'a Tensor, &'a Linear) {
        (out, &self.down)
    }
}

/// The numbers of a layer's activation among its weights.
fn xielu(weights: &mut dyn Weights, layer: usize) -> Result<Xielu, EngineError> {
    let mut number = |role| {
        let values = weights.values(WeightId::layer(layer, Role::Xielu(role)), 1)?;
        Ok::<_, EngineError>(values.first().copied().unwrap_or_default())
    };
    let (positive, negative) = (number(XieluRole::Positive)?, number(XieluRole::Negative)?);
    Ok(xielu_of([positive, negative, number(XieluRole::Linear)?, number(XieluRole::Eps)?]))
}

/// xIELU of numbers as they are stored: both factors so that softplus makes them positive, and that of the negative side without
/// the linear one.
pub(super) fn xielu_of([positive, negative, linear, eps]: [f32; 4]) -> Xielu {
    let softplus = |x: f32| f64::from(x).max(0.0) + (-f64::from(x).abs()).exp().ln_1p();
    Xielu { positive: softplus(positive) as f32, negative: (f64::from(linear) + softplus(negative)) as f32, linear, eps }
}

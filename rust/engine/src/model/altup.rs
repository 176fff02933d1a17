//! Several residual streams (`AltUp`, arXiv:2301.13310; Gemma 3n). All are made of the embedding, and behind the last layer they
//! become one again. A layer runs on the active stream: before it all streams are predicted, after it they are corrected.
//! Beside its attention a layer has a branch of two thin matrices (`LAuReL`, arXiv:2411.07501).

use std::{f32::consts::FRAC_1_SQRT_2, sync::Arc};

use device::{Backend, Constant, Linear, Norm, Projection, ResidualArgs, StepMetadata, StreamArgs, StreamPhases, Tensor};

use super::{
    config::{DecoderConfig, StreamsConfig},
    part::{Buffers, Context, Weights},
};
use crate::{
    EngineError,
    weights::{ExpertIndex, Matrix, Role, WeightId},
};

/// What makes the streams, and one of them.
pub(crate) struct Streams {
    /// One for each stream but the first.
    inputs: Vec<Linear>,
    outputs: Vec<Linear>,
}

/// What a layer does with the streams.
pub(crate) struct AltUp {
    active: usize,
    router_norm: Norm,
    router: Linear,
    predict: Constant,
    correct: Constant,
    output_scale: Option<Constant>,
    branch_input: Linear,
    branch_output: Linear,
    branch_norm: Norm,
}

/// The streams of a step.
pub(crate) struct StreamTensors {
    /// `[num_tokens, hidden_size]` each.
    streams: Vec<Tensor>,
    /// `[num_tokens, num_streams]`
    routed: Tensor,
    /// `[num_tokens, hidden_size]`
    branch: Tensor,
}

impl StreamTensors {
    /// Columns of all of them together; 0 for a model of one stream.
    pub(crate) fn columns(config: &DecoderConfig) -> usize {
        config.streams.map_or(0, |StreamsConfig { count, .. }| (count + 1) * config.hidden_size + count)
    }

    /// `tensor` makes one of so many columns.
    pub(crate) fn new(
        config: &StreamsConfig,
        hidden: usize,
        tensor: impl Fn(usize) -> Result<Tensor, EngineError>,
    ) -> Result<Self, EngineError> {
        let streams = (0..config.count).map(|_| tensor(hidden)).collect::<Result<_, _>>()?;
        Ok(Self { streams, routed: tensor(config.count)?, branch: tensor(hidden)? })
    }

    /// All streams but the first.
    pub(crate) fn others(&mut self) -> impl Iterator<Item = &mut Tensor> {
        self.streams.iter_mut().skip(1)
    }
}

fn phases(backend: &dyn Backend) -> &dyn StreamPhases {
    backend.stream_phases().expect("the plan was refused where nothing computes several residual streams")
}

impl Streams {
    /// Asks for the weights.
    pub(crate) fn new(weights: &mut dyn Weights, config: &StreamsConfig, hidden: usize) -> Result<Self, EngineError> {
        let count = config.count - 1;
        let mut matrices = |role| {
            let matrix = Matrix::new(WeightId::global(role), [hidden, hidden], false);
            let of_stream = |index| weights.linear(&matrix.of_expert(Some(ExpertIndex { index, count })));
            (0..count).map(of_stream).collect::<Result<_, _>>()
        };
        Ok(Self { inputs: matrices(Role::StreamInput)?, outputs: matrices(Role::StreamOutput)? })
    }

    /// Makes the streams of the embedding; all are of its size.
    pub(crate) fn split(&self, backend: &dyn Backend, hidden: &Tensor, tensors: &mut StreamTensors, step: &StepMetadata) {
        let phases = phases(backend);
        phases.copy(hidden, None, &mut tensors.streams[0]);
        for (linear, stream) in self.inputs.iter().zip(tensors.others()) {
            backend.norm_linear(hidden, None, &mut [Projection { linear, out: stream }], step);
            phases.match_size(stream, hidden);
        }
    }

    /// Makes the hidden state of the streams: their mean, all being of the first one's size.
    pub(crate) fn join(&self, backend: &dyn Backend, hidden: &mut Tensor, tensors: &mut StreamTensors, step: &StepMetadata) {
        let (phases, out) = (phases(backend), &mut tensors.branch);
        phases.copy(&tensors.streams[0], None, hidden);
        let count = tensors.streams.len();
        for (number, linear) in (2..).zip(&self.outputs) {
            backend.norm_linear(&tensors.streams[number - 1], None, &mut [Projection { linear, out: &mut *out }], step);
            phases.match_size(out, &tensors.streams[0]);
            phases.add(hidden, out, if number == count { (count as f32).recip() } else { 1.0 });
        }
    }
}

impl AltUp {
    /// Asks for the weights of a layer.
    pub(crate) fn new(
        weights: &mut dyn Weights,
        config: &StreamsConfig,
        layer: usize,
        hidden: usize,
    ) -> Result<Self, EngineError> {
        let (id, StreamsConfig { count, branch_rank, .. }) = (|role| WeightId::layer(layer, role), *config);
        let mut router_norm = weights.norm(id(Role::StreamRouterNorm), [1, hidden])?;
        // What goes into the router is divided by the width.
        for weight in Arc::make_mut(&mut router_norm.weight) {
            *weight /= hidden as f32;
        }
        Ok(Self {
            active: config.active,
            router_norm,
            router: weights.linear(&Matrix::new(id(Role::StreamRouter), [count, hidden], false).exact())?,
            predict: weights.values(id(Role::StreamPredict), count * count * count)?,
            correct: weights.values(id(Role::StreamCorrect), count * count)?,
            output_scale: config.has_output_scale.then(|| weights.values(id(Role::StreamScale), hidden)).transpose()?,
            branch_input: weights.linear(&Matrix::new(id(Role::BranchInput), [branch_rank, hidden], false))?,
            branch_output: weights.linear(&Matrix::new(id(Role::BranchOutput), [hidden, branch_rank], false))?,
            branch_norm: weights.norm(id(Role::BranchNorm), [1, hidden])?,
        })
    }

    pub(crate) fn buffers(config: &StreamsConfig) -> Buffers<usize> {
        [0, 0, 0, 0, config.branch_rank, 0]
    }

    fn route(&self, cx: &mut Context<'_>, is_before: bool) {
        let tensors = cx.streams.as_mut().expect("streams of this step");
        let x = if is_before { &tensors.streams[self.active] } else { &*cx.hidden };
        let to_router = Projection { linear: &self.router, out: &mut tensors.routed };
        cx.run.backend.norm_linear(x, Some(&self.router_norm), &mut [to_router], cx.step);
    }

    /// Before the layer: predicts all streams, and makes the active one the hidden state.
    pub(crate) fn predict(&self, cx: &mut Context<'_>) {
        self.route(cx, true);
        let StreamTensors { streams, routed, .. } = &mut **cx.streams.as_mut().expect("streams of this step");
        let (coefficients, active) = (&self.predict, self.active);
        phases(cx.run.backend).predict(StreamArgs { routed, coefficients, streams, active, hidden: cx.hidden });
    }

    /// Computes the branch, of what attention reads.
    pub(crate) fn branch(&self, norm: Option<&Norm>, cx: &mut Context<'_>) {
        let branch = &mut cx.streams.as_mut().expect("streams of this step").branch;
        let (backend, [.., low, _]) = (cx.run.backend, &mut *cx.buffers);
        low.set_cols(self.branch_input.out_features);
        phases(backend).copy(cx.hidden, norm, branch);
        backend.norm_linear(branch, None, &mut [Projection { linear: &self.branch_input, out: &mut *low }], cx.step);
        let (linear, post_norm) = (&self.branch_output, Some(&self.branch_norm));
        backend.linear_residual(ResidualArgs { x: low, linear, post_norm, scale: 1.0, residual: branch }, cx.step);
    }

    /// Adds the branch to the hidden state, behind attention.
    pub(crate) fn add_branch(cx: &mut Context<'_>) {
        let branch = &cx.streams.as_ref().expect("streams of this step").branch;
        phases(cx.run.backend).add(cx.hidden, branch, FRAC_1_SQRT_2);
    }

    /// After the layer: corrects all streams. The hidden state becomes what the layer's input is made of.
    pub(crate) fn correct(&self, cx: &mut Context<'_>) {
        self.route(cx, false);
        let StreamTensors { streams, routed, .. } = &mut **cx.streams.as_mut().expect("streams of this step");
        let args = StreamArgs { routed, coefficients: &self.correct, streams, active: self.active, hidden: cx.hidden };
        phases(cx.run.backend).correct(args, self.output_scale.as_ref());
    }
}

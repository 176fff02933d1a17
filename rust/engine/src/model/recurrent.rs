//! Layers that keep a state of fixed size a request.

use device::{Constant, Conv, GatedDelta, Linear, Mamba2, Norm, NormKind, Recurrent, RecurrentArgs, ShortConv, Tensor};

use super::{
    config::{DeltaLayout, RecurrentConfig},
    part::{Buffers, Context, Weights},
};
use crate::{
    EngineError,
    weights::{Matrix, Role, WeightId},
};

pub(crate) struct RecurrentMixer {
    weights: Recurrent,
    output: Linear,
}

impl RecurrentMixer {
    pub(crate) fn new(
        weights: &mut dyn Weights,
        config: &RecurrentConfig,
        layer: usize,
        hidden: usize,
    ) -> Result<Self, EngineError> {
        let width = config.width(hidden);
        let mut parts = Parts { weights, layer, hidden };
        let recurrent = match *config {
            RecurrentConfig::ShortConv { kernel } => Recurrent::ShortConv(parts.short_conv(kernel)?),
            RecurrentConfig::Mamba2 { .. } => Recurrent::Mamba2(parts.mamba2(config)?),
            RecurrentConfig::GatedDelta { .. } => Recurrent::GatedDelta(parts.gated_delta(config)?),
        };
        let output = Matrix::new(WeightId::layer(layer, Role::MixOutput), [hidden, width], false);
        Ok(Self { weights: recurrent, output: weights.linear(&output)? })
    }

    pub(crate) fn buffers(config: &RecurrentConfig, hidden: usize) -> Buffers<usize> {
        [0, 0, 0, config.width(hidden), 0, 0]
    }

    /// All phases that read the hidden state, normalized if there is a norm.
    pub(crate) fn open(&self, norm: Option<&Norm>, cx: &mut Context<'_>) {
        let [_, _, _, out, ..] = &mut *cx.buffers;
        let states = cx.run.states.expect("states were made for a model with recurrent layers");
        let phases = cx.run.backend.recurrent_phases().expect("the plan was refused where nothing computes recurrent layers");
        let args = RecurrentArgs { hidden: cx.hidden, norm, weights: &self.weights, states, layer: cx.layer, out };
        phases.recurrent(args, cx.step);
    }

    /// What is added to the hidden state: a product.
    pub(crate) fn output<'a>(&'a self, [_, _, _, out, ..]: &'a Buffers<Tensor>) -> (&'a Tensor, &'a Linear) {
        (out, &self.output)
    }
}

/// Asks for the weights of one layer.
struct Parts<'a> {
    weights: &'a mut dyn Weights,
    layer: usize,
    hidden: usize,
}

impl Parts<'_> {
    fn id(&self, role: Role) -> WeightId {
        WeightId::layer(self.layer, role)
    }

    fn linears<const N: usize>(&mut self, matrices: [Matrix; N]) -> Result<[Linear; N], EngineError> {
        let mut linears = Vec::with_capacity(N);
        for matrix in &matrices {
            linears.push(self.weights.linear(matrix)?);
        }
        linears.try_into().map_err(|_| EngineError::Internal("as many matrices as were asked for".into()))
    }

    /// Parts of a convolution over so many channels, one after the other.
    fn convs<const N: usize>(&mut self, kernel: usize, channels: [usize; N], has_bias: bool) -> Result<[Conv; N], EngineError> {
        let all: usize = channels.iter().sum();
        let weight = self.weights.values(self.id(Role::Conv), all * kernel)?;
        let bias = has_bias.then(|| self.weights.values(self.id(Role::Conv).bias(), all)).transpose()?;
        let mut first = 0;
        Ok(channels.map(|num_channels| {
            let own = first..first + num_channels;
            first = own.end;
            // Each channel's weights are stored together; the visitor that only counts has none.
            let taps = (0..kernel).flat_map(|tap| own.clone().map(move |channel| channel * kernel + tap));
            Conv {
                weight: if weight.is_empty() {
                    Constant::default()
                } else {
                    taps.map(|at| weight[at]).collect::<Vec<_>>().into()
                },
                bias: bias.as_ref().map(|bias| Constant::from(bias.get(own.clone()).unwrap_or_default().to_vec())),
                num_channels,
            }
        }))
    }

    fn norm(&mut self, len: usize, eps: f32) -> Result<Norm, EngineError> {
        let weight = self.weights.values(self.id(Role::MixNorm), len)?;
        Ok(Norm { kind: NormKind::Rms, weight, bias: None, eps })
    }

    fn short_conv(&mut self, kernel: usize) -> Result<ShortConv, EngineError> {
        let hidden = self.hidden;
        let parts = [Role::ConvB, Role::ConvC, Role::ConvX].map(|role| (role, hidden));
        let [b, c, x] = self.linears(Matrix::fused(self.id(Role::MixInput), parts, hidden, false))?;
        let [conv] = self.convs(kernel, [hidden], false)?;
        Ok(ShortConv { b, c, x, conv })
    }

    fn mamba2(&mut self, config: &RecurrentConfig) -> Result<Mamba2, EngineError> {
        let RecurrentConfig::Mamba2 { num_heads, num_groups, state_dim, kernel, conv_bias, eps, .. } = *config else {
            return Err(EngineError::Internal("a Mamba-2 layer of another kind".into()));
        };
        let width = config.width(self.hidden);
        let channels = width + 2 * num_groups * state_dim;
        let parts = [(Role::MambaZ, width), (Role::MambaXbc, channels), (Role::MambaDt, num_heads)];
        let [z, xbc, dt] = self.linears(Matrix::fused(self.id(Role::MixInput), parts, self.hidden, false))?;
        let [conv] = self.convs(kernel, [channels], conv_bias)?;
        Ok(Mamba2 {
            z,
            xbc,
            dt,
            conv,
            dt_bias: self.weights.values(self.id(Role::MixDtBias), num_heads)?,
            a: self.weights.values(self.id(Role::MixDecay), num_heads)?,
            d: self.weights.values(self.id(Role::MambaD), num_heads)?,
            norm: self.norm(width, eps)?,
            num_heads,
            num_groups,
            state_dim,
            dt_limits: [0.0, f32::INFINITY],
        })
    }

    fn gated_delta(&mut self, config: &RecurrentConfig) -> Result<GatedDelta, EngineError> {
        let RecurrentConfig::GatedDelta { num_key_heads, num_value_heads, key_dim, value_dim, kernel, layout, eps } = *config
        else {
            return Err(EngineError::Internal("a gated delta layer of another kind".into()));
        };
        let (hidden, keys, values) = (self.hidden, num_key_heads * key_dim, num_value_heads * value_dim);
        let qkv = [(Role::DeltaQ, keys), (Role::DeltaK, keys), (Role::DeltaV, values)];
        let [q, k, v, z] = if layout == DeltaLayout::ByKeyHead {
            let [q, k, v] = qkv;
            let parts = [q, k, v, (Role::DeltaZ, values)];
            Matrix::fused(self.id(Role::DeltaQkvz), parts, hidden, false).map(|matrix| matrix.in_groups(num_key_heads))
        } else {
            let [q, k, v] = Matrix::fused(self.id(Role::DeltaQkv), qkv, hidden, false);
            [q, k, v, Matrix::new(self.id(Role::DeltaZ), [values, hidden], false)]
        };
        let rates = [Role::DeltaB, Role::DeltaA];
        let [b, dt] = match layout {
            DeltaLayout::ByKeyHead | DeltaLayout::RatesByKeyHead => {
                let parts = rates.map(|role| (role, num_value_heads));
                Matrix::fused(self.id(Role::DeltaBa), parts, hidden, false).map(|matrix| matrix.in_groups(num_key_heads))
            }
            DeltaLayout::Apart | DeltaLayout::Tiled => {
                rates.map(|role| Matrix::new(self.id(role), [num_value_heads, hidden], false))
            }
        };
        let [q, k, v, z, b, dt] = self.linears([q, k, v, z, b, dt])?;
        Ok(GatedDelta {
            q,
            k,
            v,
            z,
            b,
            dt,
            convs: self.convs(kernel, [keys, keys, values], false)?,
            dt_bias: self.weights.values(self.id(Role::MixDtBias), num_value_heads)?,
            a: self.weights.values(self.id(Role::MixDecay), num_value_heads)?,
            norm: self.norm(value_dim, eps)?,
            num_key_heads,
            num_value_heads,
            is_grouped: layout != DeltaLayout::Tiled,
        })
    }
}

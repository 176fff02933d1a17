//! Layers that keep a state of fixed size a request.

use std::sync::Arc;

use device::{Constant, Conv, GatedDelta, Linear, Mamba, Mamba2, Norm, NormKind, Recurrent, RecurrentArgs, ShortConv, Tensor};

use super::{
    config::{DeltaLayout, MambaNorms, RecurrentConfig},
    part::{Buffers, Context, Weights},
};
use crate::{
    EngineError,
    weights::{MambaRole, Matrix, Role, WeightId},
};

pub(crate) struct RecurrentMixer {
    weights: Recurrent,
    output: Linear,
    /// Which buffer has what it gives.
    out: usize,
}

impl RecurrentMixer {
    pub(crate) fn new(
        weights: &mut dyn Weights,
        (config, is_beside): (&RecurrentConfig, bool),
        layer: usize,
        hidden: usize,
    ) -> Result<Self, EngineError> {
        let width = config.width(hidden);
        let mut parts = Parts { weights, layer, hidden };
        let recurrent = match *config {
            RecurrentConfig::ShortConv { kernel } => Recurrent::ShortConv(parts.short_conv(kernel)?),
            RecurrentConfig::Mamba { .. } => Recurrent::Mamba(parts.mamba(config)?),
            RecurrentConfig::Mamba2 { .. } => Recurrent::Mamba2(parts.mamba2(config)?),
            RecurrentConfig::GatedDelta { .. } => Recurrent::GatedDelta(parts.gated_delta(config)?),
        };
        let has_bias =
            matches!(config, RecurrentConfig::Mamba { proj_bias: true, .. } | RecurrentConfig::Mamba2 { proj_bias: true, .. });
        let output = Matrix::new(WeightId::layer(layer, Role::MixOutput), [hidden, width], has_bias);
        Ok(Self { weights: recurrent, output: weights.linear(&output)?, out: place(is_beside) })
    }

    pub(crate) fn buffers(config: &RecurrentConfig, is_beside: bool, hidden: usize) -> Buffers<usize> {
        let mut buffers = [0; 6];
        buffers[place(is_beside)] = config.width(hidden);
        buffers
    }

    /// All phases that read the hidden state, normalized if there is a norm.
    pub(crate) fn open(&self, norm: Option<&Norm>, cx: &mut Context<'_>) {
        let out = &mut cx.buffers[self.out];
        let states = cx.run.states.expect("states were made for a model with recurrent layers");
        let phases = cx.run.backend.recurrent_phases().expect("the plan was refused where nothing computes recurrent layers");
        let args = RecurrentArgs { hidden: cx.hidden, norm, weights: &self.weights, states, layer: cx.layer, out };
        phases.recurrent(args, cx.step);
    }

    /// What is added to the hidden state: a product.
    pub(crate) fn output<'a>(&'a self, buffers: &'a Buffers<Tensor>) -> (&'a Tensor, &'a Linear) {
        (&buffers[self.out], &self.output)
    }
}

/// The buffer of what attention gives, or beside attention that of its gate, which it lacks then.
const fn place(is_beside: bool) -> usize {
    if is_beside { 4 } else { 3 }
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
    fn convs<const N: usize>(
        &mut self,
        role: Role,
        kernel: usize,
        channels: [usize; N],
        has_bias: bool,
    ) -> Result<[Conv; N], EngineError> {
        let all: usize = channels.iter().sum();
        let weight = self.weights.values(self.id(role), all * kernel)?;
        let bias = has_bias.then(|| self.weights.values(self.id(role).bias(), all)).transpose()?;
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
        let [conv] = self.convs(Role::Conv, kernel, [hidden], false)?;
        Ok(ShortConv { b, c, x, conv })
    }

    fn mamba(&mut self, config: &RecurrentConfig) -> Result<Mamba, EngineError> {
        let RecurrentConfig::Mamba { num_channels, state_dim, rank, kernel, conv_bias, proj_bias, norms } = *config else {
            return Err(EngineError::Internal("a Mamba layer of another kind".into()));
        };
        let parts = [Role::Mamba(MambaRole::X), Role::MambaZ].map(|role| (role, num_channels));
        let [x, z] = self.linears(Matrix::fused(self.id(Role::MixInput), parts, self.hidden, proj_bias))?;
        let [conv] = self.convs(Role::Conv, kernel, [num_channels], conv_bias)?;
        let parts = [(MambaRole::StepsDown, rank), (MambaRole::B, state_dim), (MambaRole::C, state_dim)];
        let parts = parts.map(|(role, rows)| (Role::Mamba(role), rows));
        let whole = self.id(Role::Mamba(MambaRole::Parameters));
        let [dt_down, b, c] = self.linears(Matrix::fused(whole, parts, num_channels, false))?;
        let steps = Matrix::new(self.id(Role::Mamba(MambaRole::Steps)), [num_channels, rank], true);
        let a = self.weights.values(self.id(Role::MixDecay), num_channels * state_dim)?;
        Ok(Mamba {
            x,
            z,
            conv,
            dt_down,
            b,
            c,
            norms: self.mamba_norms(norms, [rank, state_dim, state_dim])?,
            dt: self.weights.linear(&steps)?,
            a: transposed(&a, state_dim),
            d: self.weights.values(self.id(Role::MambaD), num_channels)?,
        })
    }

    fn mamba_norms(&mut self, norms: MambaNorms, lens: [usize; 3]) -> Result<Option<[Norm; 3]>, EngineError> {
        let (eps, has_weights) = match norms {
            MambaNorms::Nothing => return Ok(None),
            MambaNorms::Unweighted(eps) => (eps, false),
            MambaNorms::Weighted(eps) => (eps, true),
        };
        let mut all = Vec::new();
        for (role, len) in [MambaRole::StepsNorm, MambaRole::BNorm, MambaRole::CNorm].into_iter().zip(lens) {
            let weight = if has_weights { self.weights.values(self.id(Role::Mamba(role)), len)? } else { vec![1.0; len].into() };
            all.push(Norm { kind: NormKind::Rms, weight, bias: None, eps });
        }
        all.try_into().map(Some).map_err(|_| EngineError::Internal("as many norms as were asked for".into()))
    }

    fn mamba2(&mut self, config: &RecurrentConfig) -> Result<Mamba2, EngineError> {
        let RecurrentConfig::Mamba2 {
            num_heads,
            num_groups,
            state_dim,
            kernel,
            conv_bias,
            proj_bias,
            eps,
            gates_first,
            limits,
            scales,
            ..
        } = *config
        else {
            return Err(EngineError::Internal("a Mamba-2 layer of another kind".into()));
        };
        let width = config.width(self.hidden);
        let channels = width + 2 * num_groups * state_dim;
        let parts = [(Role::MambaZ, width), (Role::MambaXbc, channels), (Role::MambaDt, num_heads)];
        let [z, xbc, dt] = self.linears(Matrix::fused(self.id(Role::MixInput), parts, self.hidden, proj_bias))?;
        let [mut conv] = self.convs(Role::Conv, kernel, [channels], conv_bias)?;
        let of_state = num_groups * state_dim;
        let of_channels = [(scales.x, width), (scales.b, of_state), (scales.c, of_state)];
        scale_channels(&mut conv.weight, &of_channels);
        Ok(Mamba2 {
            z,
            xbc,
            dt,
            conv,
            dt_bias: self.weights.values(self.id(Role::MixDtBias), num_heads)?,
            a: self.weights.values(self.id(Role::MixDecay), num_heads)?,
            d: self.weights.values(self.id(Role::MambaD), num_heads)?,
            norm: eps.map(|eps| self.norm(width, eps)).transpose()?,
            gates_first,
            scales: [scales.z, scales.dt],
            num_heads,
            num_groups,
            state_dim,
            dt_limits: limits,
        })
    }

    fn gated_delta(&mut self, config: &RecurrentConfig) -> Result<GatedDelta, EngineError> {
        let RecurrentConfig::GatedDelta {
            num_key_heads,
            num_value_heads,
            key_dim,
            value_dim,
            kernel,
            layout,
            eps,
            has_negative,
            rank,
        } = *config
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
            [q, k, v, Matrix::new(self.id(Role::DeltaZ), [values, rank.unwrap_or(hidden)], false)]
        };
        let rates = [Role::DeltaB, Role::DeltaA];
        let [b, dt] = match layout {
            DeltaLayout::ByKeyHead | DeltaLayout::RatesByKeyHead => {
                let parts = rates.map(|role| (role, num_value_heads));
                Matrix::fused(self.id(Role::DeltaBa), parts, hidden, false).map(|matrix| matrix.in_groups(num_key_heads))
            }
            DeltaLayout::Apart | DeltaLayout::Tiled | DeltaLayout::ConvsApart => {
                let of_decays = rank.map_or([num_value_heads, hidden], |rank| [num_value_heads * key_dim, rank]);
                let shapes = [[num_value_heads, hidden], of_decays];
                [0, 1].map(|i| Matrix::new(self.id(rates[i]), shapes[i], false))
            }
        };
        let num_decays = dt.shape[0];
        let [q, k, v, z, b, dt] = self.linears([q, k, v, z, b, dt])?;
        let down = rank.map(|rank| {
            let thin = [Role::DeltaZDown, Role::DeltaADown];
            self.linears(thin.map(|role| Matrix::new(self.id(role), [rank, hidden], false)))
        });
        let convs = if layout == DeltaLayout::ConvsApart {
            let [[q], [k], [v]] = [
                self.convs(Role::DeltaQConv, kernel, [keys], false)?,
                self.convs(Role::DeltaKConv, kernel, [keys], false)?,
                self.convs(Role::DeltaVConv, kernel, [values], false)?,
            ];
            [q, k, v]
        } else {
            self.convs(Role::Conv, kernel, [keys, keys, values], false)?
        };
        Ok(GatedDelta {
            q,
            k,
            v,
            z,
            b,
            dt,
            down: down.transpose()?,
            convs,
            dt_bias: self.weights.values(self.id(Role::MixDtBias), num_decays)?,
            a: self.weights.values(self.id(Role::MixDecay), num_value_heads)?,
            beta_scale: if has_negative { 2.0 } else { 1.0 },
            norm: self.norm(value_dim, eps)?,
            num_key_heads,
            num_value_heads,
            is_grouped: layout != DeltaLayout::Tiled,
        })
    }
}

/// Rows of so many columns as columns.
fn transposed(values: &Constant, cols: usize) -> Constant {
    let rows = values.len() / cols;
    (0..values.len()).map(|at| values[at % rows * cols + at / rows]).collect::<Vec<_>>().into()
}

/// Multiplies the weights of a convolution, `[kernel, num_channels]`, by the scales of its channels, so many of each.
fn scale_channels(weight: &mut Constant, of_channels: &[(f32, usize)]) {
    if of_channels.iter().all(|(scale, _)| *scale == 1.0) {
        return;
    }
    let scales: Vec<f32> = of_channels.iter().flat_map(|(scale, count)| std::iter::repeat_n(*scale, *count)).collect();
    for (value, scale) in Arc::make_mut(weight).iter_mut().zip(scales.iter().cycle()) {
        *value *= scale;
    }
}

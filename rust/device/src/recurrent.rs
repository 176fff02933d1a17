//! Layers that keep a state of fixed size a request instead of keys and values: short convolutions (LFM2), Mamba (Gu and Dao
//! 2023, arXiv:2312.00752), Mamba-2 (Dao and Gu 2024, arXiv:2405.21060) and the gated delta rule (Yang et al. 2024,
//! arXiv:2412.06464). A prompt passes them token by token as an answer does, so that a row has the same bits in any chunk.

use std::{
    any::Any,
    sync::{Mutex, MutexGuard, PoisonError},
};

use crate::{Constant, DeviceError, Linear, Norm, StepMetadata, Tensor, mmap::Pages};

/// A causal convolution over each channel by itself.
#[derive(Clone)]
pub struct Conv {
    /// `[kernel, num_channels]`: the last row is multiplied by the token itself.
    pub weight: Constant,
    /// `[num_channels]`.
    pub bias: Option<Constant>,
    /// Channels.
    pub num_channels: usize,
}

impl Conv {
    /// Tokens that an output is made of.
    pub fn kernel(&self) -> usize {
        self.weight.len() / self.num_channels
    }

    /// Values that it keeps: the inputs of the last tokens, `[kernel - 1, num_channels]`.
    pub fn state_len(&self) -> usize {
        self.weight.len() - self.num_channels
    }
}

/// What mixes tokens in such a layer, up to the output projection.
pub enum Recurrent {
    /// `c * conv(b * x)`.
    ShortConv(ShortConv),
    /// A state space of each channel.
    Mamba(Mamba),
    /// A state space of each head.
    Mamba2(Mamba2),
    /// An associative memory.
    GatedDelta(GatedDelta),
}

/// A gated convolution.
pub struct ShortConv {
    /// `[num_channels, hidden_size]`: the gate of what goes in.
    pub b: Linear,
    /// `[num_channels, hidden_size]`: the gate of what comes out.
    pub c: Linear,
    /// `[num_channels, hidden_size]`.
    pub x: Linear,
    /// Over their product.
    pub conv: Conv,
}

/// `S = exp(dt * a) * S + b (dt * x)^T` and `y = S^T c + d * x`, times `silu(z)`, where each channel is a column of S and has a
/// step dt and decays of its own. x passes the convolution and SiLU first; b, c and what dt is made of are products with it then.
pub struct Mamba {
    /// `[num_channels, hidden_size]`.
    pub x: Linear,
    /// `[num_channels, hidden_size]`: the gate.
    pub z: Linear,
    /// Over x.
    pub conv: Conv,
    /// `[rank, num_channels]`: what steps are made of.
    pub dt_down: Linear,
    /// `[state_dim, num_channels]`.
    pub b: Linear,
    /// `[state_dim, num_channels]`.
    pub c: Linear,
    /// Of what steps are made of, of b and of c, if there are any.
    pub norms: Option<[Norm; 3]>,
    /// `[num_channels, rank]`, with a bias: the steps, before softplus.
    pub dt: Linear,
    /// `[state_dim, num_channels]`, negative.
    pub a: Constant,
    /// `[num_channels]`.
    pub d: Constant,
}

/// `S = exp(dt * a) * S + dt * b x^T` and `y = S^T c + d * x` of each head, with `dt = softplus(dt + dt_bias)`; then a norm of
/// `y * silu(z)`, or of y, times `silu(z)`.
pub struct Mamba2 {
    /// `[num_heads * head_dim, hidden_size]`: the gate.
    pub z: Linear,
    /// `[num_heads * head_dim + 2 * num_groups * state_dim, hidden_size]`: x, b and c, which pass the convolution and SiLU.
    pub xbc: Linear,
    /// `[num_heads, hidden_size]`: the length of a step.
    pub dt: Linear,
    /// Over x, b and c.
    pub conv: Conv,
    /// `[num_heads]`.
    pub dt_bias: Constant,
    /// `[num_heads]`, negative.
    pub a: Constant,
    /// `[num_heads]`.
    pub d: Constant,
    /// `[num_heads * head_dim]`; each group has a mean square of its own. `None`: there is no norm.
    pub norm: Option<Norm>,
    /// The norm is of what is gated already.
    pub gates_first: bool,
    /// Multiplied into z, and into dt, first.
    pub scales: [f32; 2],
    /// Heads.
    pub num_heads: usize,
    /// Groups of heads that share b and c.
    pub num_groups: usize,
    /// Elements of b and of c.
    pub state_dim: usize,
    /// Bounds of dt.
    pub dt_limits: [f32; 2],
}

/// `S = exp(a * softplus(dt + dt_bias)) * S`, then `S += k (beta * (v - S^T k))^T` and `y = S^T q` of each value head, with
/// `beta = beta_scale * sigmoid(b)`, keys and queries of length 1, and queries divided by the square root of their elements; then
/// a norm of each head, times `silu(z)`. In Kimi Delta Attention (arXiv:2510.26692) each row of S has a dt of its own, z and dt
/// are products of thin matrices, and the gate is `sigmoid(z)`.
pub struct GatedDelta {
    /// `[num_key_heads * key_dim, hidden_size]`.
    pub q: Linear,
    /// `[num_key_heads * key_dim, hidden_size]`.
    pub k: Linear,
    /// `[num_value_heads * value_dim, hidden_size]`.
    pub v: Linear,
    /// `[num_value_heads * value_dim, hidden_size]`, or behind its thin matrix `[num_value_heads * value_dim, rank]`: the gate.
    pub z: Linear,
    /// `[num_value_heads, hidden_size]`.
    pub b: Linear,
    /// `[num_value_heads, hidden_size]`, or behind its thin matrix `[num_value_heads * key_dim, rank]`.
    pub dt: Linear,
    /// Of Kimi Delta Attention, what z and dt are made of: `[rank, hidden_size]` each.
    pub down: Option<[Linear; 2]>,
    /// Over q, k and v, before SiLU.
    pub convs: [Conv; 3],
    /// As many as dt has rows.
    pub dt_bias: Constant,
    /// `[num_value_heads]`, negative.
    pub a: Constant,
    /// 2 where a state may change its sign; else 1.
    pub beta_scale: f32,
    /// `[value_dim]`.
    pub norm: Norm,
    /// Heads of keys and queries.
    pub num_key_heads: usize,
    /// Heads of values, a multiple.
    pub num_value_heads: usize,
    /// Which value heads share a key head: those that follow each other; else each `num_key_heads`-th.
    pub is_grouped: bool,
}

impl Mamba {
    /// Elements of b and of c.
    pub fn state_dim(&self) -> usize {
        self.b.out_features
    }
}

impl Mamba2 {
    /// Elements of a head's x.
    pub fn head_dim(&self) -> usize {
        self.z.out_features / self.num_heads
    }
}

impl GatedDelta {
    /// Elements of a key.
    pub fn key_dim(&self) -> usize {
        self.k.out_features / self.num_key_heads
    }

    /// Elements of a value.
    pub fn value_dim(&self) -> usize {
        self.v.out_features / self.num_value_heads
    }

    /// Whether each row of a state has a decay of its own.
    pub fn decays_by_row(&self) -> bool {
        self.down.is_some()
    }

    /// The key head of a value head.
    pub fn key_head(&self, value_head: usize) -> usize {
        if self.is_grouped { value_head * self.num_key_heads / self.num_value_heads } else { value_head % self.num_key_heads }
    }
}

impl Recurrent {
    /// Columns of what the layer gives.
    pub fn width(&self) -> usize {
        match self {
            Self::ShortConv(conv) => conv.x.out_features,
            Self::Mamba(mamba) => mamba.x.out_features,
            Self::Mamba2(mamba) => mamba.z.out_features,
            Self::GatedDelta(delta) => delta.v.out_features,
        }
    }

    /// f32 values of its state: inputs of the convolutions first, then a matrix a head, `[state_dim, head_dim]` or
    /// `[key_dim, value_dim]`, or one for all channels, `[state_dim, num_channels]`.
    pub fn state_len(&self) -> usize {
        match self {
            Self::ShortConv(conv) => conv.conv.state_len(),
            Self::Mamba(mamba) => mamba.conv.state_len() + mamba.x.out_features * mamba.state_dim(),
            Self::Mamba2(mamba) => mamba.conv.state_len() + mamba.z.out_features * mamba.state_dim,
            Self::GatedDelta(delta) => {
                let convs: usize = delta.convs.iter().map(Conv::state_len).sum();
                convs + delta.v.out_features * delta.key_dim()
            }
        }
    }
}

/// Arguments of [`RecurrentPhases::recurrent`].
pub struct RecurrentArgs<'a> {
    /// `[num_tokens, hidden_size]`: the residual stream.
    pub hidden: &'a Tensor,
    /// Applied to it first.
    pub norm: Option<&'a Norm>,
    /// The weights.
    pub weights: &'a Recurrent,
    /// The states of all requests. [`StepMetadata::state_slots`](crate::StepMetadata::state_slots) says where each one's is; one
    /// whose rows begin at position 0 begins with zeros.
    pub states: &'a StateCache,
    /// Which layer's.
    pub layer: usize,
    /// `[num_tokens, width]`.
    pub out: &'a mut Tensor,
}

/// The states of requests, where their backend computes: a slot has those of all layers of one request.
pub struct StateCache {
    values: StateValues,
    /// Where in a slot each layer's begin, and their end.
    offsets: Vec<usize>,
    num_slots: usize,
}

enum StateValues {
    Host(Mutex<Pages<f32>>),
    Device(Box<dyn DeviceStates>),
}

/// States in memory that is not the host's: so many f32 values, slot after slot.
pub trait DeviceStates: Any + Send + Sync {
    /// Copies `len` values from one place to another, behind what was asked for before; the two do not overlap.
    fn copy(&self, from: usize, to: usize, len: usize) -> Result<(), DeviceError>;
}

impl StateCache {
    /// So many slots in the memory of the host; `lens` has the values of each layer, 0 of those that keep none.
    ///
    /// Errors: [`DeviceError::Shape`] when their size overflows.
    pub fn new(num_slots: usize, lens: &[usize]) -> Result<Self, DeviceError> {
        Self::with(num_slots, lens, |len| Ok(StateValues::Host(Mutex::new(Pages::zeroed(len)?))))
    }

    /// The same in a device's own memory; `states` makes so many values.
    ///
    /// Errors: as [`Self::new`], and those of `states`.
    pub fn on_device<S: DeviceStates>(
        num_slots: usize,
        lens: &[usize],
        states: impl FnOnce(usize) -> Result<S, DeviceError>,
    ) -> Result<Self, DeviceError> {
        Self::with(num_slots, lens, |len| Ok(StateValues::Device(Box::new(states(len)?))))
    }

    fn with(
        num_slots: usize,
        lens: &[usize],
        values: impl FnOnce(usize) -> Result<StateValues, DeviceError>,
    ) -> Result<Self, DeviceError> {
        let overflows =
            || DeviceError::Shape(format!("{num_slots} states of {} layers take more than can be counted", lens.len()));
        let mut offsets = vec![0_usize];
        for len in lens {
            offsets.push(offsets[offsets.len() - 1].checked_add(*len).ok_or_else(overflows)?);
        }
        let len = offsets[lens.len()].checked_mul(num_slots).ok_or_else(overflows)?;
        Ok(Self { values: values(len)?, offsets, num_slots })
    }

    /// What [`Self::on_device`] was given; `None` for states of the host, and for those that are no `S`.
    pub fn device<S: DeviceStates>(&self) -> Option<&S> {
        let StateValues::Device(states) = &self.values else { return None };
        let states: &dyn Any = &**states;
        states.downcast_ref()
    }

    /// Slots.
    pub fn num_slots(&self) -> usize {
        self.num_slots
    }

    /// Values of a slot.
    pub fn slot_len(&self) -> usize {
        self.offsets[self.offsets.len() - 1]
    }

    /// Bytes of all slots.
    pub fn bytes(&self) -> u64 {
        self.num_slots as u64 * self.slot_len() as u64 * size_of::<f32>() as u64
    }

    /// Copies a slot to another.
    ///
    /// Errors: those of a device.
    ///
    /// # Panics
    /// When there is no such slot.
    pub fn copy(&self, from: usize, to: usize) -> Result<(), DeviceError> {
        assert!(from.max(to) < self.num_slots, "copy of slot {from} to {to} of {}", self.num_slots);
        let len = self.slot_len();
        match &self.values {
            _ if from == to => {}
            StateValues::Host(_) => self.values().as_mut_slice().copy_within(from * len..(from + 1) * len, to * len),
            StateValues::Device(states) => states.copy(from * len, to * len, len)?,
        }
        Ok(())
    }

    /// All values.
    ///
    /// # Panics
    /// When they are a device's.
    pub(crate) fn values(&self) -> MutexGuard<'_, Pages<f32>> {
        let StateValues::Host(values) = &self.values else { panic!("states of the host") };
        values.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where a layer's values of a slot are.
    pub(crate) fn range(&self, slot: usize, layer: usize) -> std::ops::Range<usize> {
        assert!(slot < self.num_slots, "slot {slot} of {}", self.num_slots);
        let first = slot * self.slot_len();
        first + self.offsets[layer]..first + self.offsets[layer + 1]
    }
}

/// What a gate of attention passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateActivation {
    /// `sigmoid(gate)`.
    Sigmoid,
    /// `softplus(gate)`, which may be more than 1.
    Softplus,
}

/// Elements of `x` that each value of its gate is of.
///
/// # Panics
/// When they have other numbers of rows, or the columns of `x` are no multiple of those of the gate.
pub(crate) fn gate_group(x: &Tensor, gate: &Tensor) -> usize {
    assert!(
        x.rows() == gate.rows() && gate.cols() > 0 && x.cols().is_multiple_of(gate.cols()),
        "a gate of {} rows and {} columns for {} and {}",
        gate.rows(),
        gate.cols(),
        x.rows(),
        x.cols()
    );
    x.cols() / gate.cols()
}

/// Layers that keep a state, and gates of what attention gives.
pub trait RecurrentPhases {
    /// All of a recurrent layer but the output projection. The states of the step's requests go on to behind their last rows.
    fn recurrent(&self, args: RecurrentArgs<'_>, step: &StepMetadata);

    /// Multiplies `x`, `[num_tokens, width]`, by what its gate passes, `[num_tokens, width]` or one value for as many elements
    /// that follow each other, `[num_tokens, num_heads]`.
    fn gate(&self, x: &mut Tensor, gate: &Tensor, activation: GateActivation);

    /// Rows that the matrix of a state may have: [`Mamba::state_dim`], [`Mamba2::state_dim`], [`GatedDelta::key_dim`].
    fn max_state_rows(&self) -> usize {
        usize::MAX
    }
}

//! What layers are like that keep a state of fixed size a request.

use super::{MAX_HEAD_DIM, MAX_HEADS, MAX_SIZE, in_range, positive};

const MAX_KERNEL: usize = 64;

/// A layer that keeps a state of fixed size a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RecurrentConfig {
    /// A gated convolution as wide as the residual stream.
    ShortConv {
        /// Tokens that an output is made of.
        kernel: usize,
    },
    /// A state space of each channel (Mamba, arXiv:2312.00752).
    Mamba {
        /// Channels.
        num_channels: usize,
        /// Elements of what goes into and comes out of the state of each.
        state_dim: usize,
        /// Columns that the lengths of steps are made of.
        rank: usize,
        /// Tokens that an output of the convolution is made of.
        kernel: usize,
        /// The convolution has biases.
        conv_bias: bool,
        /// The projections must have biases; else they may.
        proj_bias: bool,
        /// Of these columns, and of what goes into and comes out of the state.
        norms: MambaNorms,
    },
    /// A state space of each head (Mamba-2, arXiv:2405.21060).
    Mamba2 {
        /// Heads.
        num_heads: usize,
        /// Elements of a head.
        head_dim: usize,
        /// Groups of heads that share what goes into and comes out of the state.
        num_groups: usize,
        /// Elements of that.
        state_dim: usize,
        /// Tokens that an output of the convolution is made of.
        kernel: usize,
        /// The convolution has biases.
        conv_bias: bool,
        /// The projections must have biases; else they may.
        proj_bias: bool,
        /// Added to the mean square by the norm within; `None`: there is no norm.
        eps: Option<f32>,
        /// The norm is of what is gated already.
        gates_first: bool,
        /// Bounds of the length of a step.
        limits: [f32; 2],
        /// Multiplied into what is projected.
        scales: MambaScales,
    },
    /// An associative memory (Gated DeltaNet, arXiv:2412.06464).
    GatedDelta {
        /// Heads of queries and keys.
        num_key_heads: usize,
        /// Heads of values.
        num_value_heads: usize,
        /// Elements of a query and a key.
        key_dim: usize,
        /// Elements of a value.
        value_dim: usize,
        /// Tokens that an output of the convolution is made of.
        kernel: usize,
        /// How the matrices are stored, and which value heads share a key head.
        layout: DeltaLayout,
        /// Added to the mean square by the norm within.
        eps: f32,
        /// What is known of a key may change its sign.
        has_negative: bool,
        /// Of Kimi Delta Attention (arXiv:2510.26692), where each row of a state has a decay of its own and the gate is a
        /// sigmoid: columns between the thin matrices of both.
        rank: Option<usize>,
    },
}

/// RMS norms within a Mamba layer, each with an epsilon.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MambaNorms {
    /// None.
    Nothing,
    /// Nothing is multiplied in.
    Unweighted(f32),
    /// Checkpoints have weights of them.
    Weighted(f32),
}

/// What parts of the projection of a Mamba-2 layer are multiplied by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MambaScales {
    /// The gate.
    pub z: f32,
    /// What goes into the state.
    pub x: f32,
    /// What it is multiplied by there.
    pub b: f32,
    /// What the state is multiplied by.
    pub c: f32,
    /// The length of a step.
    pub dt: f32,
}

impl MambaScales {
    /// None.
    pub const ONE: Self = Self { z: 1.0, x: 1.0, b: 1.0, c: 1.0, dt: 1.0 };

    /// All of them.
    pub const fn all(self) -> [f32; 5] {
        [self.z, self.x, self.b, self.c, self.dt]
    }
}

/// How the matrices of a gated delta layer are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeltaLayout {
    /// Queries, keys, values and gates in one, by key head; both rates in another one, by key head.
    ByKeyHead,
    /// Queries, keys and values in one, one after the other; both rates in another one, by key head.
    RatesByKeyHead,
    /// Queries, keys and values in one, one after the other.
    Apart,
    /// The same; value heads are in the order of their number within their key head.
    Tiled,
    /// All by themselves, as the convolutions of queries, keys and values are.
    ConvsApart,
}

impl RecurrentConfig {
    /// Columns of what the layer gives, in a residual stream of `hidden` columns.
    pub const fn width(&self, hidden: usize) -> usize {
        match *self {
            Self::ShortConv { .. } => hidden,
            Self::Mamba { num_channels, .. } => num_channels,
            Self::Mamba2 { num_heads, head_dim, .. } => num_heads * head_dim,
            Self::GatedDelta { num_value_heads, value_dim, .. } => num_value_heads * value_dim,
        }
    }

    /// Columns of all its projections.
    pub const fn projected_width(&self, hidden: usize) -> usize {
        match *self {
            Self::ShortConv { .. } => 3 * hidden,
            // The lengths of steps are products with a product.
            Self::Mamba { num_channels, state_dim, rank, .. } => 3 * num_channels + 2 * state_dim + rank,
            Self::Mamba2 { num_heads, num_groups, state_dim, .. } => {
                2 * self.width(hidden) + 2 * num_groups * state_dim + num_heads
            }
            Self::GatedDelta { num_key_heads, num_value_heads, key_dim, rank, .. } => {
                let of_decays = match rank {
                    None => num_value_heads,
                    Some(rank) => num_value_heads * key_dim + 2 * rank,
                };
                2 * self.width(hidden) + 2 * num_key_heads * key_dim + num_value_heads + of_decays
            }
        }
    }

    /// Rows of the matrix that a head keeps; 0 where none does.
    pub const fn state_rows(&self) -> usize {
        match *self {
            Self::ShortConv { .. } => 0,
            Self::Mamba { state_dim, .. } | Self::Mamba2 { state_dim, .. } => state_dim,
            Self::GatedDelta { key_dim, .. } => key_dim,
        }
    }

    /// Values of its state: inputs of its convolution, and a matrix a head.
    pub const fn state_len(&self, hidden: usize) -> usize {
        let width = self.width(hidden);
        match *self {
            Self::ShortConv { kernel } => (kernel - 1) * hidden,
            Self::Mamba { state_dim, kernel, .. } => (kernel - 1 + state_dim) * width,
            Self::Mamba2 { num_groups, state_dim, kernel, .. } => {
                (kernel - 1) * (width + 2 * num_groups * state_dim) + width * state_dim
            }
            Self::GatedDelta { num_key_heads, key_dim, kernel, .. } => {
                (kernel - 1) * (width + 2 * num_key_heads * key_dim) + width * key_dim
            }
        }
    }

    /// In a residual stream of `hidden` columns.
    pub(super) fn check(&self, hidden: usize) -> Result<(), String> {
        let kernel = |kernel| in_range("length of a convolution", kernel, MAX_KERNEL);
        match *self {
            Self::ShortConv { kernel: len } => kernel(len),
            Self::Mamba { num_channels, state_dim, rank, kernel: len, norms, .. } => {
                kernel(len)?;
                in_range("number of channels of the state", num_channels, MAX_SIZE)?;
                in_range("size of the state", state_dim, MAX_HEAD_DIM)?;
                in_range("rank of the steps of the state", rank, hidden)?;
                match norms {
                    MambaNorms::Nothing => Ok(()),
                    MambaNorms::Unweighted(eps) | MambaNorms::Weighted(eps) => positive("epsilon of the norms of the state", eps),
                }
            }
            Self::Mamba2 { num_heads, head_dim, num_groups, state_dim, kernel: len, eps, limits, scales, .. } => {
                kernel(len)?;
                in_range("number of heads of the state", num_heads, MAX_HEADS)?;
                in_range("elements of a head of the state", head_dim, MAX_HEAD_DIM)?;
                in_range("number of groups of the state", num_groups, num_heads)?;
                in_range("size of the state", state_dim, MAX_HEAD_DIM)?;
                eps.map_or(Ok(()), |eps| positive("epsilon of the norm of the state", eps))?;
                scales.all().into_iter().try_for_each(|scale| positive("multiplier of a projection of the state", scale))?;
                let [least, most] = limits;
                // Neither is no number then, and the larger one may be infinite.
                if !(0.0..=most).contains(&least) {
                    return Err(format!(
                        "the steps of the state are from {least} to {most} long; the least must be the smaller one"
                    ));
                }
                if num_heads.is_multiple_of(num_groups) {
                    return Ok(());
                }
                Err(format!("{num_heads} heads of the state are not a multiple of {num_groups} groups"))
            }
            Self::GatedDelta { num_key_heads, num_value_heads, key_dim, value_dim, kernel: len, eps, rank, .. } => {
                kernel(len)?;
                rank.map_or(Ok(()), |rank| in_range("rank of the decays of the state", rank, MAX_HEAD_DIM))?;
                in_range("number of key heads of the state", num_key_heads, MAX_HEADS)?;
                in_range("number of value heads of the state", num_value_heads, MAX_HEADS)?;
                in_range("elements of a key of the state", key_dim, MAX_HEAD_DIM)?;
                in_range("elements of a value of the state", value_dim, MAX_HEAD_DIM)?;
                positive("epsilon of the norm of the state", eps)?;
                if num_value_heads.is_multiple_of(num_key_heads) {
                    return Ok(());
                }
                Err(format!("{num_value_heads} value heads of the state are not a multiple of {num_key_heads} key heads"))
            }
        }
    }
}

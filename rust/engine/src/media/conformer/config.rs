//! What a conformer is like.

use device::Activation;

use super::names::ConformerNames;

/// A conformer (Gulati et al. 2020, arXiv:2005.08100) as Gemma 4 and Gemma 3n have it: two convolutions over frames and mel bins
/// that take every other place of both, then layers of a feed-forward network, attention to what is near, a convolution over
/// time, and a second feed-forward network.
#[derive(Clone, Debug, PartialEq)]
pub struct ConformerConfig {
    /// Whose it is.
    pub style: ConformerStyle,
    /// Values of a frame of the features.
    pub num_mel_bins: usize,
    /// Frames of the longest sound.
    pub max_frames: usize,
    /// What comes out of each of the two convolutions, of each place.
    pub channels: [usize; 2],
    /// Width of the residual stream; feed-forward networks have four times as many columns.
    pub hidden_size: usize,
    /// Heads of queries, keys and values.
    pub num_heads: usize,
    /// Layers.
    pub num_layers: usize,
    /// Places that the convolution over time sees: its own and those before.
    pub kernel_size: usize,
    /// How much of a feed-forward network's output is added.
    pub ffn_scale: f32,
    /// `attention_chunk_size`, of which positions depend.
    pub chunk_size: usize,
    /// Places before its own that a position reaches.
    pub left: usize,
    /// The same behind it.
    pub right: usize,
    /// Bound of scores.
    pub score_cap: f32,
    /// Bound of states before and behind parts of a layer.
    pub state_cap: f32,
    /// Of networks and of the convolution over time.
    pub activation: Activation,
    /// Added to the mean square, where a checkpoint's family lets a configuration say it.
    pub eps: f32,
    /// The same of the norms behind the two convolutions.
    pub stem_eps: f32,
    /// What goes into each product of a layer is bounded, and what comes out, by numbers that lie beside its matrix.
    pub is_bounded: bool,
    /// Columns of what comes out.
    pub out_features: usize,
    /// What its weights are called.
    pub names: &'static ConformerNames,
}

/// In what conformers differ that are alike otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConformerStyle {
    /// Convolutions before the layers see what is around a place and norm each place by itself; keys have a factor, attention
    /// does not see the farthest place that positions reach, and a matrix is behind the layers.
    Gemma4,
    /// The convolutions see a place and those behind it in time, and norm it by all up to it; what comes out is every so many-th
    /// state.
    Gemma3n {
        /// States to one that comes out.
        reduction: usize,
    },
}

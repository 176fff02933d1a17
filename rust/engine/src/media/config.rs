//! What an encoder of images or of sounds is like, whatever file says so.

use device::{Activation, NormKind};

pub use super::{
    conformer::{
        config::{ConformerConfig, ConformerStyle},
        names::{ConformerNames, GEMMA3N, GEMMA4},
    },
    hard::{Filled, HardTokens},
    mobile::config::MobileConfig,
};
use super::{speech::SpeechConfig, video::VideoConfig};

/// An encoder of images or of sounds, and how its outputs come into a prompt. A chunk of a sound is to it a tile of one row,
/// whose patches are frames.
#[derive(Clone, Debug, PartialEq)]
pub struct MediaConfig {
    /// HF `model_type` of the whole model.
    pub architecture: &'static str,
    /// From patches or frames to hidden states.
    pub body: Body,
    /// From these to vectors of the decoder's width.
    pub projector: ProjectorConfig,
    /// What takes the place of the projector, if it does.
    pub resampler: Option<ResamplerConfig>,
    /// What the hidden states behind some layers become besides: the first is added to the rows of images behind the decoder's
    /// first layer, and so on (`DeepStack`, arXiv:2406.04334).
    pub deep: Vec<DeepStack>,
    /// How the rows of an image's tiles follow each other in a prompt.
    pub arrangement: Arrangement,
    /// The text that stands for an image or a sound in a prompt.
    pub placeholder: Placeholder,
    /// The token in whose places the vectors go.
    pub token_id: u32,
    /// The rows of an image see each other in the decoder, in the layers that [`Self::spans_in_windows`] leaves.
    pub sees_spans: bool,
    /// They do so in layers with a window alone.
    pub spans_in_windows: bool,
    /// Its vectors stand in no rows: layers of the decoder look at them, from the row of an image on.
    pub is_crossed: bool,
    /// Where its weights lie.
    pub places: Places,
    /// Its weights have a file of their own (`mmproj`), in which no tensor may be left over.
    pub has_own_file: bool,
    /// How an image or a sound becomes the encoder's input.
    pub processor: MediaProcessor,
    /// What becomes of what fills up the last chunk of a sound.
    pub silence: Silence,
    /// What takes the place of a sound's projector in a prompt that has images as well.
    pub beside_images: Option<ProjectorConfig>,
    /// Tokens that have vectors as well.
    pub hard: Option<HardTokens>,
    /// How videos are taken, if they are.
    pub video: Option<VideoConfig>,
}

/// What becomes of frames that are none of a chunk's own: the silence that fills up the last of a sound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Silence {
    /// It becomes vectors as all else.
    Heard,
    /// Layers do not see its states, and it becomes no vectors. The same of frames before a chunk's own.
    Unseen,
    /// Layers see its states, and it becomes no vectors.
    Dropped,
}

/// What makes hidden states of an encoder's input.
#[derive(Clone, Debug, PartialEq)]
pub enum Body {
    /// A transformer.
    Tower(Box<TowerConfig>),
    /// A conformer, which hears.
    Conformer(ConformerConfig),
    /// That of Phi-4-multimodal.
    Speech(SpeechConfig),
    /// Convolutions, which see.
    Mobile(Box<MobileConfig>),
}

impl From<TowerConfig> for Body {
    fn from(tower: TowerConfig) -> Self {
        Self::Tower(Box::new(tower))
    }
}

impl From<SpeechConfig> for Body {
    fn from(speech: SpeechConfig) -> Self {
        Self::Speech(speech)
    }
}

impl From<ConformerConfig> for Body {
    fn from(conformer: ConformerConfig) -> Self {
        Self::Conformer(conformer)
    }
}

/// What makes an encoder's input.
#[derive(Clone, Debug, PartialEq)]
pub enum MediaProcessor {
    /// Of images.
    Images(Box<images::Processor>),
    /// Of sounds.
    Sounds(audio::Processor),
}

/// What comes before the layers of a tower that hears: two convolutions over time with GELU behind each, of which the second
/// takes every other place (Whisper, arXiv:2212.04356).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frames {
    /// Values of a frame of the features.
    pub num_mel_bins: usize,
    /// The names of the convolutions.
    pub names: [&'static str; 2],
}

/// A vision transformer (Dosovitskiy et al. 2020, arXiv:2010.11929), or one like it that hears.
#[derive(Clone, Debug, PartialEq)]
pub struct TowerConfig {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Heads of queries, keys and values.
    pub num_heads: usize,
    /// Heads of keys and values, where there are fewer of these.
    pub num_kv_heads: Option<usize>,
    /// Columns of the feed-forward network.
    pub intermediate_size: usize,
    /// Layers that are computed: those behind the one whose output is taken are not.
    pub num_layers: usize,
    /// Side of a patch in pixels.
    pub patch_size: usize,
    /// Instead of patches, the frames of a sound.
    pub frames: Option<Frames>,
    /// How the matrix over patches lies in files.
    pub patch_layout: PatchLayout,
    /// Frames that a patch has (Qwen2-VL): of an image the same one so many times.
    pub num_frames: usize,
    /// Tiles may have these frames, and not one image for all of them.
    pub sees_frames: bool,
    /// Of the layers.
    pub norm: NormKind,
    /// Added to the mean square.
    pub eps: f32,
    /// Of the feed-forward networks.
    pub activation: Activation,
    /// `activation(gate) * up`; else `activation(up)`.
    pub is_gated: bool,
    /// How patches know where they are.
    pub positions: Positions,
    /// A row before the patches of each tile, which is not part of what comes out.
    pub has_class: bool,
    /// A norm before the first layer.
    pub has_pre_norm: bool,
    /// It comes before positions are added, and not behind.
    pub norms_first: bool,
    /// A norm behind the last layer.
    pub has_post_norm: bool,
    /// Layers that see a window around a patch, and not the whole tile.
    pub windows: Option<Windows>,
    /// The names of norms of each head of the queries, and of the keys.
    pub qk_norms: Option<[&'static str; 2]>,
    /// Norms that layers have within them, which go with scores that are not scaled (Gemma 4).
    pub inner_norms: Option<InnerNorms>,
    /// What goes into each product of a layer is bounded, and what comes out, by numbers that lie beside its matrix.
    pub is_bounded: bool,
    /// What the last hidden states become.
    pub standard: Option<Standard>,
    /// It sees all tiles of an image at once.
    pub tiled: Option<Tiled>,
    /// What its weights are called.
    pub names: TowerNames,
}

/// Of a tower that sees all tiles of an image at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tiled {
    /// Tiles of an image at most.
    pub max_tiles: usize,
    /// Layers behind the others, whose parts have gates.
    pub num_global_layers: usize,
    /// The layers before these behind which the states are a part of what comes out, counted from 0.
    pub taken: Vec<usize>,
}

/// The names of norms within layers; each head of the values has one without weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InnerNorms {
    /// Of each head of the queries.
    pub q: &'static str,
    /// Of each head of the keys.
    pub k: &'static str,
    /// Behind attention.
    pub post_attn: &'static str,
    /// Behind the feed-forward network.
    pub post_ffn: &'static str,
}

/// `(x * factor - bias) * scale`, or `x * factor`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Standard {
    /// The factor.
    pub factor: f32,
    /// The names of bias and scale.
    pub names: Option<[&'static str; 2]>,
}

/// How the matrix over the values of a patch lies in files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PatchLayout {
    /// As a convolution, `[rows, 3, side, side]`, perhaps with frames behind the colours.
    Convolution,
    /// The same as a matrix.
    Planes,
    /// As a matrix, pixel by pixel, `[rows, side * side * 3]`.
    Pixels,
}

/// How patches know where they are.
#[derive(Clone, Debug, PartialEq)]
pub enum Positions {
    /// Vectors that are added, one for each of so many frames of a sound.
    Line {
        /// Frames of a chunk.
        len: usize,
    },
    /// Rotation of the first elements of each head by the number of a place (GLM-ASR).
    Turns {
        /// Frames of a chunk.
        len: usize,
        /// Elements of a head that rotate.
        rotary_dim: usize,
        /// Base of the frequencies.
        theta: f64,
    },
    /// Vectors that are added, for tiles of `side` by `side` patches.
    Learned {
        /// Patches along a side.
        side: usize,
    },
    /// The same, between which a tile of another size takes weighted means of four, besides rotation as `Rotary` (Qwen3-VL).
    Interpolated {
        /// Patches along a side.
        side: usize,
        /// Base of the frequencies of rotation.
        theta: f64,
    },
    /// The same, where a smaller tile takes the vectors that are as far along (Idefics 2, arXiv:2405.02246).
    Fractions {
        /// Patches along a side.
        side: usize,
    },
    /// The same, where it takes cubic interpolations between sixteen, besides rotation as `Rotary` (GLM-4.1V, arXiv:2507.01006).
    Cubic {
        /// Patches along a side.
        side: usize,
        /// Base of the frequencies of rotation.
        theta: f64,
    },
    /// The same, where a tile of another size takes weighted means of all that its patches would cover (SigLIP 2 NaFlex,
    /// arXiv:2502.14786).
    Resized {
        /// Patches along a side.
        side: usize,
    },
    /// As `Learned`, with that of the row before the patches behind them, and rotation of pairs that are neighbours: the first
    /// half by the column, the second by the row, both counted from 1. That row does not rotate (Llama 4).
    Turned {
        /// Patches along a side.
        side: usize,
        /// Base of the frequencies.
        theta: f64,
    },
    /// Vectors of columns and vectors of rows, `[2, side, hidden_size]`, of which a patch takes the sum of two; and rotation, the
    /// first half of a head by the column and the second by the row, within each half as a head rotates else (Gemma 4).
    Axes {
        /// Columns, or rows, at most.
        side: usize,
        /// Base of the frequencies.
        theta: f64,
    },
    /// Rotation of queries and keys, half of it by the row and half by the column.
    Rotary {
        /// Base of the frequencies.
        theta: f64,
        /// Whether rows have the even frequencies of a head and columns the odd ones (Pixtral, arXiv:2410.07073), or both the
        /// same ones of half a head (Qwen2-VL, arXiv:2409.12191).
        takes_turns: bool,
    },
}

/// Layers with windows (Qwen2.5-VL, arXiv:2502.13923).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Windows {
    /// Patches along a side of a window.
    pub side: usize,
    /// The layers without.
    pub full_layers: Vec<usize>,
}

/// From hidden states to vectors of the decoder's width.
#[derive(Clone, Debug, PartialEq)]
pub struct ProjectorConfig {
    /// Before patches are put together.
    pub norm: Option<ProjectorNorm>,
    /// How patches become rows.
    pub regroup: Regroup,
    /// After that.
    pub late_norm: Option<ProjectorNorm>,
    /// Matrices, one after the other.
    pub layers: Vec<ProjectorLayer>,
}

impl ProjectorConfig {
    /// Columns of what comes out.
    pub fn out_features(&self) -> usize {
        self.layers.last().map_or(0, |layer| layer.out_features)
    }
}

/// A perceiver that makes a fixed number of vectors of the patches of a tile.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ResamplerConfig {
    /// Width of what comes out of the tower.
    pub in_features: usize,
    /// Columns of the gated network before it.
    pub inner_size: usize,
    /// Its own width, which is the decoder's.
    pub hidden_size: usize,
    /// Vectors of a tile.
    pub num_latents: usize,
    /// Layers.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Of its networks.
    pub activation: Activation,
    /// Added to the mean square.
    pub eps: f32,
}

/// Hidden states behind a layer, and what is made of them.
#[derive(Clone, Debug, PartialEq)]
pub struct DeepStack {
    /// The layer.
    pub layer: usize,
    /// As the last ones become vectors.
    pub projector: ProjectorConfig,
    /// What its names begin with, behind those of the tower.
    pub place: String,
}

/// A norm of the projector.
#[derive(Clone, Debug, PartialEq)]
pub struct ProjectorNorm {
    /// Its name; empty: it has no weights.
    pub name: &'static str,
    /// RMS or layer norm.
    pub kind: NormKind,
    /// Added to the mean square.
    pub eps: f32,
    /// Added to every weight of the checkpoint.
    pub offset: f32,
}

/// A matrix of the projector.
#[derive(Clone, Debug, PartialEq)]
pub struct ProjectorLayer {
    /// Its name.
    pub name: &'static str,
    /// Columns that come out.
    pub out_features: usize,
    /// By what its output is multiplied, behind whose activation.
    pub gate: ProjectorGate,
    /// How it lies in the file.
    pub layout: ProjectorLayout,
    /// Of its output, before the activation.
    pub norm: Option<ProjectorNorm>,
    /// What its output is passed through.
    pub activation: Option<Activation>,
}

/// By what the output of a matrix is multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProjectorGate {
    /// By nothing.
    None,
    /// By the second half of the rows of one matrix, whose first half it is.
    SecondHalf,
    /// By a matrix of this name.
    Named(&'static str),
}

/// How a matrix of the projector lies in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProjectorLayout {
    /// As it is.
    Plain,
    /// Its transpose, by the whole of its name.
    Transposed,
    /// As a convolution over squares of so many by so many patches.
    Convolution(usize),
}

/// How patches become rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Regroup {
    /// Each is one.
    Each,
    /// A square of so many by so many, one behind the other, row by row (pixel shuffle).
    Squares(usize),
    /// So many that follow each other in a row.
    Runs(usize),
    /// As `Squares`, where each value of all of them comes before the next value.
    Interleaved(usize),
    /// Their mean, over squares of which there are so many along a side of the tile.
    Means(usize),
    /// Their mean, over squares of so many by so many.
    MeansOf(usize),
    /// Their mean, of so many that follow each other in a row.
    MeansOfRuns(usize),
}

impl Regroup {
    /// Patches along the sides of what becomes a row, of a tile of so many along its height.
    pub fn sides(self, of_tile: usize) -> [usize; 2] {
        match self {
            Self::Each => [1; 2],
            Self::Runs(len) | Self::MeansOfRuns(len) => [1, len],
            Self::Squares(side) | Self::Interleaved(side) | Self::MeansOf(side) => [side; 2],
            Self::Means(num) => [of_tile / num.max(1); 2],
        }
    }

    /// Columns of a row, of patches with `hidden` values.
    pub fn columns(self, hidden: usize) -> usize {
        match self {
            Self::Each | Self::Means(_) | Self::MeansOf(_) | Self::MeansOfRuns(_) => hidden,
            Self::Runs(len) => hidden * len,
            Self::Squares(side) | Self::Interleaved(side) => hidden * side * side,
        }
    }
}

/// How the rows of an image's tiles follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrangement {
    /// Tile after tile.
    Tiles,
    /// The whole image first; then its tiles side by side without their padding, with a vector of its own behind each row
    /// (LLaVA-NeXT).
    Unpadded,
    /// The tiles side by side, and the whole image, with a vector of its own behind each row and another between the two. These
    /// are made of values of the tower's, as all others are (Phi-3-vision, arXiv:2404.14219).
    Separated {
        /// The whole image comes behind the tiles.
        whole_last: bool,
    },
}

/// The text that stands for an image or a sound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placeholder {
    /// The token of the image or the sound, as often as there are vectors.
    Repeated,
    /// The same behind a text and before another, unless they stand there already (Voxtral, Qwen2-Audio).
    Fringed {
        /// What they stand behind.
        before: &'static str,
        /// What stands behind them.
        after: &'static str,
    },
    /// The same between two texts, in place of a text.
    Between {
        /// What is replaced: a special token of the tokenizer, by its id.
        replaced: u32,
        /// Before the tokens.
        before: String,
        /// Behind them.
        after: String,
    },
    /// The token of the image or the sound, as often as there are vectors, between two others.
    Enclosed {
        /// The token before them.
        before: u32,
        /// The one behind them.
        after: u32,
    },
    /// The same with an empty line before and behind (Gemma 3n).
    Apart {
        /// The token before them.
        before: u32,
        /// The one behind them.
        after: u32,
    },
    /// Tile by tile, each behind a text that says where it lies (Idefics 3, arXiv:2408.12637).
    Tiles,
    /// Tile by tile, each between tokens, of which two behind each other are one (Idefics 2).
    Fenced,
    /// Row by row, with a token between two rows and another behind the last (Pixtral).
    Rows,
    /// Tile by tile, each behind a token that says where it lies, all between two tokens (LFM2-VL).
    Cells,
    /// All tokens between two texts, with a text behind those of each tile (InternVL, Command A Vision).
    Wrapped {
        /// Before all.
        before: &'static str,
        /// Behind each tile.
        behind_tile: &'static str,
        /// Behind all.
        after: &'static str,
    },
    /// Tile by tile, each behind its number, all between two tokens, in place of another token (Aya Vision).
    Numbered,
    /// Tile by tile, with a token between two of a row and another behind a row, all between two tokens; behind a text of its
    /// own, which a chat template writes for the image, the whole (Llama 4).
    Canvas,
}

/// Where weights lie in a checkpoint: the first of these under which there are any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Places {
    /// What the tower's names begin with.
    pub tower: &'static [&'static str],
    /// What the projector's names begin with.
    pub projector: &'static [&'static str],
    /// The vector behind each row of tiles.
    pub newline: &'static [&'static str],
}

/// What a tower's weights are called, behind what all of their names begin with; `*` is the number of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TowerNames {
    /// Of patches.
    pub patch: &'static str,
    /// The vectors of positions.
    pub positions: &'static str,
    /// The row before the patches.
    pub class: &'static str,
    /// The norm before the first layer.
    pub pre_norm: &'static str,
    /// The norm behind the last.
    pub post_norm: &'static str,
    /// The norm before attention.
    pub attn_norm: &'static str,
    /// Queries, keys and values; the same name three times where they are one matrix.
    pub qkv: [&'static str; 3],
    /// Behind attention.
    pub attn_output: &'static str,
    /// The norm before the feed-forward network.
    pub ffn_norm: &'static str,
    /// Its gate.
    pub gate: &'static str,
    /// What is multiplied by the gate, or the first of two.
    pub up: &'static str,
    /// The last.
    pub down: &'static str,
    /// What the outputs of attention and of the feed-forward network are multiplied by, value by value; empty: nothing.
    pub scales: [&'static str; 2],
    /// Of each head of queries and keys, rows that rotate together are neighbours; else they are half a head apart.
    pub is_paired: bool,
}

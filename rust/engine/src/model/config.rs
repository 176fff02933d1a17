//! What a decoder is like, whatever file says so.

mod check;
mod ffn;
mod latent;
mod positions;
mod recurrent;

use device::{Activation, GateActivation, KvCacheSpec, KvDType, KvShape, KvSource, Mask, NormKind, QueryScale};
use paged::{KvGroups, ModelConfigLike, Retention};

use check::in_range;
pub(super) use check::positive;
pub use ffn::{DenseConfig, ExpertsConfig, FfnConfig, SharedConfig};
pub use latent::LatentConfig;
pub use positions::PositionsConfig;
pub use recurrent::{DeltaLayout, MambaNorms, MambaScales, RecurrentConfig};

use super::rope::{RopeConfig, RopeRows};
use crate::EngineError;

/// Largest vocabulary, width or length that is believed.
pub const MAX_SIZE: usize = 1 << 27;
/// Most layers that are believed.
pub const MAX_LAYERS: usize = 4096;
/// Vectors of a block of what is kept of an image for layers that look at it.
pub(crate) const CROSS_BLOCK_SIZE: usize = 32;
const MAX_HEADS: usize = 4096;
const MAX_HEAD_DIM: usize = 1024;

/// Hyperparameters of a decoder. Widths are in elements.
#[derive(Clone, Debug)]
pub struct DecoderConfig {
    /// HF `model_type` of the architecture.
    pub architecture: &'static str,
    /// Token ids.
    pub vocab_size: usize,
    /// Rows of the token embedding behind these: of tokens that are never an answer.
    pub num_further_rows: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Tokens of a sequence at most.
    pub max_position_embeddings: usize,
    /// Every norm.
    pub norm: NormConfig,
    /// The kinds of rotation; layers point here.
    pub ropes: Vec<RopeConfig>,
    /// In order.
    pub layers: Vec<LayerConfig>,
    /// The output projection is the token embedding.
    pub tie_word_embeddings: bool,
    /// Multiplied into token embeddings.
    pub embedding_scale: f32,
    /// Multiplied into logits.
    pub logit_scale: f32,
    /// Then `cap * tanh(logit / cap)`.
    pub final_softcap: Option<f32>,
    /// Ends of sequence.
    pub eos_token_ids: Vec<u32>,
    /// There is a norm behind the token embedding, and behind what is added to it.
    pub embedding_norm: bool,
    /// Vectors of positions or of kinds of tokens are added to it.
    pub positions: Option<PositionsConfig>,
    /// There is a norm behind the last layer.
    pub output_norm: bool,
    /// What each layer is given besides the residual stream.
    pub layer_inputs: Option<LayerInputsConfig>,
    /// Several residual streams, of which the layers run on one.
    pub streams: Option<StreamsConfig>,
    /// Layers behind these in the files, which predict further tokens (MTP, arXiv:2404.19737).
    pub num_mtp_layers: usize,
    /// It is such a head, whose one layer has this number in the files; its token embedding and output projection are those of
    /// its model.
    pub head_layer: Option<usize>,
}

/// A vector of each token and layer (Gemma 4's per-layer embeddings).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerInputsConfig {
    /// Elements for one layer.
    pub width: usize,
    /// Rows of their table.
    pub vocab_size: usize,
    /// The row that stands for what has none: for the rows of images, and for tokens beyond the table.
    pub pad_token_id: u32,
    /// What is between the two matrices by which a layer takes its vector.
    pub activation: Activation,
}

/// Several residual streams (Gemma 3n's `AltUp`), and beside the attention of each layer a product of two thin matrices (its
/// `LAuReL`, arXiv:2411.07501).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamsConfig {
    /// How many there are.
    pub count: usize,
    /// Which of them the layers run on.
    pub active: usize,
    /// That one is multiplied by weights before a layer's input is made of it.
    pub has_output_scale: bool,
    /// Columns between the thin matrices.
    pub branch_rank: usize,
}

/// Normalization.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormConfig {
    /// RMS or layer norm; the latter may have biases.
    pub kind: NormKind,
    /// Added to the mean square.
    pub eps: f32,
    /// Added to every weight of the checkpoint (gemma stores `w` for `1 + w`).
    pub offset: f32,
    /// Checkpoints have weights of them; else nothing is multiplied in.
    pub has_weights: bool,
}

/// A layer: what mixes tokens, if anything, then a feed-forward network, if there is one, each added to the residual stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerConfig {
    /// What mixes tokens, where it does.
    pub attention: AttentionConfig,
    /// Attention mixes tokens; else what is said of it means nothing.
    pub has_attention: bool,
    /// This mixes them: in place of attention, beside it, both of the same rows, or nothing else does.
    pub recurrent: Option<RecurrentConfig>,
    /// Attention looks at the vectors of images, and both parts are multiplied by the tanh of a weight; rows that see no image
    /// pass the layer by.
    pub is_cross: bool,
    /// The feed-forward network.
    pub ffn: FfnConfig,
    /// Where it has norms.
    pub norms: Norms,
    /// The feed-forward network sees what attention sees, by the same norm; else the residual stream with the output of
    /// attention.
    pub is_parallel: bool,
    /// Of such a layer: the feed-forward network has a norm of its own before it.
    pub has_own_ffn_norm: bool,
    /// Multiplied into what is added to the residual stream.
    pub residual_scales: ResidualScales,
    /// The residual stream behind it is multiplied by a weight of the checkpoint.
    pub has_output_scale: bool,
}

/// What parts of a layer are multiplied by before they are added to the residual stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ResidualScales {
    /// Attention.
    pub attention: f32,
    /// A layer's state.
    pub recurrent: f32,
    /// The feed-forward network.
    pub ffn: f32,
}

impl ResidualScales {
    /// The same for all.
    pub const fn all(scale: f32) -> Self {
        Self { attention: scale, recurrent: scale, ffn: scale }
    }
}

/// Which norms a layer has, around its attention as around its feed-forward network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norms {
    /// Before both.
    Before,
    /// After both, before the residual additions.
    After,
    /// Both kinds (sandwich).
    Around,
    /// Before both, and after the feed-forward network.
    BeforeAndLast,
    /// Before the feed-forward network alone.
    BeforeFfn,
    /// Behind both residual additions, of the sums (post-LN, as in BERT).
    OfSums,
}

impl Norms {
    /// Whether there is one before attention, and before the feed-forward network.
    pub(crate) const fn are_before(self) -> [bool; 2] {
        let before_ffn = !matches!(self, Self::After | Self::OfSums);
        [before_ffn && !matches!(self, Self::BeforeFfn), before_ffn]
    }

    /// Whether there is one after attention, and after the feed-forward network.
    pub(crate) const fn are_after(self) -> [bool; 2] {
        let after_attention = matches!(self, Self::After | Self::Around | Self::OfSums);
        [after_attention, after_attention || matches!(self, Self::BeforeAndLast)]
    }
}

/// Attention of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionConfig {
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Index in [`DecoderConfig::ropes`]; `None`: nothing rotates.
    pub rope: Option<usize>,
    /// Which keys a query sees, before any window.
    pub mask: Mask,
    /// Keys j with |i - j| < window are seen by query i, as far as the mask has them; `None`: all.
    pub window: Option<usize>,
    /// Query i sees no keys before the last multiple of this that is not behind it.
    pub chunk: Option<usize>,
    /// Multiplied into scores.
    pub scale: f32,
    /// `cap * tanh(score / cap)` of scores.
    pub softcap: Option<f32>,
    /// Groups of heads of which a checkpoint that keeps q, k and v as one has the rows of each one after the other.
    pub qkv_groups: usize,
    /// Such a checkpoint has the rows of v before those of k.
    pub values_first: bool,
    /// No element of q, k and v is farther from 0.
    pub clip: Option<f32>,
    /// q, k and v must have biases; else they may.
    pub qkv_bias: bool,
    /// The output projection must have a bias; else it may.
    pub output_bias: bool,
    /// What it gives is multiplied by this.
    pub output_gate: Option<OutputGate>,
    /// Norms of q and k.
    pub qk_norm: Option<QkNorm>,
    /// They follow the rotation; else it follows them.
    pub norms_last: bool,
    /// The epsilon of an RMS norm, without weights, of each head of the values.
    pub v_norm: Option<f32>,
    /// Values are what keys are before norm and rotation: one matrix makes both.
    pub keys_are_values: bool,
    /// What queries are multiplied by in the end.
    pub q_scale: Option<QueryScale>,
    /// Each head has a score without a value.
    pub has_sinks: bool,
    /// The layer before whose keys and values it reads; `None`: its own.
    pub shared_kv: Option<usize>,
    /// It is latent: heads and their elements are those of its absorbed form, one key and value head for all.
    pub latent: Option<LatentConfig>,
}

/// What multiplies the output of attention: a projection of what attention sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutputGate {
    /// It has one value for all elements of a head; else one for each, whose rows lie beside those of the queries, head by head.
    pub is_per_head: bool,
    /// What of it passes.
    pub activation: GateActivation,
}

impl OutputGate {
    /// A sigmoid for each element.
    pub const SIGMOID: Self = Self { is_per_head: false, activation: GateActivation::Sigmoid };
}

/// What a norm of q and k is taken over.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum QkNorm {
    /// Each head, all with the same `[head_dim]` weights.
    Heads,
    /// Each head, with weights of its own, `[num_heads, head_dim]`.
    OwnHeads,
    /// The whole row, `[num_heads * head_dim]` weights.
    Row,
    /// Each head, without weights, by an RMS norm with this epsilon.
    Unweighted(f32),
}

impl Default for DecoderConfig {
    fn default() -> Self {
        Self {
            architecture: "",
            vocab_size: 0,
            num_further_rows: 0,
            hidden_size: 0,
            max_position_embeddings: 0,
            norm: NormConfig::rms(None),
            ropes: Vec::new(),
            layers: Vec::new(),
            tie_word_embeddings: false,
            embedding_scale: 1.0,
            logit_scale: 1.0,
            final_softcap: None,
            eos_token_ids: Vec::new(),
            embedding_norm: false,
            positions: None,
            output_norm: true,
            layer_inputs: None,
            streams: None,
            num_mtp_layers: 0,
            head_layer: None,
        }
    }
}

impl NormConfig {
    /// RMS norm; the usual epsilon where there is none.
    pub(crate) fn rms(eps: Option<f64>) -> Self {
        Self { kind: NormKind::Rms, eps: eps.unwrap_or(1e-6) as f32, offset: 0.0, has_weights: true }
    }

    /// Layer norm; the usual epsilon where there is none.
    pub(crate) fn layer(eps: Option<f64>) -> Self {
        Self { kind: NormKind::Layer, ..Self::rms(eps.or(Some(1e-5))) }
    }
}

impl LayerConfig {
    /// Full attention of so many heads, key and value heads, and elements a head, all of which rotate by the first kind, and a
    /// gated network of that width: what a llama has.
    pub fn new([num_heads, num_kv_heads, head_dim]: [usize; 3], intermediate_size: usize, activation: Activation) -> Self {
        let attention = AttentionConfig {
            num_heads,
            num_kv_heads,
            head_dim,
            rope: Some(0),
            mask: Mask::Causal,
            window: None,
            chunk: None,
            scale: (head_dim as f32).sqrt().recip(),
            softcap: None,
            qkv_groups: 1,
            values_first: false,
            clip: None,
            qkv_bias: false,
            output_bias: false,
            output_gate: None,
            qk_norm: None,
            norms_last: false,
            v_norm: None,
            keys_are_values: false,
            q_scale: None,
            has_sinks: false,
            shared_kv: None,
            latent: None,
        };
        Self {
            attention,
            has_attention: true,
            recurrent: None,
            is_cross: false,
            ffn: FfnConfig::Dense(DenseConfig {
                intermediate_size,
                is_gated: true,
                activation,
                bias: false,
                is_up_first: false,
                cutoff: None,
            }),
            norms: Norms::Before,
            is_parallel: false,
            has_own_ffn_norm: false,
            residual_scales: ResidualScales::all(1.0),
            has_output_scale: false,
        }
    }

    /// Whether anything mixes tokens; else the feed-forward network is all of it, behind the layer's first norm.
    pub(crate) fn mixes(&self) -> bool {
        self.has_attention || self.is_cross || self.recurrent.is_some()
    }

    /// Whether it has keys and values of tokens.
    pub(crate) fn has_kv(&self) -> bool {
        self.has_attention && !self.is_cross
    }

    /// Whether all its matrices must have biases.
    pub(crate) fn set_biases(&mut self, bias: bool) {
        (self.attention.qkv_bias, self.attention.output_bias) = (bias, bias);
        self.ffn.set_dense(|dense| dense.bias = bias);
    }
}

impl AttentionConfig {
    /// Columns of q and of what attention gives.
    pub const fn q_size(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Columns of its gate; 0 where there is none.
    pub const fn gate_size(&self) -> usize {
        match self.output_gate {
            None => 0,
            Some(OutputGate { is_per_head: true, .. }) => self.num_heads,
            Some(_) => self.q_size(),
        }
    }

    /// Columns of k, and of v.
    pub const fn kv_size(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }
}

/// As the sizing of the pool sees it, on one device.
impl ModelConfigLike for DecoderConfig {
    fn num_layers(&self) -> usize {
        self.layers.len()
    }

    fn kv_shape(&self, layer: usize) -> paged::KvShape {
        let AttentionConfig { num_kv_heads, head_dim, shared_kv, latent, .. } = self.layers[layer].attention;
        if !self.layers[layer].has_kv() {
            return paged::KvShape::default();
        }
        match shared_kv {
            None => {
                let v_head_dim = if latent.is_some() { 0 } else { head_dim };
                paged::KvShape { num_kv_heads, k_head_dim: head_dim, v_head_dim }
            }
            Some(_) => paged::KvShape::default(),
        }
    }

    fn retention(&self, layer: usize) -> Retention {
        let AttentionConfig { mask, window, chunk, .. } = self.layers[layer].attention;
        if mask == Mask::Full {
            // Whole requests are computed at once: nothing of them is out of sight before the last of it is.
            return Retention::All;
        }
        // A chunk is seen from its start on, which is at most so far away.
        window.into_iter().chain(chunk).min().into()
    }

    fn max_seq_len(&self) -> usize {
        self.max_position_embeddings
    }
}

impl DecoderConfig {
    /// Whose keys and values a layer reads, and of which shape.
    pub fn kv_source(&self, layer: usize) -> KvSource {
        let AttentionConfig { num_kv_heads, head_dim, shared_kv, latent, .. } = self.layers[layer].attention;
        if !self.layers[layer].has_kv() {
            return KvSource::Nothing;
        }
        let own = if latent.is_some() { KvShape::latent(head_dim) } else { KvShape::new(num_kv_heads, head_dim) };
        shared_kv.map_or(KvSource::Own(own), KvSource::Layer)
    }

    /// A KV storage for this model, whose layers share blocks in these groups.
    ///
    /// # Errors
    /// [`EngineError::Internal`] for groups of another model.
    pub fn kv_cache_spec(&self, pool: (usize, usize), dtype: KvDType, groups: &KvGroups) -> Result<KvCacheSpec, EngineError> {
        Self::kv_cache_spec_of(&[self], pool, dtype, groups)
    }

    /// The same for several models, the layers of each behind those of the one before.
    pub(crate) fn kv_cache_spec_of(
        models: &[&Self],
        pool: (usize, usize),
        dtype: KvDType,
        groups: &KvGroups,
    ) -> Result<KvCacheSpec, EngineError> {
        let mut sources = Vec::new();
        for model in models {
            let first = sources.len();
            sources.extend((0..model.layers.len()).map(|layer| match model.kv_source(layer) {
                KvSource::Layer(owner) => KvSource::Layer(first + owner),
                source => source,
            }));
        }
        let groups: Vec<_> = groups.groups.iter().map(|group| &group.layers[..]).collect();
        KvCacheSpec::grouped(pool, dtype, &sources, &groups).map_err(|error| EngineError::Internal(error.to_string()))
    }

    /// A storage for what the layers that look at images make of so many vectors; `None` where there are no such layers.
    ///
    /// # Errors
    /// [`EngineError::Device`] for sizes that no storage has.
    pub(crate) fn cross_kv_spec(&self, num_vectors: usize, dtype: KvDType) -> Result<Option<KvCacheSpec>, EngineError> {
        let mut layers = self.layers.iter().filter(|layer| layer.is_cross);
        let Some(first) = layers.next() else { return Ok(None) };
        let shape = KvShape::new(first.attention.num_kv_heads, first.attention.head_dim);
        // Block 0 is read by nobody.
        let blocks = (num_vectors.div_ceil(CROSS_BLOCK_SIZE) + 1, CROSS_BLOCK_SIZE);
        Ok(Some(KvCacheSpec::uniform(blocks, dtype, shape, 1 + layers.count())?))
    }

    /// Whether layers look at the vectors of images.
    pub fn is_crossed(&self) -> bool {
        self.layers.iter().any(|layer| layer.is_cross)
    }

    /// The largest of the layers' values.
    pub(crate) fn largest(&self, value: impl Fn(&LayerConfig) -> usize) -> usize {
        self.layers.iter().map(value).max().unwrap_or(0)
    }

    /// Tables of positions, of rotations or of vectors that are added: their rows for position 0 lie one after the other, then
    /// those for position 1, and so on.
    pub fn num_rope_tables(&self) -> usize {
        let of_types = self.positions.map_or(1, |positions| positions.rows_of_position());
        self.ropes.iter().map(RopeConfig::num_tables).max().unwrap_or(1).max(of_types)
    }

    /// The rows of the rope tables that a request uses for its whole life, by its prompt's length: longrope has one table for
    /// prompts within the original context and one for longer ones. Blocks of requests with different tables hold different
    /// keys, so the table belongs to the identity of cached blocks.
    pub fn rope_rows(&self, num_prompt_tokens: usize) -> RopeRows {
        let table = self.ropes.iter().map(|rope| rope.table(num_prompt_tokens)).max().unwrap_or(0);
        RopeRows { first: table as u32, num_tables: self.num_rope_tables() as u32 }
    }

    /// Says of each layer what differs.
    #[must_use]
    pub(crate) fn with_layers(mut self, set: impl FnMut(&mut LayerConfig)) -> Self {
        self.layers.iter_mut().for_each(set);
        self
    }

    /// Values that a request's states take, by layer; all 0 where no layer is recurrent.
    pub fn state_lens(&self) -> Vec<usize> {
        self.layers.iter().map(|layer| layer.recurrent.map_or(0, |recurrent| recurrent.state_len(self.hidden_size))).collect()
    }

    /// Whether the rows of an image see each other.
    pub fn sees_spans(&self) -> bool {
        self.layers.iter().any(|layer| layer.attention.mask == Mask::Spans)
    }

    /// Whether queries see keys behind them: such a model makes no text.
    pub fn sees_ahead(&self) -> bool {
        self.layers.iter().any(|layer| layer.attention.mask == Mask::Full)
    }

    /// Bytes of a request's states; 0 where no layer is recurrent.
    pub fn state_bytes(&self) -> u64 {
        self.state_lens().iter().sum::<usize>() as u64 * size_of::<f32>() as u64
    }

    /// Whether there are recurrent layers.
    pub fn is_recurrent(&self) -> bool {
        self.layers.iter().any(|layer| layer.recurrent.is_some())
    }

    /// Layers for which that holds have this in place of attention.
    #[must_use]
    pub(crate) fn with_recurrent(mut self, recurrent: RecurrentConfig, is_recurrent: impl Fn(usize) -> bool) -> Self {
        for (index, layer) in self.layers.iter_mut().enumerate() {
            layer.has_attention = !is_recurrent(index);
            layer.recurrent = (!layer.has_attention).then_some(recurrent);
        }
        self
    }

    /// Layers for which that holds are mixtures of experts.
    #[must_use]
    pub(crate) fn with_experts(self, experts: ExpertsConfig, is_mixture: impl Fn(usize) -> bool) -> Self {
        let mut index = 0;
        self.with_layers(|layer| {
            if is_mixture(index) {
                layer.ffn = FfnConfig::Experts(experts);
            }
            index += 1;
        })
    }

    /// Sets the layers' windows: what reaches over the whole context is no window.
    #[must_use]
    pub(crate) fn with_windows(mut self, window_of: impl Fn(usize) -> Option<usize>) -> Self {
        for (i, layer) in self.layers.iter_mut().enumerate() {
            layer.attention.window = window_of(i).filter(|w| *w < self.max_position_embeddings);
        }
        self
    }
}

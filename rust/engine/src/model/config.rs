//! What a decoder is like, whatever file says so.

use device::{Activation, KvCacheSpec, KvDType, KvShape, KvSource};
use paged::{KvGroups, ModelConfigLike, Retention};

use super::rope::RopeConfig;
use crate::EngineError;

/// Largest vocabulary, width or length that is believed.
pub const MAX_SIZE: usize = 1 << 27;
/// Most layers that are believed.
pub const MAX_LAYERS: usize = 4096;
const MAX_HEADS: usize = 4096;
const MAX_HEAD_DIM: usize = 1024;

/// Hyperparameters of a decoder. Widths are in elements.
// Each flag is a switch of its own, not a state.
#[allow(clippy::struct_excessive_bools)]
#[derive(Clone, Debug)]
pub struct DecoderConfig {
    /// HF `model_type` of the architecture.
    pub architecture: &'static str,
    /// Token ids.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward network.
    pub intermediate_size: usize,
    /// Query heads of a layer.
    pub num_heads: usize,
    /// Key and value heads of a layer.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Tokens of a sequence at most.
    pub max_position_embeddings: usize,
    /// Epsilon of every norm.
    pub norm_eps: f32,
    /// Added to every norm weight of the checkpoint (gemma stores `w` for `1 + w`).
    pub norm_offset: f32,
    /// Of the feed-forward gate.
    pub activation: Activation,
    /// The kinds of rotation; layers point here.
    pub ropes: Vec<RopeConfig>,
    /// One entry a layer.
    pub layers: Vec<LayerConfig>,
    /// q, k and v must have biases; else they may.
    pub qkv_bias: bool,
    /// Each query and key head is normalised.
    pub qk_norm: bool,
    /// Norms after attention and after the feed-forward network, before the residual additions.
    pub sandwich_norms: bool,
    /// The output projection is the token embedding.
    pub tie_word_embeddings: bool,
    /// Multiplied into token embeddings.
    pub embedding_scale: f32,
    /// Multiplied into attention scores.
    pub attention_scale: f32,
    /// `cap * tanh(score / cap)` of attention scores.
    pub attention_softcap: Option<f32>,
    /// The same of logits.
    pub final_softcap: Option<f32>,
    /// Ends of sequence.
    pub eos_token_ids: Vec<u32>,
}

/// What differs from layer to layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerConfig {
    /// Keys j with i - window < j <= i are seen by query i; `None`: all.
    pub window: Option<usize>,
    /// Index in [`DecoderConfig::ropes`].
    pub rope: usize,
}

/// Which row of the rope tables stands for each position of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RopeRows {
    /// The row of position 0: the number of the request's table.
    pub first: u32,
    /// Rows a position.
    pub num_tables: u32,
}

impl Default for RopeRows {
    fn default() -> Self {
        Self { first: 0, num_tables: 1 }
    }
}

impl RopeRows {
    /// The row of a position, for `StepMetadata::rope_positions`. Positions are below [`MAX_SIZE`] and there are two tables at
    /// most, so rows fit.
    pub fn row(self, position: usize) -> u32 {
        position as u32 * self.num_tables + self.first
    }
}

/// As the sizing of the pool sees it, on one device.
impl ModelConfigLike for DecoderConfig {
    fn num_layers(&self) -> usize {
        self.layers.len()
    }

    fn kv_shape(&self, layer: usize) -> paged::KvShape {
        match self.kv_source(layer) {
            KvSource::Own(KvShape { num_kv_heads, k_dim, v_dim }) => {
                paged::KvShape { num_kv_heads, k_head_dim: k_dim, v_head_dim: v_dim }
            }
            KvSource::Layer(_) => paged::KvShape::default(),
        }
    }

    fn retention(&self, layer: usize) -> Retention {
        self.layers[layer].window.into()
    }

    fn max_seq_len(&self) -> usize {
        self.max_position_embeddings
    }
}

impl DecoderConfig {
    /// Whose keys and values a layer reads, and of which shape.
    pub fn kv_source(&self, _layer: usize) -> KvSource {
        KvSource::Own(KvShape::new(self.num_kv_heads, self.head_dim))
    }

    /// A KV storage for this model, whose layers share blocks in these groups.
    ///
    /// # Errors
    /// [`EngineError::Internal`] for groups of another model.
    pub fn kv_cache_spec(&self, pool: (usize, usize), dtype: KvDType, groups: &KvGroups) -> Result<KvCacheSpec, EngineError> {
        let sources: Vec<_> = (0..self.layers.len()).map(|layer| self.kv_source(layer)).collect();
        let groups: Vec<_> = groups.groups.iter().map(|group| &group.layers[..]).collect();
        KvCacheSpec::grouped(pool, dtype, &sources, &groups).map_err(|error| EngineError::Internal(error.to_string()))
    }

    /// Rope tables: their rows for position 0 lie one after the other, then those for position 1, and so on.
    pub fn num_rope_tables(&self) -> usize {
        self.ropes.iter().map(RopeConfig::num_tables).max().unwrap_or(1)
    }

    /// The rows of the rope tables that a request uses for its whole life, by its prompt's length: longrope has one table for
    /// prompts within the original context and one for longer ones. Blocks of requests with different tables hold different
    /// keys, so the table belongs to the identity of cached blocks.
    pub fn rope_rows(&self, num_prompt_tokens: usize) -> RopeRows {
        let table = self.ropes.iter().map(|rope| rope.table(num_prompt_tokens)).max().unwrap_or(0);
        RopeRows { first: table as u32, num_tables: self.num_rope_tables() as u32 }
    }

    /// Sets the layers' windows: what reaches over the whole context is no window.
    pub(crate) fn set_windows(&mut self, window_of: impl Fn(usize) -> Option<usize>) {
        for (i, layer) in self.layers.iter_mut().enumerate() {
            layer.window = window_of(i).filter(|w| *w < self.max_position_embeddings);
        }
    }

    /// Checks what no single field can tell; `what` names the file in errors.
    pub(crate) fn validate(&self, what: &str) -> Result<(), EngineError> {
        let fail = |why: String| Err(EngineError::Load(format!("{what}: {why}")));
        let ranges = [
            ("vocabulary size", self.vocab_size, MAX_SIZE),
            ("hidden size", self.hidden_size, MAX_SIZE),
            ("feed-forward size", self.intermediate_size, MAX_SIZE),
            ("number of layers", self.layers.len(), MAX_LAYERS),
            ("number of attention heads", self.num_heads, MAX_HEADS),
            ("number of key and value heads", self.num_kv_heads, MAX_HEADS),
            ("head dimension", self.head_dim, MAX_HEAD_DIM),
            ("context length", self.max_position_embeddings, MAX_SIZE),
        ];
        for (name, value, max) in ranges {
            if !(1..=max).contains(&value) {
                return fail(format!("the {name} is {value}; it must be from 1 to {max}"));
            }
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            return fail(format!(
                "{} attention heads are not a multiple of {} key and value heads",
                self.num_heads, self.num_kv_heads
            ));
        }
        for (name, value) in [("norm epsilon", self.norm_eps), ("attention scale", self.attention_scale)] {
            if !value.is_finite() || value <= 0.0 {
                return fail(format!("the {name} is {value}; it must be positive and finite"));
            }
        }
        if self.layers.iter().any(|l| l.window == Some(0)) {
            return fail("a sliding window of 0 tokens sees nothing; it must be at least 1".into());
        }
        self.ropes.iter().try_for_each(|rope| rope.validate(self.head_dim).or_else(fail))
    }
}

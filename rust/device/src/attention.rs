//! Attention over the KV storage, and what comes before it: norms of queries and keys, their rotation, the write to the cache.

use crate::{CacheEngine, Constant, Linear, Norm, Precision, Tensor};

/// Which elements of a head rotate together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// Element i with `i + rotary_dim / 2` (HF checkpoints).
    Neox,
    /// Element 2i with 2i + 1 (llama.cpp's conversions of llama and mistral).
    Interleaved,
}

/// Cosines and sines by position, scale of longrope included.
#[derive(Clone, Debug)]
pub struct RopeTable {
    /// Pairing of the elements.
    pub style: RopeStyle,
    /// Elements of a head that rotate, from the first; even, at most `head_dim`.
    pub rotary_dim: usize,
    /// `[max_positions, rotary_dim / 2]`.
    pub cos: Constant,
    /// `[max_positions, rotary_dim / 2]`.
    pub sin: Constant,
}

/// What a norm of q or k takes for one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormSpan {
    /// Each head. The weight is `[head_dim]`, which all heads share, or `[num_heads * head_dim]`.
    Head,
    /// All heads of a token together, `[num_heads * head_dim]` (OLMo 2, arXiv:2501.00656).
    Row,
}

/// A norm of projected queries or keys, before their rotation.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorm<'a> {
    /// Its weight, and its bias if there is one, are as long as `span` says.
    pub norm: &'a Norm,
    /// What it runs over.
    pub span: NormSpan,
}

/// The vectors of a row that a [`HeadNorm`] normalises.
#[derive(Clone, Copy)]
pub(crate) struct NormParts<'a> {
    pub norm: &'a Norm,
    /// Elements of a vector.
    pub len: usize,
    /// Elements of the weight from one vector to the next: 0 where they share it.
    pub stride: usize,
}

impl<'a> HeadNorm<'a> {
    /// Over rows of `num_heads` heads of `head_dim` elements.
    ///
    /// # Panics
    /// When weight or bias are of another length.
    pub(crate) fn parts(self, num_heads: usize, head_dim: usize) -> NormParts<'a> {
        let Self { norm, span } = self;
        let (given, row) = (norm.weight.len(), num_heads * head_dim);
        let fits = given == row || given == head_dim && span == NormSpan::Head;
        assert!(fits, "a norm of {given} values over {num_heads} heads of {head_dim}, {span:?}");
        assert!(norm.bias.as_ref().is_none_or(|bias| bias.len() == given), "values of the bias beside a weight of {given}");
        let len = if span == NormSpan::Row { row } else { head_dim };
        NormParts { norm, len, stride: if given == row { len } else { 0 } }
    }
}

/// Queries grow with their position: times `1 + beta * ln(1 + floor((position + offset) / length))` (Llama 4 and Ministral 3, for
/// contexts beyond those of training).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryScale {
    /// How much.
    pub beta: f32,
    /// Positions to a step.
    pub length: u32,
    /// Added to the position.
    pub offset: u32,
}

impl QueryScale {
    /// The factor of a position.
    pub fn factor(self, position: u32) -> f32 {
        1.0 + self.beta * (1.0 + ((position + self.offset) / self.length) as f32).ln()
    }
}

/// Arguments of [`Phases::rope_and_cache`](crate::Phases::rope_and_cache): q/k norm, rotation, and the write of K and V into
/// their slots.
pub struct RopeArgs<'a> {
    /// `[num_tokens, num_heads * k_dim]`, rotated in place.
    pub q: &'a mut Tensor,
    /// Keys `[num_tokens, num_kv_heads * k_dim]`, rotated in place, and values `[num_tokens, num_kv_heads * v_dim]`, normalised
    /// in place; `None`: the layer reads what another one has written. There are no values where keys are the values too.
    pub kv: Option<(&'a mut Tensor, Option<&'a mut Tensor>)>,
    /// Norm of the queries.
    pub q_norm: Option<HeadNorm<'a>>,
    /// Norm of the keys.
    pub k_norm: Option<HeadNorm<'a>>,
    /// Norm of each head of the values, where a backend has [`ElementwisePhases`](crate::ElementwisePhases) (Gemma 4).
    pub v_norm: Option<HeadNorm<'a>>,
    /// The norms of queries and keys follow the rotation; else it follows them.
    pub norms_last: bool,
    /// What queries are multiplied by in the end.
    pub q_scale: Option<QueryScale>,
    /// Rotation of q and k; `None` for layers without one.
    pub rope: Option<&'a RopeTable>,
    /// The KV storage.
    pub cache: &'a CacheEngine,
    /// Which entry of [`KvCacheSpec::layers`](crate::KvCacheSpec::layers).
    pub layer: usize,
}

impl<'a> RopeArgs<'a> {
    /// Without norms and scales.
    pub fn new(
        q: &'a mut Tensor,
        kv: Option<(&'a mut Tensor, Option<&'a mut Tensor>)>,
        rope: Option<&'a RopeTable>,
        (cache, layer): (&'a CacheEngine, usize),
    ) -> Self {
        Self { q, kv, q_norm: None, k_norm: None, v_norm: None, norms_last: false, q_scale: None, rope, cache, layer }
    }
}

/// Which keys of its request a query sees, before any window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mask {
    /// Its own and those before.
    #[default]
    Causal,
    /// All, those behind it too: a step has the whole request.
    Full,
    /// Its own and those before, and those behind it in its span ([`StepMetadata::span_ends`](crate::StepMetadata)): the rows of
    /// an image see each other.
    Spans,
}

/// What a layer's attention is like.
#[derive(Clone, Copy, Debug)]
pub struct AttentionParams {
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Elements of a query and of a key of one head; those of a value are the KV storage's.
    pub head_dim: usize,
    /// Multiplied into the scores.
    pub scale: f32,
    /// Which keys of its request a query sees.
    pub mask: Mask,
    /// Query i sees keys j with |i - j| < window, as far as the mask has them; those behind it in its span whatever the window.
    pub window: Option<usize>,
    /// Query i sees no keys before the last multiple of this that is not behind it (Llama 4).
    pub chunk: Option<usize>,
    /// Scores become `cap * tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// Exact: products of f32. Else, over a BF16 cache, of bf16 where the processor multiplies those faster: queries and weights
    /// are rounded to it, sums are f32.
    pub precision: Precision,
}

impl AttentionParams {
    /// Full attention of so many query heads, key and value heads, and elements a head, scaled as is usual.
    pub fn new([num_heads, num_kv_heads, head_dim]: [usize; 3], precision: Precision) -> Self {
        let scale = (head_dim as f32).sqrt().recip();
        Self { num_heads, num_kv_heads, head_dim, scale, mask: Mask::Causal, window: None, chunk: None, softcap: None, precision }
    }

    /// Position of the first key that the query at `position` sees.
    pub fn first_key(&self, position: usize) -> usize {
        first_key(self.window, self.chunk, position)
    }

    /// One more than the position of the last key that a query, a row of the step and its position, sees of a request with
    /// `seq_len` keys. `span_ends` are the step's.
    pub fn end_key(&self, query: (usize, usize), seq_len: usize, span_ends: &[u32]) -> usize {
        end_key(self.mask, self.window, query, seq_len, span_ends)
    }
}

/// See [`AttentionParams::end_key`].
pub(crate) fn end_key(
    mask: Mask,
    window: Option<usize>,
    (row, position): (usize, usize),
    seq_len: usize,
    span_ends: &[u32],
) -> usize {
    match mask {
        Mask::Causal => position + 1,
        Mask::Full => window.map_or(seq_len, |window| seq_len.min(position + window)),
        Mask::Spans => span_ends.get(row).map_or(position + 1, |end| *end as usize),
    }
}

/// Position of the first key that the query at `position` sees.
pub(crate) fn first_key(window: Option<usize>, chunk: Option<usize>, position: usize) -> usize {
    let of_window = window.map_or(0, |window| (position + 1).saturating_sub(window));
    of_window.max(chunk.map_or(0, |chunk| position / chunk * chunk))
}

/// Arguments of [`Phases::attention`](crate::Phases::attention).
pub struct AttentionArgs<'a> {
    /// `[num_tokens, num_heads * k_dim]`.
    pub q: &'a Tensor,
    /// `[num_tokens, num_heads * v_dim]`.
    pub out: &'a mut Tensor,
    /// The KV storage.
    pub cache: &'a CacheEngine,
    /// Which entry of [`KvCacheSpec::layers`](crate::KvCacheSpec::layers).
    pub layer: usize,
    /// `[num_heads]`: a score of each head that joins the sum of the softmax and has no value (gpt-oss).
    pub sinks: Option<&'a Constant>,
    /// Heads, scale, window.
    pub params: AttentionParams,
    /// The product that alone reads `out` then: a device may leave it in the type that this one reads.
    pub next: Option<&'a Linear>,
}

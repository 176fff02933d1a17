//! Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). The cache has one vector a token, from which keys and values of
//! all heads come by a projection each. In the absorbed form these are applied to queries and to what attention gives instead:
//!
//! ```text
//! hidden -> q of each head [nope | rope]         hidden -> [latent | rope]
//!            | key_up                                        | norm of the latent
//!           q  [rope | kv_rank]   x   the cache's vector   [rope | kv_rank], one head, keys and values at once
//!                                 |
//!           each head [rope | kv_rank], of which the latter -> value_up -> [v_dim]
//! ```

use crate::{AttentionParams, CacheEngine, Linear, Norm, QueryScale, RopeTable, StepMetadata, Tensor};

/// Weights of a layer's latent attention, up to the output projection.
pub struct LatentAttention {
    /// Queries.
    pub query: LatentQuery,
    /// `[kv_rank + rope_dim, hidden_size]`: the latent vector, then the part of the key that rotates.
    pub kv_down: Linear,
    /// Of the latent vector, `[kv_rank]`.
    pub kv_norm: Norm,
    /// Of each head, `[kv_rank, nope_dim]`: the transpose of what makes keys of the latent vector.
    pub key_up: Vec<Linear>,
    /// Of each head, `[v_dim, kv_rank]`.
    pub value_up: Vec<Linear>,
}

/// What makes queries, `[num_heads * (nope_dim + rope_dim)]`.
pub enum LatentQuery {
    /// One matrix.
    Whole(Linear),
    /// Two of a lower rank, and a norm between them.
    LowRank {
        /// `[q_rank, hidden_size]`.
        down: Linear,
        /// `[q_rank]`.
        norm: Norm,
        /// `[num_heads * (nope_dim + rope_dim), q_rank]`.
        up: Linear,
    },
}

impl LatentAttention {
    /// Elements of a latent vector.
    pub fn kv_rank(&self) -> usize {
        self.kv_norm.weight.len()
    }

    /// Elements of a key that rotate.
    pub fn rope_dim(&self) -> usize {
        self.kv_down.out_features - self.kv_rank()
    }

    /// Elements of a query that do not.
    pub fn nope_dim(&self) -> usize {
        self.key_up[0].in_features
    }
}

/// Arguments of [`LatentPhases::latent_attention`].
pub struct LatentArgs<'a> {
    /// `[num_tokens, hidden_size]`: the residual stream.
    pub hidden: &'a Tensor,
    /// Applied to it first.
    pub norm: Option<&'a Norm>,
    /// The weights.
    pub weights: &'a LatentAttention,
    /// Rotation of what rotates.
    pub rope: Option<&'a RopeTable>,
    /// What queries are multiplied by in the end.
    pub q_scale: Option<QueryScale>,
    /// The KV storage.
    pub cache: &'a CacheEngine,
    /// Which entry of [`KvCacheSpec::layers`](crate::KvCacheSpec::layers).
    pub layer: usize,
    /// Of the absorbed form: one key and value head of `rope_dim + kv_rank` elements.
    pub params: AttentionParams,
    /// `[num_tokens, num_heads * v_dim]`.
    pub out: &'a mut Tensor,
}

/// Latent attention.
pub trait LatentPhases {
    /// All of a layer's attention but the output projection. The cache is [`KvShape::latent`].
    fn latent_attention(&self, args: LatentArgs<'_>, step: &StepMetadata);
}

//! What latent attention is like.

use super::{AttentionConfig, MAX_HEAD_DIM, MAX_SIZE, in_range, positive};

/// Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatentConfig {
    /// Elements that queries are made of; `None`: the hidden state.
    pub q_rank: Option<usize>,
    /// Elements of the latent vector that keys and values are made of.
    pub kv_rank: usize,
    /// Elements of a head's query that do not rotate.
    pub nope_dim: usize,
    /// Elements that do.
    pub rope_dim: usize,
    /// Elements of a head's value.
    pub v_dim: usize,
    /// Added to the mean square by the norms within.
    pub eps: f32,
}

impl LatentConfig {
    pub(super) fn check(&self, attention: &AttentionConfig) -> Result<(), String> {
        let Self { q_rank, kv_rank, nope_dim, rope_dim, v_dim, eps } = *self;
        in_range("rank of queries", q_rank.unwrap_or(1), MAX_SIZE)?;
        for (name, dim) in [
            ("rank of keys and values", kv_rank),
            ("elements of a query that do not rotate", nope_dim),
            ("elements of a query that rotate", rope_dim),
            ("elements of a value", v_dim),
        ] {
            in_range(name, dim, MAX_HEAD_DIM)?;
        }
        positive("epsilon of the norms of latent vectors", eps)?;
        if (attention.num_kv_heads, attention.head_dim) != (1, rope_dim + kv_rank) {
            return Err("latent attention has one key and value head, as wide as what rotates and its rank".into());
        }
        let others = [attention.window.is_some(), attention.chunk.is_some(), attention.shared_kv.is_some(), attention.has_sinks];
        if others.contains(&true) || attention.qk_norm.is_some() {
            return Err("latent attention sees all tokens, and has neither norms of heads nor sinks".into());
        }
        Ok(())
    }
}

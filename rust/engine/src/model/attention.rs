//! Softmax attention over the KV cache.

use device::{AttentionArgs, AttentionParams, HeadNorm, Linear, Norm, NormSpan, Projection, RopeArgs};

use super::{
    config::{AttentionConfig, QkNorm},
    part::{Buffers, Context, Join, Part, Weights},
};
use crate::{
    EngineError,
    weights::{Matrix, Role, WeightId},
};

pub(crate) struct Attention<L = Linear, N = Norm> {
    config: AttentionConfig,
    q: L,
    k: L,
    v: L,
    q_norm: Option<N>,
    k_norm: Option<N>,
    output: L,
}

impl<L, N> Attention<L, N> {
    pub(crate) fn new(
        weights: &mut impl Weights<Linear = L, Norm = N>,
        config: &AttentionConfig,
        layer: usize,
        hidden_size: usize,
    ) -> Result<Self, EngineError> {
        let id = |role| WeightId::layer(layer, role);
        let (q_size, kv_size) = (config.q_size(), config.kv_size());
        let parts = [(Role::AttnQ, q_size), (Role::AttnK, kv_size), (Role::AttnV, kv_size)];
        let [q, k, v] = Matrix::fused(id(Role::AttnQkv), parts, hidden_size, config.qkv_bias);
        let mut norm = |role, num_heads| {
            let shape = config.qk_norm.map(|norm| match norm {
                QkNorm::Heads => [1, config.head_dim],
                QkNorm::OwnHeads => [num_heads, config.head_dim],
                QkNorm::Row => [1, num_heads * config.head_dim],
            });
            shape.map(|shape| weights.norm(id(role), shape)).transpose()
        };
        let (q_norm, k_norm) = (norm(Role::AttnQNorm, config.num_heads)?, norm(Role::AttnKNorm, config.num_kv_heads)?);
        Ok(Self {
            config: *config,
            q: weights.linear(&q)?,
            k: weights.linear(&k)?,
            v: weights.linear(&v)?,
            q_norm,
            k_norm,
            output: weights.linear(&Matrix::new(id(Role::AttnOutput), [hidden_size, q_size], config.output_bias))?,
        })
    }
}

impl Attention {
    pub(crate) fn buffers(config: &AttentionConfig) -> Buffers<usize> {
        let (q, kv) = (config.q_size(), config.kv_size());
        Buffers { q, k: kv, v: kv, attention: q, ..Buffers::default() }
    }
}

impl Part for Attention {
    fn open(&self, norm: Option<&Norm>, cx: &mut Context<'_>) {
        let Buffers { q, k, v, attention, .. } = &mut *cx.buffers;
        let (backend, cache, (group, plane)) = (cx.run.backend, cx.run.cache, cx.kv);
        let projections = &mut [
            Projection { linear: &self.q, out: q },
            Projection { linear: &self.k, out: k },
            Projection { linear: &self.v, out: v },
        ];
        backend.norm_linear(cx.hidden, norm, projections);
        let rope = self.config.rope.map(|rope| cx.run.ropes[rope].table());
        let span = if self.config.qk_norm == Some(QkNorm::Row) { NormSpan::Row } else { NormSpan::Head };
        let [q_norm, k_norm] = [&self.q_norm, &self.k_norm].map(|norm| norm.as_ref().map(|norm| HeadNorm { norm, span }));
        backend.rope_and_cache(RopeArgs { q, k, v, q_norm, k_norm, rope, cache, plane }, group, cx.step);
        let AttentionConfig { num_heads, num_kv_heads, head_dim, scale, window, softcap, .. } = self.config;
        let precision = cx.run.precision;
        let params = AttentionParams { num_heads, num_kv_heads, head_dim, scale, window, softcap, precision };
        backend.attention(AttentionArgs { q, out: attention, cache, plane, group, params }, cx.step);
    }

    fn close(&self, join: Join<'_>, cx: &mut Context<'_>) {
        join.add(cx.run.backend, &cx.buffers.attention, &self.output, cx.hidden);
    }
}

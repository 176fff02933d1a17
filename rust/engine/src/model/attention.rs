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
    /// `None`: another layer's are read.
    kv: Option<(L, L)>,
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
        let q_norm = norm(Role::AttnQNorm, config.num_heads)?;
        let has_kv = config.shared_kv.is_none();
        let k_norm = if has_kv { norm(Role::AttnKNorm, config.num_kv_heads)? } else { None };
        Ok(Self {
            config: *config,
            q: weights.linear(&q)?,
            kv: if has_kv { Some((weights.linear(&k)?, weights.linear(&v)?)) } else { None },
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
        let (backend, cache, layer) = (cx.run.backend, cx.run.cache, cx.layer);
        let of_q = Projection { linear: &self.q, out: q };
        match &self.kv {
            Some((of_k, of_v)) => {
                let projections = &mut [of_q, Projection { linear: of_k, out: k }, Projection { linear: of_v, out: v }];
                backend.norm_linear(cx.hidden, norm, projections, cx.step);
            }
            None => backend.norm_linear(cx.hidden, norm, &mut [of_q], cx.step),
        }
        let kv = self.kv.is_some().then_some((k, &*v));
        let rope = self.config.rope.map(|rope| cx.run.ropes[rope].table());
        let span = if self.config.qk_norm == Some(QkNorm::Row) { NormSpan::Row } else { NormSpan::Head };
        let [q_norm, k_norm] = [&self.q_norm, &self.k_norm].map(|norm| norm.as_ref().map(|norm| HeadNorm { norm, span }));
        backend.rope_and_cache(RopeArgs { q, kv, q_norm, k_norm, rope, cache, layer }, cx.step);
        let AttentionConfig { num_heads, num_kv_heads, head_dim, scale, window, softcap, .. } = self.config;
        let precision = cx.run.precision;
        let params = AttentionParams { num_heads, num_kv_heads, head_dim, scale, window, softcap, precision };
        backend.attention(AttentionArgs { q, out: attention, cache, layer, params }, cx.step);
    }

    fn close(&self, join: Join<'_>, cx: &mut Context<'_>) {
        join.add((&cx.run, cx.step), &cx.buffers.attention, &self.output, cx.hidden);
    }
}

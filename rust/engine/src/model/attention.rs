//! Softmax attention over the KV cache.

use device::{AttentionArgs, AttentionParams, HeadNorm, Linear, Norm, NormSpan, Projection, RopeArgs, Tensor};

use super::{
    config::{AttentionConfig, QkNorm},
    part::{Buffers, Context, Weights},
};
use crate::{
    EngineError,
    weights::{Matrix, Role, WeightId},
};

pub(crate) struct Attention {
    config: AttentionConfig,
    q: Linear,
    /// `None`: another layer's are read.
    kv: Option<(Linear, Linear)>,
    q_norm: Option<Norm>,
    k_norm: Option<Norm>,
    output: Linear,
}

impl Attention {
    pub(crate) fn new(
        weights: &mut dyn Weights,
        config: &AttentionConfig,
        layer: usize,
        hidden: usize,
    ) -> Result<Self, EngineError> {
        let id = |role| WeightId::layer(layer, role);
        let (q_size, kv_size) = (config.q_size(), config.kv_size());
        let parts = [(Role::AttnQ, q_size), (Role::AttnK, kv_size), (Role::AttnV, kv_size)];
        let [q, k, v] = Matrix::fused(id(Role::AttnQkv), parts, hidden, config.qkv_bias);
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
            output: weights.linear(&Matrix::new(id(Role::AttnOutput), [hidden, q_size], config.output_bias))?,
        })
    }

    pub(crate) fn buffers(config: &AttentionConfig) -> Buffers<usize> {
        let (q, kv) = (config.q_size(), config.kv_size());
        [q, kv, kv, q, 0]
    }

    /// All phases that read the hidden state, normalized if there is a norm.
    pub(crate) fn open(&self, norm: Option<&Norm>, cx: &mut Context<'_>) {
        let [q, k, v, out, _] = &mut *cx.buffers;
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
        backend.rope_and_cache(RopeArgs { q, kv, q_norm, k_norm, norms_last: false, q_scale: None, rope, cache, layer }, cx.step);
        let AttentionConfig { num_heads, num_kv_heads, head_dim, scale, window, softcap, .. } = self.config;
        let precision = cx.run.precision;
        let params = AttentionParams { num_heads, num_kv_heads, head_dim, scale, window, chunk: None, softcap, precision };
        backend.attention(AttentionArgs { q, out, cache, layer, sinks: None, params }, cx.step);
    }

    /// What is added to the hidden state: a product.
    pub(crate) fn output<'a>(&'a self, [.., out, _]: &'a Buffers<Tensor>) -> (&'a Tensor, &'a Linear) {
        (out, &self.output)
    }
}

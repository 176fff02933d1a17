//! Softmax attention over the KV cache.

use device::{
    AttentionArgs, AttentionParams, Constant, GateActivation, HeadNorm, Linear, Norm, NormKind, NormSpan, Projection, RopeArgs,
    Tensor,
};

use super::{
    config::{AttentionConfig, OutputGate, QkNorm},
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
    v_norm: Option<Norm>,
    sinks: Option<Constant>,
    gate: Option<(Linear, GateActivation)>,
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
        let mut parts = [(Role::AttnQ, q_size), (Role::AttnK, kv_size), (Role::AttnV, kv_size)];
        if config.values_first {
            parts.swap(1, 2);
        }
        let [mut q, mut k, mut v] =
            Matrix::fused(id(Role::AttnQkv), parts, hidden, config.qkv_bias).map(|matrix| matrix.in_groups(config.qkv_groups));
        if config.values_first {
            std::mem::swap(&mut k, &mut v);
        }
        let gate = match config.output_gate {
            None => None,
            Some(OutputGate { is_per_head: true, .. }) => {
                Some(Matrix::new(id(Role::AttnGate), [config.num_heads, hidden], false))
            }
            Some(_) => {
                let parts = [(Role::AttnOwnQ, q_size), (Role::AttnGate, q_size)];
                let both = Matrix::fused(id(Role::AttnQAndGate), parts, hidden, config.qkv_bias);
                let [of_q, of_gate] = both.map(|matrix| matrix.known_by(Role::AttnGate).in_groups(config.num_heads));
                q = of_q;
                Some(of_gate)
            }
        };
        let gate = gate.map(|matrix| weights.linear(&matrix)).transpose()?;
        let gate = gate.zip(config.output_gate.map(|gate| gate.activation));
        let mut norm = |role, num_heads| {
            let shape = match config.qk_norm {
                None => return Ok(None),
                Some(QkNorm::Unweighted(eps)) => return Ok(Some(unweighted(config.head_dim, eps))),
                Some(QkNorm::Heads) => [1, config.head_dim],
                Some(QkNorm::OwnHeads) => [num_heads, config.head_dim],
                Some(QkNorm::Row) => [1, num_heads * config.head_dim],
            };
            weights.norm(id(role), shape).map(Some)
        };
        let q_norm = norm(Role::AttnQNorm, config.num_heads)?;
        let has_kv = config.shared_kv.is_none();
        let k_norm = if has_kv { norm(Role::AttnKNorm, config.num_kv_heads)? } else { None };
        let v_norm = config.v_norm.filter(|_| has_kv).map(|eps| unweighted(config.head_dim, eps));
        let q = weights.linear(&q)?;
        let kv = if has_kv {
            let k = weights.linear(&k)?;
            let v = if config.keys_are_values { k.clone() } else { weights.linear(&v)? };
            Some((k, v))
        } else {
            None
        };
        Ok(Self {
            config: *config,
            q,
            kv,
            q_norm,
            k_norm,
            v_norm,
            sinks: config.has_sinks.then(|| weights.vector(id(Role::AttnSinks), config.num_heads)).transpose()?,
            gate,
            output: weights.linear(&Matrix::new(id(Role::AttnOutput), [hidden, q_size], config.output_bias))?,
        })
    }

    pub(crate) fn buffers(config: &AttentionConfig) -> Buffers<usize> {
        let (q, kv) = (config.q_size(), config.kv_size());
        [q, kv, kv, q, config.gate_size(), 0]
    }

    /// All phases that read the hidden state, normalized if there is a norm.
    pub(crate) fn open(&self, norm: Option<&Norm>, cx: &mut Context<'_>) {
        let [q, k, v, out, gate, _] = &mut *cx.buffers;
        let (backend, cache, layer) = (cx.run.backend, cx.run.cache, cx.layer);
        let of_q = Projection { linear: &self.q, out: q };
        match (&self.kv, &self.gate) {
            (Some((of_k, of_v)), None) => {
                let projections = &mut [of_q, Projection { linear: of_k, out: k }, Projection { linear: of_v, out: v }];
                backend.norm_linear(cx.hidden, norm, projections, cx.step);
            }
            (Some((of_k, of_v)), Some((of_gate, _))) => {
                let [of_k, of_v] = [Projection { linear: of_k, out: k }, Projection { linear: of_v, out: v }];
                let projections = &mut [of_q, of_k, of_v, Projection { linear: of_gate, out: gate }];
                backend.norm_linear(cx.hidden, norm, projections, cx.step);
            }
            (None, _) => backend.norm_linear(cx.hidden, norm, &mut [of_q], cx.step),
        }
        if let Some(clip) = self.config.clip {
            let phases = backend.elementwise_phases().expect("the plan was refused where nothing bounds rows");
            let num_clipped = if self.kv.is_some() { 3 } else { 1 };
            [&mut *q, &mut *k, &mut *v].into_iter().take(num_clipped).for_each(|x| phases.clamp(x, [-clip, clip]));
        }
        let kv = self.kv.is_some().then_some((k, Some(v)));
        let rope = self.config.rope.map(|rope| &cx.run.ropes[rope]);
        let span = if self.config.qk_norm == Some(QkNorm::Row) { NormSpan::Row } else { NormSpan::Head };
        let [q_norm, k_norm] = [&self.q_norm, &self.k_norm].map(|norm| norm.as_ref().map(|norm| HeadNorm { norm, span }));
        let v_norm = self.v_norm.as_ref().map(|norm| HeadNorm { norm, span: NormSpan::Head });
        let AttentionConfig { norms_last, q_scale, .. } = self.config;
        backend.rope_and_cache(RopeArgs { q, kv, q_norm, k_norm, v_norm, norms_last, q_scale, rope, cache, layer }, cx.step);
        let AttentionConfig { num_heads, num_kv_heads, head_dim, scale, mask, window, chunk, softcap, .. } = self.config;
        let precision = cx.run.precision;
        let params = AttentionParams { num_heads, num_kv_heads, head_dim, scale, mask, window, chunk, softcap, precision };
        let next = self.gate.is_none().then_some(&self.output);
        backend.attention(AttentionArgs { q, out, cache, layer, sinks: self.sinks.as_ref(), params, next }, cx.step);
        if let Some((_, activation)) = self.gate {
            let phases = backend.recurrent_phases().expect("the plan was refused where nothing computes gates of attention");
            phases.gate(out, gate, activation);
        }
    }

    /// What is added to the hidden state: a product.
    pub(crate) fn output<'a>(&'a self, [_, _, _, out, ..]: &'a Buffers<Tensor>) -> (&'a Tensor, &'a Linear) {
        (out, &self.output)
    }
}

/// An RMS norm of a head without weights.
fn unweighted(head_dim: usize, eps: f32) -> Norm {
    Norm { kind: NormKind::Rms, weight: Constant::from(vec![1.0; head_dim]), bias: None, eps }
}

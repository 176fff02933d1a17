//! Multi-head latent attention.

use device::{AttentionParams, LatentArgs, LatentAttention, LatentQuery, Linear, Mask, Norm, NormKind, Tensor};

use super::{
    config::{AttentionConfig, LatentConfig},
    part::{Buffers, Context, Weights},
};
use crate::{
    EngineError,
    weights::{ExpertIndex, Matrix, Role, WeightId},
};

pub(crate) struct Latent {
    config: AttentionConfig,
    weights: LatentAttention,
    output: Linear,
}

impl Latent {
    pub(crate) fn new(
        weights: &mut dyn Weights,
        config: &AttentionConfig,
        latent: &LatentConfig,
        layer: usize,
        hidden: usize,
    ) -> Result<Self, EngineError> {
        let LatentConfig { q_rank, kv_rank, nope_dim, rope_dim, v_dim, eps } = *latent;
        let num_heads = config.num_heads;
        let id = |role| WeightId::layer(layer, role);
        let matrix = |role, shape, bias| Matrix::new(id(role), shape, bias);
        let mut norm = |role, len| -> Result<Norm, EngineError> {
            Ok(Norm { kind: NormKind::Rms, weight: weights.vector(id(role), len)?, bias: None, eps })
        };
        let kv_norm = norm(Role::AttnKvNorm, kv_rank)?;
        let q_size = num_heads * (nope_dim + rope_dim);
        let query = match q_rank {
            None => LatentQuery::Whole(weights.linear(&matrix(Role::AttnQ, [q_size, hidden], false))?),
            Some(rank) => {
                let norm = norm(Role::AttnQDownNorm, rank)?;
                let down = weights.linear(&matrix(Role::AttnQDown, [rank, hidden], config.qkv_bias))?;
                LatentQuery::LowRank { down, norm, up: weights.linear(&matrix(Role::AttnQUp, [q_size, rank], false))? }
            }
        };
        let kv_down = weights.linear(&matrix(Role::AttnKvDown, [kv_rank + rope_dim, hidden], config.qkv_bias))?;
        let mut of_heads = |role, shape| -> Result<Vec<Linear>, EngineError> {
            let of_head = |index| matrix(role, shape, false).of_expert(Some(ExpertIndex { index, count: num_heads }));
            (0..num_heads).map(|head| weights.linear(&of_head(head))).collect()
        };
        let key_up = of_heads(Role::AttnKeyUp, [kv_rank, nope_dim])?;
        let value_up = of_heads(Role::AttnValueUp, [v_dim, kv_rank])?;
        Ok(Self {
            config: *config,
            weights: LatentAttention { query, kv_down, kv_norm, key_up, value_up },
            output: weights.linear(&matrix(Role::AttnOutput, [hidden, num_heads * v_dim], config.output_bias))?,
        })
    }

    pub(crate) fn buffers(config: &AttentionConfig, latent: &LatentConfig) -> Buffers<usize> {
        [0, 0, 0, config.num_heads * latent.v_dim, 0, 0]
    }

    /// All phases that read the hidden state, normalized if there is a norm.
    pub(crate) fn open(&self, norm: Option<&Norm>, cx: &mut Context<'_>) {
        let [_, _, _, out, ..] = &mut *cx.buffers;
        let AttentionConfig { num_heads, num_kv_heads, head_dim, scale, .. } = self.config;
        let (mask, window, chunk, softcap, precision) = (Mask::Causal, None, None, None, cx.run.precision);
        let args = LatentArgs {
            hidden: cx.hidden,
            norm,
            weights: &self.weights,
            rope: self.config.rope.map(|rope| &cx.run.ropes[rope]),
            q_scale: self.config.q_scale,
            cache: cx.run.cache,
            layer: cx.layer,
            params: AttentionParams { num_heads, num_kv_heads, head_dim, scale, mask, window, chunk, softcap, precision },
            out,
        };
        let phases = cx.run.backend.latent_phases().expect("the plan was refused where nothing computes latent attention");
        phases.latent_attention(args, cx.step);
    }

    /// What is added to the hidden state: a product.
    pub(crate) fn output<'a>(&'a self, [_, _, _, out, ..]: &'a Buffers<Tensor>) -> (&'a Tensor, &'a Linear) {
        (out, &self.output)
    }
}

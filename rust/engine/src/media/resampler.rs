//! A perceiver (Jaegle et al. 2021, arXiv:2103.03206) behind the tower of Idefics 2: a few latent vectors look at all patches of
//! a tile and at each other, layer after layer.

use device::{
    AttentionArgs, AttentionParams, Backend, CacheEngine, GateUpArgs, KvCacheSpec, KvDType, KvGroupMetadata, KvShape, Linear,
    Mask, Norm, NormKind, Precision, Projection, ResidualArgs, RopeArgs, StepMetadata, Tensor,
};

use super::{config::ResamplerConfig, stored, weights::TowerWeights};
use crate::EngineError;

const BLOCK_SIZE: usize = 32;

/// A resampler that was loaded.
pub(crate) struct Resampler {
    config: ResamplerConfig,
    precision: Precision,
    /// From the tower's states to its own width: a gated network.
    gate: Linear,
    up: Linear,
    down: Linear,
    /// `[num_latents, hidden_size]`.
    latents: Vec<f32>,
    layers: Vec<Layer>,
    norm: Norm,
}

struct Layer {
    latents_norm: Norm,
    context_norm: Norm,
    qkv: [Linear; 3],
    output: Linear,
    ffn_norm: Norm,
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl Resampler {
    pub(crate) fn new<P: AsRef<str>>(
        weights: &mut TowerWeights<'_>,
        places: &[P],
        config: &ResamplerConfig,
        precision: Precision,
    ) -> Result<Self, EngineError> {
        let ResamplerConfig { hidden_size: hidden, in_features, inner_size, num_latents, .. } = *config;
        let place = weights.place(places, "modality_projection.gate_proj.weight")?;
        let (q, kv) = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim);
        let kind = (NormKind::Rms, config.eps, 0.0);
        let mut layers = Vec::with_capacity(config.num_layers);
        for layer in 0..config.num_layers {
            let named = |name: &str| format!("{place}perceiver_resampler.layers.{layer}.{name}");
            layers.push(Layer {
                latents_norm: weights.norm(&named("input_latents_norm"), hidden, kind)?,
                context_norm: weights.norm(&named("input_context_norm"), hidden, kind)?,
                qkv: [
                    weights.linear(&named("self_attn.q_proj"), [q, hidden])?,
                    weights.linear(&named("self_attn.k_proj"), [kv, hidden])?,
                    weights.linear(&named("self_attn.v_proj"), [kv, hidden])?,
                ],
                output: weights.linear(&named("self_attn.o_proj"), [hidden, q])?,
                ffn_norm: weights.norm(&named("post_attention_layernorm"), hidden, kind)?,
                gate: weights.linear(&named("mlp.gate_proj"), [4 * hidden, hidden])?,
                up: weights.linear(&named("mlp.up_proj"), [4 * hidden, hidden])?,
                down: weights.linear(&named("mlp.down_proj"), [hidden, 4 * hidden])?,
            });
        }
        let named = |name: &str| format!("{place}{name}");
        Ok(Self {
            gate: weights.linear(&named("modality_projection.gate_proj"), [inner_size, in_features])?,
            up: weights.linear(&named("modality_projection.up_proj"), [inner_size, in_features])?,
            down: weights.linear(&named("modality_projection.down_proj"), [hidden, inner_size])?,
            latents: weights.constant(&named("perceiver_resampler.latents"), &[num_latents, hidden])?.to_vec(),
            norm: weights.norm(&named("perceiver_resampler.norm"), hidden, kind)?,
            layers,
            precision,
            config: *config,
        })
    }

    /// The latent vectors of a tile, `[num_latents, hidden_size]`, of the states of its patches, `[patches, in_features]`.
    pub(crate) fn run(&self, backend: &dyn Backend, states: &[f32]) -> Result<Vec<f32>, EngineError> {
        let ResamplerConfig { in_features, hidden_size, num_latents, num_heads, num_kv_heads, head_dim, .. } = self.config;
        let num_patches = states.len() / in_features;
        let tensor = |rows: usize, cols: usize| backend.alloc(rows, cols);
        let context = self.project(backend, &stored(backend, states, in_features)?)?;
        let mut latents = stored(backend, &self.latents, hidden_size)?;
        let most = num_patches.max(num_latents);
        let (mut q, mut k, mut v) =
            (tensor(most, num_heads * head_dim)?, tensor(most, num_kv_heads * head_dim)?, tensor(most, num_kv_heads * head_dim)?);
        let (mut out, mut inner) = (tensor(num_latents, num_heads * head_dim)?, tensor(num_latents, 4 * hidden_size)?);
        let num_blocks = (num_patches + num_latents).div_ceil(BLOCK_SIZE);
        let shape = KvShape::new(num_kv_heads, head_dim);
        let cache = backend.alloc_kv_cache(&KvCacheSpec::uniform((num_blocks + 1, BLOCK_SIZE), KvDType::F32, shape, 1)?)?;
        let (of_context, of_latents) = (rows(0, num_patches), rows(num_patches, num_latents));
        let params =
            AttentionParams { mask: Mask::Spans, ..AttentionParams::new([num_heads, num_kv_heads, head_dim], self.precision) };
        for layer in &self.layers {
            backend.begin_step(&of_context);
            write_context(backend, layer, &context, (&mut q, &mut k, &mut v), &cache, &of_context);
            backend.begin_step(&of_latents);
            let [of_q, of_k, of_v] = &layer.qkv;
            let projections = &mut [
                Projection { linear: of_q, out: &mut q },
                Projection { linear: of_k, out: &mut k },
                Projection { linear: of_v, out: &mut v },
            ];
            backend.norm_linear(&latents, Some(&layer.latents_norm), projections, &of_latents);
            backend.rope_and_cache(RopeArgs::new(&mut q, Some((&mut k, Some(&mut v))), None, (&cache, 0)), &of_latents);
            let args = AttentionArgs { q: &q, out: &mut out, cache: &cache, layer: 0, sinks: None, params, next: None };
            backend.attention(args, &of_latents);
            let add = |x: &Tensor, linear: &Linear, residual: &mut Tensor| {
                backend.linear_residual(ResidualArgs { x, linear, post_norm: None, scale: 1.0, residual }, &of_latents);
            };
            add(&out, &layer.output, &mut latents);
            let (gate, up, activation) = (Some(&layer.gate), &layer.up, self.config.activation);
            let args = GateUpArgs { x: &latents, norm: Some(&layer.ffn_norm), gate, up, activation, out: &mut inner, next: None };
            backend.gate_up(args, &of_latents);
            add(&inner, &layer.down, &mut latents);
        }
        backend.fetch(&mut latents);
        let mut vectors = latents.as_slice().to_vec();
        vectors.chunks_exact_mut(hidden_size).for_each(|row| self.norm.apply(row));
        Ok(vectors)
    }

    fn project(&self, backend: &dyn Backend, x: &Tensor) -> Result<Tensor, EngineError> {
        let step = StepMetadata::default();
        let (mut inner, mut out) =
            (backend.alloc(x.rows(), self.config.inner_size)?, backend.alloc(x.rows(), self.config.hidden_size)?);
        let (gate, up, activation) = (Some(&self.gate), &self.up, self.config.activation);
        backend.gate_up(GateUpArgs { x, norm: None, gate, up, activation, out: &mut inner, next: None }, &step);
        backend.norm_linear(&inner, None, &mut [Projection { linear: &self.down, out: &mut out }], &step);
        Ok(out)
    }
}

/// Writes the keys and values of patches, which ask for nothing themselves.
fn write_context(
    backend: &dyn Backend,
    layer: &Layer,
    context: &Tensor,
    (q, k, v): (&mut Tensor, &mut Tensor, &mut Tensor),
    cache: &CacheEngine,
    step: &StepMetadata,
) {
    let [_, of_k, of_v] = &layer.qkv;
    let projections = &mut [Projection { linear: of_k, out: &mut *k }, Projection { linear: of_v, out: &mut *v }];
    backend.norm_linear(context, Some(&layer.context_norm), projections, step);
    q.set_rows(context.rows());
    backend.rope_and_cache(RopeArgs::new(q, Some((k, Some(v))), None, (cache, 0)), step);
}

/// Rows `first..first + len` of one request, which see it all so far.
fn rows(first: usize, len: usize) -> StepMetadata {
    let end = first + len;
    let num_blocks = end.div_ceil(BLOCK_SIZE);
    let group = KvGroupMetadata {
        block_tables: (1..=num_blocks as u32).collect(),
        max_blocks: num_blocks,
        slot_mapping: (first..end).map(|i| (BLOCK_SIZE + i) as i64).collect(),
    };
    StepMetadata {
        positions: (first as u32..end as u32).collect(),
        rope_positions: vec![0; len],
        query_start_loc: vec![0, len as u32],
        seq_lens: vec![end as u32],
        span_ends: vec![end as u32; len],
        groups: vec![group],
        ..StepMetadata::default()
    }
}

//! Attention of some layers over the vectors of images (Flamingo, arXiv:2204.14198; Llama 3.2 Vision), in place of that over
//! tokens.
//!
//! Keys and values are made of an image's vectors once ([`keep`]) and lie in a storage of the image's own. A step
//! runs these layers on the rows alone that see an image, put side by side.

use std::{ops::Range, sync::Arc};

use device::{
    AttentionArgs, AttentionParams, Backend, CacheEngine, HeadNorm, KvCacheSpec, KvGroupMetadata, Linear, Mask, Norm, NormSpan,
    Projection, RopeArgs, StepMetadata, Tensor,
};

use super::{
    config::{AttentionConfig, CROSS_BLOCK_SIZE},
    part::{Buffers, Context, Weights, stored},
};
use crate::{
    EngineError,
    weights::{CrossRole, Matrix, Role, WeightId},
};

/// Vectors whose keys and values are made at once.
const ROWS_AT_ONCE: usize = 1024;

/// What such a layer has in place of attention over tokens.
pub(crate) struct CrossAttention {
    config: AttentionConfig,
    /// Its number among layers of its kind, and so in an image's storage.
    number: usize,
    q: Linear,
    k: Linear,
    v: Linear,
    q_norm: Norm,
    k_norm: Norm,
    output: Linear,
}

impl CrossAttention {
    pub(crate) fn new(
        weights: &mut dyn Weights,
        config: &AttentionConfig,
        (layer, number): (usize, usize),
        hidden: usize,
    ) -> Result<Self, EngineError> {
        let (q, kv) = (config.q_size(), config.kv_size());
        let id = |role| WeightId::layer(layer, Role::Cross(role));
        let mut linear = |role, shape| weights.linear(&Matrix::new(id(role), shape, false));
        Ok(Self {
            config: *config,
            number,
            q: linear(CrossRole::Q, [q, hidden])?,
            k: linear(CrossRole::K, [kv, hidden])?,
            v: linear(CrossRole::V, [kv, hidden])?,
            output: linear(CrossRole::Output, [hidden, q])?,
            q_norm: weights.norm(id(CrossRole::QNorm), [1, config.head_dim])?,
            k_norm: weights.norm(id(CrossRole::KNorm), [1, config.head_dim])?,
        })
    }

    /// By what the outputs of attention and of the feed-forward network are multiplied.
    pub(crate) fn gates(weights: &mut dyn Weights, layer: usize) -> Result<[f32; 2], EngineError> {
        let gates =
            [CrossRole::AttnGate, CrossRole::FfnGate].map(|role| weights.values(WeightId::layer(layer, Role::Cross(role)), 1));
        let [of_attention, of_ffn] = gates;
        // A model that is only counted has no weights.
        Ok([of_attention?, of_ffn?].map(|gate| gate.first().copied().unwrap_or_default().tanh()))
    }

    /// Beside the queries and what comes out, those of one image.
    pub(crate) fn buffers(config: &AttentionConfig) -> Buffers<usize> {
        let q = config.q_size();
        [q, q, q, q, 0, 0]
    }

    /// Keys and values of some vectors of an image, `[rows, hidden_size]`, into its storage.
    fn keep(&self, backend: &dyn Backend, vectors: &Tensor, cache: &CacheEngine, step: &StepMetadata) -> Result<(), EngineError> {
        let tensor = |cols| backend.alloc(vectors.rows(), cols);
        let (mut q, mut k, mut v) = (tensor(self.q.out_features)?, tensor(self.k.out_features)?, tensor(self.v.out_features)?);
        let projections = &mut [Projection { linear: &self.k, out: &mut k }, Projection { linear: &self.v, out: &mut v }];
        backend.norm_linear(vectors, None, projections, step);
        q.set_rows(vectors.rows());
        let k_norm = Some(HeadNorm { norm: &self.k_norm, span: NormSpan::Head });
        let args = RopeArgs::new(&mut q, Some((&mut k, Some(&mut v))), None, (cache, self.number));
        backend.rope_and_cache(RopeArgs { k_norm, ..args }, step);
        Ok(())
    }

    /// All phases that read the hidden state, normalized if there is a norm.
    pub(crate) fn open(&self, norm: Option<&Norm>, cx: &mut Context<'_>) {
        let seen = cx.seen.expect("a layer that looks at images runs on rows that see some");
        let [q, own_q, own_out, out, ..] = &mut *cx.buffers;
        let backend = cx.run.backend;
        backend.norm_linear(cx.hidden, norm, &mut [Projection { linear: &self.q, out: &mut *q }], cx.step);
        let first = &seen.images[0].kv;
        let q_norm = Some(HeadNorm { norm: &self.q_norm, span: NormSpan::Head });
        backend.rope_and_cache(RopeArgs { q_norm, ..RopeArgs::new(q, None, None, (first, self.number)) }, cx.step);
        let AttentionConfig { num_heads, num_kv_heads, head_dim, scale, .. } = self.config;
        let params = AttentionParams {
            mask: Mask::Spans,
            scale,
            ..AttentionParams::new([num_heads, num_kv_heads, head_dim], cx.run.precision)
        };
        let attend = |image: &SeenImage, q: &Tensor, out: &mut Tensor| {
            backend.begin_step(&image.step);
            backend.attention(
                AttentionArgs { q, out, cache: &image.kv, layer: self.number, sinks: None, params, next: None },
                &image.step,
            );
        };
        if let [image] = &seen.images[..] {
            attend(image, q, out);
        } else {
            // Each image has a storage of its own.
            out.set_rows(q.rows());
            for image in &seen.images {
                let rows: Vec<u32> = image.rows.clone().map(|row| row as u32).collect();
                backend.gather_rows(q, &rows, own_q);
                attend(image, own_q, own_out);
                backend.fetch(own_out);
                image.rows.clone().enumerate().for_each(|(own, row)| out.row_mut(row).copy_from_slice(own_out.row(own)));
            }
            backend.store(out);
        }
        backend.begin_step(cx.step);
    }

    /// What is added to the hidden state: a product.
    pub(crate) fn output<'a>(&'a self, [_, _, _, out, ..]: &'a Buffers<Tensor>) -> (&'a Tensor, &'a Linear) {
        (out, &self.output)
    }
}

/// Rows of a step that see an image.
pub struct SeenRows {
    /// What the layers have made of its vectors.
    pub kv: Arc<CacheEngine>,
    /// Each row, in ascending order, and how many of the vectors it sees, the first ones.
    pub rows: Vec<(u32, u32)>,
}

/// All rows of a step that see images, side by side.
pub(crate) struct SeenStep {
    /// Where they lie in the step, in ascending order.
    pub(crate) rows: Vec<u32>,
    /// They, as a step.
    pub(crate) step: StepMetadata,
    images: Vec<SeenImage>,
}

struct SeenImage {
    kv: Arc<CacheEngine>,
    /// Which of the rows see it.
    rows: Range<usize>,
    /// They, as a step.
    step: StepMetadata,
}

impl SeenStep {
    /// `None` where no row sees an image.
    pub(crate) fn new(seen: &[SeenRows]) -> Option<Self> {
        let (mut rows, mut images) = (Vec::new(), Vec::new());
        for SeenRows { kv, rows: own } in seen.iter().filter(|seen| !seen.rows.is_empty()) {
            let first = rows.len();
            rows.extend(own.iter().map(|(row, _)| *row));
            let ends: Vec<_> = own.iter().map(|(_, end)| *end).collect();
            images.push(SeenImage { kv: Arc::clone(kv), rows: first..rows.len(), step: queries(&ends, kv.spec()) });
        }
        let positions: Vec<_> = (0..rows.len() as u32).collect();
        let step = StepMetadata {
            rope_positions: positions.clone(),
            positions,
            query_start_loc: vec![0, rows.len() as u32],
            seq_lens: vec![rows.len() as u32],
            groups: vec![KvGroupMetadata { slot_mapping: vec![-1; rows.len()], ..KvGroupMetadata::default() }],
            ..StepMetadata::default()
        };
        (!rows.is_empty()).then_some(Self { rows, step, images })
    }
}

/// Rows as queries of a storage, of whose vectors each sees so many. A request of a step has no more rows than its last one sees
/// vectors, so many rows are several requests.
pub(crate) fn queries(ends: &[u32], spec: &KvCacheSpec) -> StepMetadata {
    let num_blocks = spec.num_blocks - 1;
    let mut group = KvGroupMetadata { max_blocks: num_blocks, ..KvGroupMetadata::default() };
    let mut step = StepMetadata { query_start_loc: vec![0], span_ends: ends.to_vec(), ..StepMetadata::default() };
    for run in ends.chunk_by(|a, b| a == b) {
        for part in run.chunks(run[0].max(1) as usize) {
            step.positions.extend(0..part.len() as u32);
            step.query_start_loc.push(step.positions.len() as u32);
            step.seq_lens.push(part[0]);
            group.block_tables.extend(1..=num_blocks as u32);
        }
    }
    group.slot_mapping = vec![-1; ends.len()];
    step.rope_positions = step.positions.clone();
    step.groups.push(group);
    step
}

/// Vectors `first..first + len` of an image, to be kept.
fn vectors_at(first: usize, len: usize) -> StepMetadata {
    let end = first + len;
    let num_blocks = end.div_ceil(CROSS_BLOCK_SIZE);
    let group = KvGroupMetadata {
        block_tables: (1..=num_blocks as u32).collect(),
        max_blocks: num_blocks,
        slot_mapping: (first..end).map(|at| (CROSS_BLOCK_SIZE + at) as i64).collect(),
    };
    StepMetadata {
        positions: (first as u32..end as u32).collect(),
        rope_positions: vec![0; len],
        query_start_loc: vec![0, len as u32],
        seq_lens: vec![end as u32],
        groups: vec![group],
        ..StepMetadata::default()
    }
}

/// Keys and values that these layers make of an image's vectors, `[rows, hidden_size]`, in a storage like `spec`.
///
/// # Errors
/// Those of a device that has no memory for it.
pub(crate) fn keep<'a>(
    layers: &(impl Iterator<Item = &'a CrossAttention> + Clone),
    backend: &dyn Backend,
    (vectors, hidden): (&[f32], usize),
    spec: &KvCacheSpec,
) -> Result<CacheEngine, EngineError> {
    let cache = backend.alloc_kv_cache(spec)?;
    for (part, values) in vectors.chunks(ROWS_AT_ONCE * hidden).enumerate() {
        let num_rows = values.len() / hidden;
        let tensor = stored(backend, values, hidden)?;
        let step = vectors_at(part * ROWS_AT_ONCE, num_rows);
        backend.begin_step(&step);
        for layer in layers.clone() {
            layer.keep(backend, &tensor, &cache, &step)?;
        }
    }
    Ok(cache)
}

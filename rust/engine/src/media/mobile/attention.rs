//! Attention of all places of a map to all, or to fewer that stand for them; one head of keys and values serves all heads of
//! queries (Shazeer 2019, arXiv:1911.02150).

use device::{
    AttentionArgs, AttentionParams, CacheEngine, KvCacheSpec, KvDType, KvGroupMetadata, KvShape, Linear, Mask, Norm, Precision,
    RopeArgs, StepMetadata, Tensor,
};

use super::{
    ROWS, Run,
    block::Depthwise,
    config::{BlockConfig, BlockKind},
    map::{Map, Reach},
    norm, parts,
};
use crate::{EngineError, media::weights::TowerWeights, model::cross::queries};

const BLOCK_SIZE: usize = 32;

/// Attention that was loaded.
pub(super) struct Attention {
    norm: Norm,
    query: Linear,
    key: Seen,
    value: Seen,
    /// With the factors of what is added.
    output: Linear,
    num_heads: usize,
    head_dim: usize,
}

/// What makes keys, or values.
struct Seen {
    /// Makes fewer places of them first.
    down: Option<(Depthwise, Norm)>,
    linear: Linear,
}

impl Seen {
    fn new(
        weights: &mut TowerWeights<'_>,
        place: &str,
        (reach, channels, head_dim): (Reach, usize, usize),
    ) -> Result<Self, EngineError> {
        let down = if reach.stride > 1 {
            let convolution = Depthwise::new(weights, &format!("{place}down_conv"), (reach, channels))?;
            Some((convolution, norm(weights, &format!("{place}norm"), channels)?))
        } else {
            None
        };
        Ok(Self { down, linear: weights.pointwise(&format!("{place}proj"), [head_dim, channels])? })
    }

    /// Of a map behind the norm, `[places, head_dim]`.
    fn run(&self, run: &mut Run<'_>, map: &Map) -> Map {
        let fewer = self.down.as_ref().map(|(down, _)| down.run(run, map));
        let map = fewer.as_ref().unwrap_or(map);
        let mut out = Map::new([map.height, map.width], self.linear.out_features);
        for part in parts(map.len()) {
            run.put(map.rows(&part), map.channels);
            run.product(self.down.as_ref().map(|(_, norm)| norm), &self.linear);
            run.take(&mut out, &part);
        }
        out
    }
}

impl Attention {
    /// `gamma` names factors of what is added.
    pub(super) fn new(
        weights: &mut TowerWeights<'_>,
        place: &str,
        config: &BlockConfig,
        gamma: &str,
    ) -> Result<Self, EngineError> {
        let BlockKind::Attention { num_heads, head_dim, stride, side } = config.kind else {
            return Err(EngineError::Internal("attention for another block".into()));
        };
        let (channels, inner) = (config.in_channels, num_heads * head_dim);
        let seen = (Reach { side, stride }, channels, head_dim);
        let output = format!("{place}attn.output.proj");
        Ok(Self {
            norm: norm(weights, &format!("{place}norm"), channels)?,
            query: weights.pointwise(&format!("{place}attn.query.proj"), [inner, channels])?,
            key: Seen::new(weights, &format!("{place}attn.key."), seen)?,
            value: Seen::new(weights, &format!("{place}attn.value."), seen)?,
            output: weights.scaled(&output, gamma, [config.out_channels, inner])?,
            num_heads,
            head_dim,
        })
    }

    pub(super) fn run(&self, run: &mut Run<'_>, map: Map) -> Result<Map, EngineError> {
        let mut normed = map.clone();
        run.normed(&mut normed, &self.norm, None);
        let (keys, values) = (self.key.run(run, &normed), self.value.run(run, &normed));
        let cache = self.keep(run, &keys, &values)?;
        let mut out = map;
        let params =
            AttentionParams { mask: Mask::Spans, ..AttentionParams::new([self.num_heads, 1, self.head_dim], run.precision) };
        let mut seen = run.backend.alloc(ROWS, run.widest)?;
        for part in parts(normed.len()) {
            let step = queries(&vec![keys.len() as u32; part.len()], cache.spec());
            run.put(normed.rows(&part), normed.channels);
            run.product(None, &self.query);
            run.backend.begin_step(&step);
            seen.set_cols(self.output.in_features);
            let (q, out_of_heads) = (&run.buffers.inner, &mut seen);
            let args = AttentionArgs { q, out: out_of_heads, cache: &cache, layer: 0, sinks: None, params, next: None };
            run.backend.attention(args, &step);
            // What it gives is what the product takes.
            std::mem::swap(&mut run.buffers.inner, &mut seen);
            let range = part.start * out.channels..part.end * out.channels;
            let rows = out.rows(&part).to_vec();
            run.project(&self.output, None, Some(&rows), &mut out.values[range]);
        }
        Ok(out)
    }

    /// A storage with these keys and values.
    fn keep(&self, run: &Run<'_>, keys: &Map, values: &Map) -> Result<CacheEngine, EngineError> {
        let (backend, len, shape) = (run.backend, keys.len(), KvShape::new(1, self.head_dim));
        // A GPU has kernels for some sizes of heads.
        let prefers_bf16 = backend.prefers_bf16_cache() || !backend.memory()?.is_host;
        let takes_bf16 = backend.check_kv_layer(KvDType::BF16, shape, self.num_heads).is_ok();
        let is_fast = run.precision != Precision::Exact && prefers_bf16 && takes_bf16;
        let dtype = if is_fast { KvDType::BF16 } else { KvDType::F32 };
        let num_blocks = len.div_ceil(BLOCK_SIZE);
        let cache = backend.alloc_kv_cache(&KvCacheSpec::uniform((num_blocks + 1, BLOCK_SIZE), dtype, shape, 1)?)?;
        for part in parts(len) {
            let step = written(&part);
            let tensor = |rows: &[f32]| crate::model::part::stored(backend, rows, self.head_dim);
            let (mut k, mut v): (Tensor, Tensor) = (tensor(keys.rows(&part))?, tensor(values.rows(&part))?);
            let mut q = backend.alloc(part.len(), self.query.out_features)?;
            q.set_rows(part.len());
            backend.begin_step(&step);
            backend.rope_and_cache(RopeArgs::new(&mut q, Some((&mut k, Some(&mut v))), None, (&cache, 0)), &step);
        }
        Ok(cache)
    }
}

/// Places that are written as rows of one request.
fn written(places: &std::ops::Range<usize>) -> StepMetadata {
    let num_blocks = places.end.div_ceil(BLOCK_SIZE);
    let group = KvGroupMetadata {
        // Block 0 is read by nobody.
        block_tables: (1..=num_blocks as u32).collect(),
        max_blocks: num_blocks,
        slot_mapping: places.clone().map(|place| (BLOCK_SIZE + place) as i64).collect(),
    };
    StepMetadata {
        positions: (places.start as u32..places.end as u32).collect(),
        rope_positions: vec![0; places.len()],
        query_start_loc: vec![0, places.len() as u32],
        seq_lens: vec![places.end as u32],
        groups: vec![group],
        ..StepMetadata::default()
    }
}

//! Latent attention, absorbed: the order of work is that of [`crate::cpu`], and every row is computed by the same kernels.

use std::sync::Arc;

use crate::{
    AttentionParams, CacheEngine, KvDType, LatentArgs, LatentAttention, LatentPhases, LatentQuery, Linear, Mask, Norm, NormKind,
    Precision, QueryScale, RopeStyle, RopeTable, StepMetadata, Tensor, WorkspaceShape,
    kernel_args::{AttentionMergeArgs, DevicePtr, ElementType, LatentAttentionArgs, LatentCacheArgs},
};

use super::{
    CudaBackend, CudaError,
    attention::{self, StepLists},
    attention_plan::{LATENT_VECTORS, PlanShape},
    backend::{State, device, done, plain, rows},
    dense::Dense,
    driver::Driver,
    grouped::{self, GroupedInput, GroupedRows, Groups},
    kernels::{GROUPED_ROWS, Kernel, LATENT_DIMS, MAX_GRID_Y, kv_suffix, launch},
    linear::Rows,
    memory::{Constants, Scratch},
};

/// Query heads of a CTA of `latent_f32`.
const PLAIN_HEADS: usize = 4;

/// Buffers of the phase.
#[derive(Default)]
pub struct LatentScratch {
    /// `[rows, q_rank]`.
    low: Scratch,
    /// `[rows, num_heads * (nope_dim + rope_dim)]`.
    query: Scratch,
    /// `[rows, kv_rank + rope_dim]`, as it is projected.
    latent: Scratch,
    /// `[rows, num_heads * (rope_dim + kv_rank)]`.
    absorbed: Scratch,
    /// What attention gives, `[rows, num_heads * kv_rank]`.
    attended: Scratch,
}

impl LatentScratch {
    /// Addresses that graphs know.
    pub fn buffers(&self) -> [DevicePtr; 5] {
        let Self { low, query, latent, absorbed, attended } = self;
        [low, query, latent, absorbed, attended].map(Scratch::at)
    }

    /// Steps of that shape are the largest.
    pub fn plan(&mut self, shape: &WorkspaceShape) {
        let Self { low, query, latent, absorbed, attended } = self;
        for (scratch, floats) in [low, query, latent, absorbed, attended].into_iter().zip(planned_floats(shape)) {
            scratch.plan(floats * size_of::<f32>());
        }
    }
}

/// Values of each buffer in the largest step. Queries before they are absorbed are not wider than after, nor is their low rank
/// than the hidden state.
fn planned_floats(shape: &WorkspaceShape) -> [usize; 5] {
    let wide = shape.num_heads * shape.head_dim;
    let cols = if shape.has_latent { [shape.hidden_size, wide, shape.head_dim, wide, wide] } else { [0; 5] };
    cols.map(|cols| shape.num_tokens * cols)
}

/// Bytes of the buffers once the largest step has run.
pub fn workspace_bytes(shape: &WorkspaceShape) -> u64 {
    (planned_floats(shape).iter().sum::<usize>() * size_of::<f32>()) as u64
}

/// Widths of a layer.
#[derive(Clone, Copy)]
struct Dims {
    num_heads: usize,
    nope_dim: usize,
    rope_dim: usize,
    kv_rank: usize,
}

impl Dims {
    fn of(weights: &LatentAttention, num_heads: usize) -> Self {
        let (nope_dim, rope_dim, kv_rank) = (weights.nope_dim(), weights.rope_dim(), weights.kv_rank());
        Self { num_heads, nope_dim, rope_dim, kv_rank }
    }

    /// Of a query before it is absorbed.
    fn q_width(self) -> usize {
        self.nope_dim + self.rope_dim
    }

    /// Of what is cached, and of a query.
    fn width(self) -> usize {
        self.rope_dim + self.kv_rank
    }
}

/// A layer's storage.
#[derive(Clone, Copy)]
struct LatentCache<'a> {
    cache: &'a CacheEngine,
    layer: usize,
    dims: Dims,
}

impl CudaBackend {
    fn try_latent_attention(&self, args: LatentArgs<'_>, step: &StepMetadata) -> Result<(), CudaError> {
        let LatentArgs { hidden, norm, weights, rope, q_scale, cache, layer, params, out } = args;
        let (count, dims) = (hidden.rows(), Dims::of(weights, params.num_heads));
        assert_eq!([weights.key_up.len(), weights.value_up.len()], [dims.num_heads; 2], "heads of the weights");
        assert_eq!((params.num_kv_heads, params.head_dim), (1, dims.width()), "the absorbed form");
        assert!(
            params.mask == Mask::Causal && [params.window, params.chunk] == [None; 2] && params.softcap.is_none(),
            "no masks"
        );
        out.set_rows(count);
        let state = &mut *self.state();
        assert_eq!(step.num_reqs(), state.lists.num_reqs(), "the step that was begun");
        let floats = |scratch: &mut Scratch, cols: usize| -> Result<Rows, CudaError> {
            Ok(Rows { at: scratch.floats(self.driver(), count * cols)?, count, cols, element: ElementType::F32 })
        };
        let query = floats(&mut state.latent.query, dims.num_heads * dims.q_width())?;
        let latent = floats(&mut state.latent.latent, dims.width())?;
        let absorbed = floats(&mut state.latent.absorbed, dims.num_heads * dims.width())?;
        let attended = floats(&mut state.latent.attended, dims.num_heads * dims.kv_rank)?;

        self.project(state, (hidden, norm), weights, [query, latent])?;
        let cache = LatentCache { cache, layer, dims };
        let kv_norm = &weights.kv_norm;
        cache.fill(self.driver(), &state.lists, &mut state.constants, (kv_norm, rope, q_scale), [query, latent, absorbed])?;
        // SAFETY: the buffers were made for the heads of the checked widths.
        unsafe {
            let x = HeadColumns { rows: query, first: 0, width: dims.q_width() };
            let out = HeadColumns { rows: absorbed, first: dims.rope_dim, width: dims.width() };
            per_head(self.driver(), (&mut state.dense, &mut state.groups), &weights.key_up, [x, out])?;
        }
        cache.attend(self.driver(), &mut state.lists, &params, [absorbed, attended], step)?;
        let v_dim = out.cols() / dims.num_heads;
        assert!(weights.value_up.iter().all(|up| up.out_features == v_dim), "columns of the output");
        let out = Rows { at: device(out).at(), count, cols: out.cols(), element: ElementType::F32 };
        // SAFETY: likewise.
        unsafe {
            let x = HeadColumns { rows: attended, first: 0, width: dims.kv_rank };
            let out = HeadColumns { rows: out, first: 0, width: v_dim };
            per_head(self.driver(), (&mut state.dense, &mut state.groups), &weights.value_up, [x, out])
        }
    }

    /// What comes of the hidden state: queries and latent vectors.
    fn project(
        &self,
        state: &mut State,
        (hidden, norm): (&Tensor, Option<&Norm>),
        weights: &LatentAttention,
        [query, latent]: [Rows; 2],
    ) -> Result<(), CudaError> {
        let kv_down = &weights.kv_down;
        let (first, out) = match &weights.query {
            LatentQuery::Whole(whole) => (whole, query.at),
            LatentQuery::LowRank { down, .. } => (down, state.latent.low.floats(self.driver(), query.count * down.out_features)?),
        };
        // SAFETY: the buffers were made for the products.
        unsafe { self.multiply(state, rows(hidden), norm, &[plain(first, out), plain(kv_down, latent.at)])? };
        let LatentQuery::LowRank { down, norm, up } = &weights.query else { return Ok(()) };
        let low = Rows { at: out, count: query.count, cols: down.out_features, element: ElementType::F32 };
        // SAFETY: likewise.
        unsafe { self.multiply(state, low, Some(norm), &[plain(up, query.at)]) }
    }
}

impl LatentCache<'_> {
    /// Norms and rotates what is cached, and rotates and scales queries.
    fn fill(
        self,
        driver: &Arc<dyn Driver>,
        lists: &StepLists,
        constants: &mut Constants,
        (norm, rope, q_scale): (&Norm, Option<&RopeTable>, Option<QueryScale>),
        [query, latent, absorbed]: [Rows; 3],
    ) -> Result<(), CudaError> {
        assert!(norm.kind == NormKind::Rms && norm.bias.is_none(), "an RMS norm of the latent vector");
        assert!(rope.is_none_or(|rope| rope.rotary_dim <= self.dims.rope_dim), "elements that rotate");
        let (spec, layer) = (self.cache.spec(), self.cache.layer(self.layer));
        assert_eq!((layer.shape.is_latent(), layer.shape.k_dim), (true, self.dims.width()), "the layer's keys");
        let (plane, block_bytes) = attention::blocks(self.cache).latent_layer(spec, layer);
        let mut table = |of: fn(&RopeTable) -> &crate::Constant| rope.map_or(Ok(0), |rope| constants.of(driver, of(rope)));
        let (cos, sin) = (table(|rope| &rope.cos)?, table(|rope| &rope.sin)?);
        let [positions, rope_positions] = lists.positions();
        let args = LatentCacheArgs {
            query: query.at,
            latent: latent.at,
            absorbed: absorbed.at,
            weight: constants.of(driver, &norm.weight)?,
            cos,
            sin,
            rope_positions,
            positions,
            slot_mapping: lists.group(layer.group).slot_mapping,
            plane,
            block_bytes: block_bytes as u64,
            num_heads: self.dims.num_heads as u32,
            nope_dim: self.dims.nope_dim as u32,
            rope_dim: self.dims.rope_dim as u32,
            kv_rank: self.dims.kv_rank as u32,
            block_size: spec.block_size as u32,
            rotary_dim: rope.map_or(0, |rope| rope.rotary_dim) as u32,
            interleaved: u32::from(rope.is_some_and(|rope| rope.style == RopeStyle::Interleaved)),
            eps: norm.eps,
            scale_length: q_scale.map_or(0, |scale| scale.length),
            scale_offset: q_scale.map_or(0, |scale| scale.offset),
            scale_beta: q_scale.map_or(0.0, |scale| scale.beta),
            reserved: 0,
        };
        let kernel = Kernel::named(&format!("latent_cache_{}", kv_suffix(spec.dtype)))?;
        // SAFETY: the buffers have a row for each token, and the tables a row for each position; slots lie in the plane.
        unsafe { launch(driver, kernel, [query.count, 1, 1], &args) }
    }

    /// Attention of absorbed queries.
    fn attend(
        self,
        driver: &Arc<dyn Driver>,
        lists: &mut StepLists,
        params: &AttentionParams,
        [absorbed, attended]: [Rows; 2],
        step: &StepMetadata,
    ) -> Result<(), CudaError> {
        let Dims { num_heads, rope_dim, kv_rank, .. } = self.dims;
        let (spec, layer) = (self.cache.spec(), self.cache.layer(self.layer));
        let is_plain = spec.dtype == KvDType::F32;
        assert!(is_plain || [rope_dim, kv_rank] == LATENT_DIMS, "{rope_dim} elements that rotate and {kv_rank} that do not");
        let heads = if is_plain { PLAIN_HEADS } else { even_heads(num_heads) };
        let of_prompts = prompt_heads(num_heads);
        let shape = PlanShape {
            queries_per_kv: heads,
            window: None,
            chunk: None,
            mask: Mask::Causal,
            dtype: spec.dtype,
            latent: Some(of_prompts),
            is_wide: false,
            alone: is_plain,
            splits: lists.splits() && !is_plain && params.precision != Precision::Deterministic,
        };
        let plan = lists.plan(layer.group, shape, step)?;
        let [part_out, part_lse] = lists.parts(driver, plan.num_parts, [num_heads, num_heads * kv_rank])?;
        let (plane, block_bytes) = attention::blocks(self.cache).latent_layer(spec, layer);
        let (group, [positions, _]) = (lists.group(layer.group), lists.positions());
        let base = LatentAttentionArgs {
            q: absorbed.at,
            out: attended.at,
            part_out,
            part_lse,
            plane,
            block_tables: group.block_tables,
            positions,
            work: 0,
            block_bytes: block_bytes as u64,
            max_blocks: group.max_blocks as u32,
            block_size: spec.block_size as u32,
            num_heads: num_heads as u32,
            rope_dim: rope_dim as u32,
            kv_rank: kv_rank as u32,
            heads: heads as u32,
            scale: params.scale,
            reserved: 0,
        };
        let merge = AttentionMergeArgs {
            part_out,
            part_lse,
            out: attended.at,
            num_heads: num_heads as u32,
            head_dim: kv_rank as u32,
            out_type: ElementType::F32 as u32,
            ..AttentionMergeArgs::default()
        };
        let kernel = Kernel::named(&match spec.dtype {
            KvDType::F32 => "latent_f32".to_owned(),
            dtype => format!("latent_{}_d{}", kv_suffix(dtype), self.dims.width()),
        })?;
        let attend = |work, len: usize, heads: usize| {
            let args = LatentAttentionArgs { work, heads: heads as u32, ..base };
            // SAFETY: the plan names rows of the step, block tables hold the blocks of every key, parts have room for those of a
            // round.
            unsafe { launch(driver, kernel, [len * num_heads.div_ceil(heads), 1, 1], &args) }
        };
        lists.decode(driver, &plan, &merge, |work, len| attend(work, len, heads))?;
        attend(plan.prefill.at, plan.prefill.len, of_prompts)
    }
}

/// Query heads of a CTA, as few CTAs as can be.
fn even_heads(num_heads: usize) -> usize {
    num_heads.div_ceil(num_heads.div_ceil(LATENT_VECTORS))
}

/// Query heads of a CTA that takes as many rows with them as fit: the most that leave less than a tenth of its query vectors
/// unused.
fn prompt_heads(num_heads: usize) -> usize {
    let are_used = |heads: &usize| {
        let (used, taken) = (num_heads * (LATENT_VECTORS / heads), num_heads.div_ceil(*heads) * LATENT_VECTORS);
        10 * used >= 9 * taken
    };
    (1..=num_heads.min(LATENT_VECTORS)).rev().find(are_used).expect("one head uses all")
}

/// Columns of a buffer, some of each head.
#[derive(Clone, Copy)]
struct HeadColumns {
    rows: Rows,
    /// Columns before those of the first head.
    first: usize,
    /// Columns from a head to the next one.
    width: usize,
}

/// Multiplies what each head has of `x` by its weight, into its columns of `out`.
///
/// # Safety
/// Both are buffers of these shapes, with columns of every head.
unsafe fn per_head(
    driver: &Arc<dyn Driver>,
    (dense, groups): (&mut Dense, &mut Groups),
    weights: &[Linear],
    [x, out]: [HeadColumns; 2],
) -> Result<(), CudaError> {
    let group = groups.of(driver, weights)?;
    let [few, many, _] = GROUPED_ROWS;
    let has_many = x.rows.count > few && grouped::has_many_rows(group.first);
    let (tile_rows, at, bytes) = if has_many {
        (many, dense.rounded_for(x.rows, group.first)?, size_of::<u16>())
    } else {
        (few, x.rows.at, size_of::<f32>())
    };
    let most = MAX_GRID_Y / weights.len() * tile_rows;
    for first in (0..x.rows.count).step_by(most) {
        let rows = GroupedRows::All {
            num_rows: most.min(x.rows.count - first),
            num_groups: weights.len(),
            x_stride: x.width,
            out_stride: out.width,
        };
        let at = at + ((first * x.rows.cols + x.first) * bytes) as u64;
        let to = out.rows.at + ((first * out.rows.cols + out.first) * size_of::<f32>()) as u64;
        let input = GroupedInput { x: at, x_stride: x.rows.cols, rows, tile_rows };
        // SAFETY: the caller's promise; what was rounded is of the same shape.
        unsafe { grouped::multiply(driver, &input, &[(group, to, out.rows.cols)])? };
    }
    Ok(())
}

impl LatentPhases for CudaBackend {
    fn latent_attention(&self, args: LatentArgs<'_>, step: &StepMetadata) {
        done(self.try_latent_attention(args, step));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ctas_have_even_shares_of_the_heads_and_few_unused_vectors() {
        for num_heads in 1..=160 {
            let heads = even_heads(num_heads);
            assert!(heads <= LATENT_VECTORS && num_heads.div_ceil(heads) == num_heads.div_ceil(LATENT_VECTORS));
            let heads = prompt_heads(num_heads);
            let ctas = num_heads.div_ceil(heads);
            assert!(ctas * LATENT_VECTORS * 9 <= num_heads * (LATENT_VECTORS / heads) * 10, "{num_heads}: {heads}");
        }
        assert_eq!([1, 16, 20, 64, 128].map(even_heads), [1, 16, 20, 32, 32]);
        assert_eq!([1, 5, 16, 20, 64, 128].map(prompt_heads), [1, 5, 16, 10, 32, 32]);
    }
}

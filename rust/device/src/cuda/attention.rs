//! Rotation, the write of K and V, and attention, with the lists of a step that they read.

use std::sync::Arc;

use crate::{
    Activation, AttentionArgs, CacheEngine, HeadNorm, KvDType, KvShape, KvSide, NormKind, NormSpan, Precision, RopeArgs,
    RopeStyle, StepMetadata, Tensor, WorkspaceShape,
    attention::NormParts,
    kernel_args::{
        self, ActivationKind, AttentionMerge, AttentionMergeArgs, AttentionWork, DevicePtr, HeadNormArgs, RopeAndCacheArgs,
    },
};

use super::{
    CudaError,
    attention_plan::{AttentionPlan, MAX_KEPT_PARTS, PlanShape, Round, max_parts},
    driver::{DeviceMemory, Driver, Plain},
    graph_lists::{ListMemory, PaddedLists},
    graph_plan::Bucket,
    kernels::{Kernel, MAX_NARROW_HEAD_DIM, kv_suffix, launch},
    memory::{Constants, Scratch, StepArena},
    planes::{LayerPlanes, PlaneBlocks},
    recurrent::{self, RecurrentLists},
};

/// Heads that a CTA of `rope_and_cache_*` takes.
const HEADS_PER_CTA: usize = 4;
/// Query heads that a CTA of `attention_merge` takes.
const MERGED_HEADS_PER_CTA: usize = 4;

/// The lists of a step on the device.
pub struct StepLists {
    arena: StepArena,
    num_reqs: usize,
    /// Where a step's token ids lie whose lists lie at fixed addresses.
    token_ids: Option<DevicePtr>,
    positions: DevicePtr,
    rope_positions: DevicePtr,
    groups: Vec<GroupLists>,
    recurrent: RecurrentLists,
    /// By KV group and shape.
    plans: Vec<((usize, PlanShape), DevicePlan)>,
    part_out: Scratch,
    part_lse: Scratch,
    /// Query heads and their elements in a row, of any layer at most.
    widest: [usize; 2],
    /// Lists of steps at fixed addresses.
    fixed: ListMemory,
    splits: bool,
    merge: Kernel,
}

/// The lists of a KV group on the device.
#[derive(Clone, Copy)]
pub struct GroupLists {
    /// See [`crate::KvGroupMetadata`].
    pub block_tables: DevicePtr,
    /// See [`crate::KvGroupMetadata`].
    pub slot_mapping: DevicePtr,
    /// Row stride of the tables.
    pub max_blocks: usize,
}

/// An [`AttentionPlan`] on the device.
#[derive(Clone)]
pub struct DevicePlan {
    /// See [`AttentionPlan`].
    pub decode: List,
    /// See [`AttentionPlan`].
    pub prefill: List,
    /// See [`AttentionPlan`].
    pub merges: List,
    /// See [`AttentionPlan`].
    pub rounds: Vec<Round>,
    /// See [`AttentionPlan`].
    pub num_parts: usize,
    /// See [`PlanShape::ends`]; null: each row's end is its position. So it is in every step of a graph, where no row
    /// sees ahead.
    pub ends: DevicePtr,
}

/// A list on the device.
#[derive(Clone, Copy)]
pub struct List {
    /// Its first entry.
    pub at: DevicePtr,
    /// Its entries.
    pub len: usize,
}

impl StepLists {
    /// Of no step. `splits`: whether the keys of requests that decode are cut.
    pub fn new(driver: &Arc<dyn Driver>, splits: bool) -> Result<Self, CudaError> {
        Ok(Self {
            arena: StepArena::new(driver),
            num_reqs: 0,
            token_ids: None,
            positions: 0,
            rope_positions: 0,
            groups: Vec::new(),
            recurrent: RecurrentLists::default(),
            plans: Vec::new(),
            part_out: Scratch::default(),
            part_lse: Scratch::default(),
            widest: [0; 2],
            fixed: ListMemory::default(),
            splits,
            merge: Kernel::named("attention_merge")?,
        })
    }

    /// Forgets the last step.
    pub fn forget(&mut self) -> Result<(), CudaError> {
        self.token_ids = None;
        self.plans.clear();
        self.groups.clear();
        self.recurrent = RecurrentLists::default();
        self.arena.reset()
    }

    /// Forgets the last step and tells the device about this one.
    pub fn begin(&mut self, step: &StepMetadata) -> Result<(), CudaError> {
        self.forget()?;
        self.num_reqs = step.num_reqs();
        self.positions = self.arena.put(&step.positions)?;
        self.rope_positions = self.arena.put(&step.rope_positions)?;
        for group in &step.groups {
            self.groups.push(GroupLists {
                block_tables: self.arena.put(&group.block_tables)?,
                slot_mapping: self.arena.put(&group.slot_mapping)?,
                max_blocks: group.max_blocks,
            });
        }
        if !step.state_slots.is_empty() {
            let requests = self.arena.put(&recurrent::requests(step))?;
            self.recurrent = RecurrentLists { requests, row_requests: self.arena.put(&recurrent::row_requests(step))? };
        }
        Ok(())
    }

    /// The lists for recurrent layers, of a step of requests that have states.
    pub fn recurrent(&self) -> RecurrentLists {
        self.recurrent
    }

    /// Lists of a bucket for the kinds of layers that ran since the step began, and the buffers that they need; `largest` is the
    /// bucket with the longest lists.
    pub fn padded(&mut self, driver: &Arc<dyn Driver>, bucket: Bucket, largest: Bucket) -> Result<PaddedLists, CudaError> {
        let kinds: Vec<_> = self.plans.iter().map(|(kind, _)| *kind).collect();
        let num_parts = kinds.iter().map(|(_, shape)| shape.capacity(bucket).num_parts).max().unwrap_or(0);
        let [num_heads, width] = self.widest;
        self.part_out.floats(driver, num_parts * width)?;
        self.part_lse.floats(driver, num_parts * num_heads)?;
        let has_states = self.recurrent != RecurrentLists::default();
        let longest = PaddedLists::new(largest, self.groups.len(), has_states, &kinds).bytes();
        self.fixed.reserve(driver, longest, 0)?;
        let mut lists = PaddedLists::new(bucket, self.groups.len(), has_states, &kinds);
        lists.place(&self.fixed);
        Ok(lists)
    }

    /// Points to lists that are there already.
    pub fn begin_padded(&mut self, lists: &PaddedLists) {
        self.num_reqs = lists.num_reqs();
        self.token_ids = Some(lists.token_ids());
        [self.positions, self.rope_positions] = lists.positions();
        self.groups = lists.groups(self.fixed.addresses()[1]).collect();
        self.recurrent = lists.recurrent();
        self.plans = lists.plans().collect();
    }

    /// Makes room for the block tables of a step.
    pub fn reserve_tables(&mut self, driver: &Arc<dyn Driver>, step: &StepMetadata) -> Result<(), CudaError> {
        let bytes = step.groups.iter().map(|group| size_of_val(&group.block_tables[..])).sum::<usize>();
        self.fixed.reserve(driver, 0, bytes)
    }

    /// Copies the lists of a step to where a graph expects them.
    pub fn upload_padded(&mut self, lists: &mut PaddedLists, token_ids: &[u32], step: &StepMetadata) -> Result<(), CudaError> {
        self.forget()?;
        lists.upload(token_ids, step, &self.fixed)
    }

    /// Addresses that graphs know.
    pub fn buffers(&self) -> [DevicePtr; 4] {
        let [lists, tables] = self.fixed.addresses();
        [self.part_out.at(), self.part_lse.at(), lists, tables]
    }

    /// The ids of a step's tokens on the device: where its lists have them, or as another one of its lists.
    pub fn token_ids(&mut self, token_ids: &[u32]) -> Result<DevicePtr, CudaError> {
        self.token_ids.map_or_else(|| self.arena.put(token_ids), Ok)
    }

    /// Whether lists lie at fixed addresses: phases are being recorded.
    pub fn are_fixed(&self) -> bool {
        self.token_ids.is_some()
    }

    /// Steps of that shape are the largest.
    pub fn plan_parts(&mut self, shape: &WorkspaceShape) {
        let parts = planned_parts(shape) * shape.num_heads * size_of::<f32>();
        self.part_out.plan(parts * shape.head_dim);
        self.part_lse.plan(parts);
    }

    /// Requests of the step.
    pub fn num_reqs(&self) -> usize {
        self.num_reqs
    }

    /// Copies a list that this step needs.
    pub fn put<T: Plain>(&mut self, values: &[T]) -> Result<DevicePtr, CudaError> {
        self.arena.put(values)
    }

    fn list<T: Plain>(&mut self, values: &[T]) -> Result<List, CudaError> {
        Ok(List { at: self.arena.put(values)?, len: values.len() })
    }

    /// The step's plan for such a layer; layers with equal shapes share it.
    pub fn plan(&mut self, group: usize, shape: PlanShape, step: &StepMetadata) -> Result<DevicePlan, CudaError> {
        if let Some((_, plan)) = self.plans.iter().find(|(kind, _)| *kind == (group, shape)) {
            return Ok(plan.clone());
        }
        let plan = AttentionPlan::new(step, shape);
        let ends = shape.ends(step).filter(|_| !self.are_fixed()).map_or(Ok(0), |ends| self.arena.put(&ends))?;
        let plan = DevicePlan {
            ends,
            decode: self.list(&plan.decode)?,
            prefill: self.list(&plan.prefill)?,
            merges: self.list(&plan.merges)?,
            rounds: plan.rounds,
            num_parts: plan.num_parts,
        };
        self.plans.push(((group, shape), plan.clone()));
        Ok(plan)
    }

    /// Attention over the cache, into rows that were set and the type that was.
    pub fn attention(
        &mut self,
        driver: &Arc<dyn Driver>,
        constants: &mut Constants,
        args: AttentionArgs<'_>,
        step: &StepMetadata,
    ) -> Result<(), CudaError> {
        let AttentionArgs { q, out, cache, layer, sinks, params, next: _ } = args;
        assert!(sinks.is_none_or(|sinks| sinks.len() == params.num_heads), "sinks of {} heads", params.num_heads);
        let sinks = sinks.map_or(Ok(0), |sinks| constants.of(driver, sinks))?;
        let (spec, layer) = (cache.spec(), cache.layer(layer));
        let group = layer.group;
        assert_eq!(KvShape::new(params.num_kv_heads, params.head_dim), layer.shape, "heads of the layer's keys and values");
        assert_eq!(step.num_reqs(), self.num_reqs, "the step that was begun");
        let width = params.num_heads * params.head_dim;
        assert_eq!((q.cols(), out.cols()), (width, width), "columns of queries and output");
        let queries_per_kv = params.num_heads / params.num_kv_heads;
        let alone = spec.dtype == KvDType::F32 || params.precision == Precision::Deterministic;
        let shape = PlanShape {
            queries_per_kv,
            window: params.window,
            chunk: params.chunk,
            mask: params.mask,
            dtype: spec.dtype,
            latent: None,
            is_wide: params.head_dim > MAX_NARROW_HEAD_DIM,
            alone,
            splits: self.splits && !alone,
        };
        let plan = self.plan(group, shape, step)?;
        let [part_out, part_lse] = self.parts(driver, plan.num_parts, [params.num_heads, width])?;
        let (out, out_type) = (device_at(out), out.element() as u32);
        let LayerPlanes { k_plane, v_plane, block_stride } = blocks(cache).layer(spec, layer);
        let layout = spec.layout(&layer.shape, KvSide::Key, block_stride);
        let base = kernel_args::AttentionArgs {
            q: device_at(q),
            out,
            part_out,
            part_lse,
            k_plane,
            v_plane,
            block_tables: self.groups[group].block_tables,
            positions: self.positions,
            ends: plan.ends,
            sinks,
            block_bytes: layout.block_stride as u64,
            scales_offset: layout.scales as u64,
            max_blocks: self.groups[group].max_blocks as u32,
            block_size: spec.block_size as u32,
            num_heads: params.num_heads as u32,
            num_kv_heads: params.num_kv_heads as u32,
            head_dim: params.head_dim as u32,
            q_stride: q.cols() as u32,
            window: params.window.unwrap_or(0) as u32,
            chunk: params.chunk.unwrap_or(0) as u32,
            out_type,
            scale: params.scale,
            softcap: params.softcap.unwrap_or(0.0),
            ..kernel_args::AttentionArgs::default()
        };
        let kernel = |family| attention_kernel(family, spec.dtype, params.head_dim);
        if plan.decode.len > 0 {
            let kernel = kernel("attention")?;
            let merge = AttentionMergeArgs {
                part_out,
                part_lse,
                sinks,
                out,
                num_heads: base.num_heads,
                head_dim: base.head_dim,
                out_type: base.out_type,
                ..AttentionMergeArgs::default()
            };
            self.decode(driver, &plan, &merge, |work, len| {
                // The KV heads of an entry follow each other: they share blocks, and what lies together is read together.
                let grid = [len * params.num_kv_heads, 1, 1];
                // SAFETY: the plan names rows of the step, block tables hold the blocks of every key, parts have room for those
                // of a round.
                unsafe { launch(driver, kernel, grid, &kernel_args::AttentionArgs { work, ..base }) }
            })?;
        }
        if plan.prefill.len > 0 {
            let args = kernel_args::AttentionArgs { work: plan.prefill.at, ..base };
            // SAFETY: the plan names rows of the step, and block tables hold the blocks of every key.
            unsafe { launch(driver, kernel("prefill")?, [plan.prefill.len, params.num_kv_heads, 1], &args)? };
        }
        Ok(())
    }

    /// Room for so many parts of layers with so many query heads, and elements of a row.
    pub fn parts(
        &mut self,
        driver: &Arc<dyn Driver>,
        num_parts: usize,
        [num_heads, width]: [usize; 2],
    ) -> Result<[DevicePtr; 2], CudaError> {
        self.widest = [self.widest[0].max(num_heads), self.widest[1].max(width)];
        Ok([self.part_out.floats(driver, num_parts * width)?, self.part_lse.floats(driver, num_parts * num_heads)?])
    }

    /// Attention of rows whose keys may come in parts, by `attend` for so many entries of work that begin there, and their merge.
    pub fn decode(
        &self,
        driver: &Arc<dyn Driver>,
        plan: &DevicePlan,
        merge: &AttentionMergeArgs,
        attend: impl Fn(DevicePtr, usize) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        for Round { decode, merges } in &plan.rounds {
            if !decode.is_empty() {
                attend(plan.decode.at + (decode.start * size_of::<AttentionWork>()) as u64, decode.len())?;
            }
            let at = plan.merges.at + (merges.start * size_of::<AttentionMerge>()) as u64;
            let grid = [merges.len(), (merge.num_heads as usize).div_ceil(MERGED_HEADS_PER_CTA), 1];
            // SAFETY: the merges name rows of the step and parts that were just written.
            unsafe { launch(driver, self.merge, grid, &AttentionMergeArgs { merges: at, ..*merge })? };
        }
        Ok(())
    }

    /// Positions, and rows of rope tables.
    pub fn positions(&self) -> [DevicePtr; 2] {
        [self.positions, self.rope_positions]
    }

    /// The lists of a KV group.
    pub fn group(&self, group: usize) -> GroupLists {
        self.groups[group]
    }

    /// Whether the keys of requests that decode are cut.
    pub fn splits(&self) -> bool {
        self.splits
    }
}

fn attention_kernel(family: &str, dtype: KvDType, head_dim: usize) -> Result<Kernel, CudaError> {
    match dtype {
        KvDType::F32 => Kernel::named(&format!("attention_f32{}", wide_suffix(head_dim))),
        dtype => Kernel::named(&format!("{family}_{}_d{head_dim}", kv_suffix(dtype))),
    }
}

/// What the names of kernels of f32, and of those that write the cache, end with for wide heads.
fn wide_suffix(head_dim: usize) -> &'static str {
    if head_dim > MAX_NARROW_HEAD_DIM { "_d512" } else { "" }
}

/// Norm of heads, rotation, write of K and V. Keys on the device are not changed: only the cache has them rotated.
pub fn rope_and_cache(
    driver: &Arc<dyn Driver>,
    lists: &StepLists,
    constants: &mut Constants,
    args: &RopeArgs<'_>,
) -> Result<(), CudaError> {
    let (spec, layer) = (args.cache.spec(), args.cache.layer(args.layer));
    let (num_tokens, head_dim) = (args.q.rows(), layer.shape.k_dim);
    let num_heads = args.q.cols() / head_dim;
    // Without any of its own, the kernel takes the heads of queries alone.
    let num_kv_heads = if args.kv.is_some() { layer.shape.num_kv_heads } else { 0 };
    if let Some((k, v)) = &args.kv {
        let v_cols = v.as_ref().expect("values beside keys").cols();
        assert_eq!([k.cols(), v_cols], [num_kv_heads * head_dim; 2], "columns of keys and values");
    }
    let of = |tensor: Option<&Tensor>| tensor.map_or((0, 0), |tensor| (device_at(tensor), tensor.cols()));
    let (k, k_stride) = of(args.kv.as_ref().map(|(k, _)| &**k));
    let (v, v_stride) = of(args.kv.as_ref().and_then(|(_, v)| v.as_deref()));
    let mut head_norm = |norm: Option<HeadNorm<'_>>, num_heads| -> Result<_, CudaError> {
        let Some(norm) = norm.filter(|norm| norm.span == NormSpan::Head) else { return Ok(HeadNormArgs::default()) };
        let NormParts { norm, stride, .. } = norm.parts(num_heads, head_dim);
        Ok(HeadNormArgs {
            weight: constants.of(driver, &norm.weight)?,
            bias: norm.bias.as_ref().map_or(Ok(0), |bias| constants.of(driver, bias))?,
            stride: stride as u32,
            has_mean: u32::from(norm.kind == NormKind::Layer),
            eps: norm.eps,
            reserved: 0,
        })
    };
    let q_norm = head_norm(args.q_norm, num_heads)?;
    let mut kv_norm = |norm: Option<HeadNorm<'_>>| head_norm(norm.filter(|_| num_kv_heads > 0), num_kv_heads);
    let (k_norm, v_norm) = (kv_norm(args.k_norm)?, kv_norm(args.v_norm)?);
    let table = |values: fn(&crate::RopeTable) -> &crate::Constant, constants: &mut Constants| {
        args.rope.map_or(Ok(0), |rope| constants.of(driver, values(rope)))
    };
    let (cos, sin) = (table(|rope| &rope.cos, constants)?, table(|rope| &rope.sin, constants)?);
    let LayerPlanes { k_plane, v_plane, block_stride } = blocks(args.cache).layer(spec, layer);
    let layout = spec.layout(&layer.shape, KvSide::Key, block_stride);
    let kernel_args = RopeAndCacheArgs {
        q: device_at(args.q),
        k,
        v,
        q_norm,
        k_norm,
        v_norm,
        cos,
        sin,
        rope_positions: lists.rope_positions,
        positions: lists.positions,
        slot_mapping: lists.groups[layer.group].slot_mapping,
        k_plane,
        v_plane,
        block_bytes: layout.block_stride as u64,
        scales_offset: layout.scales as u64,
        num_tokens: num_tokens as u32,
        num_heads: num_heads as u32,
        num_kv_heads: num_kv_heads as u32,
        head_dim: head_dim as u32,
        block_size: spec.block_size as u32,
        q_stride: args.q.cols() as u32,
        k_stride: k_stride as u32,
        v_stride: v_stride as u32,
        rotary_dim: args.rope.map_or(0, |rope| rope.rotary_dim) as u32,
        interleaved: u32::from(args.rope.is_some_and(|rope| rope.style == RopeStyle::Interleaved)),
        norms_last: u32::from(args.norms_last),
        scale_length: args.q_scale.map_or(0, |scale| scale.length),
        scale_offset: args.q_scale.map_or(0, |scale| scale.offset),
        scale_beta: args.q_scale.map_or(0.0, |scale| scale.beta),
    };
    let kernel = Kernel::named(&format!("rope_and_cache_{}{}", kv_suffix(spec.dtype), wide_suffix(head_dim)))?;
    let grid = [(num_tokens * (num_heads + 2 * num_kv_heads)).div_ceil(HEADS_PER_CTA), 1, 1];
    // SAFETY: q, k and v have a row for each token, and the tables a row for each position; slots lie in the planes.
    unsafe { launch(driver, kernel, grid, &kernel_args) }
}

fn device_at(tensor: &Tensor) -> DevicePtr {
    tensor.device::<DeviceMemory>().expect("a tensor of this backend").at()
}

/// Where a cache lies.
pub fn blocks(cache: &CacheEngine) -> &PlaneBlocks {
    cache.device().expect("a cache of this backend")
}

/// The kernels' number of an activation.
pub fn activation_kind(activation: Activation) -> u32 {
    (match activation {
        Activation::Silu => ActivationKind::Silu,
        Activation::GeluTanh => ActivationKind::GeluTanh,
        Activation::Gelu => ActivationKind::Gelu,
        Activation::Swish(_) => ActivationKind::Swish,
        Activation::Relu => ActivationKind::Relu,
        Activation::Relu2 => ActivationKind::Relu2,
        Activation::Xielu(_) => ActivationKind::Xielu,
    }) as u32
}

/// Requests whose parts are planned for; more of them at such lengths take more.
const PLANNED_REQUESTS: usize = 256;

/// Tokens of a block at least, as block tables are planned for.
const MIN_BLOCK_SIZE: usize = 8;

fn planned_requests(shape: &WorkspaceShape) -> usize {
    shape.num_tokens.min(PLANNED_REQUESTS)
}

/// Parts of a step in which many requests decode at their full length, padded as graphs do.
fn planned_parts(shape: &WorkspaceShape) -> usize {
    if shape.precision == Precision::Deterministic {
        return 0;
    }
    let parts = planned_requests(shape).next_power_of_two() * max_parts(shape.seq_len).next_power_of_two();
    parts.min(MAX_KEPT_PARTS)
}

/// Bytes of the lists of a step, and of the parts, in which many requests decode at their full length.
pub fn workspace_bytes(shape: &WorkspaceShape) -> u64 {
    let tables = planned_requests(shape) * shape.seq_len.div_ceil(MIN_BLOCK_SIZE) * size_of::<u32>();
    let rows = shape.num_tokens * (2 * size_of::<u32>() + size_of::<i64>());
    let parts = planned_parts(shape) * shape.num_heads * (shape.head_dim + 1) * size_of::<f32>();
    (parts + StepArena::bytes_of(tables + rows)) as u64
}

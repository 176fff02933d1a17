//! A decoder's steps on a GPU. Activations are f32; weights lie there packed for tensor cores or as in their file.
//!
//! Everything is asked for in one order and nothing waits, until [`Phases::fetch`] copies logits to the host. A phase cannot
//! return an error: what the driver refuses in a step is a panic with the driver's words, which ends the requests of that step.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{
    Adapter, AdapterRows, AttentionArgs, Backend, BackendInfo, BackendMemory, CacheEngine, DType, Device, DeviceError,
    DeviceSampler, ElementwisePhases, EmbedArgs, EmbeddingTable, ExpertPhases, GateUpArgs, HeadNorm, KvCacheSpec, KvDType,
    KvShape, LatentPhases, Linear, LinearOptions, Norm, NormSpan, Phases, Precision, Projection, RecurrentPhases, ResidualArgs,
    RopeArgs, RowSampling, SampledRow, StateCache, StepGraphs, StepMetadata, StepRecorder, StreamPhases, Tensor, WeightView,
    WorkspaceShape,
    cpu::pool::ThreadPool,
    kernel_args::{DevicePtr, ElementType, GatherRowsArgs},
};

use super::{
    CudaError, Gpu, GpuMemory,
    attention::{self, StepLists},
    dense::{self, Dense, Product},
    driver::{DeviceMemory, Driver},
    elementwise::NormPass,
    experts::{self, ExpertsState},
    graph,
    grouped::Groups,
    kernels::{Kernel, launch},
    kv_layers,
    latent::{self, LatentScratch},
    linear::{CudaLinear, Rows},
    lora::{self, Lora},
    memory::{Constants, RowNumbers, Scratch},
    packed::PackedFormat,
    planes::PlaneBlocks,
    recurrent::{self, Recurrence},
    sample::{self, Sampling},
};

/// How a GPU computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaOptions {
    /// Whether steps in which every request has few rows are recorded as CUDA graphs.
    pub graphs: bool,
    /// Whether the keys of a request that decodes are cut into parts, which other multiprocessors read meanwhile.
    pub splits_keys: bool,
    /// Bytes in bf16 of what is taken apart of a quantized weight at once.
    pub slice_bytes: usize,
}

impl Default for CudaOptions {
    fn default() -> Self {
        Self { graphs: true, splits_keys: true, slice_bytes: dense::SLICE_BYTES }
    }
}

/// Computes on one GPU.
pub struct CudaBackend {
    driver: Arc<dyn Driver>,
    options: CudaOptions,
    pub(super) kernels: Kernels,
    state: Mutex<State>,
    /// For what is left to the host; without it, the caller's thread does that.
    host: Option<ThreadPool>,
}

/// The kernels that every model needs.
pub(super) struct Kernels {
    pub(super) rms_norm: Kernel,
    pub(super) layer_norm: Kernel,
    pub(super) gated_activation: Kernel,
    pub(super) layer_inputs: Kernel,
    pub(super) scale_and_clamp: Kernel,
    gather_rows: Kernel,
}

/// What lives from step to step.
pub(super) struct State {
    pub(super) lists: StepLists,
    pub(super) constants: Constants,
    pub(super) groups: Groups,
    pub(super) dense: Dense,
    pub(super) experts: ExpertsState,
    pub(super) latent: LatentScratch,
    pub(super) lora: Lora,
    sampling: Sampling,
    row_numbers: RowNumbers,
    pub(super) recurrence: Recurrence,
    /// Normed rows, `[num_tokens, in_features]`.
    pub(super) normed: Scratch,
    /// A projection before it is added or gated, `[num_tokens, out_features]`.
    pub(super) projected: Scratch,
    /// The other half of a gated projection.
    pub(super) up: Scratch,
}

impl CudaBackend {
    /// A backend over a driver, which chooses everything itself.
    ///
    /// Errors: [`DeviceError::Cuda`] when the GPU is too old or a kernel is not there.
    pub fn new(driver: Arc<dyn Driver>) -> Result<Self, DeviceError> {
        Self::with(driver, CudaOptions::default())
    }

    /// The same with choices.
    pub fn with(driver: Arc<dyn Driver>, options: CudaOptions) -> Result<Self, DeviceError> {
        driver.gpu().check()?;
        let kernels = Kernels {
            rms_norm: Kernel::named("rms_norm")?,
            layer_norm: Kernel::named("layer_norm")?,
            gated_activation: Kernel::named("gated_activation")?,
            layer_inputs: Kernel::named("layer_inputs")?,
            scale_and_clamp: Kernel::named("scale_and_clamp")?,
            gather_rows: Kernel::named("gather_rows")?,
        };
        let state = State {
            lists: StepLists::new(&driver, options.splits_keys)?,
            constants: Constants::default(),
            groups: Groups::default(),
            dense: Dense::new(&driver, options.slice_bytes)?,
            experts: ExpertsState::new()?,
            latent: LatentScratch::default(),
            lora: Lora::new()?,
            sampling: Sampling::new()?,
            row_numbers: RowNumbers::default(),
            recurrence: Recurrence::new()?,
            normed: Scratch::default(),
            projected: Scratch::default(),
            up: Scratch::default(),
        };
        Ok(Self { driver, options, kernels, state: Mutex::new(state), host: None })
    }

    /// What it asks.
    pub(super) fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// Addresses that graphs know, 0 of what is not there yet, and a number that is not 0 and changes with those of constants.
    pub(super) fn buffers(&self) -> Vec<DevicePtr> {
        let mut state = self.state();
        let lost = state.constants.clear_lost() + state.groups.clear_lost() + 1;
        let own = [state.normed.at(), state.projected.at(), state.up.at(), state.recurrence.buffer(), lost];
        let State { dense, lists, experts, latent, lora, .. } = &mut *state;
        [&own[..], &dense.buffers(), &lists.buffers(), &experts.buffers(), &latent.buffers(), &lora.buffers()].concat()
    }

    /// With so many threads for what is left to the host: sampling.
    ///
    /// Errors: those of [`ThreadPool::new`].
    pub fn with_host_threads(self, num_threads: usize) -> Result<Self, DeviceError> {
        Ok(Self { host: Some(ThreadPool::new(num_threads)?), ..self })
    }

    /// The GPU that it computes on.
    pub fn gpu(&self) -> &Gpu {
        self.driver.gpu()
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// See [`Phases::begin_step`].
    pub(super) fn begin(&self, step: &StepMetadata) -> Result<(), CudaError> {
        let State { lists, lora, .. } = &mut *self.state();
        lists.begin(step)?;
        lora.begin(lists, &step.adapters).map(drop)
    }

    fn try_embed(&self, args: &EmbedArgs<'_>, out: &mut Tensor) -> Result<(), CudaError> {
        let count = args.token_ids.len();
        out.set_rows(count);
        match args.table {
            EmbeddingTable::Stored(_) => {
                assert!(!self.state().lists.are_fixed(), "rows of a file are the same in every step that was recorded");
                assert!(args.adapters.is_empty(), "adapters change a table that was loaded");
                crate::cpu::embed_on_host(args, out, &|_, _, _| unreachable!("rows of a file"));
                device(out).upload(0, out.as_slice())
            }
            EmbeddingTable::Loaded(linear) => {
                let rows_there = args.token_ids.iter().chain(&args.beyond).all(|id| args.row(*id) < linear.out_features);
                assert!(rows_there, "token ids of the vocabulary");
                assert_eq!(linear.in_features, out.cols(), "columns of the output");
                let State { lists, lora, .. } = &mut *self.state();
                let (ids, at) = (lists.token_ids(args.token_ids)?, device(out).at());
                // SAFETY: the ids are checked, here or where they are put among the lists of a step that was recorded; `out` has
                // a row for each and the width of the table.
                unsafe {
                    cuda(linear).embed(&self.driver, (ids, count), args.beyond.unwrap_or(0), at, args.scale)?;
                    if args.beyond.is_none() { lora.embed(&self.driver, ids, rows(out), args.scale) } else { Ok(()) }
                }
            }
        }
    }

    fn try_sample(
        &self,
        logits: &Tensor,
        sampling: &[Option<RowSampling<'_>>],
        num_top: usize,
    ) -> Result<Vec<Option<SampledRow>>, CudaError> {
        assert_eq!(sampling.len(), logits.rows(), "rows of logits");
        let masks = sampling.iter().flatten().filter_map(|row| row.mask);
        assert!(
            masks.into_iter().all(|mask| mask.vocab_size() == logits.cols()),
            "a mask of other than {} tokens",
            logits.cols()
        );
        let mut state = self.state();
        // SAFETY: the logits are a tensor of their shape, and masks have a bit for each column.
        unsafe { state.sampling.sample(&self.driver, rows(logits), sampling, num_top) }
    }

    fn try_gather_rows(&self, x: &Tensor, indices: &[u32], out: &mut Tensor) -> Result<(), CudaError> {
        assert!(indices.iter().all(|row| (*row as usize) < x.rows()) && x.cols() == out.cols(), "rows of the input");
        assert_eq!(x.element(), ElementType::F32, "rows that are gathered");
        out.set_rows(indices.len());
        let State { lists, row_numbers, .. } = &mut *self.state();
        // In a step in which every request decodes, all rows: nothing is copied behind the layers.
        let rows = match row_numbers.of(&self.driver, indices)? {
            Some(rows) => rows,
            None => lists.put(indices)?,
        };
        let args = GatherRowsArgs {
            x: device(x).at(),
            rows,
            out: device(out).at(),
            num_rows: indices.len() as u32,
            cols: x.cols() as u32,
        };
        // SAFETY: the indices are checked; `out` has a row for each.
        unsafe { launch(&self.driver, self.kernels.gather_rows, [indices.len(), 1, 1], &args) }
    }
}

/// Values of [`State::normed`], [`State::projected`] and [`State::up`] in the largest step.
fn planned_floats(shape: &WorkspaceShape) -> [usize; 3] {
    let gated = if shape.gated { shape.intermediate_size } else { 0 };
    [shape.hidden_size, shape.hidden_size.max(gated), gated].map(|cols| shape.num_tokens * cols)
}

/// The tensor's memory on the device.
pub(super) fn device(tensor: &Tensor) -> &DeviceMemory {
    tensor.device().expect("a tensor of this backend")
}

/// The rows in use.
pub(super) fn rows(tensor: &Tensor) -> Rows {
    Rows { at: device(tensor).at(), count: tensor.rows(), cols: tensor.cols(), element: tensor.element() }
}

/// The weight on the device.
pub(super) fn cuda(linear: &Linear) -> &CudaLinear {
    linear.weight()
}

/// The product alone.
pub(super) fn plain(linear: &Linear, out: DevicePtr) -> Product<'_> {
    Product { linear: cuda(linear), out, scale: 1.0, accumulate: false, site: linear.site }
}

/// A phase cannot return what the driver refuses.
pub(super) fn done(result: Result<(), CudaError>) {
    result.unwrap_or_else(|error| panic!("{error}"));
}

impl Backend for CudaBackend {
    fn recurrent_phases(&self) -> Option<&dyn RecurrentPhases> {
        Some(self)
    }

    fn expert_phases(&self) -> Option<&dyn ExpertPhases> {
        Some(self)
    }

    fn sees_ahead(&self) -> bool {
        true
    }

    fn sampler(&self) -> Option<&dyn DeviceSampler> {
        Some(self)
    }

    fn latent_phases(&self) -> Option<&dyn LatentPhases> {
        Some(self)
    }

    fn stream_phases(&self) -> Option<&dyn StreamPhases> {
        Some(self)
    }

    fn elementwise_phases(&self) -> Option<&dyn ElementwisePhases> {
        Some(self)
    }

    fn recorder(&self) -> Option<&dyn StepRecorder> {
        self.options.graphs.then_some(self)
    }
}

impl Device for CudaBackend {
    fn info(&self) -> BackendInfo {
        BackendInfo {
            device: "cuda".into(),
            isa: self.gpu().name.clone(),
            num_threads: self.host.as_ref().map_or(1, ThreadPool::num_threads),
        }
    }

    fn alloc(&self, max_rows: usize, cols: usize) -> Result<Tensor, DeviceError> {
        let overflow = || DeviceError::Shape(format!("[{max_rows}, {cols}] values overflow"));
        let bytes = max_rows.checked_mul(cols).and_then(|len| len.checked_mul(size_of::<f32>())).ok_or_else(overflow)?;
        Tensor::on_device(max_rows, cols, Box::new(DeviceMemory::zeroed(&self.driver, bytes)?))
    }

    fn memory(&self) -> Result<BackendMemory, DeviceError> {
        let GpuMemory { total_bytes, free_bytes } = self.driver.memory()?;
        Ok(BackendMemory { total_bytes, available_bytes: free_bytes, is_host: false })
    }

    fn check(&self) -> Result<(), DeviceError> {
        // After an error that a device does not recover from, the driver answers every question with it.
        match self.driver.memory() {
            Err(error @ CudaError::Lost { .. }) => Err(error.into()),
            _ => Ok(()),
        }
    }

    fn check_kv_layer(&self, dtype: KvDType, shape: KvShape, queries_per_kv: usize) -> Result<(), DeviceError> {
        kv_layers::check(dtype, shape, queries_per_kv)
    }

    fn alloc_kv_cache(&self, spec: &KvCacheSpec) -> Result<CacheEngine, DeviceError> {
        let mut shapes = spec.layers.iter().map(|layer| layer.shape).filter(|shape| *shape != KvShape::NONE);
        shapes.try_for_each(|shape| kv_layers::check(spec.dtype, shape, 1))?;
        CacheEngine::on_device(spec, |block_bytes| Ok(PlaneBlocks::new(&self.driver, spec, block_bytes)?))
    }

    fn alloc_states(&self, num_slots: usize, lens: &[usize]) -> Result<StateCache, DeviceError> {
        self.new_states(num_slots, lens)
    }

    fn load_linear(&self, weight: &WeightView, options: &LinearOptions) -> Result<Linear, DeviceError> {
        let num_threads = self.host.as_ref().map_or(1, ThreadPool::num_threads);
        let linear = CudaLinear::new(&self.driver, weight, options, num_threads)?;
        Ok(Linear::new([weight.rows, weight.cols], linear.bytes() as u64, false, Arc::new(linear)))
    }

    fn linear_bytes(&self, dtype: DType, [rows, cols]: [usize; 2], precision: Precision) -> u64 {
        let bytes = match PackedFormat::of(dtype, precision) {
            Some(format) => format.bytes([rows, cols]),
            None => dtype.row_bytes(cols).unwrap_or(0) * rows,
        };
        bytes.next_multiple_of(16) as u64
    }

    fn loads_tables(&self) -> bool {
        true
    }

    fn takes_adapters(&self) -> bool {
        true
    }

    fn load_adapter(&self, adapter: Adapter) -> Result<Adapter, DeviceError> {
        lora::load(&self.driver, &adapter)
    }

    fn read_rows(&self, linear: &Linear, first: usize, out: &mut [f32]) -> Result<(), DeviceError> {
        Ok(cuda(linear).read_rows(&self.driver, first, out)?)
    }

    fn workspace_bytes(&self, shape: &WorkspaceShape) -> u64 {
        let floats: usize = planned_floats(shape).iter().sum();
        (floats * size_of::<f32>() + recurrent::workspace_bytes(shape)) as u64
            + attention::workspace_bytes(shape)
            + experts::workspace_bytes(shape)
            + latent::workspace_bytes(shape)
            + sample::workspace_bytes(shape)
            + self.state().dense.workspace_bytes(shape)
    }

    fn plan_workspaces(&self, shape: &WorkspaceShape) {
        let State { lists, dense, experts, latent, lora, sampling, recurrence, normed, projected, up, .. } = &mut *self.state();
        for (scratch, floats) in [normed, projected, up].into_iter().zip(planned_floats(shape)) {
            scratch.plan(floats * size_of::<f32>());
        }
        lists.plan_parts(shape);
        dense.plan(shape);
        experts.plan(shape);
        latent.plan(shape);
        lora.plan(shape);
        sampling.plan(shape);
        recurrence.plan(shape);
    }

    fn graph_bytes(&self) -> u64 {
        if self.options.graphs { graph::RESERVED_BYTES } else { 0 }
    }

    fn for_each(&self, len: usize, body: &(dyn Fn(usize) + Sync)) {
        match &self.host {
            Some(pool) => pool.for_each_range(len, 1, &|start, end| (start..end).for_each(body)),
            None => (0..len).for_each(body),
        }
    }
}

impl StepRecorder for CudaBackend {
    fn begin_recorded(
        &self,
        graphs: &mut StepGraphs,
        token_ids: &[u32],
        step: &StepMetadata,
        run: &mut dyn FnMut(&[u32], &StepMetadata),
    ) -> bool {
        self.try_begin_recorded(graphs, token_ids, step, run).unwrap_or_else(|error| panic!("{error}"))
    }

    fn replay(&self, graphs: &mut StepGraphs) {
        done(self.try_replay(graphs));
    }
}

impl DeviceSampler for CudaBackend {
    fn sample(&self, logits: &Tensor, rows: &[Option<RowSampling<'_>>], num_top: usize) -> Vec<Option<SampledRow>> {
        self.try_sample(logits, rows, num_top).unwrap_or_else(|error| panic!("{error}"))
    }
}

impl Phases for CudaBackend {
    fn begin_step(&self, step: &StepMetadata) {
        done(self.begin(step));
    }

    fn logits(&self, x: &Tensor, norm: Option<&Norm>, lm_head: &Linear, adapters: &[AdapterRows], logits: &mut Tensor) {
        // Their rows have other numbers than those of the step.
        let begin = || {
            let State { lists, lora, .. } = &mut *self.state();
            lora.begin(lists, adapters)
        };
        let before = begin().unwrap_or_else(|error| panic!("{error}"));
        done(self.try_norm_linear(x, norm, &mut [Projection { linear: lm_head, out: logits }]));
        self.state().lora.go_back(before);
    }

    fn embed(&self, args: &EmbedArgs<'_>, out: &mut Tensor) {
        done(self.try_embed(args, out));
    }

    fn norm_linear(&self, x: &Tensor, norm: Option<&Norm>, projections: &mut [Projection<'_>], _: &StepMetadata) {
        done(self.try_norm_linear(x, norm, projections));
    }

    fn rope_and_cache(&self, args: RopeArgs<'_>, step: &StepMetadata) {
        let State { lists, constants, .. } = &mut *self.state();
        assert_eq!(step.num_reqs(), lists.num_reqs(), "the step that was begun");
        let row_norm = |norm: Option<HeadNorm<'_>>, x: &Tensor, constants: &mut Constants| match norm {
            Some(norm) if norm.span == NormSpan::Row => {
                let (norm, x) = (Some(norm.parts(1, x.cols()).norm), rows(x));
                self.norm_pass(constants, x, &NormPass { norm, out: x.at, ..NormPass::default() })
            }
            _ => Ok(()),
        };
        done(row_norm(args.q_norm, args.q, constants));
        if let Some((k, _)) = &args.kv {
            done(row_norm(args.k_norm, k, constants));
        }
        done(attention::rope_and_cache(&self.driver, lists, constants, &args));
    }

    fn attention(&self, args: AttentionArgs<'_>, step: &StepMetadata) {
        let state = &mut *self.state();
        let element = state.next_element(args.next, args.q.rows());
        args.out.set_rows(args.q.rows());
        args.out.set_element(element);
        done(state.lists.attention(&self.driver, &mut state.constants, args, step));
    }

    fn linear_residual(&self, args: ResidualArgs<'_>, _: &StepMetadata) {
        done(self.try_linear_residual(&args));
    }

    fn gate_up(&self, mut args: GateUpArgs<'_>, _: &StepMetadata) {
        done(self.try_gate_up(&mut args));
    }

    fn gather_rows(&self, x: &Tensor, rows: &[u32], out: &mut Tensor) {
        done(self.try_gather_rows(x, rows, out));
    }

    fn fetch_rows(&self, x: &mut Tensor, rows: &[usize]) {
        done(download_rows(x, rows));
    }

    fn fetch(&self, x: &mut Tensor) {
        assert_eq!(x.element(), ElementType::F32, "rows that the host reads");
        done(x.device_and_copy::<DeviceMemory>().map_or(Ok(()), |(memory, copy)| memory.download(0, copy)));
    }

    fn store(&self, x: &mut Tensor) {
        x.set_element(ElementType::F32);
        done(x.device_and_copy::<DeviceMemory>().map_or(Ok(()), |(memory, copy)| memory.upload(0, copy)));
    }

    fn store_rows(&self, x: &mut Tensor, rows: &[usize]) {
        done(upload_rows(x, rows));
    }
}

/// Copies some of the rows from the host, those that follow each other at once; nothing for a tensor that is there.
fn upload_rows(x: &mut Tensor, rows: &[usize]) -> Result<(), CudaError> {
    let cols = x.cols();
    let Some((memory, copy)) = x.device_and_copy::<DeviceMemory>() else { return Ok(()) };
    rows.chunk_by(|a, b| a + 1 == *b).try_for_each(|rows| {
        let (first, end) = (rows[0] * cols, (rows[rows.len() - 1] + 1) * cols);
        memory.upload(first * size_of::<f32>(), &copy[first..end])
    })
}

/// Copies some of the rows to the host; nothing for a tensor that is there.
fn download_rows(x: &mut Tensor, rows: &[usize]) -> Result<(), CudaError> {
    let cols = x.cols();
    let Some((memory, copy)) = x.device_and_copy::<DeviceMemory>() else { return Ok(()) };
    let row_bytes = cols * size_of::<f32>();
    rows.iter().try_for_each(|row| memory.download(row * row_bytes, &mut copy[row * cols..(row + 1) * cols]))
}

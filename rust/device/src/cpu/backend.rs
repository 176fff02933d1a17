//! The fast CPU backend.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::{
    Activation, AdapterRows, AttentionArgs, Backend, BackendInfo, CacheEngine, DType, Device, DeviceError, ElementwisePhases,
    EmbedArgs, EmbeddingTable, ExpertArgs, ExpertPhases, GateActivation, GateUpArgs, KvCacheSpec, LatentArgs, LatentPhases,
    Linear, LinearOptions, Norm, Phases, Precision, Projection, RecurrentArgs, RecurrentPhases, ResidualArgs, RopeArgs,
    StepMetadata, StreamPhases, Tensor, TokenMask, WeightView, WorkspaceShape, recurrent::gate_group,
};

use super::{
    CpuLinear, Isa, ThreadPool,
    attention::{AttentionScratch, BLOCK_SIZES, attention, workspace_bytes as attention_workspace_bytes},
    latent::{self, LatentScratch},
    linear::{
        self, ExpertScratch, LinearContext, LinearScratch,
        elementwise::{activate_row, attention_gate, gate_row, normed_row},
    },
    recurrent::{self, RecurrentScratch},
    reference,
    rope::rope_and_cache,
};

/// Rows of a norm that a thread takes at once.
const NORMED_ROWS: usize = 16;

/// The fast CPU backend: a persistent thread pool and the kernels of one instruction set. Its buffers live from step to step.
pub struct CpuBackend {
    isa: Isa,
    pool: ThreadPool,
    linear: Mutex<LinearScratch>,
    experts: Mutex<ExpertScratch>,
    latent: Mutex<LatentScratch>,
    recurrent: Mutex<RecurrentScratch>,
    attention: AttentionScratch,
}

impl CpuBackend {
    /// A backend with `num_threads` workers (1 to 1024; [`crate::num_physical_cores`] is a good number).
    ///
    /// Errors: [`DeviceError::Unsupported`] when the machine does not have `isa` or `num_threads` is out of range,
    /// [`DeviceError::Io`] when a thread cannot start.
    pub fn new(isa: Isa, num_threads: usize) -> Result<Self, DeviceError> {
        let isa = Isa::parse(isa.name())?;
        let pool = ThreadPool::new(num_threads)?;
        let attention = AttentionScratch::new(pool.num_threads());
        Ok(Self {
            isa,
            pool,
            linear: Mutex::default(),
            experts: Mutex::default(),
            latent: Mutex::default(),
            recurrent: Mutex::default(),
            attention,
        })
    }

    /// Its workers, for what is measured beside it: those of another pool would be asleep, or in their way.
    pub fn pool(&self) -> &ThreadPool {
        &self.pool
    }

    fn linear<'a>(&'a self, adapters: &'a [AdapterRows]) -> (LinearContext<'a>, MutexGuard<'a, LinearScratch>) {
        let context = LinearContext { pool: &self.pool, isa: self.isa, adapters };
        (context, self.linear.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Backend for CpuBackend {
    fn sees_ahead(&self) -> bool {
        true
    }

    fn expert_phases(&self) -> Option<&dyn ExpertPhases> {
        Some(self)
    }

    fn latent_phases(&self) -> Option<&dyn LatentPhases> {
        Some(self)
    }

    fn elementwise_phases(&self) -> Option<&dyn ElementwisePhases> {
        Some(self)
    }

    fn stream_phases(&self) -> Option<&dyn StreamPhases> {
        Some(self)
    }

    fn recurrent_phases(&self) -> Option<&dyn RecurrentPhases> {
        Some(self)
    }
}

impl RecurrentPhases for CpuBackend {
    fn recurrent(&self, args: RecurrentArgs<'_>, step: &StepMetadata) {
        let (context, mut linear) = self.linear(&step.adapters);
        let mut scratch = self.recurrent.lock().unwrap_or_else(PoisonError::into_inner);
        recurrent::recurrent(context, &mut linear, &mut scratch, args, step);
    }

    fn gate(&self, x: &mut Tensor, gate: &Tensor, activation: GateActivation) {
        gate_group(x, gate);
        attention_gate(self.isa, x.as_mut_slice(), gate.as_slice(), activation);
    }
}

impl StreamPhases for CpuBackend {}

impl ElementwisePhases for CpuBackend {
    fn normed(&self, x: &mut Tensor, norm: &Norm, activation: Option<Activation>) {
        let cols = x.cols();
        // Each row is one thread's, so nobody waits.
        let rows: Vec<_> = x.as_mut_slice().chunks_exact_mut(cols).map(Mutex::new).collect();
        self.pool.for_each_range(rows.len(), NORMED_ROWS, &|start, end| {
            for row in &rows[start..end] {
                let mut row = row.lock().unwrap_or_else(PoisonError::into_inner);
                normed_row(self.isa, norm, &mut row);
                if let Some(activation) = activation {
                    activate_row(self.isa, activation, &mut row);
                }
            }
        });
    }

    fn add_positions(&self, x: &mut Tensor, table: EmbeddingTable<'_>, step: &StepMetadata) {
        let loaded_row = |linear: &Linear, row: usize, out: &mut [f32]| linear.weight::<CpuLinear>().row(row, out);
        reference::add_positions(x, table, &step.rope_positions, &loaded_row);
    }

    fn gated(&self, activation: Activation, gate: &mut Tensor, up: &Tensor) {
        gate_row(self.isa, activation, gate.as_mut_slice(), up.as_slice());
    }
}

impl LatentPhases for CpuBackend {
    fn latent_attention(&self, args: LatentArgs<'_>, step: &StepMetadata) {
        let (context, mut linear) = self.linear(&step.adapters);
        let mut scratch = self.latent.lock().unwrap_or_else(PoisonError::into_inner);
        latent::latent_attention(context, &mut linear, &self.attention, &mut scratch, args, step);
    }
}

impl ExpertPhases for CpuBackend {
    fn experts(&self, args: ExpertArgs<'_>, step: &StepMetadata) {
        let (context, mut linear) = self.linear(&step.adapters);
        let mut scratch = self.experts.lock().unwrap_or_else(PoisonError::into_inner);
        linear::experts(context, &mut linear, &mut scratch, args);
    }
}

impl Device for CpuBackend {
    fn prefers_bf16_cache(&self) -> bool {
        self.isa.dots_bf16()
    }

    fn info(&self) -> BackendInfo {
        let bf16 = if self.isa == Isa::Avx512 && self.isa.multiplies_bf16() { "+bf16" } else { "" };
        let isa = format!("{}{bf16}", self.isa.name());
        BackendInfo { device: "cpu".into(), isa, num_threads: self.pool.num_threads() }
    }

    fn alloc(&self, max_rows: usize, cols: usize) -> Result<Tensor, DeviceError> {
        Tensor::new(max_rows, cols)
    }

    fn alloc_kv_cache(&self, spec: &KvCacheSpec) -> Result<CacheEngine, DeviceError> {
        if !BLOCK_SIZES.contains(&spec.block_size) {
            return Err(DeviceError::Shape(format!("blocks of {} tokens; attention takes 8, 16 or 32", spec.block_size)));
        }
        spec.layers.iter().try_for_each(|layer| self.check_kv_layer(spec.dtype, layer.shape, 1))?;
        CacheEngine::new(spec)
    }

    fn load_linear(&self, weight: &WeightView, options: &LinearOptions) -> Result<Linear, DeviceError> {
        Ok(CpuLinear::new(weight, options, self.isa, &self.pool)?.into())
    }

    fn load_lm_head(&self, weight: &WeightView, options: &LinearOptions) -> Result<Linear, DeviceError> {
        Ok(CpuLinear::lm_head(weight, options, self.isa, &self.pool)?.into())
    }

    fn linear_bytes(&self, dtype: DType, shape: [usize; 2], precision: Precision) -> u64 {
        linear::resident_bytes(dtype, shape, precision, self.isa)
    }

    fn lm_head_bytes(&self, dtype: DType, shape: [usize; 2], precision: Precision) -> u64 {
        linear::lm_head_bytes(dtype, shape, precision, self.isa)
    }

    fn takes_adapters(&self) -> bool {
        true
    }

    fn read_rows(&self, linear: &Linear, first: usize, out: &mut [f32]) -> Result<(), DeviceError> {
        let rows = out.chunks_exact_mut(linear.in_features).zip(first..);
        rows.for_each(|(out, row)| linear.weight::<CpuLinear>().row(row, out));
        Ok(())
    }

    fn trim(&self) {
        linear::trim();
    }

    fn workspace_bytes(&self, shape: &WorkspaceShape) -> u64 {
        let threads = self.pool.num_threads();
        linear::workspace_bytes(shape, self.isa, threads)
            + linear::expert_workspace_bytes(shape)
            + latent::workspace_bytes(shape)
            + recurrent::workspace_bytes(shape)
            + attention_workspace_bytes(shape, self.isa, threads)
    }

    fn for_each(&self, len: usize, body: &(dyn Fn(usize) + Sync)) {
        self.pool.for_each_range(len, 1, &|start, end| (start..end).for_each(body));
    }
}

impl Phases for CpuBackend {
    fn embed(&self, args: &EmbedArgs<'_>, out: &mut Tensor) {
        reference::embed(args, out, &|linear, row, out| linear.weight::<CpuLinear>().row(row, out));
    }

    fn norm_linear(&self, x: &Tensor, norm: Option<&Norm>, projections: &mut [Projection<'_>], step: &StepMetadata) {
        let (context, mut scratch) = self.linear(&step.adapters);
        linear::norm_linear(context, &mut scratch, x, norm, projections);
    }

    fn greedy_tokens(
        &self,
        x: &Tensor,
        norm: Option<&Norm>,
        lm_head: &Linear,
        masks: &[Option<TokenMask<'_>>],
        tokens: &mut Vec<u32>,
    ) -> bool {
        let (context, mut scratch) = self.linear(&[]);
        linear::greedy_tokens(context, &mut scratch, x, norm, lm_head, masks, tokens)
    }

    fn rope_and_cache(&self, args: RopeArgs<'_>, step: &StepMetadata) {
        rope_and_cache(args, step, self.isa, &self.pool);
    }

    fn attention(&self, args: AttentionArgs<'_>, step: &StepMetadata) {
        attention(args, step, self.isa, &self.pool, &self.attention);
    }

    fn linear_residual(&self, args: ResidualArgs<'_>, step: &StepMetadata) {
        let (context, mut scratch) = self.linear(&step.adapters);
        linear::linear_residual(context, &mut scratch, args);
    }

    fn gate_up(&self, args: GateUpArgs<'_>, step: &StepMetadata) {
        let (context, mut scratch) = self.linear(&step.adapters);
        linear::gate_up(context, &mut scratch, args);
    }

    fn gather_rows(&self, x: &Tensor, rows: &[u32], out: &mut Tensor) {
        reference::gather_rows(x, rows, out);
    }
}

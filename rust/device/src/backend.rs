//! The operations of a decoder step, at the grain of one fused phase.
//!
//! A decoder layer is six calls: [`Phases::norm_linear`] (norm and q, k, v), [`Phases::rope_and_cache`],
//! [`Phases::attention`], [`Phases::linear_residual`], [`Phases::gate_up`], [`Phases::linear_residual`].
//! Shapes are `[rows, cols]`, row-major; `num_tokens` is the number of rows of the step.
//!
//! A backend is a [`Device`], whose memory holds weights and the KV storage, and the [`Phases`] that run there. What only some
//! can do is asked for: [`Backend::sampler`], [`Backend::recorder`]. Nothing here names a backend that exists: weights, tensors
//! and recorded steps are [`Any`] to everyone else.

use std::{any::Any, sync::Arc};

use crate::{
    Adapter, AdapterRows, AttentionArgs, CacheEngine, DType, DeviceError, ElementwisePhases, ExpertPhases, HostMemory,
    KvCacheSpec, KvDType, KvShape, LatentPhases, RecurrentPhases, RopeArgs, RowSampling, SampledRow, StateCache, StreamPhases,
    Tensor, TokenMask, WeightView, host_memory,
};

/// How exactly a linear layer computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// Float weights and activations; every output is summed over K in one fixed order whatever the batch, chunk or split.
    Exact,
    /// The fastest: activations as integers with a scale for 32 on quantized weights; on float weights as f32, or both as bf16
    /// where the processor multiplies those faster; with AMX-FP16 float weights are f16. With AMX many rows as f16 or bf16, which
    /// gives other bits than few.
    Fast,
    /// As fast, where a row keeps its bits whatever the number of rows: with AMX few rows are multiplied as many are.
    Deterministic,
}

/// What to know when a weight is loaded.
#[derive(Clone, Debug)]
pub struct LinearOptions {
    /// The tensor's name, for errors.
    pub name: String,
    /// Exact or fast.
    pub precision: Precision,
    /// Added to every output row, `[out_features]`.
    pub bias: Option<Vec<f32>>,
}

/// A weight matrix `[out_features, in_features]` in the form its backend computes with.
#[derive(Clone)]
pub struct Linear {
    /// Rows of the weight.
    pub out_features: usize,
    /// Columns of the weight.
    pub in_features: usize,
    /// Which of a model's layers it is to adapters; `None`: none that they may change.
    pub site: Option<u32>,
    bytes: u64,
    is_in_place: bool,
    weight: Arc<dyn Any + Send + Sync>,
}

impl Linear {
    /// What a backend made of a weight `[out_features, in_features]`. `bytes` and `is_in_place`: see the methods of these names.
    pub fn new(
        [out_features, in_features]: [usize; 2],
        bytes: u64,
        is_in_place: bool,
        weight: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self { out_features, in_features, site: None, bytes, is_in_place, weight }
    }

    /// Bytes of weight and bias as they are kept, those of the file where it is used in place.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether it is multiplied as it lies in its file, whose pages it needs.
    pub fn is_in_place(&self) -> bool {
        self.is_in_place
    }

    /// Which weight it is: of clones the same, and of no meaning once the last of them is gone.
    pub fn id(&self) -> usize {
        Arc::as_ptr(&self.weight).cast::<()>() as usize
    }

    /// What its backend made of it, of whatever type, shared by its clones.
    pub(crate) fn shared(&self) -> &Arc<dyn Any + Send + Sync> {
        &self.weight
    }

    /// What its backend made of it.
    ///
    /// # Panics
    /// When that is no `T`: another backend loaded it.
    pub fn weight<T: Any>(&self) -> &T {
        self.weight.downcast_ref().expect("a weight of this backend, and another one loaded it")
    }
}

/// The bias of a weight of so many rows has a value for each.
///
/// Errors: [`DeviceError::Shape`].
pub(crate) fn check_bias(weight: &WeightView, options: &LinearOptions) -> Result<(), DeviceError> {
    match &options.bias {
        Some(bias) if bias.len() != weight.rows => {
            let (name, have, rows) = (&options.name, bias.len(), weight.rows);
            Err(DeviceError::Shape(format!("the bias of `{name}` has {have} values, its weight has {rows} rows")))
        }
        _ => Ok(()),
    }
}

/// Which normalisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// x / sqrt(mean(x^2) + eps) * weight.
    Rms,
    /// (x - mean) / sqrt(var + eps) * weight + bias.
    Layer,
}

/// Values that a model keeps; shared, so that a backend may know a copy of its own as one of them.
pub type Constant = Arc<Vec<f32>>;

/// A normalisation over the last axis.
#[derive(Clone, Debug)]
pub struct Norm {
    /// RMS or layer norm.
    pub kind: NormKind,
    /// `[dim]`; what a format stores as `1 + w` is already added.
    pub weight: Constant,
    /// `[dim]`, layer norm only.
    pub bias: Option<Constant>,
    /// Added to the mean square.
    pub eps: f32,
}

/// Activation function of the feed-forward gate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// x * sigmoid(x).
    Silu,
    /// tanh approximation of GELU.
    GeluTanh,
    /// GELU by the error function.
    Gelu,
    /// x * sigmoid(beta x) (arXiv:1710.05941); with 1.702 CLIP's approximation of GELU.
    Swish(f32),
    /// max(x, 0).
    Relu,
    /// max(x, 0)^2 (arXiv:2109.08668).
    Relu2,
    /// Of numbers of its own.
    Xielu(Xielu),
}

/// xIELU (arXiv:2411.13010): positive * x^2 + linear * x for x > 0, else
/// negative * (e^min(x, eps) - 1 - x) + linear * x.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Xielu {
    /// Of the square.
    pub positive: f32,
    /// Of the exponential.
    pub negative: f32,
    /// On both sides.
    pub linear: f32,
    /// The largest exponent.
    pub eps: f32,
}

/// One output of [`Phases::norm_linear`]: `out = norm(x) @ weight^T + bias`.
pub struct Projection<'a> {
    /// `[out_features, in_features]`.
    pub linear: &'a Linear,
    /// `[num_tokens, out_features]`.
    pub out: &'a mut Tensor,
}

/// Where the rows of the token embedding lie.
#[derive(Clone, Copy)]
pub enum EmbeddingTable<'a> {
    /// In their file, from which the host reads them.
    Stored(&'a WeightView),
    /// In a weight that the backend has loaded, in whatever form that has: a table of its own where it loads them
    /// ([`Device::loads_tables`]), or the output projection's, whose one copy serves both.
    Loaded(&'a Linear),
}

/// Arguments of [`Phases::embed`].
pub struct EmbedArgs<'a> {
    /// `[vocab_size, hidden_size]`.
    pub table: EmbeddingTable<'a>,
    /// `[num_tokens]`, each below `vocab_size` unless there is something else for them.
    pub token_ids: &'a [u32],
    /// What ids of `vocab_size` and more stand for, in a table beside the token embedding. Adapters do not change such a table.
    pub beyond: Option<u32>,
    /// The rows with adapters.
    pub adapters: &'a [AdapterRows],
    /// Multiplied into every value (gemma: the square root of `hidden_size`).
    pub scale: f32,
}

impl EmbedArgs<'_> {
    /// The row of a token.
    pub fn row(&self, id: u32) -> usize {
        let vocab_size = match self.table {
            EmbeddingTable::Stored(table) => table.rows,
            EmbeddingTable::Loaded(linear) => linear.out_features,
        };
        (if id as usize >= vocab_size { self.beyond.unwrap_or(id) } else { id }) as usize
    }
}

/// Where the rows of a step lie, the same for all layers.
///
/// Rows of one request are contiguous: request r has rows `query_start_loc[r]..query_start_loc[r + 1]`.
#[derive(Clone, Debug, Default)]
pub struct StepMetadata {
    /// Position of each row in its request, `[num_tokens]`.
    pub positions: Vec<u32>,
    /// Row of each row in the tables of positions, of rotations or of vectors that are added: its position, or a number made of
    /// it where a model keeps several tables in one, `[num_tokens]`.
    pub rope_positions: Vec<u32>,
    /// Prefix sums of query lengths, `[num_reqs + 1]`.
    pub query_start_loc: Vec<u32>,
    /// KV length seen by attention (computed + scheduled), `[num_reqs]`.
    pub seq_lens: Vec<u32>,
    /// One more than the position of the last key that each row sees under [`Mask::Spans`](crate::Mask): that of its own, or of
    /// the span that it belongs to, which the step has whole, `[num_tokens]`; empty: no row belongs to one.
    pub span_ends: Vec<u32>,
    /// One entry a KV group.
    pub groups: Vec<KvGroupMetadata>,
    /// Slot of each request in the [`StateCache`](crate::StateCache), `[num_reqs]`; empty for models without.
    pub state_slots: Vec<u32>,
    /// The rows with adapters, where the backend takes them ([`Device::takes_adapters`]).
    pub adapters: Vec<AdapterRows>,
}

/// Block tables and slots of one KV group.
#[derive(Clone, Debug, Default)]
pub struct KvGroupMetadata {
    /// `[num_reqs, max_blocks]`, physical block ids; entries out of the window are 0 and are never read.
    pub block_tables: Vec<u32>,
    /// Row stride of `block_tables`.
    pub max_blocks: usize,
    /// Where each row's K and V are written: `block_id * block_size + offset`, -1 = skip, `[num_tokens]`.
    pub slot_mapping: Vec<i64>,
}

impl StepMetadata {
    /// Number of requests of the step.
    pub fn num_reqs(&self) -> usize {
        self.seq_lens.len()
    }
}

/// Arguments of [`Phases::linear_residual`]: `residual += post_norm(x @ weight^T + bias) * scale`.
pub struct ResidualArgs<'a> {
    /// `[num_tokens, in_features]`.
    pub x: &'a Tensor,
    /// The projection.
    pub linear: &'a Linear,
    /// Applied before the addition (gemma's sandwich norm).
    pub post_norm: Option<&'a Norm>,
    /// Multiplied in before the addition (granite), else 1.
    pub scale: f32,
    /// `[num_tokens, out_features]`.
    pub residual: &'a mut Tensor,
}

/// Arguments of [`Phases::gate_up`]: `out = activation(norm(x) @ gate^T) * (norm(x) @ up^T)`, or without a gate
/// `out = activation(norm(x) @ up^T)`; biases are added to the products.
pub struct GateUpArgs<'a> {
    /// `[num_tokens, hidden_size]`.
    pub x: &'a Tensor,
    /// Applied to `x` first.
    pub norm: Option<&'a Norm>,
    /// `[intermediate_size, hidden_size]`; `None`: the network is not gated.
    pub gate: Option<&'a Linear>,
    /// `[intermediate_size, hidden_size]`.
    pub up: &'a Linear,
    /// Of the gate, or of `up` where there is none.
    pub activation: Activation,
    /// `[num_tokens, intermediate_size]`.
    pub out: &'a mut Tensor,
    /// The product that alone reads `out` then: a device may leave it in the type that this one reads.
    pub next: Option<&'a Linear>,
}

/// What a backend is, for logs and bug reports.
#[derive(Clone, Debug)]
pub struct BackendInfo {
    /// "cpu" or "cuda".
    pub device: String,
    /// Instruction set: "scalar", "avx2", "avx512", "avx512+bf16" where that multiplies bf16, or "amx"; the name of a GPU.
    pub isa: String,
    /// Worker threads.
    pub num_threads: usize,
}

/// Memory that a backend's weights, caches and activations lie in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackendMemory {
    /// All of it, in bytes.
    pub total_bytes: u64,
    /// What is free at the moment.
    pub available_bytes: u64,
    /// The host's own, committed as it is first written; a GPU's is taken as it is asked for.
    pub is_host: bool,
}

/// What decides the size of a backend's own buffers. What differs from layer to layer is the largest of all layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkspaceShape {
    /// Tokens of a step at most.
    pub num_tokens: usize,
    /// Tokens of a request at most.
    pub seq_len: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward network.
    pub intermediate_size: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Query heads that share a key and value head.
    pub queries_per_kv: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// How the weights of most layers are stored.
    pub dtype: DType,
    /// Rows of logits computed at once at most.
    pub num_logit_rows: usize,
    /// Rows that a step samples from at most.
    pub num_sampled_rows: usize,
    /// Logits of a row.
    pub vocab_size: usize,
    /// How the matrix of logits is stored.
    pub lm_head_dtype: DType,
    /// Of the linear layers.
    pub precision: Precision,
    /// Whether there are norms before the residual additions.
    pub post_norms: bool,
    /// Whether feed-forward networks are gated.
    pub gated: bool,
    /// Experts of a layer; 0 where there are none.
    pub num_experts: usize,
    /// Experts that a token passes.
    pub num_chosen_experts: usize,
    /// Columns of the space that experts work in, where that is one of their own; else 0.
    pub expert_latent_size: usize,
    /// Whether attention is latent, absorbed into one key and value head.
    pub has_latent: bool,
    /// Columns of all projections of a recurrent layer; 0 where there are none.
    pub recurrent_width: usize,
}

/// The graphs that a backend recorded for one model and its KV storage, which outlive them.
#[derive(Default)]
pub struct StepGraphs {
    /// Rows of a step that is recorded at most; 0: none is.
    pub max_rows: usize,
    /// The same of each of its requests: 1 where rows see keys behind them.
    pub max_request_rows: usize,
    recorded: Option<Box<dyn Any + Send>>,
}

impl StepGraphs {
    /// Of tensors with so many rows; 0 to record nothing.
    pub fn new(max_rows: usize, max_request_rows: usize) -> Self {
        Self { max_rows, max_request_rows, recorded: None }
    }

    /// What a recorder keeps here, made when it is first asked for.
    ///
    /// # Panics
    /// When it is no `T`: another recorder made it.
    pub fn recorded<T: Any + Default + Send>(&mut self) -> &mut T {
        let recorded = self.recorded.get_or_insert_with(|| Box::<T>::default());
        recorded.downcast_mut().expect("steps of this backend, and another one recorded them")
    }
}

/// Where weights, activations and the KV storage lie.
pub trait Device: Send + Sync {
    /// What this device is.
    fn info(&self) -> BackendInfo;

    /// The memory of its tensors, measured now.
    ///
    /// Errors: the driver's.
    fn memory(&self) -> Result<BackendMemory, DeviceError> {
        let HostMemory { total_bytes, available_bytes } = host_memory();
        Ok(BackendMemory { total_bytes, available_bytes, is_host: true })
    }

    /// Whether it still computes, after something went wrong.
    ///
    /// Errors: [`DeviceError::Cuda`] of a device that is lost to this process.
    fn check(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Whether attention has kernels for such a layer of the KV storage, of whose heads each serves so many query heads.
    ///
    /// Errors: [`DeviceError::Unsupported`], with what would work.
    fn check_kv_layer(&self, _dtype: KvDType, shape: KvShape, _queries_per_kv: usize) -> Result<(), DeviceError> {
        shape.head_dim().map(drop)
    }

    /// Whether attention computes faster over a BF16 cache than over an F16 one, so that it is the better where neither is asked
    /// for.
    fn prefers_bf16_cache(&self) -> bool {
        false
    }

    /// A zeroed activation tensor that can hold `max_rows` rows; physical memory is committed as rows are first written.
    fn alloc(&self, max_rows: usize, cols: usize) -> Result<Tensor, DeviceError>;

    /// Reserves the KV storage.
    fn alloc_kv_cache(&self, spec: &KvCacheSpec) -> Result<CacheEngine, DeviceError>;

    /// Reserves the states of recurrent layers: so many slots, of so many values of each layer.
    fn alloc_states(&self, num_slots: usize, lens: &[usize]) -> Result<StateCache, DeviceError> {
        StateCache::new(num_slots, lens)
    }

    /// Packs a weight `[out_features, in_features]`.
    fn load_linear(&self, weight: &WeightView, options: &LinearOptions) -> Result<Linear, DeviceError>;

    /// The same for the matrix of logits, as [`Phases::greedy_tokens`] wants it.
    fn load_lm_head(&self, weight: &WeightView, options: &LinearOptions) -> Result<Linear, DeviceError> {
        self.load_linear(weight, options)
    }

    /// Bytes that a weight `[rows, cols]` takes once it is loaded, pages of its file included where it is used in place.
    fn linear_bytes(&self, dtype: DType, shape: [usize; 2], precision: Precision) -> u64;

    /// The same of what [`Self::load_lm_head`] makes.
    fn lm_head_bytes(&self, dtype: DType, shape: [usize; 2], precision: Precision) -> u64 {
        self.linear_bytes(dtype, shape, precision)
    }

    /// Whether it looks rows of the token embedding up itself, in a table that was loaded as other weights are. Else the host
    /// reads them as they are stored.
    fn loads_tables(&self) -> bool {
        false
    }

    /// Whether its phases know adapters.
    fn takes_adapters(&self) -> bool {
        false
    }

    /// Puts an adapter, whose weights the host has, where phases read it.
    ///
    /// Errors: [`DeviceError::Unsupported`] with what would work, and those of a device that has no memory for it.
    fn load_adapter(&self, adapter: Adapter) -> Result<Adapter, DeviceError> {
        Ok(adapter)
    }

    /// Rows of a weight that it loaded, from `first` on as many as `out` has, `[rows, in_features]`, as floats. Only of one that
    /// takes adapters.
    ///
    /// Errors: the driver's.
    fn read_rows(&self, _linear: &Linear, _first: usize, _out: &mut [f32]) -> Result<(), DeviceError> {
        unreachable!("weights are read for adapters, which this backend does not take");
    }

    /// Gives memory back that was taken for further weights: those of a model are loaded.
    fn trim(&self) {}

    /// Bytes of the backend's own buffers once the largest step has run.
    fn workspace_bytes(&self, shape: &WorkspaceShape) -> u64;

    /// Steps to come need no larger buffers than these: whoever has to pay for growth makes them so at once.
    fn plan_workspaces(&self, _shape: &WorkspaceShape) {}

    /// Bytes of captured graphs.
    fn graph_bytes(&self) -> u64 {
        0
    }

    /// Calls `body` for each index below `len` on the host, on as many threads as the backend has there, and waits for all.
    fn for_each(&self, len: usize, body: &(dyn Fn(usize) + Sync)) {
        (0..len).for_each(body);
    }
}

/// The phases of a step. All calls of one step come from one thread; calls do not fail once the sizes, which are programming
/// errors when wrong, agree. A [`Linear`] works with the backend that loaded it. Outputs that are not also inputs get their
/// number of rows set. `step` is the one that was begun, and its rows are those of the tensors.
pub trait Phases {
    /// The step whose phases follow.
    fn begin_step(&self, _step: &StepMetadata) {}

    /// `out[i] = table[token_ids[i]] * scale`; sets out's rows.
    fn embed(&self, args: &EmbedArgs<'_>, out: &mut Tensor);

    /// Normalises `x` once and multiplies it by every projection.
    fn norm_linear(&self, x: &Tensor, norm: Option<&Norm>, projections: &mut [Projection<'_>], step: &StepMetadata);

    /// q/k norm, rotation, write of K and V.
    fn rope_and_cache(&self, args: RopeArgs<'_>, step: &StepMetadata);

    /// Causal attention through block tables; the keys of the step itself are already in the cache.
    fn attention(&self, args: AttentionArgs<'_>, step: &StepMetadata);

    /// A projection added to the residual stream.
    fn linear_residual(&self, args: ResidualArgs<'_>, step: &StepMetadata);

    /// The first half of a feed-forward network, gated or not.
    fn gate_up(&self, args: GateUpArgs<'_>, step: &StepMetadata);

    /// `out[i] = x[rows[i]]`; sets out's rows.
    fn gather_rows(&self, x: &Tensor, rows: &[u32], out: &mut Tensor);

    /// `logits = norm(x) @ lm_head^T + bias`, of rows that were gathered and are no step's.
    /// `adapters` are those of these rows.
    fn logits(&self, x: &Tensor, norm: Option<&Norm>, lm_head: &Linear, adapters: &[AdapterRows], logits: &mut Tensor) {
        let step = StepMetadata { adapters: adapters.to_vec(), ..StepMetadata::default() };
        self.norm_linear(x, norm, &mut [Projection { linear: lm_head, out: logits }], &step);
    }

    /// Replaces `tokens` by the column of the largest value of each row of `norm(x) @ lm_head^T + bias`, of equal ones the first.
    /// `masks` has an entry for each row, or none at all; a row with a mask gives the largest of the columns that it allows.
    /// False, and `tokens` means nothing, where these are not to be found faster than all logits are computed, a logit may not be
    /// finite, or a mask allows nothing.
    fn greedy_tokens(
        &self,
        _x: &Tensor,
        _norm: Option<&Norm>,
        _lm_head: &Linear,
        _masks: &[Option<TokenMask<'_>>],
        _tokens: &mut Vec<u32>,
    ) -> bool {
        false
    }

    /// As [`Self::fetch`], for some of the rows; the others are not to be read.
    fn fetch_rows(&self, _x: &mut Tensor, _rows: &[usize]) {}

    /// Waits for the tensor's rows and makes them what [`Tensor::as_slice`] gives.
    fn fetch(&self, _x: &mut Tensor) {}

    /// Makes what the host wrote to the tensor's rows in use what phases read.
    fn store(&self, _x: &mut Tensor) {}

    /// As [`Self::store`], for some of the rows, in ascending order; the others stay what they are.
    fn store_rows(&self, _x: &mut Tensor, _rows: &[usize]) {}
}

/// Samples where the logits lie.
pub trait DeviceSampler {
    /// A token of every row of logits, with the `num_top` likeliest ones; rows without an entry may be anything. A row with a
    /// logit that is not finite, or with a mask that allows nothing, has no token.
    fn sample(&self, logits: &Tensor, rows: &[Option<RowSampling<'_>>], num_top: usize) -> Vec<Option<SampledRow>>;
}

/// Records steps up to their hidden states, to launch them as one.
pub trait StepRecorder {
    /// Begins a step as one that was recorded: [`Self::replay`] embeds its tokens and runs the layers. `false`: it begins by
    /// [`Phases::begin_step`] instead, and runs as it is. To record it, `run` is called with tokens and steps of its own: it
    /// embeds them and runs the layers' phases, on keys that mean nothing.
    ///
    /// `token_ids` are rows of the embedding, one for each position of the step.
    fn begin_recorded(
        &self,
        graphs: &mut StepGraphs,
        token_ids: &[u32],
        step: &StepMetadata,
        run: &mut dyn FnMut(&[u32], &StepMetadata),
    ) -> bool;

    /// Runs the step that [`Self::begin_recorded`] began. Rows of tensors are as the recording left them.
    fn replay(&self, graphs: &mut StepGraphs);
}

/// A device that computes decoder steps, with what only some can do.
pub trait Backend: Device + Phases {
    /// What computes mixtures of experts; `None`: nothing does.
    fn expert_phases(&self) -> Option<&dyn ExpertPhases> {
        None
    }

    /// What computes latent attention; `None`: nothing does.
    fn latent_phases(&self) -> Option<&dyn LatentPhases> {
        None
    }

    /// What computes recurrent layers; `None`: nothing does.
    fn recurrent_phases(&self) -> Option<&dyn RecurrentPhases> {
        None
    }

    /// What computes the phases that only some models need, and norms of values; `None`: nothing does.
    fn elementwise_phases(&self) -> Option<&dyn ElementwisePhases> {
        None
    }

    /// What computes several residual streams; `None`: nothing does.
    fn stream_phases(&self) -> Option<&dyn StreamPhases> {
        None
    }

    /// Whether attention takes [`Mask::Full`](crate::Mask) and [`Mask::Spans`](crate::Mask).
    fn sees_ahead(&self) -> bool {
        false
    }

    /// What samples there; `None`: the host does.
    fn sampler(&self) -> Option<&dyn DeviceSampler> {
        None
    }

    /// What records steps; `None`: each runs phase by phase.
    fn recorder(&self) -> Option<&dyn StepRecorder> {
        None
    }
}

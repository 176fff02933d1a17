//! Where the memory goes, known before a weight is read.

mod bytes;
mod counter;
mod saved;
#[cfg(test)]
mod tests;
mod workspaces;

use std::fmt;

use device::{Backend, DeviceError, KvDType, KvSource, Precision, RecurrentPhases};
use paged::{CacheConfig, ConfigError, KvShape, MemoryGpuConfig, ModelConfigLike, PoolLimits, Retention, calculate_cache_config};

pub use bytes::DeviceBytes;
use counter::Counter;
pub(super) use workspaces::plan_workspaces;
use workspaces::{adapter_workspace_bytes, workspace_shape};

use super::{DEFAULT_MTP_DRAFTS, EngineConfig, ModelDType, snapshots};
use crate::{
    EmbeddingConfig, EngineError, Isq,
    embedding::{self, Heads},
    media::{Encoders, MediaConfig, MediaEncoder, TowerWeights},
    model::{
        DecoderConfig,
        config::{AttentionConfig, FfnConfig, LayerConfig, Norms},
        decoder::{Activations, Decoder, Head},
        rope::GrowingRope,
    },
    model_runner::max_logit_rows,
    weights::WeightSource,
};

/// A group of layers with one block table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct GroupPlan {
    /// Tokens that its layers see; `None`: all.
    pub window: Option<usize>,
    /// Layers.
    pub num_layers: usize,
    /// Bytes that they use of a block.
    pub block_bytes: u64,
}

/// The ledger of an engine's memory; `Display` writes it as a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// One entry a device.
    pub devices: Vec<DeviceBytes>,
    /// How the layers share the blocks.
    pub groups: Vec<GroupPlan>,
    /// Bytes of a block on all devices together.
    pub bytes_per_block: u64,
    /// Requests that run together at most.
    pub max_num_seqs: usize,
    /// Tokens of a request at most.
    pub max_model_len: usize,
    /// Whether that many requests of that length each are guaranteed.
    pub guaranteed: bool,
    /// Snapshots of recurrent layers' states; 0 of models without.
    pub num_state_snapshots: usize,
    pub(super) cache: CacheConfig,
    max_num_batched_tokens: usize,
    reserves_full_context: bool,
}

impl MemoryPlan {
    /// Usable blocks; the null block comes on top.
    pub fn num_blocks(&self) -> usize {
        self.cache.num_gpu_blocks
    }

    /// The same with so many bytes of weights on its one device.
    pub(super) fn with_weights(&self, weights: u64) -> Self {
        let devices = self.devices.iter().map(|device| DeviceBytes { weights, ..*device }.with_margin());
        Self { devices: devices.collect(), ..self.clone() }
    }

    /// Tokens a block.
    pub fn block_size(&self) -> usize {
        self.cache.block_size
    }

    /// The longest request that can be served, prompt and answer.
    pub fn servable_tokens(&self) -> usize {
        self.cache.ledger.servable_tokens.min(self.max_model_len)
    }

    /// Requests of so many tokens each, prompt and answer, whose KV the pool holds at once.
    pub fn num_requests_that_fit(&self, num_tokens: usize) -> usize {
        if !self.reserves_full_context {
            return self.cache.num_requests_that_fit(num_tokens, self.max_num_batched_tokens);
        }
        let whole_context = self.max_model_len.div_ceil(self.block_size()) * self.groups.len();
        if num_tokens <= self.max_model_len { self.num_blocks() / whole_context } else { 0 }
    }
}

/// What is known of a model before it is loaded.
#[derive(Clone, Copy)]
pub(super) struct PlannedModel<'a> {
    pub config: &'a DecoderConfig,
    /// `None`: without weights at hand they count 2 bytes a parameter.
    pub weights: Option<&'a WeightSource>,
    pub isq: Option<Isq>,
    pub tokenizer_bytes: u64,
    /// What its encoders' outputs may take, on the first device; 0 without encoders.
    pub encoder_cache_bytes: u64,
    /// Adapters that it is loaded with, on the first device.
    pub adapter_bytes: u64,
    /// How it makes embeddings, if it does.
    pub embedding: Option<&'a EmbeddingConfig>,
    /// How it sees, if it does.
    pub media: Option<(&'a Encoders<MediaConfig>, &'a WeightSource)>,
    /// Who proposes drafts, if a model does: on the same device.
    pub draft: Option<PlannedDraft<'a>>,
}

/// A draft model before it is loaded.
#[derive(Clone, Copy)]
pub(super) struct PlannedDraft<'a> {
    pub config: &'a DecoderConfig,
    pub weights: Option<&'a WeightSource>,
    pub isq: Option<Isq>,
}

/// Where a model is to run.
#[derive(Clone, Copy)]
pub(super) enum PlannedDevices<'a> {
    /// Where this backend computes; so many bytes of the weights and activations are there already.
    Own { backend: &'a dyn Backend, loaded: u64 },
    /// Cards with so many bytes each, all free. Each takes an equal share of the layers, in order; the first the token embedding,
    /// the last the output projection.
    Cards(&'a [u64]),
}

impl PlannedDevices<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Own { .. } => 1,
            Self::Cards(bytes) => bytes.len(),
        }
    }
}

/// Bytes of all weights in the form that they are computed with.
pub(super) fn weight_bytes(
    model: PlannedModel<'_>,
    config: &EngineConfig,
    devices: PlannedDevices<'_>,
) -> Result<u64, EngineError> {
    let layers = KvLayers::of(&model, devices);
    Ok(beside_kv(model, config, devices, &layers, (1, 1))?.iter().map(|device| device.weights).sum())
}

/// Makes the plan: sizes the pool, and adds up everything else.
pub(super) fn plan(
    model: PlannedModel<'_>,
    config: &EngineConfig,
    devices: PlannedDevices<'_>,
) -> Result<MemoryPlan, EngineError> {
    if config.paged_attention.guaranteed && config.no_paged_attn {
        return Err(EngineError::InvalidArgument(
            "guaranteed contexts need paged attention, which no_paged_attn turns off: leave one of them out".into(),
        ));
    }
    let mut max_model_len = model.config.max_position_embeddings;
    let limits =
        PoolLimits { max_num_seqs: config.max_num_seqs, max_num_batched_tokens: config.max_num_batched_tokens, max_model_len };
    let layers = KvLayers::of(&model, devices);
    let bytes = beside_kv(model, config, devices, &layers, (max_model_len, usize::MAX))?;
    let kv_dtype = model_dtype(config.dtype, model.config, devices);
    if let PlannedDevices::Own { backend, .. } = devices {
        check_kv_layers(backend, device_dtype(config.paged_attention.cache_type.resolve(kv_dtype)), model.config)?;
        check_layers(backend, model.config)?;
        if let Some(draft) = model.draft {
            check_kv_layers(backend, device_dtype(config.paged_attention.cache_type.resolve(kv_dtype)), draft.config)?;
            check_layers(backend, draft.config)?;
        }
    }
    let memory: Vec<_> = bytes.iter().map(DeviceBytes::memory).collect();
    let cache = calculate_cache_config(&config.paged_attention, &layers, kv_dtype, &memory, &limits)
        .map_err(|error| over_asked(error, &bytes))?;

    if let (true, Some(MemoryGpuConfig::ContextSize(num_tokens))) =
        (config.paged_attention.guaranteed, config.paged_attention.mem_gpu)
    {
        // Longer requests could take what is guaranteed to others.
        max_model_len = num_tokens;
    }
    if config.no_paged_attn {
        // A whole context is reserved for each request, so it can be no longer than the pool.
        max_model_len = naive_context(max_model_len, config, &cache)?;
    }
    // Rope tables and partial results of attention grow no further than requests can, and snapshots are no more than blocks.
    let (longest, num_blocks) = (cache.ledger.servable_tokens.min(max_model_len), cache.num_gpu_blocks);
    let mut bytes = beside_kv(model, config, devices, &layers, (longest, num_blocks))?;
    for (bytes, ledger) in bytes.iter_mut().zip(&cache.ledger.devices) {
        bytes.kv_cache = ledger.pool_bytes;
    }
    let group = |group: &paged::KvGroup| {
        let of_layer = |layer: &usize| layers.kv_shape(*layer).block_bytes(cache.cache_type, cache.block_size).unwrap_or(0);
        GroupPlan {
            window: group.retention.window(),
            num_layers: group.layers.len(),
            block_bytes: group.layers.iter().map(of_layer).sum(),
        }
    };
    Ok(MemoryPlan {
        devices: bytes,
        groups: cache.groups.groups.iter().map(group).collect(),
        bytes_per_block: cache.ledger.devices.iter().map(|device| device.bytes_per_block).sum(),
        max_num_seqs: config.max_num_seqs,
        max_model_len,
        guaranteed: config.paged_attention.guaranteed,
        num_state_snapshots: snapshots::count(config, model.config, model.embedding, num_blocks),
        cache,
        max_num_batched_tokens: config.max_num_batched_tokens,
        reserves_full_context: config.no_paged_attn,
    })
}

/// The context that is reserved for each request without paged attention: all groups' blocks for the model's longest request, or,
/// of a smaller pool, its whole. A context that was asked for is not cut, though pages would serve it with fewer blocks.
fn naive_context(longest: usize, config: &EngineConfig, cache: &CacheConfig) -> Result<usize, EngineError> {
    let num_groups = cache.groups.groups.len();
    let held = cache.num_gpu_blocks / num_groups * cache.block_size;
    match config.paged_attention.mem_gpu {
        Some(MemoryGpuConfig::ContextSize(asked)) if held < asked.min(longest) => {
            let needed_blocks = asked.min(longest).div_ceil(cache.block_size) * num_groups;
            let megabytes = (needed_blocks as u64).saturating_mul(cache.ledger.bytes_per_block).div_ceil(1 << 20);
            Err(EngineError::InvalidArgument(format!(
                "a context of {asked} tokens with no_paged_attn takes {needed_blocks} blocks, for windows save nothing there, and the \
                 pool for it has {}: ask for {megabytes} MB instead (pa_gpu_mem), or leave no_paged_attn out",
                cache.num_gpu_blocks
            )))
        }
        _ => Ok(longest.min(held)),
    }
}

/// Whether attention has kernels for every layer's keys and values.
fn check_kv_layers(backend: &dyn Backend, dtype: KvDType, model: &DecoderConfig) -> Result<(), DeviceError> {
    let own_shape = |layer| match model.kv_source(layer) {
        KvSource::Own(shape) => Some(shape),
        KvSource::Layer(_) | KvSource::Nothing => None,
    };
    (0..model.num_layers()).try_for_each(|layer| {
        let AttentionConfig { num_heads, num_kv_heads, shared_kv, .. } = model.layers[layer].attention;
        let Some(shape) = own_shape(shared_kv.unwrap_or(layer)) else { return Ok(()) };
        backend.check_kv_layer(dtype, shape, num_heads / num_kv_heads.max(1))
    })
}

/// Whether all kinds of layers of a model are computed there.
fn check_layers(backend: &dyn Backend, model: &DecoderConfig) -> Result<(), EngineError> {
    let has_recurrent = |layer: &LayerConfig| layer.recurrent.is_some() || layer.attention.output_gate.is_some();
    let what = if backend.expert_phases().is_none() && model.layers.iter().any(|layer| layer.ffn.num_experts() > 0) {
        "is a mixture of experts"
    } else if backend.recurrent_phases().is_none() && model.layers.iter().any(has_recurrent) {
        "has recurrent layers"
    } else if backend.latent_phases().is_none() && model.layers.iter().any(|layer| layer.attention.latent.is_some()) {
        "has latent attention"
    } else if backend.elementwise_phases().is_none() && has_layer_inputs(model) {
        "has inputs or factors of layers, vectors of positions, norms of values, parts or embeddings, or bounds of queries"
    } else if backend.stream_phases().is_none() && has_streams(model) {
        "has several residual streams or gates that are cut off"
    } else if !backend.sees_ahead() && model.sees_ahead() {
        "sees the tokens behind a token"
    } else if !backend.sees_ahead() && model.sees_spans() {
        "has images whose rows see each other"
    } else {
        return check_state_rows(backend, model);
    };
    let (architecture, device) = (model.architecture, backend.info().device);
    Err(EngineError::Architecture(format!("{architecture} {what}, which {device} does not compute yet: use device=\"cpu\"")))
}

/// Whether a model needs what [`device::ElementwisePhases`] stands for.
fn has_layer_inputs(model: &DecoderConfig) -> bool {
    let of_ffn = |ffn: &FfnConfig| matches!(ffn, FfnConfig::Experts(experts) if experts.has_own_norms);
    let of_attention = |attention: &AttentionConfig| attention.v_norm.is_some() || attention.clip.is_some();
    let of_layer = |layer: &LayerConfig| {
        layer.has_output_scale || layer.norms == Norms::OfSums || of_attention(&layer.attention) || of_ffn(&layer.ffn)
    };
    let of_model = model.embedding_norm || model.positions.is_some() || model.layer_inputs.is_some();
    of_model || has_streams(model) || model.layers.iter().any(of_layer)
}

/// Whether a model needs what [`device::StreamPhases`] stands for.
fn has_streams(model: &DecoderConfig) -> bool {
    let is_cut = |layer: &LayerConfig| matches!(layer.ffn, FfnConfig::Dense(dense) if dense.cutoff.is_some());
    model.streams.is_some() || model.layers.iter().any(is_cut)
}

/// Whether the states of recurrent layers are of sizes that are computed there.
fn check_state_rows(backend: &dyn Backend, model: &DecoderConfig) -> Result<(), EngineError> {
    let Some(most) = backend.recurrent_phases().map(RecurrentPhases::max_state_rows) else { return Ok(()) };
    let rows = model.largest(|layer| layer.recurrent.map_or(0, |recurrent| recurrent.state_rows()));
    if rows <= most {
        return Ok(());
    }
    let (architecture, device) = (model.architecture, backend.info().device);
    Err(EngineError::Architecture(format!(
        "{architecture} keeps states of {rows} rows a head, and {device} computes recurrent layers with {most} at most: use \
         device=\"cpu\""
    )))
}

/// The element type of the cache where none is asked for: of those that have kernels, if `dtype` leaves the choice.
fn model_dtype(dtype: ModelDType, model: &DecoderConfig, devices: PlannedDevices<'_>) -> paged::KvDType {
    match (dtype, devices) {
        (ModelDType::F32, _) => paged::KvDType::F32,
        (ModelDType::BF16, _) => paged::KvDType::BF16,
        (ModelDType::Auto, PlannedDevices::Own { backend, .. }) if check_kv_layers(backend, KvDType::F16, model).is_err() => {
            paged::KvDType::F32
        }
        (ModelDType::Auto, PlannedDevices::Own { backend, .. }) if backend.prefers_bf16_cache() => paged::KvDType::BF16,
        (ModelDType::F16 | ModelDType::Auto, _) => paged::KvDType::F16,
    }
}

/// The backends' name of an element type.
pub(super) fn device_dtype(dtype: paged::KvDType) -> KvDType {
    match dtype {
        paged::KvDType::F32 => KvDType::F32,
        paged::KvDType::F16 => KvDType::F16,
        paged::KvDType::BF16 => KvDType::BF16,
        paged::KvDType::F8E4M3 => KvDType::F8E4M3,
        paged::KvDType::Int8 => KvDType::Int8,
    }
}

/// Why there is no such pool; on a device of its own memory, with what the rest of it is for.
fn over_asked(error: ConfigError, devices: &[DeviceBytes]) -> EngineError {
    match devices {
        [device] if !device.is_host => EngineError::InvalidArgument(format!("{error}\n{}", device.ledger())),
        _ => error.into(),
    }
}

/// How the linear layers compute.
pub(super) fn precision(config: &EngineConfig) -> Precision {
    match config.dtype {
        ModelDType::F32 => Precision::Exact,
        _ if config.deterministic => Precision::Deterministic,
        _ => Precision::Fast,
    }
}

/// The model as the sizing of the pool sees it.
struct KvLayers<'a> {
    config: &'a DecoderConfig,
    /// Its layers are behind the model's.
    draft: Option<&'a DecoderConfig>,
    num_devices: usize,
}

impl<'a> KvLayers<'a> {
    fn of(model: &PlannedModel<'a>, devices: PlannedDevices<'_>) -> Self {
        Self { config: model.config, draft: model.draft.map(|draft| draft.config), num_devices: devices.len() }
    }

    /// Whose layer it is, and which of its own.
    fn owner(&self, layer: usize) -> (&DecoderConfig, usize) {
        let own = self.config.num_layers();
        match self.draft {
            Some(draft) if layer >= own => (draft, layer - own),
            _ => (self.config, layer),
        }
    }
}

impl ModelConfigLike for KvLayers<'_> {
    fn num_layers(&self) -> usize {
        self.config.num_layers() + self.draft.map_or(0, ModelConfigLike::num_layers)
    }

    fn kv_shape(&self, layer: usize) -> KvShape {
        let (config, layer) = self.owner(layer);
        config.kv_shape(layer)
    }

    fn retention(&self, layer: usize) -> Retention {
        let (config, layer) = self.owner(layer);
        config.retention(layer)
    }

    fn device(&self, layer: usize) -> usize {
        layer * self.num_devices / self.num_layers().max(1)
    }

    fn max_seq_len(&self) -> usize {
        self.config.max_seq_len()
    }
}

/// Everything but the KV cache, on each device, for requests of up to `longest` tokens and a pool of so many blocks.
fn beside_kv(
    model: PlannedModel<'_>,
    config: &EngineConfig,
    devices: PlannedDevices<'_>,
    layers: &KvLayers<'_>,
    (longest, num_blocks): (usize, usize),
) -> Result<Vec<DeviceBytes>, EngineError> {
    if devices.len() == 0 {
        return Err(paged::ConfigError::NoDevices.into());
    }
    let mut activations = activation_bytes(model.config, config, longest);
    if let Some(embedding) = model.embedding {
        activations += embedding::buffer_bytes(embedding, max_logit_rows(config.max_num_seqs));
    }
    let num_snapshots = snapshots::count(config, model.config, model.embedding, num_blocks);
    let num_states = config.max_num_seqs + snapshots::num_spare(config, model.config);
    let [states, state_snapshots] =
        [num_states, num_snapshots].map(|slots| model.config.state_bytes().saturating_mul(slots as u64));
    let mut bytes = vec![DeviceBytes { states, state_snapshots, activations, ..DeviceBytes::default() }; devices.len()];
    bytes[0].encoder_cache = model.encoder_cache_bytes;
    if config.adapters.is_some() || model.adapter_bytes > 0 {
        bytes[0].adapters = model.adapter_bytes + adapter_workspace_bytes(model.config, config);
    }
    let counter = count(model, config, devices, layers)?;
    for (bytes, weights) in bytes.iter_mut().zip(&counter.bytes) {
        bytes.weights = *weights;
    }
    let drafting = count_draft(model, config, devices, layers)?;
    if let (Some(draft), Some(counter)) = (model.draft, &drafting) {
        bytes[0].weights += counter.bytes.iter().sum::<u64>();
        bytes[0].activations += activation_bytes(draft.config, config, longest);
    }
    if let Some((media, weights)) = model.media {
        let backend = if let PlannedDevices::Own { backend, .. } = devices { Some(backend) } else { None };
        let mut counter = TowerWeights::count(weights, backend, precision(config))?;
        for encoder in media.iter() {
            MediaEncoder::new(&mut counter, encoder, precision(config))?;
            bytes[0].activations += encoder.activation_bytes();
        }
        bytes[0].weights += counter.bytes;
    }
    let shape = workspace_shape(model, config, longest, (&counter, drafting.as_ref()));
    match devices {
        PlannedDevices::Own { backend, loaded } => {
            let memory = backend.memory()?;
            let bytes = &mut bytes[0];
            bytes.workspaces = backend.workspace_bytes(&shape);
            // A draft model's steps are recorded as the model's are, and those of a head are not.
            let is_drafted = model.draft.is_some_and(|draft| draft.config.head_layer.is_none());
            bytes.graphs = backend.graph_bytes() * (1 + u64::from(is_drafted));
            // The host has all of these.
            if memory.is_host {
                bytes.tokenizer = model.tokenizer_bytes;
                let head = model.draft.filter(|draft| draft.config.head_layer.is_some());
                bytes.activations += head.map_or(0, |head| hidden_states_bytes(head.config, config));
            } else if !model.config.is_crossed() {
                // What layers look at lies where they do.
                bytes.encoder_cache = 0;
            }
            bytes.is_host = memory.is_host;
            (bytes.device_total, bytes.device_available) = (memory.total_bytes, memory.available_bytes + loaded);
        }
        PlannedDevices::Cards(cards) => {
            for (bytes, card) in bytes.iter_mut().zip(cards) {
                (bytes.device_total, bytes.device_available) = (*card, *card);
            }
        }
    }
    Ok(bytes.into_iter().map(DeviceBytes::with_margin).collect())
}

fn count<'a>(
    model: PlannedModel<'a>,
    config: &EngineConfig,
    devices: PlannedDevices<'a>,
    layers: &'a KvLayers<'a>,
) -> Result<Counter<'a>, EngineError> {
    let mut counter = Counter::new((model.weights, model.isq), devices, precision(config), layers);
    if let Some(embedding) = model.embedding {
        Heads::new(&mut counter, embedding)?;
    }
    Decoder::new(&mut counter, model.config)?;
    Ok(counter)
}

fn count_draft<'a>(
    model: PlannedModel<'a>,
    config: &EngineConfig,
    devices: PlannedDevices<'a>,
    layers: &'a KvLayers<'a>,
) -> Result<Option<Counter<'a>>, EngineError> {
    let Some(draft) = model.draft else { return Ok(None) };
    let mut counter = Counter::new((draft.weights, draft.isq), devices, precision(config), layers);
    if draft.config.head_layer.is_some() {
        Head::new(&mut counter, draft.config)?;
    } else {
        Decoder::new(&mut counter, draft.config)?;
    }
    Ok(Some(counter))
}

/// What is kept of each request for a head to go on from: a hidden state of its last token, and of each draft.
fn hidden_states_bytes(head: &DecoderConfig, config: &EngineConfig) -> u64 {
    let drafts = config.speculation.as_ref().and_then(|speculation| speculation.max_drafts).unwrap_or(DEFAULT_MTP_DRAFTS);
    // A request has no more outputs in a step; the state before its first row is kept as well.
    let of_request = drafts.saturating_add(1).min(max_logit_rows(config.max_num_seqs)) + 1;
    let states = config.max_num_seqs.saturating_mul(of_request);
    (states.saturating_mul(head.hidden_size) as u64).saturating_mul(size_of::<f32>() as u64)
}

/// Activations of the largest step, and rope tables of the longest request.
fn activation_bytes(model: &DecoderConfig, config: &EngineConfig, longest: usize) -> u64 {
    let activations = Activations::bytes(model, config.max_num_batched_tokens, max_logit_rows(config.max_num_seqs));
    let rows = longest.saturating_mul(model.num_rope_tables());
    activations + model.ropes.iter().map(|rope| GrowingRope::bytes(rope, model, rows)).sum::<u64>()
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MIB: f64 = 1024.0 * 1024.0;
        let devices: Vec<_> = self.devices.iter().map(DeviceBytes::lines).collect();
        for row in 0..devices.first().map_or(0, |lines| lines.len()) {
            for (device, lines) in devices.iter().enumerate() {
                let (name, bytes) = lines[row];
                write!(f, "{:<12}{:>10.1} MB", if device == 0 { name } else { "" }, bytes as f64 / MIB)?;
            }
            writeln!(f)?;
        }
        writeln!(
            f,
            "{} blocks of {} tokens, {} bytes each, for {}",
            self.num_blocks(),
            self.block_size(),
            self.bytes_per_block,
            if self.groups.len() == 1 {
                "1 group of layers".to_owned()
            } else {
                format!("{} groups of layers", self.groups.len())
            }
        )?;
        for group in &self.groups {
            let window = group.window.map_or("all tokens".to_owned(), |window| format!("a window of {window} tokens"));
            writeln!(f, "  {} layers that see {window}: {} bytes a block", group.num_layers, group.block_bytes)?;
        }
        let longest = self.servable_tokens();
        write!(f, "longest request {longest} tokens; {} of that length fit at once", self.num_requests_that_fit(longest))?;
        if self.guaranteed {
            write!(f, "; {} x {} tokens are guaranteed", self.max_num_seqs, self.max_model_len)?;
        }
        Ok(())
    }
}

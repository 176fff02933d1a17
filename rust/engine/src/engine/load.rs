//! From files to a running engine thread.

use std::{
    path::Path,
    sync::{
        Arc, Mutex, RwLock,
        atomic::{AtomicBool, AtomicU64},
        mpsc,
    },
};

use device::{
    Backend, DeviceError,
    cpu::{CpuBackend, Isa},
    cuda::{self, CudaBackend, CudaError, CudaReport, Library, LibraryPaths, NvidiaDriver},
    host::{num_physical_cores, trim_heap},
};
use paged::{FairnessPolicy, KvCacheConfig, Scheduler, SchedulerConfig};

use super::{
    Device, EngineConfig, LoadProgress, Loaded, MemoryPlan, ModelSource, Shared, draft, events,
    plan::{PlannedDevices, PlannedDraft, PlannedModel, device_dtype, plan, plan_workspaces, precision, weight_bytes},
    snapshots::{self, needs_whole_prompts},
    text_files::{TextFiles, dialect},
    thread::{Drafter, EngineThread},
    tier,
};
use crate::{
    EmbeddingConfig, EmbeddingOptions, EngineError, MediaOptions,
    calibration::{self, calibrate},
    embedding,
    grammar::GrammarCompiler,
    kv_tier::Swapper,
    lora::{self, Registry},
    media::Encoders,
    model::{DecoderConfig, ModelFiles, mtp},
    model_runner::{ModelRunner, RunnerOptions},
    weights::SafetensorsFiles,
};

/// Loads the model onto the device that is asked for, sizes the pool, starts the thread.
pub fn load(source: &ModelSource, config: &EngineConfig, progress: &dyn Fn(LoadProgress)) -> Result<Shared, EngineError> {
    load_onto(&backend(config)?, source, config, progress)
}

/// As [`load`], onto a backend.
pub fn load_onto(
    backend: &Arc<dyn Backend>,
    source: &ModelSource,
    config: &EngineConfig,
    progress: &dyn Fn(LoadProgress),
) -> Result<Shared, EngineError> {
    let (shared, thread) = load_with_backend(source, config, backend, progress)?;
    // Loading leaves freed memory behind: the vocabulary as it was read.
    trim_heap();
    backend.trim();
    std::thread::Builder::new()
        .name("mistral-paged-engine".into())
        .spawn(move || thread.run())
        .map_err(|e| EngineError::Internal(format!("the engine thread cannot start: {e}")))?;
    Ok(shared)
}

fn backend(config: &EngineConfig) -> Result<Arc<dyn Backend>, EngineError> {
    let num_threads = config.cpu.num_threads.unwrap_or_else(num_physical_cores);
    let Some(ordinal) = gpu(config, &cuda::survey)? else {
        config.check_for_processor()?;
        let isa = config.cpu.isa.as_deref().map_or_else(|| Ok(Isa::detect()), Isa::parse)?;
        return Ok(Arc::new(CpuBackend::new(isa, num_threads)?));
    };
    let driver =
        NvidiaDriver::new(ordinal, &config.cuda_libraries).map_err(|why| no_gpu(ordinal, &why, &config.cuda_libraries))?;
    Ok(Arc::new(CudaBackend::with(Arc::new(driver), config.cuda)?.with_host_threads(num_threads)?))
}

/// The number of the GPU that a model is to run on; `None` for the processor.
fn gpu(config: &EngineConfig, survey: &dyn Fn() -> CudaReport) -> Result<Option<usize>, EngineError> {
    match (config.device, &config.cpu.isa) {
        (Device::Cuda(ordinal), Some(isa)) => Err(EngineError::InvalidArgument(format!(
            "cpu_tier={isa:?} is about the processor, and device=\"cuda:{ordinal}\" is a GPU: leave out one of the two"
        ))),
        (Device::Cuda(ordinal), None) => Ok(Some(ordinal)),
        (Device::Auto, None) => {
            let report = survey();
            Ok((0..report.gpus.len()).find(|ordinal| cuda::require(&report, *ordinal).is_ok()))
        }
        (Device::Auto, Some(_)) | (Device::Cpu, _) => Ok(None),
    }
}

/// Why a GPU cannot be used, and what else this machine lacks.
fn no_gpu(ordinal: usize, why: &CudaError, libraries: &LibraryPaths) -> EngineError {
    let library = libraries.locate(Library::CublasLt).err();
    let missing: Vec<_> = [Some(why), library.as_ref()].into_iter().flatten().map(ToString::to_string).collect();
    DeviceError::Unsupported(format!("device=\"cuda:{ordinal}\" cannot be used: {}", missing.join(". And "))).into()
}

/// What loading the model would take; only the headers of its files are read. `cards`: see
/// [`Engine::memory_plan`](super::Engine).
pub fn memory_plan(source: &ModelSource, config: &EngineConfig, cards: Option<&[u64]>) -> Result<MemoryPlan, EngineError> {
    check_limits(config)?;
    let backend = backend(config)?;
    check_backend(config, &*backend)?;
    let devices = cards.map_or(PlannedDevices::Own { backend: &*backend, loaded: 0 }, PlannedDevices::Cards);
    let architecture = config.architecture.as_deref();
    if let ModelSource::HuggingFace { path, .. } = source
        && !SafetensorsFiles::are_in(path)
    {
        let mut decoder = ModelFiles::hugging_face_config(path, architecture)?;
        let embedding = config.embedding.map(|options| embedding_without_weights(path, options, &decoder)).transpose()?;
        decoder.tie_word_embeddings |= embedding.is_some();
        check_kind(config, &decoder, embedding.as_ref())?;
        let head = config.mtp.as_ref().map(|_| head_without_weights(config, &decoder)).transpose()?;
        return plan(
            PlannedModel {
                config: &decoder,
                weights: None,
                isq: config.in_situ_quant,
                tokenizer_bytes: 0,
                encoder_cache_bytes: config.media.as_ref().map_or(0, |options| options.cache_bytes(0)),
                media: None,
                adapter_bytes: adapter_bytes(config, None)?,
                embedding: embedding.as_ref(),
                draft: head.as_ref().map(|head| PlannedDraft { config: head, weights: None, isq: config.in_situ_quant }),
            },
            config,
            devices,
        );
    }
    calibration::check(source, config, backend.memory()?.is_host)?;
    let files = open_files(source, config)?;
    let text = TextFiles::open(source, &files, config.chat_template.as_deref())?;
    let draft = draft::open((source, config), files.config(), &text.tokenizer)?;
    plan(
        planned_model(
            &files,
            draft.as_ref(),
            text.tokenizer.estimated_bytes(),
            config.media.as_ref(),
            adapter_bytes(config, Some(&files))?,
        ),
        config,
        devices,
    )
}

/// How a model that is planned by its configuration alone makes vectors, or scores of logits. What a classifier is like, its
/// weights say.
fn embedding_without_weights(
    path: &Path,
    options: EmbeddingOptions,
    decoder: &DecoderConfig,
) -> Result<EmbeddingConfig, EngineError> {
    let scores = if options.pooling.is_none() { embedding::logits_of_folder(path, decoder)? } else { None };
    scores.map_or_else(|| Ok(embedding::of_folder(path, options, decoder)?.0), Ok)
}

/// The head of a model that is planned by its configuration alone.
fn head_without_weights(config: &EngineConfig, decoder: &DecoderConfig) -> Result<DecoderConfig, EngineError> {
    draft::check_head(config)?;
    mtp::head_config(decoder, None)
}

pub(crate) fn open_files(source: &ModelSource, config: &EngineConfig) -> Result<ModelFiles, EngineError> {
    let files = ModelFiles::open(source, config.architecture.as_deref())?
        .with_isq(config.in_situ_quant)
        .with_importance(config.imatrix.clone());
    files.check_isq()?;
    let files = match &config.media {
        Some(options) => files.with_media(source, options)?,
        None => files,
    };
    let files = match config.embedding {
        Some(options) => files.for_embeddings(source, options)?,
        None => files,
    };
    check_kind(config, files.config(), files.embedding())?;
    Ok(files)
}

/// Bytes that the weights will take.
pub(super) fn planned_bytes(files: &ModelFiles, config: &EngineConfig, backend: &dyn Backend) -> Result<u64, EngineError> {
    let model = planned_model(files, None, 0, None, 0);
    weight_bytes(model, config, PlannedDevices::Own { backend, loaded: 0 })
}

/// Whether a model can be run for what it is loaded for.
fn check_kind(config: &EngineConfig, decoder: &DecoderConfig, embedding: Option<&EmbeddingConfig>) -> Result<(), EngineError> {
    if decoder.sees_ahead() && embedding.is_none() {
        return Err(EngineError::InvalidArgument(format!(
            "this {} sees the tokens behind a token: it makes embeddings and no text; load it with Which.Embedding, or serve it with \
             `serve embedding`",
            decoder.architecture
        )));
    }
    snapshots::check(config, decoder, embedding)?;
    let refused = |text: String| Err(EngineError::NotSupported(text));
    if embedding.is_some() && config.speculation.is_some() {
        return refused("speculation is about answers, and embeddings have none: leave it out".into());
    }
    if embedding.is_some() && config.adapters.is_some() {
        return refused("adapters with embeddings are not supported: leave them out".into());
    }
    if config.media.is_some() && config.adapters.is_some() {
        return refused("adapters with images or sounds are not supported: leave out one of them".into());
    }
    if config.media.is_some() && config.embedding.is_some() {
        return refused("a model makes embeddings of texts alone: leave out images and sounds, or embeddings".into());
    }
    if config.media.is_some() && config.kv_tier.is_some() && decoder.sees_spans() {
        let name = decoder.architecture;
        return refused(format!("kv_tier with images of {name}, whose rows see each other, is not supported: leave it out"));
    }
    if !needs_whole_prompts(decoder, embedding) {
        return Ok(());
    }
    let why = "of a model that needs all tokens of an input at once";
    if config.kv_tier.is_some() {
        return refused(format!("kv_tier {why} would keep nothing that is found again: leave it out"));
    }
    if config.policies.fairness == FairnessPolicy::Drr {
        return refused(format!("fairness=\"drr\", which divides prompts, {why} is not supported: use \"priority\" or \"fcfs\""));
    }
    Ok(())
}

/// Rows of an image that see each other at most: as many as a step has, where any do.
fn longest_span(files: &ModelFiles, config: &EngineConfig) -> usize {
    let Some(media) = files.media().and_then(Encoders::with_spans) else { return 1 };
    media.rows_of_tile().clamp(1, config.max_num_batched_tokens)
}

/// Bytes of the adapters that a model is loaded with, and of its own.
fn adapter_bytes(config: &EngineConfig, files: Option<&ModelFiles>) -> Result<u64, EngineError> {
    let given = config.adapters.as_ref().map_or(Ok(0), lora::planned_bytes)?;
    let own = files.and_then(|files| Some(files.own_adapters()?.planned_bytes(files.weights())));
    Ok(given.saturating_add(own.unwrap_or(Ok(0))?))
}

/// Bytes that outputs of a model's encoder may take.
fn encoder_cache_bytes(options: &MediaOptions, files: &ModelFiles) -> u64 {
    let largest = files.media().into_iter().flat_map(Encoders::iter).map(|media| media.largest_kept(files.config())).max();
    options.cache_bytes(largest.unwrap_or(0))
}

fn planned_model<'a>(
    files: &'a ModelFiles,
    draft: Option<&'a ModelFiles>,
    tokenizer_bytes: u64,
    media: Option<&MediaOptions>,
    adapter_bytes: u64,
) -> PlannedModel<'a> {
    PlannedModel {
        config: files.config(),
        weights: Some(files.weights()),
        isq: files.isq(),
        tokenizer_bytes,
        encoder_cache_bytes: media.map_or(0, |options| encoder_cache_bytes(options, files)),
        media: files.media().map(|media| (media, files.encoder_weights())),
        adapter_bytes,
        embedding: files.embedding(),
        draft: draft.map(draft::planned),
    }
}

/// Rows of a step that are believed; more is a mistake, and sizes computed from these fit 64 bits.
const MAX_ROWS: usize = 1 << 28;

fn check_limits(config: &EngineConfig) -> Result<(), EngineError> {
    for (name, value) in [("max_num_seqs", config.max_num_seqs), ("max_num_batched_tokens", config.max_num_batched_tokens)] {
        if !(1..=MAX_ROWS).contains(&value) {
            return Err(EngineError::InvalidArgument(format!("{name} is {value}; it must be from 1 to {MAX_ROWS}")));
        }
    }
    Ok(())
}

/// What a backend cannot do is refused by name.
fn check_backend(config: &EngineConfig, backend: &dyn Backend) -> Result<(), EngineError> {
    if config.adapters.is_some() && !backend.takes_adapters() { Err(adapters_refused(backend)) } else { Ok(()) }
}

fn adapters_refused(backend: &dyn Backend) -> EngineError {
    EngineError::NotSupported(format!("adapters on {} are not supported yet: use device=\"cpu\"", backend.info().device))
}

/// With importance as it is measured, where a text says by what.
fn calibrated(source: &ModelSource, config: &EngineConfig, backend: &Arc<dyn Backend>) -> Result<EngineConfig, EngineError> {
    let measured = calibrate(source, config, backend)?.map(Arc::new);
    Ok(EngineConfig { imatrix: measured.or_else(|| config.imatrix.clone()), calibration_file: None, ..config.clone() })
}

/// Loads the model and sizes the pool; the thread is not started.
pub fn load_with_backend(
    source: &ModelSource,
    config: &EngineConfig,
    backend: &Arc<dyn Backend>,
    progress: &dyn Fn(LoadProgress),
) -> Result<(Shared, EngineThread), EngineError> {
    check_limits(config)?;
    check_backend(config, &**backend)?;
    tier::check(config)?;
    let listeners = events::listen(config)?;
    let config = &calibrated(source, config, backend)?;
    let files = open_files(source, config)?;
    if files.own_adapters().is_some() && !backend.takes_adapters() {
        return Err(adapters_refused(&**backend));
    }
    warn_of_senses(&files);
    let text = TextFiles::open(source, &files, config.chat_template.as_deref())?;
    let draft = draft::open((source, config), files.config(), &text.tokenizer)?;
    let (tokenizer_bytes, adapter_bytes) = (text.tokenizer.estimated_bytes(), adapter_bytes(config, Some(&files))?);
    let planned = |loaded| {
        plan(
            planned_model(&files, draft.as_ref(), tokenizer_bytes, config.media.as_ref(), adapter_bytes),
            config,
            PlannedDevices::Own { backend: &**backend, loaded },
        )
    };
    let mut plan = planned(0)?;
    let mut runner = ModelRunner::load(&files, Arc::clone(backend), runner_options(config, &plan), progress)?;
    let own_adapters = files.own_adapters().map(|own| own.load(runner.sites(), files.weights())).transpose()?;
    let adapters =
        config.adapters.clone().map(|options| Registry::new(options, Arc::clone(runner.sites()))).transpose()?.map(Arc::new);
    let mut drafting = load_draft(draft.as_ref(), &runner, config, &plan)?;
    if !backend.memory()?.is_host {
        // Of what is really left.
        let activations = runner.activation_bytes() + drafting.as_ref().map_or(0, ModelRunner::activation_bytes);
        let of_adapters = adapters.as_ref().map_or(0, |adapters| adapters.status().bytes)
            + own_adapters.iter().flat_map(Encoders::iter).map(|own| own.adapter.bytes()).sum::<u64>();
        plan = planned(plan.devices[0].weights + activations + of_adapters)?;
    }
    plan_workspaces(
        planned_model(&files, draft.as_ref(), tokenizer_bytes, config.media.as_ref(), adapter_bytes),
        config,
        &**backend,
        &plan,
    )?;
    let cache = &plan.cache;
    // One block more than is promised: the null block.
    runner.keep_states_beside(snapshots::num_spare(config, files.config()) + plan.num_state_snapshots);
    runner.allocate_kv_with(drafting.as_mut(), (cache.num_gpu_blocks + 1, cache.block_size), &cache.groups)?;
    let (scheduler, kv, limits) = new_scheduler(&files, config, &plan)?;
    let longest_span = scheduler.config().longest_span;
    let whole_prompts = scheduler.config().whole_prompts;

    let description = describe(&files, config, &plan, &**backend);
    for line in &description {
        tracing::info!("{line}");
    }
    let (inbox, commands) = mpsc::channel();
    let tokenizer = Arc::new(text.tokenizer);
    let servable_tokens = scheduler.servable_tokens();
    let draft_bytes = drafting.as_ref().map_or(0, ModelRunner::weight_bytes);
    let (weight_bytes, kv_cache_bytes) = (runner.weight_bytes() + draft_bytes, runner.kv_cache_bytes());
    let digest = tier::digest(&files, config, &**backend)?;
    let swapper = tier::open(&files, config, &runner, &**backend, digest.as_ref())?;
    let flush = swapper.as_ref().map(Swapper::flush_on_drop);
    let told = events::start(listeners, &files, config, &runner, digest.as_ref(), adapters.clone())?;
    let mut thread = EngineThread::new(commands, scheduler, kv, runner, Arc::clone(&tokenizer));
    prepare_thread(&mut thread, &files, config, swapper);
    thread.draft_by(drafting.map(|runner| match runner.config().head_layer {
        Some(_) => Drafter::of_head(runner),
        None => Drafter::new(runner, files.config().vocab_size),
    }));
    let shared = Shared {
        inbox,
        grammars: GrammarCompiler::new(Arc::clone(&tokenizer), files.config().vocab_size),
        dialect: text.chat_template.as_ref().map(|template| Arc::new(dialect(template, &tokenizer))),
        tokenizer,
        chat_template: text.chat_template,
        generation_config: text.generation_config,
        architecture: files.config().architecture,
        vocab_size: files.config().vocab_size,
        max_model_len: limits.given,
        servable_tokens,
        embedding: files.embedding().cloned(),
        media: files.media().cloned(),
        has_rope_axes: files.config().ropes.iter().any(|rope| rope.axes.is_some()),
        longest_span,
        one_step: whole_prompts.then_some(config.max_num_batched_tokens),
        num_blocks: cache.num_gpu_blocks,
        block_bytes: cache.ledger.bytes_per_block,
        seed: config.seed.or(config.deterministic.then_some(0)),
        one_seed: config.deterministic,
        submitted: AtomicU64::new(0),
        waiting_tokens: Arc::default(),
        draining: AtomicBool::new(false),
        lost: thread.lost(),
        heartbeat: thread.heartbeat(),
        kv_events: thread.tell(told),
        source: source.clone(),
        config: config.clone(),
        backend: Arc::downgrade(backend),
        loaded: RwLock::new(Arc::new(Loaded { plan, description, weight_bytes, _flush: flush })),
        re_isq: Mutex::default(),
        adapters,
        own_adapters: RwLock::new(own_adapters),
        draft_bytes,
        kv_cache_bytes,
    };
    Ok((shared, thread))
}

/// A scheduler over the pool of a plan, what it is made from, and the limits that it keeps.
fn new_scheduler(
    files: &ModelFiles,
    config: &EngineConfig,
    plan: &MemoryPlan,
) -> Result<(Scheduler, KvCacheConfig, RequestLimits), EngineError> {
    let architecture = files.config().architecture;
    let has_states = files.config().is_recurrent();
    // A block of keys and values is of no use without the states behind it.
    let num_state_snapshots = plan.num_state_snapshots;
    let num_spare_states = snapshots::num_spare(config, files.config());
    let whole_prompts = needs_whole_prompts(files.config(), files.embedding());
    let has_prefixes = config.prefix_caching && (!has_states || num_state_snapshots > 0) && !whole_prompts;
    events::check_cached(config, has_prefixes, architecture)?;
    let kv = plan.cache.kv_cache_config(has_prefixes, rand::random());
    let limits = request_limits(files, config, plan, whole_prompts);
    let longest_span = longest_span(files, config);
    let of_engine = scheduler_config(config, &limits);
    let of_model =
        SchedulerConfig { whole_prompts, longest_span, has_states, num_state_snapshots, num_spare_states, ..of_engine };
    let scheduler = Scheduler::new(of_model, kv.clone()).map_err(|e| EngineError::InvalidArgument(e.to_string()))?;
    Ok((scheduler, kv, limits))
}

/// How the model of a plan computes.
pub(super) fn runner_options(config: &EngineConfig, plan: &MemoryPlan) -> RunnerOptions {
    RunnerOptions {
        precision: precision(config),
        kv_dtype: device_dtype(plan.cache.cache_type),
        max_num_batched_tokens: config.max_num_batched_tokens,
        max_num_seqs: config.max_num_seqs,
    }
}

/// The draft model, or the head, whose keys and values are to lie in the pool of the other.
fn load_draft(
    files: Option<&ModelFiles>,
    model: &ModelRunner,
    config: &EngineConfig,
    plan: &MemoryPlan,
) -> Result<Option<ModelRunner>, EngineError> {
    let (backend, options) = (model.backend(), runner_options(config, plan));
    let load = |files: &ModelFiles| match files.config().head_layer {
        Some(_) => ModelRunner::load_head(files, model, Arc::clone(backend), options),
        None => ModelRunner::load(files, Arc::clone(backend), options, &|_| ()),
    };
    files.map(load).transpose()
}

fn warn_of_senses(files: &ModelFiles) {
    if files.leaves_out_senses() {
        tracing::warn!("only the language model is computed, and images and sounds are not: Which.MultimodalPlain takes them");
    }
}

/// What a scheduler is told of the engine.
fn scheduler_config(config: &EngineConfig, limits: &RequestLimits) -> SchedulerConfig {
    SchedulerConfig {
        retain_kv: !config.no_kv_cache,
        reserve_full_context: config.no_paged_attn,
        admission: config.policies.admission,
        victim: config.policies.victim,
        fairness: config.policies.fairness,
        ..SchedulerConfig::new(config.max_num_seqs, config.max_num_batched_tokens, limits.scheduled)
    }
}

/// What a thread does besides.
fn prepare_thread(thread: &mut EngineThread, files: &ModelFiles, config: &EngineConfig, swapper: Option<Swapper>) {
    // Nobody is being answered while prompts are computed: what makes embeddings has nothing else to do.
    thread.pace(config.max_step_latency.filter(|_| files.embedding().is_none()));
    // Without drafts of other kinds nothing is kept that wrong ones go back to.
    let may_force = !files.config().is_recurrent() || config.speculation.is_some();
    thread.speculate(config.speculation.as_ref(), config.forced_drafts && may_force);
    if let Some(swapper) = swapper {
        thread.attach(swapper);
    }
    if let Some(options) = &config.media {
        thread.take_media(encoder_cache_bytes(options, files));
    }
}

/// Tokens of a request at most.
struct RequestLimits {
    /// As callers are told.
    given: usize,
    /// Prompt and answer, as the scheduler counts them.
    scheduled: usize,
}

/// An embedding is the answer to the last token, and takes no place of its own.
fn request_limits(files: &ModelFiles, config: &EngineConfig, plan: &MemoryPlan, whole_prompts: bool) -> RequestLimits {
    let Some(embedding) = files.embedding() else {
        return RequestLimits { given: plan.max_model_len, scheduled: plan.max_model_len };
    };
    let one_step = if whole_prompts { config.max_num_batched_tokens } else { usize::MAX };
    let given = plan.max_model_len.min(embedding.max_input_len.unwrap_or(usize::MAX)).min(one_step);
    RequestLimits { given, scheduled: given + 1 }
}

pub(super) fn describe(files: &ModelFiles, config: &EngineConfig, plan: &MemoryPlan, backend: &dyn Backend) -> Vec<String> {
    const MIB: u64 = 1 << 20;
    let (info, model) = (backend.info(), files.config());
    let is_host = backend.memory().is_ok_and(|memory| memory.is_host);
    let commitment = if is_host { "address space; memory is committed as blocks are first used" } else { "of the GPU" };
    let mut lines = vec![
        format!(
            "Model {} with {} layers, {} MB of weights, context of {} tokens, dtype {:?}, on {} ({}, {} threads)",
            model.architecture,
            model.layers.len(),
            files.weight_bytes() / MIB,
            model.max_position_embeddings,
            config.dtype,
            info.device,
            info.isa,
            info.num_threads
        ),
        format!(
            "Mapped into memory from {}: do not change or shorten it while the model is loaded",
            files.weights().path().display()
        ),
        format!("Allocating {} MB for PagedAttention KV cache ({commitment})", plan.cache.ledger.budget_bytes / MIB),
        format!("PagedAttention KV cache type is {:?}", plan.cache.cache_type),
        format!(
            "Using PagedAttention with block size {} and {} blocks: available context length is {} tokens",
            plan.block_size(),
            plan.num_blocks(),
            plan.cache.ledger.servable_tokens
        ),
    ];
    if config.no_paged_attn {
        lines.push(format!("Without paged attention: a request reserves, and may have, {} tokens", plan.max_model_len));
    }
    if let Some(EmbeddingConfig { pooling, dimensions, heads, score, .. }) = files.embedding() {
        let heads = heads.len();
        let what = match score {
            None => format!("Makes embeddings of {dimensions} values"),
            Some(_) => "Scores pairs of texts".to_owned(),
        };
        lines.push(format!("{what}: pooling {pooling}, {heads} dense layers behind it"));
    }
    lines.extend(plan.to_string().lines().map(|line| format!("Memory: {line}")));
    lines
}

#[cfg(test)]
mod tests {
    use device::cuda::{EmbeddedKernels, Gpu, Module};

    use super::*;
    use crate::CpuOptions;

    static KERNELS: EmbeddedKernels = EmbeddedKernels {
        note: "compiled",
        modules: &[Module { name: "norm", image: &[], kernels: &["rms_norm"] }],
        targets: &["sm_90"],
    };

    #[test]
    fn auto_takes_the_first_gpu_that_kernels_run_on_and_the_processor_otherwise() {
        let gpu_of = |capability| Gpu { name: "Card".into(), capability, multiprocessors: 132 };
        let chosen = |config: &EngineConfig, capabilities: &[(u32, u32)]| {
            let gpus = capabilities.iter().map(|capability| gpu_of(*capability)).collect();
            gpu(config, &|| CudaReport { driver: Ok((13, 0)), gpus: Vec::clone(&gpus), kernels: &KERNELS }).unwrap()
        };
        let auto = EngineConfig { device: Device::Auto, ..EngineConfig::default() };
        assert_eq!(chosen(&auto, &[(7, 5), (9, 0), (8, 0)]), Some(1));
        assert_eq!(chosen(&auto, &[(7, 5)]), None);
        assert_eq!(chosen(&EngineConfig { device: Device::Cpu, ..auto.clone() }, &[(9, 0)]), None);
        assert_eq!(
            chosen(&EngineConfig { device: Device::Cuda(1), ..auto.clone() }, &[(9, 0)]),
            Some(1),
            "refused where it is opened"
        );
        assert_eq!(chosen(&EngineConfig { deterministic: true, ..auto.clone() }, &[(9, 0)]), Some(0));
        let cpu = CpuOptions { isa: Some("scalar".into()), num_threads: None };
        assert_eq!(chosen(&EngineConfig { cpu, ..auto }, &[(9, 0)]), None);
    }
}

//! From files to a running engine thread.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64},
        mpsc,
    },
};

use device::{
    Backend, DeviceError, KvDType,
    cpu::{CpuBackend, CpuTier},
    cuda::{self, Library, LibraryPaths},
    host::{num_physical_cores, trim_heap},
};
use paged::{Scheduler, SchedulerConfig};

use super::{
    Device, EngineConfig, LoadProgress, MemoryPlan, ModelSource, Shared,
    plan::{PlannedDevices, PlannedModel, plan, precision},
    thread::EngineThread,
    tier,
};
use crate::{
    EngineError, GenerationConfig,
    chat_template::{ChatTemplate, template_in_dir},
    kv_tier::Swapper,
    model::ModelFiles,
    model_runner::{ModelRunner, RunnerOptions},
    tokenizer::Tokenizer,
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
    std::thread::Builder::new()
        .name("mistral-paged-engine".into())
        .spawn(move || thread.run())
        .map_err(|e| EngineError::Internal(format!("the engine thread cannot start: {e}")))?;
    Ok(shared)
}

fn backend(config: &EngineConfig) -> Result<Arc<dyn Backend>, EngineError> {
    match config.device {
        Device::Cpu => {
            let tier = config.cpu.tier.as_deref().map_or_else(|| Ok(CpuTier::detect()), CpuTier::parse)?;
            let num_threads = config.cpu.num_threads.unwrap_or_else(num_physical_cores);
            Ok(Arc::new(CpuBackend::new(tier, num_threads)?))
        }
        Device::Cuda(ordinal) => Err(no_gpu(ordinal, &config.cuda_libraries)),
    }
}

/// Why a GPU does not serve models: everything that this machine lacks, or else that no model is served on GPUs yet.
fn no_gpu(ordinal: usize, libraries: &LibraryPaths) -> EngineError {
    let report = cuda::survey();
    let missing = [cuda::require(&report, ordinal).err(), libraries.locate(Library::CublasLt).err()];
    let missing: Vec<_> = missing.into_iter().flatten().map(|e| e.to_string()).collect();
    if missing.is_empty() {
        let text = format!("device=\"cuda:{ordinal}\" is there, but models are not served on GPUs yet; use device=\"cpu\"");
        return EngineError::NotSupported(text);
    }
    DeviceError::Unsupported(format!("device=\"cuda:{ordinal}\" cannot be used: {}", missing.join(". And "))).into()
}

/// What loading the model would take; only the headers of its files are read. `cards`: see [`Engine::memory_plan`](super::Engine).
pub fn memory_plan(source: &ModelSource, config: &EngineConfig, cards: Option<&[u64]>) -> Result<MemoryPlan, EngineError> {
    check_limits(config)?;
    let backend = backend(config)?;
    let devices = cards.map_or(PlannedDevices::Host(&*backend), PlannedDevices::Cards);
    let architecture = config.architecture.as_deref();
    if let ModelSource::HuggingFace { path, .. } = source
        && !SafetensorsFiles::are_in(path)
    {
        let decoder = ModelFiles::hugging_face_config(path, architecture)?;
        return plan(
            PlannedModel { config: &decoder, weights: None, tokenizer_bytes: 0, encoder_cache_bytes: 0 },
            config,
            devices,
        );
    }
    let files = ModelFiles::open(source, architecture)?;
    let text = TextFiles::open(source, &files, config.chat_template.as_deref())?;
    plan(planned_model(&files, &text), config, devices)
}

fn planned_model<'a>(files: &'a ModelFiles, text: &TextFiles) -> PlannedModel<'a> {
    PlannedModel {
        config: files.config(),
        weights: Some(files.weights()),
        tokenizer_bytes: text.tokenizer.estimated_bytes(),
        // Every model is one of text.
        encoder_cache_bytes: 0,
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

/// Loads the model and sizes the pool; the thread is not started.
pub fn load_with_backend(
    source: &ModelSource,
    config: &EngineConfig,
    backend: &Arc<dyn Backend>,
    progress: &dyn Fn(LoadProgress),
) -> Result<(Shared, EngineThread), EngineError> {
    check_limits(config)?;
    tier::check(config)?;
    let files = ModelFiles::open(source, config.architecture.as_deref())?;
    let text = TextFiles::open(source, &files, config.chat_template.as_deref())?;
    let plan = plan(planned_model(&files, &text), config, PlannedDevices::Host(&**backend))?;
    let cache = &plan.cache;

    let options = RunnerOptions {
        precision: precision(config),
        kv_dtype: device_dtype(cache.cache_type),
        max_num_batched_tokens: config.max_num_batched_tokens,
        max_num_seqs: config.max_num_seqs,
    };
    let mut runner = ModelRunner::load(&files, Arc::clone(backend), options, progress)?;
    // One block more than is promised: the null block.
    runner.allocate_kv(cache.num_gpu_blocks + 1, cache.block_size)?;
    let kv = cache.kv_cache_config(config.prefix_caching, rand::random());
    let scheduler = Scheduler::new(
        SchedulerConfig {
            retain_kv: !config.no_kv_cache,
            reserve_full_context: config.no_paged_attn,
            admission: config.policies.admission,
            victim: config.policies.victim,
            fairness: config.policies.fairness,
            ..SchedulerConfig::new(config.max_num_seqs, config.max_num_batched_tokens, plan.max_model_len)
        },
        kv.clone(),
    )
    .map_err(|e| EngineError::InvalidArgument(e.to_string()))?;

    let description = describe(&files, config, &plan, &**backend);
    for line in &description {
        tracing::info!("{line}");
    }
    let (inbox, commands) = mpsc::channel();
    let tokenizer = Arc::new(text.tokenizer);
    let servable_tokens = scheduler.servable_tokens();
    let (weight_bytes, kv_cache_bytes) = (runner.weight_bytes(), runner.kv_cache_bytes());
    let swapper = tier::open(source, &files, config, &runner, &**backend)?;
    let flush = swapper.as_ref().map(Swapper::flush_on_drop);
    let mut thread = EngineThread::new(commands, scheduler, kv, runner, Arc::clone(&tokenizer));
    thread.pace(config.max_step_latency);
    if let Some(swapper) = swapper {
        thread.attach(swapper);
    }
    let shared = Shared {
        inbox,
        tokenizer,
        chat_template: text.chat_template,
        generation_config: text.generation_config,
        architecture: files.config().architecture,
        vocab_size: files.config().vocab_size,
        max_model_len: plan.max_model_len,
        servable_tokens,
        num_blocks: cache.num_gpu_blocks,
        block_bytes: cache.ledger.bytes_per_block,
        seed: config.seed.or(config.deterministic.then_some(0)),
        one_seed: config.deterministic,
        submitted: AtomicU64::new(0),
        draining: AtomicBool::new(false),
        description,
        plan,
        weight_bytes,
        kv_cache_bytes,
        _flush: flush,
    };
    Ok((shared, thread))
}

/// What turns requests into tokens and back.
struct TextFiles {
    tokenizer: Tokenizer,
    chat_template: Option<ChatTemplate>,
    generation_config: GenerationConfig,
}

impl TextFiles {
    /// An explicit template goes before the folder's, which goes before the GGUF file's own.
    fn open(source: &ModelSource, files: &ModelFiles, template: Option<&str>) -> Result<Self, EngineError> {
        let (mut tokenizer, dir) = match source {
            ModelSource::HuggingFace { path, tokenizer_json } => {
                (Tokenizer::from_hf_dir(path, tokenizer_json.as_deref())?, Some(path.as_path()))
            }
            ModelSource::Gguf { files: paths, tokenizer_dir, tokenizer_json } => {
                let dir = tokenizer_dir.as_deref().or_else(|| paths.first().and_then(|p| p.parent()));
                (gguf_tokenizer(files, tokenizer_dir.as_deref(), tokenizer_json.as_deref())?, dir)
            }
        };
        tokenizer.add_eos_ids(files.config().eos_token_ids.iter().copied());
        let generation_config = dir.map(GenerationConfig::from_dir).transpose()?.unwrap_or_default();
        tokenizer.add_eos_ids(generation_config.eos_token_ids.iter().copied());
        let source_text = match template {
            Some(text) => Some(text.to_owned()),
            None => match dir.map(template_in_dir).transpose()?.flatten() {
                Some(text) => Some(text),
                None => files.metadata().and_then(|m| m.str("tokenizer.chat_template")).map(str::to_owned),
            },
        };
        let special = tokenizer.special_tokens().clone();
        let chat_template = source_text.map(|text| ChatTemplate::new(&text, special)).transpose()?;
        Ok(Self { tokenizer, chat_template, generation_config })
    }
}

fn gguf_tokenizer(files: &ModelFiles, dir: Option<&Path>, json: Option<&Path>) -> Result<Tokenizer, EngineError> {
    let metadata = files.metadata().ok_or_else(|| EngineError::Internal("a GGUF file without metadata".into()))?;
    let mut tokenizer = match (dir, json) {
        (Some(dir), json) => Tokenizer::from_hf_dir(dir, json)?,
        (None, Some(json)) => Tokenizer::from_file(json)?,
        (None, None) => return Tokenizer::from_gguf(metadata),
    };
    // A tokenizer.json alone does not say which tokens are special to templates; what a folder says goes first.
    tokenizer.add_gguf_special_tokens(metadata)?;
    Ok(tokenizer)
}

fn device_dtype(dtype: paged::KvDType) -> KvDType {
    match dtype {
        paged::KvDType::F32 => KvDType::F32,
        paged::KvDType::F16 => KvDType::F16,
        paged::KvDType::BF16 => KvDType::BF16,
        paged::KvDType::F8E4M3 => KvDType::F8E4M3,
        paged::KvDType::Int8 => KvDType::Int8,
    }
}

fn describe(files: &ModelFiles, config: &EngineConfig, plan: &MemoryPlan, backend: &dyn Backend) -> Vec<String> {
    const MIB: u64 = 1 << 20;
    let (info, model) = (backend.info(), files.config());
    let mut lines = vec![
        format!(
            "Model {} with {} layers, {} MB of weights, context of {} tokens, dtype {:?}, on {} ({}, {} threads)",
            model.architecture,
            model.layers.len(),
            files.weight_bytes() / MIB,
            model.max_position_embeddings,
            config.dtype,
            info.device,
            info.tier,
            info.num_threads
        ),
        format!(
            "Allocating {} MB for PagedAttention KV cache (address space; memory is committed as blocks are first used)",
            plan.cache.ledger.budget_bytes / MIB
        ),
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
    lines.extend(plan.to_string().lines().map(|line| format!("Memory: {line}")));
    lines
}

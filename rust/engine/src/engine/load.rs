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
    Backend, KvDType, Precision,
    cpu::{CpuBackend, CpuTier},
    host::{host_memory, num_physical_cores},
};
use paged::{
    CacheConfig, DeviceMemory, KvShape, ModelConfigLike, PoolLimits, Scheduler, SchedulerConfig, calculate_cache_config,
};

use super::{EngineConfig, LoadProgress, ModelDType, ModelSource, Shared, thread::EngineThread};
use crate::{
    EngineError, GenerationConfig,
    chat_template::{ChatTemplate, template_in_dir},
    model::{DecoderConfig, ModelFiles},
    model_runner::{ModelRunner, RunnerOptions},
    tokenizer::Tokenizer,
};

/// Loads the model, sizes the pool, starts the thread.
pub fn load(source: &ModelSource, config: &EngineConfig, progress: &dyn Fn(LoadProgress)) -> Result<Shared, EngineError> {
    let tier = config.cpu.tier.as_deref().map_or_else(|| Ok(CpuTier::detect()), CpuTier::parse)?;
    let num_threads = config.cpu.num_threads.unwrap_or_else(num_physical_cores);
    let backend: Arc<dyn Backend> = Arc::new(CpuBackend::new(tier, num_threads)?);
    let (shared, thread) = load_with_backend(source, config, &backend, progress)?;
    std::thread::Builder::new()
        .name("mistral-paged-engine".into())
        .spawn(move || thread.run())
        .map_err(|e| EngineError::Internal(format!("the engine thread cannot start: {e}")))?;
    Ok(shared)
}

/// Loads the model and sizes the pool; the thread is not started.
pub fn load_with_backend(
    source: &ModelSource,
    config: &EngineConfig,
    backend: &Arc<dyn Backend>,
    progress: &dyn Fn(LoadProgress),
) -> Result<(Shared, EngineThread), EngineError> {
    for (name, value) in [("max_num_seqs", config.max_num_seqs), ("max_num_batched_tokens", config.max_num_batched_tokens)] {
        if value == 0 {
            return Err(EngineError::InvalidArgument(format!("{name} is 0; it must be at least 1")));
        }
    }
    let files = ModelFiles::open(source, config.architecture.as_deref())?;
    let text = TextFiles::open(source, &files, config.chat_template.as_deref())?;
    let cache = size_cache(&files, config)?;

    let precision = match config.dtype {
        ModelDType::F32 => Precision::Exact,
        _ if config.deterministic => Precision::Deterministic,
        _ => Precision::Fast,
    };
    let options = RunnerOptions {
        precision,
        kv_dtype: device_dtype(cache.cache_type),
        max_num_batched_tokens: config.max_num_batched_tokens,
        max_num_seqs: config.max_num_seqs,
    };
    let mut runner = ModelRunner::load(&files, Arc::clone(backend), options, progress)?;
    // One block more than is promised: the null block.
    runner.allocate_kv(cache.num_gpu_blocks + 1, cache.block_size)?;
    let mut max_model_len = files.config().max_position_embeddings;
    if config.no_paged_attn {
        // A whole context is reserved for each request, so it can be no longer than the pool.
        max_model_len = max_model_len.min(cache.num_gpu_blocks / cache.groups.groups.len() * cache.block_size);
    }
    let kv = cache.kv_cache_config(config.prefix_caching, rand::random());
    let scheduler = Scheduler::new(
        SchedulerConfig {
            retain_kv: !config.no_kv_cache,
            reserve_full_context: config.no_paged_attn,
            admission: config.policies.admission,
            victim: config.policies.victim,
            fairness: config.policies.fairness,
            ..SchedulerConfig::new(config.max_num_seqs, config.max_num_batched_tokens, max_model_len)
        },
        kv.clone(),
    )
    .map_err(|e| EngineError::InvalidArgument(e.to_string()))?;

    let description = describe(&files, config, &cache, &**backend);
    for line in &description {
        tracing::info!("{line}");
    }
    let (inbox, commands) = mpsc::channel();
    let tokenizer = Arc::new(text.tokenizer);
    let servable_tokens = scheduler.servable_tokens();
    let thread = EngineThread::new(commands, scheduler, kv, runner, Arc::clone(&tokenizer));
    let shared = Shared {
        inbox,
        tokenizer,
        chat_template: text.chat_template,
        generation_config: text.generation_config,
        architecture: files.config().architecture,
        vocab_size: files.config().vocab_size,
        max_model_len,
        servable_tokens,
        num_blocks: cache.num_gpu_blocks,
        block_bytes: cache.ledger.bytes_per_block,
        seed: config.seed.or(config.deterministic.then_some(0)),
        one_seed: config.deterministic,
        submitted: AtomicU64::new(0),
        draining: AtomicBool::new(false),
        description,
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

/// The model as the sizing of the pool sees it.
struct KvSizes<'a>(&'a DecoderConfig);

impl ModelConfigLike for KvSizes<'_> {
    fn num_layers(&self) -> usize {
        self.0.layers.len()
    }

    fn kv_shape(&self, _layer: usize) -> KvShape {
        KvShape { num_kv_heads: self.0.num_kv_heads, k_head_dim: self.0.head_dim, v_head_dim: self.0.head_dim }
    }

    fn window(&self, layer: usize) -> Option<usize> {
        self.0.layers[layer].window
    }

    fn max_seq_len(&self) -> usize {
        self.0.max_position_embeddings
    }
}

fn size_cache(files: &ModelFiles, config: &EngineConfig) -> Result<CacheConfig, EngineError> {
    let model_dtype = match config.dtype {
        ModelDType::F32 => paged::KvDType::F32,
        ModelDType::BF16 => paged::KvDType::BF16,
        ModelDType::F16 | ModelDType::Auto => paged::KvDType::F16,
    };
    let host = host_memory();
    let memory =
        DeviceMemory { total: host.total_bytes, available: host.available_bytes, pending: files.weight_bytes(), unified: true };
    let limits = PoolLimits {
        max_num_seqs: config.max_num_seqs,
        max_num_batched_tokens: config.max_num_batched_tokens,
        max_model_len: files.config().max_position_embeddings,
    };
    Ok(calculate_cache_config(&config.paged_attention, &KvSizes(files.config()), model_dtype, &[memory], &limits)?)
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

fn describe(files: &ModelFiles, config: &EngineConfig, cache: &CacheConfig, backend: &dyn Backend) -> Vec<String> {
    const MIB: u64 = 1 << 20;
    let (info, model, ledger) = (backend.info(), files.config(), &cache.ledger);
    vec![
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
            ledger.budget_bytes / MIB
        ),
        format!("PagedAttention KV cache type is {:?}", cache.cache_type),
        format!(
            "Using PagedAttention with block size {} and {} blocks: available context length is {} tokens",
            cache.block_size, cache.num_gpu_blocks, ledger.servable_tokens
        ),
    ]
}

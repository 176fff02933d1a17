//! From files to a running engine thread.

use std::sync::{Arc, atomic::AtomicU64, mpsc};

use device::{
    Backend, KvDType, Precision,
    cpu::{CpuBackend, CpuTier, default_num_threads, host_memory},
};
use paged::{
    CacheConfigRequest, DeviceMemory, KvCacheConfig, KvGroups, MemoryGpuConfig, Scheduler, SchedulerConfig, calculate_cache_config,
};

use super::{EngineConfig, LoadProgress, MemoryOptions, ModelDType, ModelSource, Shared, thread::EngineThread};
use crate::{
    EngineError,
    chat_template::ChatTemplate,
    generation_config::GenerationConfig,
    input_batch::BlockLayout,
    model::ModelFiles,
    model_runner::{ModelRunner, RunnerOptions},
    tokenizer::Tokenizer,
};

/// Loads the model, sizes the pool, starts the thread.
pub fn load(source: &ModelSource, config: &EngineConfig, progress: &dyn Fn(LoadProgress)) -> Result<Shared, EngineError> {
    validate(config)?;
    let memory = memory_config(config.memory)?;
    let tier = config.cpu.tier.as_deref().map_or_else(|| Ok(CpuTier::detect()), CpuTier::parse)?;
    let num_threads = config.cpu.num_threads.unwrap_or_else(default_num_threads);
    let backend: Arc<dyn Backend> = Arc::new(CpuBackend::new(tier, num_threads));

    let files = ModelFiles::open(source, config.architecture.as_deref())?;
    todo!()
}

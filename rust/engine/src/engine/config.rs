//! How a model is found and run.

use std::{path::PathBuf, sync::Arc, time::Duration};

use device::cuda::{CudaOptions, LibraryPaths};
use kv_events::KvEventsConfig;
use paged::{PagedAttentionConfig, Policies};

use super::{DraftModel, MtpHead};
use crate::{
    AdapterOptions, EmbeddingOptions, EngineError, Importance, Isq, MediaOptions, Speculation, kv_tier::KvTierConfig, weights,
};

/// Where a model lies.
#[derive(Clone, Debug)]
pub enum ModelSource {
    /// A folder in Hugging Face layout: config.json, safetensors, tokenizer.json.
    HuggingFace {
        /// The folder.
        path: PathBuf,
        /// A tokenizer.json elsewhere.
        tokenizer_json: Option<PathBuf>,
    },
    /// GGUF files; more than one is a split file.
    Gguf {
        /// The files, in order.
        files: Vec<PathBuf>,
        /// A folder with tokenizer.json (and chat template) to use instead of the file's metadata.
        tokenizer_dir: Option<PathBuf>,
        /// A tokenizer.json elsewhere.
        tokenizer_json: Option<PathBuf>,
    },
    /// A file of Llama as they were before GGUF: GGML, GGMF or GGJT.
    Ggml {
        /// The file.
        file: PathBuf,
        /// How many heads of queries share one of keys, which the file does not say; 1 but for Llama 2 70B.
        gqa: usize,
        /// A folder with tokenizer.json (and chat template) to use instead of the file's vocabulary.
        tokenizer_dir: Option<PathBuf>,
        /// A tokenizer.json elsewhere.
        tokenizer_json: Option<PathBuf>,
    },
}

impl ModelSource {
    /// A GGUF file, a folder with one, a folder in Hugging Face layout, or one as Meta publishes Llama.
    pub fn from_path(path: impl Into<PathBuf>) -> Result<Self, EngineError> {
        let path = path.into();
        let gguf = |files| Self::Gguf { files, tokenizer_dir: None, tokenizer_json: None };
        if path.is_file() {
            return Ok(gguf(vec![path]));
        }
        if path.join("config.json").is_file() || weights::meta::folder_of(&path).is_some() {
            return Ok(Self::HuggingFace { path, tokenizer_json: None });
        }
        let entries = std::fs::read_dir(&path).map_err(|e| EngineError::Load(format!("{}: {e}", path.display())))?;
        let mut files: Vec<PathBuf> = entries.filter_map(|e| e.ok().map(|e| e.path())).collect();
        files.retain(|f| f.extension().is_some_and(|e| e == "gguf"));
        match files.len() {
            1 => Ok(gguf(files)),
            0 => Err(EngineError::Load(format!("{} has neither a config.json nor a .gguf file", path.display()))),
            n => Err(EngineError::Load(format!("{} has {n} .gguf files: name one of them", path.display()))),
        }
    }
}

/// Where a model runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Device {
    /// The first GPU that the kernels of this build run on; else, or when something is asked for that only a processor does, the
    /// processor.
    Auto,
    /// The host's processor.
    #[default]
    Cpu,
    /// An NVIDIA GPU by its number, as the driver counts.
    Cuda(usize),
}

/// The best device of this machine: [`Device::Auto`].
pub fn best_device() -> Device {
    Device::Auto
}

/// Computation type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelDType {
    /// The fast path: activations of 8 bits, of 15 in outlier blocks, on quantized weights; 16-bit KV.
    Auto,
    /// bfloat16 KV, otherwise as `Auto`.
    BF16,
    /// float16 KV, otherwise as `Auto`.
    F16,
    /// The exact path: float weights, activations and KV.
    F32,
}

/// CPU options.
#[derive(Clone, Debug, Default)]
pub struct CpuOptions {
    /// Instruction set by name; the machine's best unless given.
    pub isa: Option<String>,
    /// Worker threads; the cores available to the process unless given.
    pub num_threads: Option<usize>,
}

/// A reader of an answer hardly notices a pause of this length.
const DEFAULT_MAX_STEP_LATENCY: Duration = Duration::from_millis(250);

/// How to run a model.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Where to run.
    pub device: Device,
    /// Requests that run together at most, at least 1.
    pub max_num_seqs: usize,
    /// Tokens a step at most, at least 1.
    pub max_num_batched_tokens: usize,
    /// How long a step may take in which a request is being answered: prompts beside it are computed in chunks small enough, as
    /// far as the machine's speed can be foretold. Prompts may make a step up to twice as long as answers alone take, even beyond
    /// this. `None` leaves chunks as long as steps.
    pub max_step_latency: Option<Duration>,
    /// Drops a request's blocks after each step and computes everything again.
    pub no_kv_cache: bool,
    /// Keeps blocks of ended requests findable.
    pub prefix_caching: bool,
    /// Bytes of snapshots of recurrent layers' states, where prefix hits of such models end; 0: none, and no prefix cache.
    /// `None`: 256 MiB, or eight snapshots where these take more.
    pub state_snapshot_bytes: Option<u64>,
    /// Gives each request its whole context up front from the same pool (the naive baseline).
    pub no_paged_attn: bool,
    /// Who runs, and who gives way.
    pub policies: Policies,
    /// Tokens a block, size and element type of the pool.
    pub paged_attention: PagedAttentionConfig,
    /// Computation type.
    pub dtype: ModelDType,
    /// Architecture by HF `model_type` that the caller expects; contradiction is an error.
    pub architecture: Option<String>,
    /// Seeds requests that have no seed of their own.
    pub seed: Option<u64>,
    /// Makes a request's logits the same bits whatever runs beside it, is cached, or was preempted, in chunks of any size and on
    /// any number of threads; requests without a seed of their own all have the engine's, 0 unless given.
    pub deterministic: bool,
    /// A chat template's text to use instead of the model's.
    pub chat_template: Option<String>,
    /// Where committed blocks go so that they outlive the pool; needs the prefix cache.
    pub kv_tier: Option<KvTierConfig>,
    /// Where others are told which blocks the prefix cache holds; needs it. Nobody is unless given.
    pub kv_events: Option<KvEventsConfig>,
    /// What float weights are quantized to as they are loaded; not at all unless given.
    pub in_situ_quant: Option<Isq>,
    /// How much the columns of weights count as they are quantized; all alike unless given.
    pub imatrix: Option<Arc<Importance>>,
    /// A text by which that is measured before they are quantized.
    pub calibration_file: Option<PathBuf>,
    /// Adapters that it is loaded with, and what later ones may take; none are taken unless given.
    pub adapters: Option<AdapterOptions>,
    /// It makes embeddings, and no text; it makes text unless given.
    pub embedding: Option<EmbeddingOptions>,
    /// It takes images as well; text alone unless given.
    pub media: Option<MediaOptions>,
    /// CPU options.
    pub cpu: CpuOptions,
    /// Where NVIDIA's libraries may be.
    pub cuda_libraries: LibraryPaths,
    /// How a GPU computes.
    pub cuda: CudaOptions,
    /// Who proposes drafts, and which of them are computed; none unless given.
    pub speculation: Option<Speculation>,
    /// A smaller model that makes the drafts of [`Speculation::by_model`]; none unless given.
    pub draft: Option<DraftModel>,
    /// Heads behind the model's layers make these drafts; none unless given. Not beside `draft`.
    pub mtp: Option<MtpHead>,
    /// Text that a grammar leaves no choice about is drafted, so that its tokens take fewer steps; it changes none of them.
    pub forced_drafts: bool,
    /// Arguments that were given and that only a GPU can honour, such as `cuda_graphs=True`; a processor refuses them.
    pub only_for_gpus: Vec<String>,
}

impl EngineConfig {
    /// The defaults on a device with a KV pool as given.
    pub fn new(device: Device, paged_attention: PagedAttentionConfig) -> Self {
        Self { device, paged_attention, ..Self::default() }
    }

    /// Whether a processor can honour everything.
    pub(super) fn check_for_processor(&self) -> Result<(), EngineError> {
        let Some(argument) = self.only_for_gpus.first() else { return Ok(()) };
        let text =
            format!("{argument} is about GPUs, and the model would run on the processor: use device=\"cuda:0\", or leave it out");
        Err(EngineError::InvalidArgument(text))
    }
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            device: Device::Cpu,
            max_num_seqs: 32,
            max_num_batched_tokens: 4096,
            max_step_latency: Some(DEFAULT_MAX_STEP_LATENCY),
            no_kv_cache: false,
            prefix_caching: true,
            state_snapshot_bytes: None,
            no_paged_attn: false,
            policies: Policies::default(),
            paged_attention: PagedAttentionConfig::default(),
            dtype: ModelDType::Auto,
            architecture: None,
            seed: None,
            deterministic: false,
            chat_template: None,
            kv_tier: None,
            kv_events: None,
            in_situ_quant: None,
            imatrix: None,
            calibration_file: None,
            adapters: None,
            embedding: None,
            media: None,
            cpu: CpuOptions::default(),
            cuda_libraries: LibraryPaths::default(),
            cuda: CudaOptions::default(),
            speculation: None,
            draft: None,
            mtp: None,
            forced_drafts: true,
            only_for_gpus: Vec::new(),
        }
    }
}

/// How far loading has come.
#[derive(Clone, Copy, Debug)]
pub struct LoadProgress {
    /// Bytes of weights done.
    pub done_bytes: u64,
    /// Bytes of weights in all.
    pub total_bytes: u64,
}

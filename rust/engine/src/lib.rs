//! From model files and requests to tokens, over paged KV; usable from Rust without Python.

mod calibration;
pub mod chat_template;
pub mod completion;
pub mod embedding;
pub mod engine;
pub mod error;
pub mod event_sink;
pub mod generation_config;
pub mod grammar;
pub mod importance;
pub mod input_batch;
pub mod isq;
mod json;
pub mod keys;
pub mod kv_tier;
pub mod lora;
mod media;
pub mod model;
pub mod model_runner;
pub mod model_weights;
pub mod output_text;
pub mod quantize;
pub mod request;
pub mod sampler;
pub mod speculation;
mod state_slots;
pub mod tokenizer;
pub mod tools;
pub mod weights;

pub use audio;
pub use chat_template::{ChatTemplate, RenderOptions};
pub use completion::{
    Completion, CompletionChoice, CompletionCollector, FinishReason, OutputEvent, PromptLogprob, RequestStream, TokenLogprobs,
    TopLogprob, Usage,
};
pub use device::{HostMemory, cpu::Isa, cuda, host_memory, num_physical_cores};
pub use embedding::{
    EmbeddingConfig, EmbeddingInput, EmbeddingOptions, EmbeddingRequest, HeadActivation, HeadConfig, PairTemplate, Pooling,
    RerankRequest, ScoreActivation, TokenLogits, Truncation,
};
pub use engine::{
    Continuation, CpuOptions, DEFAULT_MTP_DRAFTS, Device, DeviceBytes, DraftModel, Drain, Engine, EngineConfig, GroupPlan,
    KvCacheStats, LoadProgress, MemoryPlan, ModelDType, ModelSource, MtpHead, PoolSnapshot, RequestHandle, STEP_TOKENS, Sequence,
    StepTokens, Vitals, best_device,
};
pub use error::EngineError;
pub use event_sink::{Event, EventSink};
pub use generation_config::GenerationConfig;
pub use grammar::{Grammar, GrammarFault, check_strict};
pub use images;
pub use importance::Importance;
pub use isq::Isq;
pub use kv_events::{KvEventsConfig, KvEventsStats};
pub use kv_tier::KvTierConfig;
pub use lora::{AdapterChoice, AdapterInfo, AdapterOptions, AdapterStatus, AdapterTraffic, LoadAdapter};
pub use media::MediaOptions;
pub use paged::{
    AdmissionPolicy, BlockUse, FairnessPolicy, MemoryGpuConfig, MissReason, PagedAttentionConfig, PagedCacheType, Policies,
    RequestStatus, RequestView, VictimPolicy,
};
pub use quantize::{QuantizeOptions, QuantizedFile, quantize_model};
pub use request::{
    DryParams, GenerationRequest, KeptPrompt, MAX_CHOICES, Media, MediaKind, Message, MessageContent, OutputKind, Prompt,
    SamplingParams, ServiceParams,
};
pub use sampler::{ResolvedSampling, Sampler};
pub use speculation::{DEFAULT_DRAFTS, DraftChoice, PromptLookup, Proposer, Speculation};
pub use tokenizer::{IncrementalDecoder, Tokenizer};
pub use tools::{CallChoice, Tool, ToolCall, ToolCallDelta, ToolOptions};
pub use video;

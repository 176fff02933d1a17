//! From model files and requests to tokens, over paged KV; usable from Rust without Python.

pub mod chat_template;
pub mod engine;
pub mod error;
pub mod generation_config;
pub mod input_batch;
mod json;
pub mod model;
pub mod model_runner;
pub mod output_text;
pub mod request;
pub mod sampler;
pub mod tokenizer;
pub mod weights;

pub use chat_template::{ChatTemplate, RenderOptions};
pub use engine::{CpuOptions, Device, Engine, EngineConfig, KvCacheStats, LoadProgress, ModelDType, ModelSource, best_device};
pub use error::EngineError;
pub use generation_config::GenerationConfig;
pub use paged::{MemoryGpuConfig, PagedAttentionConfig, PagedCacheType};
pub use request::{
    Completion, CompletionChoice, DryParams, FinishReason, GenerationRequest, MAX_CHOICES, Message, MessageContent, OutputEvent,
    Prompt, RequestStream, SamplingParams, TokenLogprobs, TopLogprob, Usage,
};
pub use sampler::{ResolvedSampling, Sampler};
pub use tokenizer::{IncrementalDecoder, Tokenizer};

//! From model files and requests to tokens, over paged KV; usable from Rust without Python.

pub mod engine;
pub mod error;
pub mod request;
pub mod weights;

pub use engine::{CpuOptions, Engine, EngineConfig, KvCacheStats, LoadProgress, ModelDType, ModelSource};
pub use error::EngineError;
pub use paged::{MemoryGpuConfig, PagedAttentionConfig, PagedCacheType};
pub use request::{
    Completion, CompletionChoice, DryParams, FinishReason, GenerationRequest, Message, MessageContent, OutputEvent, Prompt,
    RequestStream, SamplingParams, TokenLogprobs, TopLogprob, Usage,
};

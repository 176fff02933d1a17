//! How a step runs: tensors, weight formats, KV storage, and the backends that compute with them.
//!
//! The engine speaks to a device only through [`Backend`]: a [`Device`] with memory, and [`Phases`] at the grain of one fused
//! phase of a decoder layer. [`cpu::CpuBackend`] is the fast path, [`cpu::ReferenceBackend`] the plain one that every fast path
//! is tested against.

// Files of integration tests are read by unit tests too.
#[cfg(test)]
extern crate self as device;

pub mod attention;
pub mod backend;
pub mod cache_engine;
pub mod cpu;
pub mod cuda;
pub mod dtype;
pub mod elementwise;
pub mod error;
pub mod experts;
pub mod host;
pub mod kernel_args;
pub mod kv_codes;
pub mod kv_layout;
pub mod latent;
pub mod lora;
pub mod mmap;
pub mod quant;
pub mod recurrent;
pub mod sampling;
pub mod streams;
pub mod tensor;
pub mod token_mask;

pub use attention::{AttentionArgs, AttentionParams, HeadNorm, Mask, NormSpan, QueryScale, RopeArgs, RopeStyle, RopeTable};
pub use backend::{
    Activation, Backend, BackendInfo, BackendMemory, Constant, Device, DeviceSampler, EmbedArgs, EmbeddingTable, GateUpArgs,
    KvGroupMetadata, Linear, LinearOptions, Norm, NormKind, Phases, Precision, Projection, ResidualArgs, StepGraphs,
    StepMetadata, StepRecorder, WorkspaceShape, Xielu,
};
pub use cache_engine::{CacheEngine, DeviceBlocks, KvPlace};
pub use dtype::{DType, KvDType};
pub use elementwise::{ElementwisePhases, LayerInputArgs};
pub use error::DeviceError;
pub use experts::{
    Expert, ExpertActivation, ExpertArgs, ExpertGroups, ExpertPhases, Experts, LatentSpace, PartNorms, RouterScore, RoutingRule,
    SharedExpert,
};
pub use host::{HostMemory, host_memory, num_physical_cores};
pub use kernel_args::{MAX_EXPERT_GROUPS, MAX_EXPERTS};
pub use kv_layout::{KV_FORMAT, KvCacheSpec, KvLayer, KvShape, KvSide, KvSource};
pub use latent::{LatentArgs, LatentAttention, LatentPhases, LatentQuery};
pub use lora::{Adapter, AdapterRows, EmbeddingDelta, EmbeddingProduct, LinearDelta, LowRank, Magnitude};
pub use quant::GgmlType;
pub use recurrent::{
    Conv, DeviceStates, GateActivation, GatedDelta, Mamba, Mamba2, Recurrent, RecurrentArgs, RecurrentPhases, ShortConv,
    StateCache,
};
pub use sampling::{RowSampling, SampledRow};
pub use streams::{MAX_STREAMS, StreamArgs, StreamPhases};
pub use tensor::{Tensor, WeightView};
pub use token_mask::{TokenMask, TokenSet};

//! NVIDIA GPUs: what of them this machine has, and the kernels that were embedded for them.
//!
//! Nothing here is linked: the driver and its libraries are loaded when they are first asked for, so a machine without them runs
//! the same program.

mod attention;
mod attention_plan;
mod backend;
mod cublaslt;
mod dense;
pub mod driver;
mod elementwise;
pub mod embedded;
pub mod error;
mod experts;
mod gemm;
mod gemm_floats;
mod graph;
mod graph_lists;
mod graph_plan;
#[cfg(test)]
mod graph_tests;
mod grouped;
pub mod kernels;
mod kv_layers;
mod latent;
#[cfg(test)]
mod launchers;
pub mod libraries;
mod linear;
mod lora;
mod memory;
mod nvidia;
pub mod packed;
mod pieces;
mod planes;
mod projections;
#[cfg(test)]
mod recording;
mod recurrent;
pub mod report;
mod ring;
mod sample;
mod slabs;
mod streams;
mod swap;
#[cfg(test)]
mod tests;
pub mod timing;
mod turns;

pub use backend::{CudaBackend, CudaOptions};
pub use driver::{Driver, Launch, MATMUL_WORKSPACE, Matmul};
pub use embedded::{EMBEDDED, EmbeddedKernels, Module};
pub use error::CudaError;
pub use kernels::Kernel;
pub use libraries::{Library, LibraryPaths};
pub use nvidia::{NvidiaDriver, gpu_memory};
pub use report::{CudaReport, Gpu, GpuMemory, MIN_CAPABILITY, MIN_DRIVER, require, survey};

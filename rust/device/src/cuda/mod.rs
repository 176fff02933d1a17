//! NVIDIA GPUs: what of them this machine has, and the kernels that were embedded for them.
//!
//! Nothing here is linked: the driver and its libraries are loaded when they are first asked for, so a machine without them runs the
//! same program.

pub mod embedded;
pub mod error;
pub mod libraries;
mod nvidia;
pub mod report;

pub use embedded::{EMBEDDED, EmbeddedKernels, Module};
pub use error::CudaError;
pub use libraries::{Library, LibraryPaths};
pub use report::{CudaReport, Gpu, GpuMemory, MIN_CAPABILITY, MIN_DRIVER, require, survey};

//! The CPU backends: [`CpuBackend`], fast, and [`ReferenceBackend`], plain.

#[cfg(target_arch = "x86_64")]
pub mod amx;
mod attention;
mod backend;
pub mod isa;
pub(crate) mod latent;
pub mod linear;
pub mod pool;
pub mod quantize;
mod read_ahead;
mod recurrent;
mod reference;
pub mod roofline;
mod rope;
mod simd;
pub mod softmax;

#[cfg(target_arch = "x86_64")]
pub use amx::Amx;
pub use backend::CpuBackend;
pub use isa::Isa;
pub use linear::CpuLinear;
pub use pool::ThreadPool;
pub use reference::ReferenceBackend;
pub(crate) use reference::embed as embed_on_host;

//! The CPU backends: [`CpuBackend`], fast, and [`ReferenceBackend`], plain.

mod attention;
mod backend;
pub mod linear;
pub mod pool;
mod reference;
mod rope;
mod simd;
pub mod tier;

pub use backend::CpuBackend;
pub use linear::CpuLinear;
pub use pool::ThreadPool;
pub use reference::ReferenceBackend;
pub use tier::CpuTier;

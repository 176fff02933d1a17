//! The CPU backends: [`CpuBackend`], fast, and [`ReferenceBackend`], plain.

mod backend;
mod linear;
pub mod pool;
mod reference;
pub mod tier;

pub use backend::CpuBackend;
pub use linear::CpuLinear;
pub use pool::ThreadPool;
pub use reference::ReferenceBackend;
pub use tier::CpuTier;

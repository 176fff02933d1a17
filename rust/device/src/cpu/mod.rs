//! The CPU backend.

pub mod linear;
pub mod pool;
pub mod tier;

pub use linear::CpuLinear;
pub use pool::ThreadPool;
pub use tier::CpuTier;

//! The CPU backend.

#[cfg(target_arch = "x86_64")]
pub mod amx;
pub mod linear;
pub mod pool;
pub mod tier;

pub use linear::CpuLinear;
pub use pool::ThreadPool;
pub use tier::CpuTier;

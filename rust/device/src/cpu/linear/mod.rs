//! Linear layers on the CPU.

/// A packed weight.
pub struct CpuLinear;

//! The engine over the CUDA backend, whose kernels run emulated on the CPU.

#![allow(missing_docs)]

use std::sync::Arc;

use device::{
    Backend, BackendMemory,
    cuda::{CudaBackend, CudaOptions, Driver},
};
use kernel_tests::{EmulatedDriver, Order};

#[path = "../common/mod.rs"]
mod common;

mod cuda;
mod cuda_drafts;
mod cuda_graphs;
mod cuda_lora;
mod cuda_sampling;

const MIB: u64 = 1 << 20;

/// A GPU with so much memory, and what drives it.
fn gpu(total_bytes: u64, graphs: bool) -> (Arc<dyn Backend>, Arc<EmulatedDriver>) {
    let driver = Arc::new(EmulatedDriver::with_memory(Order::Ascending, total_bytes));
    let of = Arc::<EmulatedDriver>::clone(&driver) as Arc<dyn Driver>;
    (Arc::new(CudaBackend::with(of, CudaOptions { graphs, ..CudaOptions::default() }).unwrap()), driver)
}

/// Bytes of a card that are taken.
fn used(backend: &dyn Backend) -> u64 {
    let BackendMemory { total_bytes, available_bytes, .. } = backend.memory().unwrap();
    total_bytes - available_bytes
}

//! The engine over the CUDA backend, whose kernels run emulated on the CPU.

#![allow(missing_docs)]

#[path = "../common/mod.rs"]
mod common;

mod cuda;
mod cuda_drafts;
mod cuda_graphs;
mod cuda_lora;
mod cuda_sampling;

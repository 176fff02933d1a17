//! The CUDA kernels, emulated, against plain oracles.

#![allow(missing_docs)]

mod attention;
mod backend;
mod cache;
mod dense;
mod experts;
mod gemm_floats;
mod guards;
mod latent;
mod lora;
mod manifest;
mod packed;
mod recurrent;
mod sample;
mod steps;
mod timing;
mod weights;

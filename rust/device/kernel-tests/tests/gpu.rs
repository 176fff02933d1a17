//! The tests of kernels again, on the GPU of this machine: `make test-gpu`. `cargo test` leaves this program out.

#[path = "attention.rs"]
mod attention;
#[path = "backend.rs"]
mod backend;
#[path = "cache.rs"]
mod cache;
#[path = "dense.rs"]
mod dense;
#[path = "experts.rs"]
mod experts;
#[path = "gemm_floats.rs"]
mod gemm_floats;
#[path = "latent.rs"]
mod latent;
#[path = "lora.rs"]
mod lora;
#[path = "packed.rs"]
mod packed;
#[path = "recurrent.rs"]
mod recurrent;
#[path = "sample.rs"]
mod sample;
#[path = "steps.rs"]
mod steps;
#[path = "weights.rs"]
mod weights;

/// Runs before `main`, so before any test.
// SAFETY: the loader calls what this section lists with arguments that the function ignores.
#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = kernel_tests::gpu::use_gpu;

//! The tests of kernels again, on the GPU of this machine: `make test-gpu`. `cargo test` leaves this program out.

#[path = "kernels/attention.rs"]
mod attention;
#[path = "kernels/backend.rs"]
mod backend;
#[path = "kernels/cache.rs"]
mod cache;
#[path = "kernels/dense.rs"]
mod dense;
#[path = "kernels/experts.rs"]
mod experts;
#[path = "kernels/gemm_floats.rs"]
mod gemm_floats;
#[path = "kernels/latent.rs"]
mod latent;
#[path = "kernels/lora.rs"]
mod lora;
#[path = "kernels/packed.rs"]
mod packed;
#[path = "kernels/recurrent.rs"]
mod recurrent;
#[path = "kernels/sample.rs"]
mod sample;
#[path = "kernels/steps.rs"]
mod steps;
#[path = "kernels/weights.rs"]
mod weights;

/// Runs before `main`, so before any test.
// SAFETY: the loader calls what this section lists with arguments that the function ignores.
#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = kernel_tests::gpu::use_gpu;

// Products of weights in bf16 or f16, as they lie in their file, and up to 32 rows of activations.
#include "gemm_floats.cuh"

#define GEMM(NAME, T, ROWS) \
    WEIGHT_KERNEL(gemm_##NAME##_r##ROWS, GemmArgs, THREADS, SHARED_BYTES, 2) { gemm<T, ROWS>(GemmJob(args)); }
#define GEMM_OF(NAME, T) \
    GEMM(NAME, T, 8)     \
    GEMM(NAME, T, 16)    \
    GEMM(NAME, T, 32)
GEMM_OF(bf16, bf16)
GEMM_OF(f16, f16)

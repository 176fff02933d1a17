// Products of packed quantized weights and up to 32 rows of activations.
#include "gemm.cuh"

#define GEMM(NAME, FORMAT, ROWS)                     \
    using Gemm_##NAME##_##ROWS = Gemm<FORMAT, ROWS>; \
    WEIGHT_KERNEL(gemm_##NAME##_r##ROWS, GemmArgs, THREADS, (Gemm_##NAME##_##ROWS::SHARED_BYTES), 2) { gemm<FORMAT, ROWS>(GemmJob(args)); }
#define GEMM_OF(NAME, FORMAT) \
    GEMM(NAME, FORMAT, 8)     \
    GEMM(NAME, FORMAT, 16)    \
    GEMM(NAME, FORMAT, 32)
EACH_PACKED_FORMAT(GEMM_OF)

// Products of packed quantized weights and up to 32 rows of activations.
#include "gemm.cuh"

#define GEMM(NAME, FORMAT, ROWS)                     \
    using Gemm_##NAME##_##ROWS = Gemm<FORMAT, ROWS>; \
    WEIGHT_KERNEL(gemm_##NAME##_r##ROWS, GemmArgs, THREADS, (Gemm_##NAME##_##ROWS::SHARED_BYTES), 2) { gemm<FORMAT, ROWS>(GemmJob<>(args)); }
#define GEMM_NORMED(NAME, FORMAT)             \
    using Gemm_##NAME##_n1 = Gemm<FORMAT, 8>; \
    WEIGHT_KERNEL(gemm_##NAME##_n1, GemmArgs, THREADS, (Gemm_##NAME##_n1::SHARED_BYTES + MAX_NORMED_COLS * 2), 2) { gemm<FORMAT, 8>(GemmJob<true>(args)); }
#define GEMM_OF(NAME, FORMAT) \
    GEMM(NAME, FORMAT, 8)     \
    GEMM(NAME, FORMAT, 16)    \
    GEMM(NAME, FORMAT, 32)    \
    GEMM_NORMED(NAME, FORMAT)
EACH_PACKED_FORMAT(GEMM_OF)

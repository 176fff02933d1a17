// Products of a weight in bf16 or f16 for each group of rows: as gemm_*, a panel a CTA.
#include "gemm_floats.cuh"

#define GROUPED_GEMM_OF(NAME, T)                                                                                \
    GROUPED_KERNEL(grouped_gemm_##NAME##_r8, THREADS, SHARED_BYTES, 2, 8, float, (gemm<T, 8>))                  \
    GROUPED_KERNEL(grouped_gemm_##NAME##_r32, THREADS, SHARED_BYTES, 2, 32, uint16_t, (gemm<T, 32>))
GROUPED_GEMM_OF(bf16, bf16)
GROUPED_GEMM_OF(f16, f16)

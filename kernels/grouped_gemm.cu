// Products of a packed quantized weight for each group of rows: as gemm_*, a panel a CTA.
#include "gemm.cuh"

#define GROUPED_GEMM(NAME, FORMAT, ROWS, ELEMENT)    \
    using Gemm_##NAME##_##ROWS = Gemm<FORMAT, ROWS>; \
    GROUPED_KERNEL(grouped_gemm_##NAME##_r##ROWS, THREADS, (Gemm_##NAME##_##ROWS::SHARED_BYTES), 2, ROWS, ELEMENT, (gemm<FORMAT, ROWS>))
#define GROUPED_GEMM_OF(NAME, FORMAT)      \
    GROUPED_GEMM(NAME, FORMAT, 8, float)   \
    GROUPED_GEMM(NAME, FORMAT, 32, uint16_t)
EACH_PACKED_FORMAT(GROUPED_GEMM_OF)

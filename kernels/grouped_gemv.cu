// Products of a weight for each group of rows, of every format: as gemv_*_r8.
#include "gemv.cuh"

#define GROUPED_GEMV(NAME, FORMAT) \
    GROUPED_KERNEL(grouped_gemv_##NAME##_r8, WARPS * 32, (Gemv<FORMAT, 8>::SHARED_BYTES), 1, 8, float, (gemv<FORMAT, 8>))
EACH_WEIGHT_FORMAT(GROUPED_GEMV)

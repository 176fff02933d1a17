// Products of a weight and rows of activations, up to 8 a CTA.
#include "gemv.cuh"

#define GEMV(NAME, FORMAT, ROWS) \
    WEIGHT_KERNEL(gemv_##NAME##_r##ROWS, GemvArgs, WARPS * 32, (Gemv<FORMAT, ROWS>::SHARED_BYTES), (Gemv<FORMAT, ROWS>::CTAS)) { gemv<FORMAT, ROWS>(GemvJob<ROWS>(args)); }
#define GEMV_OF(NAME, FORMAT) \
    GEMV(NAME, FORMAT, 1)     \
    GEMV(NAME, FORMAT, 2)     \
    GEMV(NAME, FORMAT, 4)     \
    GEMV(NAME, FORMAT, 8)
EACH_WEIGHT_FORMAT(GEMV_OF)

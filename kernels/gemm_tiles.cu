// Products of packed quantized weights and many rows of activations.
#include "gemm_tiles.cuh"

#define GEMM(NAME, FORMAT, ROWS)                       \
    using Tiles_##NAME##_##ROWS = Tiles<FORMAT, ROWS>; \
    WEIGHT_KERNEL(gemm_##NAME##_r##ROWS, GemmArgs, THREADS, (Tiles_##NAME##_##ROWS::SHARED_BYTES), 2) { gemm_tiles<FORMAT, ROWS>(GemmJob(args)); }
#define GEMM_OF(NAME, FORMAT) \
    GEMM(NAME, FORMAT, 64)    \
    GEMM(NAME, FORMAT, 128)
EACH_PACKED_FORMAT(GEMM_OF)

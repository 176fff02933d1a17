// Products of packed quantized weights and many rows of activations.
#include "tiled_gemm.cuh"

#define TILED_GEMM(NAME, FORMAT)                                                                                   \
    using Tiled_##NAME = tiled::Shape<FORMAT>;                                                                     \
    WEIGHT_KERNEL(tiled_gemm_##NAME, GemmArgs, tiled::THREADS, Tiled_##NAME::SHARED_BYTES, 2) { tiled::gemm<FORMAT>(args); }
EACH_PACKED_FORMAT(TILED_GEMM)

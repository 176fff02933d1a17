// Products of a packed quantized weight for each group of many rows: as gemm_* of tiles, a tile a CTA.
#include "gemm_tiles.cuh"

#define GROUPED_GEMM(NAME, FORMAT)             \
    using Tiles_##NAME = Tiles<FORMAT, 64>;    \
    GROUPED_KERNEL(grouped_gemm_##NAME##_r64, THREADS, Tiles_##NAME::SHARED_BYTES, 2, 64, uint16_t, (gemm_tiles<FORMAT, 64>))
EACH_PACKED_FORMAT(GROUPED_GEMM)

// Rows of the token embedding.
//
//   CTA: a token; thread i: values 32 i .. 32 i + 32 of its row, then 32 (i + 64) ..., and one of those behind the last 32
//
// Bytes of a token: a row of the table and 4 cols. It waits for memory, or for its launch.
#include "weights.cuh"

namespace {

constexpr unsigned THREADS = 64;

template <class Format>
__device__ void embed(const EmbedArgs& args) {
    const uint8_t* row = args.table + row_of_token(args) * args.row_bytes;
    float* out = args.out + size_t(blockIdx.x) * args.cols;
    for (unsigned run = threadIdx.x; run < args.cols / 32; run += THREADS) {
        float w[32];
        weights::run_of_row<Format>(row, run, w);
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
            *reinterpret_cast<float4*>(out + run * 32 + i) =
                make_float4(w[i] * args.scale, w[i + 1] * args.scale, w[i + 2] * args.scale, w[i + 3] * args.scale);
        }
    }
    if constexpr (weights::IS_FLOAT<Format>) {
        const unsigned rest = args.cols / 32 * 32;
        for (unsigned i = rest + threadIdx.x; i < args.cols; i += THREADS) out[i] = Format::value(row, i) * args.scale;
    }
}

}  // namespace

#define EMBED(NAME, FORMAT) \
    KERNEL(embed_##NAME, EmbedArgs, THREADS, 0) { embed<FORMAT>(args); }
EACH_WEIGHT_FORMAT(EMBED)

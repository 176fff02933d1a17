// Rows of a weight as floats, for a matrix product of many rows.
//
//   CTA: 128 runs of 32 values, a thread each; runs are counted through all rows
//
// Bytes of a value: its stored ones (0.69 for q5_0) and 2 of bf16. It waits for memory: 4096 x 4096 of q5_0 to bf16 are 45 MB, at
// 4.3 TB/s 10 us.
#include "weights.cuh"

namespace {

constexpr unsigned THREADS = 128;

template <class Format>
__device__ void dequantize(const DequantizeArgs& args) {
    const unsigned runs = args.cols / 32;
    const size_t at = size_t(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= size_t(args.num_rows) * runs) return;
    float w[32];
    weights::run_of_row<Format>(args.w + at / runs * args.row_bytes, unsigned(at % runs), w);
    if (args.out_type == ELEMENT_F32) {
        float4* out = reinterpret_cast<float4*>(static_cast<float*>(args.out) + at * 32);
#pragma unroll
        for (int i = 0; i < 8; i++) out[i] = make_float4(w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]);
    } else {
        const bool half = args.out_type == ELEMENT_F16;
        uint4* out = reinterpret_cast<uint4*>(static_cast<uint16_t*>(args.out) + at * 32);
#pragma unroll
        for (int i = 0; i < 32; i += 8) {
            uint32_t pairs[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float low = w[i + 2 * j], high = w[i + 2 * j + 1];
                pairs[j] = half ? pack<f16>(low, high) : pack<bf16>(low, high);
            }
            out[i / 8] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
    }
}

}  // namespace

#define DEQUANTIZE(NAME, FORMAT) \
    KERNEL(dequantize_##NAME, DequantizeArgs, THREADS, 0) { dequantize<FORMAT>(args); }
EACH_UNPACKED_FORMAT(DEQUANTIZE)

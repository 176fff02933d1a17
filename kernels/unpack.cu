// Packed weights as floats: rows for a matrix product of many rows, and rows of a token embedding. Bit for bit what the weight's
// file says, in f32.
//
//   packed_dequantize_*   CTA: 4 blocks of 64 features x 32 columns, a warp each; blocks are counted through all panels
//   packed_embed_*        CTA: a token; a thread four columns, then four 256 columns on
//
// Bytes of a value: its packed ones (0.58 for q4_k) and 2 of bf16. It waits for memory: 4096 x 4096 of q4_k to bf16 are 43 MB, at
// 4.3 TB/s 10 us.
#include "packed.cuh"

namespace {

constexpr unsigned WARPS = 4;
constexpr unsigned EMBED_THREADS = 64;

// Two columns of one feature.
template <class Format>
__device__ __forceinline__ float2 values(uint32_t pair, float scale, float minimum) {
    const float2 numbers = unpack<bf16>(pair);
    return make_float2(fmaf(scale, numbers.x - Format::OFFSET, minimum), fmaf(scale, numbers.y - Format::OFFSET, minimum));
}

template <class Format>
__device__ void dequantize(const PackedDequantizeArgs& args) {
    const unsigned blocks = args.cols / packed::COLUMNS, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const size_t at = size_t(blockIdx.x) * WARPS + threadIdx.x / 32;
    const unsigned panel = unsigned(at / blocks), column = unsigned(at % blocks) * packed::COLUMNS;
    if (panel * packed::FEATURES >= args.num_rows) return;
    const packed::BlockPlace<Format> place(args.w + panel * args.panel_bytes, column / packed::COLUMNS);
    const packed::LaneCodes<Format> codes(place.block, lane);
    const packed::LaneScales<Format> lane_scales(place.block, place.super_scales, g);
#pragma unroll
    for (int tile = 0; tile < int(packed::TILES); tile++) {
        const float2 minima = lane_scales.minima(tile);
#pragma unroll
        for (int step = 0; step < 2; step++) {
            const float2 scales = lane_scales.scales(tile, step / Format::SCALE_STEPS);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const unsigned row = panel * packed::FEATURES + unsigned(tile) * 16 + half * 8 + g;
                if (row >= args.num_rows) continue;
                const float scale = half ? scales.y : scales.x, minimum = half ? minima.y : minima.x;
                const float2 low = values<Format>(codes.pair(tile, step, half), scale, minimum);
                const float2 high = values<Format>(codes.pair(tile, step, half + 2), scale, minimum);
                const size_t index = size_t(row) * args.cols + column + 16 * step + 4 * t;
                if (args.out_type == ELEMENT_F32) {
                    *reinterpret_cast<float4*>(static_cast<float*>(args.out) + index) = make_float4(low.x, low.y, high.x, high.y);
                } else {
                    const bool is_f16 = args.out_type == ELEMENT_F16;
                    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(args.out) + index) =
                        uint2{is_f16 ? pack<f16>(low.x, low.y) : pack<bf16>(low.x, low.y),
                              is_f16 ? pack<f16>(high.x, high.y) : pack<bf16>(high.x, high.y)};
                }
            }
        }
    }
}

template <class Format>
__device__ void embed(const PackedEmbedArgs& args) {
    const unsigned id = args.token_ids[blockIdx.x], feature = id % packed::FEATURES;
    const unsigned tile = feature / 16, half = feature / 8 % 2, g = feature % 8;
    const uint8_t* panel = args.table + id / packed::FEATURES * args.panel_bytes;
    float* out = args.out + size_t(blockIdx.x) * args.cols;
    for (unsigned column = threadIdx.x * 4; column < args.cols; column += EMBED_THREADS * 4) {
        const unsigned step = column / 16 % 2, t = column / 4 % 4;
        const packed::BlockPlace<Format> place(panel, column / packed::COLUMNS);
        const packed::LaneCodes<Format> codes(place.block, 4 * g + t);
        const packed::LaneScales<Format> lane_scales(place.block, place.super_scales, g);
        // Registers have no index that is not known before.
#pragma unroll
        for (int i = 0; i < int(packed::TILES) * 2; i++) {
            const int own_tile = i / 2, own_step = i % 2;
            if (unsigned(own_tile) != tile || unsigned(own_step) != step) continue;
            const float2 scales = lane_scales.scales(own_tile, own_step / Format::SCALE_STEPS);
            const float2 minima = lane_scales.minima(own_tile);
            const float scale = half ? scales.y : scales.x, minimum = half ? minima.y : minima.x;
            uint32_t pairs[4];
#pragma unroll
            for (int place = 0; place < 4; place++) pairs[place] = codes.pair(own_tile, own_step, place);
            const float2 low = values<Format>(half ? pairs[1] : pairs[0], scale, minimum);
            const float2 high = values<Format>(half ? pairs[3] : pairs[2], scale, minimum);
            *reinterpret_cast<float4*>(out + column) =
                make_float4(low.x * args.scale, low.y * args.scale, high.x * args.scale, high.y * args.scale);
        }
    }
}

}  // namespace

#define UNPACK(NAME, FORMAT)                                                                              \
    KERNEL(packed_dequantize_##NAME, PackedDequantizeArgs, WARPS * 32, 0) { dequantize<FORMAT>(args); }   \
    KERNEL(packed_embed_##NAME, PackedEmbedArgs, EMBED_THREADS, 0) { embed<FORMAT>(args); }
EACH_PACKED_FORMAT(UNPACK)

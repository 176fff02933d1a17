// Packed weights as floats: rows for a matrix product of many rows, and rows of a token embedding. Bit for bit what the weight's
// file says, in f32.
//
//   packed_dequantize_*   CTA: 4 blocks of 64 features x 32 columns of a panel, a warp each
//   packed_embed_*        CTA: a token; a thread four columns, then four 256 columns on
//
// Bytes of a value: its packed ones (0.58 for q4_k) and 2 of bf16. It waits for memory: 4096 x 4096 of q4_k to bf16 are 43 MB, at
// 4.3 TB/s 10 us.
#include "packed.cuh"

namespace {

constexpr unsigned WARPS = 4;
constexpr unsigned EMBED_THREADS = 64;

__device__ __forceinline__ void store_columns(float* at, float2 low, float2 high) {
    *reinterpret_cast<float4*>(at) = make_float4(low.x, low.y, high.x, high.y);
}
template <class T>
__device__ __forceinline__ void store_columns(T* at, float2 low, float2 high) {
    *reinterpret_cast<uint2*>(at) = uint2{pack<T>(low.x, low.y), pack<T>(high.x, high.y)};
}

template <class Format, class T>
__device__ __forceinline__ void dequantize_as(const PackedDequantizeArgs& args) {
    const unsigned lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, panel = blockIdx.y;
    const unsigned block = blockIdx.x * WARPS + threadIdx.x / 32;
    if (block * packed::COLUMNS >= args.cols) return;
    const packed::BlockPlace<Format> place(args.w + panel * args.panel_bytes, block);
    const packed::LaneCodes<Format> codes(place.block, lane);
    const packed::LaneScales<Format> lane_scales(place.block, place.super_scales, g);
    T* out = static_cast<T*>(args.out) + size_t(panel * packed::FEATURES + g) * args.cols + block * packed::COLUMNS + 4 * t;
#pragma unroll
    for (int tile = 0; tile < int(packed::TILES); tile++) {
        const float2 minima = lane_scales.minima(tile);
#pragma unroll
        for (int half = 0; half < 2; half++, out += size_t(8) * args.cols) {
#pragma unroll
            for (int step = 0; step < 2; step++) {
                const float2 scales = lane_scales.scales(tile, step / Format::SCALE_STEPS);
                const float scale = half ? scales.y : scales.x, minimum = half ? minima.y : minima.x;
                const float2 low = packed::values<Format>(codes.pair(tile, step, half), scale, minimum);
                const float2 high = packed::values<Format>(codes.pair(tile, step, half + 2), scale, minimum);
                store_columns(out + 16 * step, low, high);
            }
        }
    }
}

template <class Format>
__device__ __forceinline__ void dequantize(const PackedDequantizeArgs& args) {
    if (args.out_type == ELEMENT_BF16) {
        dequantize_as<Format, bf16>(args);
    } else if (args.out_type == ELEMENT_F16) {
        dequantize_as<Format, f16>(args);
    } else {
        dequantize_as<Format, float>(args);
    }
}

template <class Format>
__device__ void embed(const PackedEmbedArgs& args) {
    const unsigned id = row_of_token(args), feature = id % packed::FEATURES;
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
            const float2 low = packed::values<Format>(half ? pairs[1] : pairs[0], scale, minimum);
            const float2 high = packed::values<Format>(half ? pairs[3] : pairs[2], scale, minimum);
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

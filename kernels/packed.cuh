// Quantized weights as tensor cores take them: rust/device/src/cuda/packed.rs writes what is read here, and
// docs/packed-layouts.md shows it.
//
//   panel  64 features; its stages follow each other, so a CTA reads one stream
//   stage  STAGE_BLOCKS blocks (the last one of a row may have fewer), then the scales of their super-blocks
//   block  64 features x 32 columns: codes, then what scales them
//   tile   16 features of a block. Lane 4 g + t has, for step s of its two steps of 16 columns, the columns 16 s + 4 t .. + 4 of
//          features g and g + 8: the fragment a of multiply_tiles, where column 16 s + 4 t + 2 p + e has place 8 p + 2 t + e
//
// Fragments hold whole numbers, which bf16 has exactly: OFFSET + the code's distance from the lowest one. Scales are multiplied
// into sums, in f32, so a weight is what its file says.
#pragma once
#include <type_traits>

#include "weights.cuh"

namespace packed {

constexpr unsigned FEATURES = 64;
constexpr unsigned COLUMNS = 32;
constexpr unsigned TILES = FEATURES / 16;

enum class Scaling {
    SCALE,               // f16 for 32 columns
    SCALE_AND_MIN,       // likewise both
    SUPER_SCALE_AND_MIN, // 6 bits of each for 32 columns, f16 of each for 256
    SUPER_SCALE_OF_16,   // 8 bits with a sign for 16 columns, f16 for 256
};

// Codes of BITS bits; of formats without a min, code `1 << BITS - 1` stands for 0. Those of e2m1 are twice the number that they
// stand for, and their scales are powers of two, in bf16.
template <int BITS_, Scaling SCALING_, bool IS_E2M1_ = false>
struct Format {
    static constexpr int BITS = BITS_;
    static constexpr bool IS_E2M1 = IS_E2M1_;
    using Scale = std::conditional_t<IS_E2M1, bf16, f16>;
    static constexpr Scaling SCALING = SCALING_;
    static constexpr bool HAS_MIN = SCALING == Scaling::SCALE_AND_MIN || SCALING == Scaling::SUPER_SCALE_AND_MIN;
    static constexpr bool HAS_SUPER_BLOCKS = SCALING == Scaling::SUPER_SCALE_AND_MIN || SCALING == Scaling::SUPER_SCALE_OF_16;
    // Steps of 16 columns that share a scale.
    static constexpr int SCALE_STEPS = SCALING == Scaling::SUPER_SCALE_OF_16 ? 1 : 2;
    static constexpr unsigned LOW_BYTES = FEATURES * COLUMNS / 8 * (BITS == 8 ? 8 : 4);
    static constexpr unsigned CODE_BYTES = FEATURES * COLUMNS / 8 * BITS;
    static constexpr unsigned BLOCK_BYTES = CODE_BYTES + (SCALING == Scaling::SCALE_AND_MIN ? 256 : 128);
    static constexpr unsigned SUPER_BYTES = HAS_SUPER_BLOCKS ? HAS_MIN ? 256 : 128 : 0;
    // A super-block is 8; as many of the widest codes would not leave room for enough stages.
    static constexpr unsigned STAGE_BLOCKS = BITS == 8 ? 4 : 8;
    static constexpr unsigned STAGE_BYTES = STAGE_BLOCKS * BLOCK_BYTES + SUPER_BYTES;
    // What a fragment's numbers are more than the codes that scales are multiplied with.
    static constexpr bool IS_SIGNED = BITS == 8 || IS_E2M1;
    static constexpr uint32_t ZERO = HAS_MIN || IS_SIGNED ? 0 : 1 << (BITS - 1);
    static constexpr float OFFSET = IS_SIGNED ? 0.0f : 128.0f + ZERO;
    // -OFFSET as bf16, in both halves.
    static constexpr uint32_t MINUS_OFFSETS = (0xc300u + ZERO) * 0x10001u;
};
using Q4_0 = Format<4, Scaling::SCALE>;
using Q4_1 = Format<4, Scaling::SCALE_AND_MIN>;
using Q8_0 = Format<8, Scaling::SCALE>;
using Q4_K = Format<4, Scaling::SUPER_SCALE_AND_MIN>;
using Q5_K = Format<5, Scaling::SUPER_SCALE_AND_MIN>;
using Q6_K = Format<6, Scaling::SUPER_SCALE_OF_16>;
using MXFP4 = Format<4, Scaling::SCALE, true>;

__device__ __forceinline__ uint4 load16(const unsigned char* at) { return *reinterpret_cast<const uint4*>(at); }

// Bits from FIRST on moved to bit 4.
__device__ __forceinline__ uint32_t to_bit_4(uint32_t x, int first) { return first >= 4 ? x >> (first - 4) : x << (4 - first); }

// A lane's codes of a block: of NUM_TILES tiles from `first` on, a multiple of as many.
template <class Format, int NUM_TILES = int(TILES)>
struct LaneCodes {
    static constexpr int LOW_WORDS = NUM_TILES * (Format::BITS == 8 ? 4 : 2);
    static constexpr int HIGH_WORDS = Format::BITS == 6 ? NUM_TILES : Format::BITS == 5 ? (NUM_TILES + 1) / 2 : 1;
    uint32_t low[LOW_WORDS], high[HIGH_WORDS];

    __device__ __forceinline__ LaneCodes(const unsigned char* block, unsigned lane, unsigned first = 0) {
        const unsigned char* own = block + lane * 16 + (Format::BITS == 8 ? first * 512 : first / 2 * 512 + first % 2 * 8);
        if constexpr (LOW_WORDS == 2) {
            load_words(low, reinterpret_cast<const uint2*>(own));
        } else {
#pragma unroll
            for (int i = 0; i < LOW_WORDS; i += 4) {
                const uint4 x = load16(own + i * 128);
                low[i] = x.x, low[i + 1] = x.y, low[i + 2] = x.z, low[i + 3] = x.w;
            }
        }
        const unsigned char* behind = block + Format::LOW_BYTES;
        if constexpr (Format::BITS == 5) {
            const uint32_t* words = reinterpret_cast<const uint32_t*>(behind + lane * 8) + first / 2;
            if constexpr (NUM_TILES == 4) {
                load_words(high, reinterpret_cast<const uint2*>(words));
            } else {
                high[0] = *words >> (NUM_TILES == 1 ? first % 2 * 8 : 0);
            }
        } else if constexpr (Format::BITS == 6) {
            const uint32_t* words = reinterpret_cast<const uint32_t*>(behind + lane * 16) + first;
            if constexpr (NUM_TILES == 4) {
                const uint4 x = *reinterpret_cast<const uint4*>(words);
                high[0] = x.x, high[1] = x.y, high[2] = x.z, high[3] = x.w;
            } else if constexpr (NUM_TILES == 2) {
                load_words(high, reinterpret_cast<const uint2*>(words));
            } else {
                high[0] = *words;
            }
        }
    }
    static __device__ __forceinline__ void load_words(uint32_t* to, const uint2* from) {
        const uint2 x = *from;
        to[0] = x.x, to[1] = x.y;
    }

    // Register `place` of the fragment of a tile and a step: two numbers of bf16. 0x4300 is 128, and its last bit a one.
    __device__ __forceinline__ uint32_t pair(int tile, int step, int place) const {
        if constexpr (Format::BITS == 8) {
            // 128 + 7 bits, less 128 or, of negative codes, 256.
            const uint32_t x = low[tile * 4 + step * 2 + place / 2] >> place % 2 * 8;
            return subtract_bf16x2(and_or(x, 0x007f007fu, 0x43004300u), and_or(x, 0x00800080u, 0x43004300u));
        } else if constexpr (Format::IS_E2M1) {
            // Exponent and mantissa to where those of bf16 end: the number times 2^-126, which is subnormal up to 1.
            const uint32_t x = low[tile * 2 + step] >> 4 * place;
            return multiply_bf16x2(and_or(x << 12, 0x80008000u, x << 6 & 0x01c001c0u), 0x7f007f00u);
        } else {
            const uint32_t numbers = and_or(low[tile * 2 + step] >> 4 * place, 0x000f000fu, 0x43004300u);
            if constexpr (Format::BITS == 5) {
                return and_or(to_bit_4(high[tile / 2], tile % 2 * 8 + step * 4 + place), 0x00100010u, numbers);
            } else if constexpr (Format::BITS == 6) {
                return and_or(to_bit_4(high[tile], (step * 4 + place) * 2), 0x00300030u, numbers);
            } else {
                return numbers;
            }
        }
    }
};

// Two columns of one feature. What numbers are more than codes is taken from both at once, exactly.
template <class Format>
__device__ __forceinline__ float2 values(uint32_t pair, float scale, float minimum) {
    const float2 numbers = unpack<bf16>(Format::OFFSET == 0.0f ? pair : subtract_bf16x2(pair, Format::MINUS_OFFSETS ^ 0x80008000u));
    return make_float2(fmaf(scale, numbers.x, minimum), fmaf(scale, numbers.y, minimum));
}

__device__ __forceinline__ float byte_value(uint32_t word, int index) {
    return weights::code_value(word >> 8 * index & 0xff, 0.0f);
}

// The same times `by`, in fewer instructions; exact, as the product is, but for the sign of a zero.
__device__ __forceinline__ float times_byte(float by, uint32_t word, int index) {
    return fmaf(by, __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440u + unsigned(index))), -8388608.0f * by);
}

// What scales the codes of a tile's features g and g + 8, for lanes 4 g .. 4 g + 4.
template <class Format>
struct LaneScales {
    uint4 own, mins;     // Of the block.
    uint4 supers, super_mins;

    // `super_scales`: behind the stage's blocks.
    __device__ __forceinline__ LaneScales(const unsigned char* block, const unsigned char* super_scales, unsigned g) {
        own = load16(block + Format::CODE_BYTES + g * 16);
        if constexpr (Format::SCALING == Scaling::SCALE_AND_MIN) mins = load16(block + Format::CODE_BYTES + 128 + g * 16);
        if constexpr (Format::HAS_SUPER_BLOCKS) {
            supers = load16(super_scales + g * 16);
            if constexpr (Format::HAS_MIN) super_mins = load16(super_scales + 128 + g * 16);
        }
    }

    static __device__ __forceinline__ uint32_t word(const uint4& of, int i) {
        return i == 0 ? of.x : i == 1 ? of.y : i == 2 ? of.z : of.w;
    }
    static __device__ __forceinline__ float2 halves(const uint4& of, int tile) { return unpack<typename Format::Scale>(word(of, tile)); }

    // Of features g and g + 8 of a tile; `group` of the columns that have scales of their own.
    __device__ __forceinline__ float2 scales(int tile, int group) const {
        if constexpr (!Format::HAS_SUPER_BLOCKS) {
            return halves(own, tile);
        } else {
            const float2 super = halves(supers, tile);
            const bool is_second = Format::SCALING == Scaling::SUPER_SCALE_OF_16 && group == 1;
            const uint32_t codes = word(own, tile / 2 + 2 * is_second);
            const int byte = tile % 2 * 2;
            if constexpr (Format::SCALING == Scaling::SUPER_SCALE_OF_16) {
                return make_float2(super.x * float(int8_t(codes >> 8 * byte)), super.y * float(int8_t(codes >> 8 * (byte + 1))));
            } else {
                return make_float2(super.x * byte_value(codes, byte), super.y * byte_value(codes, byte + 1));
            }
        }
    }
    // Likewise what is added to `scale * code`.
    __device__ __forceinline__ float2 minima(int tile) const {
        if constexpr (Format::SCALING == Scaling::SUPER_SCALE_AND_MIN) {
            const float2 super = halves(super_mins, tile);
            const uint32_t codes = word(own, 2 + tile / 2);
            const int byte = tile % 2 * 2;
            return make_float2(-super.x * byte_value(codes, byte), -super.y * byte_value(codes, byte + 1));
        } else if constexpr (Format::SCALING == Scaling::SCALE_AND_MIN) {
            return halves(mins, tile);
        } else {
            return make_float2(-0.0f, -0.0f);
        }
    }
    // What a sum of x times -OFFSET is multiplied with.
    __device__ __forceinline__ float2 sum_minima(int tile) const {
        const float2 x = scales(tile, 0), y = offset_minima(tile);
        return make_float2(x.x + y.x, x.y + y.y);
    }
    // In units of the offset; exactly, as that is a power of two where there are minima.
    __device__ __forceinline__ float2 offset_minima(int tile) const {
        const float2 x = minima(tile);
        return make_float2(x.x / -Format::OFFSET, x.y / -Format::OFFSET);
    }
};

// Bytes of what `expand_scales` writes.
constexpr unsigned EXPANDED_BYTES = TILES * 8 * 16;

// Scales of a block whose super-block has some, multiplied by those: a warp writes [tile, g] what `ExpandedScales` reads.
template <class Format>
__device__ __forceinline__ void expand_scales(const unsigned char* block, const unsigned char* super_scales, unsigned char* to) {
    // Lane 8 i + g: of features g and g + 8 of tile i.
    const unsigned lane = threadIdx.x % 32, g = lane % 8, tile = lane / 8;
    const unsigned char* own = block + Format::CODE_BYTES + g * 16 + tile * 2;
    const uint32_t first = *reinterpret_cast<const uint16_t*>(own), second = *reinterpret_cast<const uint16_t*>(own + 8);
    const float2 by = unpack<f16>(*reinterpret_cast<const uint32_t*>(super_scales + g * 16 + tile * 4));
    float4 x;
    if constexpr (Format::SCALING == Scaling::SUPER_SCALE_OF_16) {
        x.x = by.x * float(int8_t(first)), x.y = by.y * float(int8_t(first >> 8));
        x.z = by.x * float(int8_t(second)), x.w = by.y * float(int8_t(second >> 8));
    } else {
        const float2 min_by = unpack<f16>(*reinterpret_cast<const uint32_t*>(super_scales + 128 + g * 16 + tile * 4));
        x.x = times_byte(by.x, first, 0), x.y = times_byte(by.y, first, 1);
        // A minimum is added to sums that -OFFSET was multiplied into, and so is what the offset made of codes.
        x.z = x.x + times_byte(min_by.x / Format::OFFSET, second, 0);
        x.w = x.y + times_byte(min_by.y / Format::OFFSET, second, 1);
    }
    *reinterpret_cast<float4*>(to + lane * 16) = x;
}

// As `LaneScales`, of what `expand_scales` has written.
template <class Format>
struct ExpandedScales {
    const float4* expanded;

    __device__ __forceinline__ ExpandedScales(const unsigned char* at, unsigned g)
        : expanded(reinterpret_cast<const float4*>(at) + g) {}
    __device__ __forceinline__ float2 scales(int tile, int group) const {
        const float4 x = expanded[tile * 8];
        return group ? make_float2(x.z, x.w) : make_float2(x.x, x.y);
    }
    __device__ __forceinline__ float2 sum_minima(int tile) const {
        return make_float2(expanded[tile * 8].z, expanded[tile * 8].w);
    }
};

// Where block `index` of a panel lies, and the scales of its super-block.
template <class Format>
struct BlockPlace {
    const uint8_t *block, *super_scales;
    __device__ __forceinline__ BlockPlace(const uint8_t* panel, unsigned index) {
        const uint8_t* stage = panel + size_t(index / Format::STAGE_BLOCKS) * Format::STAGE_BYTES;
        block = stage + index % Format::STAGE_BLOCKS * Format::BLOCK_BYTES;
        super_scales = stage + Format::STAGE_BLOCKS * Format::BLOCK_BYTES;
    }
};

}  // namespace packed

// WHAT(name in symbols, format) for each that is packed.
#define EACH_PACKED_FORMAT(WHAT) \
    WHAT(q4_0, packed::Q4_0)     \
    WHAT(q4_1, packed::Q4_1)     \
    WHAT(q8_0, packed::Q8_0)     \
    WHAT(q4_k, packed::Q4_K)     \
    WHAT(q5_k, packed::Q5_K)     \
    WHAT(q6_k, packed::Q6_K)     \
    WHAT(mxfp4, packed::MXFP4)

// Weight formats: 32 values of a row at a time, as floats, bit for bit as rust/device/src/quant computes them.
//
// A block of BYTES holds LEN values. `run(block, index, w)` writes values 32 index .. 32 index + 32 of it. Value = scale * code,
// or scale * code + min. The ggml blocks are those of ggml-common.h, also described in rust/device/src/quant. A scale has at most
// 18 significant bits and a code 6 (or 11 and 8, or 1 and 4), so their product is exact and a fused multiply-add rounds as the
// two steps do.
#pragma once
#include "cuda.cuh"

namespace weights {

// 4 bytes; rows of most formats are aligned to 2 bytes only, those of MXFP4 not at all.
template <int ALIGNMENT>
__device__ __forceinline__ uint32_t word(const uint8_t* at) {
    if constexpr (ALIGNMENT % 4 == 0) {
        return *reinterpret_cast<const uint32_t*>(at);
    } else if constexpr (ALIGNMENT == 1) {
        return at[0] | uint32_t(at[1]) << 8 | uint32_t(at[2]) << 16 | uint32_t(at[3]) << 24;
    } else {
        const uint16_t* halves = reinterpret_cast<const uint16_t*>(at);
        return halves[0] | uint32_t(halves[1]) << 16;
    }
}

__device__ __forceinline__ float half_at(const uint8_t* at) { return to_f32(*reinterpret_cast<const f16*>(at)); }

// A code of up to 23 bits, less `zero`.
__device__ __forceinline__ float code_value(uint32_t code, float zero) { return __uint_as_float(code | 0x4b000000u) - (8388608.0f + zero); }

struct F32 {
    static constexpr int LEN = 32, BYTES = 128;
    static __device__ __forceinline__ void run(const uint8_t* block, unsigned, float (&w)[32]) {
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
            const float4 x = reinterpret_cast<const float4*>(block)[i / 4];
            w[i] = x.x, w[i + 1] = x.y, w[i + 2] = x.z, w[i + 3] = x.w;
        }
    }
};

template <class T>
struct Float16Bits {
    static constexpr int LEN = 32, BYTES = 64;
    static __device__ __forceinline__ void run(const uint8_t* block, unsigned, float (&w)[32]) {
#pragma unroll
        for (int i = 0; i < 32; i += 8) {
            const uint4 x = reinterpret_cast<const uint4*>(block)[i / 8];
            const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float2 pair = unpack<T>(pairs[j]);
                w[i + 2 * j] = pair.x, w[i + 2 * j + 1] = pair.y;
            }
        }
    }
};
using F16 = Float16Bits<f16>;
using BF16 = Float16Bits<bf16>;

// One scale for 32 values of 4 or 5 bits: byte i of the nibbles holds value i in its low half, value i + 16 in its high one; bit
// i of the fifth bits belongs to value i.
template <bool HAS_MIN, bool HAS_FIFTH_BITS>
struct Legacy {
    static constexpr int LEN = 32, BYTES = 18 + 2 * HAS_MIN + 4 * HAS_FIFTH_BITS;
    static constexpr int ALIGNMENT = HAS_MIN ? 4 : 2;
    static __device__ __forceinline__ void run(const uint8_t* block, unsigned, float (&w)[32]) {
        constexpr float ZERO = HAS_MIN ? 0.0f : HAS_FIFTH_BITS ? 16.0f : 8.0f;
        const float scale = half_at(block);
        // Adding -0 changes nothing, not even a -0.
        const float min = HAS_MIN ? half_at(block + 2) : -0.0f;
        const uint8_t* nibbles = block + BYTES - 16;
        const uint32_t fifth = HAS_FIFTH_BITS ? word<ALIGNMENT>(nibbles - 4) : 0;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const uint32_t byte = word<ALIGNMENT>(nibbles + i / 4 * 4) >> i % 4 * 8;
            w[i] = scale * code_value((byte & 15) | (fifth >> i & 1) << 4, ZERO) + min;
            w[i + 16] = scale * code_value((byte >> 4 & 15) | (fifth >> (i + 16) & 1) << 4, ZERO) + min;
        }
    }
};
using Q4_0 = Legacy<false, false>;
using Q4_1 = Legacy<true, false>;
using Q5_0 = Legacy<false, true>;
using Q5_1 = Legacy<true, true>;

struct Q8_0 {
    static constexpr int LEN = 32, BYTES = 34;
    static __device__ __forceinline__ void run(const uint8_t* block, unsigned, float (&w)[32]) {
        const float scale = half_at(block);
#pragma unroll
        for (int i = 0; i < 32; i++) {
            // Signed codes, from 0 on.
            const uint32_t byte = (word<2>(block + 2 + i / 4 * 4) ^ 0x80808080u) >> i % 4 * 8 & 0xff;
            w[i] = scale * code_value(byte, 128.0f);
        }
    }
};

// Scales and mins for sub-blocks of 16, values of 2 bits: of 128 values, value 32 j + l is bits 2 j and 2 j + 1 of byte l.
struct Q2_K {
    static constexpr int LEN = 256, BYTES = 84;
    static __device__ __forceinline__ void run(const uint8_t* block, unsigned index, float (&w)[32]) {
        const float d = half_at(block + 80), dmin = half_at(block + 82);
        const uint8_t* codes = block + 16 + index / 4 * 32;
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const uint32_t s = block[2 * index + i / 16];
            const uint32_t code = word<4>(codes + i / 4 * 4) >> (i % 4 * 8 + index % 4 * 2) & 3;
            w[i] = (d * float(s & 15)) * code_value(code, 0.0f) - dmin * float(s >> 4);
        }
    }
};

// Signed 6-bit scales for sub-blocks of 16, values of 2 bits and an inverted third.
struct Q3_K {
    static constexpr int LEN = 256, BYTES = 110;
    static __device__ __forceinline__ void run(const uint8_t* block, unsigned index, float (&w)[32]) {
        const float d = half_at(block + 108);
        const uint8_t* scales = block + 96;
        const uint8_t* codes = block + 32 + index / 4 * 32;
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const unsigned g = 2 * index + i / 16;
            const uint32_t low = g < 8 ? scales[g] & 15 : scales[g - 8] >> 4, high = scales[8 + g % 4] >> (2 * (g / 4)) & 3;
            const uint32_t third = word<2>(block + i / 4 * 4) >> (i % 4 * 8 + index) & 1;
            const uint32_t code = (word<2>(codes + i / 4 * 4) >> (i % 4 * 8 + index % 4 * 2) & 3) | third << 2;
            w[i] = d * (float(low | high << 4) - 32.0f) * code_value(code, 4.0f);
        }
    }
};

// 6-bit scales and mins for sub-blocks of 32; of 64 values, value l is the low half of byte l, value 32 + l its high half. The
// 5-bit format has 32 bytes of fifth bits before: bit j of byte l belongs to value 32 j + l.
template <bool HAS_FIFTH_BITS>
struct SixBitScales {
    static constexpr int LEN = 256, BYTES = 144 + 32 * HAS_FIFTH_BITS;
    static __device__ __forceinline__ void run(const uint8_t* block, unsigned index, float (&w)[32]) {
        const uint8_t* s = block + 4;
        uint32_t scale_code, min_code;
        if (index < 4) {
            scale_code = s[index] & 63;
            min_code = s[index + 4] & 63;
        } else {
            scale_code = (s[index + 4] & 15) | s[index - 4] >> 6 << 4;
            min_code = s[index + 4] >> 4 | s[index] >> 6 << 4;
        }
        const float scale = half_at(block) * float(scale_code), min = half_at(block + 2) * float(min_code);
        const uint8_t* nibbles = block + BYTES - 128 + index / 2 * 32;
#pragma unroll
        for (int i = 0; i < 32; i++) {
            uint32_t code = word<4>(nibbles + i / 4 * 4) >> (i % 4 * 8 + index % 2 * 4) & 15;
            if constexpr (HAS_FIFTH_BITS) code |= (word<4>(block + 16 + i / 4 * 4) >> (i % 4 * 8 + index) & 1) << 4;
            w[i] = scale * code_value(code, 0.0f) - min;
        }
    }
};
using Q4_K = SixBitScales<false>;
using Q5_K = SixBitScales<true>;

// Signed 8-bit scales for sub-blocks of 16, 128 bytes of low nibbles, 64 bytes of high pairs of bits.
struct Q6_K {
    static constexpr int LEN = 256, BYTES = 210;
    static __device__ __forceinline__ void run(const uint8_t* block, unsigned index, float (&w)[32]) {
        const float d = half_at(block + 208);
        const unsigned half = index / 4, j = index % 4;
        const uint8_t* low = block + 64 * half + 32 * (j % 2);
        const uint8_t* high = block + 128 + 32 * half;
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const float scale = d * float(int8_t(block[192 + 2 * index + i / 16]));
            const uint32_t code = (word<2>(low + i / 4 * 4) >> (i % 4 * 8 + j / 2 * 4) & 15) |
                                  (word<2>(high + i / 4 * 4) >> (i % 4 * 8 + j * 2) & 3) << 4;
            w[i] = scale * code_value(code, 32.0f);
        }
    }
};

// One power of two for 32 values e2m1, whose nibbles lie as those of Q4_0. Value = 2^(exponent - 128) * twice the e2m1 value.
struct Mxfp4 {
    static constexpr int LEN = 32, BYTES = 17;
    // The three bits of a magnitude are the last of an exponent and the first of a fraction. A zero has no sign on the CPU.
    static __device__ __forceinline__ float doubled(uint32_t nibble) {
        return __uint_as_float((nibble & 8) << 28 | (nibble & 7) << 22) * 0x1p127f + 0.0f;
    }
    static __device__ __forceinline__ void run(const uint8_t* block, unsigned, float (&w)[32]) {
        const uint32_t exponent = block[0];
        const float scale = __uint_as_float(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const uint32_t byte = word<1>(block + 1 + i / 4 * 4) >> i % 4 * 8;
            w[i] = scale * doubled(byte);
            w[i + 16] = scale * doubled(byte >> 4);
        }
    }
};

// Values 32 index .. 32 index + 32 of a row.
template <class Format>
__device__ __forceinline__ void run_of_row(const uint8_t* row, unsigned index, float (&w)[32]) {
    constexpr unsigned RUNS = Format::LEN / 32;
    Format::run(row + size_t(index / RUNS) * Format::BYTES, index % RUNS, w);
}

}  // namespace weights

// WHAT(name in symbols, format) for each.
#define EACH_WEIGHT_FORMAT(WHAT) \
    WHAT(f32, weights::F32)      \
    WHAT(f16, weights::F16)      \
    WHAT(bf16, weights::BF16)    \
    WHAT(q4_0, weights::Q4_0)    \
    WHAT(q4_1, weights::Q4_1)    \
    WHAT(q5_0, weights::Q5_0)    \
    WHAT(q5_1, weights::Q5_1)    \
    WHAT(q8_0, weights::Q8_0)    \
    WHAT(q2_k, weights::Q2_K)    \
    WHAT(q3_k, weights::Q3_K)    \
    WHAT(q4_k, weights::Q4_K)    \
    WHAT(q5_k, weights::Q5_K)    \
    WHAT(q6_k, weights::Q6_K)    \
    WHAT(mxfp4, weights::Mxfp4)

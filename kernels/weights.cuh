// Weight formats: 32 values of a row at a time, as floats, bit for bit as rust/device/src/quant computes them.
//
// A block of BYTES holds LEN values. `run(block, index, w)` writes values 32 index .. 32 index + 32 of it. Value = scale * code,
// or scale * code + min. The ggml blocks are those of ggml-common.h, also described in rust/device/src/quant. A scale has at most
// 18 significant bits and a code 6 (or 17 and 7, or 11 and 8, or 1 and 4), so their product is exact and a fused multiply-add
// rounds as the two steps do.
#pragma once
#include "cuda.cuh"

// The row of an embedding that a CTA reads.
template <class Args>
__device__ __forceinline__ uint32_t row_of_token(const Args& args) {
    const uint32_t id = args.token_ids[blockIdx.x];
    return id < args.vocab_size ? id : args.beyond;
}

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
    static __device__ float value(const uint8_t* row, unsigned i) { return reinterpret_cast<const float*>(row)[i]; }
};

template <class T>
struct Float16Bits {
    static constexpr int LEN = 32, BYTES = 64;
    static __device__ float value(const uint8_t* row, unsigned i) { return to_f32(reinterpret_cast<const T*>(row)[i]); }
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

// Rows of floats need not be whole runs: `value(row, i)` is one of the rest.
template <class Format>
constexpr bool IS_FLOAT = false;
template <>
constexpr bool IS_FLOAT<F32> = true;
template <class T>
constexpr bool IS_FLOAT<Float16Bits<T>> = true;

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

// The values of a table that a nibble is the place in: byte i of the bytes that follow holds value i of COUNT in its low half,
// and value COUNT + i in its high one.
template <class Table, int ALIGNMENT, int COUNT>
__device__ __forceinline__ void nibbles(const uint8_t* bytes, float scale, float* w) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const uint32_t byte = word<ALIGNMENT>(bytes + i / 4 * 4) >> i % 4 * 8;
        w[i] = scale * Table::value(byte);
        w[i + COUNT] = scale * Table::value(byte >> 4);
    }
}

// Twice the values e2m1. The three bits of a magnitude are the last of an exponent and the first of a fraction. A zero has no
// sign on the CPU.
struct DoubledE2m1 {
    static __device__ __forceinline__ float value(uint32_t nibble) {
        return __uint_as_float((nibble & 8) << 28 | (nibble & 7) << 22) * 0x1p127f + 0.0f;
    }
};

// 16 values that follow the normal distribution, plus 128.
struct Normal {
    static __device__ __forceinline__ float value(uint32_t nibble) {
        const uint64_t low = 0x766a5d4f3f2d1801, high = 0xf1d9c5b5a6998d81;
        const uint64_t half = nibble & 8 ? high : low;
        return code_value(uint32_t(half >> (nibble & 7) * 8) & 0xff, 128.0f);
    }
};

// One power of two for 32 values. Value = 2^(exponent - 128) * twice the e2m1 value.
struct Mxfp4 {
    static constexpr int LEN = 32, BYTES = 17;
    static __device__ __forceinline__ void run(const uint8_t* block, unsigned, float (&w)[32]) {
        const uint32_t exponent = block[0];
        const float scale = __uint_as_float(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
        nibbles<DoubledE2m1, 1, 16>(block + 1, scale, w);
    }
};

// Four scales e4m3 without a sign, for 16 values each. Value = scale / 2 * twice the e2m1 value.
struct Nvfp4 {
    static constexpr int LEN = 64, BYTES = 36;
    static __device__ __forceinline__ void run(const uint8_t* block, unsigned index, float (&w)[32]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const unsigned g = 2 * index + i;
            const uint32_t code = block[g];
            // A fraction in the place of an exponent of f32 that is 120 less.
            const float scale = code == 0x7f ? 0.0f : __uint_as_float((code & 0x7f) << 20) * 0x1p119f;
            nibbles<DoubledE2m1, 4, 8>(block + 4 + 8 * g, scale, w + 16 * i);
        }
    }
};

struct Iq4Nl {
    static constexpr int LEN = 32, BYTES = 18;
    static __device__ __forceinline__ void run(const uint8_t* block, unsigned, float (&w)[32]) {
        nibbles<Normal, 2, 16>(block + 2, half_at(block), w);
    }
};

// 6-bit scales for sub-blocks of 32.
struct Iq4Xs {
    static constexpr int LEN = 256, BYTES = 136;
    static __device__ __forceinline__ void run(const uint8_t* block, unsigned index, float (&w)[32]) {
        const uint32_t low = block[4 + index / 2] >> index % 2 * 4 & 15, high = word<4>(block) >> (16 + 2 * index) & 3;
        nibbles<Normal, 4, 16>(block + 8 + 16 * index, half_at(block) * (float(low | high << 4) - 32.0f), w);
    }
};

// Values -1, 0 and 1. A byte of five, or four, is a fraction of 256, whose ternary digits come out at the top.
struct Tq1_0 {
    static constexpr int LEN = 256, BYTES = 54;
    static __device__ __forceinline__ void run(const uint8_t* block, unsigned index, float (&w)[32]) {
        const float d = half_at(block + 52);
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const unsigned at = 32 * index + i;
            // 5 times 32, 5 times 16, 4 times 4.
            const unsigned from = at < 160 ? i : at < 240 ? 32 + (at - 160) % 16 : 48 + at % 4;
            const unsigned digit = at < 160 ? index : at < 240 ? (at - 160) / 16 : (at - 240) / 4;
            const uint32_t power = digit == 0 ? 1 : digit == 1 ? 3 : digit == 2 ? 9 : digit == 3 ? 27 : 81;
            w[i] = d * code_value((block[from] * power & 0xff) * 3 >> 8, 1.0f);
        }
    }
};

// Likewise of 2 bits, which lie as those of Q2_K.
struct Tq2_0 {
    static constexpr int LEN = 256, BYTES = 66;
    static __device__ __forceinline__ void run(const uint8_t* block, unsigned index, float (&w)[32]) {
        const float d = half_at(block + 64);
        const uint8_t* codes = block + index / 4 * 32;
#pragma unroll
        for (int i = 0; i < 32; i++) w[i] = d * code_value(word<2>(codes + i / 4 * 4) >> (i % 4 * 8 + index % 4 * 2) & 3, 1.0f);
    }
};

// Signs.
struct Q1_0 {
    static constexpr int LEN = 128, BYTES = 18;
    static __device__ __forceinline__ void run(const uint8_t* block, unsigned index, float (&w)[32]) {
        const float d = half_at(block);
        const uint32_t bits = word<2>(block + 2 + 4 * index);
#pragma unroll
        for (int i = 0; i < 32; i++) w[i] = bits >> i & 1 ? d : -d;
    }
};

// Points of grids (see rust/device/src/quant/grids.rs): of 8 values 2 bits each, of 4 values 4 bits each.
__device__ const uint16_t IQ2_XXS_GRID[256] = {
#include "grid_iq2_xxs.inc"
};
__device__ const uint16_t IQ2_XS_GRID[512] = {
#include "grid_iq2_xs.inc"
};
__device__ const uint16_t IQ2_S_GRID[1024] = {
#include "grid_iq2_s.inc"
};
__device__ const uint16_t IQ3_XXS_GRID[256] = {
#include "grid_iq3_xxs.inc"
};
__device__ const uint16_t IQ3_S_GRID[512] = {
#include "grid_iq3_s.inc"
};
__device__ const uint16_t IQ1_GRID[2048] = {
#include "grid_iq1_s.inc"
};

// The eighth of 8 signs is such that their number is even.
__device__ __forceinline__ uint32_t with_parity(uint32_t signs) {
    uint32_t parity = signs ^ signs >> 4;
    parity ^= parity >> 2;
    return signs | ((parity ^ parity >> 1) & 1) << 7;
}

__device__ __forceinline__ float with_sign(float x, uint32_t signs, int i) { return signs >> i & 1 ? -x : x; }

// 8 values of magnitudes 8, 25 and 43.
__device__ __forceinline__ void eight(uint32_t point, uint32_t signs, float scale, float* w) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t magnitude = 0x2b1908u >> (point >> 2 * i & 3) * 8 & 0xff;
        w[i] = with_sign(scale * code_value(magnitude, 0.0f), signs, i);
    }
}

// 4 values of magnitudes FIRST, FIRST + STEP, ... and a last that is LAST more.
template <int FIRST, int STEP, int LAST>
__device__ __forceinline__ void four(uint32_t point, uint32_t signs, float scale, float* w) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t place = point >> 4 * i & 7;
        w[i] = with_sign(scale * code_value(FIRST + STEP * place + (place == 7 ? LAST : 0), 0.0f), signs, i);
    }
}

// 8 values -1, 0 and 1, an eighth more or less; `scale` counts eighths.
__device__ __forceinline__ void shifted(uint32_t point, bool down, float scale, float* w) {
#pragma unroll
    for (int i = 0; i < 8; i++) w[i] = scale * code_value((point >> 2 * i & 3) * 8, down ? 9.0f : 7.0f);
}

struct Iq2Xxs {
    static constexpr int LEN = 256, BYTES = 66;
    static __device__ __forceinline__ void run(const uint8_t* block, unsigned index, float (&w)[32]) {
        const uint32_t points = word<2>(block + 2 + 8 * index), signs = word<2>(block + 6 + 8 * index);
        const float scale = half_at(block) * float(2 * (signs >> 28) + 1) * 0.125f;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            eight(IQ2_XXS_GRID[points >> 8 * j & 0xff], with_parity(signs >> 7 * j & 127), scale, w + 8 * j);
        }
    }
};

struct Iq2Xs {
    static constexpr int LEN = 256, BYTES = 74;
    static __device__ __forceinline__ void run(const uint8_t* block, unsigned index, float (&w)[32]) {
        const float d = half_at(block);
        const uint32_t scales = block[66 + index];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint32_t q = word<2>(block + 2 + 8 * index + j / 2 * 4) >> j % 2 * 16 & 0xffff;
            const float scale = d * float(2 * (scales >> j / 2 * 4 & 15) + 1) * 0.125f;
            eight(IQ2_XS_GRID[q & 511], with_parity(q >> 9), scale, w + 8 * j);
        }
    }
};

struct Iq2S {
    static constexpr int LEN = 256, BYTES = 82;
    static __device__ __forceinline__ void run(const uint8_t* block, unsigned index, float (&w)[32]) {
        const float d = half_at(block);
        const uint32_t high = block[66 + index], scales = block[74 + index];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint32_t point = block[2 + 4 * index + j] | (high >> 2 * j & 3) << 8;
            const float scale = d * float(2 * (scales >> j / 2 * 4 & 15) + 1) * 0.125f;
            eight(IQ2_S_GRID[point], block[34 + 4 * index + j], scale, w + 8 * j);
        }
    }
};

struct Iq3Xxs {
    static constexpr int LEN = 256, BYTES = 98;
    static __device__ __forceinline__ void run(const uint8_t* block, unsigned index, float (&w)[32]) {
        const uint32_t signs = word<2>(block + 66 + 4 * index);
        const float scale = half_at(block) * float(2 * (signs >> 28) + 1) * 0.25f;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const uint32_t eight_signs = with_parity(signs >> 7 * (j / 2) & 127);
            four<4, 8, 2>(IQ3_XXS_GRID[block[2 + 8 * index + j]], eight_signs >> j % 2 * 4, scale, w + 4 * j);
        }
    }
};

struct Iq3S {
    static constexpr int LEN = 256, BYTES = 110;
    static __device__ __forceinline__ void run(const uint8_t* block, unsigned index, float (&w)[32]) {
        const float scale = half_at(block) * float(2 * (block[106 + index / 2] >> index % 2 * 4 & 15) + 1);
        const uint32_t high = block[66 + index];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const uint32_t point = block[2 + 8 * index + j] | (high >> j & 1) << 8;
            four<1, 2, 0>(IQ3_S_GRID[point], uint32_t(block[74 + 4 * index + j / 2]) >> j % 2 * 4, scale, w + 4 * j);
        }
    }
};

struct Iq1S {
    static constexpr int LEN = 256, BYTES = 50;
    static __device__ __forceinline__ void run(const uint8_t* block, unsigned index, float (&w)[32]) {
        const uint32_t high = block[34 + 2 * index] | uint32_t(block[35 + 2 * index]) << 8;
        const float scale = half_at(block) * float(2 * (high >> 12 & 7) + 1) * 0.125f;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint32_t point = block[2 + 4 * index + j] | (high >> 3 * j & 7) << 8;
            shifted(IQ1_GRID[point], high >> 15, scale, w + 8 * j);
        }
    }
};

// d lies in the upper four bits of four times 16.
struct Iq1M {
    static constexpr int LEN = 256, BYTES = 56;
    static __device__ __forceinline__ void run(const uint8_t* block, unsigned index, float (&w)[32]) {
        const uint32_t bits = block[49] >> 4 | (block[51] & 0xf0) | (block[53] & 0xf0) << 4 | (block[55] & 0xf0) << 8;
        const uint16_t half = uint16_t(bits);
        const float d = half_at(reinterpret_cast<const uint8_t*>(&half));
        const uint32_t scales = word<2>(block + 48 + index / 4 * 4) >> index / 2 % 2 * 16;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint32_t high = block[32 + 2 * index + j / 2] >> j % 2 * 4;
            const float scale = d * float(2 * (scales >> (index % 2 * 6 + j / 2 * 3) & 7) + 1) * 0.125f;
            shifted(IQ1_GRID[block[4 * index + j] | (high & 7) << 8], high & 8, scale, w + 8 * j);
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

// WHAT(name in symbols, format) for those that are never packed (packed.cuh).
#define EACH_UNPACKED_FORMAT(WHAT) \
    WHAT(f32, weights::F32)        \
    WHAT(f16, weights::F16)        \
    WHAT(bf16, weights::BF16)      \
    WHAT(q5_0, weights::Q5_0)      \
    WHAT(q5_1, weights::Q5_1)      \
    WHAT(q2_k, weights::Q2_K)      \
    WHAT(q3_k, weights::Q3_K)      \
    WHAT(iq2_xxs, weights::Iq2Xxs) \
    WHAT(iq2_xs, weights::Iq2Xs)   \
    WHAT(iq3_xxs, weights::Iq3Xxs) \
    WHAT(iq1_s, weights::Iq1S)     \
    WHAT(iq4_nl, weights::Iq4Nl)   \
    WHAT(iq3_s, weights::Iq3S)     \
    WHAT(iq2_s, weights::Iq2S)     \
    WHAT(iq4_xs, weights::Iq4Xs)   \
    WHAT(iq1_m, weights::Iq1M)     \
    WHAT(tq1_0, weights::Tq1_0)    \
    WHAT(tq2_0, weights::Tq2_0)    \
    WHAT(nvfp4, weights::Nvfp4)    \
    WHAT(q1_0, weights::Q1_0)

// For each.
#define EACH_WEIGHT_FORMAT(WHAT) \
    EACH_UNPACKED_FORMAT(WHAT)   \
    WHAT(q4_0, weights::Q4_0)    \
    WHAT(q4_1, weights::Q4_1)    \
    WHAT(q8_0, weights::Q8_0)    \
    WHAT(q4_k, weights::Q4_K)    \
    WHAT(q5_k, weights::Q5_K)    \
    WHAT(q6_k, weights::Q6_K)    \
    WHAT(mxfp4, weights::Mxfp4)

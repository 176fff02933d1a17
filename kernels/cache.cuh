// The pages of the KV cache (docs/kv-cache.md): where vectors lie, and the codes of the one-byte types.
#pragma once
#include "cuda.cuh"

// Element types of the one-byte caches; float, f16 and bf16 are those of the others.
struct i8 {
    uint8_t bits;
};
struct f8 {
    uint8_t bits;
};

template <class T>
constexpr bool HAS_SCALES = sizeof(T) == 1;

// One plane. A block holds [num_kv_heads, block_size, head_dim] elements, then [num_kv_heads, block_size] bfloat16 scales.
template <class T>
struct Plane {
    uint8_t* base;
    uint64_t block_bytes, scales_offset;
    uint32_t block_size, head_dim;

    __device__ __forceinline__ T* vector(uint64_t block, uint32_t head, uint32_t offset) const {
        return reinterpret_cast<T*>(base + block * block_bytes) + size_t(head * block_size + offset) * head_dim;
    }

    __device__ __forceinline__ bf16* scale(uint64_t block, uint32_t head, uint32_t offset) const {
        return reinterpret_cast<bf16*>(base + block * block_bytes + scales_offset) + (head * block_size + offset);
    }
};

// 1.5 * 2^23: adding it to a float below 2^22 rounds to an integer, to nearest even, in the low bits of the sum.
constexpr float TO_INTEGER = 12582912.0f;

__device__ __forceinline__ uint32_t encode(i8, float x) { return __float_as_uint(__fadd_rn(x, TO_INTEGER)) & 0xff; }

// Rounded to nearest even; |x| is at most 448.
__device__ __forceinline__ uint32_t encode(f8, float x) {
    const uint32_t bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu;
    const float positive = __uint_as_float(magnitude);
    // From 2^-6 on there is a leading one: 20 bits of fraction go, and the bias changes. Below, codes count steps of 2^-9.
    const uint32_t normal = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1)) >> 20) - ((127 - 7) << 3);
    const uint32_t subnormal = __float_as_uint(__fadd_rn(positive * 512.0f, TO_INTEGER)) & 15;
    return (positive < 1.0f / 64.0f ? subnormal : normal) | bits >> 31 << 7;
}

template <class T>
constexpr float MAX_CODE = 448.0f;
template <>
constexpr float MAX_CODE<i8> = 127.0f;

// The scale of a vector, as the bits of a bfloat16: the largest magnitude (bits of a float) over the largest code, rounded up.
template <class T>
__device__ __forceinline__ uint32_t scale_bits(uint32_t largest) {
    constexpr uint32_t INFINITY_BITS = 0x7f800000, LARGEST_FINITE = 0x7f7fffff;
    if (largest > INFINITY_BITS) return 0x7fc0;
    const float exact = __fdiv_rn(__uint_as_float(largest < LARGEST_FINITE ? largest : LARGEST_FINITE), MAX_CODE<T>);
    return exact < 1.17549435e-38f ? 0 : (__float_as_uint(exact) + 0xffff) >> 16;
}

// Two codes, in the low bytes of the 16-bit halves of `codes`, as bfloat16s (exact).
__device__ __forceinline__ uint32_t decode_pair(i8, uint32_t codes) {
    // 2^23 + (code + 128), as the bits of a float.
    const uint32_t shifted = codes ^ 0x00800080u;
    const float low = __uint_as_float(__byte_perm(shifted, 0x4b000000u, 0x7440)) - 8388736.0f;
    const float high = __uint_as_float(__byte_perm(shifted, 0x4b000000u, 0x7442)) - 8388736.0f;
    return pack<bf16>(low, high);
}
__device__ __forceinline__ uint32_t decode_pair(f8, uint32_t codes) {
    // Exponent and fraction land in those of a bfloat16, whose bias is greater by 120.
    const uint32_t scaled = (codes & 0x00800080u) << 8 | (codes & 0x007f007fu) << 4;
    return multiply_bf16x2(scaled, 0x7b807b80u);
}

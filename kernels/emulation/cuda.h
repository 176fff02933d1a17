// CPU twins of what the kernels take from CUDA and of the wrappers in cuda.cuh, under the same names.
#pragma once
#include <math.h>
#include <string.h>

#include "emulation.h"

#define __device__
#define __global__
#define __forceinline__ inline

#define DEFINE_KERNEL(NAME, ARGS, THREADS, SHARED_BYTES, CTAS, WAIT)                                                     \
    static_assert((SHARED_BYTES) <= MAX_SHARED_BYTES, "more shared memory than every target has");                       \
    static void NAME(const ARGS& args);                                                                                  \
    static void NAME##_thread(const void* args) {                                                                        \
        WAIT;                                                                                                            \
        NAME(*static_cast<const ARGS*>(args));                                                                           \
    }                                                                                                                    \
    static emulation::Kernel NAME##_kernel{#NAME, #ARGS, sizeof(ARGS), THREADS, SHARED_BYTES, NAME##_thread, nullptr};   \
    static emulation::Registration NAME##_registration{NAME##_kernel};                                                   \
    static void NAME(const ARGS& args)

#define KERNEL(NAME, ARGS, THREADS, SHARED_BYTES) DEFINE_KERNEL(NAME, ARGS, THREADS, SHARED_BYTES, 1, wait_for_inputs())
#define WEIGHT_KERNEL(NAME, ARGS, THREADS, SHARED_BYTES, CTAS) DEFINE_KERNEL(NAME, ARGS, THREADS, SHARED_BYTES, CTAS, )

#define SHARED_MEMORY(NAME) unsigned char* const NAME = emulation::shared_memory

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

template <class To, class From>
inline To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline uint32_t __float_as_uint(float x) { return bit_cast<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return bit_cast<float>(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clzll(unsigned long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

// Byte i of the result is byte (selector >> 4 i) & 7 of the eight in a (low) and b (high).
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t bytes = uint64_t(b) << 32 | a;
    uint32_t result = 0;
    for (int i = 0; i < 4; i++) result |= uint32_t(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}

// Warps and CTAs.

inline void __syncthreads() { emulation::barrier(); }

inline void __syncwarp(unsigned mask = ~0u) {
    emulation::warp(mask, [](void* const*) {}, nullptr);
}

template <class T>
struct Shuffle {
    T value;
    unsigned source;
};

template <class T>
inline T shuffle(unsigned mask, T value, unsigned source) {
    Shuffle<T> mine{value, source};
    emulation::warp(
        mask,
        [](void* const* lanes) {
            T sent[32];
            for (int i = 0; i < 32; i++) {
                if (lanes[i]) sent[i] = static_cast<Shuffle<T>*>(lanes[i])->value;
            }
            for (int i = 0; i < 32; i++) {
                if (!lanes[i]) continue;
                auto& lane = *static_cast<Shuffle<T>*>(lanes[i]);
                if (!lanes[lane.source]) emulation::fail("a shuffle from lane %u, which takes no part", lane.source);
                lane.value = sent[lane.source];
            }
        },
        &mine);
    return mine.value;
}

template <class T>
inline T __shfl_sync(unsigned mask, T value, unsigned source) {
    return shuffle(mask, value, source % 32);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, unsigned with) {
    return shuffle(mask, value, (threadIdx.x % 32) ^ with);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned by) {
    const unsigned lane = threadIdx.x % 32;
    return shuffle(mask, value, lane < by ? lane : lane - by);
}

inline unsigned __ballot_sync(unsigned mask, bool vote) {
    unsigned mine = vote;
    emulation::warp(
        mask,
        [](void* const* lanes) {
            unsigned votes = 0;
            for (int i = 0; i < 32; i++) {
                if (lanes[i] && *static_cast<unsigned*>(lanes[i])) votes |= 1u << i;
            }
            for (int i = 0; i < 32; i++) {
                if (lanes[i]) *static_cast<unsigned*>(lanes[i]) = votes;
            }
        },
        &mine);
    return mine;
}

inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
    emulation::warp(
        mask,
        [](void* const* lanes) {
            unsigned most = 0;
            for (int i = 0; i < 32; i++) {
                if (lanes[i]) most = *static_cast<unsigned*>(lanes[i]) > most ? *static_cast<unsigned*>(lanes[i]) : most;
            }
            for (int i = 0; i < 32; i++) {
                if (lanes[i]) *static_cast<unsigned*>(lanes[i]) = most;
            }
        },
        &value);
    return value;
}
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }

// Atomics: fibers of one OS thread do not interrupt each other.

template <class T>
inline T atomicAdd(T* at, T value) {
    const T before = *at;
    *at = before + value;
    return before;
}

// CTAs come one after the other.
inline uint32_t arrive(uint32_t* count) { return (*count)++; }
template <class T>
inline T load_of_other_cta(const T* at) {
    return *at;
}

// Types.

using f16 = _Float16;
struct bf16 {
    uint16_t bits;
};

inline float to_f32(float x) { return x; }
inline float to_f32(f16 x) { return x; }
inline float to_f32(bf16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }

template <class T>
inline T from_f32(float x);
template <>
inline float from_f32(float x) { return x; }
template <>
inline f16 from_f32(float x) { return f16(x); }
template <>
inline bf16 from_f32(float x) {
    const uint32_t bits = __float_as_uint(x);
    if (isnan(x)) return {0x7fff};
    return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

// Two values of a 16-bit type in a register, `low` in the low half.
template <class T>
inline uint32_t pack(float low, float high) {
    return bit_cast<uint16_t>(from_f32<T>(low)) | uint32_t(bit_cast<uint16_t>(from_f32<T>(high))) << 16;
}

template <class T>
inline float2 unpack(uint32_t pair) {
    return {to_f32(bit_cast<T>(uint16_t(pair))), to_f32(bit_cast<T>(uint16_t(pair >> 16)))};
}

// Both bfloat16 halves times a power of two that both formats hold.
inline uint32_t multiply_bf16x2(uint32_t pair, uint32_t by) {
    const float2 a = unpack<bf16>(pair), b = unpack<bf16>(by);
    return pack<bf16>(a.x * b.x, a.y * b.y);
}

inline uint32_t subtract_bf16x2(uint32_t a, uint32_t b) {
    const float2 x = unpack<bf16>(a), y = unpack<bf16>(b);
    return pack<bf16>(x.x - y.x, x.y - y.y);
}

inline uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) { return (a & mask) | bits; }

inline float exp2_fast(float x) { return exp2f(x); }

// Copies, tiles.

using emulation::wait_for_inputs;

inline void copy16_async(void* shared, const void* global, bool valid) { emulation::copy_async(shared, global, 16, valid ? 16 : 0); }
inline uint64_t read_once_policy() { return 0; }
inline void copy16_async(void* shared, const void* global, bool valid, uint64_t) { copy16_async(shared, global, valid); }
inline void copy_commit() { emulation::commit_copies(); }
template <int GROUPS_LEFT>
inline void copy_wait() {
    emulation::wait_for_copies(GROUPS_LEFT);
}

struct LoadMatrices {
    uint32_t* into;
    const void* row;
};

// Lane 8 m + r names row r of matrix m; lane l gets of matrix m the elements 2 (l % 4) and the next of row l / 4, or, of the
// transposed matrix, those of column l / 4.
template <bool TRANSPOSED>
inline void load_matrices_as(uint32_t (&into)[4], const void* row) {
    if (reinterpret_cast<uintptr_t>(row) % 16) emulation::fail("a misaligned row of a matrix");
    LoadMatrices mine{into, row};
    emulation::warp(
        ~0u,
        [](void* const* lanes) {
            for (int l = 0; l < 32; l++) {
                for (int m = 0; m < 4; m++) {
                    uint32_t pair = 0;
                    for (int i = 0; i < 2; i++) {
                        const int along = l % 4 * 2 + i, across = l / 4;
                        const void* row = static_cast<LoadMatrices*>(lanes[8 * m + (TRANSPOSED ? along : across)])->row;
                        pair |= uint32_t(static_cast<const uint16_t*>(row)[TRANSPOSED ? across : along]) << 16 * i;
                    }
                    static_cast<LoadMatrices*>(lanes[l])->into[m] = pair;
                }
            }
        },
        &mine);
}
inline void load_matrices(uint32_t (&into)[4], const void* row) { load_matrices_as<false>(into, row); }
inline void load_matrices_transposed(uint32_t (&into)[4], const void* row) { load_matrices_as<true>(into, row); }

struct MultiplyTiles {
    float* sums;
    const float* from;
    const uint32_t* a;
    uint32_t b[2];
};

// sums[16, 8] = from[16, 8] + a[16, 16] b[16, 8], in fragments of mma.m16n8k16: lane l = 4 g + t holds
// a: rows g, g + 8, g, g + 8, columns 2t, 2t, 2t + 8, 2t + 8 (pairs); b: rows 2t, 2t + 8 (pairs) of column g;
// sums: row g, columns 2t and 2t + 1, then row g + 8.
template <class T>
inline void multiply_tiles(float (&sums)[4], const float (&from)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    MultiplyTiles mine{sums, from, a, {b0, b1}};
    emulation::warp(
        ~0u,
        [](void* const* lanes) {
            float a[16][16], b[16][8];
            for (int l = 0; l < 32; l++) {
                const auto& lane = *static_cast<MultiplyTiles*>(lanes[l]);
                const int g = l / 4, t = l % 4;
                for (int i = 0; i < 4; i++) {
                    const float2 pair = unpack<T>(lane.a[i]);
                    a[g + i % 2 * 8][2 * t + i / 2 * 8] = pair.x;
                    a[g + i % 2 * 8][2 * t + i / 2 * 8 + 1] = pair.y;
                }
                for (int i = 0; i < 2; i++) {
                    const float2 pair = unpack<T>(lane.b[i]);
                    b[2 * t + 8 * i][g] = pair.x;
                    b[2 * t + 8 * i + 1][g] = pair.y;
                }
            }
            for (int l = 0; l < 32; l++) {
                const auto& lane = *static_cast<MultiplyTiles*>(lanes[l]);
                for (int i = 0; i < 4; i++) {
                    float sum = 0.0f;
                    for (int k = 0; k < 16; k++) sum += a[l / 4 + i / 2 * 8][k] * b[k][l % 4 * 2 + i % 2];
                    lane.sums[i] = lane.from[i] + sum;
                }
            }
        },
        &mine);
}

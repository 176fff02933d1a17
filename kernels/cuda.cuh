// What kernels take from CUDA beyond the language: a few types and instructions. emulation/cuda.h has their CPU twins, which also
// say in more words what each does; nothing else may be used that has no twin there.
#pragma once
#include "args.h"

// What a CTA may have on all targets (sm_89 and sm_120 have the least).
constexpr unsigned MAX_SHARED_BYTES = 99 << 10;

#ifndef __CUDACC__
#include "emulation/cuda.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// benches/kernel_lab.py asks a compiled file how much shared memory its kernels take.
#ifdef KERNEL_LAB
#define LAB_NUMBER(NAME, VALUE) extern "C" __device__ unsigned NAME = (VALUE);
#else
#define LAB_NUMBER(NAME, VALUE)
#endif

// Programmatic dependent launch: from sm_90 on a kernel may begin while the one before it ends. What that one writes must not be
// read before `wait_for_inputs`; weights may be.
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next kernel begin once all CTAs of this one have.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#define DEFINE_KERNEL(NAME, ARGS, THREADS, SHARED_BYTES, CTAS, WAIT)                                            \
    static_assert((SHARED_BYTES) <= MAX_SHARED_BYTES, "more shared memory than every target has");              \
    LAB_NUMBER(NAME##_shared_bytes, SHARED_BYTES)                                                               \
    static __device__ __forceinline__ void NAME##_body(const ARGS& args);                                       \
    extern "C" __global__ void __launch_bounds__(THREADS, CTAS) NAME(const __grid_constant__ ARGS args) {       \
        let_next_begin();                                                                                       \
        WAIT;                                                                                                   \
        NAME##_body(args);                                                                                      \
    }                                                                                                           \
    static __device__ __forceinline__ void NAME##_body(const ARGS& args)

// Defines a kernel: its name, its argument struct, threads a CTA, bytes of dynamic shared memory. The manifest lists these four.
// The bound of one CTA an SM keeps ptxas from spilling registers for the sake of more.
#define KERNEL(NAME, ARGS, THREADS, SHARED_BYTES) DEFINE_KERNEL(NAME, ARGS, THREADS, SHARED_BYTES, 1, wait_for_inputs())

// The same for kernels that read weights, or lists that the host has copied, before they call `wait_for_inputs` themselves, on
// every way through them. Their registers leave room for CTAS of them on an SM.
#define WEIGHT_KERNEL(NAME, ARGS, THREADS, SHARED_BYTES, CTAS) DEFINE_KERNEL(NAME, ARGS, THREADS, SHARED_BYTES, CTAS, )

#define SHARED_MEMORY(NAME) extern __shared__ __align__(128) unsigned char NAME[]

using f16 = __half;
using bf16 = __nv_bfloat16;

__device__ __forceinline__ float to_f32(float x) { return x; }
__device__ __forceinline__ float to_f32(f16 x) { return __half2float(x); }
__device__ __forceinline__ float to_f32(bf16 x) { return __bfloat162float(x); }

template <class T>
__device__ __forceinline__ T from_f32(float x);
template <>
__device__ __forceinline__ float from_f32(float x) { return x; }
template <>
__device__ __forceinline__ f16 from_f32(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ bf16 from_f32(float x) { return __float2bfloat16_rn(x); }

// Two values of a 16-bit type in a register, `low` in the low half.
template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<f16>(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
}
template <>
__device__ __forceinline__ uint32_t pack<bf16>(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
}

template <class T>
__device__ __forceinline__ float2 unpack(uint32_t pair);
template <>
__device__ __forceinline__ float2 unpack<f16>(uint32_t pair) { return __half22float2(reinterpret_cast<const __half2&>(pair)); }
template <>
__device__ __forceinline__ float2 unpack<bf16>(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t pair, uint32_t by) {
    const __nv_bfloat162 product = __hmul2(reinterpret_cast<const __nv_bfloat162&>(pair), reinterpret_cast<const __nv_bfloat162&>(by));
    return reinterpret_cast<const uint32_t&>(product);
}

__device__ __forceinline__ uint32_t subtract_bf16x2(uint32_t a, uint32_t b) {
    // a - b as b * -1 + a: sm_80 has no other instruction for it.
    uint32_t difference;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(difference) : "r"(b), "r"(0xbf80bf80u), "r"(a));
    return difference;
}

// a & mask | bits, as one instruction; the compiler makes two of it where both are constants.
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) {
    uint32_t result;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(a), "r"(mask), "r"(bits));
    return result;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ uint32_t shared_address(const void* shared) { return static_cast<uint32_t>(__cvta_generic_to_shared(shared)); }

// 16 bytes from global to shared memory, past the registers; zeros where not valid.
__device__ __forceinline__ void copy16_async(void* shared, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(valid ? 16 : 0)
                 : "memory");
}
// For what is read once: it leaves L2 before anything else does.
__device__ __forceinline__ uint64_t read_once_policy() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void copy16_async(void* shared, const void* global, bool valid, uint64_t policy) {
    // ptxas of CUDA 13.0 makes an illegal instruction of a copy with a policy to an address with a uniform register. This one has
    // none: nothing is known of threadIdx.y, which is 0.
    const uint32_t to = shared_address(shared) ^ threadIdx.y;
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(global),
                 "r"(valid ? 16 : 0), "l"(policy)
                 : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int GROUPS_LEFT>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS_LEFT) : "memory");
}

__device__ __forceinline__ void load_matrices(uint32_t (&into)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(into[0]), "=r"(into[1]), "=r"(into[2]), "=r"(into[3])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&into)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(into[0]), "=r"(into[1]), "=r"(into[2]), "=r"(into[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// sums[16, 8] = from[16, 8] + a[16, 16] b[16, 8].
template <class T>
__device__ __forceinline__ void multiply_tiles(float (&sums)[4], const float (&from)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
#define MULTIPLY_TILES(T, NAME)                                                                                                    \
    template <>                                                                                                                    \
    __device__ __forceinline__ void multiply_tiles<T>(float (&sums)[4], const float (&from)[4], const uint32_t (&a)[4],            \
                                                      uint32_t b0, uint32_t b1) {                                                  \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "  \
                     "{%10, %11, %12, %13};"                                                                                       \
                     : "=f"(sums[0]), "=f"(sums[1]), "=f"(sums[2]), "=f"(sums[3])                                                  \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(from[0]), "f"(from[1]), "f"(from[2]),     \
                       "f"(from[3]));                                                                                              \
    }
MULTIPLY_TILES(f16, "f16")
MULTIPLY_TILES(bf16, "bf16")
#undef MULTIPLY_TILES

// Counts one up, and says how many there were. Who comes later sees all that this thread wrote before, and all that others of its
// CTA wrote before a barrier with it: releases and acquires are cumulative (PTX ISA, memory consistency model). So one thread
// waits for memory, and not all of them.
__device__ __forceinline__ uint32_t arrive(uint32_t* count) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(__cvta_generic_to_global(count)) : "memory");
    return before;
}

// A value that another CTA wrote before it arrived, past the L1 cache.
template <class T>
__device__ __forceinline__ T load_of_other_cta(const T* at) {
    return __ldcg(at);
}
#endif

// What several kernels need.

constexpr unsigned WHOLE_WARP = ~0u;

// sums[16, 8] += a[16, 16] b[16, 8].
template <class T>
__device__ __forceinline__ void multiply_tiles(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    multiply_tiles<T>(sums, sums, a, b0, b1);
}

// What f16 does not reach becomes its largest.
__device__ __forceinline__ float within_f16(float x) { return x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x; }

// Of floats, or of whole numbers.
template <class T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
    for (int with = 16; with > 0; with /= 2) x += __shfl_xor_sync(WHOLE_WARP, x, with);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int with = 16; with > 0; with /= 2) x = fmaxf(x, __shfl_xor_sync(WHOLE_WARP, x, with));
    return x;
}

// Sum over a CTA of up to 32 warps, the same in every thread; `scratch` holds a value a warp and is free again afterwards.
template <class T>
__device__ __forceinline__ T cta_sum(T x, T* scratch) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    T sum = 0;
    for (unsigned warp = 0; warp < blockDim.x / 32; warp++) sum += scratch[warp];
    __syncthreads();
    return sum;
}

// Which of three in a launch this CTA computes a share of: the CTAs from `second` on are the second one's, and so on.
template <class Target>
__device__ __forceinline__ const Target& target_of_cta(const Target (&targets)[3], unsigned second, unsigned third) {
    return targets[(blockIdx.x >= second) + (blockIdx.x >= third)];
}

// Whether this CTA is the last one to come, behind so many others; it then sees what they wrote before, by `load_of_other_cta`.
// `arrivals` counts them: 0 before the first, and again after the last. `arrived` is memory of the CTA for a number.
__device__ __forceinline__ bool is_last_to_arrive(uint32_t* arrivals, uint32_t others, uint32_t* arrived) {
    __syncthreads();
    if (threadIdx.x == 0) *arrived = arrive(arrivals);
    __syncthreads();
    if (*arrived != others) return false;
    if (threadIdx.x == 0) *arrivals = 0;
    return true;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

// Four that follow each other, the first at a multiple of 4.
__device__ __forceinline__ float4 load_four(const float* from) { return *reinterpret_cast<const float4*>(from); }

// out[index] = x, in the type that an element type names.
__device__ __forceinline__ void store_as(uint32_t type, void* out, size_t index, float x) {
    if (type == ELEMENT_F32) {
        static_cast<float*>(out)[index] = x;
    } else if (type == ELEMENT_F16) {
        static_cast<f16*>(out)[index] = from_f32<f16>(x);
    } else {
        static_cast<bf16*>(out)[index] = from_f32<bf16>(x);
    }
}

// Four that follow each other, the first at a multiple of 4.
__device__ __forceinline__ void store_four_as(uint32_t type, void* out, size_t index, float4 x) {
    if (type == ELEMENT_F32) {
        *reinterpret_cast<float4*>(static_cast<float*>(out) + index) = x;
    } else if (type == ELEMENT_F16) {
        *reinterpret_cast<uint2*>(static_cast<f16*>(out) + index) = uint2{pack<f16>(x.x, x.y), pack<f16>(x.z, x.w)};
    } else {
        *reinterpret_cast<uint2*>(static_cast<bf16*>(out) + index) = uint2{pack<bf16>(x.x, x.y), pack<bf16>(x.z, x.w)};
    }
}

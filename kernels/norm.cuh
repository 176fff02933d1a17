// The norm of a row, by the 256 threads of a CTA. Whoever computes it gets the same bits.
#pragma once
#include "cuda.cuh"

constexpr unsigned NORM_THREADS = 256;

__device__ __forceinline__ float4 load4(const float* from) { return *reinterpret_cast<const float4*>(from); }

// A norm over one row, before weight and bias: (x - mean) * factor.
struct Moments {
    float mean, factor;
};

// Those of a row, in every thread.
template <bool HAS_MEAN>
__device__ Moments moments(const float* row, uint32_t cols, float eps, float* scratch) {
    float mean = 0.0f;
    if constexpr (HAS_MEAN) {
        float sum = 0.0f;
        for (uint32_t i = threadIdx.x * 4; i < cols; i += NORM_THREADS * 4) {
            const float4 x = load4(row + i);
            sum += x.x + x.y + x.z + x.w;
        }
        mean = cta_sum(sum, scratch) / cols;
    }
    float squares = 0.0f;
    for (uint32_t i = threadIdx.x * 4; i < cols; i += NORM_THREADS * 4) {
        const float4 x = load4(row + i);
        const float a = x.x - mean, b = x.y - mean, c = x.z - mean, d = x.w - mean;
        squares += a * a + b * b + c * c + d * d;
    }
    return {mean, 1.0f / sqrtf(cta_sum(squares, scratch) / cols + eps)};
}

// Weight and bias of a norm: [cols] each, or null for ones and zeros.
struct Affine {
    const float* weight;
    const float* bias;

    // Elements i .. i + 4 of a row, normed.
    __device__ __forceinline__ float4 operator()(float4 x, uint32_t i, Moments m) const {
        const float4 w = weight ? load4(weight + i) : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
        const float4 b = bias ? load4(bias + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        return make_float4((x.x - m.mean) * m.factor * w.x + b.x, (x.y - m.mean) * m.factor * w.y + b.y,
                           (x.z - m.mean) * m.factor * w.z + b.z, (x.w - m.mean) * m.factor * w.w + b.w);
    }
};

// An RMS norm without a bias of one row, rounded to bf16, into shared memory; `scratch` holds a value a warp.
__device__ __forceinline__ void norm_to_shared(const float* x, const float* weight, float eps, uint32_t cols, unsigned char* to,
                                               float* scratch) {
    const Moments m = moments<false>(x, cols, eps, scratch);
    const Affine affine{weight, nullptr};
    for (uint32_t i = threadIdx.x * 4; i < cols; i += NORM_THREADS * 4) {
        const float4 y = affine(load4(x + i), i, m);
        *reinterpret_cast<uint2*>(to + i * 2) = uint2{pack<bf16>(y.x, y.y), pack<bf16>(y.z, y.w)};
    }
    __syncthreads();
}

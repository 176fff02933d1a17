// q/k norm, rotation, and the write of K and V into their slots.
//
//   q [num_tokens, num_heads, D], k, v [num_tokens, num_kv_heads, D], f32
//
//   CTA: 4 warps     warp: one head of one token     lane l: elements 4 l .. 4 l + 4, 128 + 4 l .. 128 + 4 l + 4, ...
//   heads of a token:     q 0 .. q H-1 | k 0 .. k KH-1 | v 0 .. v KH-1
//
//   head -> (RMS or layer norm) -> (rotation of q and k: partners through shared memory) -> q in place, or the block of its slot:
//   plane + block * block_bytes: [KH, block_size, D] elements, then [KH, block_size] scales of the one-byte types
//
// Bytes of a token: 8 H D of q (read and written), 8 KH D of k and v, 2 KH D times the cache's element; about 4 operations an
// element. It waits for memory: for Llama-3-8B (H 32, KH 8, D 128, bf16) 45 KB a token, at 4.3 TB/s 10 ns a token in a long
// prompt; a step of few tokens is one launch.
#include "cache.cuh"

namespace {

constexpr unsigned WARPS = 4;

// A head has RUNS runs of 128 elements at most.
template <int RUNS>
constexpr unsigned SHARED_BYTES = WARPS * RUNS * 128 * sizeof(float);

// A lane's share of a head: four elements of each run.
template <int RUNS>
struct Head {
    float x[RUNS][4];
};

__device__ __forceinline__ unsigned first_element(int run) { return run * 128 + threadIdx.x % 32 * 4; }

// `which`: the head's number among those with this norm.
template <int RUNS>
__device__ void normalise(Head<RUNS>& head, const HeadNormArgs& norm, unsigned which, unsigned head_dim) {
    const float* weight = norm.weight + which * norm.stride;
    if (norm.has_mean) {
        // Elements past the head are zeros, and stay so.
        float sum = 0.0f;
        for (int run = 0; run < RUNS; run++) {
            for (int i = 0; i < 4; i++) sum += head.x[run][i];
        }
        const float mean = warp_sum(sum) / head_dim;
        for (int run = 0; run < RUNS; run++) {
            for (int i = 0; i < 4 && first_element(run) < head_dim; i++) head.x[run][i] -= mean;
        }
    }
    float squares = 0.0f;
    for (int run = 0; run < RUNS; run++) {
        for (int i = 0; i < 4; i++) squares += head.x[run][i] * head.x[run][i];
    }
    const float scale = 1.0f / sqrtf(warp_sum(squares) / head_dim + norm.eps);
    for (int run = 0; run < RUNS; run++) {
        const unsigned first = first_element(run);
        if (first >= head_dim) continue;
        for (int i = 0; i < 4; i++) head.x[run][i] *= scale * weight[first + i];
        if (!norm.bias) continue;
        const float* bias = norm.bias + which * norm.stride;
        for (int i = 0; i < 4; i++) head.x[run][i] += bias[first + i];
    }
}

// Where the partner of an element lies, and how the pair rotates.
__device__ __forceinline__ bool is_second(const RopeAndCacheArgs& args, unsigned at) {
    return args.interleaved ? at % 2 : at >= args.rotary_dim / 2;
}
__device__ __forceinline__ unsigned partner_of(const RopeAndCacheArgs& args, unsigned at) {
    const unsigned half = args.rotary_dim / 2;
    return args.interleaved ? at ^ 1 : at >= half ? at - half : at + half;
}

// Cosines and sines of a lane's elements, those of a token.
template <int RUNS>
struct Angles {
    float cos[RUNS][4], sin[RUNS][4];

    __device__ __forceinline__ Angles(const RopeAndCacheArgs& args, unsigned token) {
        const unsigned half = args.rotary_dim / 2;
        const size_t first = args.cos ? size_t(args.rope_positions[token]) * half : 0;
        for (int run = 0; run < RUNS; run++) {
            for (int i = 0; i < 4; i++) {
                const unsigned at = first_element(run) + i;
                const bool is_there = args.cos && at < args.rotary_dim;
                const unsigned pair = args.interleaved ? at / 2 : at >= half ? at - half : at;
                cos[run][i] = is_there ? args.cos[first + pair] : 1.0f;
                sin[run][i] = is_there ? args.sin[first + pair] : 0.0f;
            }
        }
    }
};

template <int RUNS>
__device__ void rotate(Head<RUNS>& head, float* shared, const RopeAndCacheArgs& args, const Angles<RUNS>& angles) {
    for (int run = 0; run < RUNS; run++) {
        const unsigned first = first_element(run);
        if (first >= args.head_dim) continue;
        for (int i = 0; i < 4; i++) shared[first + i] = head.x[run][i];
    }
    __syncwarp();
    for (int run = 0; run < RUNS; run++) {
        for (int i = 0; i < 4; i++) {
            const unsigned at = first_element(run) + i;
            if (at >= args.rotary_dim) continue;
            const float partner = shared[partner_of(args, at)], other = is_second(args, at) ? partner : -partner;
            head.x[run][i] = head.x[run][i] * angles.cos[run][i] + other * angles.sin[run][i];
        }
    }
}

__device__ void store(float* to, const float (&x)[4]) { *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]); }
__device__ void store(bf16* to, const float (&x)[4]) {
    *reinterpret_cast<uint2*>(to) = uint2{pack<bf16>(x[0], x[1]), pack<bf16>(x[2], x[3])};
}
__device__ float saturated(float x) { return x < -65504.0f ? -65504.0f : x > 65504.0f ? 65504.0f : x; }
__device__ void store(f16* to, const float (&x)[4]) {
    *reinterpret_cast<uint2*>(to) =
        uint2{pack<f16>(saturated(x[0]), saturated(x[1])), pack<f16>(saturated(x[2]), saturated(x[3]))};
}

template <class T, int RUNS>
__device__ void write(const Plane<T>& plane, uint64_t slot, uint32_t kv_head, const Head<RUNS>& head) {
    const uint64_t block = slot / plane.block_size;
    const uint32_t offset = uint32_t(slot % plane.block_size);
    T* vector = plane.vector(block, kv_head, offset);
    if constexpr (!HAS_SCALES<T>) {
        for (int run = 0; run < RUNS; run++) {
            if (first_element(run) < plane.head_dim) store(vector + first_element(run), head.x[run]);
        }
    } else {
        // Magnitudes compare as their bits; those of NaN are the greatest. Elements past the head are zeros.
        uint32_t largest = 0;
        for (int run = 0; run < RUNS; run++) {
            for (int i = 0; i < 4; i++) largest = max(largest, __float_as_uint(head.x[run][i]) & 0x7fffffffu);
        }
        for (int with = 16; with > 0; with /= 2) largest = max(largest, __shfl_xor_sync(WHOLE_WARP, largest, with));
        const uint32_t bits = scale_bits<T>(largest);
        const float scale = __uint_as_float(bits << 16);
        const bool empty = !(scale > 0.0f);
        for (int run = 0; run < RUNS; run++) {
            if (first_element(run) >= plane.head_dim) continue;
            uint32_t codes = 0;
            for (int i = 0; i < 4 && !empty; i++) {
                const float quotient = __fdiv_rn(head.x[run][i], scale);
                codes |= encode(T{}, fminf(fmaxf(quotient, -MAX_CODE<T>), MAX_CODE<T>)) << 8 * i;
            }
            *reinterpret_cast<uint32_t*>(vector + first_element(run)) = codes;
        }
        if (threadIdx.x % 32 == 0) *reinterpret_cast<uint16_t*>(plane.scale(block, kv_head, offset)) = uint16_t(bits);
    }
}

template <class T, int RUNS>
__device__ void rope_and_cache(const RopeAndCacheArgs& args) {
    SHARED_MEMORY(shared);
    const unsigned warp = threadIdx.x / 32, heads_per_token = args.num_heads + 2 * args.num_kv_heads;
    const unsigned item = blockIdx.x * WARPS + warp;
    const unsigned token = item / heads_per_token, which = item % heads_per_token;
    if (token >= args.num_tokens) return wait_for_inputs();

    // Positions, slots and the table of angles come from the host, so they are read while the kernel before this one ends.
    const Angles<RUNS> angles(args, token);
    const int64_t slot = args.slot_mapping ? args.slot_mapping[token] : -1;
    wait_for_inputs();
    const bool is_q = which < args.num_heads, is_k = !is_q && which < args.num_heads + args.num_kv_heads;
    const unsigned kv_head = is_k ? which - args.num_heads : which - args.num_heads - args.num_kv_heads;
    const float* from = is_q ? args.q + size_t(token) * args.q_stride + which * args.head_dim
                       : is_k ? args.k + size_t(token) * args.k_stride + kv_head * args.head_dim
                              : args.v + size_t(token) * args.v_stride + kv_head * args.head_dim;
    Head<RUNS> head = {};
    for (int run = 0; run < RUNS; run++) {
        if (first_element(run) >= args.head_dim) continue;
        const float4 x = *reinterpret_cast<const float4*>(from + first_element(run));
        head.x[run][0] = x.x, head.x[run][1] = x.y, head.x[run][2] = x.z, head.x[run][3] = x.w;
    }
    const auto norm = [&] {
        if (is_q && args.q_norm.weight) normalise(head, args.q_norm, which, args.head_dim);
        if (is_k && args.k_norm.weight) normalise(head, args.k_norm, kv_head, args.head_dim);
    };
    if (is_q || is_k) {
        if (!args.norms_last) norm();
        if (args.cos) rotate(head, reinterpret_cast<float*>(shared) + warp * RUNS * 128, args, angles);
        if (args.norms_last) norm();
    } else if (args.v_norm.weight) {
        normalise(head, args.v_norm, kv_head, args.head_dim);
    }

    if (is_q) {
        if (args.scale_length) {
            const float steps = float((args.positions[token] + args.scale_offset) / args.scale_length);
            const float factor = 1.0f + args.scale_beta * logf(1.0f + steps);
            for (int run = 0; run < RUNS; run++) {
                for (int i = 0; i < 4; i++) head.x[run][i] *= factor;
            }
        }
        float* to = args.q + size_t(token) * args.q_stride + which * args.head_dim;
        for (int run = 0; run < RUNS; run++) {
            if (first_element(run) < args.head_dim) store(to + first_element(run), head.x[run]);
        }
    } else if (slot >= 0) {
        uint8_t* base = is_k ? args.k_plane : args.v_plane;
        const Plane<T> plane{base, args.block_bytes, args.scales_offset, args.block_size, args.head_dim};
        write(plane, uint64_t(slot), kv_head, head);
    }
}

}  // namespace

#define ROPE_AND_CACHE_OF(NAME, T, RUNS) \
    WEIGHT_KERNEL(rope_and_cache_##NAME, RopeAndCacheArgs, WARPS * 32, SHARED_BYTES<RUNS>, 1) { rope_and_cache<T, RUNS>(args); }
#define ROPE_AND_CACHE(NAME, T)       \
    ROPE_AND_CACHE_OF(NAME, T, 2)     \
    ROPE_AND_CACHE_OF(NAME##_d512, T, 4)

ROPE_AND_CACHE(f32, float)
ROPE_AND_CACHE(f16, f16)
ROPE_AND_CACHE(bf16, bf16)
ROPE_AND_CACHE(i8, i8)
ROPE_AND_CACHE(f8, f8)

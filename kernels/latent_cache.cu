// What latent attention reads: latent vectors, normed, and the parts of keys and queries that rotate.
//
//   latent [kv_rank | rope_dim]  ->  norm of the former, rotation of the latter  ->  the slot's vector, [rope_dim | kv_rank]
//   query of each head [nope_dim | rope_dim]  ->  rotation of the latter  ->  absorbed [rope_dim | kv_rank], its first part
//   both parts of a query times the scale of its position, where there is one
//
//   CTA: one token. What is missing of `absorbed` is a product with nope_dim.
//
// Bytes of a token: 4 (kv_rank + rope_dim) read and as many elements of the cache written, 8 rope_dim num_heads of queries; a few
// operations an element. One launch of a few microseconds.
#include "cache.cuh"

namespace {

constexpr unsigned THREADS = 256;

// Element i of a vector whose first rotary_dim elements rotate by the angles of a token.
__device__ __forceinline__ float rotated(const LatentCacheArgs& args, const float* x, unsigned i, unsigned token) {
    if (!args.cos || i >= args.rotary_dim) return x[i];
    const unsigned half = args.rotary_dim / 2;
    const bool second = args.interleaved ? i % 2 : i >= half;
    const unsigned partner = args.interleaved ? i ^ 1 : second ? i - half : i + half;
    const unsigned pair = args.interleaved ? i / 2 : second ? i - half : i;
    const size_t angle = size_t(args.rope_positions[token]) * half + pair;
    return x[i] * args.cos[angle] + (second ? x[partner] : -x[partner]) * args.sin[angle];
}

__device__ __forceinline__ void put(float* to, float x) { *to = x; }
__device__ __forceinline__ void put(bf16* to, float x) { *to = from_f32<bf16>(x); }
__device__ __forceinline__ void put(f16* to, float x) { *to = from_f32<f16>(within_f16(x)); }

template <class T>
__device__ void latent_cache(const LatentCacheArgs& args) {
    SHARED_MEMORY(shared);
    const unsigned token = blockIdx.x, width = args.rope_dim + args.kv_rank;
    float factor = 1.0f;
    if (args.scale_length) {
        const float steps = float((args.positions[token] + args.scale_offset) / args.scale_length);
        factor += args.scale_beta * logf(1.0f + steps);
        for (unsigned at = threadIdx.x; at < args.num_heads * args.nope_dim; at += THREADS) {
            const size_t head = size_t(token) * args.num_heads + at / args.nope_dim;
            args.query[head * (args.nope_dim + args.rope_dim) + at % args.nope_dim] *= factor;
        }
    }
    for (unsigned at = threadIdx.x; at < args.num_heads * args.rope_dim; at += THREADS) {
        const size_t head = size_t(token) * args.num_heads + at / args.rope_dim;
        const float* query = args.query + head * (args.nope_dim + args.rope_dim) + args.nope_dim;
        args.absorbed[head * width + at % args.rope_dim] = factor * rotated(args, query, at % args.rope_dim, token);
    }
    const int64_t slot = args.slot_mapping[token];
    if (slot < 0) return;

    const float* latent = args.latent + size_t(token) * width;
    float squares = 0.0f;
    for (unsigned i = threadIdx.x; i < args.kv_rank; i += THREADS) squares += latent[i] * latent[i];
    const float scale = 1.0f / sqrtf(cta_sum(squares, reinterpret_cast<float*>(shared)) / args.kv_rank + args.eps);
    const Plane<T> plane{args.plane, args.block_bytes, 0, args.block_size, width};
    T* vector = plane.vector(uint64_t(slot) / args.block_size, 0, uint32_t(slot % args.block_size));
    for (unsigned i = threadIdx.x; i < args.rope_dim; i += THREADS) put(vector + i, rotated(args, latent + args.kv_rank, i, token));
    for (unsigned i = threadIdx.x; i < args.kv_rank; i += THREADS) put(vector + args.rope_dim + i, latent[i] * (scale * args.weight[i]));
}

}  // namespace

#define LATENT_CACHE(NAME, T) \
    KERNEL(latent_cache_##NAME, LatentCacheArgs, THREADS, THREADS / 32 * sizeof(float)) { latent_cache<T>(args); }

LATENT_CACHE(f32, float)
LATENT_CACHE(f16, f16)
LATENT_CACHE(bf16, bf16)

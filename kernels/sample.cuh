// What the kernels that sample share: the logits of a part of a row, orders and weights of tokens, and ranks among them.
#pragma once
#include "cuda.cuh"

namespace {

constexpr unsigned THREADS = 512;
constexpr unsigned WARPS = THREADS / 32;
constexpr unsigned CHUNKS = SAMPLE_PART / (4 * THREADS);  // Of a part: four tokens a thread.
constexpr unsigned BUCKETS = SAMPLE_BUCKETS, OWN_BUCKETS = BUCKETS / THREADS;
constexpr unsigned BUCKET_BITS = 10;
static_assert(1 << BUCKET_BITS == BUCKETS && SAMPLE_MAX_PARTS <= THREADS && SAMPLE_MAX_PARTS <= BUCKETS);
constexpr float WEIGHT_ONE = 1099511627776.0f;  // 2^40
constexpr float WEIGHTLESS = 28.0f;             // e^-28 * 2^40 is below 1.
constexpr uint32_t NO_TOKEN = 0xffffffffu;
constexpr uint32_t NO_BUCKET = 0xffffffffu;

using Wide = unsigned long long;
constexpr Wide DAMAGED = ~Wide(0);   // Greater than any candidate.
constexpr Wide NO_LIMIT = ~Wide(0);  // Weights do not count.

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// Orders as the floats do; both zeros are equal.
__device__ __forceinline__ uint32_t order_key(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// A token and its logit as one number: the greater, the likelier; of equal logits the lowest id is the greatest.
__device__ __forceinline__ Wide candidate(float logit, uint32_t id) { return Wide(order_key(logit)) << 32 | uint32_t(~id); }
__device__ __forceinline__ uint32_t candidate_id(Wide candidate) { return ~uint32_t(candidate); }
__device__ __forceinline__ float candidate_logit(Wide candidate) {
    const uint32_t key = uint32_t(candidate >> 32);
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

__device__ __forceinline__ Wide warp_largest(Wide x) {
    const uint32_t high = uint32_t(x >> 32), largest = __reduce_max_sync(WHOLE_WARP, high);
    return Wide(largest) << 32 | __reduce_max_sync(WHOLE_WARP, high == largest ? uint32_t(x) : 0);
}

// The sum over the lanes up to this one.
__device__ __forceinline__ Wide warp_weight_upto(Wide x) {
#pragma unroll
    for (unsigned by = 1; by < 32; by *= 2) {
        const Wide other = __shfl_up_sync(WHOLE_WARP, x, by);
        if (threadIdx.x % 32 >= by) x += other;
    }
    return x;
}

// Over a CTA, the same in every thread; `scratch` holds a value a warp and is free again afterwards.
__device__ __forceinline__ Wide cta_largest(Wide x, Wide* scratch) {
    x = warp_largest(x);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    x = warp_largest(threadIdx.x % 32 < WARPS ? scratch[threadIdx.x % 32] : 0);
    __syncthreads();
    return x;
}

// How many tokens there are, and their weights.
struct Rank {
    Wide weight;
    uint32_t count, reserved;

    __device__ __forceinline__ void add(const Rank& other) { weight += other.weight, count += other.count; }
};

// The sum over the threads before this one; `total` becomes the sum over all. `scratch` holds a value a warp.
__device__ Rank cta_rank_before(const Rank& own, Rank* scratch, Rank& total) {
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Rank upto = own;
#pragma unroll
    for (unsigned by = 1; by < 32; by *= 2) {
        const Rank other{__shfl_up_sync(WHOLE_WARP, upto.weight, by), __shfl_up_sync(WHOLE_WARP, upto.count, by), 0};
        if (lane >= by) upto.add(other);
    }
    if (lane == 31) scratch[warp] = upto;
    __syncthreads();
    Rank before{upto.weight - own.weight, upto.count - own.count, 0};
    total = Rank{0, 0, 0};
#pragma unroll
    for (unsigned other = 0; other < WARPS; other++) {
        if (other < warp) before.add(scratch[other]);
        total.add(scratch[other]);
    }
    __syncthreads();
    return before;
}

// The ranks where top-k and top-p end, whichever comes first.
struct Limit {
    uint32_t count;
    Wide weight;

    __device__ __forceinline__ bool is_reached(const Rank& rank) const { return rank.count >= count || rank.weight >= weight; }
};

// Of a CTA: how many tokens and which weights fall into each bucket.
struct Histogram {
    // Sums of weights, in two halves.
    uint32_t low_weights[BUCKETS], high_weights[BUCKETS];
    uint32_t counts[BUCKETS];

    __device__ __forceinline__ void clear() {
        for (unsigned bucket = threadIdx.x; bucket < BUCKETS; bucket += THREADS) {
            counts[bucket] = low_weights[bucket] = high_weights[bucket] = 0;
        }
    }

    // Adds weights that are not 0, each to a bucket, without waiting for one after the other. Shared memory adds 32 bits by
    // itself, where 64 would be a loop of compare and swap, which is long where many logits are nearly equal. Who makes the low
    // half run over adds one to the high half, so the order changes nothing.
    template <unsigned COUNT>
    __device__ __forceinline__ void add(const uint32_t (&buckets)[COUNT], const Wide (&weights)[COUNT]) {
        uint32_t before[COUNT];
#pragma unroll
        for (unsigned i = 0; i < COUNT; i++) {
            before[i] = weights[i] > 0 ? atomicAdd(&low_weights[buckets[i]], uint32_t(weights[i])) : 0;
        }
#pragma unroll
        for (unsigned i = 0; i < COUNT; i++) {
            if (weights[i] > 0) atomicAdd(&counts[buckets[i]], 1u);
        }
#pragma unroll
        for (unsigned i = 0; i < COUNT; i++) {
            const uint32_t high = uint32_t(weights[i] >> 32) + (before[i] > ~uint32_t(weights[i]));
            if (high > 0) atomicAdd(&high_weights[buckets[i]], high);
        }
    }

    __device__ __forceinline__ Rank of(uint32_t bucket) const {
        return Rank{Wide(high_weights[bucket]) << 32 | low_weights[bucket], counts[bucket], 0};
    }
};

// The first of a thread's buckets where a limit is reached; `before` becomes what comes before it. OWN_BUCKETS: none of them.
__device__ __forceinline__ unsigned reached_bucket(const Rank (&own)[OWN_BUCKETS], const Limit& limit, Rank& before) {
#pragma unroll
    for (unsigned i = 0; i < OWN_BUCKETS; i++) {
        Rank after = before;
        after.add(own[i]);
        if (limit.is_reached(after)) return limit.is_reached(before) ? OWN_BUCKETS : i;
        before = after;
    }
    return OWN_BUCKETS;
}

// A thread's logits of a part, chunk by chunk, each four that follow each other; where there is no token, -inf.
struct Logits {
    float values[CHUNKS][4];

    static __device__ __forceinline__ uint32_t first_id(uint32_t part, unsigned chunk) {
        return part * SAMPLE_PART + (chunk * THREADS + threadIdx.x) * 4;
    }

    // Of a row.
    __device__ __forceinline__ void load(const float* logits, uint32_t vocab_size, uint32_t part) {
        const bool is_aligned = reinterpret_cast<uintptr_t>(logits) % 16 == 0;
#pragma unroll
        for (unsigned i = 0; i < CHUNKS; i++) {
            const uint32_t id = first_id(part, i);
            float4 four;
            if (is_aligned && id + 4 <= vocab_size) {
                four = load_four(logits + id);
            } else {
                four.x = id < vocab_size ? logits[id] : minus_infinity();
                four.y = id + 1 < vocab_size ? logits[id + 1] : minus_infinity();
                four.z = id + 2 < vocab_size ? logits[id + 2] : minus_infinity();
                four.w = id + 3 < vocab_size ? logits[id + 3] : minus_infinity();
            }
            values[i][0] = four.x, values[i][1] = four.y, values[i][2] = four.z, values[i][3] = four.w;
        }
    }

    __device__ __forceinline__ void load(const SampleArgs& args, uint32_t part) {
        load(args.logits + size_t(blockIdx.y) * args.stride, args.vocab_size, part);
    }

    // Calls each(logit, id) in the order of ids, also where there is no token.
    template <class Each>
    __device__ __forceinline__ void for_each(uint32_t part, const Each& each) const {
#pragma unroll
        for (unsigned i = 0; i < CHUNKS; i++) {
#pragma unroll
            for (unsigned j = 0; j < 4; j++) each(values[i][j], first_id(part, i) + j);
        }
    }

    // Tokens that a mask forbids get -inf.
    __device__ __forceinline__ void forbid(const SampleArgs& args, uint32_t part, const uint32_t* mask) {
#pragma unroll
        for (unsigned i = 0; i < CHUNKS; i++) {
            const uint32_t id = first_id(part, i), allowed = id < args.vocab_size ? mask[id / 32] >> id % 32 : 0;
#pragma unroll
            for (unsigned j = 0; j < 4; j++) {
                if (!(allowed >> j & 1)) values[i][j] = minus_infinity();
            }
        }
    }

    // The likeliest token; 0: all are -inf.
    __device__ __forceinline__ Wide likeliest(uint32_t part) const {
        float best = minus_infinity();
        uint32_t best_id = 0;
        for_each(part, [&](float logit, uint32_t id) {
            if (logit > best) best = logit, best_id = id;
        });
        return best > minus_infinity() ? candidate(best, best_id) : 0;
    }
};

// What a row is drawn by.
struct Draw {
    float largest, inverse_temperature, buckets_a_logit;
    Wide floor;  // Lesser weights are none: min-p.

    __device__ __forceinline__ Draw(const SampleRow& row, const SampleState& state)
        : largest(state.largest),
          inverse_temperature(1.0f / row.temperature),
          buckets_a_logit(state.buckets_a_logit),
          floor(Wide(row.min_p * WEIGHT_ONE)) {}

    __device__ __forceinline__ Wide weight(float logit) const {
        return Wide(expf(__fmul_rn(logit - largest, inverse_temperature)) * WEIGHT_ONE);
    }
    // Less likely tokens never have a lower one.
    __device__ __forceinline__ uint32_t bucket(float logit) const {
        return uint32_t(fminf(__fmul_rn(largest - logit, buckets_a_logit), float(BUCKETS - 1)));
    }
};

}  // namespace

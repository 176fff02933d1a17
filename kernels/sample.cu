// From rows of logits to tokens and log probabilities, without sorting.
//
//   logits [num_rows, stride] f32        CTA: a row; all threads go through its vocabulary a few times, from L2
//
// Weights p = e^((logit - largest) / temperature) become integers, p * 2^40, whose sums do not depend on their order. What top-k,
// top-p and min-p keep are the likeliest tokens down to some rank, of equal logits the lowest ids:
//
//   top-k: at most k    top-p: until their share of all weights reaches p    min-p: those of at least min_p, the likeliest has 1
//
// Tokens that a row's mask forbids have no weight and no rank in any of this. Log probabilities are those of all logits.
//
// The rank is found by three passes of a radix select: histograms of counts and weights over the upper 11, then 11, then 10 bits
// of a key that orders as the logits do. The kept tokens are drawn from in the order of their ids: the first whose running sum
// passes uniform * sum.
//
// Bytes: 4 vocab_size a pass, from L2 after the first: 3 passes for the likeliest token, 1 more with a mask,
// 5 more to draw, 3 more with top-k or top-p.
#include "cuda.cuh"

namespace {

constexpr unsigned THREADS = 512;
constexpr unsigned WARPS = THREADS / 32;
constexpr unsigned BUCKETS = 2048;
constexpr float WEIGHT_ONE = 1099511627776.0f;  // 2^40
constexpr uint32_t NO_TOKEN = 0xffffffffu;

using Wide = unsigned long long;

struct Shared {
    // Sums of weights, in two halves.
    uint32_t low_weights[BUCKETS], high_weights[BUCKETS];
    uint32_t counts[BUCKETS];
    Wide warp_weights[WARPS];
    Wide warp_counts[WARPS];
    Wide best[WARPS];
    float sums[WARPS];
    // What the threads agree on.
    Wide weight_before;
    uint32_t count_before, bucket, found, token;
};

// Adds to a sum in two halves. Shared memory adds 32 bits by itself, where 64 would be a loop of compare and swap, which is long
// where many logits are nearly equal. Who makes the low half run over adds one to the high half, so the order changes nothing.
__device__ __forceinline__ void add_weight(Shared& shared, uint32_t bucket, Wide weight) {
    const uint32_t low = uint32_t(weight);
    const uint32_t carry = atomicAdd(&shared.low_weights[bucket], low) > ~low;
    const uint32_t high = uint32_t(weight >> 32) + carry;
    if (high > 0) atomicAdd(&shared.high_weights[bucket], high);
}

__device__ __forceinline__ Wide weight_of(const Shared& shared, uint32_t bucket) {
    return Wide(shared.high_weights[bucket]) << 32 | shared.low_weights[bucket];
}

// Orders as the floats do; both zeros are equal.
__device__ __forceinline__ uint32_t order_key(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// A token and its logit as one number: the greater, the likelier; of equal logits the lowest id is the greatest.
__device__ __forceinline__ Wide candidate(float logit, uint32_t id) { return Wide(order_key(logit)) << 32 | uint32_t(~id); }
__device__ __forceinline__ uint32_t candidate_id(Wide candidate) { return ~uint32_t(candidate); }

__device__ Wide cta_max(Wide x, Wide* scratch) {
    for (int with = 16; with > 0; with /= 2) {
        const Wide other = __shfl_xor_sync(WHOLE_WARP, x, with);
        x = other > x ? other : x;
    }
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    for (unsigned warp = 0; warp < WARPS; warp++) x = scratch[warp] > x ? scratch[warp] : x;
    __syncthreads();
    return x;
}

// The sum over the threads before this one; `total` becomes the sum over all.
__device__ Wide cta_sum_before(Wide x, Wide* scratch, Wide& total) {
    const unsigned lane = threadIdx.x % 32;
    Wide sum = x;
    for (unsigned by = 1; by < 32; by *= 2) {
        const Wide other = __shfl_up_sync(WHOLE_WARP, sum, by);
        if (lane >= by) sum += other;
    }
    if (lane == 31) scratch[threadIdx.x / 32] = sum;
    __syncthreads();
    Wide before = sum - x;
    total = 0;
    for (unsigned warp = 0; warp < WARPS; warp++) {
        if (warp < threadIdx.x / 32) before += scratch[warp];
        total += scratch[warp];
    }
    __syncthreads();
    return before;
}

// Whether a token may come; a warp looks at one word.
__device__ __forceinline__ bool allows(const uint32_t* mask, uint32_t id) { return !mask || mask[id / 32] >> id % 32 & 1; }

struct Row {
    const float* logits;
    const uint32_t* mask;
    uint32_t vocab_size;
    float largest, inverse_temperature;

    __device__ __forceinline__ bool allowed(uint32_t id) const { return allows(mask, id); }
    __device__ __forceinline__ Wide weight(uint32_t id) const {
        return allowed(id) ? Wide(expf((logits[id] - largest) * inverse_temperature) * WEIGHT_ONE) : 0;
    }
};

// The likeliest token that `mask` allows after `below` in the order of candidates; 0 when a logit is not finite, or none is left.
__device__ Wide likeliest(const float* logits, uint32_t vocab_size, const uint32_t* mask, Wide below, Shared& shared) {
    Wide best = 0;
    bool damaged = false;
    for (uint32_t id = threadIdx.x; id < vocab_size; id += THREADS) {
        const float logit = logits[id];
        damaged |= !(fabsf(logit) < INFINITY);
        const Wide own = candidate(logit, id);
        if (own < below && own > best && allows(mask, id)) best = own;
    }
    const Wide any_damaged = cta_max(damaged, shared.best);
    best = cta_max(best, shared.best);
    return any_damaged ? 0 : best;
}

// log of the sum of e^logit.
__device__ float log_sum_exp(const float* logits, uint32_t vocab_size, float largest, Shared& shared) {
    float sum = 0.0f;
    for (uint32_t id = threadIdx.x; id < vocab_size; id += THREADS) sum += expf(logits[id] - largest);
    return largest + logf(cta_sum(sum, shared.sums));
}

// The last tokens to keep: all with a greater key, and of those with this key the first `ties` by id. Without ties all are kept.
struct Cut {
    uint32_t key, ties;
};
constexpr Cut NO_CUT = {0, 0};

// The rank where the count reaches `most` or the weights reach `enough`, whichever comes first; NO_LIMIT: they do not count.
constexpr Wide NO_LIMIT = ~Wide(0);
__device__ Cut find_cut(const Row& row, uint32_t most, Wide enough, Shared& shared) {
    constexpr unsigned SHIFTS[3] = {21, 10, 0}, OWN = BUCKETS / THREADS;
    uint32_t prefix = 0, count_before = 0;
    Wide weight_before = 0;
    const bool weighs = enough != NO_LIMIT;
    for (int pass = 0; pass < 3; pass++) {
        const unsigned shift = SHIFTS[pass], known = pass == 0 ? 32 : SHIFTS[pass - 1];
        for (unsigned bucket = threadIdx.x; bucket < BUCKETS; bucket += THREADS) {
            shared.counts[bucket] = shared.low_weights[bucket] = shared.high_weights[bucket] = 0;
        }
        if (threadIdx.x == 0) shared.found = 0;
        __syncthreads();
        for (uint32_t id = threadIdx.x; id < row.vocab_size; id += THREADS) {
            const uint32_t key = order_key(row.logits[id]);
            if ((pass > 0 && key >> known != prefix) || !row.allowed(id)) continue;
            // Descending: the likeliest come first.
            const uint32_t bucket = BUCKETS - 1 - (key >> shift & (BUCKETS - 1) & ((1u << (known - shift)) - 1));
            atomicAdd(&shared.counts[bucket], 1u);
            if (weighs) add_weight(shared, bucket, row.weight(id));
        }
        __syncthreads();
        Wide count = 0, weight = 0, all;
        for (unsigned i = 0; i < OWN; i++) {
            count += shared.counts[threadIdx.x * OWN + i];
            weight += weight_of(shared, threadIdx.x * OWN + i);
        }
        count = count_before + cta_sum_before(count, shared.warp_counts, all);
        weight = weight_before + cta_sum_before(weight, shared.warp_weights, all);
        for (unsigned i = 0; i < OWN; i++) {
            const unsigned bucket = threadIdx.x * OWN + i;
            const Wide count_after = count + shared.counts[bucket], weight_after = weight + weight_of(shared, bucket);
            const bool reached_before = count >= most || weight >= enough;
            if (!reached_before && (count_after >= most || weight_after >= enough)) {
                shared.found = 1;
                shared.bucket = bucket;
                shared.count_before = uint32_t(count);
                shared.weight_before = weight;
            }
            count = count_after;
            weight = weight_after;
        }
        __syncthreads();
        if (!shared.found) return NO_CUT;
        prefix = prefix << (known - shift) | ((BUCKETS - 1 - shared.bucket) & ((1u << (known - shift)) - 1));
        count_before = shared.count_before;
        weight_before = shared.weight_before;
        __syncthreads();
    }
    // Equal logits have equal weights.
    const uint32_t bits = prefix & 0x80000000u ? prefix ^ 0x80000000u : ~prefix;
    const Wide weight = Wide(expf((__uint_as_float(bits) - row.largest) * row.inverse_temperature) * WEIGHT_ONE);
    uint32_t ties = most - count_before;
    if (weight > 0 && enough > weight_before) {
        const Wide needed = (enough - weight_before - 1) / weight + 1;
        if (needed < ties) ties = uint32_t(needed);
    }
    return {prefix, ties};
}

// Draws from the kept tokens: each warp owns a range of ids.
__device__ uint32_t draw(const Row& row, Cut cut, float min_p, double uniform, Shared& shared) {
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t range = (row.vocab_size + WARPS - 1) / WARPS, begin = warp * range;
    const uint32_t end = begin + range < row.vocab_size ? begin + range : row.vocab_size;
    const Wide floor = Wide(min_p * WEIGHT_ONE);
    const bool cuts = cut.ties > 0;

    Wide ties = 0, all;
    for (uint32_t id = begin + lane; cuts && id < end; id += 32) ties += order_key(row.logits[id]) == cut.key && row.allowed(id);
    const Wide thread_ties = cta_sum_before(ties, shared.warp_counts, all);
    const Wide ties_before = __shfl_sync(WHOLE_WARP, thread_ties, 0);

    // Twice over the warp's range: to sum it up, and to find the token.
    Wide target = 0, before = 0;
    if (threadIdx.x == 0) shared.token = NO_TOKEN;
    for (int pass = 0; pass < 2; pass++) {
        Wide ties_so_far = ties_before, sum = pass == 0 ? 0 : before;
        for (uint32_t first = begin; first < end; first += 32) {
            const uint32_t id = first + lane;
            const uint32_t key = id < end ? order_key(row.logits[id]) : 0;
            const unsigned tied = __ballot_sync(WHOLE_WARP, cuts && id < end && key == cut.key && row.allowed(id));
            const Wide rank = ties_so_far + __popc(tied & ((1u << lane) - 1));
            const bool kept = id < end && (!cuts || key > cut.key || (key == cut.key && rank < cut.ties));
            Wide weight = kept ? row.weight(id) : 0;
            if (weight < floor) weight = 0;
            ties_so_far += __popc(tied);
            for (unsigned by = 1; by < 32; by *= 2) {
                const Wide other = __shfl_up_sync(WHOLE_WARP, weight, by);
                if (lane >= by) weight += other;
            }
            const Wide running = sum + weight;
            if (pass == 1) {
                const unsigned passed = __ballot_sync(WHOLE_WARP, running > target);
                // The ranges of other warps begin after, or end before, the target.
                if (sum <= target && passed) {
                    if (lane == 0) shared.token = first + __ffs(passed) - 1;
                    break;
                }
            }
            sum = __shfl_sync(WHOLE_WARP, running, 31);
        }
        if (pass == 0) {
            const Wide own = cta_sum_before(lane == 0 ? sum : 0, shared.warp_weights, all);
            before = __shfl_sync(WHOLE_WARP, own, 0);
            target = Wide(uniform * double(all));
            if (target >= all) target = all - 1;
        }
    }
    __syncthreads();
    return shared.token;
}

}  // namespace

KERNEL(sample, SampleArgs, THREADS, sizeof(Shared)) {
    SHARED_MEMORY(bytes);
    Shared& shared = *reinterpret_cast<Shared*>(bytes);
    const float* logits = args.logits + size_t(blockIdx.x) * args.stride;
    const SampleRow sampling = args.rows[blockIdx.x];
    const Wide likeliest_of_all = likeliest(logits, args.vocab_size, nullptr, ~Wide(0), shared);
    const Wide best = sampling.mask ? likeliest(logits, args.vocab_size, sampling.mask, ~Wide(0), shared) : likeliest_of_all;
    if (likeliest_of_all == 0 || best == 0) {
        if (threadIdx.x == 0) {
            args.token_ids[blockIdx.x] = NO_TOKEN;
            args.logprobs[blockIdx.x] = -INFINITY;
        }
        return;
    }
    uint32_t token = candidate_id(best);
    const float largest = logits[token];
    if (sampling.temperature > 0.0f) {
        const Row row{logits, sampling.mask, args.vocab_size, largest, 1.0f / sampling.temperature};
        Cut cut = NO_CUT;
        if (sampling.top_k > 0 || sampling.top_p < 1.0f) {
            Wide own = 0, all;
            for (uint32_t id = threadIdx.x; id < row.vocab_size; id += THREADS) own += row.weight(id);
            cta_sum_before(own, shared.warp_weights, all);
            const Wide enough = sampling.top_p < 1.0f ? Wide(double(sampling.top_p) * double(all)) : NO_LIMIT;
            cut = find_cut(row, sampling.top_k > 0 ? sampling.top_k : NO_TOKEN, enough > 0 ? enough : 1, shared);
        }
        token = draw(row, cut, sampling.min_p, sampling.uniform, shared);
    }
    const float normaliser = log_sum_exp(logits, args.vocab_size, logits[candidate_id(likeliest_of_all)], shared);
    if (threadIdx.x == 0) {
        args.token_ids[blockIdx.x] = token;
        args.logprobs[blockIdx.x] = logits[token] - normaliser;
    }
}

KERNEL(top_logprobs, TopLogprobsArgs, THREADS, sizeof(Shared)) {
    SHARED_MEMORY(bytes);
    Shared& shared = *reinterpret_cast<Shared*>(bytes);
    const float* logits = args.logits + size_t(blockIdx.x) * args.stride;
    Wide below = ~Wide(0);
    float normaliser = 0.0f;
    for (uint32_t rank = 0; rank < args.num_top; rank++) {
        const size_t at = size_t(blockIdx.x) * args.num_top + rank;
        below = likeliest(logits, args.vocab_size, nullptr, below, shared);
        const bool found = below > 0;
        const float logit = found ? logits[candidate_id(below)] : -INFINITY;
        if (rank == 0 && found) normaliser = log_sum_exp(logits, args.vocab_size, logit, shared);
        if (threadIdx.x == 0) {
            args.token_ids[at] = found ? candidate_id(below) : NO_TOKEN;
            args.logprobs[at] = logit - normaliser;
        }
    }
}

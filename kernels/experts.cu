// Mixtures of experts: which rows pass which experts, and what comes of it.
//
//   route        warp: a row of logits. The CTA that is the last one to be done sorts what all have chosen into tiles: rows of
//                one expert, up to as many as a product takes
//   add_experts  CTA (c, row): columns 1024 c .. 1024 c + 1024; 4 (num_chosen + 1) bytes a value, and 4 of a shared expert
//
// A row's choice depends on its logits alone. Where in a tile a row comes to lie depends on who is first, and changes no bits of
// what products make of it. With few rows either is a launch: nothing is read but logits, and what experts gave.
#include "cuda.cuh"

namespace {

constexpr unsigned WARPS = 8;
constexpr unsigned THREADS = WARPS * 32;
constexpr unsigned ROUTE_BYTES = WARPS * 2 * MAX_EXPERTS * 4;
static_assert(ROUTE_BYTES >= (3 * MAX_EXPERTS + WARPS + 1) * 4, "the sorting takes the place of the scores");

// A value and its place.
struct Best {
    float value;
    unsigned place;
    // Of equal ones the first.
    __device__ __forceinline__ void take(Best other) {
        if (other.value > value || (other.value == value && other.place < place)) *this = other;
    }
};

// The largest of a warp's, in every lane.
__device__ __forceinline__ Best best_of_warp(Best best) {
#pragma unroll
    for (int with = 16; with > 0; with /= 2) {
        best.take(Best{__shfl_xor_sync(WHOLE_WARP, best.value, with), __shfl_xor_sync(WHOLE_WARP, best.place, with)});
    }
    return best;
}

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// A score that compares with others: what is no number goes last, before those that are taken already.
__device__ __forceinline__ float comparable(float score) {
    constexpr float LOWEST = -3.402823466e38f;
    return score > LOWEST ? score : LOWEST;
}

// The first of the largest.
__device__ __forceinline__ Best first_largest(const float* values, unsigned count) {
    Best best{minus_infinity(), 0};
    for (unsigned i = threadIdx.x % 32; i < count; i += 32) best.take(Best{values[i], i});
    return best_of_warp(best);
}

// Takes experts out of the choice whose groups are not chosen: a lane a group.
__device__ void restrict_groups(const RouteArgs& args, float* choice) {
    const unsigned size = args.num_experts / args.num_groups, lane = threadIdx.x % 32;
    Best score{minus_infinity(), lane};
    if (lane < args.num_groups) {
        float first = minus_infinity(), second = minus_infinity();
        for (unsigned i = 0; i < size; i++) {
            const float x = choice[lane * size + i];
            if (x > first) {
                second = first, first = x;
            } else if (x > second) {
                second = x;
            }
        }
        score.value = args.by_two_best ? first + second : first;
    }
    bool is_chosen = false;
    for (unsigned i = 0; i < args.num_chosen_groups; i++) {
        const Best best = best_of_warp(score);
        if (best.place == lane) is_chosen = true, score.value = minus_infinity();
    }
    if (lane < args.num_groups && !is_chosen) {
        for (unsigned i = 0; i < size; i++) choice[lane * size + i] = minus_infinity();
    }
    __syncwarp();
}

// Softmax over a warp's values, in place.
__device__ void softmax(float* values, unsigned count) {
    const unsigned lane = threadIdx.x % 32;
    float largest = minus_infinity(), sum = 0.0f;
    for (unsigned i = lane; i < count; i += 32) largest = fmaxf(largest, values[i]);
    largest = warp_max(largest);
    for (unsigned i = lane; i < count; i += 32) sum += values[i] = expf(values[i] - largest);
    sum = warp_sum(sum);
    for (unsigned i = lane; i < count; i += 32) values[i] /= sum;
    __syncwarp();
}

// SparseMixer-v2: each expert is weighed among those whose logits are near its own.
__device__ void route_sparsemixer(const RouteArgs& args, const float* logits, float* left, uint32_t* chosen, float* weights) {
    const unsigned lane = threadIdx.x % 32;
    for (unsigned i = lane; i < args.num_experts; i += 32) left[i] = comparable(logits[i]);
    __syncwarp();
    for (unsigned place = 0; place < args.num_chosen; place++) {
        const Best best = first_largest(left, args.num_experts);
        float sum = 0.0f;
        for (unsigned i = lane; i < args.num_experts; i += 32) {
            const bool is_near = (best.value - logits[i]) / fmaxf(fabsf(logits[i]), best.value) <= 2.0f * args.jitter;
            if (is_near && left[i] > minus_infinity()) sum += expf(left[i] - best.value);
        }
        sum = warp_sum(sum);
        __syncwarp();
        if (lane == 0) chosen[place] = best.place, weights[place] = 1.0f / sum, left[best.place] = minus_infinity();
        __syncwarp();
    }
}

__device__ void route_row(const RouteArgs& args, unsigned row, float* scores, float* choice) {
    const unsigned lane = threadIdx.x % 32, count = args.num_experts;
    const float* logits = args.logits + size_t(row) * count;
    uint32_t* chosen = args.chosen + size_t(row) * args.num_chosen;
    float* weights = args.weights + size_t(row) * args.num_chosen;
    for (unsigned i = lane; i < count; i += 32) scores[i] = logits[i];
    __syncwarp();
    if (args.score == ROUTER_SPARSEMIXER) return route_sparsemixer(args, scores, choice, chosen, weights);
    if (args.score == ROUTER_SOFTMAX) softmax(scores, count);
    for (unsigned i = lane; i < count; i += 32) {
        if (args.score == ROUTER_SIGMOID) scores[i] = sigmoid(scores[i]);
        choice[i] = comparable(scores[i]);
        if (args.correction) choice[i] = comparable(choice[i] + args.correction[i]);
    }
    __syncwarp();
    if (args.num_groups) restrict_groups(args, choice);
    float sum = 0.0f;
    const unsigned first = first_largest(choice, count).place;
    for (unsigned place = 0; place < args.num_chosen; place++) {
        const unsigned best = place ? first_largest(choice, count).place : first;
        const float score = args.score == ROUTER_SOFTMAX_OF_CHOSEN ? expf(scores[best] - scores[first]) : scores[best];
        sum += score;
        __syncwarp();
        if (lane == 0) chosen[place] = best, weights[place] = score, choice[best] = minus_infinity();
        __syncwarp();
    }
    for (unsigned place = lane; place < args.num_chosen; place += 32) {
        float weight = weights[place];
        if (args.score == ROUTER_SOFTMAX_OF_CHOSEN) {
            weight /= sum;
            if (args.normalizes) weight /= 1.0f + args.normalize_eps;
        } else if (args.normalizes) {
            weight /= sum + args.normalize_eps;
        }
        weights[place] = weight * args.scale;
    }
}

// Rows and tiles of an expert and of those before it, as one number: fewer than 65,536 of either.
struct Sorting {
    uint32_t* counts;  // [num_experts]
    uint32_t* starts;  // [num_experts]: rows in the low half, tiles in the high one
    uint32_t* cursors; // [num_experts]
    uint32_t* sums;    // [WARPS + 1]

    __device__ __forceinline__ explicit Sorting(unsigned char* shared)
        : counts(reinterpret_cast<uint32_t*>(shared)),
          starts(counts + MAX_EXPERTS),
          cursors(starts + MAX_EXPERTS),
          sums(cursors + MAX_EXPERTS) {}
};

// Sums of what comes before each expert.
__device__ void scan(const RouteArgs& args, const Sorting& sorting) {
    constexpr unsigned OWN = MAX_EXPERTS / THREADS;
    const unsigned first = threadIdx.x * OWN, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t own[OWN], sum = 0;
#pragma unroll
    for (unsigned i = 0; i < OWN; i++) {
        const uint32_t count = first + i < args.num_experts ? sorting.counts[first + i] : 0;
        own[i] = count | (count + args.tile_rows - 1) / args.tile_rows << 16;
        sum += own[i];
    }
    uint32_t upto = sum;
#pragma unroll
    for (unsigned by = 1; by < 32; by *= 2) {
        const uint32_t other = __shfl_up_sync(WHOLE_WARP, upto, by);
        if (lane >= by) upto += other;
    }
    if (lane == 31) sorting.sums[warp] = upto;
    __syncthreads();
    uint32_t before = upto - sum;
    for (unsigned i = 0; i < warp; i++) before += sorting.sums[i];
#pragma unroll
    for (unsigned i = 0; i < OWN; i++) {
        if (first + i < args.num_experts) sorting.starts[first + i] = before, sorting.cursors[first + i] = before & 0xffffu;
        before += own[i];
    }
    if (threadIdx.x == THREADS - 1) sorting.sums[WARPS] = before;
    __syncthreads();
}

// Sorts rows by the experts that they have chosen.
__device__ void make_tiles(const RouteArgs& args, unsigned char* shared) {
    const Sorting sorting(shared);
    const unsigned entries = args.num_rows * args.num_chosen;
    for (unsigned i = threadIdx.x; i < args.num_experts; i += THREADS) sorting.counts[i] = 0;
    __syncthreads();
    for (unsigned i = threadIdx.x; i < entries; i += THREADS) atomicAdd(sorting.counts + load_of_other_cta(args.chosen + i), 1u);
    __syncthreads();
    scan(args, sorting);
    for (unsigned expert = threadIdx.x; expert < args.num_experts; expert += THREADS) {
        unsigned first = sorting.starts[expert] & 0xffffu, tile = sorting.starts[expert] >> 16;
        for (unsigned left = sorting.counts[expert]; left; tile++) {
            const unsigned rows = min(left, args.tile_rows);
            args.tiles[tile] = GroupTile{expert, first, rows, 0};
            first += rows, left -= rows;
        }
    }
    for (unsigned tile = (sorting.sums[WARPS] >> 16) + threadIdx.x; tile < args.num_tiles; tile += THREADS) {
        args.tiles[tile] = GroupTile{0, 0, 0, 0};
    }
    for (unsigned i = threadIdx.x; i < entries; i += THREADS) {
        const unsigned at = atomicAdd(sorting.cursors + load_of_other_cta(args.chosen + i), 1u);
        args.rows[at] = i / args.num_chosen;
        args.places[at] = i;
    }
}

}  // namespace

KERNEL(route, RouteArgs, THREADS, ROUTE_BYTES) {
    SHARED_MEMORY(shared);
    const unsigned warp = threadIdx.x / 32, row = blockIdx.x * WARPS + warp;
    float* scores = reinterpret_cast<float*>(shared) + warp * 2 * MAX_EXPERTS;
    if (row < args.num_rows) route_row(args, row, scores, scores + MAX_EXPERTS);
    __syncthreads();
    if (gridDim.x > 1) {
        if (!is_last_to_arrive(args.arrivals, gridDim.x - 1, reinterpret_cast<uint32_t*>(shared))) return;
        __syncthreads();
    }
    make_tiles(args, shared);
}

KERNEL(add_experts, AddExpertsArgs, THREADS, 0) {
    const unsigned column = (blockIdx.x * THREADS + threadIdx.x) * 4, row = blockIdx.y;
    if (column >= args.cols) return;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const auto add = [&](const float* at, float weight) {
        const float4 x = load_four(at);
        sum = make_float4(sum.x + x.x * weight, sum.y + x.y * weight, sum.z + x.z * weight, sum.w + x.w * weight);
    };
    for (unsigned i = 0; i < args.num_chosen; i++) {
        const size_t place = size_t(row) * args.num_chosen + i;
        add(args.experts + place * args.cols + column, args.weights ? args.weights[place] : 1.0f);
    }
    const size_t at = size_t(row) * args.cols + column;
    if (args.shared) add(args.shared + at, args.shared_logits ? sigmoid(args.shared_logits[row]) : 1.0f);
    sum = make_float4(sum.x * args.scale, sum.y * args.scale, sum.z * args.scale, sum.w * args.scale);
    if (args.accumulate) {
        const float4 x = load_four(args.out + at);
        sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
    }
    *reinterpret_cast<float4*>(args.out + at) = sum;
}

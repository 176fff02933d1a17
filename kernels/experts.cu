// Mixtures of experts: which rows pass which experts, and what comes of it.
//
//   route        warp: a row of logits, in registers. The CTA that is the last one to be done sorts what all have chosen into
//                tiles: rows of one expert, up to as many as a product takes
//   add_experts  CTA (c, row): columns 1024 c .. 1024 c + 1024; 4 (num_chosen + 1) bytes a value, and 4 of a shared expert
//
// A row's choice depends on its logits alone. Where in a tile a row comes to lie depends on who is first, and changes no bits of
// what products make of it. With few rows either is a launch: nothing is read but logits, and what experts gave.
#include "cuda.cuh"

namespace {

constexpr unsigned WARPS = 8;
constexpr unsigned THREADS = WARPS * 32;
constexpr unsigned KEPT = 2048;  // Choices that the CTA which sorts has in shared memory; it reads more of them twice.
constexpr unsigned SCORE_BYTES = WARPS * MAX_EXPERTS * 4, ROUTE_BYTES = SCORE_BYTES + KEPT * 4;
static_assert(SCORE_BYTES >= (3 * MAX_EXPERTS + WARPS + 1) * 4, "the sorting takes the place of the scores");

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

// The groups whose experts may be chosen, a bit each: a lane scores a group.
__device__ unsigned chosen_groups(const RouteArgs& args, const float* choice) {
    const unsigned size = args.num_experts / args.num_groups, lane = threadIdx.x % 32;
    Best score{minus_infinity(), lane};
    if (lane < args.num_groups) {
        float first = minus_infinity(), second = minus_infinity();
#pragma unroll 4
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
    unsigned chosen = 0;
#pragma unroll 1
    for (unsigned i = 0; i < args.num_chosen_groups; i++) {
        const Best best = best_of_warp(score);
        chosen |= 1u << best.place;
        if (best.place == lane) score.value = minus_infinity();
    }
    return chosen;
}

// SparseMixer-v2: each expert is weighed among those whose logits are near its own.
__device__ void route_sparsemixer(const RouteArgs& args, unsigned row, float* left, uint32_t* kept) {
    const unsigned lane = threadIdx.x % 32;
    const float* logits = args.logits + size_t(row) * args.num_experts;
    uint32_t* chosen = args.chosen + size_t(row) * args.num_chosen;
    float* weights = args.weights + size_t(row) * args.num_chosen;
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
        if (lane == 0) {
            chosen[place] = best.place, weights[place] = 1.0f / sum, left[best.place] = minus_infinity();
            if (kept) kept[place] = best.place;
        }
        __syncwarp();
    }
}

// Orders as the floats do; both zeros are equal, and 0 is before all.
__device__ __forceinline__ uint32_t order_key(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of_key(uint32_t key) {
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// The experts of a lane, the row's each 32nd: what each is chosen by, 0 once it is chosen.
template <unsigned OWN>
struct Choice {
    uint32_t keys[OWN];

    // The best one of a warp, of equal ones the first, in every lane; it is taken out.
    __device__ __forceinline__ unsigned take_best() {
        const unsigned lane = threadIdx.x % 32;
        uint32_t best[OWN], place[OWN];
#pragma unroll
        for (unsigned i = 0; i < OWN; i++) best[i] = keys[i], place[i] = i * 32 + lane;
        // In pairs, so that few wait for each other.
#pragma unroll
        for (unsigned by = 1; by < OWN; by *= 2) {
#pragma unroll
            for (unsigned i = 0; i + by < OWN; i += 2 * by) {
                if (best[i + by] > best[i]) best[i] = best[i + by], place[i] = place[i + by];
            }
        }
        const uint32_t largest = __reduce_max_sync(WHOLE_WARP, best[0]);
        const unsigned taken = ~__reduce_max_sync(WHOLE_WARP, best[0] == largest ? ~place[0] : 0);
#pragma unroll
        for (unsigned i = 0; i < OWN; i++) keys[i] = taken == i * 32 + lane ? 0 : keys[i];
        return taken;
    }
};

// Puts experts last whose groups are not chosen. `scores` is as before afterwards.
template <unsigned OWN>
__device__ __forceinline__ void restrict_groups(const RouteArgs& args, float* scores, Choice<OWN>& choice) {
    const unsigned lane = threadIdx.x % 32, size = args.num_experts / args.num_groups;
    float own[OWN];
#pragma unroll
    for (unsigned i = 0; i < OWN; i++) {
        const unsigned expert = i * 32 + lane;
        if (expert >= args.num_experts) continue;
        own[i] = scores[expert];
        scores[expert] = value_of_key(choice.keys[i]);
    }
    __syncwarp();
    const unsigned groups = chosen_groups(args, scores);
    __syncwarp();
#pragma unroll
    for (unsigned i = 0; i < OWN; i++) {
        const unsigned expert = i * 32 + lane;
        if (expert >= args.num_experts) continue;
        if (!(groups >> expert / size & 1)) choice.keys[i] = order_key(minus_infinity());
        scores[expert] = own[i];
    }
}

// A warp scores and chooses the experts of a row, 32 after 32, a lane each; returns the last one of the lane. Copies the choice
// to `kept`, if there is such a place.
template <unsigned OWN>
__device__ __forceinline__ unsigned choose(const RouteArgs& args, unsigned row, float* scores, uint32_t* kept) {
    const unsigned lane = threadIdx.x % 32, count = args.num_experts, num_chosen = args.num_chosen;
    const float* logits = args.logits + size_t(row) * count;
    uint32_t* chosen = args.chosen + size_t(row) * num_chosen;
    // All memory is read at once, and where a branch could be, what there is not counts for nothing.
    float own[OWN], shift[OWN], largest = minus_infinity(), sum = 0.0f;
#pragma unroll
    for (unsigned i = 0; i < OWN; i++) {
        const unsigned expert = i * 32 + lane;
        own[i] = expert < count ? logits[expert] : minus_infinity();
        shift[i] = args.correction && expert < count ? args.correction[expert] : 0.0f;
    }
    if (args.score == ROUTER_SOFTMAX) {
#pragma unroll
        for (unsigned i = 0; i < OWN; i++) largest = fmaxf(largest, own[i]);
        largest = warp_max(largest);
#pragma unroll
        for (unsigned i = 0; i < OWN; i++) sum += own[i] = expf(own[i] - largest);
        sum = warp_sum(sum);
#pragma unroll
        for (unsigned i = 0; i < OWN; i++) own[i] /= sum;
    } else if (args.score == ROUTER_SIGMOID) {
        // Not unrolled: much code is slow to begin with.
#pragma unroll 1
        for (unsigned expert = lane; expert < count; expert += 32) scores[expert] = sigmoid(logits[expert]);
#pragma unroll
        for (unsigned i = 0; i < OWN; i++) own[i] = scores[i * 32 + lane];
    }
    Choice<OWN> choice;
#pragma unroll
    for (unsigned i = 0; i < OWN; i++) {
        const unsigned expert = i * 32 + lane;
        scores[expert] = own[i];
        choice.keys[i] = expert < count ? order_key(comparable(comparable(own[i]) + shift[i])) : 0;
    }
    if (args.num_groups) restrict_groups(args, scores, choice);
    __syncwarp();
    unsigned expert = 0;
    for (unsigned begin = 0; begin < num_chosen; begin += 32) {
        const unsigned places = min(num_chosen - begin, 32u);
#pragma unroll 1
        for (unsigned place = 0; place < places; place++) {
            const unsigned best = choice.take_best();
            if (place == lane) expert = best;
        }
        if (lane < places) {
            chosen[begin + lane] = expert;
            if (kept) kept[begin + lane] = expert;
        }
    }
    return expert;
}

// Weighs what a warp has chosen; `expert` is the lane's, if there are no more than 32.
__device__ __forceinline__ void weigh(const RouteArgs& args, unsigned row, const float* scores, unsigned expert) {
    const unsigned lane = threadIdx.x % 32, num_chosen = args.num_chosen;
    const uint32_t* chosen = args.chosen + size_t(row) * num_chosen;
    float* weights = args.weights + size_t(row) * num_chosen;
    const bool is_short = num_chosen <= 32;
    const unsigned first = __shfl_sync(WHOLE_WARP, is_short ? expert : chosen[lane], 0);
    float weight = 0.0f, sum = 0.0f;
#pragma unroll 1
    for (unsigned begin = 0; begin < num_chosen; begin += 32) {
        const unsigned places = min(num_chosen - begin, 32u);
        if (lane < places) {
            if (!is_short) expert = chosen[begin + lane];
            weight = scores[expert];
            if (args.score == ROUTER_SOFTMAX_OF_CHOSEN) weight = expf(weight - scores[first]);
            if (args.score == ROUTER_SIGMOID_OF_CHOSEN) weight = sigmoid(weight);
            if (!is_short) weights[begin + lane] = weight;
        }
        for (unsigned place = 0; place < places; place++) sum += __shfl_sync(WHOLE_WARP, weight, place);
    }
#pragma unroll 1
    for (unsigned place = lane; place < num_chosen; place += 32) {
        if (!is_short) weight = weights[place];
        if (args.score == ROUTER_SOFTMAX_OF_CHOSEN) {
            weight /= sum;
            if (args.normalizes) weight /= 1.0f + args.normalize_eps;
        } else if (args.normalizes) {
            weight /= sum + args.normalize_eps;
        }
        weight *= args.scale;
        weights[place] = args.scales ? weight * args.scales[chosen[place]] : weight;
    }
}

__device__ void route_row(const RouteArgs& args, unsigned row, float* scores, uint32_t* kept) {
    unsigned expert;
    if (args.num_experts <= 128) {
        expert = choose<4>(args, row, scores, kept);
    } else if (args.num_experts <= 256) {
        expert = choose<8>(args, row, scores, kept);
    } else if (args.num_experts <= 512) {
        expert = choose<16>(args, row, scores, kept);
    } else {
        expert = choose<MAX_EXPERTS / 32>(args, row, scores, kept);
    }
    weigh(args, row, scores, expert);
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

// Sorts rows by the experts that they have chosen. `kept` has the choices of all rows, if there is room and this is the only CTA;
// of others they are read, and kept there.
__device__ void make_tiles(const RouteArgs& args, unsigned char* shared, uint32_t* kept) {
    constexpr unsigned AT_ONCE = 4;
    const Sorting sorting(shared);
    const unsigned entries = args.num_rows * args.num_chosen;
    const bool is_kept = entries <= KEPT, is_there = is_kept && gridDim.x == 1;
    for (unsigned i = threadIdx.x; i < args.num_experts; i += THREADS) sorting.counts[i] = 0;
    __syncthreads();
    for (unsigned first = threadIdx.x; first < entries; first += AT_ONCE * THREADS) {
        uint32_t own[AT_ONCE];
#pragma unroll
        for (unsigned j = 0; j < AT_ONCE; j++) {
            const unsigned i = first + j * THREADS;
            if (i < entries) own[j] = is_there ? kept[i] : load_of_other_cta(args.chosen + i);
        }
#pragma unroll
        for (unsigned j = 0; j < AT_ONCE; j++) {
            const unsigned i = first + j * THREADS;
            if (i >= entries) continue;
            if (is_kept) kept[i] = own[j];
            atomicAdd(sorting.counts + own[j], 1u);
        }
    }
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
        const uint32_t expert = is_kept ? kept[i] : load_of_other_cta(args.chosen + i);
        const unsigned at = atomicAdd(sorting.cursors + expert, 1u);
        args.rows[at] = i / args.num_chosen;
        args.places[at] = i;
    }
}

// The same of one row with up to 32 choices, by the warp that has chosen: no two are of one expert, so each is a tile.
__device__ void make_tiles_of_row(const RouteArgs& args, const uint32_t* kept) {
    const unsigned lane = threadIdx.x % 32, expert = lane < args.num_chosen ? kept[lane] : 0;
    unsigned before = 0;
    for (unsigned i = 0; i < args.num_chosen; i++) before += __shfl_sync(WHOLE_WARP, expert, i) < expert;
    if (lane < args.num_chosen) {
        args.tiles[before] = GroupTile{expert, before, 1, 0};
        args.rows[before] = 0;
        args.places[before] = lane;
    }
    for (unsigned tile = args.num_chosen + lane; tile < args.num_tiles; tile += 32) args.tiles[tile] = GroupTile{0, 0, 0, 0};
}

}  // namespace

KERNEL(route, RouteArgs, THREADS, ROUTE_BYTES) {
    SHARED_MEMORY(shared);
    const unsigned warp = threadIdx.x / 32, row = blockIdx.x * WARPS + warp;
    uint32_t* const all_kept = reinterpret_cast<uint32_t*>(shared + SCORE_BYTES);
    const bool is_kept = gridDim.x == 1 && args.num_rows * args.num_chosen <= KEPT;
    if (row < args.num_rows) {
        float* scores = reinterpret_cast<float*>(shared) + warp * MAX_EXPERTS;
        uint32_t* kept = is_kept ? all_kept + row * args.num_chosen : nullptr;
        if (args.score == ROUTER_SPARSEMIXER) {
            route_sparsemixer(args, row, scores, kept);
        } else {
            route_row(args, row, scores, kept);
        }
    }
    if (args.num_rows == 1 && args.num_chosen <= 32) {
        __syncwarp();
        if (warp == 0) make_tiles_of_row(args, all_kept);
        return;
    }
    __syncthreads();
    if (gridDim.x > 1) {
        if (!is_last_to_arrive(args.arrivals, gridDim.x - 1, reinterpret_cast<uint32_t*>(shared))) return;
        __syncthreads();
    }
    make_tiles(args, shared, all_kept);
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

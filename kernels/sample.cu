// From rows of logits to tokens and log probabilities, without sorting.
//
//   logits [num_rows, stride] f32        CTA (p, row): the tokens 4096 p .. 4096 p + 4096 of a row, 8 a thread, in registers
//
// Weights p = e^((logit - largest) / temperature) become integers, p * 2^40, whose sums do not depend on their order. What top-k,
// top-p and min-p keep are the likeliest tokens down to some rank, of equal logits the lowest ids:
//
//   top-k: at most k    top-p: until their share of all weights reaches p    min-p: those of at least min_p, the likeliest has 1
//
// Tokens that a row's mask forbids have no weight and no rank in any of this. Log probabilities are those of all logits.
//
//   sample        the likeliest token, and the sum of exponentials: all that a row without a temperature needs
//   sample_cut    where top-k or top-p end: counts and weights of all tokens by buckets of equal widths below the largest logit
//   sample_draw   the weights of what is kept in each part, and of the bucket that the cut goes through a list of its tokens.
//                 The first token in the order of ids whose running sum passes uniform * sum is drawn
//
// Of a row's CTAs the one that is the last to be done puts together what all have found; of the part that is drawn from it reads
// the logits again. Parts depend on vocab_size alone, so a row has the same bits beside any others.
//
// Bytes: 4 vocab_size a kernel, from L2 after the first.
#include "sample.cuh"

namespace {

constexpr unsigned SEGMENTS = CHUNKS * WARPS;  // Of a part: 128 tokens that follow each other, a warp's of a chunk.
static_assert(SEGMENTS == 32, "one a lane");
constexpr unsigned MAX_LISTED = 2048;

struct LikeliestShared {
    Wide best[WARPS], allowed[WARPS];
    float smallest[WARPS], sums[WARPS];
    uint32_t arrived;
};

struct CutShared {
    Histogram histogram;
    Rank ranks[WARPS];
    uint32_t arrived;
};

struct DrawShared {
    Histogram histogram;
    Wide listed[MAX_LISTED];
    // Of each part: the weights that are kept, and where the tokens begin that it has listed.
    Wide part_weights[SAMPLE_MAX_PARTS];
    uint32_t part_begins[SAMPLE_MAX_PARTS];
    Rank ranks[WARPS];
    Wide sums[WARPS];
    Wide segments[SEGMENTS];
    // What the threads agree on.
    Rank before;
    uint32_t bucket, in_bucket, part, num_listed, arrived;
};

// Whether a row is drawn, and whether top-k or top-p end somewhere.
__device__ __forceinline__ bool is_drawn(const SampleRow& row) { return row.temperature > 0.0f; }
__device__ __forceinline__ bool is_cut(const SampleRow& row) { return is_drawn(row) && (row.top_k > 0 || row.top_p < 1.0f); }

// Puts a row together, in the first warp: from what its parts have found.
__device__ void finish_likeliest(const SampleArgs& args, const SampleRow& row) {
    const SamplePart* parts = args.parts + size_t(blockIdx.y) * gridDim.x;
    const unsigned lane = threadIdx.x % 32;
    constexpr unsigned AT_ONCE = 2;  // A lane reads as many parts before it waits.
    Wide best = 0, allowed = 0;
    float smallest = INFINITY, sum = 0.0f;
    for (unsigned first = lane; first < gridDim.x; first += 32 * AT_ONCE) {
        Wide bests[AT_ONCE], alloweds[AT_ONCE];
        float sums[AT_ONCE];
#pragma unroll
        for (unsigned i = 0; i < AT_ONCE; i++) {
            const bool is_there = first + 32 * i < gridDim.x;
            const SamplePart& part = parts[is_there ? first + 32 * i : first];
            bests[i] = is_there ? load_of_other_cta(&part.best) : 0;
            alloweds[i] = load_of_other_cta(&part.best_allowed);
            sums[i] = load_of_other_cta(&part.sum);
            smallest = fminf(smallest, load_of_other_cta(&part.smallest));
        }
#pragma unroll
        for (unsigned i = 0; i < AT_ONCE; i++) {
            if (bests[i] == 0) continue;
            if (alloweds[i] > allowed) allowed = alloweds[i];
            const float logit = candidate_logit(bests[i]), largest = candidate_logit(best);
            if (bests[i] > best) {
                sum = (best > 0 ? sum * expf(largest - logit) : 0.0f) + sums[i];
                best = bests[i];
            } else {
                sum += sums[i] * expf(logit - largest);
            }
        }
    }
    const Wide best_of_all = warp_largest(best);
    allowed = warp_largest(allowed);
    smallest = -warp_max(-smallest);
    sum = warp_sum(best > 0 ? sum * expf(candidate_logit(best) - candidate_logit(best_of_all)) : 0.0f);
    if (lane > 0) return;
    const float normalizer = candidate_logit(best_of_all) + logf(sum);
    const bool is_sampled = best_of_all != DAMAGED && allowed > 0;
    const float largest = candidate_logit(allowed);
    args.token_ids[blockIdx.y] = is_sampled ? candidate_id(allowed) : NO_TOKEN;
    args.logprobs[blockIdx.y] = is_sampled ? largest - normalizer : -INFINITY;
    args.normalizers[blockIdx.y] = normalizer;
    if (!is_drawn(row)) return;
    const float reach = fminf(largest - smallest, WEIGHTLESS * row.temperature);
    const float buckets_a_logit = reach > 1e-30f ? (BUCKETS - 1) / reach : 0.0f;
    args.states[blockIdx.y] = SampleState{0, 0, NO_BUCKET, largest, buckets_a_logit, normalizer, is_sampled};
}

// The bucket where a row's limit is reached: what comes before it is kept.
__device__ void finish_cut(const SampleArgs& args, const SampleRow& row, CutShared& shared) {
    SampleBucket* buckets = args.buckets + size_t(blockIdx.y) * BUCKETS + threadIdx.x * OWN_BUCKETS;
    Rank own[OWN_BUCKETS], sum{0, 0, 0}, all;
#pragma unroll
    for (unsigned i = 0; i < OWN_BUCKETS; i++) {
        own[i] = Rank{load_of_other_cta(&buckets[i].weight), load_of_other_cta(&buckets[i].count), 0};
        sum.add(own[i]);
    }
    for (unsigned i = 0; i < OWN_BUCKETS; i++) buckets[i] = SampleBucket{0, 0, 0};
    Rank before = cta_rank_before(sum, shared.ranks, all);
    const Wide enough = row.top_p < 1.0f ? Wide(double(row.top_p) * double(all.weight)) : NO_LIMIT;
    const Limit limit{row.top_k > 0 ? row.top_k : NO_TOKEN, enough > 0 ? enough : 1};
    const unsigned reached = reached_bucket(own, limit, before);
    if (reached == OWN_BUCKETS) return;
    SampleState& state = args.states[blockIdx.y];
    state.weight_left = limit.weight == NO_LIMIT ? NO_LIMIT : limit.weight - before.weight;
    state.count_left = limit.count - before.count;
    state.bucket = threadIdx.x * OWN_BUCKETS + reached;
}

// The least candidate to keep of the bucket that the cut goes through: a radix select, from the highest bit in which they differ.
// `each` calls what it is given for every candidate of that bucket.
template <class Each>
__device__ Wide find_cut(const Draw& draw, const Limit& limit, const Each& each, DrawShared& shared) {
    Wide most = 0, least = 0;
    each([&](Wide candidate) {
        most = candidate > most ? candidate : most;
        least = ~candidate > least ? ~candidate : least;
    });
    most = cta_largest(most, shared.sums);
    least = ~cta_largest(least, shared.sums);
    if (most == least) return least;
    // All have the same bits from `known` on.
    unsigned known = 64 - __clzll(most ^ least);
    Wide prefix = known < 64 ? most >> known : 0;
    Rank passed{0, 0, 0};
    for (;;) {
        const unsigned bits = min(known, BUCKET_BITS), shift = known - bits;
        shared.histogram.clear();
        __syncthreads();
        each([&](Wide candidate) {
            if (known < 64 && candidate >> known != prefix) return;
            // Descending: the likeliest come first.
            const uint32_t digit = uint32_t(candidate >> shift) & ((1u << bits) - 1);
            shared.histogram.add<1>({BUCKETS - 1 - digit}, {draw.weight(candidate_logit(candidate))});
        });
        __syncthreads();
        Rank own[OWN_BUCKETS], sum{0, 0, 0}, all;
#pragma unroll
        for (unsigned i = 0; i < OWN_BUCKETS; i++) {
            own[i] = shared.histogram.of(threadIdx.x * OWN_BUCKETS + i);
            sum.add(own[i]);
        }
        Rank before = cta_rank_before(sum, shared.ranks, all);
        before.add(passed);
        const unsigned reached = reached_bucket(own, limit, before);
        if (reached < OWN_BUCKETS) {
            shared.before = before;
            shared.bucket = threadIdx.x * OWN_BUCKETS + reached;
            shared.in_bucket = shared.histogram.counts[shared.bucket];
        }
        __syncthreads();
        prefix = prefix << bits | (BUCKETS - 1 - shared.bucket);
        if (shared.in_bucket == 1 || shift == 0) return prefix << shift;
        passed = shared.before;
        known = shift;
        __syncthreads();
    }
}

// A row whose parts have found what they keep for certain.
struct Drawing {
    const SampleArgs& args;
    const SampleRow& row;
    const SampleState& state;
    const Draw draw;
    DrawShared& shared;

    __device__ __forceinline__ void load(Logits& logits, uint32_t part) const {
        logits.load(args, part);
        if (row.mask) logits.forbid(args, part, row.mask);
    }

    // Puts the lists of the parts one behind the other, in the order of parts; whether there was room for all. `own`: of the part
    // that has this thread's number.
    __device__ bool gather(Rank own, uint32_t& count) const {
        const unsigned num_parts = gridDim.x;
        const Wide* lists = args.lists + size_t(blockIdx.y) * num_parts * SAMPLE_LISTED;
        Rank all;
        // Where a list of a part has no room, that of all has none.
        if (own.count > SAMPLE_LISTED) own.count = MAX_LISTED + 1;
        const Rank before = cta_rank_before(own, shared.ranks, all);
        if (threadIdx.x < num_parts) shared.part_begins[threadIdx.x] = before.count;
        __syncthreads();
        count = all.count;
        if (count > MAX_LISTED) return false;
        for (unsigned i = threadIdx.x; i < count; i += THREADS) {
            // The part that has it: the last one that begins no later.
            unsigned part = 0, end = num_parts;
            while (part + 1 < end) {
                const unsigned middle = (part + end) / 2;
                (shared.part_begins[middle] <= i ? part : end) = middle;
            }
            shared.listed[i] = load_of_other_cta(lists + part * SAMPLE_LISTED + i - shared.part_begins[part]);
        }
        __syncthreads();
        return true;
    }

    __device__ __forceinline__ Wide kept_weight(Wide cut, Wide candidate) const {
        const Wide weight = draw.weight(candidate_logit(candidate));
        return candidate >= cut && weight >= draw.floor ? weight : 0;
    }

    // The least candidate that top-k and top-p keep. The weights that parts keep are complete afterwards.
    __device__ Wide cut(const Rank& own) const {
        const Limit limit{state.count_left, state.weight_left};
        const unsigned num_parts = gridDim.x;
        uint32_t count;
        if (gather(own, count)) {
            const auto each = [&](const auto& take) {
                for (unsigned i = threadIdx.x; i < count; i += THREADS) take(shared.listed[i]);
            };
            const Wide cut = find_cut(draw, limit, each, shared);
            __syncthreads();
            shared.histogram.clear();
            __syncthreads();
            each([&](Wide candidate) {
                shared.histogram.add<1>({candidate_id(candidate) / SAMPLE_PART}, {kept_weight(cut, candidate)});
            });
            __syncthreads();
            if (threadIdx.x < num_parts) shared.part_weights[threadIdx.x] += shared.histogram.of(threadIdx.x).weight;
            return cut;
        }
        // Many nearly equal logits: all of the row is read again.
        const auto each_of = [&](uint32_t part, const auto& take) {
            Logits logits;
            load(logits, part);
            logits.for_each(part, [&](float logit, uint32_t id) {
                if (draw.weight(logit) > 0 && draw.bucket(logit) == state.bucket) take(candidate(logit, id));
            });
        };
        const auto each = [&](const auto& take) {
            for (uint32_t part = 0; part < num_parts; part++) each_of(part, take);
        };
        const Wide cut = find_cut(draw, limit, each, shared);
        for (uint32_t part = 0; part < num_parts; part++) {
            Wide sum = 0;
            each_of(part, [&](Wide candidate) { sum += kept_weight(cut, candidate); });
            sum = cta_sum(sum, shared.sums);
            if (threadIdx.x == 0) shared.part_weights[part] += sum;
        }
        return cut;
    }

    // The token of a part at which the running sum of what is kept passes `target`: each warp has segments of the part.
    __device__ void draw_from(uint32_t part, Wide cut, Wide target) const {
        const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        Logits logits;
        load(logits, part);
#pragma unroll
        for (unsigned i = 0; i < CHUNKS; i++) {
            Wide sum = 0;
#pragma unroll
            for (unsigned j = 0; j < 4; j++) {
                sum += kept_weight(cut, candidate(logits.values[i][j], Logits::first_id(part, i) + j));
            }
            sum = warp_sum(sum);
            if (lane == 0) shared.segments[i * WARPS + warp] = sum;
        }
        __syncthreads();
        const Wide own_segment = shared.segments[lane], upto = warp_weight_upto(own_segment);
        const unsigned segment = __ffs(__ballot_sync(WHOLE_WARP, upto > target)) - 1;
        Wide before = __shfl_sync(WHOLE_WARP, upto - own_segment, segment);
        if (segment % WARPS != warp) return;
        float own[4];
#pragma unroll
        for (unsigned j = 0; j < 4; j++) {
            own[j] = logits.values[0][j];
#pragma unroll
            for (unsigned i = 1; i < CHUNKS; i++) own[j] = segment / WARPS == i ? logits.values[i][j] : own[j];
        }
        const uint32_t first_id = Logits::first_id(part, segment / WARPS);
        Wide weights[4], sum = 0;
#pragma unroll
        for (unsigned j = 0; j < 4; j++) sum += weights[j] = kept_weight(cut, candidate(own[j], first_id + j));
        const Wide running = before + warp_weight_upto(sum);
        if (lane != __ffs(__ballot_sync(WHOLE_WARP, running > target)) - 1u) return;
        before = running - sum;
#pragma unroll
        for (unsigned j = 0; j < 4; j++) {
            if (before <= target && target - before < weights[j]) {
                args.token_ids[blockIdx.y] = first_id + j;
                args.logprobs[blockIdx.y] = own[j] - state.normalizer;
            }
            before += weights[j];
        }
    }

    __device__ void finish() const {
        const SamplePart* parts = args.parts + size_t(blockIdx.y) * gridDim.x;
        const bool is_part = threadIdx.x < gridDim.x;
        Rank own{0, 0, 0}, all;
        if (is_part) {
            own.weight = shared.part_weights[threadIdx.x] = load_of_other_cta(&parts[threadIdx.x].weight);
            own.count = load_of_other_cta(&parts[threadIdx.x].num_listed);
        }
        Wide least = 0;
        if (state.bucket != NO_BUCKET) {
            least = cut(own);
            __syncthreads();
            if (is_part) own.weight = shared.part_weights[threadIdx.x];
        }
        const Rank before = cta_rank_before(own, shared.ranks, all);
        if (all.weight == 0) return;
        Wide target = Wide(row.uniform * double(all.weight));
        if (target >= all.weight) target = all.weight - 1;
        if (before.weight <= target && target - before.weight < own.weight) {
            shared.part = threadIdx.x;
            shared.before = before;
        }
        __syncthreads();
        draw_from(shared.part, least, target - shared.before.weight);
    }
};

}  // namespace

DEFINE_KERNEL(sample, SampleArgs, THREADS, sizeof(LikeliestShared), 3, wait_for_inputs()) {
    SHARED_MEMORY(bytes);
    LikeliestShared& shared = *reinterpret_cast<LikeliestShared*>(bytes);
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = blockIdx.x;
    const SampleRow& row = args.rows[blockIdx.y];
    Logits logits;
    logits.load(args, part);
    float smallest = INFINITY;
    bool is_damaged = false;
    logits.for_each(part, [&](float logit, uint32_t id) {
        if (id >= args.vocab_size) return;
        is_damaged |= !(fabsf(logit) < INFINITY);
        smallest = fminf(smallest, logit);
    });
    const Wide best = warp_largest(is_damaged ? DAMAGED : logits.likeliest(part));
    smallest = -warp_max(-smallest);
    if (lane == 0) shared.best[warp] = best, shared.smallest[warp] = smallest;
    __syncthreads();
    const Wide best_of_part = warp_largest(lane < WARPS ? shared.best[lane] : 0);
    const float largest = candidate_logit(best_of_part);
    float sum = 0.0f;
    logits.for_each(part, [&](float logit, uint32_t) { sum += expf(logit - largest); });
    sum = warp_sum(sum);
    Wide allowed = best_of_part;
    if (row.mask) {
        logits.forbid(args, part, row.mask);
        allowed = warp_largest(logits.likeliest(part));
    }
    if (lane == 0) shared.sums[warp] = sum, shared.allowed[warp] = allowed;
    __syncthreads();
    if (warp == 0) {
        allowed = warp_largest(lane < WARPS ? shared.allowed[lane] : 0);
        sum = warp_sum(lane < WARPS ? shared.sums[lane] : 0.0f);
        smallest = -warp_max(lane < WARPS ? -shared.smallest[lane] : -INFINITY);
        if (lane == 0) {
            SamplePart& found = args.parts[size_t(blockIdx.y) * gridDim.x + part];
            found.best = best_of_part, found.best_allowed = allowed, found.sum = sum, found.smallest = smallest;
        }
    }
    if (!is_last_to_arrive(args.arrivals + blockIdx.y, gridDim.x - 1, &shared.arrived)) return;
    if (warp == 0) finish_likeliest(args, row);
}

DEFINE_KERNEL(sample_cut, SampleArgs, THREADS, sizeof(CutShared), 3, wait_for_inputs()) {
    SHARED_MEMORY(bytes);
    CutShared& shared = *reinterpret_cast<CutShared*>(bytes);
    const SampleRow& row = args.rows[blockIdx.y];
    if (!is_cut(row)) return;
    // Read before it is known whether they are needed: memory is waited for once.
    Logits logits;
    logits.load(args, blockIdx.x);
    const SampleState state = args.states[blockIdx.y];
    if (!state.is_drawn) return;
    const Draw draw(row, state);
    if (row.mask) logits.forbid(args, blockIdx.x, row.mask);
    shared.histogram.clear();
    __syncthreads();
#pragma unroll
    for (unsigned i = 0; i < CHUNKS; i++) {
        uint32_t buckets[4];
        Wide weights[4];
#pragma unroll
        for (unsigned j = 0; j < 4; j++) {
            buckets[j] = draw.bucket(logits.values[i][j]);
            weights[j] = draw.weight(logits.values[i][j]);
        }
        shared.histogram.add(buckets, weights);
    }
    __syncthreads();
    SampleBucket* buckets = args.buckets + size_t(blockIdx.y) * BUCKETS;
#pragma unroll
    for (unsigned bucket = threadIdx.x; bucket < BUCKETS; bucket += THREADS) {
        const Rank own = shared.histogram.of(bucket);
        if (own.count == 0) continue;
        atomicAdd(&buckets[bucket].weight, own.weight);
        atomicAdd(&buckets[bucket].count, own.count);
    }
    if (is_last_to_arrive(args.arrivals + blockIdx.y, gridDim.x - 1, &shared.arrived)) finish_cut(args, row, shared);
}

DEFINE_KERNEL(sample_draw, SampleArgs, THREADS, sizeof(DrawShared), 3, wait_for_inputs()) {
    SHARED_MEMORY(bytes);
    DrawShared& shared = *reinterpret_cast<DrawShared*>(bytes);
    const SampleRow& row = args.rows[blockIdx.y];
    if (!is_drawn(row)) return;
    Logits logits;
    logits.load(args, blockIdx.x);
    const SampleState state = args.states[blockIdx.y];
    if (!state.is_drawn) return;
    const Drawing drawing{args, row, state, Draw(row, state), shared};
    if (row.mask) logits.forbid(args, blockIdx.x, row.mask);
    const size_t part = size_t(blockIdx.y) * gridDim.x + blockIdx.x;
    if (threadIdx.x == 0) shared.num_listed = 0;
    __syncthreads();
    Wide sum = 0;
    logits.for_each(blockIdx.x, [&](float logit, uint32_t id) {
        const Wide weight = drawing.draw.weight(logit);
        const uint32_t bucket = drawing.draw.bucket(logit);
        sum += bucket < state.bucket && weight >= drawing.draw.floor ? weight : 0;
        if (bucket == state.bucket && weight > 0) {
            const uint32_t at = atomicAdd(&shared.num_listed, 1u);
            if (at < SAMPLE_LISTED) args.lists[part * SAMPLE_LISTED + at] = candidate(logit, id);
        }
    });
    sum = cta_sum(sum, shared.sums);
    if (threadIdx.x == 0) args.parts[part].weight = sum, args.parts[part].num_listed = shared.num_listed;
    if (is_last_to_arrive(args.arrivals + blockIdx.y, gridDim.x - 1, &shared.arrived)) drawing.finish();
}

KERNEL(top_logprobs, TopLogprobsArgs, THREADS, WARPS * sizeof(Wide)) {
    constexpr unsigned HELD = 4, AT_ONCE = 4;
    SHARED_MEMORY(bytes);
    Wide* scratch = reinterpret_cast<Wide*>(bytes);
    const float* row = args.logits + size_t(blockIdx.x) * args.stride;
    const float normalizer = args.normalizers[blockIdx.x];
    // The likeliest of a thread's tokens, likeliest first: few threads have more than these of those that are asked for.
    Wide held[HELD];
    bool is_damaged = false;
    const auto fill = [&](Wide below) {
#pragma unroll
        for (unsigned i = 0; i < HELD; i++) held[i] = 0;
        for (uint32_t first = 0; first * SAMPLE_PART < args.vocab_size; first += AT_ONCE) {
            Logits logits[AT_ONCE];
#pragma unroll
            for (unsigned i = 0; i < AT_ONCE; i++) logits[i].load(row, args.vocab_size, first + i);
#pragma unroll
            for (unsigned i = 0; i < AT_ONCE; i++) {
                logits[i].for_each(first + i, [&](float logit, uint32_t id) {
                    if (id >= args.vocab_size) return;
                    is_damaged |= !(fabsf(logit) < INFINITY);
                    const Wide own = candidate(logit, id);
                    if (own >= below || own <= held[HELD - 1]) return;
                    held[HELD - 1] = own;
#pragma unroll
                    for (unsigned j = HELD - 1; j > 0; j--) {
                        const Wide less = held[j - 1] < held[j] ? held[j - 1] : held[j];
                        held[j - 1] = held[j - 1] < held[j] ? held[j] : held[j - 1];
                        held[j] = less;
                    }
                });
            }
        }
    };
    fill(~Wide(0));
    unsigned num_taken = 0;
    for (uint32_t rank = 0; rank < args.num_top; rank++) {
        const Wide best = cta_largest(is_damaged ? DAMAGED : held[0], scratch);
        const bool is_found = best > 0 && best != DAMAGED;
        if (is_found && best == held[0]) {
#pragma unroll
            for (unsigned i = 0; i + 1 < HELD; i++) held[i] = held[i + 1];
            held[HELD - 1] = 0;
            if (++num_taken % HELD == 0) fill(best);
        }
        if (threadIdx.x == 0) {
            const size_t at = size_t(blockIdx.x) * args.num_top + rank;
            args.token_ids[at] = is_found ? candidate_id(best) : NO_TOKEN;
            args.logprobs[at] = is_found ? candidate_logit(best) - normalizer : -INFINITY;
        }
    }
}

// Products of weights in bf16 or f16, as they lie in their file, and up to 32 rows of activations, by tensor cores.
//
//   out [num_rows, out_features] = x [num_rows, in_features] w^T        CTA: a piece of one of the targets
//
//   weight     panels of 64 features, each with its stages of 256 columns one after the other; a piece is `part_stages` of this
//              sequence of stages, so it may begin and end within a panel
//   columns    warp i of 8 takes columns 32 i .. 32 i + 32 of each stage, so the CTA reads 512 bytes of a row one after the other
//   lane       4 g + t copies columns 8 t .. 8 t + 8 of rows g, g + 8, ... SLOTS - 1 stages ahead, into memory that it alone
//              reads: no thread waits for another before a panel is done
//   sums       in tensor cores; then over the 8 warps, then over the pieces that share a panel, in one order that the weight's
//              shape decides
//
// A fragment wants columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of a lane. It gets 8 t .. 8 t + 4, and the next one 8 t + 4 .. 8 t + 8,
// of the weight and of x alike: the same products in another order, and 16 bytes for each load of either.
//
// Rounding x to the weight's type is all that is lost; f16 takes what it does not reach for its largest. Nothing that is computed
// of a row depends on the rows beside it, so neither their number nor its place changes its bits; nor do the other targets. Of
// pieces that share a panel, the last one that is done adds what all have summed.
//
// Bytes: those of the weight, once, and from L2 those of x for each panel: 4 a value up to 8 rows, 2 of more; 32 rows of x are
// half as many as the weight's. The floor is the weight's bytes: 4096 x 14336 are 117 MB, at 3.0 TB/s 39 us.
#pragma once
#include <type_traits>

#include "grouped.cuh"

namespace {

constexpr unsigned WARPS = 8;
constexpr unsigned THREADS = WARPS * 32;
constexpr unsigned TILES = 4;  // of 16 features
constexpr unsigned FEATURES = TILES * 16;
constexpr unsigned WARP_COLUMNS = 32;
constexpr unsigned STAGE_COLUMNS = WARPS * WARP_COLUMNS;
// Of a stage a lane has so many pieces of 16 bytes, of every eighth row one.
constexpr unsigned PIECES = FEATURES / 8;
constexpr unsigned PIECE_BYTES = 32 * 16;
constexpr unsigned SLOTS = 3;
constexpr unsigned SLOT_BYTES = PIECES * PIECE_BYTES;
constexpr unsigned COPY_BYTES = WARPS * SLOTS * SLOT_BYTES;
constexpr unsigned SHARED_BYTES = COPY_BYTES + 16;

// The lane's x of a stage: of rows g, g + 8, ... the columns that it has of the weight. Rows that are not there are the last one
// again: nothing is made of them.
template <class T, int ROW_TILES>
struct Activations {
    // 16 bytes of 16 bits; of f32 twice as many, which are rounded once they are there.
    static constexpr int LOADS = ROW_TILES == 1 ? 2 : 1;
    uint4 loaded[ROW_TILES][LOADS];

    template <class Job>
    __device__ __forceinline__ void load(const Job& job, unsigned column) {
        const auto& args = job.args;
        using Element = std::conditional_t<ROW_TILES == 1, uint32_t, uint16_t>;
        const unsigned g = threadIdx.x % 32 / 4;
#pragma unroll
        for (int n = 0; n < ROW_TILES; n++) {
            const size_t at = size_t(job.x_row(min(8 * n + g, args.num_rows - 1))) * args.x_stride + column;
            const uint4* from = reinterpret_cast<const uint4*>(static_cast<const Element*>(static_cast<const void*>(args.x)) + at);
#pragma unroll
            for (int i = 0; i < LOADS; i++) loaded[n][i] = column < args.in_features ? from[i] : uint4{};
        }
    }
    // Of fragments b, those of rows 8 n + g.
    __device__ __forceinline__ uint4 fragments(int n) const {
        if constexpr (ROW_TILES > 1) return loaded[n][0];
        const uint4 low = loaded[0][0], high = loaded[0][LOADS - 1];
        return uint4{rounded(low.x, low.y), rounded(low.z, low.w), rounded(high.x, high.y), rounded(high.z, high.w)};
    }
    static __device__ __forceinline__ uint32_t rounded(uint32_t first, uint32_t second) {
        const float low = __uint_as_float(first), high = __uint_as_float(second);
        if constexpr (std::is_same_v<T, f16>) return pack<T>(within_f16(low), within_f16(high));
        return pack<T>(low, high);
    }
};

// Of lane 4 g + t: features 16 tile + g and 8 more, each of rows 8 n + 2 t and 8 n + 2 t + 1.
template <class T, int ROW_TILES>
struct Sums {
    static constexpr unsigned UNITS = ROW_TILES * TILES;
    float of[ROW_TILES][TILES][4];

    __device__ __forceinline__ void add(const unsigned char* own, const Activations<T, ROW_TILES>& x) {
        uint4 b[ROW_TILES];
#pragma unroll
        for (int n = 0; n < ROW_TILES; n++) b[n] = x.fragments(n);
#pragma unroll
        for (unsigned tile = 0; tile < TILES; tile++) {
            const uint4 low = *reinterpret_cast<const uint4*>(own + 2 * tile * PIECE_BYTES);
            const uint4 high = *reinterpret_cast<const uint4*>(own + (2 * tile + 1) * PIECE_BYTES);
            const uint32_t a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
#pragma unroll
            for (int n = 0; n < ROW_TILES; n++) {
                multiply_tiles<T>(of[n][tile], a[0], b[n].x, b[n].y);
                multiply_tiles<T>(of[n][tile], a[1], b[n].z, b[n].w);
            }
        }
    }
    __device__ __forceinline__ float4 unit(unsigned i) const {
        const float(&sums)[4] = of[i / TILES][i % TILES];
        return make_float4(sums[0], sums[1], sums[2], sums[3]);
    }
};

// What a CTA sums: a range of the stages of all panels of a target, one after the other.
template <class Job_>
struct Work {
    using Job = Job_;
    const Job& job;
    unsigned piece, panel_stages, panel, stage, left;

    __device__ __forceinline__ explicit Work(const Job& job)
        : job(job),
          piece(job.cta()),
          panel_stages((job.args.in_features + STAGE_COLUMNS - 1) / STAGE_COLUMNS) {
        if constexpr (Job::HAS_WHOLE_PANELS) {
            panel = piece, stage = 0, left = panel_stages;
        } else {
            const unsigned first = piece * job.target.part_stages;
            left = min(job.target.part_stages, (job.target.out_features + FEATURES - 1) / FEATURES * panel_stages - first);
            panel = first / panel_stages, stage = first % panel_stages;
        }
    }
    // Of this panel.
    __device__ __forceinline__ unsigned stages() const { return min(left, panel_stages - stage); }
    __device__ __forceinline__ void next_panel() { left -= stages(), panel++, stage = 0; }
};

// The column of a stage from which on a lane has eight.
__device__ __forceinline__ unsigned own_column() { return threadIdx.x / 32 * WARP_COLUMNS + threadIdx.x % 4 * 8; }

// Copies a lane's pieces of the stages into its slots, from panel to panel.
struct Copier {
    unsigned char* slots;
    const uint8_t* row;  // Of feature g of the panel.
    unsigned feature, stage, left;
    unsigned slot = 0;  // In bytes.

    template <class Work>
    __device__ __forceinline__ Copier(const Work& work, unsigned char* slots)
        : slots(slots), feature(work.panel * FEATURES + threadIdx.x % 32 / 4), stage(work.stage), left(work.left) {
        row = work.job.target.w + feature * work.job.args.w_stride;
    }
    template <class Work>
    __device__ __forceinline__ void copy(const Work& work) {
        if (left) {
            const unsigned column = stage * STAGE_COLUMNS + own_column();
            const uint8_t* from = row + column * 2;
            const bool is_inside = column < work.job.args.in_features;
#pragma unroll
            for (unsigned i = 0; i < PIECES; i++) {
                const bool is_there = is_inside && feature + 8 * i < work.job.target.out_features;
                copy16_async(slots + slot + i * PIECE_BYTES, from, is_there, read_once_policy());
                from += 8 * work.job.args.w_stride;
            }
            left--;
            if (++stage == work.panel_stages) stage = 0, feature += FEATURES, row += FEATURES * work.job.args.w_stride;
        }
        slot = slot + SLOT_BYTES < SLOTS * SLOT_BYTES ? slot + SLOT_BYTES : 0;
        copy_commit();
    }
};

// Sum `i` of unit `at / 32` of lane `at % 32` belongs to this feature and row.
struct SumPlace {
    unsigned feature, row;
    __device__ __forceinline__ SumPlace(unsigned panel, unsigned at, unsigned i)
        : feature(panel * FEATURES + at / 32 % TILES * 16 + at % 32 / 4 + i / 2 * 8), row(at / 32 / TILES * 8 + at % 4 * 2 + i % 2) {}
};

// Where a unit of a panel goes.
template <class Work>
__device__ __forceinline__ Output<4, typename Work::Job> output_of(const Work& work, unsigned at) {
    return Output<4, typename Work::Job>(work.job, [&](unsigned i) { return SumPlace(work.panel, at, i); });
}

// Adds the warps' sums of a panel and gives each thread's share of them to `done(place, sums)`. Of every warp's slots the one at
// `slot` is free.
template <class Sums, class Done>
__device__ __forceinline__ void merge_warps(unsigned char* shared, unsigned slot, const Sums& sums, const Done& done) {
    constexpr unsigned UNITS = Sums::UNITS < PIECES ? Sums::UNITS : PIECES;
    unsigned char* own = shared + threadIdx.x / 32 * (SLOTS * SLOT_BYTES) + slot + threadIdx.x % 32 * 16;
#pragma unroll
    for (unsigned first = 0; first < Sums::UNITS; first += UNITS) {
        if (first) __syncthreads();
#pragma unroll
        for (unsigned i = 0; i < UNITS; i++) *reinterpret_cast<float4*>(own + i * PIECE_BYTES) = sums.unit(first + i);
        __syncthreads();
        for (unsigned at = threadIdx.x; at < UNITS * 32; at += THREADS) {
            float4 sum = {};
#pragma unroll
            for (unsigned warp = 0; warp < WARPS; warp++) {
                sum = add(sum, *reinterpret_cast<const float4*>(shared + warp * (SLOTS * SLOT_BYTES) + slot + at * 16));
            }
            done(first * 32 + at, sum);
        }
    }
}

// Ends a panel: its sums become the output, or are left for the CTA that is the last one to be done with the panel.
template <class Work, class Sums>
__device__ __forceinline__ void finish(const Work& work, unsigned char* shared, unsigned slot, const Sums& sums) {
    const GemmArgs& args = work.job.args;
    constexpr unsigned PART = Sums::UNITS * 32;
    const unsigned part_stages = work.job.target.part_stages, first_stage = work.panel * work.panel_stages;
    const unsigned first = first_stage / part_stages, last = (first_stage + work.panel_stages - 1) / part_stages;
    if (first == last) {
        merge_warps(shared, slot, sums, [&](unsigned at, float4 sum) { output_of(work, at).write({sum.x, sum.y, sum.z, sum.w}); });
        return;
    }
    // A piece keeps sums of a panel that another one began, and of one that another one ends.
    const auto part = [&](unsigned piece) {
        float4* parts = reinterpret_cast<float4*>(args.parts);
        return parts + (size_t(work.job.target.first_piece + piece) * 2 + (piece == first)) * PART;
    };
    merge_warps(shared, slot, sums, [&](unsigned at, float4 sum) { part(work.piece)[at] = sum; });
    uint32_t* arrivals = args.arrivals + work.job.target.first_piece + first;
    uint32_t* arrived = reinterpret_cast<uint32_t*>(shared + COPY_BYTES);
    if (!is_last_to_arrive(arrivals, last - first, arrived)) return;
    for (unsigned at = threadIdx.x; at < PART; at += THREADS) {
        const auto output = output_of(work, at);
        const auto load = [&](unsigned piece) { return load_of_other_cta(part(piece) + at); };
        const float4 sum = add_parts_to<6>(load(first), first + 1, last, load);
        output.write({sum.x, sum.y, sum.z, sum.w});
    }
}

template <class T, int ROWS, class Job>
__device__ __forceinline__ void gemm(const Job& job) {
    SHARED_MEMORY(shared);
    Work<Job> work(job);
    Copier copier(work, shared + threadIdx.x / 32 * (SLOTS * SLOT_BYTES) + threadIdx.x % 32 * 16);
#pragma unroll
    for (unsigned i = 0; i + 1 < SLOTS; i++) copier.copy(work);

    wait_for_inputs();
#pragma unroll 1
    for (; work.left; work.next_panel()) {
        Sums<T, ROWS / 8> sums = {};
        const unsigned end = work.stage + work.stages();
#pragma unroll 1
        for (unsigned stage = work.stage; stage < end; stage++) {
            Activations<T, ROWS / 8> x;
            x.load(job, stage * STAGE_COLUMNS + own_column());
            copy_wait<int(SLOTS) - 2>();
            copier.copy(work);
            // What is copied next will take the place of the stage that is now there.
            sums.add(copier.slots + copier.slot, x);
        }
        if constexpr (Job::HAS_WHOLE_PANELS) {
            merge_warps(shared, copier.slot, sums, [&](unsigned at, float4 sum) { output_of(work, at).write({sum.x, sum.y, sum.z, sum.w}); });
        } else {
            finish(work, shared, copier.slot, sums);
        }
        // Others have read what this warp copies over.
        __syncthreads();
    }
    copy_wait<0>();
}

}  // namespace

// Products of packed quantized weights and up to 32 rows of activations, by tensor cores.
//
//   out [num_rows, out_features] = x [num_rows, in_features] w^T        CTA: a piece of one of the targets
//
//   weight     panels, each with its stages one after the other; a piece is `part_stages` of this sequence of stages, so it may
//              begin and end within a panel
//   blocks     warp i of 8 takes block i of each stage (i, i + 8, ... where stages have fewer), copied SLOTS - 1 ahead by the
//              warp itself into memory of its own: no warp waits for another before a panel is done
//   sums       of a block in tensor cores, from codes and x; then in f32, times their scale; over the 8 warps, then over the
//              pieces that share a panel, in one order that the weight's shape decides
//
// Rounding x to bf16 is all that is lost. Nothing that is computed of a row depends on the rows beside it, so neither their
// number nor its place changes its bits; nor do the other targets. Of pieces that share a panel, the last one that is done adds
// what all have summed.
#pragma once
#include <type_traits>

#include "grouped.cuh"
#include "packed.cuh"

namespace {

constexpr unsigned WARPS = 8;
constexpr unsigned THREADS = WARPS * 32;

template <class Format, int ROWS>
struct Gemm {
    static constexpr int ROW_TILES = ROWS / 8;
    static constexpr unsigned SLOTS = 4;
    // A block, and behind it the scales of its super-block.
    static constexpr unsigned SLOT_BYTES = Format::BLOCK_BYTES + Format::SUPER_BYTES;
    static constexpr unsigned COPY_BYTES = WARPS * SLOTS * SLOT_BYTES;
    static constexpr unsigned SCALE_BYTES = Format::HAS_SUPER_BLOCKS ? packed::EXPANDED_BYTES : 0;
    // Sums of a warp, a lane each, and how many of them are merged at once.
    static constexpr int SUMS = packed::TILES * ROW_TILES * 4;
    static constexpr int MERGED = 16;
    static constexpr unsigned MERGE_BYTES = WARPS * MERGED * 32 * 4;
    static constexpr unsigned EXPANDED = WARPS * SCALE_BYTES;
    static constexpr unsigned SHARED_BYTES = COPY_BYTES + (EXPANDED > MERGE_BYTES ? EXPANDED : MERGE_BYTES);
    // Whether x is loaded a block ahead.
    static constexpr bool IS_AHEAD = ROWS == 8;
};

// Where a lane's x lies: of its row 8 n + g, of each step s of 16 columns, columns 16 s + 4 t .. + 4. Rows that are not there are
// the last one again: nothing is made of them.
template <int ROW_TILES, class Job>
struct Source {
    using Element = std::conditional_t<ROW_TILES == 1, float, uint16_t>;
    const Job& job;
    unsigned rows[ROW_TILES];

    __device__ __forceinline__ explicit Source(const Job& job) : job(job) {
#pragma unroll
        for (int n = 0; n < ROW_TILES; n++) rows[n] = place(n);
    }
    __device__ __forceinline__ unsigned place(int n) const {
        return job.x_row(min(8 * n + threadIdx.x % 32 / 4, job.args.num_rows - 1)) * job.args.x_stride + threadIdx.x % 4 * 4;
    }
    // With many rows there are no registers for their places.
    __device__ __forceinline__ const Element* row(int n) const {
        return static_cast<const Element*>(job.args.x) + (ROW_TILES < 4 ? rows[n] : place(n));
    }
};

// A lane's x of a block, as it lies in memory and as fragments b.
template <int ROW_TILES>
struct Activations {
    using Four = std::conditional_t<ROW_TILES == 1, float4, uint2>;
    Four loaded[ROW_TILES][2];

    template <class Source>
    __device__ __forceinline__ void load(const Source& source, unsigned column) {
#pragma unroll
        for (int n = 0; n < ROW_TILES; n++) {
#pragma unroll
            for (int step = 0; step < 2; step++) {
                loaded[n][step] = *reinterpret_cast<const Four*>(source.row(n) + column + 16 * step);
            }
        }
    }
    __device__ __forceinline__ uint2 fragment(int n, int step) const {
        if constexpr (ROW_TILES == 1) {
            const float4 x = loaded[n][step];
            return uint2{pack<bf16>(x.x, x.y), pack<bf16>(x.z, x.w)};
        } else {
            return loaded[n][step];
        }
    }
};

template <int ROW_TILES>
struct Fragments {
    uint2 b[ROW_TILES][2];
    __device__ __forceinline__ explicit Fragments(const Activations<ROW_TILES>& x) {
#pragma unroll
        for (int n = 0; n < ROW_TILES; n++) b[n][0] = x.fragment(n, 0), b[n][1] = x.fragment(n, 1);
    }
};

// Numbers of a format without minima are codes; of others the offset is taken from sums, with the minima.
template <class Format>
__device__ __forceinline__ uint32_t number_pair(const packed::LaneCodes<Format>& codes, int tile, int step, int place) {
    const uint32_t pair = codes.pair(tile, step, place);
    if constexpr (Format::OFFSET == 0.0f || Format::HAS_MIN) {
        return pair;
    } else {
        return subtract_bf16x2(pair, Format::MINUS_OFFSETS ^ 0x80008000u);
    }
}

template <class Format, int ROW_TILES>
struct BlockSums {
    float of[packed::TILES][ROW_TILES][4];

    // All that a block adds.
    template <class Scales>
    __device__ __forceinline__ void add(const unsigned char* block, const Scales& lane_scales, const Fragments<ROW_TILES>& x) {
        constexpr int GROUPS = 2 / Format::SCALE_STEPS;
        const auto& b = x.b;
        if constexpr (Format::HAS_MIN) {
            constexpr uint32_t A = Format::MINUS_OFFSETS;
            const uint32_t a[4] = {A, A, A, A};
            // The sum of x times -OFFSET: the same for all features.
            float2 offsets[ROW_TILES];
#pragma unroll
            for (int n = 0; n < ROW_TILES; n++) {
                float sums[4] = {};
                multiply_tiles<bf16>(sums, a, b[n][0].x, b[n][0].y);
                multiply_tiles<bf16>(sums, a, b[n][1].x, b[n][1].y);
                offsets[n] = make_float2(sums[0], sums[1]);
            }
#pragma unroll
            for (int tile = 0; tile < int(packed::TILES); tile++) {
                const float2 minima = lane_scales.sum_minima(tile);
#pragma unroll
                for (int n = 0; n < ROW_TILES; n++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float& sum = of[tile][n][i];
                        sum = fmaf(i < 2 ? minima.x : minima.y, i % 2 ? offsets[n].y : offsets[n].x, sum);
                    }
                }
            }
        }
        const packed::LaneCodes<Format> codes(block, threadIdx.x % 32);
#pragma unroll
        for (int tile = 0; tile < int(packed::TILES); tile++) {
            uint32_t a[2][4];
#pragma unroll
            for (int i = 0; i < 8; i++) a[i / 4][i % 4] = number_pair<Format>(codes, tile, i / 4, i % 4);
#pragma unroll
            for (int group = 0; group < GROUPS; group++) {
                const float2 scales = lane_scales.scales(tile, group);
#pragma unroll
                for (int n = 0; n < ROW_TILES; n++) {
                    float products[4] = {};
                    multiply_tiles<bf16>(products, a[group], b[n][group].x, b[n][group].y);
                    if constexpr (GROUPS == 1) multiply_tiles<bf16>(products, a[1], b[n][1].x, b[n][1].y);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float& sum = of[tile][n][i];
                        sum = fmaf(i < 2 ? scales.x : scales.y, products[i], sum);
                    }
                }
            }
        }
    }

    __device__ __forceinline__ float& at(int i) { return of[i / (4 * ROW_TILES)][i / 4 % ROW_TILES][i % 4]; }
};

// Sum `i` of a lane belongs to this feature of its panel and this row.
template <int ROW_TILES>
struct SumPlace {
    unsigned feature, row;
    __device__ __forceinline__ SumPlace(unsigned i, unsigned lane)
        : feature(i / (4 * ROW_TILES) * 16 + i / 2 % 2 * 8 + lane / 4), row(i / 4 % ROW_TILES * 8 + lane % 4 * 2 + i % 2) {}
};

// Where sums `i` of a lane and of the next one go, which are two of a panel.
template <int ROW_TILES, class Job>
__device__ __forceinline__ Output<2, Job> output_of(const Job& job, unsigned panel, unsigned i, unsigned lane) {
    return Output<2, Job>(job, [&](unsigned j) {
        SumPlace<ROW_TILES> place(i, lane + j);
        place.feature += panel * packed::FEATURES;
        return place;
    });
}

// What a CTA sums: a range of the stages of all panels of a target, one after the other.
template <class Format, class Job_>
struct Work {
    using Job = Job_;
    const Job& job;
    unsigned panel, stage, left;

    __device__ __forceinline__ explicit Work(const Job& job) : job(job) {
        const auto& target = job.target;
        if constexpr (Job::HAS_WHOLE_PANELS) {
            panel = piece(), stage = 0, left = panel_stages();
        } else {
            const unsigned panels = (target.out_features + packed::FEATURES - 1) / packed::FEATURES;
            const unsigned first = piece() * target.part_stages;
            left = min(target.part_stages, panels * panel_stages() - first);
            panel = first_panel(), stage = first % panel_stages();
        }
    }
    __device__ __forceinline__ unsigned piece() const { return job.cta(); }
    __device__ __forceinline__ unsigned first_panel() const { return piece() * job.target.part_stages / panel_stages(); }
    __device__ __forceinline__ unsigned num_blocks() const { return job.args.in_features / packed::COLUMNS; }
    __device__ __forceinline__ unsigned panel_stages() const {
        return (num_blocks() + Format::STAGE_BLOCKS - 1) / Format::STAGE_BLOCKS;
    }
    __device__ __forceinline__ unsigned stages() const { return min(left, panel_stages() - stage); }
    // Blocks of this panel: from `stage * STAGE_BLOCKS` on.
    __device__ __forceinline__ unsigned end() const { return min((stage + stages()) * Format::STAGE_BLOCKS, num_blocks()); }
    __device__ __forceinline__ void next_panel() { left -= stages(), panel++, stage = 0; }
};

// Where a block of a panel begins.
template <class Format>
__device__ __forceinline__ unsigned block_place(unsigned block) {
    return block * Format::BLOCK_BYTES + block / Format::STAGE_BLOCKS * Format::SUPER_BYTES;
}

// Copies a warp's blocks into its slots, from panel to panel.
template <class Format, class Gemm>
struct Copier {
    static constexpr unsigned BLOCK_PIECES = Format::BLOCK_BYTES / 16, PIECES = Gemm::SLOT_BYTES / 16;
    // From one block of a warp to its next one.
    static constexpr unsigned STEP = WARPS * Format::BLOCK_BYTES + WARPS / Format::STAGE_BLOCKS * Format::SUPER_BYTES;
    const uint8_t* panel;  // Where this lane's first piece of block 0 lies.
    unsigned at, end, left;
    unsigned slot = 0;  // In bytes.

    template <class Work>
    __device__ __forceinline__ Copier(const Work& work, unsigned warp) {
        panel = work.job.target.w + work.panel * work.job.args.w_stride + threadIdx.x % 32 * 16;
        at = block_place<Format>(work.stage * Format::STAGE_BLOCKS + warp);
        end = block_place<Format>(work.end());
        left = work.left - work.stages();
    }
    template <class Work>
    __device__ __forceinline__ void copy(const Work& work, unsigned char* slots, unsigned warp) {
        while (at >= end && left) {
            const unsigned stages = min(left, work.panel_stages());
            panel += work.job.args.w_stride;
            at = block_place<Format>(warp);
            end = block_place<Format>(min(stages * Format::STAGE_BLOCKS, work.num_blocks()));
            left -= stages;
        }
        if (at < end) {
            const uint8_t* from = panel + at;
            const unsigned lane = threadIdx.x % 32;
            unsigned char* place = slots + slot + lane * 16;
#pragma unroll
            for (unsigned first = 0; first < PIECES; first += 32) {
                // The scales are as far behind as the stage's later blocks are long.
                unsigned skip = 0;
                if (first + 32 > BLOCK_PIECES && Format::SUPER_BYTES != 0) {
                    if (lane + first >= BLOCK_PIECES) skip = (Format::STAGE_BLOCKS - 1 - warp) * Format::BLOCK_BYTES;
                }
                const bool is_inside = first + 32 <= PIECES || lane + first < PIECES;
                if (is_inside) copy16_async(place + first * 16, from + (first * 16 + skip), true, read_once_policy());
            }
            at += STEP;
        }
        slot = slot + Gemm::SLOT_BYTES < Gemm::SLOTS * Gemm::SLOT_BYTES ? slot + Gemm::SLOT_BYTES : 0;
        copy_commit();
    }
};

// The sums of all warps, `Gemm::MERGED` at once: two that follow each other in [sum, lane] of the panel to `done(place, sums)`.
template <class Gemm, class Sums, class Done>
__device__ __forceinline__ void merge_warps(float* merge, unsigned warp, Sums& sums, const Done& done) {
    constexpr int VALUES = Gemm::MERGED * 32;
    float* own = merge + warp * VALUES + threadIdx.x % 32;
#pragma unroll
    for (int first = 0; first < Gemm::SUMS; first += Gemm::MERGED) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < Gemm::MERGED; i++) own[i * 32] = sums.at(first + i);
        __syncthreads();
        for (unsigned at = threadIdx.x * 2; at < VALUES; at += THREADS * 2) {
            float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
            for (unsigned from = 0; from < WARPS; from++) {
                const float2 x = *reinterpret_cast<const float2*>(merge + from * VALUES + at);
                sum = make_float2(sum.x + x.x, sum.y + x.y);
            }
            done(first * 32 + at, sum);
        }
    }
}

// The CTA that is the last one to leave its sums of a panel in `args.parts` adds all and writes the output.
template <class Gemm, class Work>
__device__ __forceinline__ void add_parts(const Work& work, uint32_t* arrived) {
    constexpr unsigned PART = Gemm::SUMS * 32;
    const GemmArgs& args = work.job.args;
    const GemmTarget& target = work.job.target;
    const unsigned first_stage = work.panel * work.panel_stages();
    const unsigned first = first_stage / target.part_stages, last = (first_stage + work.panel_stages() - 1) / target.part_stages;
    if (first != last) {
        if (!is_last_to_arrive(args.arrivals + target.first_piece + first, last - first, arrived)) return;
    } else {
        __syncthreads();
    }
    // The first one may have begun with another panel.
    const bool has_begun = first * target.part_stages / work.panel_stages() != work.panel;
    const float* parts = args.parts + size_t(target.first_piece + first) * (2 * PART) + threadIdx.x * 2;
#pragma unroll 1
    for (unsigned at = 0; at < PART; at += 2 * THREADS) {
        const unsigned i = at + threadIdx.x * 2;
        const auto output = output_of<Gemm::ROW_TILES>(work.job, work.panel, i / 32, i % 32);
        const auto part = [&](unsigned of) { return reinterpret_cast<const float2*>(parts + at + size_t(of) * (2 * PART)); };
        const float2 begun = load_of_other_cta(reinterpret_cast<const float2*>(parts + has_begun * PART + at));
        const float2 sum = add_parts_to<6>(begun, 1, last - first, [&](unsigned of) { return load_of_other_cta(part(of)); });
        output.write({sum.x, sum.y});
    }
}

template <class Format, int ROWS, class Job>
__device__ __forceinline__ void gemm(const Job& job) {
    using Gemm = ::Gemm<Format, ROWS>;
    SHARED_MEMORY(shared);
    const unsigned warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
    unsigned char* slots = shared + warp * (Gemm::SLOTS * Gemm::SLOT_BYTES);
    unsigned char* scales = shared + Gemm::COPY_BYTES + warp * Gemm::SCALE_BYTES;
    float* merge = reinterpret_cast<float*>(shared + Gemm::COPY_BYTES);
    Work<Format, Job> work(job);
    Copier<Format, Gemm> copier(work, warp);
#pragma unroll
    for (unsigned i = 0; i + 1 < Gemm::SLOTS; i++) copier.copy(work, slots, warp);

    wait_for_inputs();
    const Source<Gemm::ROW_TILES, Job> source(job);
#pragma unroll 1
    for (; work.left; work.next_panel()) {
        const unsigned end = work.end();
        unsigned block = work.stage * Format::STAGE_BLOCKS + warp;
        BlockSums<Format, Gemm::ROW_TILES> sums = {};
        Activations<Gemm::ROW_TILES> x = {};
        if (Gemm::IS_AHEAD && block < end) x.load(source, block * packed::COLUMNS);
#pragma unroll 1
        for (; block < end; block += WARPS) {
            if constexpr (!Gemm::IS_AHEAD) x.load(source, block * packed::COLUMNS);
            copy_wait<int(Gemm::SLOTS) - 2>();
            __syncwarp();
            copier.copy(work, slots, warp);
            // What is copied next will take the place of the block that is now there.
            const unsigned char* own = slots + copier.slot;
            const auto add = [&](const auto& lane_scales) {
                const Fragments<Gemm::ROW_TILES> now(x);
                // The last time, one that is there.
                if constexpr (Gemm::IS_AHEAD) x.load(source, min(block + WARPS, end - 1) * packed::COLUMNS);
                sums.add(own, lane_scales, now);
            };
            if constexpr (Format::HAS_SUPER_BLOCKS) {
                packed::expand_scales<Format>(own, own + Format::BLOCK_BYTES, scales);
                __syncwarp();
                add(packed::ExpandedScales<Format>(scales, g));
            } else {
                add(packed::LaneScales<Format>(own, nullptr, g));
            }
        }
        if constexpr (Job::HAS_WHOLE_PANELS) {
            merge_warps<Gemm>(merge, warp, sums, [&](unsigned at, float2 sum) {
                output_of<Gemm::ROW_TILES>(job, work.panel, at / 32, at % 32).write({sum.x, sum.y});
            });
        } else {
            constexpr unsigned PART = Gemm::SUMS * 32;
            const bool has_begun = work.first_panel() != work.panel;
            float* part = job.args.parts + (size_t(blockIdx.x) * 2 + has_begun) * PART;
            merge_warps<Gemm>(merge, warp, sums, [&](unsigned at, float2 sum) { *reinterpret_cast<float2*>(part + at) = sum; });
            add_parts<Gemm>(work, reinterpret_cast<uint32_t*>(merge));
        }
        // Scales take the place of what was merged.
        __syncthreads();
    }
    copy_wait<0>();
}

}  // namespace

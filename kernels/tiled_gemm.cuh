// Products of packed quantized weights and many rows of activations, by tensor cores.
//
//   out [num_rows, out_features] = x [num_rows, in_features] w^T        CTA: 128 features x 128 rows, or a part of their columns
//
//   warp     32 features, half a panel, x 128 rows, whose sums stay in registers
//   stage    64 columns of the rows and of both panels, which all warps copy, STAGES - 1 ahead
//   weights  from codes to the f32 that the file says, then rounded to bf16, as fragments a in registers: a code is taken apart
//            once for 128 rows, and its weight is never written
//   parts    where features and rows make few CTAs, columns are cut; the CTA that is done last adds the parts in their order
//
// Rows lie 160 bytes apart, so the 8-byte fragments b of four rows are in banks of their own.
#pragma once
#include "gemm.cuh"

namespace {

namespace tiled {

constexpr unsigned WARPS = 4;
constexpr unsigned THREADS = WARPS * 32;
constexpr unsigned PANELS = 2;
constexpr unsigned FEATURES = PANELS * packed::FEATURES;
constexpr int TILES = int(packed::TILES) / 2;
constexpr unsigned ROWS = 128;
constexpr unsigned ROW_TILES = ROWS / 8;
constexpr unsigned COLUMNS = 64;
constexpr unsigned STAGES = 3;
constexpr unsigned ROW_BYTES = COLUMNS * 2 + 32;
constexpr unsigned X_BYTES = ROWS * ROW_BYTES;

template <class Format>
struct Shape {
    static constexpr unsigned BLOCKS = COLUMNS / packed::COLUMNS;
    static constexpr unsigned PANEL_BYTES = BLOCKS * Format::BLOCK_BYTES + Format::SUPER_BYTES;
    static constexpr unsigned STAGE_BYTES = X_BYTES + PANELS * PANEL_BYTES;
    static constexpr unsigned SCALE_BYTES = Format::HAS_SUPER_BLOCKS ? BLOCKS * packed::EXPANDED_BYTES : 0;
    static constexpr unsigned SHARED_BYTES = STAGES * STAGE_BYTES + WARPS * SCALE_BYTES;
    static_assert(Format::STAGE_BLOCKS % BLOCKS == 0, "what a warp copies lies in one piece");
};

// A tile of the rows that all read one weight, and a part of its columns.
struct TileJob {
    struct Args {
        const void* x;
        uint64_t w_stride;
        uint32_t num_rows, in_features, x_stride, accumulate;
        float scale;
    };
    Args args;
    const GemmTarget& target;
    unsigned first_row, feature_tile, part, num_parts;
    // Where the part's sums go, and the first part's, and from one part to the next.
    unsigned own_slot, first_slot, slot_stride;

    __device__ __forceinline__ explicit TileJob(const GemmArgs& from)
        : target(target_of_cta(from.targets, from.targets[1].first_piece, from.targets[2].first_piece)) {
        const unsigned row_tiles = (from.num_rows + ROWS - 1) / ROWS, stages = from.in_features / COLUMNS;
        // CTAs that read one share of the weight follow each other.
        const unsigned cta = blockIdx.x - target.first_piece, share = cta / row_tiles;
        num_parts = (stages + target.part_stages - 1) / target.part_stages;
        first_row = cta % row_tiles * ROWS, feature_tile = share / num_parts, part = share % num_parts;
        own_slot = blockIdx.x, first_slot = blockIdx.x - part * row_tiles, slot_stride = row_tiles;
        args = Args{from.x, from.w_stride, min(ROWS, from.num_rows - first_row), from.in_features, from.x_stride, from.accumulate,
                    from.scale};
    }
    __device__ __forceinline__ unsigned first_stage() const { return part * target.part_stages; }
    __device__ __forceinline__ unsigned end_stage() const {
        return min(first_stage() + target.part_stages, args.in_features / COLUMNS);
    }
    __device__ __forceinline__ unsigned x_row(unsigned row) const { return first_row + row; }
    __device__ __forceinline__ unsigned out_row(unsigned row) const { return first_row + row; }
};

// Copies stages into shared memory: a thread 16 bytes of every 16th row, and a share of a panel.
template <class Format, class Job>
struct Copier {
    using Shape = tiled::Shape<Format>;
    static constexpr unsigned CHUNKS = COLUMNS / 8, STEP = THREADS / CHUNKS, OWN_ROWS = ROWS / STEP;
    static constexpr unsigned PANEL_THREADS = THREADS / PANELS;
    const Job& job;
    unsigned rows[OWN_ROWS];  // Where they begin, in values.
    const uint8_t* panel;

    // Features that are not there are the last panel once more: nothing is made of them.
    __device__ __forceinline__ explicit Copier(const Job& job) : job(job) {
        const unsigned own = job.feature_tile * PANELS + threadIdx.x / PANEL_THREADS;
        panel = job.target.w + min(own, (job.target.out_features - 1) / packed::FEATURES) * job.args.w_stride;
    }
    // After `wait_for_inputs`. Rows that are not there are the last one again.
    __device__ __forceinline__ void find_rows() {
#pragma unroll
        for (unsigned i = 0; i < OWN_ROWS; i++) {
            const unsigned row = min(threadIdx.x / CHUNKS + i * STEP, job.args.num_rows - 1);
            rows[i] = job.x_row(row) * job.args.x_stride + threadIdx.x % CHUNKS * 8;
        }
    }
    __device__ __forceinline__ void copy_rows(unsigned char* slot, unsigned stage) const {
        const uint16_t* x = static_cast<const uint16_t*>(job.args.x) + stage * COLUMNS;
        unsigned char* to = slot + threadIdx.x / CHUNKS * ROW_BYTES + threadIdx.x % CHUNKS * 16;
#pragma unroll
        for (unsigned i = 0; i < OWN_ROWS; i++) copy16_async(to + i * STEP * ROW_BYTES, x + rows[i], true);
    }
    __device__ __forceinline__ void copy_panels(unsigned char* slot, unsigned stage) const {
        const packed::BlockPlace<Format> place(panel, stage * Shape::BLOCKS);
        const unsigned own = threadIdx.x % PANEL_THREADS * 16;
        unsigned char* to = slot + X_BYTES + threadIdx.x / PANEL_THREADS * Shape::PANEL_BYTES;
#pragma unroll
        for (unsigned at = own; at < Shape::BLOCKS * Format::BLOCK_BYTES; at += PANEL_THREADS * 16) {
            copy16_async(to + at, place.block + at, true);
        }
        if constexpr (Format::HAS_SUPER_BLOCKS) {
            if (own < Format::SUPER_BYTES) copy16_async(to + Shape::BLOCKS * Format::BLOCK_BYTES + own, place.super_scales + own, true);
        }
    }
};

// What scales two tiles of a block, as `LaneScales`, without super-blocks.
template <class Format>
struct HalfScales {
    uint32_t own[TILES], minima[TILES];

    __device__ __forceinline__ HalfScales(const unsigned char* block, unsigned first_tile, unsigned g) {
        const uint32_t* at = reinterpret_cast<const uint32_t*>(block + Format::CODE_BYTES + g * 16) + first_tile;
        packed::load_words(own, at);
        if constexpr (Format::HAS_MIN) packed::load_words(minima, at + 32);
    }
    __device__ __forceinline__ float2 scales(int tile, int) const { return unpack<typename Format::Scale>(own[tile]); }
    __device__ __forceinline__ float2 sum_minima(int tile) const {
        const float2 x = scales(tile, 0), y = unpack<typename Format::Scale>(minima[tile]);
        return make_float2(x.x - y.x / Format::OFFSET, x.y - y.y / Format::OFFSET);
    }
};

// Two columns of one feature, as bf16; `add`: what the offset of its number and a minimum come to.
template <class Format>
__device__ __forceinline__ uint32_t weights_of(uint32_t numbers, float scale, float add) {
    const float2 x = unpack<bf16>(numbers);
    if constexpr (Format::OFFSET == 0.0f) return pack<bf16>(scale * x.x, scale * x.y);
    return pack<bf16>(fmaf(scale, x.x, add), fmaf(scale, x.y, add));
}

template <class Format>
struct Sums {
    static constexpr unsigned FOURS = unsigned(TILES) * ROW_TILES;
    float of[TILES][ROW_TILES][4];

    // What a block's tiles from `first_tile` on add; `x`: its first column of this lane's first row. A sum is added to again after
    // as many others as tensor cores need to be done with it.
    template <class Scales>
    __device__ __forceinline__ void add(const unsigned char* block, unsigned first_tile, const Scales& lane_scales, const unsigned char* x) {
        const packed::LaneCodes<Format, TILES> codes(block, threadIdx.x % 32, first_tile);
#pragma unroll
        for (int step = 0; step < 2; step++) {
            uint32_t a[TILES][4];
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                const float2 scales = lane_scales.scales(tile, step / Format::SCALE_STEPS);
                float2 by = scales;
                if constexpr (Format::HAS_MIN) by = lane_scales.sum_minima(tile);
                const float2 added = make_float2(by.x * -Format::OFFSET, by.y * -Format::OFFSET);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const uint32_t numbers = codes.pair(tile, step, i);
                    a[tile][i] = weights_of<Format>(numbers, i % 2 ? scales.y : scales.x, i % 2 ? added.y : added.x);
                }
            }
#pragma unroll
            for (unsigned n = 0; n < ROW_TILES; n++) {
                const uint2 b = *reinterpret_cast<const uint2*>(x + n * 8 * ROW_BYTES + step * 32);
#pragma unroll
                for (int tile = 0; tile < TILES; tile++) multiply_tiles<bf16>(of[tile][n], a[tile], b.x, b.y);
            }
        }
    }
    __device__ __forceinline__ float4 four(unsigned i) const {
        const float(&x)[4] = of[i / ROW_TILES][i % ROW_TILES];
        return make_float4(x[0], x[1], x[2], x[3]);
    }
};

// Four sums of a lane: of features g and g + 8 of a tile, for rows 2 t and 2 t + 1 of eight.
template <class Job>
__device__ __forceinline__ void store_four(const Job& job, unsigned i, float4 sums) {
    const unsigned lane = threadIdx.x % 32, row = i % ROW_TILES * 8 + lane % 4 * 2;
    const unsigned feature = job.feature_tile * FEATURES + threadIdx.x / 32 * (TILES * 16) + i / ROW_TILES * 16 + lane / 4;
    store_sum(job, feature, row, sums.x);
    store_sum(job, feature, row + 1, sums.y);
    store_sum(job, feature + 8, row, sums.z);
    store_sum(job, feature + 8, row + 1, sums.w);
}

// Leaves the sums of a part; the CTA that is the last one to do so of its features and rows adds all and writes the output.
template <class Sums>
__device__ __forceinline__ void add_parts(const GemmArgs& args, const TileJob& job, const Sums& sums, uint32_t* arrived) {
    constexpr unsigned FOURS = Sums::FOURS;
    float4* parts = reinterpret_cast<float4*>(args.parts) + threadIdx.x;
    float4* own = parts + size_t(job.own_slot) * (FOURS * THREADS);
#pragma unroll
    for (unsigned i = 0; i < FOURS; i++) own[i * THREADS] = sums.four(i);
    if (!is_last_to_arrive(args.arrivals + job.first_slot, job.num_parts - 1, arrived)) return;
    // All of a part at once, or reading would wait for each.
    const float4* from = parts + size_t(job.first_slot) * (FOURS * THREADS);
    float4 sum[FOURS];
#pragma unroll
    for (unsigned i = 0; i < FOURS; i++) sum[i] = load_of_other_cta(from + i * THREADS);
#pragma unroll 1
    for (unsigned part = 1; part < job.num_parts; part++) {
        from += size_t(job.slot_stride) * (FOURS * THREADS);
#pragma unroll
        for (unsigned i = 0; i < FOURS; i++) {
            const float4 x = load_of_other_cta(from + i * THREADS);
            sum[i] = make_float4(sum[i].x + x.x, sum[i].y + x.y, sum[i].z + x.z, sum[i].w + x.w);
        }
    }
#pragma unroll
    for (unsigned i = 0; i < FOURS; i++) store_four(job, i, sum[i]);
}

// The sums of `job`'s stages, by every warp.
template <class Format, class Job>
__device__ __forceinline__ Sums<Format> multiply(const Job& job) {
    using Shape = tiled::Shape<Format>;
    SHARED_MEMORY(shared);
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const unsigned first = job.first_stage(), end = job.end_stage(), first_tile = warp % 2 * TILES;
    unsigned char* scales = shared + STAGES * Shape::STAGE_BYTES + warp * Shape::SCALE_BYTES;
    Copier<Format, Job> copier(job);
#pragma unroll
    for (unsigned i = 0; i + 1 < STAGES; i++) {
        if (first + i < end) copier.copy_panels(shared + i * Shape::STAGE_BYTES, first + i);
    }
    wait_for_inputs();
    copier.find_rows();
#pragma unroll
    for (unsigned i = 0; i + 1 < STAGES; i++) {
        if (first + i < end) copier.copy_rows(shared + i * Shape::STAGE_BYTES, first + i);
        copy_commit();
    }
    Sums<Format> sums = {};
    unsigned char *slot = shared, *next_slot = shared + (STAGES - 1) * Shape::STAGE_BYTES;
    unsigned char* const last_slot = next_slot;
#pragma unroll 1
    for (unsigned stage = first; stage < end; stage++) {
        copy_wait<int(STAGES) - 2>();
        __syncthreads();
        // All warps are done with what lies there.
        if (stage + STAGES - 1 < end) {
            copier.copy_panels(next_slot, stage + STAGES - 1);
            copier.copy_rows(next_slot, stage + STAGES - 1);
        }
        copy_commit();
        const unsigned char* own = slot + X_BYTES + warp / 2 * Shape::PANEL_BYTES;
        const unsigned char* x = slot + g * ROW_BYTES + t * 8;
        if constexpr (Format::HAS_SUPER_BLOCKS) {
            const unsigned char* super_scales = own + Shape::BLOCKS * Format::BLOCK_BYTES;
#pragma unroll
            for (unsigned block = 0; block < Shape::BLOCKS; block++) {
                packed::expand_scales<Format>(own + block * Format::BLOCK_BYTES, super_scales, scales + block * packed::EXPANDED_BYTES);
            }
            __syncwarp();
        }
#pragma unroll
        for (unsigned block = 0; block < Shape::BLOCKS; block++) {
            const unsigned char* at = own + block * Format::BLOCK_BYTES;
            const unsigned char* rows = x + block * packed::COLUMNS * 2;
            if constexpr (Format::HAS_SUPER_BLOCKS) {
                const unsigned char* expanded = scales + block * packed::EXPANDED_BYTES + first_tile * 128;
                sums.add(at, first_tile, packed::ExpandedScales<Format>(expanded, g), rows);
            } else {
                sums.add(at, first_tile, HalfScales<Format>(at, first_tile, g), rows);
            }
        }
        slot = slot < last_slot ? slot + Shape::STAGE_BYTES : shared;
        next_slot = next_slot < last_slot ? next_slot + Shape::STAGE_BYTES : shared;
    }
    copy_wait<0>();
    return sums;
}

template <class Format>
__device__ __forceinline__ void gemm(const GemmArgs& args) {
    const TileJob job(args);
    const Sums<Format> sums = multiply<Format>(job);
    if (job.num_parts > 1) {
        SHARED_MEMORY(shared);
        __syncthreads();
        add_parts(args, job, sums, reinterpret_cast<uint32_t*>(shared));
        return;
    }
#pragma unroll
    for (unsigned i = 0; i < Sums<Format>::FOURS; i++) store_four(job, i, sums.four(i));
}

}  // namespace tiled

}  // namespace

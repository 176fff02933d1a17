// What a CTA of a product computes: a share of a weight that all rows read, or of one that a group of rows reads.
//
// A mixture of experts has a weight for each group of rows, those that chose an expert; the heads of latent attention have a
// weight each, and columns of their own. Groups are cut into tiles of as many rows as a kernel takes, a CTA's blockIdx.y each.
#pragma once
#include "cuda.cuh"

// Of gemm_*: pieces of a weight, which may share a panel.
struct GemmJob {
    static constexpr bool HAS_WHOLE_PANELS = false;
    const GemmArgs& args;
    const GemmTarget& target;

    __device__ __forceinline__ explicit GemmJob(const GemmArgs& args)
        : args(args), target(target_of_cta(args.targets, args.targets[1].first_piece, args.targets[2].first_piece)) {}
    __device__ __forceinline__ unsigned cta() const { return blockIdx.x - target.first_piece; }
    __device__ __forceinline__ unsigned x_row(unsigned row) const { return row; }
    __device__ __forceinline__ unsigned out_row(unsigned row) const { return row; }
};

// Of grouped_*: a weight and some rows of a group. A CTA of products by tensor cores has its features to itself.
template <int ROWS, class Element>
struct GroupJob {
    static constexpr bool HAS_WHOLE_PANELS = true;
    struct Args {
        static constexpr uint32_t accumulate = 0;
        static constexpr float scale = 1.0f;
        const Element* x;
        uint64_t w_stride;
        uint32_t num_rows, in_features, x_stride;
    };
    struct Target {
        const uint8_t* w;
        const float* bias;
        float* out;
        uint32_t out_features, out_stride;
    };
    Args args;
    Target target;
    const uint32_t *x_rows, *out_rows;
    unsigned first_cta;

    __device__ __forceinline__ GroupJob(const GroupedArgs& from, const GroupTile& tile) {
        const GroupedTarget& of = target_of_cta(from.targets, from.targets[1].first_cta, from.targets[2].first_cta);
        const Element* x = static_cast<const Element*>(from.x) + size_t(tile.group) * from.x_group_stride;
        args = Args{x, from.w_stride, tile.num_rows, from.in_features, from.x_stride};
        const float* bias = of.bias ? of.bias[tile.group] : nullptr;
        float* out = of.out + size_t(tile.group) * from.out_group_stride;
        target = Target{of.w[tile.group], bias, out, of.out_features, of.out_stride};
        first_cta = of.first_cta;
        if (from.tiles) {
            x_rows = from.x_rows + tile.first_row, out_rows = from.out_rows + tile.first_row;
        } else {
            x_rows = out_rows = nullptr;
            args.x += size_t(tile.first_row) * from.x_stride, target.out += size_t(tile.first_row) * of.out_stride;
        }
    }
    // Of this CTA. Without tiles each group has all rows.
    static __device__ __forceinline__ GroupTile tile(const GroupedArgs& args) {
        if (args.tiles) return args.tiles[blockIdx.y];
        const unsigned first = blockIdx.y / args.num_groups * ROWS;
        return GroupTile{blockIdx.y % args.num_groups, first, min(unsigned(ROWS), args.num_rows - first), 0};
    }
    __device__ __forceinline__ unsigned cta() const { return blockIdx.x - first_cta; }
    __device__ __forceinline__ unsigned num_rows() const { return args.num_rows; }
    __device__ __forceinline__ unsigned x_row(unsigned row) const { return x_rows ? x_rows[row] : row; }
    __device__ __forceinline__ unsigned out_row(unsigned row) const { return out_rows ? out_rows[row] : row; }
};

__device__ __forceinline__ float2 add(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }
__device__ __forceinline__ float4 add(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// `sum` and the parts from `next` to `last`, in this order, TOGETHER of which are loaded at once: each takes as long as all.
template <unsigned TOGETHER, class Sum, class Load>
__device__ __forceinline__ Sum add_parts_to(Sum sum, unsigned next, unsigned last, const Load& load) {
    for (; next <= last; next += TOGETHER) {
        Sum parts[TOGETHER];
#pragma unroll
        for (unsigned i = 0; i < TOGETHER; i++) parts[i] = load(min(next + i, last));
#pragma unroll
        for (unsigned i = 0; i < TOGETHER; i++) {
            if (next + i <= last) sum = add(sum, parts[i]);
        }
    }
    return sum;
}

// The output that a thread has COUNT sums for, and what they are added to: it is on its way before the sums are there.
template <int COUNT, class Job>
struct Output {
    const Job& job;
    float* out[COUNT];  // Null: there is no such row or feature.
    float bias[COUNT], before[COUNT];

    // `place(i)`: to which row and feature sum `i` belongs.
    template <class Place>
    __device__ __forceinline__ Output(const Job& job, const Place& place) : job(job) {
        const auto& args = job.args;
        const auto& target = job.target;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const auto at = place(i);
            const bool is_there = at.row < args.num_rows && at.feature < target.out_features;
            out[i] = is_there ? target.out + size_t(job.out_row(at.row)) * target.out_stride + at.feature : nullptr;
            bias[i] = is_there && target.bias ? target.bias[at.feature] : 0.0f;
            before[i] = is_there && args.accumulate ? *out[i] : 0.0f;
        }
    }
    __device__ __forceinline__ void write(const float (&sums)[COUNT]) const {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const float sum = job.target.bias ? sums[i] + bias[i] : sums[i];
            // Of all kernels alike, whether or not the compiler would contract it.
            if (out[i]) *out[i] = job.args.accumulate ? fmaf(sum, job.args.scale, before[i]) : sum * job.args.scale;
        }
    }
};

// A kernel of grouped_*, whose tiles a kernel before it may have written.
#define GROUPED_KERNEL(NAME, THREADS, SHARED_BYTES, CTAS, ROWS, ELEMENT, CALL)                           \
    DEFINE_KERNEL(NAME, GroupedArgs, THREADS, SHARED_BYTES, CTAS, wait_for_inputs()) {                   \
        const GroupTile tile = GroupJob<ROWS, ELEMENT>::tile(args);                                      \
        if (tile.num_rows == 0) return;                                                                  \
        CALL(GroupJob<ROWS, ELEMENT>(args, tile));                                                       \
    }

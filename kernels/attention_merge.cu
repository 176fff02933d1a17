// Rows of attention from their parts.
//
//   part_out [num_parts, num_heads, D], part_lse [num_parts, num_heads]
//   CTA (i, h)  ->  row merges[i].row: a warp for each of the heads 4 h .. 4 h + 4, four columns a lane; D is a multiple of 4
//
//   out = sum of 2^(lse_p - largest) out_p over sum of 2^(lse_p - largest), in the order of the parts
//
// Bytes of a row and head: 4 D for each part, from L2; one launch. What a lane adds is on its way while the weights are made.
#include "cuda.cuh"

namespace {
constexpr unsigned WARPS = 4;
constexpr unsigned AT_ONCE = 16;
}  // namespace

// The merges come from the host, not from a kernel before.
WEIGHT_KERNEL(attention_merge, AttentionMergeArgs, WARPS * 32, 0, 3) {
    const AttentionMerge merge = args.merges[blockIdx.x];
    wait_for_inputs();
    const unsigned lane = threadIdx.x % 32, head = blockIdx.y * WARPS + threadIdx.x / 32;
    if (merge.num_parts == 0 || head >= args.num_heads) return;
    const auto part = [&](uint32_t i) { return (merge.first_part + size_t(i) * merge.part_stride) * args.num_heads + head; };
    const float sink = args.sinks ? args.sinks[head] * 1.44269504f : -INFINITY;

    for (unsigned first_column = 0; first_column < args.head_dim; first_column += 128) {
        const unsigned column = first_column + 4 * lane;
        float4 values[AT_ONCE];
        const auto load_parts = [&](uint32_t first) {
#pragma unroll
            for (unsigned i = 0; i < AT_ONCE; i++) {
                values[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (first + i < merge.num_parts && column < args.head_dim) {
                    values[i] = *reinterpret_cast<const float4*>(args.part_out + part(first + i) * args.head_dim + column);
                }
            }
        };
        load_parts(0);
        float largest = sink;
        for (uint32_t i = lane; i < merge.num_parts; i += 32) largest = fmaxf(largest, args.part_lse[part(i)]);
        largest = warp_max(largest);
        const float base = largest == -INFINITY ? 0.0f : largest;

        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        float total = lane == 0 ? exp2_fast(sink - base) : 0.0f;
        for (uint32_t first = 0; first < merge.num_parts; first += AT_ONCE) {
            if (first > 0) load_parts(first);
            const bool is_there = lane < AT_ONCE && first + lane < merge.num_parts;
            const float own = is_there ? exp2_fast(args.part_lse[part(first + lane)] - base) : 0.0f;
            total += own;
#pragma unroll
            for (unsigned i = 0; i < AT_ONCE; i++) {
                const float weight = __shfl_sync(WHOLE_WARP, own, i);
                sum.x += weight * values[i].x, sum.y += weight * values[i].y, sum.z += weight * values[i].z, sum.w += weight * values[i].w;
            }
        }
        total = warp_sum(total);
        const float factor = total > 0.0f ? 1.0f / total : 0.0f;
        const size_t to = (size_t(merge.row) * args.num_heads + head) * args.head_dim + column;
        if (column < args.head_dim) {
            store_four_as(args.out_type, args.out, to, make_float4(sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor));
        }
    }
}

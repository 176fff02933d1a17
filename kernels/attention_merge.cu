// Rows of attention from their parts.
//
//   part_out [num_parts, num_heads, D], part_lse [num_parts, num_heads]    CTA (i, h): head h of merges[i].row, a thread a column
//
//   out = sum of 2^(lse_p - largest) out_p over sum of 2^(lse_p - largest), in the order of the parts
//
// Bytes of a row and head: 4 D for each part, from L2; one launch.
#include "cuda.cuh"

KERNEL(attention_merge, AttentionMergeArgs, 128, 0) {
    const AttentionMerge merge = args.merges[blockIdx.x];
    const unsigned head = blockIdx.y;
    if (merge.num_parts == 0) return;
    const auto part = [&](uint32_t i) { return size_t(merge.first_part + i * merge.part_stride) * args.num_heads + head; };

    float largest = args.sinks ? args.sinks[head] * 1.44269504f : -INFINITY;
    const float sink = largest;
    for (uint32_t i = 0; i < merge.num_parts; i++) largest = fmaxf(largest, args.part_lse[part(i)]);
    const float base = largest == -INFINITY ? 0.0f : largest;
    float total = exp2_fast(sink - base);
    for (uint32_t i = 0; i < merge.num_parts; i++) total += exp2_fast(args.part_lse[part(i)] - base);
    const float factor = total > 0.0f ? 1.0f / total : 0.0f;

    const size_t row = size_t(merge.row) * args.num_heads + head;
    for (uint32_t column = threadIdx.x; column < args.head_dim; column += blockDim.x) {
        float sum = 0.0f;
        for (uint32_t i = 0; i < merge.num_parts; i++) {
            const size_t at = part(i);
            sum += exp2_fast(args.part_lse[at] - base) * args.part_out[at * args.head_dim + column];
        }
        store_as(args.out_type, args.out, row * args.head_dim + column, sum * factor);
    }
}

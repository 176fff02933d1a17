// Attention in f32 throughout, for caches of f32: one row and KV head a CTA, no tensor cores.
//
//   work w, KV head h  ->  CTA w * num_kv_heads + h: warp i computes query heads i, i + 4, ... of it
//   scores   lane l: key first + l, the whole dot product             weights go to shared memory
//   values   lane l: columns l, l + 32, ... of all 32 keys
//
// What a row sees and in what order depends on its own work alone, so its bits do not depend on the rows beside it.
//
// Bytes: 8 n_keys D a KV head and CTA, once for each four query heads from L1 or L2; operations: 4 n_keys D a head. The floor is
// that of f32 arithmetic above 4 query heads a KV head, of memory below.
#include "attention.cuh"

namespace {

constexpr unsigned WARPS = 4;

template <unsigned MAX_HEAD_DIM>
constexpr unsigned SHARED_BYTES = WARPS * (MAX_HEAD_DIM + 32) * sizeof(float);

// One query vector of a warp.
template <unsigned MAX_HEAD_DIM>
struct Query {
    float* q;        // [head_dim] in shared memory
    float* weights;  // [32] in shared memory
    float sums[MAX_HEAD_DIM / 32];
    float largest, total;
};

__device__ float score(const AttentionArgs& args, const float* q, const float* k, uint32_t head_dim) {
    float dot = 0.0f;
    for (uint32_t i = 0; i < head_dim; i += 4) {
        const float4 a = *reinterpret_cast<const float4*>(q + i), b = *reinterpret_cast<const float4*>(k + i);
        dot += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
    }
    dot *= args.scale;
    return (args.softcap > 0.0f ? args.softcap * tanhf(dot / args.softcap) : dot) * LOG2_E;
}

// Heads of up to MAX_HEAD_DIM elements.
template <unsigned MAX_HEAD_DIM>
__device__ void attend(const AttentionArgs& args) {
    SHARED_MEMORY(shared);
    const AttentionWork work = args.work[blockIdx.x / args.num_kv_heads];
    if (work.num_rows == 0) return;
    const uint32_t head_dim = args.head_dim, queries_per_kv = args.num_heads / args.num_kv_heads, kv_head = blockIdx.x % args.num_kv_heads;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Query<MAX_HEAD_DIM> query;
    query.q = reinterpret_cast<float*>(shared) + warp * MAX_HEAD_DIM;
    query.weights = reinterpret_cast<float*>(shared) + WARPS * MAX_HEAD_DIM + warp * 32;

    const uint32_t begin = first_key(args, args.positions[work.first_row]);
    const uint32_t end = min(work.key_end, end_key(args, work.first_row));
    const uint32_t* table = args.block_tables + size_t(work.request) * args.max_blocks;
    const Plane<float> keys{const_cast<uint8_t*>(args.k_plane), args.block_bytes, 0, args.block_size, head_dim};
    const Plane<float> values{const_cast<uint8_t*>(args.v_plane), args.block_bytes, 0, args.block_size, head_dim};

    for (uint32_t member = warp; member < queries_per_kv; member += WARPS) {
        const uint32_t head = kv_head * queries_per_kv + member;
        for (uint32_t i = lane; i < head_dim; i += 32) query.q[i] = args.q[size_t(work.first_row) * args.q_stride + head * head_dim + i];
        query.largest = NO_SCORE;
        query.total = 0.0f;
        for (float& sum : query.sums) sum = 0.0f;
        for (uint32_t first = work.key_begin; first < end; first += 32) {
            __syncwarp();
            const uint32_t key = first + lane;
            const bool seen = key >= begin && key < end;
            const float own = seen ? score(args, query.q, keys.vector(table[key / args.block_size], kv_head, key % args.block_size), head_dim)
                                   : NO_SCORE;
            const float most = fmaxf(query.largest, warp_max(own));
            const float base = most == NO_SCORE ? 0.0f : most;
            const float shrink = exp2f(query.largest - base), weight = exp2f(own - base);
            query.largest = most;
            query.total = query.total * shrink + weight;
            query.weights[lane] = weight;
            __syncwarp();
#pragma unroll
            for (uint32_t j = 0; j < MAX_HEAD_DIM / 32; j++) query.sums[j] *= shrink;
            for (uint32_t i = first < begin ? begin - first : 0; i < 32 && first + i < end; i++) {
                const uint32_t at = first + i;
                const float* v = values.vector(table[at / args.block_size], kv_head, at % args.block_size);
#pragma unroll
                for (uint32_t j = 0; j < MAX_HEAD_DIM / 32; j++) {
                    if (lane + 32 * j < head_dim) query.sums[j] += query.weights[i] * v[lane + 32 * j];
                }
            }
        }
        const float total = warp_sum(query.total);
        const ResultRow result(args, work, kv_head, member);
        const float factor = result.factor(query.largest, total);
#pragma unroll
        for (uint32_t j = 0; j < MAX_HEAD_DIM / 32; j++) {
            if (lane + 32 * j < head_dim) result.write(args, result.row * head_dim + lane + 32 * j, query.sums[j] * factor);
        }
        if (lane == 0) result.write_lse(args, query.largest, total);
        __syncwarp();
    }
}

}  // namespace

KERNEL(attention_f32, AttentionArgs, WARPS * 32, SHARED_BYTES<256>) { attend<256>(args); }
KERNEL(attention_f32_d512, AttentionArgs, WARPS * 32, SHARED_BYTES<512>) { attend<512>(args); }

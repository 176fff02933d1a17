// Decoding over the paged cache: up to 16 query vectors of a KV head against a range of keys.
//
//   work w, KV head h  ->  CTA (w, h): WARPS warps
//   keys     | 16 | 16 | 16 | 16 | 16 | 16 | 16 | ...     warp i takes every WARPS-th run of 16, with a pipeline of its own:
//   warp       0    1    2    3    0    1    2            STAGES tiles in shared memory, no barrier until the end
//   merge    the warps' sums by their largest scores, then out, or a part for attention_merge
//
// Bytes of a work: 2 n_keys D times the cache's element (and 4 n_keys of scales), read once for all its query heads; q and out
// are small. Operations: 4 n_keys D for each query vector, of which the tensor cores compute 16 whatever queries_per_kv is: 16
// operations a byte at bf16, 32 at one byte, far below what they can do. It waits for memory: the floor of Llama-3-8B (8 KV
// heads, D 128, bf16), batch 32, 4096 keys is 537 MB, at 4.3 TB/s 125 us a layer.
#include "attention.cuh"

namespace {

template <class T, int D>
struct Decoding {
    static constexpr int KEYS = 16;
    static constexpr int VECTORS = 16;
    static constexpr unsigned TILE_BYTES = Tile<T, D, KEYS>::BYTES;
    static constexpr unsigned QUERY_BYTES = VECTORS * QUERY_ROW_BYTES<D>;
    static constexpr unsigned PIPELINE_BYTES = 76 << 10;
    static constexpr int WARPS = 8 * TILE_BYTES <= PIPELINE_BYTES ? 4 : 2;
    static constexpr int FITTING = PIPELINE_BYTES / (WARPS * TILE_BYTES);
    static constexpr int STAGES = FITTING < 4 ? FITTING : 4;
    static constexpr unsigned THREADS = WARPS * 32;
    // For the merge, in place of the tiles: sums [WARPS, VECTORS, D], largest scores and totals [WARPS, VECTORS].
    static constexpr unsigned MERGE_BYTES = WARPS * VECTORS * (D + 2) * 4;
    static constexpr unsigned TILES_BYTES = WARPS * STAGES * TILE_BYTES > MERGE_BYTES ? WARPS * STAGES * TILE_BYTES : MERGE_BYTES;
    static constexpr unsigned SHARED_BYTES = QUERY_BYTES + TILES_BYTES;
    static_assert(STAGES >= 2);
};

template <class T, int D>
__device__ void merge_warps(const AttentionArgs& args, const AttentionWork& work, const QueryRows<T, D, 16>& rows, float* merge) {
    using Decoding = ::Decoding<T, D>;
    constexpr unsigned VECTORS = Decoding::VECTORS;
    const unsigned warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
    float* largest = merge + Decoding::WARPS * VECTORS * D;
    float* totals = largest + Decoding::WARPS * VECTORS;
    float* own = merge + warp * VECTORS * D;
#pragma unroll
    for (int n = 0; n < Tile<T, D, 16>::COLS / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int column = rows.column(n, i);
            if (column < D) own[(g + i / 2 * 8) * D + column] = rows.sums[n][i];
        }
    }
    if (threadIdx.x % 4 == 0) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            largest[warp * VECTORS + g + 8 * i] = rows.largest[i];
            totals[warp * VECTORS + g + 8 * i] = rows.total[i];
        }
    }
    __syncthreads();

    const unsigned vectors = work.num_rows * (args.num_heads / args.num_kv_heads);
    for (unsigned at = threadIdx.x; at < vectors * D; at += Decoding::THREADS) {
        const unsigned vector = at / D, column = at % D;
        float most = NO_SCORE;
        for (int i = 0; i < Decoding::WARPS; i++) most = fmaxf(most, largest[i * VECTORS + vector]);
        const float base = most == NO_SCORE ? 0.0f : most;
        float sum = 0.0f, total = 0.0f;
        for (int i = 0; i < Decoding::WARPS; i++) {
            const float weight = exp2_fast(largest[i * VECTORS + vector] - base);
            sum += weight * merge[i * VECTORS * D + at];
            total += weight * totals[i * VECTORS + vector];
        }
        const ResultRow result(args, work, blockIdx.y, vector);
        result.write(args, result.row * D + column, sum * result.factor(most, total));
        if (column == 0) result.write_lse(args, most, total);
    }
}

template <class T, int D>
__device__ void decode(const AttentionArgs& args) {
    using Decoding = ::Decoding<T, D>;
    constexpr int STAGES = Decoding::STAGES, KEYS = Decoding::KEYS;
    constexpr uint32_t STRIDE = Decoding::WARPS * KEYS;
    SHARED_MEMORY(shared);
    const AttentionWork work = args.work[blockIdx.x];
    if (work.num_rows == 0) return;

    const unsigned warp = threadIdx.x / 32;
    unsigned char* tiles = shared + Decoding::QUERY_BYTES + warp * STAGES * Decoding::TILE_BYTES;
    const TileCopier<T, D, KEYS, 32> copier(args, work, blockIdx.y, threadIdx.x % 32);
    const uint32_t first = work.key_begin + warp * KEYS;
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) {
        copier.copy(tiles + stage * Decoding::TILE_BYTES, first + stage * STRIDE);
        copy_commit();
    }
    stage_queries<T, D, Decoding::VECTORS>(shared, args, work, blockIdx.y);
    __syncthreads();
    QueryRows<T, D, KEYS> rows(args, work, shared, 0);

    int stage = 0;
    for (uint32_t at = first; at < work.key_end; at += STRIDE) {
        const int next = stage == 0 ? STAGES - 1 : stage - 1;
        copier.copy(tiles + next * Decoding::TILE_BYTES, at + (STAGES - 1) * STRIDE);
        copy_commit();
        copy_wait<STAGES - 1>();
        __syncwarp();
        rows.see(tiles + stage * Decoding::TILE_BYTES, int(at), int(work.key_end));
        __syncwarp();
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    copy_wait<0>();
    rows.finish();
    __syncthreads();
    merge_warps<T, D>(args, work, rows, reinterpret_cast<float*>(shared + Decoding::QUERY_BYTES));
}

}  // namespace

#define ATTENTION(NAME, T, D) \
    KERNEL(attention_##NAME##_d##D, AttentionArgs, (Decoding<T, D>::THREADS), (Decoding<T, D>::SHARED_BYTES)) { decode<T, D>(args); }

EACH_CACHE_AND_HEAD_DIM(ATTENTION)

// Prompts over the paged cache: up to 64 query vectors of a KV head (rows of one request times queries_per_kv) against a range of
// keys. Rows that decode may be among the entries of work.
//
//   work w, KV head h  ->  CTA (w, h): 4 warps, 16 query vectors each
//   keys     |    KEYS    |    KEYS    |    KEYS    | ...    a tile is copied once for all warps, the next one meanwhile
//
// Operations: 4 n_keys D for each query vector; bytes: 2 n_keys D times the cache's element for 64 vectors, so 64 operations a
// byte at bf16, most of them from L2. Tensor cores are the limit: the floor of a chunk of 4096 tokens of Llama-3-8B (32 heads, D
// 128, causal) is 137 GFLOP a layer, at the 990 TFLOP/s that an H100's data sheet promises 140 us.
#include "attention.cuh"

namespace {

template <class T, int D>
struct Prefill {
    static constexpr int VECTORS = 64;
    static constexpr int KEYS = D <= 128 ? 64 : 32;
    static constexpr unsigned THREADS = 128;
    static constexpr unsigned TILE_BYTES = Tile<T, D, KEYS>::BYTES;
    static constexpr unsigned QUERY_BYTES = VECTORS * QUERY_ROW_BYTES<D>;
    static constexpr unsigned SHARED_BYTES = QUERY_BYTES + 2 * TILE_BYTES;
};

template <class T, int D>
__device__ void prefill(const AttentionArgs& args) {
    using Prefill = ::Prefill<T, D>;
    constexpr int KEYS = Prefill::KEYS;
    SHARED_MEMORY(shared);
    const AttentionWork work = args.work[blockIdx.x];
    if (work.num_rows == 0) return;

    const unsigned warp = threadIdx.x / 32;
    unsigned char* tiles = shared + Prefill::QUERY_BYTES;
    const TileCopier<T, D, KEYS, Prefill::THREADS> copier(args, work, blockIdx.y, threadIdx.x);
    copier.copy(tiles, work.key_begin);
    copy_commit();
    stage_queries<T, D, Prefill::VECTORS>(shared, args, work, blockIdx.y);
    __syncthreads();
    QueryRows<T, D, KEYS> rows(args, work, shared + warp * 16 * QUERY_ROW_BYTES<D>, warp * 16);

    unsigned stage = 0;
    for (uint32_t at = work.key_begin; at < work.key_end; at += KEYS) {
        copier.copy(tiles + (stage ^ 1) * Prefill::TILE_BYTES, at + KEYS);
        copy_commit();
        copy_wait<1>();
        __syncthreads();
        rows.see(tiles + stage * Prefill::TILE_BYTES, int(at), int(work.key_end));
        __syncthreads();
        stage ^= 1;
    }
    copy_wait<0>();
    rows.finish();

    write_rows(args, work, blockIdx.y, warp * 16, rows);
}

}  // namespace

#define PREFILL(NAME, T, D) \
    KERNEL(prefill_##NAME##_d##D, AttentionArgs, (Prefill<T, D>::THREADS), (Prefill<T, D>::SHARED_BYTES)) { prefill<T, D>(args); }

EACH_CACHE_AND_HEAD_DIM(PREFILL)

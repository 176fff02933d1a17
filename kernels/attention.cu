// Decoding over the paged cache: up to 16 query vectors of a KV head against a range of keys.
//
//   work w, KV head h  ->  CTA w * num_kv_heads + h: WARPS warps. What lies together, the heads of a block, is read together.
//   keys     | 16 | 16 | 16 | 16 | 16 | 16 | 16 | ...     warp i takes every WARPS-th run of 16, with a pipeline of its own:
//   warp       0    1    2    3    0    1    2            STAGES tiles in shared memory, no barrier until the end
//   merge    the warps' sums by their largest scores, then out, or a part for attention_merge
//
// Bytes of a work: 2 n_keys D times the cache's element (and 4 n_keys of scales), read once for all its query heads; q and out
// are small. Operations: 4 n_keys D for each query vector, of which the tensor cores compute 16 whatever queries_per_kv is: 16
// operations a byte at bf16, 32 at one byte, far below what they can do. It waits for memory. Measured on an H100, with 64 query
// heads, 8 KV heads and D 128, parts merged: 32 requests of 4096 keys 200 us in bf16 (2.7 TB/s) and 151 us in int8, one such
// request 14.7 us; int8 takes 130 us where three CTAs fit an SM.
#include "attention.cuh"

namespace {

template <class T, int D>
struct Decoding {
    static constexpr int KEYS = 16;
    static constexpr int VECTORS = 16;
    static constexpr unsigned TILE_BYTES = Tile<T, D, KEYS>::BYTES;
    static constexpr unsigned QUERY_BYTES = VECTORS * QUERY_ROW_BYTES<D>;
    // Three CTAs fit an SM of sm_90, which has 228 KiB, one of which each CTA takes itself: a third one is worth more than a
    // stage. Two stages there must be: one-byte vectors of 256 take a little more, and two CTAs fit.
    static constexpr unsigned CTA_BYTES = 75 << 10;
    static constexpr int WARPS = 8 * TILE_BYTES <= CTA_BYTES ? 4 : 2;
    static constexpr int FITTING = (CTA_BYTES - QUERY_BYTES) / (WARPS * TILE_BYTES);
    static constexpr int STAGES = FITTING < 2 ? 2 : FITTING < 4 ? FITTING : 4;
    static constexpr unsigned THREADS = WARPS * 32;
    // Their registers have to fit as well; the sums of wider heads take more.
    static constexpr int CTAS = D <= 128 ? 3 : 1;
    // For the merge, in place of the tiles: sums [WARPS, VECTORS, D], largest scores and totals [WARPS, VECTORS]. Rows of sums
    // lie 8 floats further apart, so that those of a warp's lanes meet in few banks.
    static constexpr unsigned SUMS_STRIDE = D + 8;
    static constexpr unsigned MERGE_BYTES = WARPS * VECTORS * (SUMS_STRIDE + 2) * 4;
    static constexpr unsigned TILES_BYTES = WARPS * STAGES * TILE_BYTES > MERGE_BYTES ? WARPS * STAGES * TILE_BYTES : MERGE_BYTES;
    static constexpr unsigned SHARED_BYTES = QUERY_BYTES + TILES_BYTES;
};

// Copies a warp's tiles, which are read once; the blocks of the next one are looked up while this one is on its way.
template <class T, int D, int KEYS>
struct WarpCopier {
    static constexpr unsigned CHUNKS = D * sizeof(T) / 16, VECTOR_BYTES = D * sizeof(T);
    static constexpr int EIGHTS = KEYS / 8;
    const uint8_t* k;  // Of the KV head and the lane's column.
    const uint8_t* v;
    const uint8_t* scales;  // Of keys or values, as the lane copies them.
    const uint32_t* block_table;
    uint64_t block_bytes, policy;
    uint32_t block_shift, end, lane;
    uint32_t blocks[EIGHTS];

    __device__ __forceinline__ WarpCopier(const AttentionArgs& args, const AttentionWork& work, uint32_t kv_head)
        : block_table(args.block_tables + size_t(work.request) * args.max_blocks),
          block_bytes(args.block_bytes),
          policy(read_once_policy()),
          block_shift(args.block_size == 8 ? 3 : args.block_size == 16 ? 4 : 5),
          end(work.key_end),
          lane(threadIdx.x % 32) {
        const size_t own = size_t(kv_head * args.block_size + lane / 8) * VECTOR_BYTES + lane % 8 * 16;
        k = args.k_plane + own;
        v = args.v_plane + own;
        if constexpr (HAS_SCALES<T>) {
            scales = (lane >= EIGHTS ? args.v_plane : args.k_plane) + args.scales_offset + kv_head * args.block_size * 2;
        }
    }

    __device__ __forceinline__ void look_up(uint32_t first) {
#pragma unroll
        for (int i = 0; i < EIGHTS; i++) blocks[i] = first + 8 * i < end ? block_table[(first + 8 * i) >> block_shift] : 0;
    }

    // The keys must be those that were looked up.
    __device__ __forceinline__ void copy(unsigned char* tile, uint32_t first) const {
        using Tile = ::Tile<T, D, KEYS>;
        const uint32_t mask = (1u << block_shift) - 1;
        unsigned char* to = tile + lane / 8 * Tile::ROW_BYTES + lane % 8 * 16;
#pragma unroll
        for (int i = 0; i < EIGHTS; i++) {
            const size_t block = blocks[i] * block_bytes + ((first + 8 * i) & mask) * VECTOR_BYTES;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const bool valid = first + 8 * i + 4 * half + lane / 8 < end;
                unsigned char* row = to + (8 * i + 4 * half) * Tile::ROW_BYTES;
                const uint8_t* from_k = k + block + 4 * half * VECTOR_BYTES;
                const uint8_t* from_v = v + block + 4 * half * VECTOR_BYTES;
#pragma unroll
                for (unsigned chunk = 0; chunk < (CHUNKS + 7) / 8; chunk++) {
                    if (chunk * 8 + 8 > CHUNKS && lane % 8 + chunk * 8 >= CHUNKS) continue;
                    copy16_async(row + chunk * 128, from_k + chunk * 128, valid, policy);
                    copy16_async(row + Tile::V + chunk * 128, from_v + chunk * 128, valid, policy);
                }
            }
        }
        if constexpr (HAS_SCALES<T>) {
            static_assert(EIGHTS == 2);
            // Eight scales are 16 bytes; first is a multiple of 8.
            if (lane < 2 * EIGHTS) {
                const uint32_t key = first + lane % EIGHTS * 8, block = lane % EIGHTS ? blocks[1] : blocks[0];
                copy16_async(tile + (lane >= EIGHTS ? Tile::V_SCALES : Tile::K_SCALES) + lane % EIGHTS * 16,
                             scales + block * block_bytes + (key & mask) * 2, key < end, policy);
            }
        }
    }
};

// A warp's sums, largest scores and totals to shared memory.
template <class T, int D>
__device__ void put_sums(float* merge, const QueryRows<T, D, 16>& rows) {
    using Decoding = ::Decoding<T, D>;
    constexpr unsigned VECTORS = Decoding::VECTORS;
    const unsigned warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float* own = merge + warp * VECTORS * Decoding::SUMS_STRIDE;
    float* largest = merge + Decoding::WARPS * VECTORS * Decoding::SUMS_STRIDE;
    float* totals = largest + Decoding::WARPS * VECTORS;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float* row = own + (g + 8 * half) * Decoding::SUMS_STRIDE;
        if constexpr (HAS_SCALES<T>) {
#pragma unroll
            for (int n = 0; n < Tile<T, D, 16>::COLS / 8; n += 4) {
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++) {
                    const int column = rows.column(n, i);
                    const float4 four = make_float4(rows.sums[n][i], rows.sums[n + 1][i], rows.sums[n + 2][i], rows.sums[n + 3][i]);
                    if (column < D) *reinterpret_cast<float4*>(row + column) = four;
                }
            }
        } else {
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                *reinterpret_cast<float2*>(row + 8 * n + 2 * t) = make_float2(rows.sums[n][2 * half], rows.sums[n][2 * half + 1]);
            }
        }
        if (t == 0) {
            largest[warp * VECTORS + g + 8 * half] = rows.largest[half];
            totals[warp * VECTORS + g + 8 * half] = rows.total[half];
        }
    }
}

// Adds what the warps saw, in their order; four columns a thread.
template <class T, int D>
__device__ void merge_warps(const AttentionArgs& args, const AttentionWork& work, unsigned kv_head, const float* merge) {
    using Decoding = ::Decoding<T, D>;
    constexpr unsigned VECTORS = Decoding::VECTORS, STRIDE = Decoding::SUMS_STRIDE;
    const float* largest = merge + Decoding::WARPS * VECTORS * STRIDE;
    const float* totals = largest + Decoding::WARPS * VECTORS;
    const unsigned vectors = work.num_rows * (args.num_heads / args.num_kv_heads);
    for (unsigned at = threadIdx.x * 4; at < vectors * D; at += Decoding::THREADS * 4) {
        const unsigned vector = at / D, column = at % D;
        float most = NO_SCORE;
#pragma unroll
        for (int i = 0; i < Decoding::WARPS; i++) most = fmaxf(most, largest[i * VECTORS + vector]);
        const float base = most == NO_SCORE ? 0.0f : most;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < Decoding::WARPS; i++) {
            const float weight = exp2_fast(largest[i * VECTORS + vector] - base);
            const float4 of_warp = *reinterpret_cast<const float4*>(merge + (i * VECTORS + vector) * STRIDE + column);
            sum.x += weight * of_warp.x, sum.y += weight * of_warp.y, sum.z += weight * of_warp.z, sum.w += weight * of_warp.w;
            total += weight * totals[i * VECTORS + vector];
        }
        const ResultRow result(args, work, kv_head, vector);
        const float factor = result.factor(most, total);
        const float4 x = make_float4(sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor);
        const bool to_part = result.to_part;
        store_four_as(to_part ? uint32_t(ELEMENT_F32) : args.out_type, to_part ? args.part_out : args.out, result.row * D + column, x);
        if (column == 0) result.write_lse(args, most, total);
    }
}

template <class T, int D>
__device__ void decode(const AttentionArgs& args) {
    using Decoding = ::Decoding<T, D>;
    constexpr int STAGES = Decoding::STAGES, KEYS = Decoding::KEYS;
    constexpr uint32_t STRIDE = Decoding::WARPS * KEYS;
    SHARED_MEMORY(shared);
    const unsigned kv_head = blockIdx.x % args.num_kv_heads, warp = threadIdx.x / 32;
    const AttentionWork work = args.work[blockIdx.x / args.num_kv_heads];
    unsigned char* tiles = shared + Decoding::QUERY_BYTES + warp * STAGES * Decoding::TILE_BYTES;
    const uint32_t first = work.key_begin + warp * KEYS;
    WarpCopier<T, D, KEYS> copier(args, work, kv_head);
    copier.look_up(first);
    wait_for_inputs();
    if (work.num_rows == 0) return;

#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) {
        copier.copy(tiles + stage * Decoding::TILE_BYTES, first + stage * STRIDE);
        copy_commit();
        copier.look_up(first + (stage + 1) * STRIDE);
    }
    stage_queries<T, D, Decoding::VECTORS>(shared, args, work, kv_head);
    __syncthreads();
    QueryRows<T, D, KEYS> rows(args, work, shared, 0);

    int stage = 0;
    for (uint32_t at = first; at < work.key_end; at += STRIDE) {
        const int next = stage == 0 ? STAGES - 1 : stage - 1;
        copier.copy(tiles + next * Decoding::TILE_BYTES, at + (STAGES - 1) * STRIDE);
        copy_commit();
        copier.look_up(at + STAGES * STRIDE);
        copy_wait<STAGES - 1>();
        __syncwarp();
        rows.see(tiles + stage * Decoding::TILE_BYTES, int(at), int(work.key_end));
        __syncwarp();
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    copy_wait<0>();
    rows.finish();
    __syncthreads();
    float* merge = reinterpret_cast<float*>(shared + Decoding::QUERY_BYTES);
    put_sums<T, D>(merge, rows);
    __syncthreads();
    merge_warps<T, D>(args, work, kv_head, merge);
}

}  // namespace

// The work and block tables come from the host, not from a kernel before.
#define ATTENTION(NAME, T, D)                                                                                        \
    WEIGHT_KERNEL(attention_##NAME##_d##D, AttentionArgs, (Decoding<T, D>::THREADS), (Decoding<T, D>::SHARED_BYTES), \
                  (Decoding<T, D>::CTAS)) {                                                                          \
        decode<T, D>(args);                                                                                          \
    }

EACH_CACHE_AND_HEAD_DIM(ATTENTION)

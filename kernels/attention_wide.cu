// Heads of 512 elements over the paged cache: decoding, up to 16 query vectors of a KV head, and prompts, up to 32. As
// attention.cu and prefill.cu have them, but a warp's registers do not hold the sums of so wide a vector.
//
//   decoding  work w, KV head h  ->  CTA w * num_kv_heads + h: 4 warps
//   prompts   work w, KV head h  ->  CTA (w, h): 8 warps, (half of the vectors, quarter of the columns)
//   a tile of 16 keys in shared memory, the next one on its way
//     scores of 16 vectors    a warp multiplies its 128 of the 512 columns, of queries that it keeps in registers; the four warps
//                             exchange what they have and add it in one order, so each has all scores
//     softmax                 online, in each of these warps alike
//     values                  a warp sums its 128 columns
//
// Bytes of a work: 2048 n_keys times the cache's element, read once for all its query heads; operations: 2048 n_keys for each
// query vector. Decoding waits for memory: a tile of bf16 is 33 KB, 2200 cycles of what an H100 moves for each SM, and three CTAs
// fit there. Of prompts most bytes come from L2, for each 32 vectors anew: 99 KB of shared memory, which all GPUs have, do not
// hold the queries of 64 beside two tiles.
#include "attention.cuh"

namespace {

constexpr int KEYS = 16, SHARES = 4;

template <class T, int D, int GROUPS>
struct Wide {
    static constexpr int VECTORS = 16 * GROUPS;
    static constexpr unsigned THREADS = GROUPS * SHARES * 32;
    static constexpr unsigned TILE_BYTES = Tile<T, D, KEYS>::BYTES;
    // Queries go through the place of the second tile.
    static constexpr unsigned QUERY_BYTES = VECTORS * QUERY_ROW_BYTES<D>;
    static constexpr unsigned TILES_BYTES = TILE_BYTES + (QUERY_BYTES > TILE_BYTES ? QUERY_BYTES : TILE_BYTES);
    // What a warp multiplied, four floats a lane for each 8 keys.
    static constexpr unsigned EXCHANGED = SHARES * (KEYS / 8) * 32;
    static constexpr unsigned SHARED_BYTES = TILES_BYTES + GROUPS * EXCHANGED * sizeof(float4);
};

// Copies tiles, as many threads to a key as there are; the block of the next one is looked up while this one is on its way.
template <class T, int D, unsigned THREADS>
struct LookAheadCopier {
    using Tile = ::Tile<T, D, KEYS>;
    static constexpr unsigned VECTOR_BYTES = D * sizeof(T), THREADS_A_KEY = THREADS / KEYS;
    static_assert(VECTOR_BYTES % (THREADS_A_KEY * 16) == 0);
    const uint8_t* k;  // Of the KV head and the thread's column.
    const uint8_t* v;
    const uint8_t* scales;  // Of keys or values, as the thread copies them.
    const uint32_t* block_table;
    uint64_t block_bytes;
    uint32_t block_shift, end, own_key, lane, block;

    __device__ __forceinline__ LookAheadCopier(const AttentionArgs& args, const AttentionWork& work, uint32_t kv_head)
        : block_table(args.block_tables + size_t(work.request) * args.max_blocks),
          block_bytes(args.block_bytes),
          block_shift(args.block_size == 8 ? 3 : args.block_size == 16 ? 4 : 5),
          end(work.key_end),
          own_key(threadIdx.x / THREADS_A_KEY),
          lane(threadIdx.x % THREADS_A_KEY) {
        const size_t head = size_t(kv_head) * args.block_size * VECTOR_BYTES + lane * 16;
        k = args.k_plane + head;
        v = args.v_plane + head;
        if constexpr (HAS_SCALES<T>) {
            scales = (lane == 0 ? args.k_plane : args.v_plane) + args.scales_offset + kv_head * args.block_size * 2;
        }
    }

    __device__ __forceinline__ void look_up(uint32_t first) {
        block = first + own_key < end ? block_table[(first + own_key) >> block_shift] : 0;
    }

    // The keys must be those that were looked up; zeros from `end` on.
    __device__ __forceinline__ void copy(unsigned char* tile, uint32_t first) const {
        const uint32_t offset = (first + own_key) & ((1u << block_shift) - 1);
        const bool valid = first + own_key < end;
        const size_t from = block * block_bytes + offset * VECTOR_BYTES;
        unsigned char* to = tile + own_key * Tile::ROW_BYTES + lane * 16;
#pragma unroll
        for (unsigned at = 0; at < VECTOR_BYTES; at += THREADS_A_KEY * 16) {
            copy16_async(to + at, k + from + at, valid);
            copy16_async(to + Tile::V + at, v + from + at, valid);
        }
        if constexpr (HAS_SCALES<T>) {
            // Eight scales are 16 bytes; first is a multiple of 8.
            if (own_key % 8 == 0 && lane < 2) {
                copy16_async(tile + (lane == 0 ? Tile::K_SCALES : Tile::V_SCALES) + own_key * 2, scales + block * block_bytes + offset * 2,
                             valid);
            }
        }
    }
};

template <class T, int D, int GROUPS>
__device__ void attend(const AttentionArgs& args, const AttentionWork work, uint32_t kv_head) {
    using Wide = ::Wide<T, D, GROUPS>;
    SHARED_MEMORY(shared);
    const unsigned warp = threadIdx.x / 32, group = warp / SHARES, share = warp % SHARES;
    LookAheadCopier<T, D, Wide::THREADS> copier(args, work, kv_head);
    copier.look_up(work.key_begin);
    wait_for_inputs();
    if (work.num_rows == 0) return;
    copier.copy(shared, work.key_begin);
    copy_commit();
    copier.look_up(work.key_begin + KEYS);
    unsigned char* queries = shared + Wide::TILE_BYTES;
    stage_queries<T, D, Wide::VECTORS>(queries, args, work, kv_head);
    __syncthreads();
    QueryRows<T, D, KEYS, SHARES> rows(args, work, queries + group * 16 * QUERY_ROW_BYTES<D>, group * 16, share);
    static_assert(rows.KEEPS_QUERIES);
    float4* exchanged = reinterpret_cast<float4*>(shared + Wide::TILES_BYTES) + group * Wide::EXCHANGED;
    // Warps whose vectors are all past the last one only copy.
    const bool is_busy = group * 16 < work.num_rows * (args.num_heads / args.num_kv_heads);

    unsigned stage = 0;
    for (uint32_t at = work.key_begin; at < work.key_end; at += KEYS) {
        const unsigned char* tile = shared + stage * Wide::TILE_BYTES;
        copy_wait<0>();
        __syncthreads();
        // Nobody reads the other tile any more, nor the queries there.
        copier.copy(shared + (stage ^ 1) * Wide::TILE_BYTES, at + KEYS);
        copy_commit();
        copier.look_up(at + 2 * KEYS);
        float scores[KEYS / 8][4];
        if (is_busy) {
            rows.score(tile, scores);
            leave_scores(exchanged, share, scores);
        }
        __syncthreads();
        if (is_busy) {
            add_scores<SHARES>(exchanged, scores);
            rows.add(tile, int(at), int(work.key_end), scores);
        }
        stage ^= 1;
    }
    copy_wait<0>();
    rows.finish();
    write_rows(args, work, kv_head, group * 16, rows);
}

}  // namespace

// The work and block tables come from the host, not from a kernel before.
#define ATTENTION(NAME, T, D)                                                                                           \
    WEIGHT_KERNEL(attention_##NAME##_d##D, AttentionArgs, (Wide<T, D, 1>::THREADS), (Wide<T, D, 1>::SHARED_BYTES), 3) { \
        attend<T, D, 1>(args, args.work[blockIdx.x / args.num_kv_heads], blockIdx.x % args.num_kv_heads);              \
    }                                                                                                                   \
    WEIGHT_KERNEL(prefill_##NAME##_d##D, AttentionArgs, (Wide<T, D, 2>::THREADS), (Wide<T, D, 2>::SHARED_BYTES), 1) {   \
        attend<T, D, 2>(args, args.work[blockIdx.x], blockIdx.y);                                                       \
    }

ATTENTION(f16, f16, 512)
ATTENTION(bf16, bf16, 512)
ATTENTION(i8, i8, 512)
ATTENTION(f8, f8, 512)

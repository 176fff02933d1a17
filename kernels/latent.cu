// Absorbed latent attention over the paged cache: query heads and rows of a request against a range of keys, which are values
// too.
//
// The keys of all query heads are one vector a token, [rope | latent] of 64 and 512 elements, and its latent part is the value.
// A CTA takes up to 32 query vectors: a share of the query heads, for some rows. It copies each key once.
//
//   work w, share s of the heads  ->  CTA w * shares + s: 8 warps, (half of the vectors, quarter of the columns)
//   a tile of 32 keys in shared memory, the next one on its way
//     scores of 16 vectors    a warp multiplies its 144 of the 576 columns, of queries that it keeps in registers; the four warps
//                             of a half exchange what they have and add it in one order, so each has all scores
//     softmax                 online, in each of these warps alike
//     values                  a warp sums its 128 of the 512 columns of the same tile
//
// What a vector sees depends on its own keys alone, and keys that it does not see change no bit of it. So a row has the same bits
// beside any others, and, where keys are not cut, in any chunk.
//
// Bytes of a work: 1152 n_keys, for each 32 query vectors; operations 2176 n_keys a vector: 60 a byte for 32 vectors. Of memory
// an H100 moves 14.7 bytes a cycle and SM, 2500 cycles a tile; shared memory is busy for about 2000 of them, tensor cores for
// 1100.
//
// latent_f32: caches of f32, any width up to MAX_WIDTH: one row and four query heads a CTA, a warp each, in f32 throughout.
#include "attention.cuh"

namespace {

constexpr int ROPE = 64, RANK = 512, WIDTH = ROPE + RANK;
constexpr int KEYS = 32;
constexpr unsigned HALVES = 2, QUARTERS = 4, THREADS = HALVES * QUARTERS * 32;
// Steps of 16 columns that a warp multiplies, and tiles of 8 columns that it sums.
constexpr int STEPS = WIDTH / 16 / int(QUARTERS), TILES = RANK / 8 / int(QUARTERS);
constexpr unsigned ROW_BYTES = WIDTH * 2 + 16, TILE_BYTES = KEYS * ROW_BYTES;
// What a warp multiplied, four floats a lane for each 8 keys.
constexpr unsigned EXCHANGED_BYTES = HALVES * QUARTERS * (KEYS / 8) * 32 * sizeof(float4);
constexpr unsigned SHARED_BYTES = 2 * TILE_BYTES + EXCHANGED_BYTES;

// The query heads of a CTA, and where a vector of it belongs.
struct Share {
    unsigned num_heads, heads, first_head, first_row, num_rows;

    __device__ __forceinline__ Share(const LatentAttentionArgs& args, const AttentionWork& work, unsigned share)
        : num_heads(args.num_heads),
          heads(args.heads),
          first_head(share * heads),
          first_row(work.first_row),
          num_rows(work.num_rows) {}

    __device__ __forceinline__ unsigned row(unsigned vector) const { return vector / heads; }
    __device__ __forceinline__ unsigned head(unsigned vector) const { return first_head + vector % heads; }
    __device__ __forceinline__ bool has(unsigned vector) const { return row(vector) < num_rows && head(vector) < num_heads; }
};

// Copies keys first .. first + KEYS, eight threads to a key; zeros from `end` on.
struct KeyCopier {
    const uint8_t* plane;
    const uint32_t* block_table;
    uint64_t block_bytes;
    uint32_t block_shift, end;

    __device__ __forceinline__ KeyCopier(const LatentAttentionArgs& args, const AttentionWork& work)
        : plane(args.plane),
          block_table(args.block_tables + size_t(work.request) * args.max_blocks),
          block_bytes(args.block_bytes),
          block_shift(args.block_size == 8 ? 3 : args.block_size == 16 ? 4 : 5),
          end(work.key_end) {}

    __device__ __forceinline__ void copy(unsigned char* tile, uint32_t first) const {
        static_assert(THREADS == KEYS * 8 && WIDTH * 2 % 128 == 0);
        const uint32_t key = first + threadIdx.x / 8, offset = key & ((1u << block_shift) - 1);
        const bool valid = key < end;
        const uint8_t* from = plane + (valid ? block_table[key >> block_shift] : 0) * block_bytes + offset * (WIDTH * 2) + threadIdx.x % 8 * 16;
        unsigned char* to = tile + threadIdx.x / 8 * ROW_BYTES + threadIdx.x % 8 * 16;
#pragma unroll
        for (unsigned at = 0; at < WIDTH * 2; at += 128) copy16_async(to + at, from + at, valid);
    }
};

// A warp's share: 16 query vectors, their scores of 144 columns and their sums of 128.
template <class T>
struct LatentRows {
    uint32_t queries[STEPS][4];
    float sums[TILES][4];
    float largest[2], total[2];  // Of vectors g and g + 8; totals of this lane's keys.
    int last[2];                 // The last key of the work that they see.
    float scale;
    unsigned quarter;

    __device__ __forceinline__ LatentRows(const LatentAttentionArgs& args, const AttentionWork& work, const Share& share, unsigned first,
                                          unsigned own_quarter)
        : scale(args.scale * LOG2_E), quarter(own_quarter) {
        const unsigned g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const unsigned vector = first + g + 8 * i;
            const bool is_there = share.has(vector);
            const size_t row = share.first_row + share.row(vector);
            last[i] = is_there ? int(min(args.positions[row] + 1, work.key_end)) - 1 : -1;
            largest[i] = NO_SCORE;
            total[i] = 0.0f;
            const float* q = args.q + (row * args.num_heads + share.head(vector)) * WIDTH + quarter * (STEPS * 16) + 2 * t;
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
#pragma unroll
                for (int eight = 0; eight < 2; eight++) {
                    float2 pair = make_float2(0.0f, 0.0f);
                    if (is_there) pair = *reinterpret_cast<const float2*>(q + step * 16 + eight * 8);
                    queries[step][2 * eight + i] = pack<T>(pair.x, pair.y);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            for (int i = 0; i < 4; i++) sums[n][i] = 0.0f;
        }
    }

    // What this warp's columns add to the scores.
    __device__ __forceinline__ void score(const unsigned char* tile, float4* exchanged) const {
        const unsigned lane = threadIdx.x % 32;
        float scores[KEYS / 8][4];
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
            for (int i = 0; i < 4; i++) scores[n][i] = 0.0f;
        }
        const unsigned char* own = tile + (lane / 16 * 8 + lane % 8) * ROW_BYTES + quarter * (STEPS * 32) + lane / 8 % 2 * 16;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
#pragma unroll
            for (int keys = 0; keys < KEYS; keys += 16) {
                uint32_t k[4];
                load_matrices(k, own + keys * ROW_BYTES + step * 32);
                multiply_tiles<T>(scores[keys / 8], queries[step], k[0], k[1]);
                multiply_tiles<T>(scores[keys / 8 + 1], queries[step], k[2], k[3]);
            }
        }
        leave_scores(exchanged, quarter, scores);
    }

    // All that a tile adds, once the quarters have exchanged their scores.
    __device__ __forceinline__ void see(const unsigned char* tile, const float4* exchanged, int first) {
        const unsigned lane = threadIdx.x % 32;
        float scores[KEYS / 8][4];
        add_scores<int(QUARTERS)>(exchanged, scores);
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
            const int key = first + 8 * n + int(lane % 4 * 2);
#pragma unroll
            for (int i = 0; i < 4; i++) scores[n][i] = key + i % 2 <= last[i / 2] ? scores[n][i] * scale : NO_SCORE;
        }
        online_softmax_update(scores, sums, largest, total);
        const unsigned char* own = tile + (lane % 16) * ROW_BYTES + (ROPE + quarter * (TILES * 8)) * 2 + lane / 16 * 16;
#pragma unroll
        for (int keys = 0; keys < KEYS; keys += 16) {
            const float(&low)[4] = scores[keys / 8], (&high)[4] = scores[keys / 8 + 1];
            const uint32_t weights[4] = {pack<T>(low[0], low[1]), pack<T>(low[2], low[3]), pack<T>(high[0], high[1]),
                                         pack<T>(high[2], high[3])};
#pragma unroll
            for (int n = 0; n < TILES; n += 2) {
                uint32_t values[4];
                load_matrices_transposed(values, own + keys * ROW_BYTES + n * 16);
                multiply_tiles<T>(sums[n], weights, values[0], values[1]);
                multiply_tiles<T>(sums[n + 1], weights, values[2], values[3]);
            }
        }
    }

    __device__ __forceinline__ void write(const LatentAttentionArgs& args, const AttentionWork& work, const Share& share, unsigned first) {
        const unsigned g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            total[i] += __shfl_xor_sync(WHOLE_WARP, total[i], 1);
            total[i] += __shfl_xor_sync(WHOLE_WARP, total[i], 2);
            const unsigned vector = first + g + 8 * i;
            if (!share.has(vector)) continue;
            const bool to_part = work.part >= 0;
            const size_t row = (to_part ? uint32_t(work.part) : work.first_row) + share.row(vector);
            const size_t to = row * args.num_heads + share.head(vector);
            const float factor = total[i] > 0.0f ? 1.0f / total[i] : 0.0f;
            float* out = (to_part ? args.part_out : args.out) + to * RANK + quarter * (TILES * 8) + 2 * t;
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                *reinterpret_cast<float2*>(out + 8 * n) = make_float2(sums[n][2 * i] * factor, sums[n][2 * i + 1] * factor);
            }
            if (to_part && quarter == 0 && t == 0) args.part_lse[to] = total[i] > 0.0f ? largest[i] + log2f(total[i]) : NO_SCORE;
        }
    }
};

template <class T>
__device__ void attend(const LatentAttentionArgs& args) {
    SHARED_MEMORY(shared);
    const unsigned shares = (args.num_heads + args.heads - 1) / args.heads;
    const AttentionWork work = args.work[blockIdx.x / shares];
    wait_for_inputs();
    if (work.num_rows == 0) return;
    const Share share(args, work, blockIdx.x % shares);
    const KeyCopier copier(args, work);
    copier.copy(shared, work.key_begin);
    copy_commit();

    const unsigned half = threadIdx.x / 32 / QUARTERS, first = half * 16;
    LatentRows<T> rows(args, work, share, first, threadIdx.x / 32 % QUARTERS);
    float4* exchanged = reinterpret_cast<float4*>(shared + 2 * TILE_BYTES) + half * (QUARTERS * (KEYS / 8) * 32);
    // Warps whose vectors are all past the last one only copy.
    const bool is_busy = share.row(first) < work.num_rows;
    unsigned stage = 0;
    for (uint32_t at = work.key_begin; at < work.key_end; at += KEYS) {
        const unsigned char* tile = shared + stage * TILE_BYTES;
        copy_wait<0>();
        __syncthreads();
        // Nobody reads the other tile any more.
        if (at + KEYS < work.key_end) copier.copy(shared + (stage ^ 1) * TILE_BYTES, at + KEYS);
        copy_commit();
        if (is_busy) rows.score(tile, exchanged);
        __syncthreads();
        if (is_busy) rows.see(tile, exchanged, int(at));
        stage ^= 1;
    }
    copy_wait<0>();
    if (is_busy) rows.write(args, work, share, first);
}

constexpr unsigned PLAIN_WARPS = 4, MAX_WIDTH = 1024;
constexpr unsigned PLAIN_SHARED_BYTES = PLAIN_WARPS * (MAX_WIDTH + 32) * sizeof(float);

__device__ __forceinline__ float plain_score(const float* q, const float* key, uint32_t width) {
    float dot = 0.0f;
    for (uint32_t i = 0; i < width; i += 4) {
        const float4 a = *reinterpret_cast<const float4*>(q + i), b = *reinterpret_cast<const float4*>(key + i);
        dot += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
    }
    return dot;
}

}  // namespace

// The work and block tables come from the host, not from a kernel before.
#define LATENT(NAME, T) \
    WEIGHT_KERNEL(latent_##NAME##_d576, LatentAttentionArgs, THREADS, SHARED_BYTES, 1) { attend<T>(args); }

LATENT(f16, f16)
LATENT(bf16, bf16)

KERNEL(latent_f32, LatentAttentionArgs, PLAIN_WARPS * 32, PLAIN_SHARED_BYTES) {
    SHARED_MEMORY(shared);
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, shares = (args.num_heads + PLAIN_WARPS - 1) / PLAIN_WARPS;
    const AttentionWork work = args.work[blockIdx.x / shares];
    const uint32_t head = blockIdx.x % shares * PLAIN_WARPS + warp, width = args.rope_dim + args.kv_rank, rank = args.kv_rank;
    if (work.num_rows == 0 || head >= args.num_heads) return;
    float* q = reinterpret_cast<float*>(shared) + warp * MAX_WIDTH;
    float* weights = reinterpret_cast<float*>(shared) + PLAIN_WARPS * MAX_WIDTH + warp * 32;
    const size_t vector = size_t(work.first_row) * args.num_heads + head;
    for (uint32_t i = lane; i < width; i += 32) q[i] = args.q[vector * width + i];
    const uint32_t end = min(work.key_end, args.positions[work.first_row] + 1);
    const uint32_t* table = args.block_tables + size_t(work.request) * args.max_blocks;
    const Plane<float> keys{const_cast<uint8_t*>(args.plane), args.block_bytes, 0, args.block_size, width};

    float sums[MAX_WIDTH / 32] = {};
    float largest = NO_SCORE, total = 0.0f;
    for (uint32_t first = work.key_begin; first < end; first += 32) {
        __syncwarp();
        const uint32_t key = first + lane;
        const bool seen = key < end;
        const float own = seen ? plain_score(q, keys.vector(table[key / args.block_size], 0, key % args.block_size), width) * args.scale * LOG2_E
                               : NO_SCORE;
        const float most = fmaxf(largest, warp_max(own));
        const float shrink = exp2f(largest - most), weight = exp2f(own - most);
        largest = most;
        total = total * shrink + weight;
        weights[lane] = weight;
        __syncwarp();
#pragma unroll
        for (uint32_t j = 0; j < MAX_WIDTH / 32; j++) sums[j] *= shrink;
        for (uint32_t i = 0; i < 32 && first + i < end; i++) {
            const uint32_t at = first + i;
            const float* value = keys.vector(table[at / args.block_size], 0, at % args.block_size) + args.rope_dim;
#pragma unroll
            for (uint32_t j = 0; j < MAX_WIDTH / 32; j++) {
                if (lane + 32 * j < rank) sums[j] += weights[i] * value[lane + 32 * j];
            }
        }
    }
    total = warp_sum(total);
    const float factor = total > 0.0f ? 1.0f / total : 0.0f;
#pragma unroll
    for (uint32_t j = 0; j < MAX_WIDTH / 32; j++) {
        if (lane + 32 * j < rank) args.out[vector * rank + lane + 32 * j] = sums[j] * factor;
    }
}

// A warp's share of attention: 16 query vectors against tiles of keys and values in shared memory, on tensor cores.
//
// The query vectors of a KV head are those of its query heads (GQA) for all rows of the work: vector m is row * queries_per_kv +
// head. So one read of K and V serves them all. Vectors past the last see no key.
//
//   scores [16, KEYS] = q [16, D] k^T          mma.m16n8k16: lane 4 g + t has vectors g and g + 8, keys 8 n + 2 t and the next
//   weights = 2^(scores - largest)             online: when the largest grows, sums and totals shrink
//   sums [16, D] += weights [16, KEYS] v       weights stay in the registers where scores were
//
// A tile in shared memory, rows padded by 16 bytes so that no two of a matrix meet in a bank:
//
//   k [KEYS, D] | v [KEYS, D] | one-byte types: scales of k [KEYS], of v [KEYS], bfloat16
//
// 16-bit types go to the tensor cores as they are. Codes of one byte become bfloat16 (exactly) between shared memory and
// registers, where their scales are multiplied into scores and weights. For them the order of the columns is one that 4-byte
// loads give:
//   q and k: column 16 s + 4 t + i is the i-th of lane t in step s;     v: column 32 q + 4 g + j is column g of tile 4 q + j.
#pragma once
#include "cache.cuh"

constexpr float LOG2_E = 1.44269504f;
constexpr float NO_SCORE = -INFINITY;

template <class T>
struct TileElement {
    using Type = bf16;
};
template <>
struct TileElement<f16> {
    using Type = f16;
};

template <class T, int D, int KEYS>
struct Tile {
    static constexpr int COLS = HAS_SCALES<T> ? (D + 31) / 32 * 32 : D;
    static constexpr unsigned ROW_BYTES = COLS * sizeof(T) + 16;
    static constexpr unsigned V = KEYS * ROW_BYTES;
    static constexpr unsigned K_SCALES = 2 * V;
    static constexpr unsigned V_SCALES = K_SCALES + 2 * KEYS;
    static constexpr unsigned BYTES = HAS_SCALES<T> ? V_SCALES + 2 * KEYS : K_SCALES;
};

// Query vectors in shared memory: rows of 16-bit elements.
template <int D>
constexpr unsigned QUERY_ROW_BYTES = D * 2 + 16;

// Copies keys first .. first + KEYS of one KV head into a tile, by THREADS threads, eight to a vector; zeros from `end` on.
template <class T, int D, int KEYS, unsigned THREADS>
struct TileCopier {
    static constexpr unsigned CHUNKS = D * sizeof(T) / 16;
    Plane<T> k, v;
    const uint32_t* block_table;
    uint32_t block_shift, kv_head, end, thread;

    __device__ __forceinline__ TileCopier(const AttentionArgs& args, const AttentionWork& work, uint32_t head, uint32_t own_thread)
        : k{const_cast<uint8_t*>(args.k_plane), args.block_bytes, args.scales_offset, args.block_size, D},
          v{const_cast<uint8_t*>(args.v_plane), args.block_bytes, args.scales_offset, args.block_size, D},
          block_table(args.block_tables + size_t(work.request) * args.max_blocks),
          block_shift(args.block_size == 8 ? 3 : args.block_size == 16 ? 4 : 5),
          kv_head(head),
          end(work.key_end),
          thread(own_thread) {}

    __device__ __forceinline__ void copy(unsigned char* tile, uint32_t first) const {
        using Tile = ::Tile<T, D, KEYS>;
#pragma unroll
        for (unsigned row = thread / 8; row < KEYS; row += THREADS / 8) {
            const uint32_t key = first + row;
            const bool valid = key < end;
            const uint64_t block = valid ? block_table[key >> block_shift] : 0;
            const uint32_t offset = key & (k.block_size - 1);
            const auto* from_k = reinterpret_cast<const unsigned char*>(k.vector(block, kv_head, offset));
            const auto* from_v = reinterpret_cast<const unsigned char*>(v.vector(block, kv_head, offset));
            unsigned char* to = tile + row * Tile::ROW_BYTES;
#pragma unroll
            for (unsigned chunk = thread % 8; chunk < CHUNKS; chunk += 8) {
                copy16_async(to + chunk * 16, from_k + chunk * 16, valid);
                copy16_async(to + Tile::V + chunk * 16, from_v + chunk * 16, valid);
            }
        }
        if constexpr (HAS_SCALES<T>) {
            // Eight scales are 16 bytes; first is a multiple of 8.
            if (thread < KEYS / 4) {
                const bool of_v = thread >= KEYS / 8;
                const uint32_t eight = thread % (KEYS / 8) * 8, key = first + eight;
                const bool valid = key < end;
                const uint64_t block = valid ? block_table[key >> block_shift] : 0;
                copy16_async(tile + (of_v ? Tile::V_SCALES : Tile::K_SCALES) + eight * 2,
                             (of_v ? v : k).scale(block, kv_head, key & (k.block_size - 1)), valid);
            }
        }
    }
};

// Fragments of two tiles of eight keys, for columns 16 step .. 16 step + 16.
template <class T, int D, int KEYS>
__device__ __forceinline__ void load_keys(uint32_t (&into)[4], const unsigned char* tile, int keys, int step) {
    constexpr unsigned ROW_BYTES = Tile<T, D, KEYS>::ROW_BYTES;
    const unsigned lane = threadIdx.x % 32;
    if constexpr (!HAS_SCALES<T>) {
        load_matrices(into, tile + (keys + lane / 16 * 8 + lane % 8) * ROW_BYTES + step * 32 + lane / 8 % 2 * 16);
    } else {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const unsigned char* row = tile + (keys + 8 * half + lane / 4) * ROW_BYTES;
            const uint32_t codes = *reinterpret_cast<const uint32_t*>(row + step * 16 + lane % 4 * 4);
            into[2 * half] = decode_pair(T{}, __byte_perm(codes, 0, 0x4140));
            into[2 * half + 1] = decode_pair(T{}, __byte_perm(codes, 0, 0x4342));
        }
    }
}

// A fragment of 16 query vectors, for the same columns.
template <class T, int D>
__device__ __forceinline__ void load_queries(uint32_t (&into)[4], const unsigned char* queries, int step) {
    const unsigned lane = threadIdx.x % 32;
    if constexpr (!HAS_SCALES<T>) {
        load_matrices(into, queries + (lane % 16) * QUERY_ROW_BYTES<D> + step * 32 + lane / 16 * 16);
    } else {
        const unsigned char* at = queries + lane / 4 * QUERY_ROW_BYTES<D> + step * 32 + lane % 4 * 8;
        const uint2 low = *reinterpret_cast<const uint2*>(at);
        const uint2 high = *reinterpret_cast<const uint2*>(at + 8 * QUERY_ROW_BYTES<D>);
        into[0] = low.x, into[1] = high.x, into[2] = low.y, into[3] = high.y;
    }
}

// One more than the last key that a row sees.
__device__ __forceinline__ uint32_t end_key(const AttentionArgs& args, uint32_t row) {
    return args.ends ? args.ends[row] : args.positions[row] + 1;
}

// The first key that a position sees.
__device__ __forceinline__ uint32_t first_key(const AttentionArgs& args, uint32_t position) {
    const uint32_t of_window = args.window && position + 1 > args.window ? position + 1 - args.window : 0;
    const uint32_t of_chunk = args.chunk ? position / args.chunk * args.chunk : 0;
    return of_window > of_chunk ? of_window : of_chunk;
}

// Online softmax: scores of keys become weights; what was summed shrinks to the new largest score. A lane has two vectors.
template <int EIGHTS, int TILES>
__device__ __forceinline__ void online_softmax_update(float (&scores)[EIGHTS][4], float (&sums)[TILES][4], float (&largest)[2],
                                                      float (&total)[2]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float most = largest[i];
#pragma unroll
        for (int n = 0; n < EIGHTS; n++) most = fmaxf(most, fmaxf(scores[n][2 * i], scores[n][2 * i + 1]));
        most = fmaxf(most, __shfl_xor_sync(WHOLE_WARP, most, 1));
        most = fmaxf(most, __shfl_xor_sync(WHOLE_WARP, most, 2));
        const float base = most == NO_SCORE ? 0.0f : most;
        const float shrink = exp2_fast(largest[i] - base);
        largest[i] = most;
        total[i] *= shrink;
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            sums[n][2 * i] *= shrink;
            sums[n][2 * i + 1] *= shrink;
        }
#pragma unroll
        for (int n = 0; n < EIGHTS; n++) {
#pragma unroll
            for (int j = 2 * i; j < 2 * i + 2; j++) {
                scores[n][j] = exp2_fast(scores[n][j] - base);
                total[i] += scores[n][j];
            }
        }
    }
}

// Of warps that have the same vectors and share the columns: leaves what this one multiplied, and adds what all have left, in one
// order. `exchanged` has EIGHTS * 32 for each of the SHARES.
template <int EIGHTS>
__device__ __forceinline__ void leave_scores(float4* exchanged, unsigned share, const float (&scores)[EIGHTS][4]) {
#pragma unroll
    for (int n = 0; n < EIGHTS; n++) {
        exchanged[(share * EIGHTS + n) * 32 + threadIdx.x % 32] = make_float4(scores[n][0], scores[n][1], scores[n][2], scores[n][3]);
    }
}
template <int SHARES, int EIGHTS>
__device__ __forceinline__ void add_scores(const float4* exchanged, float (&scores)[EIGHTS][4]) {
#pragma unroll
    for (int n = 0; n < EIGHTS; n++) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int of = 0; of < SHARES; of++) {
            const float4 x = exchanged[(of * EIGHTS + n) * 32 + threadIdx.x % 32];
            sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
        }
        scores[n][0] = sum.x, scores[n][1] = sum.y, scores[n][2] = sum.z, scores[n][3] = sum.w;
    }
}

// 16 query vectors of one warp, and what they have seen. Of wide heads, SHARES warps have the same vectors and share the
// columns: each multiplies its columns of queries and keys, and sums its columns of the values.
template <class T, int D, int KEYS, int SHARES = 1>
struct QueryRows {
    using Element = typename TileElement<T>::Type;
    using Tile = ::Tile<T, D, KEYS>;
    static constexpr int STEPS = D / 16 / SHARES, TILES = Tile::COLS / 8 / SHARES;
    static_assert(SHARES == 1 || D % (32 * SHARES) == 0);
    // Longer vectors are read again for each tile: their sums need the registers.
    static constexpr bool KEEPS_QUERIES = D / SHARES <= 128;

    const unsigned char* queries;
    uint32_t kept[KEEPS_QUERIES ? STEPS : 1][4];
    float sums[TILES][4];
    float largest[2], total[2];  // Of vectors g and g + 8; totals of this lane's keys.
    int begin[2], last[2];       // The keys that they see.
    float scale, softcap;
    int share;

    // `vector`: the first of the 16 within the work.
    __device__ __forceinline__ QueryRows(const AttentionArgs& args, const AttentionWork& work, const unsigned char* own_queries,
                                         unsigned vector, int own_share = 0)
        : queries(own_queries),
          scale(args.softcap > 0.0f ? args.scale / args.softcap : args.scale * LOG2_E),
          softcap(args.softcap),
          share(own_share) {
        const unsigned queries_per_kv = args.num_heads / args.num_kv_heads;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const unsigned row = (vector + threadIdx.x % 32 / 4 + 8 * i) / queries_per_kv;
            const bool is_there = row < work.num_rows;
            last[i] = is_there ? int(end_key(args, work.first_row + row)) - 1 : -1;
            begin[i] = is_there ? int(first_key(args, args.positions[work.first_row + row])) : 0;
            largest[i] = NO_SCORE;
            total[i] = 0.0f;
        }
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            for (int i = 0; i < 4; i++) sums[n][i] = 0.0f;
        }
        if constexpr (KEEPS_QUERIES) {
#pragma unroll
            for (int step = 0; step < STEPS; step++) load_queries<T, D>(kept[step], queries, first_step() + step);
        }
    }

    // Where this warp's columns begin.
    __device__ __forceinline__ int first_step() const { return SHARES == 1 ? 0 : share * STEPS; }
    __device__ __forceinline__ int first_tile() const { return SHARES == 1 ? 0 : share * TILES; }

    // Products of this warp's columns.
    __device__ __forceinline__ void score(const unsigned char* tile, float (&scores)[KEYS / 8][4]) {
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
            for (int i = 0; i < 4; i++) scores[n][i] = 0.0f;
        }
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            uint32_t query[4];
            if constexpr (KEEPS_QUERIES) {
                for (int i = 0; i < 4; i++) query[i] = kept[step][i];
            } else {
                load_queries<T, D>(query, queries, first_step() + step);
            }
#pragma unroll
            for (int keys = 0; keys < KEYS; keys += 16) {
                uint32_t k[4];
                load_keys<T, D, KEYS>(k, tile, keys, first_step() + step);
                multiply_tiles<Element>(scores[keys / 8], query, k[0], k[1]);
                multiply_tiles<Element>(scores[keys / 8 + 1], query, k[2], k[3]);
            }
        }
    }

    __device__ __forceinline__ bool sees(int i, int key) const { return key >= begin[i] && key <= last[i]; }

    // Scores in units of log2, those of unseen keys NO_SCORE. Keys from `end` on are zeros, but their scales may be anything.
    __device__ __forceinline__ void finish_scores(const unsigned char* tile, int first, int end, float (&scores)[KEYS / 8][4]) {
        const unsigned t = threadIdx.x % 4;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
            float2 scales = make_float2(1.0f, 1.0f);
            if constexpr (HAS_SCALES<T>) {
                scales = unpack<bf16>(*reinterpret_cast<const uint32_t*>(tile + Tile::K_SCALES + (8 * n + 2 * t) * 2));
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float x = scores[n][i] * scale;
                if constexpr (HAS_SCALES<T>) x *= i % 2 ? scales.y : scales.x;
                scores[n][i] = softcap > 0.0f ? softcap * LOG2_E * tanhf(x) : x;
            }
        }
        const int after = first + KEYS;
        if (first >= begin[0] && first >= begin[1] && after <= end && after <= last[0] + 1 && after <= last[1] + 1) return;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int key = first + 8 * n + int(2 * t) + i % 2;
                if (key >= end || !sees(i / 2, key)) scores[n][i] = NO_SCORE;
            }
        }
    }

    __device__ __forceinline__ void add_values(const unsigned char* tile, int keys, const uint32_t (&weights)[4]) {
        const unsigned lane = threadIdx.x % 32;
        const unsigned char* v = tile + Tile::V + keys * Tile::ROW_BYTES;
        if constexpr (!HAS_SCALES<T>) {
            const unsigned char* own = v + (lane % 16) * Tile::ROW_BYTES + first_tile() * 16 + lane / 16 * 16;
#pragma unroll
            for (int n = 0; n < TILES; n += 2) {
                uint32_t values[4];
                load_matrices_transposed(values, own + n * 16);
                multiply_tiles<Element>(sums[n], weights, values[0], values[1]);
                multiply_tiles<Element>(sums[n + 1], weights, values[2], values[3]);
            }
        } else {
            const unsigned char* own = v + lane % 4 * 2 * Tile::ROW_BYTES + first_tile() * 8 + lane / 4 * 4;
#pragma unroll
            for (int n = 0; n < TILES; n += 4) {
                uint32_t codes[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    codes[i] = *reinterpret_cast<const uint32_t*>(own + (i % 2 + i / 2 * 8) * Tile::ROW_BYTES + n * 8);
                }
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    // Byte j of two keys, in the low bytes of the halves.
                    const uint32_t pick = j | (4 + j) << 8;
                    multiply_tiles<Element>(sums[n + j], weights, decode_pair(T{}, __byte_perm(codes[0], codes[1], pick)),
                                            decode_pair(T{}, __byte_perm(codes[2], codes[3], pick)));
                }
            }
        }
    }

    // All that a tile adds.
    __device__ __forceinline__ void see(const unsigned char* tile, int first, int end) {
        static_assert(SHARES == 1);
        float scores[KEYS / 8][4];
        score(tile, scores);
        add(tile, first, end, scores);
    }

    // All that a tile adds whose products with the queries are these.
    __device__ __forceinline__ void add(const unsigned char* tile, int first, int end, float (&scores)[KEYS / 8][4]) {
        finish_scores(tile, first, end, scores);
        online_softmax_update(scores, sums, largest, total);
#pragma unroll
        for (int keys = 0; keys < KEYS; keys += 16) {
            uint32_t weights[4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float(&w)[4] = scores[keys / 8 + half];
                if constexpr (HAS_SCALES<T>) {
                    const unsigned char* at = tile + Tile::V_SCALES + (keys + 8 * half + threadIdx.x % 4 * 2) * 2;
                    const float2 scales = unpack<bf16>(*reinterpret_cast<const uint32_t*>(at));
#pragma unroll
                    for (int i = 0; i < 4; i++) w[i] = w[i] > 0.0f ? w[i] * (i % 2 ? scales.y : scales.x) : 0.0f;
                }
                weights[2 * half] = pack<Element>(w[0], w[1]);
                weights[2 * half + 1] = pack<Element>(w[2], w[3]);
            }
            add_values(tile, keys, weights);
        }
    }

    // Totals of all lanes.
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            total[i] += __shfl_xor_sync(WHOLE_WARP, total[i], 1);
            total[i] += __shfl_xor_sync(WHOLE_WARP, total[i], 2);
        }
    }

    // The column of sums[n][i].
    __device__ __forceinline__ int column(int n, int i) const {
        const int slot = threadIdx.x % 4 * 2 + i % 2, tile = first_tile() + n;
        return HAS_SCALES<T> ? tile / 4 * 32 + 4 * slot + tile % 4 : 8 * tile + slot;
    }
};

// Rounds the query vectors of a work to shared memory: VECTORS rows, zeros past the last.
template <class T, int D, int VECTORS>
__device__ __forceinline__ void stage_queries(unsigned char* queries, const AttentionArgs& args, const AttentionWork& work, unsigned kv_head) {
    using Element = typename TileElement<T>::Type;
    const unsigned queries_per_kv = args.num_heads / args.num_kv_heads;
    for (unsigned at = threadIdx.x * 4; at < VECTORS * D; at += blockDim.x * 4) {
        const unsigned vector = at / D, column = at % D, row = vector / queries_per_kv;
        float4 q = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (row < work.num_rows) {
            const unsigned head = kv_head * queries_per_kv + vector % queries_per_kv;
            q = *reinterpret_cast<const float4*>(args.q + size_t(work.first_row + row) * args.q_stride + head * D + column);
        }
        *reinterpret_cast<uint2*>(queries + vector * QUERY_ROW_BYTES<D> + column * 2) =
            uint2{pack<Element>(q.x, q.y), pack<Element>(q.z, q.w)};
    }
}

// Where the result of one vector goes.
struct ResultRow {
    bool to_part;
    size_t row;  // [num_tokens or num_parts, num_heads]
    float sink;  // In units of log2; NO_SCORE without.

    __device__ __forceinline__ ResultRow(const AttentionArgs& args, const AttentionWork& work, unsigned kv_head, unsigned vector) {
        const unsigned queries_per_kv = args.num_heads / args.num_kv_heads;
        const unsigned head = kv_head * queries_per_kv + vector % queries_per_kv;
        to_part = work.part >= 0;
        row = size_t((to_part ? uint32_t(work.part) : work.first_row) + vector / queries_per_kv) * args.num_heads + head;
        sink = args.sinks && !to_part ? args.sinks[head] * LOG2_E : NO_SCORE;
    }

    // What sums are multiplied with.
    __device__ __forceinline__ float factor(float largest, float total) const {
        if (sink != NO_SCORE) total += exp2_fast(sink - largest);
        return total > 0.0f ? 1.0f / total : 0.0f;
    }

    __device__ __forceinline__ void write(const AttentionArgs& args, size_t index, float x) const {
        if (to_part) {
            args.part_out[index] = x;
        } else {
            store_as(args.out_type, args.out, index, x);
        }
    }

    __device__ __forceinline__ void write_lse(const AttentionArgs& args, float largest, float total) const {
        if (to_part) args.part_lse[row] = total > 0.0f ? largest + log2f(total) : NO_SCORE;
    }
};

// Writes what 16 vectors have summed of this warp's columns; `vector` is the first of them within the work.
template <class T, int D, int KEYS, int SHARES>
__device__ __forceinline__ void write_rows(const AttentionArgs& args, const AttentionWork& work, unsigned kv_head, unsigned vector,
                                           const QueryRows<T, D, KEYS, SHARES>& rows) {
    const unsigned vectors = work.num_rows * (args.num_heads / args.num_kv_heads);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const unsigned own = vector + threadIdx.x % 32 / 4 + 8 * i;
        if (own >= vectors) continue;
        const ResultRow result(args, work, kv_head, own);
        const float factor = result.factor(rows.largest[i], rows.total[i]);
#pragma unroll
        for (int n = 0; n < rows.TILES; n++) {
#pragma unroll
            for (int j = 2 * i; j < 2 * i + 2; j++) {
                const int column = rows.column(n, j);
                if (column < D) result.write(args, result.row * D + column, rows.sums[n][j] * factor);
            }
        }
        if (rows.share == 0 && threadIdx.x % 4 == 0) result.write_lse(args, rows.largest[i], rows.total[i]);
    }
}

// WHAT(type's name in symbols, type, head size) for each head size, and for each type of the cache but f32.
#define EACH_HEAD_DIM(WHAT, NAME, T) \
    WHAT(NAME, T, 64)                \
    WHAT(NAME, T, 80)                \
    WHAT(NAME, T, 96)                \
    WHAT(NAME, T, 112)               \
    WHAT(NAME, T, 128)               \
    WHAT(NAME, T, 192)               \
    WHAT(NAME, T, 256)
#define EACH_CACHE_AND_HEAD_DIM(WHAT) \
    EACH_HEAD_DIM(WHAT, f16, f16)     \
    EACH_HEAD_DIM(WHAT, bf16, bf16)   \
    EACH_HEAD_DIM(WHAT, i8, i8)       \
    EACH_HEAD_DIM(WHAT, f8, f8)

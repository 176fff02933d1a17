// Products of packed quantized weights and many rows of activations, by tensor cores.
//
//   out [num_rows, out_features] = x [num_rows, in_features] w^T        CTA (piece, i): a piece of a target, rows from ROWS i on
//
//   tile      128 features, which are two panels, and ROWS rows; the stages of all tiles of a target are one sequence, and a
//             piece is `part_stages` of it, so it may begin and end within a tile
//   chunk     64 columns: two blocks of either panel with what scales them, and x. The CTA copies SLOTS - 1 of them ahead
//   warp      32 features x 64 rows, or 16 x 64 where ROWS is 64. It makes bf16 of codes and scales in registers, as
//             `packed_dequantize_*` does; sums stay in registers for all of a tile
//   x         row r of a chunk has its 16 bytes c at place c ^ 2 (r % 4): a warp reads four rows from 32 banks
//
// Rounding x and the weights to bf16 is all that is lost. Nothing that is computed of a row depends on the rows beside it, nor on
// ROWS. Of pieces that share a tile, the last one that is done adds what all have summed, in one order that the weight's shape
// decides.
//
// Bytes: those of the weight for each ROWS rows, from memory once, and x for each tile, from L2. A warp makes a register of
// weights with 8 instructions; of 128 rows each is multiplied by 8 row tiles, so tensor cores are about as busy as the rest. Of
// 32 features and 64 columns a warp has 64 products of tiles, and some 540 instructions with them (sm_90).
#pragma once
#include <type_traits>

#include "grouped.cuh"
#include "packed.cuh"

namespace {

constexpr unsigned WARPS = 8;
constexpr unsigned THREADS = WARPS * 32;
constexpr unsigned FEATURES = 128;
constexpr unsigned PANELS = FEATURES / packed::FEATURES;
constexpr unsigned CHUNK_BLOCKS = 2;
constexpr unsigned CHUNK_COLUMNS = CHUNK_BLOCKS * packed::COLUMNS;
constexpr unsigned SLOTS = 4;

template <class Format, int ROWS_>
struct Tiles {
    static constexpr unsigned ROWS = ROWS_;
    // Of 16 features, that a warp has, and of 8 rows.
    static constexpr int WARP_TILES = ROWS == 64 ? 1 : 2;
    static constexpr unsigned FEATURE_WARPS = FEATURES / (16 * WARP_TILES);
    static constexpr int ROW_TILES = ROWS / 8 * FEATURE_WARPS / WARPS;
    static constexpr unsigned UNITS = ROW_TILES * WARP_TILES;
    static constexpr unsigned PANEL_BYTES = CHUNK_BLOCKS * Format::BLOCK_BYTES + Format::SUPER_BYTES;
    static constexpr unsigned X_ROW_BYTES = CHUNK_COLUMNS * 2;
    static constexpr unsigned X_BYTES = ROWS * X_ROW_BYTES;
    static constexpr unsigned SLOT_BYTES = X_BYTES + PANELS * PANEL_BYTES;
    static constexpr unsigned COPY_BYTES = SLOTS * SLOT_BYTES;
    static constexpr unsigned SHARED_BYTES = COPY_BYTES + 16;
    static constexpr unsigned STAGE_CHUNKS = Format::STAGE_BLOCKS / CHUNK_BLOCKS;
};

// Where a CTA is in the chunks of its piece, from tile to tile.
struct Place {
    unsigned tile, chunk, end;  // Of the tile's chunks.
    unsigned left;              // Stages of later tiles.

    // `left` stages from `stage` of the tile on.
    template <class Shape>
    __device__ __forceinline__ Place(const Shape& shape, unsigned tile, unsigned stage, unsigned left) : tile(tile) {
        enter(shape, stage, left);
    }
    template <class Shape>
    __device__ __forceinline__ void enter(const Shape& shape, unsigned stage, unsigned stages) {
        const unsigned own = min(stages, shape.stages - stage);
        left = stages - own;
        chunk = stage * Shape::STAGE_CHUNKS;
        end = min((stage + own) * Shape::STAGE_CHUNKS, shape.chunks);
    }
    template <class Shape>
    __device__ __forceinline__ void next_tile(const Shape& shape) { tile++, enter(shape, 0, left); }
};

// How a target is cut.
template <class Tiles>
struct Shape {
    static constexpr unsigned STAGE_CHUNKS = Tiles::STAGE_CHUNKS;
    unsigned chunks, stages, tiles;  // Chunks and stages of a tile.

    template <class Job>
    __device__ __forceinline__ explicit Shape(const Job& job)
        : chunks((job.args.in_features + CHUNK_COLUMNS - 1) / CHUNK_COLUMNS),
          stages((chunks + STAGE_CHUNKS - 1) / STAGE_CHUNKS),
          tiles((job.target.out_features + FEATURES - 1) / FEATURES) {}

    template <class Job>
    __device__ __forceinline__ Place place(const Job& job) const {
        if constexpr (Job::HAS_WHOLE_PANELS) return Place(*this, job.cta(), 0, stages);
        else return in_piece(job.cta() * job.target.part_stages, job.target.part_stages);
    }
    __device__ __forceinline__ Place in_piece(unsigned first, unsigned part) const {
        return Place(*this, first / stages, first % stages, min(part, tiles * stages - first));
    }
};

// Copies chunks into slots. Each thread has pieces of 16 bytes, the same of every chunk.
template <class Format, class Tiles, class Job>
struct Copier {
    static constexpr unsigned PANEL_PIECES = Tiles::PANEL_BYTES / 16, BLOCK_PIECES = Format::BLOCK_BYTES / 16;
    static constexpr unsigned ROUNDS = (PANELS * PANEL_PIECES + THREADS - 1) / THREADS;
    static constexpr unsigned ROW_PIECES = Tiles::X_ROW_BYTES / 16, ROW_ROUNDS = Tiles::ROWS * ROW_PIECES / THREADS;
    const Job& job;
    unsigned char* shared;
    Place at;
    const uint8_t* panels[ROUNDS];  // Where a thread's piece of chunk 0 would lie.
    unsigned rows[ROW_ROUNDS];      // Where a thread's rows of x begin.
    unsigned slot = 0;              // In bytes.

    __device__ __forceinline__ Copier(const Job& job, unsigned char* shared, const Place& at, unsigned first_row)
        : job(job), shared(shared), at(at) {
#pragma unroll
        for (unsigned i = 0; i < ROW_ROUNDS; i++) {
            // Rows that are not there are the last one again: nothing is made of them.
            const unsigned row = first_row + i * (THREADS / ROW_PIECES) + threadIdx.x / ROW_PIECES;
            rows[i] = job.x_row(min(row, job.args.num_rows - 1)) * job.args.x_stride;
        }
        enter_tile();
    }
    static __device__ __forceinline__ unsigned piece(unsigned round) { return round * THREADS + threadIdx.x; }

    __device__ __forceinline__ void enter_tile() {
        const unsigned last = (job.target.out_features - 1) / packed::FEATURES;
#pragma unroll
        for (unsigned i = 0; i < ROUNDS; i++) {
            // The same of a panel that is not there.
            const unsigned panel = min(at.tile * PANELS + piece(i) / PANEL_PIECES, last);
            panels[i] = job.target.w + panel * job.args.w_stride + piece(i) % PANEL_PIECES * 16;
        }
    }
    __device__ __forceinline__ bool has_chunk() const { return at.chunk < at.end; }
    __device__ __forceinline__ void copy_weights() const {
        const unsigned num_blocks = job.args.in_features / packed::COLUMNS, block = at.chunk * CHUNK_BLOCKS;
        const unsigned begin = block * Format::BLOCK_BYTES + block / Format::STAGE_BLOCKS * Format::SUPER_BYTES;
        // The scales are as far behind as the stage's later blocks are long.
        const unsigned skip = (Format::STAGE_BLOCKS - CHUNK_BLOCKS - block % Format::STAGE_BLOCKS) * Format::BLOCK_BYTES;
#pragma unroll
        for (unsigned i = 0; i < ROUNDS; i++) {
            if ((i + 1) * THREADS > PANELS * PANEL_PIECES && piece(i) >= PANELS * PANEL_PIECES) break;
            const unsigned own = piece(i) % PANEL_PIECES;
            const bool is_scale = Format::SUPER_BYTES != 0 && own >= CHUNK_BLOCKS * BLOCK_PIECES;
            const bool is_there = Format::SUPER_BYTES != 0 || own < BLOCK_PIECES || block + 1 < num_blocks;
            copy16_async(shared + slot + Tiles::X_BYTES + piece(i) * 16, panels[i] + (is_scale ? begin + skip : begin), is_there);
        }
    }
    __device__ __forceinline__ void copy_x(unsigned chunk) const {
        const unsigned column = chunk * CHUNK_COLUMNS + threadIdx.x % ROW_PIECES * 8;
        const uint16_t* x = static_cast<const uint16_t*>(job.args.x);
#pragma unroll
        for (unsigned i = 0; i < ROW_ROUNDS; i++) {
            const unsigned row = i * (THREADS / ROW_PIECES) + threadIdx.x / ROW_PIECES;
            unsigned char* to = shared + slot + row * Tiles::X_ROW_BYTES + (threadIdx.x % ROW_PIECES ^ row % 4 * 2) * 16;
            copy16_async(to, x + (rows[i] + column), column < job.args.in_features);
        }
    }
    template <class Shape>
    __device__ __forceinline__ void next_chunk(const Shape& shape) {
        if (++at.chunk == at.end && at.left) at.next_tile(shape), enter_tile();
    }
    __device__ __forceinline__ void next_slot() { slot = slot + Tiles::SLOT_BYTES < Tiles::COPY_BYTES ? slot + Tiles::SLOT_BYTES : 0; }
};

// What scales the codes that a lane has of a warp's tiles in a block: [tile][of feature g or g + 8].
template <class Format, int WARP_TILES>
struct WarpScales {
    float scales[2 / Format::SCALE_STEPS][WARP_TILES][2], minima[WARP_TILES][2];

    // `first`: the first tile.
    __device__ __forceinline__ WarpScales(const unsigned char* block, const unsigned char* super_scales, unsigned first) {
        const unsigned g = threadIdx.x % 32 / 4;
        const unsigned char* own = block + Format::CODE_BYTES + g * 16;
        const auto pair = [&](const unsigned char* line, int tile) {
            return unpack<typename Format::Scale>(*reinterpret_cast<const uint32_t*>(line + (first + tile) * 4));
        };
        uint32_t bytes[2] = {};
        if constexpr (Format::HAS_SUPER_BLOCKS) {
            using Bytes = std::conditional_t<WARP_TILES == 1, uint16_t, uint32_t>;
#pragma unroll
            for (int i = 0; i < 2; i++) bytes[i] = *reinterpret_cast<const Bytes*>(own + 8 * i + first * 2);
        }
#pragma unroll
        for (int tile = 0; tile < WARP_TILES; tile++) {
            set(minima[tile], -0.0f, -0.0f);
            if constexpr (Format::SCALING == packed::Scaling::SUPER_SCALE_OF_16) {
                const float2 by = pair(super_scales + g * 16, tile);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const uint32_t own_bytes = bytes[i] >> 16 * tile;
                    set(scales[i][tile], by.x * float(int8_t(own_bytes)), by.y * float(int8_t(own_bytes >> 8)));
                }
            } else if constexpr (Format::HAS_SUPER_BLOCKS) {
                const float2 by = pair(super_scales + g * 16, tile), min_by = pair(super_scales + 128 + g * 16, tile);
                set(scales[0][tile], packed::times_byte(by.x, bytes[0], 2 * tile), packed::times_byte(by.y, bytes[0], 2 * tile + 1));
                set(minima[tile], packed::times_byte(-min_by.x, bytes[1], 2 * tile), packed::times_byte(-min_by.y, bytes[1], 2 * tile + 1));
            } else {
                const float2 scale = pair(own, tile);
                set(scales[0][tile], scale.x, scale.y);
                if constexpr (Format::HAS_MIN) {
                    const float2 minimum = pair(own + 128, tile);
                    set(minima[tile], minimum.x, minimum.y);
                }
            }
        }
    }
    static __device__ __forceinline__ void set(float (&at)[2], float first, float second) { at[0] = first, at[1] = second; }
};

// Of lane 4 g + t: features 16 m + g and 8 more, each of rows 8 n + 2 t and 8 n + 2 t + 1.
template <class Format, class Tiles>
struct Sums {
    static constexpr int ROW_TILES = Tiles::ROW_TILES, WARP_TILES = Tiles::WARP_TILES;
    float of[ROW_TILES][WARP_TILES][4];

    // Of a block: which one of its chunk. `x`: the lane's row g of the chunk.
    __device__ __forceinline__ void add(const packed::LaneCodes<Format, WARP_TILES>& codes, const WarpScales<Format, WARP_TILES>& scales,
                                        const unsigned char* x, unsigned block) {
#pragma unroll
        for (int step = 0; step < 2; step++) {
            uint32_t a[WARP_TILES][4];
#pragma unroll
            for (int i = 0; i < WARP_TILES * 4; i++) {
                const int tile = i / 4, place = i % 4;
                const float2 w = packed::values<Format>(codes.pair(tile, step, place), scales.scales[step / Format::SCALE_STEPS][tile][place % 2],
                                                        scales.minima[tile][place % 2]);
                a[tile][place] = pack<bf16>(w.x, w.y);
            }
            // 16 columns are two pieces of 16 bytes, of which rows g % 4 have their own places.
            const unsigned g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
            const unsigned char* from = x + ((2 * block + step) ^ g % 4) * 32 + t * 8;
#pragma unroll
            for (int n = 0; n < ROW_TILES; n++) {
                const uint2 b = *reinterpret_cast<const uint2*>(from + n * 8 * Tiles::X_ROW_BYTES);
#pragma unroll
                for (int tile = 0; tile < WARP_TILES; tile++) multiply_tiles<bf16>(of[n][tile], a[tile], b.x, b.y);
            }
        }
    }
    __device__ __forceinline__ float4 unit(unsigned i) const {
        const float(&sums)[4] = of[i / WARP_TILES][i % WARP_TILES];
        return make_float4(sums[0], sums[1], sums[2], sums[3]);
    }
};

// Two units of a thread's sums.
struct TwoUnits {
    float4 low, high;
};
__device__ __forceinline__ TwoUnits add(const TwoUnits& a, const TwoUnits& b) { return {add(a.low, b.low), add(a.high, b.high)}; }

// Writes units `first` and `first + 1` of a thread's sums of a tile.
template <class Tiles, class Job>
__device__ __forceinline__ void write(const Job& job, unsigned tile, unsigned first_row, unsigned first, const TwoUnits& of) {
    struct Place {
        unsigned feature, row;
    };
    const unsigned warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const unsigned feature = tile * FEATURES + warp % Tiles::FEATURE_WARPS * (16 * Tiles::WARP_TILES) + g;
    const unsigned row = first_row + warp / Tiles::FEATURE_WARPS * (8 * Tiles::ROW_TILES) + 2 * t;
    const Output<8, Job> output(job, [&](unsigned i) {
        const unsigned unit = first + i / 4;
        return Place{feature + unit % Tiles::WARP_TILES * 16 + i % 4 / 2 * 8, row + unit / Tiles::WARP_TILES * 8 + i % 2};
    });
    output.write({of.low.x, of.low.y, of.low.z, of.low.w, of.high.x, of.high.y, of.high.z, of.high.w});
}

// Writes a thread's sums of a tile.
template <class Tiles, class Job, class Sums>
__device__ __forceinline__ void write_all(const Job& job, unsigned tile, unsigned first_row, const Sums& sums) {
#pragma unroll
    for (unsigned i = 0; i < Tiles::UNITS; i += 2) write<Tiles>(job, tile, first_row, i, {sums.unit(i), sums.unit(i + 1)});
}

// Ends a tile: its sums become the output, or are left for the CTA that is the last one to be done with the tile.
template <class Tiles, class Job, class Shape, class Sums>
__device__ __forceinline__ void finish(const Job& job, const Shape& shape, unsigned tile, unsigned first_row, const Sums& sums, uint32_t* arrived) {
    constexpr unsigned PART = Tiles::UNITS * THREADS;
    const unsigned part_stages = job.target.part_stages, first_stage = tile * shape.stages;
    const unsigned first = first_stage / part_stages, last = (first_stage + shape.stages - 1) / part_stages;
    if (first == last) return write_all<Tiles>(job, tile, first_row, sums);
    // A piece keeps sums of a tile that another one began, and of one that another one ends.
    const unsigned first_piece = blockIdx.y * gridDim.x + job.target.first_piece;
    float4* parts = reinterpret_cast<float4*>(job.args.parts) + size_t(first_piece) * (2 * PART) + threadIdx.x;
    const auto part = [&](unsigned piece, unsigned unit) { return parts + size_t(2 * piece + (piece == first)) * PART + unit * THREADS; };
#pragma unroll
    for (unsigned i = 0; i < Tiles::UNITS; i++) *part(job.cta(), i) = sums.unit(i);
    if (!is_last_to_arrive(job.args.arrivals + first_piece + first, last - first, arrived)) return;
#pragma unroll 1
    for (unsigned i = 0; i < Tiles::UNITS; i += 2) {
        const auto load = [&](unsigned piece) {
            return TwoUnits{load_of_other_cta(part(piece, i)), load_of_other_cta(part(piece, i + 1))};
        };
        write<Tiles>(job, tile, first_row, i, add_parts_to<3>(load(first), first + 1, last, load));
    }
}

template <class Format, int ROWS, class Job>
__device__ __forceinline__ void gemm_tiles(const Job& job) {
    using Tiles = ::Tiles<Format, ROWS>;
    SHARED_MEMORY(shared);
    const unsigned first_row = Job::HAS_WHOLE_PANELS ? 0 : blockIdx.y * ROWS, warp = threadIdx.x / 32;
    const Shape<Tiles> shape(job);
    Place now = shape.place(job);
    Copier<Format, Tiles, Job> copier(job, shared, now, first_row);
    // Weights are on their way before x is there.
    unsigned begun[SLOTS - 1], num_begun = 0;
#pragma unroll
    for (unsigned i = 0; i + 1 < SLOTS; i++) {
        begun[i] = copier.at.chunk;
        if (copier.has_chunk()) copier.copy_weights(), copier.next_chunk(shape), num_begun++;
        copier.next_slot();
    }
    wait_for_inputs();
    copier.slot = 0;
#pragma unroll
    for (unsigned i = 0; i + 1 < SLOTS; i++) {
        if (i < num_begun) copier.copy_x(begun[i]);
        copier.next_slot();
        copy_commit();
    }
    // The warp's tiles of its panel; of a slot, that panel and row g of the warp's rows.
    const unsigned first_tile = warp % Tiles::FEATURE_WARPS * Tiles::WARP_TILES % packed::TILES;
    const unsigned panel_at = Tiles::X_BYTES + warp % Tiles::FEATURE_WARPS * Tiles::WARP_TILES / packed::TILES * Tiles::PANEL_BYTES;
    const unsigned x_at = (warp / Tiles::FEATURE_WARPS * (8 * Tiles::ROW_TILES) + threadIdx.x % 32 / 4) * Tiles::X_ROW_BYTES;
    unsigned slot = 0;
#pragma unroll 1
    while (true) {
        Sums<Format, Tiles> sums = {};
        const unsigned tile = now.tile;
#pragma unroll 1
        for (; now.chunk < now.end; now.chunk++) {
            copy_wait<int(SLOTS) - 2>();
            // Others' copies are there as well, and none reads any more what is copied over next.
            __syncthreads();
            if (copier.has_chunk()) copier.copy_weights(), copier.copy_x(copier.at.chunk), copier.next_chunk(shape);
            copier.next_slot();
            copy_commit();
            const unsigned char* panel = shared + slot + panel_at;
#pragma unroll
            for (unsigned block = 0; block < CHUNK_BLOCKS; block++) {
                const unsigned char* own = panel + block * Format::BLOCK_BYTES;
                const packed::LaneCodes<Format, Tiles::WARP_TILES> codes(own, threadIdx.x % 32, first_tile);
                const WarpScales<Format, Tiles::WARP_TILES> scales(own, panel + CHUNK_BLOCKS * Format::BLOCK_BYTES, first_tile);
                sums.add(codes, scales, shared + slot + x_at, block);
            }
            slot = slot + Tiles::SLOT_BYTES < Tiles::COPY_BYTES ? slot + Tiles::SLOT_BYTES : 0;
        }
        if constexpr (Job::HAS_WHOLE_PANELS) return write_all<Tiles>(job, tile, first_row, sums);
        else finish<Tiles>(job, shape, tile, first_row, sums, reinterpret_cast<uint32_t*>(shared + Tiles::COPY_BYTES));
        if (!now.left) break;
        now.next_tile(shape);
    }
    copy_wait<0>();
}

}  // namespace

// Products of a packed quantized weight and up to 32 rows of activations, by tensor cores.
//
//   out [num_rows, out_features] = x [num_rows, in_features] w^T        CTA (x, y): 128 features, part y of their stages; 8 warps
//
//   stages     | stage | stage | stage | ...        copied STAGES - 1 ahead, past the registers
//   blocks      0 1 2 3 4 5 6 7                     warps 0 and 4 take 0 and 1, warps 1 and 5 take 2 and 3, ...
//   features   warps 0 .. 3 the first panel of 64, warps 4 .. 7 the second one: a is the weight, b 8 rows of x a tile
//   sums       of a block in tensor cores, from codes and x; then in f32, times their scale; over warps, then over parts, in one
//              order that the weight's shape decides
//
// Rounding x to bf16 is all that is lost. Nothing that is computed of a row depends on the rows beside it, so neither their
// number nor its place changes its bits. The last part that is done adds all of them.
//
// Bytes: those of the weight, once, and from L2 those of x for each CTA: 4 a value up to 8 rows, 2 of more. It waits for memory
// up to 16 rows: docs/cuda.md has how many instructions the machine code has for a weight. The floor is the weight's bytes:
// 14336 x 4096 of q4_k are 34 MB, at 3.0 TB/s 11 us.
#include <type_traits>

#include "packed.cuh"

namespace {

constexpr unsigned QUARTERS = 4;
constexpr unsigned PANEL_THREADS = QUARTERS * 32;

template <class Format, int ROWS>
struct Gemm {
    static constexpr int ROW_TILES = ROWS / 8;
    // Two share what they read of x from L2; the sums of 32 rows leave no registers for two.
    static constexpr unsigned PANELS = ROWS == 32 ? 1 : 2;
    static constexpr unsigned THREADS = PANELS * PANEL_THREADS;
    static constexpr unsigned STAGES = Format::BITS == 8 || ROWS == 32 ? 4 : 3;
    static constexpr unsigned WARP_BLOCKS = Format::STAGE_BLOCKS / QUARTERS;
    static constexpr unsigned COPY_BYTES = STAGES * PANELS * Format::STAGE_BYTES;
    // What a warp keeps of the scales of its blocks.
    static constexpr unsigned SCALE_BYTES = Format::HAS_SUPER_BLOCKS ? WARP_BLOCKS * packed::EXPANDED_BYTES : 0;
    // Sums of a warp, a lane each.
    static constexpr int SUMS = packed::TILES * ROW_TILES * 4;
    static constexpr unsigned MERGE_BYTES = 2 * PANELS * SUMS * 32 * 4;
    static constexpr unsigned LOOP_BYTES = COPY_BYTES + THREADS / 32 * SCALE_BYTES;
    static constexpr unsigned SHARED_BYTES = LOOP_BYTES > MERGE_BYTES ? LOOP_BYTES : MERGE_BYTES;
    // As many CTAs on an SM as their copies leave room for, and their sums registers.
    static constexpr unsigned CTAS = ROWS > 8 || Format::BITS == 5 || Format::BITS == 6 ? 2 : 3;
    // Whether x comes from L2 while a stage is waited for, or block by block.
    static constexpr bool IS_AHEAD = ROWS == 8 || (ROWS == 16 && Format::BITS != 6);
    static constexpr unsigned LOADED = IS_AHEAD ? WARP_BLOCKS : 1;
};

// Bytes of the stages of so many blocks.
template <class Format>
__device__ __forceinline__ unsigned stage_bytes(unsigned blocks) {
    return blocks * Format::BLOCK_BYTES + blocks / Format::STAGE_BLOCKS * Format::SUPER_BYTES;
}

// Where a lane's x lies: of its row 8 n + g, of each step s of 16 columns, columns 16 s + 4 t .. + 4. Rows that are not there are
// the last one again: nothing is made of them.
template <int ROW_TILES>
struct Source {
    using Element = std::conditional_t<ROW_TILES == 1, float, uint16_t>;
    const Element* x;
    unsigned rows[ROW_TILES];

    __device__ __forceinline__ explicit Source(const GemmArgs& args) : x(static_cast<const Element*>(args.x)) {
#pragma unroll
        for (int n = 0; n < ROW_TILES; n++) {
            rows[n] = min(8 * n + threadIdx.x % 32 / 4, args.num_rows - 1) * args.x_stride + threadIdx.x % 4 * 4;
        }
    }
};

// A lane's x of a block, as it lies in memory and as fragments b.
template <int ROW_TILES>
struct Activations {
    using Four = std::conditional_t<ROW_TILES == 1, float4, uint2>;
    Four loaded[ROW_TILES][2];

    __device__ __forceinline__ void load(const Source<ROW_TILES>& source, unsigned column) {
#pragma unroll
        for (int n = 0; n < ROW_TILES; n++) {
#pragma unroll
            for (int step = 0; step < 2; step++) {
                loaded[n][step] = *reinterpret_cast<const Four*>(source.x + source.rows[n] + column + 16 * step);
            }
        }
    }
    __device__ __forceinline__ uint2 fragment(int n, int step) const {
        if constexpr (ROW_TILES == 1) {
            const float4 x = loaded[n][step];
            return uint2{pack<bf16>(x.x, x.y), pack<bf16>(x.z, x.w)};
        } else {
            return loaded[n][step];
        }
    }
};

template <class Format, int ROW_TILES>
struct BlockSums {
    float of[packed::TILES][ROW_TILES][4];

    // All that a block adds.
    template <class Scales>
    __device__ __forceinline__ void add(const unsigned char* block, const Scales& lane_scales, const Activations<ROW_TILES>& x) {
        constexpr int GROUPS = 2 / Format::SCALE_STEPS;
        const packed::LaneCodes<Format> codes(block, threadIdx.x % 32);
        uint2 b[ROW_TILES][2];
#pragma unroll
        for (int n = 0; n < ROW_TILES; n++) b[n][0] = x.fragment(n, 0), b[n][1] = x.fragment(n, 1);
        // What codes are higher by than they should be, times x.
        float offsets[GROUPS][ROW_TILES][4] = {};
        if constexpr (Format::OFFSET != 0.0f) {
            constexpr uint32_t A = Format::MINUS_OFFSETS;
            const uint32_t a[4] = {A, A, A, A};
#pragma unroll
            for (int step = 0; step < 2; step++) {
#pragma unroll
                for (int n = 0; n < ROW_TILES; n++) {
                    multiply_tiles<bf16>(offsets[step / Format::SCALE_STEPS][n], a, b[n][step].x, b[n][step].y);
                }
            }
        }
#pragma unroll
        for (int tile = 0; tile < int(packed::TILES); tile++) {
            uint32_t a[2][4];
#pragma unroll
            for (int i = 0; i < 8; i++) a[i / 4][i % 4] = codes.pair(tile, i / 4, i % 4);
#pragma unroll
            for (int group = 0; group < GROUPS; group++) {
                const float2 scales = lane_scales.scales(tile, group);
                float2 minima = {};
                if constexpr (Format::HAS_MIN) minima = lane_scales.offset_minima(tile);
#pragma unroll
                for (int n = 0; n < ROW_TILES; n++) {
                    float products[4];
                    multiply_tiles<bf16>(products, offsets[group][n], a[group], b[n][group].x, b[n][group].y);
                    if constexpr (GROUPS == 1) multiply_tiles<bf16>(products, a[1], b[n][1].x, b[n][1].y);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float& sum = of[tile][n][i];
                        sum = fmaf(i < 2 ? scales.x : scales.y, products[i], sum);
                        if constexpr (Format::HAS_MIN) sum = fmaf(i < 2 ? minima.x : minima.y, offsets[group][n][i], sum);
                    }
                }
            }
        }
    }

    __device__ __forceinline__ float& at(int i) { return of[i / (4 * ROW_TILES)][i / 4 % ROW_TILES][i % 4]; }
};

// Sum `i` of a lane belongs to this feature of its panel and this row.
template <int ROW_TILES>
struct SumPlace {
    unsigned feature, row;
    __device__ __forceinline__ SumPlace(unsigned i, unsigned lane)
        : feature(i / (4 * ROW_TILES) * 16 + i / 2 % 2 * 8 + lane / 4), row(i / 4 % ROW_TILES * 8 + lane % 4 * 2 + i % 2) {}
};

template <int ROW_TILES>
__device__ __forceinline__ void store(const GemmArgs& args, unsigned panel, unsigned i, unsigned lane, float sum) {
    const SumPlace<ROW_TILES> place(i, lane);
    const unsigned feature = panel * packed::FEATURES + place.feature;
    if (place.row >= args.num_rows || feature >= args.out_features) return;
    if (args.bias) sum += args.bias[feature];
    float* out = args.out + size_t(place.row) * args.out_stride + feature;
    // Of all kernels alike, whether or not the compiler would contract it.
    *out = args.accumulate ? fmaf(sum, args.scale, *out) : sum * args.scale;
}

// Leaves the sums of all quarters in the first one: (0 + 2) + (1 + 3).
template <class Gemm, class Sums>
__device__ __forceinline__ void merge_quarters(float* shared, unsigned half, unsigned quarter, Sums& sums) {
    const unsigned lane = threadIdx.x % 32;
#pragma unroll
    for (unsigned from = QUARTERS / 2; from > 0; from /= 2) {
        float* merge = shared + (half * 2 + quarter % from) * Gemm::SUMS * 32 + lane;
        __syncthreads();
        if (quarter >= from && quarter < 2 * from) {
#pragma unroll
            for (int i = 0; i < Gemm::SUMS; i++) merge[i * 32] = sums.at(i);
        }
        __syncthreads();
        if (quarter < from) {
#pragma unroll
            for (int i = 0; i < Gemm::SUMS; i++) sums.at(i) += merge[i * 32];
        }
    }
}

// Keeps this part's sums; of the part that is done last, adds all and writes the output.
template <class Gemm, class Sums>
__device__ __forceinline__ void merge_parts(const GemmArgs& args, unsigned char* shared, unsigned half, unsigned quarter,
                                            Sums& sums) {
    constexpr unsigned PART = Gemm::PANELS * Gemm::SUMS * 32;
    const unsigned lane = threadIdx.x % 32, num_parts = gridDim.y;
    float* parts = args.parts + size_t(blockIdx.x) * num_parts * PART;
    if (quarter == 0) {
        float* part = parts + blockIdx.y * PART + half * Gemm::SUMS * 32 + lane;
#pragma unroll
        for (int i = 0; i < Gemm::SUMS; i++) part[i * 32] = sums.at(i);
        __threadfence();
    }
    __syncthreads();
    uint32_t* arrived = reinterpret_cast<uint32_t*>(shared);
    if (threadIdx.x == 0) *arrived = atomicAdd(args.arrivals + blockIdx.x, 1u);
    __syncthreads();
    if (*arrived + 1 != num_parts) return;
    __threadfence();
    for (unsigned at = threadIdx.x; at < PART; at += Gemm::THREADS) {
        float sum = 0.0f;
        for (unsigned part = 0; part < num_parts; part++) sum += load_of_other_cta(parts + part * PART + at);
        const unsigned i = at / 32;
        store<Gemm::ROW_TILES>(args, blockIdx.x * Gemm::PANELS + i / Gemm::SUMS, i % Gemm::SUMS, at % 32, sum);
    }
    if (threadIdx.x == 0) args.arrivals[blockIdx.x] = 0;
}

// Copies the stages of a panel, from the first on, half of the CTA's threads each of the two.
template <class Format, class Gemm>
struct StageCopier {
    static constexpr unsigned STEP = PANEL_THREADS * 16;
    const uint8_t* from;
    unsigned char* to;
    unsigned left;  // Bytes of the stages that are not copied yet, less where this thread's begin.
    unsigned slot = 0;

    __device__ __forceinline__ StageCopier(const uint8_t* stages, unsigned char* copies, unsigned bytes) {
        const unsigned own = threadIdx.x % PANEL_THREADS * 16;
        from = stages + own;
        to = copies + own;
        left = bytes > own ? bytes - own : 0;
    }
    __device__ __forceinline__ void copy() {
        unsigned char* place = to + slot * (Gemm::PANELS * Format::STAGE_BYTES);
#pragma unroll
        for (unsigned at = 0; at < Format::STAGE_BYTES; at += STEP) {
            const bool is_whole = at + STEP <= Format::STAGE_BYTES;
            const bool is_inside = is_whole || threadIdx.x % PANEL_THREADS * 16 + at < Format::STAGE_BYTES;
            if (at < left && is_inside) copy16_async(place + at, from + at, true);
        }
        from += Format::STAGE_BYTES;
        left = left > Format::STAGE_BYTES ? left - Format::STAGE_BYTES : 0;
        slot = slot + 1 < Gemm::STAGES ? slot + 1 : 0;
        copy_commit();
    }
};

template <class Format, int ROWS>
__device__ void gemm(const GemmArgs& args) {
    using Gemm = ::Gemm<Format, ROWS>;
    SHARED_MEMORY(shared);
    const unsigned warp = threadIdx.x / 32, half = warp / QUARTERS, quarter = warp % QUARTERS, g = threadIdx.x % 32 / 4;
    const unsigned panel = blockIdx.x * Gemm::PANELS + half;
    const unsigned num_blocks = args.in_features / packed::COLUMNS;
    // The blocks of this part; a panel that is not there has none.
    const unsigned first = blockIdx.y * args.part_stages * Format::STAGE_BLOCKS;
    const unsigned part_end = min(first + args.part_stages * Format::STAGE_BLOCKS, num_blocks);
    const unsigned end = panel * packed::FEATURES < args.out_features ? part_end : 0;
    // All warps take as many turns.
    const unsigned num_stages = (part_end - first + Format::STAGE_BLOCKS - 1) / Format::STAGE_BLOCKS;
    const unsigned loop_end = first + num_stages * Format::STAGE_BLOCKS;

    unsigned char* copies = shared + half * Format::STAGE_BYTES;
    unsigned char* scales = shared + Gemm::COPY_BYTES + warp * Gemm::SCALE_BYTES;
    const uint8_t* stages = args.w + panel * args.panel_bytes + size_t(blockIdx.y) * args.part_stages * Format::STAGE_BYTES;
    StageCopier<Format, Gemm> copier(stages, copies, end ? stage_bytes<Format>(end - first) : 0);
#pragma unroll
    for (unsigned i = 0; i + 1 < Gemm::STAGES; i++) copier.copy();

    wait_for_inputs();
    const Source<Gemm::ROW_TILES> source(args);
    BlockSums<Format, Gemm::ROW_TILES> sums = {};
#pragma unroll 1
    for (unsigned block = first + quarter * Gemm::WARP_BLOCKS; block < loop_end; block += Format::STAGE_BLOCKS) {
        Activations<Gemm::ROW_TILES> x[Gemm::LOADED] = {};
        if constexpr (Gemm::IS_AHEAD) {
#pragma unroll
            for (unsigned i = 0; i < Gemm::WARP_BLOCKS; i++) {
                if (block + i < end) x[i].load(source, (block + i) * packed::COLUMNS);
            }
        }
        copy_wait<int(Gemm::STAGES) - 2>();
        __syncthreads();
        copier.copy();
        // What is copied next will take the place of the stage that is now there.
        const unsigned char* at = copies + copier.slot * (Gemm::PANELS * Format::STAGE_BYTES);
        const unsigned char* own = at + quarter * Gemm::WARP_BLOCKS * Format::BLOCK_BYTES;
        if constexpr (Format::HAS_SUPER_BLOCKS) {
            if (block < end) {
#pragma unroll
                for (unsigned i = 0; i < Gemm::WARP_BLOCKS; i++) {
                    packed::expand_scales<Format>(own + i * Format::BLOCK_BYTES, at + Format::STAGE_BLOCKS * Format::BLOCK_BYTES,
                                                  scales + i * packed::EXPANDED_BYTES);
                }
            }
            __syncwarp();
        }
        const auto add = [&](unsigned i, const Activations<Gemm::ROW_TILES>& x) {
            const unsigned char* codes = own + i * Format::BLOCK_BYTES;
            if constexpr (Format::HAS_SUPER_BLOCKS) {
                sums.add(codes, packed::ExpandedScales<Format>(scales + i * packed::EXPANDED_BYTES, g), x);
            } else {
                sums.add(codes, packed::LaneScales<Format>(codes, nullptr, g), x);
            }
        };
#pragma unroll(Gemm::LOADED)
        for (unsigned i = 0; i < Gemm::WARP_BLOCKS; i++) {
            if (block + i < end) {
                if constexpr (!Gemm::IS_AHEAD) x[0].load(source, (block + i) * packed::COLUMNS);
                add(i, x[Gemm::IS_AHEAD ? i : 0]);
            }
        }
        // Scales are written again once all lanes have read them.
        if constexpr (Format::HAS_SUPER_BLOCKS) __syncwarp();
    }
    copy_wait<0>();
    merge_quarters<Gemm>(reinterpret_cast<float*>(shared), half, quarter, sums);
    if (gridDim.y > 1) {
        merge_parts<Gemm>(args, shared, half, quarter, sums);
    } else if (quarter == 0) {
#pragma unroll
        for (int i = 0; i < Gemm::SUMS; i++) store<Gemm::ROW_TILES>(args, panel, unsigned(i), threadIdx.x % 32, sums.at(i));
    }
}

}  // namespace

#define GEMM_SIZED(NAME, SIZES, FORMAT, ROWS) \
    WEIGHT_KERNEL(NAME, GemmArgs, (SIZES::THREADS), (SIZES::SHARED_BYTES), (SIZES::CTAS)) { gemm<FORMAT, ROWS>(args); }
#define GEMM(NAME, FORMAT, ROWS)                       \
    using Gemm_##NAME##_##ROWS = Gemm<FORMAT, ROWS>;   \
    GEMM_SIZED(gemm_##NAME##_r##ROWS, Gemm_##NAME##_##ROWS, FORMAT, ROWS)
#define GEMM_OF(NAME, FORMAT) \
    GEMM(NAME, FORMAT, 8)     \
    GEMM(NAME, FORMAT, 16)    \
    GEMM(NAME, FORMAT, 32)
EACH_PACKED_FORMAT(GEMM_OF)

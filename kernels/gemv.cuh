// Products of a weight and up to 8 rows of activations: every weight is read once, from where it lies in its file.
//
//   out [num_rows, out_features] = x [num_rows, in_features] w^T        CTA: 4 features of one of the targets, 4 warps
//
//   columns    | run | run | run | run | run | ...      warp i takes every 4th run of 1024 columns (256 of floats): split-K
//   warp          0     1     2     3     0
//   lane       32 (8) columns of each of the 4 features, in floats; x is read once for the four
//   sums       over lanes by shuffles, over warps in shared memory, in one order whatever the rows
//
// Blocks of quantized formats begin at any multiple of 2 bytes, or at any byte: a warp copies its bytes in aligned pieces of 16
// to shared memory, two runs deep, and takes them apart there. Floats go from memory to registers in pieces of 16 bytes; that
// several loads are on their way is left to the CTAs of an SM, which need few registers.
//
// Bytes: those of the weight (2 a value of bf16, 0.56 of q4_0) and 4 num_rows in_features of x, from L1 after the first CTA of an
// SM; operations: 2 num_rows a weight, and about 4 to take a quantized one apart. The floor is the weight's bytes: 4096 x 14336
// of bf16 are 117 MB, at 4.3 TB/s 27 us.
#pragma once
#include "grouped.cuh"
#include "weights.cuh"

namespace {

constexpr unsigned WARPS = 4;
constexpr unsigned FEATURES = 4;
constexpr unsigned RUN_COLUMNS = 1024;

template <class Format>
constexpr bool IS_FLOAT = false;
template <>
constexpr bool IS_FLOAT<weights::F32> = true;
template <>
constexpr bool IS_FLOAT<weights::F16> = true;
template <>
constexpr bool IS_FLOAT<weights::BF16> = true;

template <class Format, int ROWS>
struct Gemv {
    static constexpr unsigned RUN_BYTES = RUN_COLUMNS / Format::LEN * Format::BYTES;
    // Up to 15 bytes before a run and after it come with it.
    static constexpr unsigned FEATURE_BYTES = (RUN_BYTES + 30) / 16 * 16;
    static constexpr unsigned STAGE_BYTES = FEATURES * FEATURE_BYTES;
    static constexpr unsigned COPY_BYTES = IS_FLOAT<Format> ? 0 : 2 * WARPS * STAGE_BYTES;
    static constexpr unsigned SUM_BYTES = WARPS * FEATURES * ROWS * 4;
    static constexpr unsigned SHARED_BYTES = COPY_BYTES > SUM_BYTES ? COPY_BYTES : SUM_BYTES;
    // One row of 16-bit floats is all waiting: as many CTAs as there is room for.
    static constexpr unsigned CTAS = IS_FLOAT<Format> && Format::BYTES == 64 && ROWS == 1 ? 9 : 1;
};

// Of gemv_*: features of one of the targets, for ROWS rows; blockIdx.y says which.
template <unsigned ROWS>
struct GemvJob {
    const GemvArgs& args;
    const GemvTarget& target;
    unsigned first_row;

    __device__ __forceinline__ explicit GemvJob(const GemvArgs& args)
        : args(args),
          target(target_of_cta(args.targets, args.targets[1].first_cta, args.targets[2].first_cta)),
          first_row(blockIdx.y * ROWS) {}
    __device__ __forceinline__ unsigned cta() const { return blockIdx.x - target.first_cta; }
    __device__ __forceinline__ unsigned num_rows() const { return min(ROWS, args.num_rows - first_row); }
    __device__ __forceinline__ unsigned x_row(unsigned row) const { return first_row + row; }
    __device__ __forceinline__ unsigned out_row(unsigned row) const { return first_row + row; }
};

// The first of a CTA's features.
template <class Job>
__device__ __forceinline__ unsigned first_feature(const Job& job) { return job.cta() * FEATURES; }

// A row of the weight; past the end, the last one's again.
template <class Job>
__device__ __forceinline__ const uint8_t* weight_row(const Job& job, unsigned feature) {
    const unsigned n = first_feature(job) + feature, last = job.target.out_features - 1;
    return job.target.w + (n < last ? n : last) * job.args.w_stride;
}

template <int ROWS>
struct Sums {
    float of[FEATURES][ROWS];

    // Eight columns from `column` on.
    template <class Job>
    __device__ __forceinline__ void add(const Job& job, unsigned column, const float (&w)[FEATURES][8]) {
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            if (ROWS > 1 && unsigned(row) >= job.num_rows()) break;
            const float* x = job.args.x + size_t(job.x_row(row)) * job.args.x_stride + column;
#pragma unroll
            for (int i = 0; i < 8; i += 4) {
                const float4 four = *reinterpret_cast<const float4*>(x + i);
#pragma unroll
                for (unsigned f = 0; f < FEATURES; f++) {
                    of[f][row] += w[f][i] * four.x;
                    of[f][row] += w[f][i + 1] * four.y;
                    of[f][row] += w[f][i + 2] * four.z;
                    of[f][row] += w[f][i + 3] * four.w;
                }
            }
        }
    }
};

// Eight columns of floats, as they lie in memory.
template <class Format>
struct Eight {
    static constexpr int PIECES = 8 * Format::BYTES / Format::LEN / 16;
    uint4 pieces[PIECES];

    __device__ __forceinline__ void load(const uint8_t* row, unsigned column) {
        const uint4* from = reinterpret_cast<const uint4*>(row + size_t(column) * Format::BYTES / Format::LEN);
#pragma unroll
        for (int i = 0; i < PIECES; i++) pieces[i] = from[i];
    }
    __device__ __forceinline__ void unpack_to(float (&w)[8]) const {
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            const uint32_t words[4] = {pieces[i].x, pieces[i].y, pieces[i].z, pieces[i].w};
#pragma unroll
            for (int j = 0; j < 4; j++) unpack_word(Format{}, words[j], w, 4 * i + j);
        }
    }
    static __device__ __forceinline__ void unpack_word(weights::F32, uint32_t word, float (&w)[8], int i) { w[i] = __uint_as_float(word); }
    template <class T>
    static __device__ __forceinline__ void unpack_word(weights::Float16Bits<T>, uint32_t word, float (&w)[8], int i) {
        const float2 pair = unpack<T>(word);
        w[2 * i] = pair.x, w[2 * i + 1] = pair.y;
    }
};

template <class Format, int ROWS, class Job>
__device__ void multiply_floats(const Job& job, Sums<ROWS>& sums) {
    const auto& args = job.args;
    const uint8_t* rows[FEATURES];
#pragma unroll
    for (unsigned f = 0; f < FEATURES; f++) rows[f] = weight_row(job, f);
    const unsigned first = threadIdx.x * 8;
    if (first >= args.in_features) return wait_for_inputs();
    float w[FEATURES][8];
    {
        // On their way while the kernel before ends.
        Eight<Format> eights[FEATURES];
#pragma unroll
        for (unsigned f = 0; f < FEATURES; f++) eights[f].load(rows[f], first);
        wait_for_inputs();
#pragma unroll
        for (unsigned f = 0; f < FEATURES; f++) eights[f].unpack_to(w[f]);
        sums.add(job, first, w);
    }
#pragma unroll 1
    for (unsigned column = first + WARPS * 32 * 8; column < args.in_features; column += WARPS * 32 * 8) {
#pragma unroll
        for (unsigned f = 0; f < FEATURES; f++) {
            Eight<Format> eight;
            eight.load(rows[f], column);
            eight.unpack_to(w[f]);
        }
        sums.add(job, column, w);
    }
}

// Where a run of a feature begins, and the bytes before it in its first aligned piece.
template <class Format>
struct RunStart {
    const uint8_t* aligned;
    unsigned skipped;

    template <class Job>
    __device__ __forceinline__ RunStart(const Job& job, unsigned feature, unsigned first) {
        const uint8_t* at = weight_row(job, feature) + size_t(first / Format::LEN) * Format::BYTES;
        skipped = unsigned(reinterpret_cast<uintptr_t>(at) % 16);
        aligned = at - skipped;
    }
};

template <class Format, int ROWS, class Job>
__device__ __forceinline__ void copy_run(const Job& job, unsigned first, unsigned char* stage) {
    if (first >= job.args.in_features) return;
    const unsigned columns = min(RUN_COLUMNS, job.args.in_features - first);
    const unsigned bytes = columns / Format::LEN * Format::BYTES;
#pragma unroll
    for (unsigned f = 0; f < FEATURES; f++) {
        const RunStart<Format> start(job, f, first);
        for (unsigned at = threadIdx.x % 32 * 16; at < start.skipped + bytes; at += 32 * 16) {
            copy16_async(stage + f * Gemv<Format, ROWS>::FEATURE_BYTES + at, start.aligned + at, true);
        }
    }
}

template <class Format, int ROWS, class Job>
__device__ void multiply_blocks(const Job& job, unsigned char* shared, Sums<ROWS>& sums) {
    using Gemv = ::Gemv<Format, ROWS>;
    const auto& args = job.args;
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    constexpr unsigned STRIDE = WARPS * RUN_COLUMNS;
    unsigned char* stages = shared + warp * 2 * Gemv::STAGE_BYTES;
    unsigned stage = 0;
    copy_run<Format, ROWS>(job, warp * RUN_COLUMNS, stages);
    copy_commit();
    wait_for_inputs();
    for (unsigned first = warp * RUN_COLUMNS; first < args.in_features; first += STRIDE) {
        copy_run<Format, ROWS>(job, first + STRIDE, stages + (stage ^ 1) * Gemv::STAGE_BYTES);
        copy_commit();
        copy_wait<1>();
        __syncwarp();
        const unsigned column = first + lane * 32;
        if (column < args.in_features) {
            float runs[FEATURES][32];
#pragma unroll
            for (unsigned f = 0; f < FEATURES; f++) {
                const RunStart<Format> start(job, f, first);
                weights::run_of_row<Format>(stages + stage * Gemv::STAGE_BYTES + f * Gemv::FEATURE_BYTES + start.skipped, lane, runs[f]);
            }
#pragma unroll
            for (int i = 0; i < 32; i += 8) {
                float w[FEATURES][8];
#pragma unroll
                for (unsigned f = 0; f < FEATURES; f++) {
#pragma unroll
                    for (int j = 0; j < 8; j++) w[f][j] = runs[f][i + j];
                }
                sums.add(job, column + i, w);
            }
        }
        __syncwarp();
        stage ^= 1;
    }
    copy_wait<0>();
}

template <class Format, int ROWS, class Job>
__device__ __forceinline__ void gemv(const Job& job) {
    SHARED_MEMORY(shared);
    const auto& args = job.args;
    Sums<ROWS> sums = {};
    if constexpr (IS_FLOAT<Format>) {
        multiply_floats<Format, ROWS>(job, sums);
    } else {
        multiply_blocks<Format, ROWS>(job, shared, sums);
        __syncthreads();
    }
    float* merge = reinterpret_cast<float*>(shared);
#pragma unroll
    for (unsigned f = 0; f < FEATURES; f++) {
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            const float sum = warp_sum(sums.of[f][row]);
            if (threadIdx.x % 32 == 0) merge[(threadIdx.x / 32 * FEATURES + f) * ROWS + row] = sum;
        }
    }
    __syncthreads();
    const unsigned f = threadIdx.x / ROWS, row = threadIdx.x % ROWS, n = first_feature(job) + f;
    const auto& target = job.target;
    if (f >= FEATURES || row >= job.num_rows() || n >= target.out_features) return;
    float sum = 0.0f;
    for (unsigned warp = 0; warp < WARPS; warp++) sum += merge[(warp * FEATURES + f) * ROWS + row];
    if (target.bias) sum += target.bias[n];
    float* out = target.out + size_t(job.out_row(row)) * target.out_stride + n;
    *out = args.accumulate ? *out + sum * args.scale : sum * args.scale;
}

}  // namespace

// Several residual streams of each row, of which the layers run on one (AltUp, Gemma 3n), and gates that keep the largest values.
//
//   streams_predict, streams_correct   CTA (row, c): columns 1024 c .. 1024 c + 1024 of all streams; thread i: 4 i .. 4 i + 4
//     factors     = coefficients tanh(routed), by the CTA's first threads, through shared memory
//     predict     stream[to] += sum over from of factors[to, from] stream[from]; hidden = stream[active]
//     correct     stream[to] += (hidden - stream[active]) (factors[to] + 1); hidden = stream[active] scale
//   add_rows      thread i: elements 4 i .. 4 i + 4 of a flat list: x = (x + other) scale
//   match_size    CTA: a row of x, which gets the root mean square of the same row of other
//   keep_largest  CTA: a row of x: what is over mean + deviations standard deviations stays, less that
//
// Bytes of an element: 8 for each stream and 4 of hidden to predict, 8 and 8 to correct, 12, 12, and 12 to keep the largest, the
// second and third reading of a row being of L2. All wait for memory; a step of few rows is one launch.
#include "cuda.cuh"

namespace {

constexpr unsigned THREADS = 256;
constexpr unsigned MAX_FACTORS = MAX_STREAMS * MAX_STREAMS;

// The first `count` of a row's factors.
__device__ const float* make_factors(const StreamsArgs& args, unsigned row, unsigned count, unsigned char* shared) {
    float* factors = reinterpret_cast<float*>(shared);
    const float* routed = args.routed + size_t(row) * args.num_streams;
    if (threadIdx.x < count) {
        float sum = 0.0f;
        for (unsigned i = 0; i < args.num_streams; i++) sum += args.coefficients[threadIdx.x * args.num_streams + i] * tanhf(routed[i]);
        factors[threadIdx.x] = sum;
    }
    __syncthreads();
    return factors;
}

__device__ __forceinline__ float4 add_scaled(float4 sum, float4 x, float by) {
    return make_float4(sum.x + x.x * by, sum.y + x.y * by, sum.z + x.z * by, sum.w + x.w * by);
}
__device__ __forceinline__ void store_four(float* to, float4 x) { *reinterpret_cast<float4*>(to) = x; }

// Of a row's squares over its columns.
__device__ float mean_square(const float* row, uint32_t cols, float* scratch) {
    float sum = 0.0f;
    for (uint32_t i = threadIdx.x; i < cols; i += THREADS) sum += row[i] * row[i];
    return cta_sum(sum, scratch) / cols;
}

}  // namespace

KERNEL(streams_predict, StreamsArgs, THREADS, MAX_FACTORS * 4) {
    SHARED_MEMORY(shared);
    const unsigned row = blockIdx.x, count = args.num_streams;
    const float* factors = make_factors(args, row, count * count, shared);
    const uint32_t column = (blockIdx.y * THREADS + threadIdx.x) * 4;
    if (column >= args.cols) return;
    const size_t at = size_t(row) * args.cols + column;
    float4 before[MAX_STREAMS];
#pragma unroll
    for (unsigned from = 0; from < MAX_STREAMS; from++) {
        if (from < count) before[from] = load_four(args.streams[from] + at);
    }
#pragma unroll
    for (unsigned to = 0; to < MAX_STREAMS; to++) {
        if (to >= count) continue;
        float4 sum = before[to];
#pragma unroll
        for (unsigned from = 0; from < MAX_STREAMS; from++) {
            if (from < count) sum = add_scaled(sum, before[from], factors[to * count + from]);
        }
        store_four(args.streams[to] + at, sum);
        if (to == args.active) store_four(args.hidden + at, sum);
    }
}

KERNEL(streams_correct, StreamsArgs, THREADS, MAX_FACTORS * 4) {
    SHARED_MEMORY(shared);
    const unsigned row = blockIdx.x;
    const float* factors = make_factors(args, row, args.num_streams, shared);
    const uint32_t column = (blockIdx.y * THREADS + threadIdx.x) * 4;
    if (column >= args.cols) return;
    const size_t at = size_t(row) * args.cols + column;
    const float4 change = add_scaled(load_four(args.hidden + at), load_four(args.streams[args.active] + at), -1.0f);
    for (unsigned to = 0; to < args.num_streams; to++) {
        float4 x = add_scaled(load_four(args.streams[to] + at), change, factors[to] + 1.0f);
        store_four(args.streams[to] + at, x);
        if (to != args.active) continue;
        if (args.scale) {
            const float4 by = load_four(args.scale + column);
            x = make_float4(x.x * by.x, x.y * by.y, x.z * by.z, x.w * by.w);
        }
        store_four(args.hidden + at, x);
    }
}

KERNEL(add_rows, StreamRowsArgs, THREADS, 0) {
    const size_t at = (size_t(blockIdx.x) * THREADS + threadIdx.x) * 4, count = size_t(args.num_rows) * args.cols;
    for (size_t i = at; i < at + 4 && i < count; i++) args.x[i] = (args.x[i] + args.other[i]) * args.value;
}

KERNEL(match_size, StreamRowsArgs, THREADS, THREADS / 32 * 4) {
    SHARED_MEMORY(shared);
    float* scratch = reinterpret_cast<float*>(shared);
    float* x = args.x + size_t(blockIdx.x) * args.cols;
    const float wanted = mean_square(args.other + size_t(blockIdx.x) * args.cols, args.cols, scratch);
    const float there = mean_square(x, args.cols, scratch);
    const float by = sqrtf(wanted) / sqrtf(fmaxf(there, 1e-5f));
    for (uint32_t i = threadIdx.x; i < args.cols; i += THREADS) x[i] *= by;
}

KERNEL(keep_largest, StreamRowsArgs, THREADS, THREADS / 32 * 4) {
    SHARED_MEMORY(shared);
    float* scratch = reinterpret_cast<float*>(shared);
    float* x = args.x + size_t(blockIdx.x) * args.cols;
    float sum = 0.0f, squares = 0.0f;
    for (uint32_t i = threadIdx.x; i < args.cols; i += THREADS) sum += x[i];
    const float mean = cta_sum(sum, scratch) / args.cols;
    for (uint32_t i = threadIdx.x; i < args.cols; i += THREADS) squares += (x[i] - mean) * (x[i] - mean);
    const float cutoff = mean + sqrtf(cta_sum(squares, scratch) / args.cols) * args.value;
    for (uint32_t i = threadIdx.x; i < args.cols; i += THREADS) x[i] = x[i] < cutoff ? 0.0f : x[i] - cutoff;
}

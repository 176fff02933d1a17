// Layers that keep a state of fixed size a request, and gates.
//
//   causal_conv     CTA (c, tile): a channel a thread, the rows of a tile one after the other
//   mamba_N         CTA (32 channels, request): the same as mamba2_N, all channels being one head's columns
//   mamba2_N        CTA (head and 32 columns of it, request): a column a lane, 1 / 8 of the state's rows a warp, in registers
//   gated_delta_N   the same; N: rows of a state at most
//   kimi_delta_N    the same, with a decay for each row of a state
//   gated_norm      CTA: a group of columns of a row
//   attention_gate  CTA: 1024 elements of a flat list
//
// A prompt passes a state token by token as an answer does, in one order and by the same instructions: so a row has the same bits
// in any chunk. Eight tokens are read at once, a warp each. What is read and written of a state is 8 bytes a value a step; with
// one row a request that is all there is to wait for, and a prompt waits for the tokens before: a barrier each in gated_delta,
// two for eight in mamba2.
#include "cuda.cuh"

namespace {

constexpr unsigned CHANNELS = 128; // of a CTA of causal_conv
constexpr unsigned WARPS = 8;
constexpr unsigned TOKENS = WARPS; // that are read at once
constexpr unsigned COLUMNS = 32;
constexpr unsigned NORM_THREADS = 128;
constexpr unsigned GATED = 1024; // elements of a CTA of attention_gate

__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// One channel of a request's convolution.
struct Channel {
    const ConvPart& part;
    const RecurrentRequest request;
    float* state;
    unsigned channel;

    __device__ __forceinline__ float input(unsigned row) const {
        const size_t at = size_t(row) * part.num_channels + channel;
        // Not to be fused with what it is added to: the state has the product.
        return part.gate_in ? __fmul_rn(part.x[at], part.gate_in[at]) : part.x[at];
    }
    __device__ __forceinline__ float kept(unsigned i) const { return request.begins ? 0.0f : state[size_t(i) * part.num_channels]; }

    __device__ __forceinline__ void compute(unsigned row) const {
        const unsigned past = part.kernel - 1, done = row - request.first_row;
        float sum = part.bias ? part.bias[channel] : 0.0f;
        for (unsigned i = 0; i <= past; i++) {
            const unsigned back = past - i;
            const float x = back <= done ? input(row - back) : kept(done + i);
            sum = fmaf(x, part.weight[size_t(i) * part.num_channels + channel], sum);
        }
        const size_t at = size_t(row) * part.num_channels + channel;
        if (part.activates) sum = silu(sum);
        part.out[at] = part.gate_out ? __fmul_rn(sum, part.gate_out[at]) : sum;
    }

    // In order, so that none is overwritten before it is read.
    __device__ __forceinline__ void keep() const {
        const unsigned past = part.kernel - 1;
        for (unsigned i = 0; i < past; i++) {
            const unsigned source = i + request.num_rows;
            const float x = source < past ? kept(source) : input(request.first_row + source - past);
            state[size_t(i) * part.num_channels] = x;
        }
    }
};

// A warp's rows of a state: row i of N / WARPS is `warp * N / WARPS + i`, of which `count` are there.
template <unsigned N>
struct State {
    static constexpr unsigned ROWS = N / WARPS;
    float of[ROWS];

    __device__ __forceinline__ void load(const float* from, unsigned stride, unsigned count, bool is_there) {
#pragma unroll
        for (unsigned i = 0; i < ROWS; i++) of[i] = is_there && i < count ? from[size_t(i) * stride] : 0.0f;
    }
    __device__ __forceinline__ void store(float* to, unsigned stride, unsigned count) const {
#pragma unroll
        for (unsigned i = 0; i < ROWS; i++) {
            if (i < count) to[size_t(i) * stride] = of[i];
        }
    }
};

// What a CTA keeps of a request: 32 columns of a head's state, [rows, cols], a column a lane and some rows a warp.
template <unsigned N>
struct Slice {
    unsigned head, column, count;
    bool is_there;
    float* kept;
    State<N> state;

    template <class Args>
    __device__ __forceinline__ Slice(const Args& args, const RecurrentRequest& request, unsigned rows, unsigned cols) {
        const unsigned slices = (cols + COLUMNS - 1) / COLUMNS, first = threadIdx.x / 32 * State<N>::ROWS;
        head = blockIdx.x / slices, column = blockIdx.x % slices * COLUMNS + threadIdx.x % 32;
        is_there = column < cols;
        count = first < rows ? min(rows - first, State<N>::ROWS) : 0;
        kept = args.states + request.slot * args.slot_stride + (size_t(head) * rows + first) * cols + column;
        state.load(kept, cols, count, is_there && !request.begins);
    }
    __device__ __forceinline__ void store(unsigned cols) const {
        if (is_there) state.store(kept, cols, count);
    }
};

// What the warps have summed, in their order.
__device__ __forceinline__ float sum_of_warps(const float (&parts)[WARPS][COLUMNS], unsigned lane, float sum) {
#pragma unroll
    for (unsigned warp = 0; warp < WARPS; warp++) sum += parts[warp][lane];
    return sum;
}

template <unsigned N>
struct MambaShared {
    float b[TOKENS][N], c[TOKENS][N];
    float sums[TOKENS][WARPS][COLUMNS];
    float step[TOKENS][COLUMNS], change[TOKENS][COLUMNS];
};

// Copies a vector, zeros behind its end, and norms it where there are weights; by a warp.
template <unsigned N>
__device__ __forceinline__ void rms_normed(const float* from, unsigned len, const float* weight, float eps, float (&to)[N]) {
    const unsigned lane = threadIdx.x % 32;
    float squares = 0.0f;
    for (unsigned i = lane; i < N; i += 32) {
        to[i] = i < len ? from[i] : 0.0f;
        squares = fmaf(to[i], to[i], squares);
    }
    if (!weight) return;
    const float scale = 1.0f / sqrtf(warp_sum(squares) / float(len) + eps);
    for (unsigned i = lane; i < len; i += 32) to[i] *= scale * weight[i];
}

template <unsigned N>
__device__ void mamba(const MambaArgs& args) {
    constexpr unsigned ROWS = State<N>::ROWS;
    SHARED_MEMORY(memory);
    auto& shared = *reinterpret_cast<MambaShared<N>*>(memory);
    const RecurrentRequest request = args.requests[blockIdx.y];
    if (request.slot == NO_SLOT) return;
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, width = args.num_channels;
    Slice<N> slice(args, request, args.state_dim, width);
    State<N>& state = slice.state;
    const unsigned column = slice.column;
    const bool is_there = slice.is_there;
    State<N> a;
    a.load(args.a + size_t(warp) * ROWS * width + column, width, slice.count, is_there);
    for (unsigned first = 0; first < request.num_rows; first += TOKENS) {
        const unsigned tokens = min(request.num_rows - first, TOKENS);
        const size_t row = request.first_row + first + warp;
        float x = 0.0f;
        if (warp < tokens) {
            rms_normed(args.b + row * args.state_dim, args.state_dim, args.b_norm, args.b_eps, shared.b[warp]);
            rms_normed(args.c + row * args.state_dim, args.state_dim, args.c_norm, args.c_eps, shared.c[warp]);
            x = is_there ? args.x[row * width + column] : 0.0f;
            const float step = is_there ? softplus(args.dt[row * width + column]) : 0.0f;
            shared.step[warp][lane] = step;
            shared.change[warp][lane] = step * x;
        }
        __syncthreads();
        // As one body, so that all tokens are computed by the same instructions.
#pragma unroll 1
        for (unsigned token = 0; token < tokens; token++) {
            const float step = shared.step[token][lane], change = shared.change[token][lane];
            float sum = 0.0f;
#pragma unroll
            for (unsigned i = 0; i < ROWS; i++) {
                state.of[i] = fmaf(shared.b[token][warp * ROWS + i], change, state.of[i] * expf(step * a.of[i]));
                sum = fmaf(state.of[i], shared.c[token][warp * ROWS + i], sum);
            }
            shared.sums[token][warp][lane] = sum;
        }
        __syncthreads();
        if (warp < tokens && is_there) {
            const float sum = sum_of_warps(shared.sums[warp], lane, __fmul_rn(args.d[column], x));
            args.out[row * width + column] = __fmul_rn(sum, silu(args.z[row * width + column]));
        }
    }
    slice.store(width);
}

template <unsigned N>
struct Mamba2Shared {
    float b[TOKENS][N], c[TOKENS][N];
    float sums[TOKENS][WARPS][COLUMNS];
    float x[TOKENS][COLUMNS];
    float step[TOKENS], decay[TOKENS];
};

template <unsigned N>
__device__ void mamba2(const Mamba2Args& args) {
    constexpr unsigned ROWS = State<N>::ROWS;
    SHARED_MEMORY(memory);
    auto& shared = *reinterpret_cast<Mamba2Shared<N>*>(memory);
    const RecurrentRequest request = args.requests[blockIdx.y];
    if (request.slot == NO_SLOT) return;
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Slice<N> slice(args, request, args.state_dim, args.head_dim);
    State<N>& state = slice.state;
    const unsigned head = slice.head, column = slice.column;
    const bool is_there = slice.is_there;
    const unsigned width = args.num_heads * args.head_dim, group = head * args.num_groups / args.num_heads;
    const unsigned channels = width + 2 * args.num_groups * args.state_dim;
    for (unsigned first = 0; first < request.num_rows; first += TOKENS) {
        const unsigned tokens = min(request.num_rows - first, TOKENS);
        const size_t row = request.first_row + first + warp;
        if (warp < tokens) {
            const float* x = args.xbc + row * channels;
            const float* b = x + width + group * args.state_dim;
            const float* c = b + args.num_groups * args.state_dim;
            // Not all loads at once: beside the state they take more registers than there are on sm_120.
#pragma unroll 2
            for (unsigned n = lane; n < N; n += 32) {
                shared.b[warp][n] = n < args.state_dim ? b[n] : 0.0f;
                shared.c[warp][n] = n < args.state_dim ? c[n] : 0.0f;
            }
            shared.x[warp][lane] = is_there ? x[head * args.head_dim + column] : 0.0f;
            if (lane == 0) {
                const float step = softplus(fmaf(args.dt[row * args.num_heads + head], args.dt_scale, args.dt_bias[head]));
                shared.step[warp] = fminf(fmaxf(step, args.dt_min), args.dt_max);
                shared.decay[warp] = expf(shared.step[warp] * args.a[head]);
            }
        }
        __syncthreads();
        // As one body, so that all tokens are computed by the same instructions.
#pragma unroll 1
        for (unsigned token = 0; token < tokens; token++) {
            const float decay = shared.decay[token], change = shared.step[token] * shared.x[token][lane];
            float sum = 0.0f;
#pragma unroll
            for (unsigned i = 0; i < ROWS; i += 4) {
                const float4 b = *reinterpret_cast<const float4*>(&shared.b[token][warp * ROWS + i]);
                const float4 c = *reinterpret_cast<const float4*>(&shared.c[token][warp * ROWS + i]);
                state.of[i] = fmaf(b.x, change, state.of[i] * decay);
                state.of[i + 1] = fmaf(b.y, change, state.of[i + 1] * decay);
                state.of[i + 2] = fmaf(b.z, change, state.of[i + 2] * decay);
                state.of[i + 3] = fmaf(b.w, change, state.of[i + 3] * decay);
                sum = fmaf(state.of[i], c.x, sum);
                sum = fmaf(state.of[i + 1], c.y, sum);
                sum = fmaf(state.of[i + 2], c.z, sum);
                sum = fmaf(state.of[i + 3], c.w, sum);
            }
            shared.sums[token][warp][lane] = sum;
        }
        __syncthreads();
        if (warp < tokens && is_there) {
            const float own = __fmul_rn(args.d[head], shared.x[warp][lane]);
            args.out[row * width + head * args.head_dim + column] = sum_of_warps(shared.sums[warp], lane, own);
        }
    }
    slice.store(args.head_dim);
}

template <unsigned N, unsigned DECAYS>
struct GatedDeltaShared {
    float q[TOKENS][N], k[TOKENS][N];
    float decays[TOKENS][DECAYS];
    float sums[TOKENS][WARPS][COLUMNS];
    float known[2][WARPS][COLUMNS];
    float v[TOKENS][COLUMNS];
    float beta[TOKENS];
};

// Makes a vector one of length `scale`, zeros behind its end; by a warp.
template <unsigned N>
__device__ __forceinline__ void unit(const float* from, unsigned len, float scale, float (&to)[N]) {
    const unsigned lane = threadIdx.x % 32;
    float x[N / 32], squares = 0.0f;
#pragma unroll
    for (unsigned i = 0; i < N / 32; i++) {
        x[i] = i * 32 + lane < len ? from[i * 32 + lane] : 0.0f;
        squares = fmaf(x[i], x[i], squares);
    }
    scale /= sqrtf(warp_sum(squares) + 1e-6f);
#pragma unroll
    for (unsigned i = 0; i < N / 32; i++) to[i * 32 + lane] = x[i] * scale;
}

// DECAYS: N with a decay for each row of a state, 4 with one for all.
template <unsigned N, unsigned DECAYS>
__device__ void gated_delta(const GatedDeltaArgs& args) {
    constexpr unsigned ROWS = State<N>::ROWS;
    constexpr bool BY_ROW = DECAYS == N;
    SHARED_MEMORY(memory);
    auto& shared = *reinterpret_cast<GatedDeltaShared<N, DECAYS>*>(memory);
    const RecurrentRequest request = args.requests[blockIdx.y];
    if (request.slot == NO_SLOT) return;
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Slice<N> slice(args, request, args.key_dim, args.value_dim);
    State<N>& state = slice.state;
    const unsigned head = slice.head, column = slice.column;
    const bool is_there = slice.is_there;
    const unsigned key_head = args.is_grouped ? head * args.num_key_heads / args.num_value_heads : head % args.num_key_heads;
    for (unsigned first = 0; first < request.num_rows; first += TOKENS) {
        const unsigned tokens = min(request.num_rows - first, TOKENS);
        const size_t row = request.first_row + first + warp;
        const size_t value = (row * args.num_value_heads + head) * args.value_dim + column;
        if (warp < tokens) {
            const size_t key = (row * args.num_key_heads + key_head) * args.key_dim, rate = row * args.num_value_heads + head;
            unit(args.q + key, args.key_dim, 1.0f / sqrtf(float(args.key_dim)), shared.q[warp]);
            unit(args.k + key, args.key_dim, 1.0f, shared.k[warp]);
            shared.v[warp][lane] = is_there ? args.v[value] : 0.0f;
            if (lane == 0) shared.beta[warp] = args.beta_scale * sigmoid(args.b[rate]);
            if constexpr (BY_ROW) {
                const float* dt = args.dt + rate * args.key_dim;
                const float* bias = args.dt_bias + size_t(head) * args.key_dim;
                for (unsigned i = lane; i < N; i += 32) {
                    shared.decays[warp][i] = i < args.key_dim ? expf(softplus(dt[i] + bias[i]) * args.a[head]) : 0.0f;
                }
            } else if (lane == 0) {
                shared.decays[warp][0] = expf(softplus(args.dt[rate] + args.dt_bias[head]) * args.a[head]);
            }
        }
        __syncthreads();
        // As one body, so that all tokens are computed by the same instructions.
#pragma unroll 1
        for (unsigned token = 0; token < tokens; token++) {
            const float decay = shared.decays[token][0];
            float known = 0.0f, sum = 0.0f;
#pragma unroll
            for (unsigned i = 0; i < ROWS; i += 4) {
                const float4 k = *reinterpret_cast<const float4*>(&shared.k[token][warp * ROWS + i]);
                float4 by = make_float4(decay, decay, decay, decay);
                if constexpr (BY_ROW) by = *reinterpret_cast<const float4*>(&shared.decays[token][warp * ROWS + i]);
                state.of[i] *= by.x;
                state.of[i + 1] *= by.y;
                state.of[i + 2] *= by.z;
                state.of[i + 3] *= by.w;
                known = fmaf(state.of[i], k.x, known);
                known = fmaf(state.of[i + 1], k.y, known);
                known = fmaf(state.of[i + 2], k.z, known);
                known = fmaf(state.of[i + 3], k.w, known);
            }
            // Two places in turn: one barrier a token is enough.
            shared.known[token % 2][warp][lane] = known;
            __syncthreads();
            const float change = shared.beta[token] * (shared.v[token][lane] - sum_of_warps(shared.known[token % 2], lane, 0.0f));
#pragma unroll
            for (unsigned i = 0; i < ROWS; i += 4) {
                const float4 k = *reinterpret_cast<const float4*>(&shared.k[token][warp * ROWS + i]);
                const float4 q = *reinterpret_cast<const float4*>(&shared.q[token][warp * ROWS + i]);
                state.of[i] = fmaf(k.x, change, state.of[i]);
                state.of[i + 1] = fmaf(k.y, change, state.of[i + 1]);
                state.of[i + 2] = fmaf(k.z, change, state.of[i + 2]);
                state.of[i + 3] = fmaf(k.w, change, state.of[i + 3]);
                sum = fmaf(state.of[i], q.x, sum);
                sum = fmaf(state.of[i + 1], q.y, sum);
                sum = fmaf(state.of[i + 2], q.z, sum);
                sum = fmaf(state.of[i + 3], q.w, sum);
            }
            shared.sums[token][warp][lane] = sum;
        }
        __syncthreads();
        if (warp < tokens && is_there) args.out[value] = sum_of_warps(shared.sums[warp], lane, 0.0f);
    }
    slice.store(args.value_dim);
}

}  // namespace

KERNEL(causal_conv, CausalConvArgs, CHANNELS, 0) {
    const ConvPart& part = target_of_cta(args.parts, args.parts[1].first_cta, args.parts[2].first_cta);
    const unsigned channel = (blockIdx.x - part.first_cta) * CHANNELS + threadIdx.x;
    if (channel >= part.num_channels) return;
    const unsigned first = blockIdx.y * args.rows_per_cta, end = min(first + args.rows_per_cta, args.num_rows);
    const unsigned past = part.kernel - 1;
    for (unsigned row = first; row < end; row++) {
        const RecurrentRequest request = args.requests[args.row_requests[row]];
        if (request.slot == NO_SLOT) continue;
        const Channel own{part, request, part.state + request.slot * args.slot_stride + channel, channel};
        // Who has a request's first row computes all those that read the state as well, and then replaces it.
        const unsigned done = row - request.first_row;
        const unsigned count = done == 0 ? min(request.num_rows, max(past, 1u)) : done >= past ? 1 : 0;
        for (unsigned i = 0; i < count; i++) own.compute(row + i);
        if (done == 0) own.keep();
    }
}

// CTAS fit a multiprocessor, so that more of the states are on their way.
#define MAMBA(N, CTAS)                                                                      \
    WEIGHT_KERNEL(mamba_##N, MambaArgs, WARPS * 32, sizeof(MambaShared<N>), CTAS) {         \
        wait_for_inputs();                                                                  \
        mamba<N>(args);                                                                     \
    }
MAMBA(16, 4)
// Beside a state its rates are in registers.
MAMBA(128, 1)
MAMBA(256, 1)

#define DELTA(NAME, N, DECAYS, CTAS)                                                                    \
    WEIGHT_KERNEL(NAME, GatedDeltaArgs, WARPS * 32, sizeof(GatedDeltaShared<N, DECAYS>), CTAS) {        \
        wait_for_inputs();                                                                              \
        gated_delta<N, DECAYS>(args);                                                                   \
    }
#define SCANS(N, CTAS)                                                                              \
    WEIGHT_KERNEL(mamba2_##N, Mamba2Args, WARPS * 32, sizeof(Mamba2Shared<N>), CTAS) {              \
        wait_for_inputs();                                                                          \
        mamba2<N>(args);                                                                            \
    }                                                                                               \
    DELTA(gated_delta_##N, N, 4, CTAS)                                                              \
    DELTA(kimi_delta_##N, N, N, CTAS)
SCANS(128, 3)
SCANS(256, 2)

KERNEL(gated_norm, GatedNormArgs, NORM_THREADS, NORM_THREADS / 32 * 4) {
    SHARED_MEMORY(shared);
    const unsigned group = blockIdx.x % args.num_groups;
    const size_t at = size_t(blockIdx.x) * args.group_dim;
    float* x = args.x + at;
    const float* z = args.z + at;
    const auto gate = [&](unsigned i) {
        const float own = z[i] * args.z_scale;
        return args.is_sigmoid ? sigmoid(own) : silu(own);
    };
    if (!args.weight) {
        for (unsigned i = threadIdx.x; i < args.group_dim; i += NORM_THREADS) x[i] *= gate(i);
        return;
    }
    const float* weight = args.weight + size_t(group) * args.weight_stride;
    float squares = 0.0f;
    for (unsigned i = threadIdx.x; i < args.group_dim; i += NORM_THREADS) {
        const float own = args.gates_first ? __fmul_rn(x[i], gate(i)) : x[i];
        if (args.gates_first) x[i] = own;
        squares = fmaf(own, own, squares);
    }
    const float scale = 1.0f / sqrtf(cta_sum(squares, reinterpret_cast<float*>(shared)) / args.group_dim + args.eps);
    for (unsigned i = threadIdx.x; i < args.group_dim; i += NORM_THREADS) {
        const float own = x[i] * scale * weight[i];
        x[i] = args.gates_first ? own : own * gate(i);
    }
}

KERNEL(attention_gate, AttentionGateArgs, 256, 0) {
    const uint64_t first = uint64_t(blockIdx.x) * GATED + threadIdx.x;
    for (uint64_t i = first; i < first + GATED && i < args.count; i += 256) {
        const float gate = args.gate[i / args.group];
        args.x[i] *= args.is_softplus ? softplus(gate) : sigmoid(gate);
    }
}

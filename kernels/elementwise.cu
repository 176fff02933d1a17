// The small steps between matrix products, a trip through memory each.
//
//   rms_norm, layer_norm   CTA: a row of [num_rows, cols]; thread i: elements 4 i, 4 (i + 256), ...
//     x += post_norm(y) * y_scale        12 bytes an element when y is given
//     out = norm(x)                      4 + 2 (or 4) bytes an element; up to 4096 columns of x are in registers by then
//     norm(x) = (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias, where rms_norm takes 0 for the mean
//   gated_activation  CTA (c, row): elements 1024 c .. 1024 c + 1024; 10 bytes an element for a 16-bit out, 4 less without up
//   gather_rows       CTA: a row; 8 bytes an element
//   round_values      thread i: elements 4 i .. 4 i + 4 of a flat list; 6 bytes an element
//   fill_bias         CTA: a row; 4 bytes an element, 8 when it is added
//   scale_and_clamp   thread i: elements 4 i .. 4 i + 4 of a flat list; 8 bytes an element
//   layer_inputs      warp: a part of a row; 12 bytes an element
//
// All wait for memory: 4096 rows of 4096 elements through rms_norm with y are 0.3 GB, at 4.3 TB/s 70 us; a step of few rows is
// one launch.
#include "cuda.cuh"

namespace {

constexpr unsigned THREADS = 256;

// A row, of which a thread has elements 4 i .. 4 i + 4, 4 (i + 256) .. : the first of them in registers, so that they are read
// once, and what is beyond 4096 columns in memory.
constexpr unsigned HELD = 4;
struct Row {
    float4 held[HELD];

    __device__ __forceinline__ void load(const float* from, uint32_t cols) {
#pragma unroll
        for (unsigned j = 0; j < HELD; j++) {
            const uint32_t i = (j * THREADS + threadIdx.x) * 4;
            held[j] = i < cols ? load_four(from + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }
    // What a thread has of the row, to `with(j, place, elements)`: j-th of those in registers, or HELD; `from` is where all lies.
    template <class With>
    __device__ __forceinline__ void each(const float* from, uint32_t cols, const With& with) {
#pragma unroll
        for (unsigned j = 0; j < HELD; j++) {
            const uint32_t i = (j * THREADS + threadIdx.x) * 4;
            if (i < cols) with(j, i, held[j]);
        }
        for (uint32_t i = (HELD * THREADS + threadIdx.x) * 4; i < cols; i += THREADS * 4) {
            float4 x = load_four(from + i);
            with(HELD, i, x);
        }
    }
};

// A norm over one row, before weight and bias: (x - mean) * factor.
struct Moments {
    float mean, factor;
};

// Those of a row, in every thread.
template <bool HAS_MEAN>
__device__ Moments moments(Row& row, const float* from, uint32_t cols, float eps, float* scratch) {
    float mean = 0.0f;
    if constexpr (HAS_MEAN) {
        float sum = 0.0f;
        row.each(from, cols, [&](unsigned, uint32_t, const float4& x) { sum += x.x + x.y + x.z + x.w; });
        mean = cta_sum(sum, scratch) / cols;
    }
    float squares = 0.0f;
    row.each(from, cols, [&](unsigned, uint32_t, const float4& x) {
        const float a = x.x - mean, b = x.y - mean, c = x.z - mean, d = x.w - mean;
        squares += a * a + b * b + c * c + d * d;
    });
    return {mean, 1.0f / sqrtf(cta_sum(squares, scratch) / cols + eps)};
}

// Weight and bias of a norm: [cols] each, or null for ones and zeros.
struct Affine {
    const float* weight;
    const float* bias;

    __device__ __forceinline__ float4 weights(uint32_t i) const {
        return weight ? load_four(weight + i) : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
    }
    // Elements i .. i + 4 of a row, normed.
    __device__ __forceinline__ float4 operator()(float4 x, float4 w, uint32_t i, Moments m) const {
        const float4 b = bias ? load_four(bias + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        return make_float4((x.x - m.mean) * m.factor * w.x + b.x, (x.y - m.mean) * m.factor * w.y + b.y,
                           (x.z - m.mean) * m.factor * w.z + b.z, (x.w - m.mean) * m.factor * w.w + b.w);
    }
};

template <bool HAS_MEAN>
__device__ void norm(const NormArgs& args) {
    SHARED_MEMORY(shared);
    float* scratch = reinterpret_cast<float*>(shared);
    const size_t first = size_t(blockIdx.x) * args.cols;
    float* x = args.x + first;
    // Weights are the model's, so they are on their way while the kernel before this one ends.
    const Affine affine{args.weight, args.bias};
    Row weights = {};
    if (args.weight) weights.load(args.weight, args.cols);
    wait_for_inputs();
    Row row;
    row.load(x, args.cols);
    if (args.y) {
        const float* y = args.y + first;
        Row added;
        added.load(y, args.cols);
        const Affine post{args.post_weight, args.post_bias};
        const Moments m = args.post_weight ? moments<HAS_MEAN>(added, y, args.cols, args.post_eps, scratch) : Moments{0.0f, 1.0f};
        row.each(x, args.cols, [&](unsigned j, uint32_t i, float4& a) {
            const float4 b = post(j < HELD ? added.held[j] : load_four(y + i), post.weights(i), i, m);
            a = make_float4(a.x + b.x * args.y_scale, a.y + b.y * args.y_scale, a.z + b.z * args.y_scale, a.w + b.w * args.y_scale);
            *reinterpret_cast<float4*>(x + i) = a;
        });
    }
    if (!args.weight) return;
    const Moments m = moments<HAS_MEAN>(row, x, args.cols, args.eps, scratch);
    row.each(x, args.cols, [&](unsigned j, uint32_t i, const float4& a) {
        const float4 w = j < HELD ? weights.held[j] : load_four(args.weight + i);
        store_four_as(args.out_type, args.out, first + i, affine(a, w, i, m));
    });
}

__device__ float activate(const GatedActivationArgs& args, float x) {
    const uint32_t activation = args.activation;
    if (activation == ACTIVATION_SILU) return silu(x);
    if (activation == ACTIVATION_IDENTITY) return x;
    if (activation == ACTIVATION_GELU_TANH) return 0.5f * x * (1.0f + tanhf(0.797884561f * (x + 0.044715f * x * x * x)));
    if (activation == ACTIVATION_SWISH) return x / (1.0f + expf(-args.alpha * x));
    if (activation == ACTIVATION_RELU) return x < 0.0f ? 0.0f : x;
    if (activation == ACTIVATION_RELU2) return x < 0.0f ? 0.0f : x * x;
    if (activation == ACTIVATION_XIELU) {
        const float curved = x > 0.0f ? args.positive * x * x : args.negative * (expm1f(x < args.eps ? x : args.eps) - x);
        return curved + args.linear * x;
    }
    // 1 + erf loses all digits of a large negative x.
    return 0.5f * x * erfcf(x * -0.707106781f);
}

__device__ float gated(const GatedActivationArgs& args, float gate, float up) {
    if (args.activation != ACTIVATION_CLAMPED) return activate(args, gate) * up;
    const float g = fminf(gate, args.limit), u = fminf(fmaxf(up, -args.limit), args.limit);
    return (u + 1.0f) * g / (1.0f + expf(-args.alpha * g));
}

}  // namespace

WEIGHT_KERNEL(rms_norm, NormArgs, THREADS, THREADS / 32 * 4, 1) { norm<false>(args); }
WEIGHT_KERNEL(layer_norm, NormArgs, THREADS, THREADS / 32 * 4, 1) { norm<true>(args); }

KERNEL(gated_activation, GatedActivationArgs, THREADS, 0) {
    const uint32_t at = (blockIdx.x * THREADS + threadIdx.x) * 4;
    if (at >= args.cols) return;
    const size_t row = blockIdx.y;
    float4 gate = load_four(args.gate + row * args.gate_stride + at);
    float4 up = args.up ? load_four(args.up + row * args.up_stride + at) : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
    if (args.weights) {
        const float by = args.weights[row];
        gate = make_float4(gate.x * by, gate.y * by, gate.z * by, gate.w * by);
        up = make_float4(up.x * by, up.y * by, up.z * by, up.w * by);
    }
    store_four_as(args.out_type, args.out, row * args.cols + at,
              make_float4(gated(args, gate.x, up.x), gated(args, gate.y, up.y), gated(args, gate.z, up.z), gated(args, gate.w, up.w)));
}

KERNEL(gather_rows, GatherRowsArgs, THREADS, 0) {
    const float* from = args.x + size_t(args.rows[blockIdx.x]) * args.cols;
    float* to = args.out + size_t(blockIdx.x) * args.cols;
    for (uint32_t i = threadIdx.x * 4; i < args.cols; i += THREADS * 4) *reinterpret_cast<float4*>(to + i) = load_four(from + i);
}

// What a matrix product of 16 bits reads; values that f16 does not reach become its largest.
KERNEL(round_values, RoundValuesArgs, THREADS, 0) {
    const size_t at = (size_t(blockIdx.x) * THREADS + threadIdx.x) * 4;
    if (at >= args.count) return;
    float4 x = load_four(args.x + at);
    if (args.out_type == ELEMENT_F16) {
        x = make_float4(within_f16(x.x), within_f16(x.y), within_f16(x.z), within_f16(x.w));
    }
    store_four_as(args.out_type, args.out, at, x);
}

KERNEL(scale_and_clamp, ScaleAndClampArgs, THREADS, 0) {
    const size_t at = (size_t(blockIdx.x) * THREADS + threadIdx.x) * 4;
    // Comparisons leave NaN as it is.
    const auto bounded = [&](float x) {
        x *= args.scale;
        x = x < args.least ? args.least : x;
        return x > args.most ? args.most : x;
    };
    if (at + 4 <= args.count) {
        const float4 x = load_four(args.x + at);
        *reinterpret_cast<float4*>(args.x + at) = make_float4(bounded(x.x), bounded(x.y), bounded(x.z), bounded(x.w));
    } else {
        for (size_t i = at; i < args.count; i++) args.x[i] = bounded(args.x[i]);
    }
}

KERNEL(layer_inputs, LayerInputsArgs, THREADS, 0) {
    const unsigned lane = threadIdx.x % 32;
    const uint32_t part = blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    if (part >= args.num_parts) return;
    float* x = args.x + size_t(part) * args.width;
    const float* tokens = args.tokens + size_t(part) * args.width;
    float squares = 0.0f;
    for (uint32_t i = lane; i < args.width; i += 32) squares += x[i] * x[i];
    const float factor = 1.0f / sqrtf(warp_sum(squares) / args.width + args.eps);
    for (uint32_t i = lane; i < args.width; i += 32) x[i] = (x[i] * factor * args.weight[i] + tokens[i]) * args.scale;
}

KERNEL(fill_bias, FillBiasArgs, THREADS, 0) {
    float* out = args.out + size_t(blockIdx.x) * args.cols;
    for (uint32_t i = threadIdx.x; i < args.cols; i += THREADS) {
        const float bias = args.bias[i] * args.scale;
        out[i] = args.accumulate ? out[i] + bias : bias;
    }
}

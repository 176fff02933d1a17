// Adapters: what they make of the products and token embeddings of their rows (LoRA, DoRA, weights in the place of others). Rows
// without an adapter are not touched.
//
//   lora_keep    CTA (c, place): columns 1024 c .. 1024 c + 1024 of a row that is to be added to: where the adapter must see the
//                product alone, the row is put aside and becomes zeros before the product is added. 12 bytes a value
//   lora_shrink  CTA (k, tile, target): rows 4 k .. 4 k + 4 of a, for up to 8 rows; thread i: columns 4 i, 4 (i + 256), ...
//                low = x a^T, or the output where there is no b. 4 bytes a value of a, read once for a tile
//   lora_expand  CTA (n, tile, target): columns 256 n .. 256 n + 256 of the outputs, for up to 8 rows; thread i: column 256 n + i
//                out += low b. 4 bytes a value of b, read once for a tile
//   lora_embed   CTA (n, place): columns 256 n .. 256 n + 256 of a row
//
// A tile is up to 8 rows of one adapter, or of experts a row and one of its choices. All sums run in one order that the layer's
// width decides, so a row has the same bits beside any others and at any place of a tile. A rank of 16 of 4096 columns is 256 KB
// of each factor: a launch and what L2 or memory takes to answer, twice a phase.
#include "cuda.cuh"

namespace {

constexpr unsigned WARPS = 8;
constexpr unsigned THREADS = WARPS * 32;
constexpr unsigned ROWS = 8;  // of a tile
constexpr unsigned RANKS = 4; // of a CTA of lora_shrink
constexpr unsigned CHUNK = 64; // ranks that lora_expand has in shared memory at once

// What the row's adapter does to a layer, or null.
__device__ __forceinline__ const LoraDelta* delta_of(const LoraRow& row, uint32_t site) {
    if (site >= row.num_sites) return nullptr;
    const LoraDelta* delta = row.deltas + site;
    return delta->a ? delta : nullptr;
}

// Whether an adapter must see the product alone that is to be added to a row.
__device__ __forceinline__ bool is_kept(const LoraDelta& delta) { return delta.factors || !delta.b; }

// Rows of a CTA, which have one adapter.
struct Job {
    const LoraArgs& args;
    const LoraTarget& target;
    const LoraDelta* delta;   // null: nothing to do
    unsigned first, num_rows; // places in `low`, and in the list of rows where there are no choices
    unsigned x, out;          // of an expert: its rows

    __device__ __forceinline__ explicit Job(const LoraArgs& args)
        : args(args), target(args.targets[blockIdx.z]), delta(nullptr), first(blockIdx.y), num_rows(1), x(0), out(0) {
        if (args.chosen) {
            const LoraRow& row = args.rows[blockIdx.y / args.num_chosen];
            if (row.num_sites == 0) return;
            out = row.row * args.num_chosen + blockIdx.y % args.num_chosen, x = args.has_own_x ? out : row.row;
            delta = delta_of(row, target.sites[args.chosen[out]]);
        } else {
            const LoraTile tile = args.tiles[blockIdx.y];
            first = tile.first_row, num_rows = tile.num_rows;
            if (num_rows) delta = delta_of(args.rows[first], target.site);
        }
    }
    __device__ __forceinline__ const float* x_row(unsigned row) const {
        return args.x + size_t(args.chosen ? x : args.rows[first + row].row) * args.in_features;
    }
    __device__ __forceinline__ float* out_row(unsigned row) const {
        return target.out + size_t(args.chosen ? out : args.rows[first + row].row) * target.out_features;
    }
    __device__ __forceinline__ float* low_row(unsigned row) const {
        return args.low + (size_t(blockIdx.z) * args.num_low + first + row) * args.low_stride;
    }
    // What was put aside of column n.
    __device__ __forceinline__ float kept(unsigned row, unsigned n) const {
        return args.kept && is_kept(*delta) ? args.kept[size_t(first + row) * target.out_features + n] : 0.0f;
    }
};

}  // namespace

KERNEL(lora_keep, LoraArgs, THREADS, 0) {
    const LoraTarget& target = args.targets[0];
    const LoraRow& row = args.rows[blockIdx.y];
    const LoraDelta* delta = delta_of(row, target.site);
    const unsigned column = (blockIdx.x * THREADS + threadIdx.x) * 4;
    if (!delta || !is_kept(*delta) || column >= target.out_features) return;
    float4* out = reinterpret_cast<float4*>(target.out + size_t(row.row) * target.out_features + column);
    *reinterpret_cast<float4*>(args.kept + size_t(blockIdx.y) * target.out_features + column) = *out;
    *out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

KERNEL(lora_shrink, LoraArgs, THREADS, WARPS * RANKS * ROWS * 4) {
    SHARED_MEMORY(shared);
    float* merge = reinterpret_cast<float*>(shared);
    const Job job(args);
    const unsigned first = blockIdx.x * RANKS;
    if (!job.delta || first >= job.delta->rank) return;
    const LoraDelta& delta = *job.delta;
    float sums[RANKS][ROWS] = {};
    for (unsigned column = threadIdx.x * 4; column < args.in_features; column += THREADS * 4) {
        float4 a[RANKS];
#pragma unroll
        for (unsigned k = 0; k < RANKS; k++) {
            a[k] = load_four(delta.a + size_t(min(first + k, delta.rank - 1)) * args.in_features + column);
        }
#pragma unroll
        for (unsigned row = 0; row < ROWS; row++) {
            if (row >= job.num_rows) continue;
            const float4 x = load_four(job.x_row(row) + column);
#pragma unroll
            for (unsigned k = 0; k < RANKS; k++) {
                sums[k][row] += x.x * a[k].x, sums[k][row] += x.y * a[k].y;
                sums[k][row] += x.z * a[k].z, sums[k][row] += x.w * a[k].w;
            }
        }
    }
#pragma unroll
    for (unsigned row = 0; row < ROWS; row++) {
        if (row >= job.num_rows) continue;
#pragma unroll
        for (unsigned k = 0; k < RANKS; k++) {
            const float sum = warp_sum(sums[k][row]);
            if (threadIdx.x % 32 == 0) merge[(threadIdx.x / 32 * RANKS + k) * ROWS + row] = sum;
        }
    }
    __syncthreads();
    const unsigned place = threadIdx.x / ROWS, row = threadIdx.x % ROWS, k = first + place;
    if (place >= RANKS || k >= delta.rank || row >= job.num_rows) return;
    float sum = 0.0f;
    for (unsigned warp = 0; warp < WARPS; warp++) sum += merge[(warp * RANKS + place) * ROWS + row];
    if (delta.b) {
        job.low_row(row)[k] = sum;
    } else {
        const unsigned n = delta.ids ? delta.ids[k] : k;
        if (delta.bias) sum += delta.bias[k];
        job.out_row(row)[n] = job.kept(row, n) + sum * args.scale;
    }
}

KERNEL(lora_expand, LoraArgs, THREADS, ROWS * CHUNK * 4) {
    SHARED_MEMORY(shared);
    float* low = reinterpret_cast<float*>(shared);
    const Job job(args);
    const unsigned width = job.target.out_features, n = blockIdx.x * THREADS + threadIdx.x;
    if (!job.delta || !job.delta->b || blockIdx.x * THREADS >= width) return;
    const LoraDelta& delta = *job.delta;
    float sums[ROWS] = {};
    for (unsigned first = 0; first < delta.rank; first += CHUNK) {
        const unsigned count = min(CHUNK, delta.rank - first);
        __syncthreads();
        for (unsigned i = threadIdx.x; i < job.num_rows * CHUNK; i += THREADS) {
            if (i % CHUNK < count) low[i] = job.low_row(i / CHUNK)[first + i % CHUNK];
        }
        __syncthreads();
        if (n >= width) continue;
        const float* b = delta.b + size_t(first) * width + n;
#pragma unroll 4
        for (unsigned k = 0; k < count; k++) {
            const float value = b[size_t(k) * width];
#pragma unroll
            for (unsigned row = 0; row < ROWS; row++) {
                if (row < job.num_rows) sums[row] += low[row * CHUNK + k] * value;
            }
        }
    }
    if (n >= width) return;
    const float own = delta.own_bias ? delta.own_bias[n] * args.scale : 0.0f, bias = delta.bias ? delta.bias[n] : 0.0f;
#pragma unroll
    for (unsigned row = 0; row < ROWS; row++) {
        if (row >= job.num_rows) continue;
        float* out = job.out_row(row) + n;
        float value = *out;
        if (delta.factors) value = (value - own) * delta.factors[n] + own;
        *out = job.kept(row, n) + (value + (sums[row] + bias) * args.scale);
    }
}

KERNEL(lora_embed, LoraEmbedArgs, THREADS, 0) {
    const LoraRow& row = args.rows[blockIdx.y];
    const unsigned n = blockIdx.x * THREADS + threadIdx.x;
    if (row.num_sites == 0 || !row.embedding || n >= args.cols) return;
    const LoraEmbedding& embedding = *row.embedding;
    const uint32_t id = args.token_ids[row.row];
    float* out = args.out + size_t(row.row) * args.cols + n;
    float value = embedding.table ? embedding.table[size_t(id) * args.cols + n] * args.scale : *out;
    if (embedding.a) {
        float sum = 0.0f;
        for (unsigned k = 0; k < embedding.rank; k++) {
            sum += embedding.a[size_t(id) * embedding.rank + k] * embedding.b[size_t(k) * args.cols + n];
        }
        value += sum * args.scale;
    }
    // The first id that is not below the token's.
    unsigned from = 0, to = embedding.num_ids;
    while (from < to) {
        const unsigned middle = (from + to) / 2;
        if (embedding.ids[middle] < id) from = middle + 1; else to = middle;
    }
    if (from < embedding.num_ids && embedding.ids[from] == id) value = embedding.rows[size_t(from) * args.cols + n] * args.scale;
    *out = value;
}

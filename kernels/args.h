// Arguments of every kernel: one plain struct each, passed by value. rust/device/src/kernel_args.rs mirrors them field by field,
// and the kernels' tests compare sizes. Pointers are device addresses; strides count elements of a row unless they say bytes.
#pragma once
#include <stdint.h>

// How a linear layer's input is stored: `out_type` of what produces it.
enum ElementType : uint32_t { ELEMENT_F32 = 0, ELEMENT_F16 = 1, ELEMENT_BF16 = 2 };

enum ActivationKind : uint32_t { ACTIVATION_SILU = 0, ACTIVATION_GELU_TANH = 1, ACTIVATION_GELU = 2,
    ACTIVATION_SWISH = 3, // x * sigmoid(alpha * x)
    ACTIVATION_CLAMPED = 4, // (up + 1) * gate * sigmoid(alpha * gate), gate at most limit, up from -limit to limit
    ACTIVATION_RELU = 5, ACTIVATION_RELU2 = 6,
    ACTIVATION_XIELU = 7, // linear * x + (x > 0 ? positive * x^2 : negative * (e^min(x, eps) - 1 - x))
    ACTIVATION_IDENTITY = 8 };

// Norm of q or k heads.
struct HeadNormArgs {
    const float* weight; // [head_dim] of a head, or null for no norm
    const float* bias;   // likewise, or null for none
    uint32_t stride;     // from a head's weight to the next one's: head_dim, or 0 where heads share it
    uint32_t has_mean;   // 1: layer norm, 0: RMS norm
    float eps;
    uint32_t reserved;
};

// rope_and_cache_*: q/k norm, rotation, write of K and V.
struct RopeAndCacheArgs {
    float* q;                       // [num_tokens, q_stride], normed and rotated in place
    const float* k;                 // [num_tokens, k_stride]
    const float* v;                 // [num_tokens, v_stride]
    HeadNormArgs q_norm;
    HeadNormArgs k_norm;
    HeadNormArgs v_norm;
    const float* cos;               // [max_positions, rotary_dim / 2], or null for no rotation
    const float* sin;
    const uint32_t* rope_positions; // [num_tokens], rows of cos and sin
    const uint32_t* positions;      // [num_tokens]
    const int64_t* slot_mapping;    // [num_tokens], block_id * block_size + offset; -1: not written
    uint8_t* k_plane;
    uint8_t* v_plane;
    uint64_t block_bytes;           // of one block in one plane
    uint64_t scales_offset;         // bytes from a block's start to its scales
    uint32_t num_tokens, num_heads, num_kv_heads, head_dim, block_size;
    uint32_t q_stride, k_stride, v_stride;
    uint32_t rotary_dim;            // even, at most head_dim
    uint32_t interleaved;           // 1: element 2i rotates with 2i + 1; 0: i with i + rotary_dim / 2
    uint32_t norms_last;            // 1: norms follow the rotation
    // q of position p *= 1 + scale_beta * ln(1 + floor((p + scale_offset) / scale_length)); a length of 0: it does not
    uint32_t scale_length, scale_offset;
    float scale_beta;
};

// copy_blocks: whole blocks in every plane. No destination is the source of another pair.
struct CopyBlocksArgs {
    uint8_t* const* planes; // [num_planes]
    const uint32_t* pairs;  // [num_pairs, 2]: source, destination
    uint64_t block_bytes;   // a multiple of 16
    uint32_t num_pairs, num_planes;
};

// One CTA's share of attention, for each KV head: some rows of one request against the keys key_begin..key_end.
struct AttentionWork {
    uint32_t request;
    uint32_t first_row;          // of q; the rows of a request follow each other
    uint32_t num_rows;           // 0: nothing to do (padding of a captured graph); at most rows_per_work (README.md)
    uint32_t key_begin, key_end; // blocks outside are not read; masks are applied as well
    int32_t part;                // -1: this is all of it, out is written; else row r goes to part + r
};

// attention_*, prefill_*: attention through block tables.
struct AttentionArgs {
    const float* q;               // [num_tokens, q_stride]
    void* out;                    // [num_tokens, num_heads, head_dim] of out_type
    float* part_out;              // [num_parts, num_heads, head_dim]
    float* part_lse;              // [num_parts, num_heads]: log2 of the sum of exponentials; -inf where no key was seen
    const uint8_t* k_plane;
    const uint8_t* v_plane;
    const uint32_t* block_tables; // [num_reqs, max_blocks]
    const uint32_t* positions;    // [num_tokens]
    const uint32_t* ends;         // [num_tokens]: one more than the last key that each sees, or null: causal
    const AttentionWork* work;    // [gridDim.x]
    const float* sinks;           // [num_heads], a score without a value, or null
    uint64_t block_bytes, scales_offset;
    uint32_t max_blocks, block_size, num_heads, num_kv_heads, q_stride;
    uint32_t window;              // 0: none; else position i sees no keys j <= i - window
    uint32_t out_type;
    float scale;
    float softcap;                // 0: none; else scores become softcap * tanh(score / softcap)
    uint32_t head_dim;            // attention_f32 reads it; the others have it in their names
    uint32_t chunk;               // 0: none; else position i sees no keys before i / chunk * chunk
    uint32_t reserved;
};

// latent_*: absorbed latent attention through block tables. All query heads share one key a token, [rope_dim | kv_rank] elements,
// the latter of which are its value.
struct LatentAttentionArgs {
    const float* q;               // [num_tokens, num_heads, rope_dim + kv_rank]
    float* out;                   // [num_tokens, num_heads, kv_rank]
    float* part_out;              // [num_parts, num_heads, kv_rank]
    float* part_lse;              // [num_parts, num_heads], as of AttentionArgs
    const uint8_t* plane;
    const uint32_t* block_tables; // [num_reqs, max_blocks]
    const uint32_t* positions;    // [num_tokens]
    const AttentionWork* work;    // each for ceil(num_heads / heads) CTAs, which share the query heads
    uint64_t block_bytes;
    uint32_t max_blocks, block_size, num_heads;
    uint32_t rope_dim, kv_rank;   // multiples of 4; latent_f32 reads them, of the others they are 64 and 512
    uint32_t heads;               // of a CTA; of latent_f32 4
    float scale;
    uint32_t reserved;
};

// latent_cache_*: the norm of latent vectors, rotation of them and of queries, the write of what is cached.
struct LatentCacheArgs {
    float* query;                   // [num_tokens, num_heads, nope_dim + rope_dim]; the former part of each is scaled
    const float* latent;            // [num_tokens, kv_rank + rope_dim]
    float* absorbed;                // [num_tokens, num_heads, rope_dim + kv_rank]; the first rope_dim of each are written
    const float* weight;            // [kv_rank], of the RMS norm
    const float* cos;               // [max_positions, rotary_dim / 2], or null for no rotation
    const float* sin;
    const uint32_t* rope_positions; // [num_tokens], rows of cos and sin
    const uint32_t* positions;      // [num_tokens]
    const int64_t* slot_mapping;    // [num_tokens], block_id * block_size + offset; -1: not written
    uint8_t* plane;
    uint64_t block_bytes;
    uint32_t num_heads, nope_dim, rope_dim, kv_rank, block_size;
    uint32_t rotary_dim;            // even, at most rope_dim
    uint32_t interleaved;           // as of RopeAndCacheArgs
    float eps;
    uint32_t scale_length, scale_offset; // as of RopeAndCacheArgs, of both parts of queries
    float scale_beta;
    uint32_t reserved;
};

// The parts of one row: first_part, first_part + part_stride, ...
struct AttentionMerge {
    uint32_t row, first_part, num_parts, part_stride;
};

// attention_merge: out from parts. num_parts = 0: nothing to do.
struct AttentionMergeArgs {
    const float* part_out;
    const float* part_lse;
    const AttentionMerge* merges; // [gridDim.x]
    const float* sinks;           // [num_heads] or null
    void* out;
    uint32_t num_heads, head_dim, out_type, reserved;
};

// rms_norm, layer_norm: x += post_norm(y) * y_scale, then out = norm(x); each half may be left out.
struct NormArgs {
    float* x;                 // [num_rows, cols]; written when y is given
    const float* y;           // [num_rows, cols], or null for no addition
    const float* post_weight; // [cols], norm of y before the addition, or null
    const float* post_bias;   // [cols] or null
    const float* weight;      // [cols], or null: out is not written
    const float* bias;        // [cols] or null
    void* out;                // [num_rows, cols] of out_type
    uint32_t num_rows, cols, out_type;
    float eps, post_eps, y_scale;
};

// gated_activation: out = activation(gate) * up, or without up activation(gate).
struct GatedActivationArgs {
    const float* gate;    // [num_rows, gate_stride]
    const float* up;      // [num_rows, up_stride], or null
    const float* weights; // [num_rows]: multiplied into gate and up first; or null
    void* out;            // [num_rows, cols] of out_type; may be gate
    uint32_t num_rows, cols, gate_stride, up_stride, activation, out_type;
    float alpha, limit;   // of ACTIVATION_CLAMPED; alpha of ACTIVATION_SWISH too
    float positive, negative, linear, eps; // of ACTIVATION_XIELU
};

// scale_and_clamp: x *= scale; what is less than `least` becomes that, what is more than `most` that. NaN stays NaN.
struct ScaleAndClampArgs {
    float* x; // [count]
    uint64_t count;
    float scale, least, most;
    uint32_t reserved;
};

// layer_inputs: x = (norm(x) + tokens) * scale, an RMS norm of each part.
struct LayerInputsArgs {
    float* x;            // [num_parts, width]
    const float* tokens; // likewise
    const float* weight; // [width]
    uint32_t num_parts, width;
    float eps, scale;
};

constexpr uint32_t MAX_STREAMS = 8;

// streams_predict, streams_correct: residual streams of rows, mixed with each other or changed by what a layer has.
struct StreamsArgs {
    float* streams[MAX_STREAMS]; // [num_rows, cols] each; null from num_streams on
    const float* routed;         // [num_rows, num_streams]
    const float* coefficients;   // [num_streams * num_streams, num_streams] to predict, [num_streams, num_streams] to correct
    const float* scale;          // [cols] or null: of hidden, to correct
    float* hidden;               // [num_rows, cols]
    uint32_t num_rows, cols;     // cols: a multiple of 4
    uint32_t num_streams, active;
};

// add_rows: x = (x + other) * value; match_size: x as large as other; keep_largest: value is how many deviations.
struct StreamRowsArgs {
    float* x;           // [num_rows, cols]
    const float* other; // likewise
    uint32_t num_rows, cols;
    float value;
    uint32_t reserved;
};

// embed_*: out[i] = table[token_ids[i]] * scale.
struct EmbedArgs {
    const uint8_t* table; // [vocab_size, row_bytes] bytes
    const uint32_t* token_ids;
    float* out; // [num_tokens, cols]
    uint64_t row_bytes;
    uint32_t num_tokens, cols, vocab_size;
    uint32_t beyond; // read in the place of ids of vocab_size and more
    float scale;
    uint32_t reserved;
};

// gather_rows: out[i] = x[rows[i]].
struct GatherRowsArgs {
    const float* x; // [_, cols]
    const uint32_t* rows;
    float* out; // [num_rows, cols]
    uint32_t num_rows, cols;
};

// round_values: out = x as out_type.
struct RoundValuesArgs {
    const float* x; // [count]
    void* out;      // [count] of out_type
    uint64_t count; // a multiple of 4
    uint32_t out_type, reserved;
};

// fill_bias: out[row, n] = bias[n] * scale, or out[row, n] += it.
struct FillBiasArgs {
    const float* bias; // [cols]
    float* out;        // [num_rows, cols]
    uint32_t num_rows, cols;
    uint32_t accumulate; // 1: added to out
    float scale;
};

// A weight that gemv_* multiplies by, and where the products go.
struct GemvTarget {
    const uint8_t* w;   // [out_features, w_stride] bytes
    const float* bias;  // [out_features] or null
    float* out;         // [num_rows, out_stride]
    uint32_t out_features, out_stride;
    uint32_t first_cta; // The CTAs from this on are its own; none: 0xffffffff.
    uint32_t reserved;
};

// Weights that one launch multiplies by, such as those of q, k and v.
constexpr unsigned MAX_TARGETS = 3;

// gemv_*: out[row, n] = (x[row] . w[n] + bias[n]) * scale, or out[row, n] += it, of each target.
struct GemvArgs {
    const float* x; // [num_rows, x_stride]
    GemvTarget targets[MAX_TARGETS]; // the first one's first_cta is 0
    uint64_t w_stride;               // bytes from a row of a weight to the next one
    uint32_t num_rows, in_features, x_stride;
    uint32_t accumulate; // 1: added to out
    float scale;
    uint32_t reserved;
};

// A weight that gemm_* multiplies by, and where the products go.
struct GemmTarget {
    const uint8_t* w;   // packed: [ceil(out_features / 64), w_stride] bytes; bf16 and f16: [out_features, w_stride] bytes
    const float* bias;  // [out_features] or null
    float* out;         // [num_rows, out_stride]
    uint32_t out_features, out_stride;
    uint32_t first_piece; // The CTAs from this on are its own; none: 0xffffffff.
    uint32_t part_stages; // stages that each of them sums, all but the last one
};

// gemm_*: as gemv_*, of weights that are packed (packed.cuh), by x rounded to bf16, and of bf16 and f16, by x rounded to their
// type. Tiles of 64 and 128 rows (gemm_tiles.cuh) are of two panels, and read x_stride as a multiple of 8.
struct GemmArgs {
    const void* x;      // [num_rows, x_stride], f32 of gemm_*_r8, else rounded
    GemmTarget targets[MAX_TARGETS]; // the first one's first_piece is 0
    float* parts;       // [gridDim.y, gridDim.x, 2, features * capacity]: what a CTA has summed of panels that it may share
    uint32_t* arrivals; // [gridDim.y, gridDim.x], 0 before and after: CTAs that are done with a panel they share
    uint64_t w_stride;  // bytes from a panel to the next one; of bf16 and f16 from a row to the next one, a multiple of 16
    uint32_t num_rows, in_features, x_stride;
    uint32_t accumulate; // 1: added to out
    float scale;
    uint32_t reserved;
};

// Rows of one group, which a CTA of grouped_* takes.
struct GroupTile {
    uint32_t group;
    uint32_t first_row; // in the lists of rows
    uint32_t num_rows;  // 0: nothing to do; at most as many as the kernel takes
    uint32_t reserved;
};

// Weights that grouped_* multiply by, one for each group and all of one shape, and where the products go.
struct GroupedTarget {
    const uint8_t* const* w;  // [num_groups]
    const float* const* bias; // [num_groups], or null
    float* out;               // [_, out_stride]
    uint32_t out_features, out_stride;
    uint32_t first_cta;       // The CTAs from this on are its own; none: 0xffffffff.
    uint32_t reserved;
};

// grouped_gemv_*, grouped_gemm_*: out[out_rows[i]] = x[x_rows[i]] . w[group] + bias[group] for the rows i of each tile.
struct GroupedArgs {
    const void* x; // [_, x_stride], f32 of *_r8, else rounded as gemm_* read it
    GroupedTarget targets[MAX_TARGETS]; // the first one's first_cta is 0
    const GroupTile* tiles;   // [gridDim.y], or null: rows 0 .. num_rows of every group, in tiles a row list behind the other
    const uint32_t* x_rows;   // read where there are tiles
    const uint32_t* out_rows; // likewise
    uint64_t w_stride;        // of gemv_*, or of gemm_*
    uint32_t num_rows, num_groups;
    uint32_t in_features, x_stride;
    uint32_t x_group_stride;  // columns from what a group reads of a row to what the next one does
    uint32_t out_group_stride;
};

// What a router makes of its logits.
enum RouterScoreKind : uint32_t {
    ROUTER_SOFTMAX = 0,
    ROUTER_SOFTMAX_OF_CHOSEN = 1,
    ROUTER_SIGMOID = 2,
    ROUTER_SPARSEMIXER = 3,
    ROUTER_SIGMOID_OF_CHOSEN = 4,
};

// Experts of a layer at most, and groups of them.
constexpr unsigned MAX_EXPERTS = 1024;
constexpr unsigned MAX_EXPERT_GROUPS = 32;

// route: the experts of each row with their weights, as RoutingRule::choose of rust/device/src/experts.rs has them, and the rows
// of each expert as tiles. num_rows * num_chosen is below 65,536.
struct RouteArgs {
    const float* logits;     // [num_rows, num_experts]
    const float* correction; // [num_experts], added to the scores that experts are chosen by; or null
    const float* scales;     // [num_experts], multiplied into the weights in the end; or null
    uint32_t* chosen;        // [num_rows, num_chosen]
    float* weights;          // [num_rows, num_chosen]
    GroupTile* tiles;        // [num_tiles], those that are not needed with no rows
    uint32_t* rows;          // [num_rows * num_chosen], in the order of tiles
    uint32_t* places;        // likewise: where in chosen
    uint32_t* arrivals;      // 0 before and after
    uint32_t num_rows, num_experts, num_chosen, num_tiles;
    uint32_t tile_rows;      // of a tile at most
    uint32_t score;
    float jitter;            // of ROUTER_SPARSEMIXER
    uint32_t num_groups;     // 0: none; else of equally many experts
    uint32_t num_chosen_groups;
    uint32_t by_two_best;    // 1: a group's score is the sum of its two best, 0: its best
    uint32_t normalizes;     // 1: weights are divided by their sum and normalize_eps
    float normalize_eps;
    float scale;             // then multiplied by this
    uint32_t reserved;
};

// add_experts: out = sum of weights * experts + sigmoid(shared_logits) * shared, times scale, or that added to out.
struct AddExpertsArgs {
    const float* experts;       // [num_rows, num_chosen, cols]
    const float* weights;       // [num_rows, num_chosen], or null: 1
    const float* shared;        // [num_rows, cols], or null
    const float* shared_logits; // [num_rows], or null: shared is added as it is
    float* out;                 // [num_rows, cols]
    uint32_t num_rows, cols, num_chosen;
    uint32_t accumulate; // 1: added to out
    float scale;
    uint32_t reserved;
};

// packed_dequantize_*: rows of a packed weight, from a multiple of 64 on, as floats.
struct PackedDequantizeArgs {
    const uint8_t* w; // [gridDim.y, panel_bytes] bytes
    void* out;        // [64 gridDim.y, cols] of out_type
    uint64_t panel_bytes;
    uint32_t cols, out_type;
};

// packed_embed_*: out[i] = table[token_ids[i]] * scale, of a packed table.
struct PackedEmbedArgs {
    const uint8_t* table; // [ceil(vocab_size / 64), panel_bytes] bytes
    const uint32_t* token_ids;
    float* out; // [num_tokens, cols]
    uint64_t panel_bytes;
    uint32_t num_tokens, cols, vocab_size, beyond;
    float scale;
    uint32_t reserved;
};

// dequantize_*: rows of a weight as floats.
struct DequantizeArgs {
    const uint8_t* w; // [num_rows, row_bytes] bytes
    void* out;        // [num_rows, cols] of out_type
    uint64_t row_bytes;
    uint32_t num_rows, cols, out_type, reserved;
};

// How one row of logits is sampled.
struct SampleRow {
    float temperature; // 0: the likeliest token, the lowest id of equal ones
    float top_p;       // 1: off
    float min_p;       // 0: off
    uint32_t top_k;    // 0: off
    double uniform;    // in 0..1, the row's random number
    const uint32_t* mask; // [ceil(vocab_size / 32)] a bit a token, 1 for those that may come; null: all of them
};

// Rows of a launch of sample* at most.
constexpr unsigned MAX_SAMPLE_ROWS = 64;
// Tokens of a part of a row, a CTA each, and parts of a row at most.
constexpr unsigned SAMPLE_PART = 4096, SAMPLE_MAX_PARTS = 512;
// Buckets of logits, and tokens that a part lists of the bucket that top-k or top-p end in.
constexpr unsigned SAMPLE_BUCKETS = 1024, SAMPLE_LISTED = 128;

// What a CTA has found in a part: the likeliest tokens of sample, the rest of sample_draw.
struct SamplePart {
    unsigned long long best, best_allowed;
    unsigned long long weight; // that is kept
    float sum, smallest;
    uint32_t num_listed, reserved;
};

// What the kernels of a row tell each other.
struct SampleState {
    unsigned long long weight_left; // of top-p in the bucket, and of top-k
    uint32_t count_left;
    uint32_t bucket;                // that top-k or top-p end in; 0xffffffff: all are kept
    float largest;                  // logit of a token that may come
    float buckets_a_logit, normalizer;
    uint32_t is_drawn;              // 0: no token may come
};

struct SampleBucket {
    unsigned long long weight;
    uint32_t count, reserved;
};

// sample, and for rows with a temperature sample_draw after it, with sample_cut between them where there is top-k or top-p: a
// token of each row, and its log probability by the softmax of the logits as they are.
struct SampleArgs {
    const float* logits;   // [num_rows, stride]
    uint32_t* token_ids;   // [num_rows]; 0xffffffff where a logit is not finite, or no token may come
    float* logprobs;       // [num_rows]
    float* normalizers;    // [num_rows], the log of the sum of e^logit
    SamplePart* parts;     // [num_rows, gridDim.x]
    SampleState* states;   // [num_rows]
    SampleBucket* buckets; // [num_rows, SAMPLE_BUCKETS], zeros before and after; sample_cut alone needs it
    unsigned long long* lists; // [num_rows, gridDim.x, SAMPLE_LISTED], for rows of sample_cut
    uint32_t* arrivals;    // [num_rows], zeros before and after
    uint32_t num_rows, vocab_size, stride, reserved;
    SampleRow rows[MAX_SAMPLE_ROWS];
};

// top_logprobs: the likeliest tokens of each row, likeliest first, of equal ones the lowest id first.
struct TopLogprobsArgs {
    const float* logits;      // [num_rows, stride]
    const float* normalizers; // [num_rows], of sample
    uint32_t* token_ids;      // [num_rows, num_top]
    float* logprobs;          // [num_rows, num_top]
    uint32_t num_rows, vocab_size, stride, num_top;
};

// A request of a step, to layers that keep a state a request.
struct RecurrentRequest {
    uint32_t first_row, num_rows; // its rows of the step
    uint32_t slot;                // of its states; NO_SLOT: nothing is computed or kept
    uint32_t begins;              // 1: its states are zeros before its first row
};
constexpr uint32_t NO_SLOT = 0xffffffff;

// A convolution over channels of its own.
struct ConvPart {
    const float* x;        // [num_rows, num_channels]
    const float* gate_in;  // [num_rows, num_channels], multiplied into x, or null
    const float* gate_out; // [num_rows, num_channels], multiplied into out, or null
    const float* weight;   // [kernel, num_channels], the last row for the token itself
    const float* bias;     // [num_channels] or null
    float* out;            // [num_rows, num_channels]
    float* state;          // [kernel - 1, num_channels] of slot 0: the inputs of the last tokens
    uint32_t num_channels, kernel;
    uint32_t first_cta;    // the CTAs from here on compute it; 0xffffffff: there is no such part
    uint32_t activates;    // whether SiLU is applied, before gate_out
};

// causal_conv: up to three convolutions over the rows of each request.
struct CausalConvArgs {
    ConvPart parts[3];
    const RecurrentRequest* requests;
    const uint32_t* row_requests; // [num_rows]
    uint64_t slot_stride;         // values from a slot to the next one
    uint32_t num_rows;
    uint32_t rows_per_cta;        // changes no bits
};

// mamba_*: the scan of Mamba, times silu(z).
struct MambaArgs {
    const float* x;      // [num_rows, num_channels], behind the convolution
    const float* z;      // [num_rows, num_channels]
    const float* dt;     // [num_rows, num_channels], before softplus
    const float* b;      // [num_rows, state_dim]
    const float* c;      // [num_rows, state_dim]
    const float* b_norm; // [state_dim], of the RMS norm of b, or null: there is none
    const float* c_norm; // [state_dim] or null
    const float* a;      // [state_dim, num_channels]
    const float* d;      // [num_channels]
    float* out;          // [num_rows, num_channels]
    float* states;       // [state_dim, num_channels] of slot 0
    const RecurrentRequest* requests;
    uint64_t slot_stride;
    uint32_t num_channels, state_dim;
    float b_eps, c_eps;
};

// mamba2_*: the scan of Mamba-2.
struct Mamba2Args {
    const float* xbc;     // [num_rows, num_heads * head_dim + 2 * num_groups * state_dim]: x, b and c
    const float* dt;      // [num_rows, num_heads]
    const float* dt_bias; // [num_heads]
    const float* a;       // [num_heads]
    const float* d;       // [num_heads]
    float* out;           // [num_rows, num_heads * head_dim]
    float* states;        // [num_heads, state_dim, head_dim] of slot 0
    const RecurrentRequest* requests;
    uint64_t slot_stride;
    uint32_t num_heads, num_groups, head_dim, state_dim;
    float dt_min, dt_max;
    float dt_scale;       // multiplied into dt first
    uint32_t reserved;
};

// gated_delta_*, kimi_delta_*: the gated delta rule.
struct GatedDeltaArgs {
    const float* q;       // [num_rows, num_key_heads * key_dim]
    const float* k;       // [num_rows, num_key_heads * key_dim]
    const float* v;       // [num_rows, num_value_heads * value_dim]
    const float* b;       // [num_rows, num_value_heads]
    const float* dt;      // [num_rows, num_value_heads]; of kimi_delta_* [num_rows, num_value_heads * key_dim]
    const float* dt_bias; // [num_value_heads]; of kimi_delta_* [num_value_heads * key_dim]
    const float* a;       // [num_value_heads]
    float* out;           // [num_rows, num_value_heads * value_dim]
    float* states;        // [num_value_heads, key_dim, value_dim] of slot 0
    const RecurrentRequest* requests;
    uint64_t slot_stride;
    uint32_t num_key_heads, num_value_heads, key_dim, value_dim;
    uint32_t is_grouped;  // 1: value heads that follow each other share a key head; 0: each num_key_heads-th does
    float beta_scale;     // multiplied into sigmoid(b)
};

// gated_norm: x = rms_norm(x * silu(z)), or x = rms_norm(x) * silu(z), each group of columns with a mean square of its own;
// or x = x * silu(z). z is multiplied by z_scale first; sigmoid(z) may take the place of silu(z).
struct GatedNormArgs {
    float* x;             // [num_rows, num_groups * group_dim]
    const float* z;       // [num_rows, num_groups * group_dim]
    const float* weight;  // [group_dim] for each group, weight_stride apart; null: no norm
    uint32_t num_rows, num_groups, group_dim, weight_stride;
    uint32_t gates_first; // 1: the first form
    float eps, z_scale;
    uint32_t is_sigmoid;  // 1: sigmoid(z)
};

// attention_gate: x *= sigmoid(gate), or x *= softplus(gate); each value of the gate is of so many elements of x.
struct AttentionGateArgs {
    float* x;             // [count]
    const float* gate;    // [count / group]
    uint64_t count;
    uint32_t group;
    uint32_t is_softplus; // 1: the second form
};

// What an adapter does to a linear layer. With b it adds a product of low rank; without, columns of the output become products
// with the rows of a: those that ids names, or all.
struct LoraDelta {
    const float* a;        // [rank, in_features], or null: nothing
    const float* b;        // [rank, out_features], the scale in it, or null
    const uint32_t* ids;   // [rank], columns of the output, or null
    const float* bias;     // [out_features], or without b [rank], added; or null
    const float* factors;  // [out_features], of DoRA, by which the layer's own product is multiplied; or null
    const float* own_bias; // [out_features], what of that product is not multiplied; or null
    uint32_t rank;
    uint32_t reserved;
};

// What an adapter does to the token embedding: another table, then a product of low rank, then single rows.
struct LoraEmbedding {
    const float* table;  // [vocab_size, cols], or null
    const float* a;      // [vocab_size, rank], or null
    const float* b;      // [rank, cols]
    const uint32_t* ids; // [num_ids], ascending
    const float* rows;   // [num_ids, cols]
    uint32_t rank, num_ids;
};

// A row of a step with an adapter.
struct LoraRow {
    const LoraDelta* deltas;        // [num_sites], by the number of a linear layer
    const LoraEmbedding* embedding; // or null
    uint32_t num_sites;             // 0: this pads a captured graph
    uint32_t row;
};

// Rows of one adapter, which a CTA takes.
struct LoraTile {
    uint32_t first_row; // of the list of LoraRow
    uint32_t num_rows;  // at most 8; 0: nothing to do
};

// A linear layer, or as many as there are experts, and what comes of it.
struct LoraTarget {
    float* out;            // [_, out_features]
    const uint32_t* sites; // numbers of experts' layers, read where there are choices
    uint32_t site;         // the number of the layer, read where there are none
    uint32_t out_features;
};

// lora_keep, lora_shrink, lora_expand: what adapters make of the products of their rows.
struct LoraArgs {
    const float* x;         // [_, in_features]
    LoraTarget targets[MAX_TARGETS]; // gridDim.z
    const LoraRow* rows;
    const LoraTile* tiles;  // of one layer
    const uint32_t* chosen; // [_, num_chosen]: the experts of each row, each an output row of its own; or null
    float* low;             // [gridDim.z, num_low, low_stride]: products with a, before those with b
    float* kept;            // [_, out_features] in the order of rows: what outputs were before the product, or null: zeros
    uint32_t in_features;
    uint32_t num_low, low_stride;
    uint32_t num_chosen;
    uint32_t has_own_x;     // of experts: 1: x has a row for each output row
    float scale;            // of what is added to the output
};

// lora_embed: rows of the token embedding with adapters.
struct LoraEmbedArgs {
    float* out;                // [_, cols]
    const uint32_t* token_ids; // [_]
    const LoraRow* rows;       // [gridDim.y]
    uint32_t cols;
    float scale;
};

//! Arguments of the CUDA kernels: each struct mirrors the one of the same name in `kernels/args.h`, where the fields are
//! described.
//!
//! Pointers are device addresses. A struct is the only argument of its kernel, passed by value.

#![allow(missing_docs, reason = "kernels/args.h describes each field; two copies would part ways")]

/// An address in device memory; 0 is none.
pub type DevicePtr = u64;

/// How a linear layer's input is stored.
#[repr(u32)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ElementType {
    #[default]
    F32 = 0,
    F16 = 1,
    BF16 = 2,
}

/// Values of [`GatedActivationArgs::activation`].
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActivationKind {
    Silu = 0,
    GeluTanh = 1,
    Gelu = 2,
    QuickGelu = 3,
    Clamped = 4,
}

/// Norm of q or k heads.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct HeadNormArgs {
    pub weight: DevicePtr,
    pub bias: DevicePtr,
    pub stride: u32,
    pub has_mean: u32,
    pub eps: f32,
    pub reserved: u32,
}

/// `rope_and_cache_*`: q/k norm, rotation, write of K and V.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct RopeAndCacheArgs {
    pub q: DevicePtr,
    pub k: DevicePtr,
    pub v: DevicePtr,
    pub q_norm: HeadNormArgs,
    pub k_norm: HeadNormArgs,
    pub cos: DevicePtr,
    pub sin: DevicePtr,
    pub rope_positions: DevicePtr,
    pub positions: DevicePtr,
    pub slot_mapping: DevicePtr,
    pub k_plane: DevicePtr,
    pub v_plane: DevicePtr,
    pub block_bytes: u64,
    pub scales_offset: u64,
    pub num_tokens: u32,
    pub num_heads: u32,
    pub num_kv_heads: u32,
    pub head_dim: u32,
    pub block_size: u32,
    pub q_stride: u32,
    pub k_stride: u32,
    pub v_stride: u32,
    pub rotary_dim: u32,
    pub interleaved: u32,
    pub norms_last: u32,
    pub scale_length: u32,
    pub scale_offset: u32,
    pub scale_beta: f32,
}

/// `copy_blocks`: whole blocks in every plane. No destination is the source of another pair.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CopyBlocksArgs {
    pub planes: DevicePtr,
    pub pairs: DevicePtr,
    pub block_bytes: u64,
    pub num_pairs: u32,
    pub num_planes: u32,
}

/// One CTA's share of attention, for each KV head: some rows of one request against the keys key_begin..key_end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct AttentionWork {
    pub request: u32,
    pub first_row: u32,
    pub num_rows: u32,
    pub key_begin: u32,
    pub key_end: u32,
    pub part: i32,
}

/// `attention_*`, `prefill_*`: causal attention through block tables.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct AttentionArgs {
    pub q: DevicePtr,
    pub out: DevicePtr,
    pub part_out: DevicePtr,
    pub part_lse: DevicePtr,
    pub k_plane: DevicePtr,
    pub v_plane: DevicePtr,
    pub block_tables: DevicePtr,
    pub positions: DevicePtr,
    pub ends: DevicePtr,
    pub work: DevicePtr,
    pub sinks: DevicePtr,
    pub block_bytes: u64,
    pub scales_offset: u64,
    pub max_blocks: u32,
    pub block_size: u32,
    pub num_heads: u32,
    pub num_kv_heads: u32,
    pub q_stride: u32,
    pub window: u32,
    pub out_type: u32,
    pub scale: f32,
    pub softcap: f32,
    pub head_dim: u32,
    pub chunk: u32,
    pub reserved: u32,
}

/// `latent_*`: absorbed latent attention through block tables.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct LatentAttentionArgs {
    pub q: DevicePtr,
    pub out: DevicePtr,
    pub part_out: DevicePtr,
    pub part_lse: DevicePtr,
    pub plane: DevicePtr,
    pub block_tables: DevicePtr,
    pub positions: DevicePtr,
    pub work: DevicePtr,
    pub block_bytes: u64,
    pub max_blocks: u32,
    pub block_size: u32,
    pub num_heads: u32,
    pub rope_dim: u32,
    pub kv_rank: u32,
    pub heads: u32,
    pub scale: f32,
    pub reserved: u32,
}

/// `latent_cache_*`: the norm of latent vectors, rotation of them and of queries, the write of what is cached.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct LatentCacheArgs {
    pub query: DevicePtr,
    pub latent: DevicePtr,
    pub absorbed: DevicePtr,
    pub weight: DevicePtr,
    pub cos: DevicePtr,
    pub sin: DevicePtr,
    pub rope_positions: DevicePtr,
    pub slot_mapping: DevicePtr,
    pub plane: DevicePtr,
    pub block_bytes: u64,
    pub num_heads: u32,
    pub nope_dim: u32,
    pub rope_dim: u32,
    pub kv_rank: u32,
    pub block_size: u32,
    pub rotary_dim: u32,
    pub interleaved: u32,
    pub eps: f32,
}

/// The parts of one row: first_part, first_part + part_stride, ...
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct AttentionMerge {
    pub row: u32,
    pub first_part: u32,
    pub num_parts: u32,
    pub part_stride: u32,
}

/// `attention_merge`: out from parts. num_parts = 0: nothing to do.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct AttentionMergeArgs {
    pub part_out: DevicePtr,
    pub part_lse: DevicePtr,
    pub merges: DevicePtr,
    pub sinks: DevicePtr,
    pub out: DevicePtr,
    pub num_heads: u32,
    pub head_dim: u32,
    pub out_type: u32,
    pub reserved: u32,
}

/// `rms_norm`, `layer_norm`: x += post_norm(y) * y_scale, then out = norm(x); each half may be left out.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct NormArgs {
    pub x: DevicePtr,
    pub y: DevicePtr,
    pub post_weight: DevicePtr,
    pub post_bias: DevicePtr,
    pub weight: DevicePtr,
    pub bias: DevicePtr,
    pub out: DevicePtr,
    pub num_rows: u32,
    pub cols: u32,
    pub out_type: u32,
    pub eps: f32,
    pub post_eps: f32,
    pub y_scale: f32,
}

/// `gated_activation`: out = activation(gate) * up, or without up activation(gate).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct GatedActivationArgs {
    pub gate: DevicePtr,
    pub up: DevicePtr,
    pub weights: DevicePtr,
    pub out: DevicePtr,
    pub num_rows: u32,
    pub cols: u32,
    pub gate_stride: u32,
    pub up_stride: u32,
    pub activation: u32,
    pub out_type: u32,
    pub alpha: f32,
    pub limit: f32,
}

/// `embed_*`: out[i] = table[token_ids[i]] * scale.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct EmbedArgs {
    pub table: DevicePtr,
    pub token_ids: DevicePtr,
    pub out: DevicePtr,
    pub row_bytes: u64,
    pub num_tokens: u32,
    pub cols: u32,
    pub scale: f32,
    pub reserved: u32,
}

/// `gather_rows`: out[i] = x[rows[i]].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct GatherRowsArgs {
    pub x: DevicePtr,
    pub rows: DevicePtr,
    pub out: DevicePtr,
    pub num_rows: u32,
    pub cols: u32,
}

/// `round_values`: out = x as out_type.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct RoundValuesArgs {
    pub x: DevicePtr,
    pub out: DevicePtr,
    pub count: u64,
    pub out_type: u32,
    pub reserved: u32,
}

/// `fill_bias`: out[row, n] = bias[n] * scale, or out[row, n] += it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct FillBiasArgs {
    pub bias: DevicePtr,
    pub out: DevicePtr,
    pub num_rows: u32,
    pub cols: u32,
    pub accumulate: u32,
    pub scale: f32,
}

/// A weight that `gemv_*` multiplies by, and where the products go.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GemvTarget {
    pub w: DevicePtr,
    pub bias: DevicePtr,
    pub out: DevicePtr,
    pub out_features: u32,
    pub out_stride: u32,
    pub first_cta: u32,
    pub reserved: u32,
}

impl Default for GemvTarget {
    /// None.
    fn default() -> Self {
        Self { w: 0, bias: 0, out: 0, out_features: 0, out_stride: 0, first_cta: u32::MAX, reserved: 0 }
    }
}

/// Weights that one launch multiplies by.
pub const MAX_TARGETS: usize = 3;

/// `gemv_*`: out[row, n] = (x[row] . w[n] + bias[n]) * scale, or out[row, n] += it, of each target.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct GemvArgs {
    pub x: DevicePtr,
    pub targets: [GemvTarget; MAX_TARGETS],
    pub w_stride: u64,
    pub num_rows: u32,
    pub in_features: u32,
    pub x_stride: u32,
    pub accumulate: u32,
    pub scale: f32,
    pub reserved: u32,
}

/// A weight that `gemm_*` multiplies by, and where the products go.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GemmTarget {
    pub w: DevicePtr,
    pub bias: DevicePtr,
    pub out: DevicePtr,
    pub out_features: u32,
    pub out_stride: u32,
    pub first_piece: u32,
    pub part_stages: u32,
}

impl Default for GemmTarget {
    /// None.
    fn default() -> Self {
        Self { w: 0, bias: 0, out: 0, out_features: 0, out_stride: 0, first_piece: u32::MAX, part_stages: 0 }
    }
}

/// `gemm_*`: as `gemv_*`, of weights that are packed, by x rounded to bf16, and of bf16 and f16, by x rounded to their type.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct GemmArgs {
    pub x: DevicePtr,
    pub targets: [GemmTarget; MAX_TARGETS],
    pub parts: DevicePtr,
    pub arrivals: DevicePtr,
    pub w_stride: u64,
    pub num_rows: u32,
    pub in_features: u32,
    pub x_stride: u32,
    pub accumulate: u32,
    pub scale: f32,
    pub reserved: u32,
}

/// Rows of one group, which a CTA of `grouped_*` takes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupTile {
    pub group: u32,
    pub first_row: u32,
    pub num_rows: u32,
    pub reserved: u32,
}

/// Weights that `grouped_*` multiply by, one for each group, and where the products go.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GroupedTarget {
    pub w: DevicePtr,
    pub bias: DevicePtr,
    pub out: DevicePtr,
    pub out_features: u32,
    pub out_stride: u32,
    pub first_cta: u32,
    pub reserved: u32,
}

impl Default for GroupedTarget {
    /// None.
    fn default() -> Self {
        Self { w: 0, bias: 0, out: 0, out_features: 0, out_stride: 0, first_cta: u32::MAX, reserved: 0 }
    }
}

/// `grouped_gemv_*`, `grouped_gemm_*`: `out[out_rows[i]] = x[x_rows[i]] . w[group] + bias[group]` for the rows i of each tile.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct GroupedArgs {
    pub x: DevicePtr,
    pub targets: [GroupedTarget; MAX_TARGETS],
    pub tiles: DevicePtr,
    pub x_rows: DevicePtr,
    pub out_rows: DevicePtr,
    pub w_stride: u64,
    pub num_rows: u32,
    pub num_groups: u32,
    pub in_features: u32,
    pub x_stride: u32,
    pub x_group_stride: u32,
    pub out_group_stride: u32,
}

/// Values of [`RouteArgs::score`].
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterScoreKind {
    Softmax = 0,
    SoftmaxOfChosen = 1,
    Sigmoid = 2,
    Sparsemixer = 3,
}

/// Experts of a layer at most.
pub const MAX_EXPERTS: usize = 1024;
/// Groups of experts at most.
pub const MAX_EXPERT_GROUPS: usize = 32;

/// `route`: the experts of each row with their weights, and the rows of each expert as tiles.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct RouteArgs {
    pub logits: DevicePtr,
    pub correction: DevicePtr,
    pub chosen: DevicePtr,
    pub weights: DevicePtr,
    pub tiles: DevicePtr,
    pub rows: DevicePtr,
    pub places: DevicePtr,
    pub arrivals: DevicePtr,
    pub num_rows: u32,
    pub num_experts: u32,
    pub num_chosen: u32,
    pub num_tiles: u32,
    pub tile_rows: u32,
    pub score: u32,
    pub jitter: f32,
    pub num_groups: u32,
    pub num_chosen_groups: u32,
    pub by_two_best: u32,
    pub normalizes: u32,
    pub normalize_eps: f32,
    pub scale: f32,
    pub reserved: u32,
}

/// `add_experts`: out = sum of weights * experts + sigmoid(`shared_logits`) * shared, times scale, or that added to out.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct AddExpertsArgs {
    pub experts: DevicePtr,
    pub weights: DevicePtr,
    pub shared: DevicePtr,
    pub shared_logits: DevicePtr,
    pub out: DevicePtr,
    pub num_rows: u32,
    pub cols: u32,
    pub num_chosen: u32,
    pub accumulate: u32,
    pub scale: f32,
    pub reserved: u32,
}

/// `packed_dequantize_*`: rows of a packed weight, from a multiple of 64 on, as floats.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct PackedDequantizeArgs {
    pub w: DevicePtr,
    pub out: DevicePtr,
    pub panel_bytes: u64,
    pub cols: u32,
    pub out_type: u32,
}

/// `packed_embed_*`: `out[i] = table[token_ids[i]] * scale`, of a packed table.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct PackedEmbedArgs {
    pub table: DevicePtr,
    pub token_ids: DevicePtr,
    pub out: DevicePtr,
    pub panel_bytes: u64,
    pub num_tokens: u32,
    pub cols: u32,
    pub scale: f32,
    pub reserved: u32,
}

/// `dequantize_*`: rows of a weight as floats.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct DequantizeArgs {
    pub w: DevicePtr,
    pub out: DevicePtr,
    pub row_bytes: u64,
    pub num_rows: u32,
    pub cols: u32,
    pub out_type: u32,
    pub reserved: u32,
}

/// How one row of logits is sampled.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct SampleRow {
    pub temperature: f32,
    pub top_p: f32,
    pub min_p: f32,
    pub top_k: u32,
    pub uniform: f64,
    pub mask: DevicePtr,
}

/// Rows of a launch of `sample*` at most.
pub const MAX_SAMPLE_ROWS: usize = 64;
/// Tokens of a part of a row, a CTA each.
pub const SAMPLE_PART: usize = 4096;
/// Parts of a row at most.
pub const SAMPLE_MAX_PARTS: usize = 512;
/// Buckets of logits that the end of top-k and top-p is looked for in.
pub const SAMPLE_BUCKETS: usize = 1024;
/// Tokens that a part lists of such a bucket.
pub const SAMPLE_LISTED: usize = 128;

/// What a CTA has found in a part of a row.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct SamplePart {
    pub best: u64,
    pub best_allowed: u64,
    pub weight: u64,
    pub sum: f32,
    pub smallest: f32,
    pub num_listed: u32,
    pub reserved: u32,
}

/// What the kernels of a row tell each other.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct SampleState {
    pub weight_left: u64,
    pub count_left: u32,
    pub bucket: u32,
    pub largest: f32,
    pub buckets_a_logit: f32,
    pub normalizer: f32,
    pub is_drawn: u32,
}

/// Of a bucket of logits.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct SampleBucket {
    pub weight: u64,
    pub count: u32,
    pub reserved: u32,
}

/// `sample`, `sample_cut`, `sample_draw`: a token of each row, and its log probability by the softmax of the logits as they are.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SampleArgs {
    pub logits: DevicePtr,
    pub token_ids: DevicePtr,
    pub logprobs: DevicePtr,
    pub normalizers: DevicePtr,
    pub parts: DevicePtr,
    pub states: DevicePtr,
    pub buckets: DevicePtr,
    pub lists: DevicePtr,
    pub arrivals: DevicePtr,
    pub num_rows: u32,
    pub vocab_size: u32,
    pub stride: u32,
    pub reserved: u32,
    pub rows: [SampleRow; MAX_SAMPLE_ROWS],
}

/// `top_logprobs`: the likeliest tokens of each row, likeliest first, of equal ones the lowest id first.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct TopLogprobsArgs {
    pub logits: DevicePtr,
    pub normalizers: DevicePtr,
    pub token_ids: DevicePtr,
    pub logprobs: DevicePtr,
    pub num_rows: u32,
    pub vocab_size: u32,
    pub stride: u32,
    pub num_top: u32,
}

/// A request of a step, to layers that keep a state a request.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecurrentRequest {
    pub first_row: u32,
    pub num_rows: u32,
    pub slot: u32,
    pub begins: u32,
}

/// [`RecurrentRequest::slot`] of a request for which nothing is computed or kept.
pub const NO_SLOT: u32 = u32::MAX;

/// A convolution over channels of its own.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ConvPart {
    pub x: DevicePtr,
    pub gate_in: DevicePtr,
    pub gate_out: DevicePtr,
    pub weight: DevicePtr,
    pub bias: DevicePtr,
    pub out: DevicePtr,
    pub state: DevicePtr,
    pub num_channels: u32,
    pub kernel: u32,
    pub first_cta: u32,
    pub activates: u32,
}

impl Default for ConvPart {
    /// None.
    fn default() -> Self {
        Self {
            x: 0,
            gate_in: 0,
            gate_out: 0,
            weight: 0,
            bias: 0,
            out: 0,
            state: 0,
            num_channels: 0,
            kernel: 0,
            first_cta: u32::MAX,
            activates: 0,
        }
    }
}

/// Convolutions that one launch computes.
pub const MAX_CONVS: usize = 3;

/// `causal_conv`: up to three convolutions over the rows of each request.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CausalConvArgs {
    pub parts: [ConvPart; MAX_CONVS],
    pub requests: DevicePtr,
    pub row_requests: DevicePtr,
    pub slot_stride: u64,
    pub num_rows: u32,
    pub rows_per_cta: u32,
}

/// `mamba2_*`: the scan of Mamba-2.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Mamba2Args {
    pub xbc: DevicePtr,
    pub dt: DevicePtr,
    pub dt_bias: DevicePtr,
    pub a: DevicePtr,
    pub d: DevicePtr,
    pub out: DevicePtr,
    pub states: DevicePtr,
    pub requests: DevicePtr,
    pub slot_stride: u64,
    pub num_heads: u32,
    pub num_groups: u32,
    pub head_dim: u32,
    pub state_dim: u32,
    pub dt_min: f32,
    pub dt_max: f32,
}

/// `gated_delta_*`: the gated delta rule.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct GatedDeltaArgs {
    pub q: DevicePtr,
    pub k: DevicePtr,
    pub v: DevicePtr,
    pub b: DevicePtr,
    pub dt: DevicePtr,
    pub dt_bias: DevicePtr,
    pub a: DevicePtr,
    pub out: DevicePtr,
    pub states: DevicePtr,
    pub requests: DevicePtr,
    pub slot_stride: u64,
    pub num_key_heads: u32,
    pub num_value_heads: u32,
    pub key_dim: u32,
    pub value_dim: u32,
    pub is_grouped: u32,
    pub reserved: u32,
}

/// `gated_norm`: x = rms_norm(x * silu(z)), or x = rms_norm(x) * silu(z), each group of columns with a mean square of its own.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct GatedNormArgs {
    pub x: DevicePtr,
    pub z: DevicePtr,
    pub weight: DevicePtr,
    pub num_rows: u32,
    pub num_groups: u32,
    pub group_dim: u32,
    pub weight_stride: u32,
    pub gates_first: u32,
    pub eps: f32,
}

/// `sigmoid_gate`: x *= sigmoid(gate).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct SigmoidGateArgs {
    pub x: DevicePtr,
    pub gate: DevicePtr,
    pub count: u64,
}

/// What an adapter does to a linear layer.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct LoraDelta {
    pub a: DevicePtr,
    pub b: DevicePtr,
    pub ids: DevicePtr,
    pub bias: DevicePtr,
    pub factors: DevicePtr,
    pub own_bias: DevicePtr,
    pub rank: u32,
    pub reserved: u32,
}

/// What an adapter does to the token embedding.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct LoraEmbedding {
    pub table: DevicePtr,
    pub a: DevicePtr,
    pub b: DevicePtr,
    pub ids: DevicePtr,
    pub rows: DevicePtr,
    pub rank: u32,
    pub num_ids: u32,
}

/// A row of a step with an adapter.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoraRow {
    pub deltas: DevicePtr,
    pub embedding: DevicePtr,
    pub num_sites: u32,
    pub row: u32,
}

/// Rows of a tile of one adapter at most.
pub const LORA_ROWS: usize = 8;

/// Rows of one adapter, which a CTA takes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoraTile {
    pub first_row: u32,
    pub num_rows: u32,
}

/// A linear layer, or as many as there are experts, and what comes of it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct LoraTarget {
    pub out: DevicePtr,
    pub sites: DevicePtr,
    pub site: u32,
    pub out_features: u32,
}

/// `lora_keep`, `lora_shrink`, `lora_expand`: what adapters make of the products of their rows.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct LoraArgs {
    pub x: DevicePtr,
    pub targets: [LoraTarget; MAX_TARGETS],
    pub rows: DevicePtr,
    pub tiles: DevicePtr,
    pub chosen: DevicePtr,
    pub low: DevicePtr,
    pub kept: DevicePtr,
    pub in_features: u32,
    pub num_low: u32,
    pub low_stride: u32,
    pub num_chosen: u32,
    pub first_row: u32,
    pub has_own_x: u32,
    pub scale: f32,
    pub reserved: u32,
}

/// `lora_embed`: rows of the token embedding with adapters.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct LoraEmbedArgs {
    pub out: DevicePtr,
    pub token_ids: DevicePtr,
    pub rows: DevicePtr,
    pub cols: u32,
    pub scale: f32,
}

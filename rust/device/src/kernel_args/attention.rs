//! Arguments of attention, and of what writes its cache.

use super::DevicePtr;

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
    pub v_norm: HeadNormArgs,
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
    pub positions: DevicePtr,
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
    pub scale_length: u32,
    pub scale_offset: u32,
    pub scale_beta: f32,
    pub reserved: u32,
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

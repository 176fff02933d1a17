//! Arguments of products with weights, and of what reads weights otherwise.

use super::DevicePtr;

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
    pub vocab_size: u32,
    pub beyond: u32,
    pub scale: f32,
    pub reserved: u32,
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
    pub vocab_size: u32,
    pub beyond: u32,
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

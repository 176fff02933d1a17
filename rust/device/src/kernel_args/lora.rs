//! Arguments of adapters.

use super::{DevicePtr, MAX_TARGETS};

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
    pub has_own_x: u32,
    pub scale: f32,
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

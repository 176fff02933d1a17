//! Arguments of the CUDA kernels: each struct mirrors the one of the same name in `kernels/args.h`, where the fields are
//! described.
//!
//! Pointers are device addresses. A struct is the only argument of its kernel, passed by value.

#![allow(missing_docs, reason = "kernels/args.h describes each field; two copies would part ways")]

mod attention;
mod layers;
mod lora;
mod products;
mod sample;

pub use attention::*;
pub use layers::*;
pub use lora::*;
pub use products::*;
pub use sample::*;

use crate::MAX_STREAMS;

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
    Swish = 3,
    Clamped = 4,
    Relu = 5,
    Relu2 = 6,
    Xielu = 7,
    Identity = 8,
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
    pub positive: f32,
    pub negative: f32,
    pub linear: f32,
    pub eps: f32,
}

/// `scale_and_clamp`: x *= scale, then within least and most.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ScaleAndClampArgs {
    pub x: DevicePtr,
    pub count: u64,
    pub scale: f32,
    pub least: f32,
    pub most: f32,
    pub reserved: u32,
}

/// `layer_inputs`: x = (norm(x) + tokens) * scale, an RMS norm of each part.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct LayerInputsArgs {
    pub x: DevicePtr,
    pub tokens: DevicePtr,
    pub weight: DevicePtr,
    pub num_parts: u32,
    pub width: u32,
    pub eps: f32,
    pub scale: f32,
}

/// `streams_predict`, `streams_correct`: residual streams of rows, mixed with each other or changed by what a layer has.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct StreamsArgs {
    pub streams: [DevicePtr; MAX_STREAMS],
    pub routed: DevicePtr,
    pub coefficients: DevicePtr,
    pub scale: DevicePtr,
    pub hidden: DevicePtr,
    pub num_rows: u32,
    pub cols: u32,
    pub num_streams: u32,
    pub active: u32,
}

/// `add_rows`, `match_size`, `keep_largest`: rows beside others, or by themselves.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct StreamRowsArgs {
    pub x: DevicePtr,
    pub other: DevicePtr,
    pub num_rows: u32,
    pub cols: u32,
    pub value: f32,
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

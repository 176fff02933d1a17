//! Arguments of what reads logits.

use super::DevicePtr;

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

//! Weight formats: their block layouts and exact dequantisation.
//!
//! Every ggml block format here is a list of small integers, the codes, in groups that share a scale and sometimes a minimum:
//! `value = scale * code` or `scale * code + min`, multiplied and then added in f32. [`unpack_block`] says what the three are; exact
//! dequantisation and the packing of the fast kernels both start from it.

mod k_quants;
mod legacy;
mod mxfp4;

use half::f16;

use crate::{DType, GgmlType};

/// Most values in a block of any format.
const MAX_BLOCK: usize = 256;

/// One block, taken apart.
pub(crate) struct BlockCodes {
    /// One a value.
    pub codes: [i8; MAX_BLOCK],
    /// One a group.
    pub scales: [f32; MAX_BLOCK / 16],
    /// One a group; only what [`has_min`] formats fill.
    pub mins: [f32; MAX_BLOCK / 16],
    /// What scales and minima are products of in [`has_factors`] formats: one of each for the block, ...
    pub units: [f32; 2],
    /// ... and of each one a group.
    pub factors: [[i8; MAX_BLOCK / 16]; 2],
}

impl BlockCodes {
    pub const fn new() -> Self {
        Self {
            codes: [0; MAX_BLOCK],
            scales: [0.0; MAX_BLOCK / 16],
            mins: [0.0; MAX_BLOCK / 16],
            units: [0.0; 2],
            factors: [[0; MAX_BLOCK / 16]; 2],
        }
    }

    /// Sets scales and minima from their units and factors.
    fn multiply(&mut self) {
        for ((out, unit), factors) in [&mut self.scales, &mut self.mins].into_iter().zip(self.units).zip(&self.factors) {
            for (out, factor) in out.iter_mut().zip(factors) {
                *out = unit * f32::from(*factor);
            }
        }
    }
}

/// Values that share a scale.
pub(crate) const fn group_len(format: GgmlType) -> usize {
    match format {
        GgmlType::Q2K | GgmlType::Q3K | GgmlType::Q6K => 16,
        _ => 32,
    }
}

/// Whether a minimum is added to each group.
pub(crate) const fn has_min(format: GgmlType) -> bool {
    matches!(format, GgmlType::Q4_1 | GgmlType::Q5_1 | GgmlType::Q2K | GgmlType::Q4K | GgmlType::Q5K)
}

/// Whether scales and minima are quantised themselves.
pub(crate) const fn has_factors(format: GgmlType) -> bool {
    matches!(format, GgmlType::Q2K | GgmlType::Q3K | GgmlType::Q4K | GgmlType::Q5K | GgmlType::Q6K)
}

/// Takes one block of `format.block_bytes()` bytes apart.
pub(crate) fn unpack_block(format: GgmlType, bytes: &[u8], out: &mut BlockCodes) {
    match format {
        GgmlType::Q4_0 => legacy::q4_0(bytes, out),
        GgmlType::Q4_1 => legacy::q4_1(bytes, out),
        GgmlType::Q5_0 => legacy::q5_0(bytes, out),
        GgmlType::Q5_1 => legacy::q5_1(bytes, out),
        GgmlType::Q8_0 => legacy::q8_0(bytes, out),
        GgmlType::Q2K => k_quants::q2_k(bytes, out),
        GgmlType::Q3K => k_quants::q3_k(bytes, out),
        GgmlType::Q4K => k_quants::q4_k(bytes, out),
        GgmlType::Q5K => k_quants::q5_k(bytes, out),
        GgmlType::Q6K => k_quants::q6_k(bytes, out),
        GgmlType::Mxfp4 => mxfp4::mxfp4(bytes, out),
    }
}

/// Writes the values of one stored row to `out`, `[cols]`, bit for bit as gguf-py computes them.
///
/// # Panics
/// When `bytes` is not exactly a row of `out.len()` values.
pub fn dequantize_row(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(dtype.row_bytes(out.len()), Some(bytes.len()), "bytes of a {dtype} row of {} values", out.len());
    match dtype {
        DType::F32 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *o = f32::from_le_bytes(*b);
            }
        }
        DType::F16 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *o = f16::from_le_bytes(*b).to_f32();
            }
        }
        DType::BF16 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *o = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
            }
        }
        DType::Ggml(format) => dequantize_blocks(format, bytes, out),
    }
}

fn dequantize_blocks(format: GgmlType, bytes: &[u8], out: &mut [f32]) {
    let group = group_len(format);
    let mut block = BlockCodes::new();
    for (bytes, out) in bytes.chunks_exact(format.block_bytes()).zip(out.chunks_exact_mut(format.block_len())) {
        unpack_block(format, bytes, &mut block);
        for (g, (out, codes)) in out.chunks_exact_mut(group).zip(block.codes.chunks_exact(group)).enumerate() {
            let scale = block.scales[g];
            for (o, c) in out.iter_mut().zip(codes) {
                *o = scale * f32::from(*c);
            }
            if has_min(format) {
                for o in out {
                    *o += block.mins[g];
                }
            }
        }
    }
}

/// The f16 at byte `at` of a block.
fn f16_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

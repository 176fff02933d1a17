//! Float weights, and quantized ones dequantized a panel at a time: the exact path, and the fast one of F32, F16 and BF16.
//!
//! Every output is summed over K in one order, whatever the rows of the step or the threads: 16 partial sums (column k into sum k
//! mod 16, by increasing k), then added pairwise. AVX ISAs fuse each multiplication with its addition, the portable one does not.

// A helper that is not inlined would be compiled for the baseline instructions only.
#![allow(clippy::inline_always)]

use super::{
    PANEL, ROWS,
    elementwise::{LANES, add_lanes},
};
use crate::{DType, WeightView, cpu::Isa, quant::dequantize_row};

/// Element types that kernels read; the numbers are what they are generic over.
pub(super) const F32: u8 = 0;
pub(super) const F16: u8 = 1;
pub(super) const BF16: u8 = 2;

/// Rows of a weight in the order of the file, as floats.
#[derive(Clone, Copy)]
pub(super) struct FloatRows<'a> {
    bytes: &'a [u8],
    dtype: u8,
    rows: usize,
    cols: usize,
}

/// Bytes of an element.
pub(super) const fn element_bytes(dtype: u8) -> usize {
    if dtype == F32 { 4 } else { 2 }
}

/// Bytes ahead of use that a kernel prefetches each row of a weight, of several rows that have so many bytes together. Short rows
/// end before a prefetch within them pays: then the next rows are fetched.
#[cfg(target_arch = "x86_64")]
pub(super) const fn ahead(bytes: usize) -> usize {
    if bytes <= 16 << 10 { bytes } else { 1024 }
}

/// `out[m][n] = dot(weight row n, x row m)` for `rows` weight rows of `bytes` and as many rows of `x` as of `out`, all of `cols`
/// columns. A kernel of an ISA above the machine's must not be called.
pub(super) type Kernel = unsafe fn(bytes: &[u8], rows: usize, cols: usize, x: &[f32], out: &mut [[f32; PANEL]]);

/// Rows `start..end` of a weight, at most a panel, through `buffer` where they need dequantizing.
pub(super) fn float_rows<'a>(weight: &'a WeightView, start: usize, end: usize, buffer: &'a mut [f32]) -> FloatRows<'a> {
    let (rows, cols) = (end - start, weight.cols);
    let stored =
        |dtype| FloatRows { bytes: &weight.bytes()[start * weight.row_bytes()..end * weight.row_bytes()], dtype, rows, cols };
    match weight.dtype {
        DType::F32 => stored(F32),
        DType::F16 => stored(F16),
        DType::BF16 => stored(BF16),
        DType::Ggml(_) => {
            for (i, out) in buffer.chunks_exact_mut(cols.max(1)).take(rows).enumerate() {
                dequantize_row(weight.dtype, weight.row(start + i), out);
            }
            let values = &buffer[..rows * cols];
            // SAFETY: any f32 is four bytes without padding; u8 has no alignment.
            let bytes = unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) };
            FloatRows { bytes, dtype: F32, rows, cols }
        }
    }
}

impl FloatRows<'_> {
    /// `out[m][n] = dot(row n, x row m)`, of as many rows of `x`, `[rows, cols]`, as `out` has. `isa` is not above the machine's.
    pub(super) fn multiply(&self, isa: Isa, x: &[f32], out: &mut [[f32; PANEL]]) {
        debug_assert!(self.rows <= PANEL);
        let x = &x[..out.len() * self.cols];
        let kernel: Kernel = match (isa, self.dtype) {
            #[cfg(target_arch = "x86_64")]
            (Isa::Amx | Isa::Avx512, F32) => super::float_avx512::multiply::<F32>,
            #[cfg(target_arch = "x86_64")]
            (Isa::Amx | Isa::Avx512, F16) => super::float_avx512::multiply::<F16>,
            #[cfg(target_arch = "x86_64")]
            (Isa::Amx | Isa::Avx512, _) => super::float_avx512::multiply::<BF16>,
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, F32) => super::float_avx2::multiply::<F32>,
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, F16) => super::float_avx2::multiply::<F16>,
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, _) => super::float_avx2::multiply::<BF16>,
            (_, F32) => scalar::<F32>,
            (_, F16) => scalar::<F16>,
            _ => scalar::<BF16>,
        };
        // SAFETY: `CpuLinear::new` refuses an ISA above the machine's, so the kernel's instructions exist.
        unsafe { kernel(self.bytes, self.rows, self.cols, x, out) }
    }
}

/// Up to 16 elements from the start of `bytes` as f32, zeros after the last.
#[inline(always)]
pub(super) fn widen<const D: u8>(bytes: &[u8]) -> [f32; LANES] {
    let mut out = [0.0; LANES];
    let n = (bytes.len() / element_bytes(D)).min(LANES);
    let dtype = match D {
        F32 => DType::F32,
        F16 => DType::F16,
        _ => DType::BF16,
    };
    dequantize_row(dtype, &bytes[..n * element_bytes(D)], &mut out[..n]);
    out
}

/// Up to 16 values from the start of `x`, zeros after the last.
#[inline(always)]
pub(super) fn pad(x: &[f32]) -> [f32; LANES] {
    let mut out = [0.0; LANES];
    let n = x.len().min(LANES);
    out[..n].copy_from_slice(&x[..n]);
    out
}

fn scalar<const D: u8>(bytes: &[u8], rows: usize, cols: usize, x: &[f32], out: &mut [[f32; PANEL]]) {
    if cols == 0 {
        return out.fill([0.0; PANEL]);
    }
    let row_bytes = cols * element_bytes(D);
    for (x, out) in x.chunks(ROWS * cols).zip(out.chunks_mut(ROWS)) {
        for n in 0..rows {
            let row = &bytes[n * row_bytes..(n + 1) * row_bytes];
            let mut lanes = [[0.0f32; LANES]; ROWS];
            for (c, w) in row.chunks(LANES * element_bytes(D)).enumerate() {
                let w = widen::<D>(w);
                for (lanes, x) in lanes.iter_mut().zip(x.chunks_exact(cols)) {
                    let x = pad(&x[c * LANES..]);
                    for i in 0..LANES {
                        lanes[i] += w[i] * x[i];
                    }
                }
            }
            for (out, lanes) in out.iter_mut().zip(lanes) {
                out[n] = add_lanes(lanes);
            }
        }
    }
}

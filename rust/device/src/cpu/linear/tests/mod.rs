//! Oracle: exact dequantization and a matmul in f64.

mod kernels;
mod largest;
mod phases;
#[path = "../../../../kernel-tests/src/scales.rs"]
mod scales;

use half::f16;

use super::{act_block::BLOCK, tiled::PanelForm, *};
use crate::{DType, GgmlType, Norm, NormKind, Projection, Tensor, mmap::Bytes, quant::dequantize_row};

fn isas() -> Vec<Isa> {
    Isa::ALL.into_iter().filter(|t| *t <= Isa::detect()).collect()
}

fn dtypes() -> Vec<DType> {
    [DType::F32, DType::F16, DType::BF16].into_iter().chain(GgmlType::ALL.map(DType::Ggml)).collect()
}

/// Makes those bytes of a block that are not codes, and not any byte is right for, scales of about some value.
fn set_scales(format: GgmlType, block: &mut [u8], scale: &mut dyn FnMut() -> f32) {
    match format {
        GgmlType::Mxfp4 => block[0] = 120,
        GgmlType::Nvfp4 => block[..4].iter_mut().for_each(|scale| *scale &= 0x27),
        // The upper bits of an f16 in quarters: from 2^-11 to 2^-7.
        GgmlType::Iq1M => block[55] = block[55] & 0x8f | 0x10,
        _ => {}
    }
    for at in scales::f16_scales(format) {
        block[*at..at + 2].copy_from_slice(&f16::from_f32(scale()).to_le_bytes());
    }
}

/// xorshift64*.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(super) fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// In -1..1.
    pub(super) fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub(super) fn tensor(&mut self, rows: usize, cols: usize) -> Tensor {
        let mut t = Tensor::new(rows, cols).expect("memory");
        t.set_rows(rows);
        // Rows of different sizes, and a few outliers, as activations have.
        for (i, row) in t.as_mut_slice().chunks_exact_mut(cols.max(1)).enumerate() {
            for v in row {
                *v = self.unit() * (1 + i % 5) as f32 * if self.bits().is_multiple_of(37) { 8.0 } else { 1.0 };
            }
        }
        t
    }

    pub(super) fn weight(&mut self, dtype: DType, rows: usize, cols: usize) -> WeightView {
        let mut bytes = vec![0u8; rows * dtype.row_bytes(cols).expect("whole blocks")];
        match dtype {
            DType::F32 => bytes.as_chunks_mut::<4>().0.iter_mut().for_each(|b| *b = self.unit().to_le_bytes()),
            DType::F16 => bytes.as_chunks_mut::<2>().0.iter_mut().for_each(|b| *b = f16::from_f32(self.unit()).to_le_bytes()),
            DType::BF16 => {
                bytes.as_chunks_mut::<2>().0.iter_mut().for_each(|b| *b = half::bf16::from_f32(self.unit()).to_le_bytes());
            }
            DType::Ggml(format) => {
                for block in bytes.chunks_exact_mut(format.block_bytes()) {
                    block.fill_with(|| self.bits() as u8);
                    set_scales(format, block, &mut || self.unit() * 0.02);
                    if format == GgmlType::Mxfp4 {
                        block[0] = 116 + (self.bits() % 10) as u8;
                    }
                }
            }
        }
        WeightView::new(dtype, rows, cols, Bytes::from_vec(bytes)).expect("a valid weight")
    }

    pub(super) fn vec(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.unit()).collect()
    }

    fn norm(&mut self, kind: NormKind, dim: usize) -> Norm {
        let bias = (kind == NormKind::Layer).then(|| self.vec(dim).into());
        Norm { kind, weight: self.vec(dim).iter().map(|v| v + 1.5).collect::<Vec<_>>().into(), bias, eps: 1e-5 }
    }
}

pub(super) fn dequantize(weight: &WeightView) -> Vec<f32> {
    let mut out = vec![0.0; weight.rows * weight.cols];
    for (i, row) in out.chunks_exact_mut(weight.cols).enumerate() {
        dequantize_row(weight.dtype, weight.row(i), row);
    }
    out
}

/// What a linear layer with activations as integers sees of `x`, `[rows, cols]`, written plainly.
fn through_integers(isa: Isa, x: &[f32], cols: usize) -> Vec<f32> {
    let ratio = if isa == Isa::Amx { 0.0 } else { 2.0 };
    let largest = |block: &[f32]| block.iter().fold(0f32, |m, v| m.max(v.abs()));
    let row = |x: &[f32]| {
        let mean = x.chunks(BLOCK).map(largest).sum::<f32>() / (cols / BLOCK) as f32;
        let block = |x: &[f32]| {
            let max = largest(x);
            let code = |v: &f32| (v * if max > 0.0 { 16256.0 / max } else { 0.0 }).round_ties_even();
            let coarse = |code: f32| ((code + 64.0) / 128.0).floor() * 128.0;
            x.iter().map(|v| max / 16256.0 * if max > ratio * mean { code(v) } else { coarse(code(v)) }).collect::<Vec<_>>()
        };
        x.chunks(BLOCK).flat_map(block).collect::<Vec<_>>()
    };
    x.chunks(cols).flat_map(row).collect()
}

/// `x @ weight^T` and, for bounds, `|x| @ |weight|^T`.
fn oracle(x: &[f32], weight: &WeightView) -> (Vec<f64>, Vec<f64>) {
    oracle_of(x, weight.cols, &dequantize(weight))
}

/// Likewise, of weights `[n, cols]`.
pub(super) fn oracle_of(x: &[f32], cols: usize, weight: &[f32]) -> (Vec<f64>, Vec<f64>) {
    let mut out = (Vec::new(), Vec::new());
    for x in x.chunks_exact(cols) {
        for w in weight.chunks_exact(cols) {
            let products = || x.iter().zip(w).map(|(a, b)| f64::from(*a) * f64::from(*b));
            out.0.push(products().sum());
            out.1.push(products().map(f64::abs).sum());
        }
    }
    out
}

pub(super) fn options(precision: Precision, bias: Option<Vec<f32>>) -> LinearOptions {
    LinearOptions { name: "w".to_owned(), precision, bias }
}

pub(super) fn linear(weight: &WeightView, precision: Precision, isa: Isa, pool: &ThreadPool) -> Linear {
    CpuLinear::new(weight, &options(precision, None), isa, pool).expect("a linear layer").into()
}

/// `x @ weight^T`.
pub(super) fn project(context: LinearContext<'_>, scratch: &mut LinearScratch, x: &Tensor, linear: &Linear) -> Vec<f32> {
    let mut out = Tensor::new(x.rows(), linear.out_features).expect("memory");
    norm_linear(context, scratch, x, None, &mut [Projection { linear, out: &mut out }]);
    assert_eq!(out.rows(), x.rows());
    out.as_slice().to_vec()
}

/// What a linear layer with bf16 activations sees of `x`.
pub(super) fn through_bf16(x: &[f32]) -> Vec<f32> {
    x.iter().map(|v| half::bf16::from_f32(*v).to_f32()).collect()
}

/// Whether a fast weight of `k` columns and its activations are rounded to bf16.
fn in_bf16(isa: Isa, dtype: DType, k: usize) -> bool {
    isa.multiplies_bf16() && PanelForm::of(dtype, k, isa) == Some(PanelForm::Bf16Pairs)
}

/// Whether fast weights are multiplied by tiles of f16, or packed ones by tiles of bf16, where there are only those.
fn in_tiles(isa: Isa, rows: usize, dtype: DType, k: usize) -> bool {
    let weight = matches!(dtype, DType::Ggml(_)) || in_f16(isa, dtype, k);
    weight && tiles::min_rows(isa).is_some_and(|min| rows >= min)
}

/// Whether a fast float weight of `k` columns is rounded to f16.
fn in_f16(isa: Isa, dtype: DType, k: usize) -> bool {
    PanelForm::of(dtype, k, isa) == Some(PanelForm::F16Pairs)
}

/// Rounding of f32 sums, relative to their magnitude.
const ROUNDING: f64 = 2e-6;
/// The largest errors of f16 tiles, likewise.
const F16_ROUNDING: f64 = 2e-3;
/// Of weights in f16 that were f32.
const F16_WEIGHT_ROUNDING: f64 = 5e-4;

/// How far a fast product may be from what its kernels see.
fn rounding(isa: Isa, rows: usize, dtype: DType, k: usize) -> f64 {
    match dtype {
        _ if in_tiles(isa, rows, dtype, k) => F16_ROUNDING,
        DType::F32 if in_f16(isa, dtype, k) => F16_WEIGHT_ROUNDING,
        _ => ROUNDING,
    }
}

/// Values as f16, each `chunk` of them scaled by a power of two.
pub(super) fn through_f16(values: &[f32], chunk: usize) -> Vec<f32> {
    let chunks = values.chunks(chunk).flat_map(|values| {
        let largest = values.iter().fold(0f32, |m, v| m.max(v.abs()));
        let unit = if largest > 0.0 { 2f32.powf(13.0 - largest.log2().floor()) } else { 1.0 };
        values.iter().map(move |v| f16::from_f32(v * unit).to_f32() / unit)
    });
    chunks.collect()
}

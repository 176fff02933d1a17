//! Weights that are packed for tensor cores, and products with them.

use device::{DType, Precision, WeightView, cuda::packed::PackedFormat, mmap::Bytes};
use half::bf16;

use crate::{
    Kernel,
    random::Rng,
    weight::{Weight, kernel_suffix},
};

/// A weight in both forms.
pub struct Packed {
    /// As in its file.
    pub weight: Weight,
    /// How it is packed.
    pub format: PackedFormat,
    /// Packed.
    pub bytes: Vec<u8>,
}

impl Packed {
    /// Random numbers, with as many columns as `cols` or a whole block more.
    ///
    /// # Panics
    /// When the format is not packed.
    pub fn random(format: DType, rows: usize, cols: usize, rng: &mut Rng) -> Self {
        let DType::Ggml(ggml) = format else { unreachable!("floats are not packed") };
        let cols = cols.next_multiple_of(ggml.block_len());
        let weight = Weight::random(format, rows, cols, rng);
        let packed = PackedFormat::of(format, Precision::Fast).unwrap();
        let view = WeightView::new(format, rows, cols, Bytes::from_vec(weight.bytes.clone())).unwrap();
        let bytes = packed.pack(&view, 2);
        assert_eq!(bytes.len(), packed.bytes([rows, cols]));
        Self { weight, format: packed, bytes }
    }

    /// Bytes from a panel to the next one.
    pub fn panel_bytes(&self) -> u64 {
        self.format.panel_bytes(self.weight.cols) as u64
    }

    /// A kernel of the format; `suffix` follows the format's part of the name.
    pub fn kernel(&self, family: &str, suffix: &str) -> Kernel {
        Kernel::named(&format!("{family}_{}{suffix}", kernel_suffix(self.weight.format)))
    }
}

/// Those that are packed.
pub fn formats() -> impl Iterator<Item = DType> {
    DType::all().filter(|format| PackedFormat::of(*format, Precision::Fast).is_some())
}

/// What a product is made of besides the weight.
pub struct Product {
    /// `[rows, x_stride]`.
    pub x: Vec<f32>,
    /// Values from a row to the next one.
    pub x_stride: usize,
    /// Of each feature.
    pub bias: Option<Vec<f32>>,
    /// What the output holds before, `[rows, out_stride]`.
    pub before: Vec<f32>,
    /// Values from a row to the next one.
    pub out_stride: usize,
    /// Whether the product is added to it.
    pub accumulate: bool,
    /// Stages of a piece.
    pub part_stages: usize,
}

/// What products are scaled by.
pub const SCALE: f32 = 0.75;

impl Product {
    /// Random numbers for so many rows, bias and sums as they come.
    pub fn random(packed: &Packed, rows: usize, part_stages: usize, rng: &mut Rng) -> Self {
        let (x_stride, out_stride) = (packed.weight.cols + 8, packed.weight.rows + 3);
        Self {
            x: rng.floats(rows * x_stride),
            x_stride,
            bias: (rng.below(2) == 0).then(|| rng.floats(packed.weight.rows)),
            before: rng.floats(rows * out_stride),
            out_stride,
            accumulate: rng.below(2) == 0,
            part_stages,
        }
    }

    /// The products of exact weights and rounded activations.
    pub fn expected(&self, packed: &Packed, rows: usize) -> Vec<f32> {
        self.expected_of(packed, rows, |w| w)
    }

    /// The same of what `weight` makes of each value.
    pub fn expected_of(&self, packed: &Packed, rows: usize, weight: impl Fn(f32) -> f32) -> Vec<f32> {
        let Weight { cols, values, .. } = &packed.weight;
        let values: Vec<f32> = values.iter().map(|w| weight(*w)).collect();
        let mut out = self.before[..rows * self.out_stride].to_vec();
        for (out, x) in out.chunks_exact_mut(self.out_stride).zip(self.x.chunks_exact(self.x_stride)) {
            for (n, w) in values.chunks_exact(*cols).enumerate() {
                let dot: f64 = w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(bf16::from_f32(*x).to_f32())).sum();
                let sum = (dot + self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[n]))) * f64::from(SCALE);
                out[n] = (sum + if self.accumulate { f64::from(out[n]) } else { 0.0 }) as f32;
            }
        }
        out
    }
}
